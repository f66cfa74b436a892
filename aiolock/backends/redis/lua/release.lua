-- release: give up a hold, and grant the next waiter.
-- KEYS[1] the lock. ARGV: 1 request, 2 floor.
-- Returns -2 if the request has no hold (any more), else 0 without a waiter, ms of the confirmation window of the next holder, -1 to go on.
-- Safe: compares the owner, in one atomic step; again it does nothing. Begins with a write that needs no memory, so
-- that a full server cannot make a lock unreleasable.
local f = redis.call('HMGET', KEYS[1], 'owner', 'head', 'tail')
if f[1] ~= ARGV[1] then return -2 end
if f[2] == f[3] then
  redis.call('HDEL', KEYS[1], 'owner')
  return 0
end
-- include tokens
-- include serve
local t = redis.call('TIME')
return serve(1, t[1] * 1000000 + t[2], '', tonumber(ARGV[2]))
