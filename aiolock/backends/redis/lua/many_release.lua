-- many_release: give up a hold, and grant the waiters that fit now.
-- KEYS[1] the lock. ARGV: 1 request, 2 floor.
-- Returns -2 if the request has no hold (any more), else 0 if no waiter was granted, ms of the shortest confirmation window, -1 to go on.
-- Safe: takes only its own field, in one atomic step; again it does nothing. Begins with a write that needs no memory.
local hold_of = 'h:' .. ARGV[1]
local f = redis.call('HMGET', KEYS[1], hold_of, 'used', 'head', 'tail', 'limit')
if not f[1] then return -2 end
local used = f[2] - string.match(f[1], '^%d+ %d (%d+)')
redis.call('HDEL', KEYS[1], hold_of)
redis.call('HSET', KEYS[1], 'used', used)
if f[3] == f[4] then return 0 end
-- include tokens
-- include positions
-- include many_hold
-- include many_serve
local t = redis.call('TIME')
return (serve(1, t[1] * 1000000 + t[2], '', tonumber(ARGV[2]), used, tonumber(f[5])))
