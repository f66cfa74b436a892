-- many_limit: give a semaphore another number of permits, and grant the waiters that fit now.
-- KEYS[1] the lock. ARGV: 1 limit, 2 floor. Returns ms of the shortest confirmation window of the waiters that were granted, 0, or -1 to go on.
-- Safe: no holder loses anything; with fewer permits than are held, or none, newcomers wait until enough are there. The number is
-- kept for 24 h after the last use (``keep``), the one that the first user said (``first``) is right as well.
local f = redis.call('HMGET', KEYS[1], 'used', 'head', 'tail')
redis.call('HSET', KEYS[1], 'limit', ARGV[1], 'keep', 86400000)
-- include tokens
-- include positions
-- include many_hold
-- include many_serve
stay(1, 86400000)
if f[2] == f[3] then return 0 end
local t = redis.call('TIME')
return (serve(1, t[1] * 1000000 + t[2], '', tonumber(ARGV[2]), tonumber(f[1] or 0), tonumber(ARGV[1])))
