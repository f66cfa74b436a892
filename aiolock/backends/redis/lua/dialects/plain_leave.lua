-- plain_leave: give up a hold of the plain format, a place among those that wait, and a request that may still arrive.
-- KEYS: 1 the lock, 2 the note beside it. ARGV: 1 owner, 2 whether to leave a tombstone, 3 ms for which the lock stays taken, 4 channel,
-- 5 process, 6 the value that keeps it. Returns 1 if it was held.
-- Safe: only the own value is deleted or replaced. A key of another type is not the own value.
local me = ARGV[1]
local held = redis.pcall('GET', KEYS[1]) == me
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
-- include dialects/sweep
-- include dialects/remember
redis.call('HDEL', KEYS[2], 'w:' .. me)
if ARGV[2] == '1' then
  sweep(now, 250)
  redis.call('HSET', KEYS[2], 'x:' .. me, now)
  remember(60000)
end
if not held then return 0 end
if ARGV[3] == '0' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[6], 'PX', ARGV[3]) end
redis.call('HSET', KEYS[2], 'left', now)
local asked = tonumber(redis.call('HGET', KEYS[2], 'wait'))
if asked and asked <= now and now - asked < 250 then
  redis.call('HSET', KEYS[2], 'pause:' .. ARGV[5], now + 20)
  redis.pcall('PUBLISH', ARGV[4], KEYS[1])
end
remember(60000)
return 1
