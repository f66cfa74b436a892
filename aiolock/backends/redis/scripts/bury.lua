-- bury: put up a tombstone for a request that may still arrive, and take away four that are old enough.
-- Part of leave and many_leave. They stand for 60 s, as long as a packet may be late; the key must stand longer than that.
-- Begins with a write that needs no memory, so that a full server keeps nothing.
local function bury(lock, request, now)
  redis.call('HDEL', lock, 'x:' .. request)
  local x = redis.call('HMGET', lock, 'xhead', 'xtail')
  local head, tail = tonumber(x[1] or 0), tonumber(x[2] or 0)
  for n = head, math.min(tail, head + 4) - 1 do
    local old, at = string.match(redis.call('HGET', lock, 'y:' .. n), '^(%S+) (%d+)$')
    if now - at < 60000000 then break end
    redis.call('HDEL', lock, 'y:' .. n, 'x:' .. old)
    head = n + 1
  end
  redis.call('HSET', lock, 'x:' .. request, 1, 'y:' .. tail, string.format('%s %.0f', request, now),
    'xhead', head, 'xtail', tail + 1)
end
