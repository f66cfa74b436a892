-- request_release: ask the holder of a lock to release it.
-- KEYS[1] the lock. ARGV: 1 the reason. Returns 1 if there is a holder, 0 also for a hold that is kept after its release.
-- Safe: changes nothing but ``asked``, which the holder's next renewal reads as well, should the message be lost. It names
-- the request, so that it is not taken for the next holder's.
local f = redis.call('HMGET', KEYS[1], 'owner', 'until')
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if not f[1] or string.sub(f[1], 1, 2) == '0:' or tonumber(f[2]) <= now then return 0 end
-- include messages
local asked = string.format('%s %.0f %s', f[1], now, ARGV[1])
redis.call('HDEL', KEYS[1], 'asked')
redis.call('HSET', KEYS[1], 'asked', asked)
tell(1, string.match(f[1], '^%x+'), 'a ' .. asked)
return 1
