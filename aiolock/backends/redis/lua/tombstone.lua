-- tombstone: add a tombstone for a request that may still arrive, and remove up to four that are old enough, or too many.
-- Part of leave and many_leave. Tombstones stand for 60 s, as long as a packet may be late; the key must stand longer than that.
-- At most 250 stand, and the oldest go first, so that a flood of cancelled requests cannot make a lock slow: some scripts read
-- the whole key. Safe: exclusion does not depend on a tombstone. It keeps a late copy of a request from taking the lock or a
-- position in vain. Most copies are not late, because they and their ``leave`` come in order on one connection; one that
-- is, after 250 more were cancelled on the same lock, is granted like any request and costs the lock one ttl at most,
-- because it is not renewed. A tombstone from a time later than now stood there when the clock was set back.
-- Begins with a write that needs no memory, so that a full server keeps nothing.
local function add_tombstone(nth, request, now)
  redis.call('HDEL', KEYS[nth], 'x:' .. request)
  local x = redis.call('HMGET', KEYS[nth], 'xhead', 'xtail')
  local head, tail = tonumber(x[1] or 0), tonumber(x[2] or 0)
  for n = head, math.min(tail, head + 4) - 1 do
    local old, at = string.match(redis.call('HGET', KEYS[nth], 'y:' .. n), '^(%S+) (%d+)$')
    if tail - head < 250 and now - at < 60000000 and now - at > -60000000 then break end
    redis.call('HDEL', KEYS[nth], 'y:' .. n, 'x:' .. old)
    head = n + 1
  end
  redis.call('HSET', KEYS[nth], 'x:' .. request, 1, 'y:' .. tail, string.format('%s %.0f', request, now),
    'xhead', head, 'xtail', tail + 1)
end
