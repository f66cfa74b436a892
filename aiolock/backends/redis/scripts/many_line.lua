-- line_up: take a place at the end of the line, or the one of an earlier ticket if nobody has it. Part of many_enter.
-- ``place`` is its life in ms, how we hear of a grant, and the earlier ticket; ``record`` is what follows the request.
-- Returns the ticket, and whether it is the first. The first one to come is told to a writer, who may be passing the lock
-- on in its own process; who may not publish tells nobody, and the writer learns of it with its next renewal.
local function line_up(lock, request, now, place, record)
  local f = redis.call('HMGET', lock, 'r:' .. request, 'head', 'tail', 'used', 'last')
  local ticket, head, tail = tonumber(f[1]), tonumber(f[2] or 0), tonumber(f[3] or 0)
  if ticket then return ticket, ticket == head end
  local mine, life, hears = string.match(request, '^%x+'), nil, nil
  life, hears, ticket = string.match(place, '^(%d+) (%a) (%-?%d+)$')
  ticket = tonumber(ticket)
  if ticket < 0 or ticket >= tail or redis.call('HEXISTS', lock, 'q:' .. ticket) == 1 then ticket = tail end
  local places = string.match(redis.call('HGET', lock, 'p:' .. mine) or '', '(%d+)$') or 0
  redis.call('HSET', lock, 'q:' .. ticket, request .. ' ' .. record, 'r:' .. request, ticket,
    'head', math.min(head, ticket), 'tail', math.max(tail, ticket + 1),
    'p:' .. mine, string.format('%.0f %s %d', now + life * 1000, hears, places + 1))
  stay(lock, life + 60000)
  if head == tail and tonumber(f[4] or 0) >= 1073741824 and f[5] then
    redis.pcall('PUBLISH', channel(lock, string.match(f[5], '^%x+')), 'd ' .. f[5])
  end
  return ticket, ticket <= head
end
