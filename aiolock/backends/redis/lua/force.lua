-- force: take the lock from its holder, notify it, and grant the next waiter. For administrators.
-- KEYS[1] the lock. ARGV: 1 floor, 2 the token of the only hold that is taken, or nothing. Returns {1 if there was a holder, ms of a confirmation window}.
-- A hold that is kept after its release, or that has expired, has no token. Safe in one atomic step; the old holder's validity may overlap with the next one's, which is why it is notified.
local f = redis.call('HMGET', KEYS[1], 'owner', 'until', 'token', 'top', 'present')
local owner = f[1]
if not owner then return {0, 0} end
local t = redis.call('TIME')
-- include current
if ARGV[2] ~= '' and (string.sub(owner, 1, 2) == '0:' or tonumber(f[2]) <= t[1] * 1000000 + t[2]
  or not current(ARGV[2], f[3], f[4], f[5])) then return {0, 0} end
-- include tokens
-- include serve
redis.call('HDEL', KEYS[1], 'owner')
redis.call('HSET', KEYS[1], 'forced', owner)
tell(1, string.match(owner, '^%x+'), 'f ' .. owner)
return {1, serve(1, t[1] * 1000000 + t[2], '', tonumber(ARGV[1]))}
