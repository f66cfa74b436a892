-- ask: ask whoever holds a lock to let go.
-- KEYS[1] the lock. ARGV: 1 why. Returns 1 if anybody holds it; one that is kept for nobody has nobody to ask.
-- Safe: changes nothing but ``asked``, which the holder's next renewal reads as well, should the message be lost. It names
-- the request, so that a later holder is not meant.
local lock = KEYS[1]
local f = redis.call('HMGET', lock, 'owner', 'until')
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if not f[1] or string.sub(f[1], 1, 2) == '0:' or tonumber(f[2]) <= now then return 0 end
-- include place
local asked = string.format('%s %.0f %s', f[1], now, ARGV[1])
redis.call('HDEL', lock, 'asked')
redis.call('HSET', lock, 'asked', asked)
redis.pcall('PUBLISH', channel(lock, string.match(f[1], '^%x+')), 'a ' .. asked)
return 1
