-- many_line: be in the line of a lock with many holders. Part of many_enter.
-- Returns the ticket, and whether it is the first. The first one to come is told to a writer, who may be passing the lock
-- on in its own process; who may not publish tells nobody, and the writer learns of it with its next renewal.
-- include line
local function be_in_line(lock, request, now, place, record)
  local f = redis.call('HMGET', lock, 'r:' .. request, 'head', 'tail', 'used', 'last')
  local ticket, head, tail, life = tonumber(f[1]), tonumber(f[2] or 0), tonumber(f[3] or 0), nil
  if ticket then return ticket, ticket == head end
  ticket, life = line_up(lock, request, now, place, record, head, tail)
  stay(lock, life + 60000)
  if head == tail and tonumber(f[4] or 0) >= 1073741824 and f[5] then
    redis.pcall('PUBLISH', channel(lock, string.match(f[5], '^%x+')), 'd ' .. f[5])
  end
  return ticket, ticket <= head
end
