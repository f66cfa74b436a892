-- force: take the lock from its holder, notify it, and grant the next waiter. For administrators.
-- KEYS[1] the lock. ARGV: 1 floor. Returns {1 if there was a holder, ms of a confirmation window}.
-- Safe in one atomic step; the old holder's validity may overlap with the next one's, which is why it is notified.
local owner = redis.call('HGET', KEYS[1], 'owner')
if not owner then return {0, 0} end
-- include tokens
-- include serve
local t = redis.call('TIME')
redis.call('HDEL', KEYS[1], 'owner')
redis.call('HSET', KEYS[1], 'forced', owner)
tell(1, string.match(owner, '^%x+'), 'f ' .. owner)
return {1, serve(1, t[1] * 1000000 + t[2], '', tonumber(ARGV[1]))}
