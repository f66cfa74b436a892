-- join: take a position at the end of the queue, or that of an earlier ticket if it is free. Part of enter and many_join.
-- ``position`` is its life in ms, how the client learns of a grant, and the earlier ticket; ``record`` is what follows the request.
-- Returns the ticket, and the life of the position in ms.
local function join_queue(nth, request, now, position, record, head, tail)
  local mine, life, notified, ticket = string.match(request, '^%x+'), string.match(position, '^(%d+) (%S+) (%-?%d+)$')
  ticket = tonumber(ticket)
  if ticket < 0 or ticket >= tail or redis.call('HEXISTS', KEYS[nth], 'q:' .. ticket) == 1 then ticket = tail end
  local positions = string.match(redis.call('HGET', KEYS[nth], 'p:' .. mine) or '', '(%d+)$') or 0
  redis.call('HSET', KEYS[nth], 'q:' .. ticket, request .. ' ' .. record, 'r:' .. request, ticket,
    'head', math.min(head, ticket), 'tail', math.max(tail, ticket + 1),
    'p:' .. mine, string.format('%.0f %s %d', now + life * 1000, notified, positions + 1))
  return ticket, tonumber(life)
end
