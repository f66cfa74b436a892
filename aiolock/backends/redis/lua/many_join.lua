-- many_join: join the queue of a lock with several holders. Part of many_enter.
-- Returns the ticket, and whether it is the first. The first waiter is notified to a writer, which may be handing the lock
-- over in its own process; without the right to publish, the writer learns of it with its next renewal.
-- include join
local function join(nth, request, now, position, record)
  local f = redis.call('HMGET', KEYS[nth], 'r:' .. request, 'head', 'tail', 'used', 'last')
  local ticket, head, tail, life = tonumber(f[1]), tonumber(f[2] or 0), tonumber(f[3] or 0), nil
  if ticket then return ticket, ticket == head end
  ticket, life = join_queue(nth, request, now, position, record, head, tail)
  stay(nth, life + 60000)
  if head == tail and tonumber(f[4] or 0) >= 1073741824 and f[5] then
    tell(nth, string.match(f[5], '^%x+'), 'd ' .. f[5])
  end
  return ticket, ticket <= head
end
