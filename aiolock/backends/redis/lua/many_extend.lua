-- many_extend: set the life of a hold that is not renewed, of a lock with several holders.
-- KEYS, ARGV and answers are those of extend.
-- Safe: touches its own field only, and compares the number with that of the last request that was carried out: a late copy changes
-- nothing. Begins with a write that needs no memory.
-- include many_hold
local request = ARGV[1]
local f = redis.call('HMGET', KEYS[1], 'h:' .. request, 'head', 'tail', 'keep', 'z:' .. request, 'next')
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if not f[1] then return {now, f[5] and -1 or 0} end
prolong(1, request, f[1], now + ARGV[2] * 1000, ARGV[2], f[6], tonumber(ARGV[3]))
stay(1, ARGV[2] + (f[4] or 60000))
return {now, f[2] == f[3] and 1 or 2}
