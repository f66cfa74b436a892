-- many_force: take a lock from all its holders, notify them, and grant the next waiters. For administrators.
-- KEYS[1] the lock. ARGV: 1 floor. Returns {1 if there was a holder, ms of the shortest confirmation window}.
-- Safe in one atomic step; the validity of the old holds may overlap with the next ones', which is why they are notified.
local f = redis.call('HMGET', KEYS[1], 'limit', 'used')
if not f[1] or f[2] == '0' then return {0, 0} end
-- include tokens
-- include positions
-- include many_hold
-- include many_serve
local t = redis.call('TIME')
local now, all = t[1] * 1000000 + t[2], redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local request = string.match(all[i], '^h:(.*)$')
  if request then
    redis.call('HDEL', KEYS[1], all[i])
    redis.call('HSET', KEYS[1], 'z:' .. request, now)
    tell(1, string.match(request, '^%x+'), 'f ' .. request)
  end
end
redis.call('HSET', KEYS[1], 'used', 0)
return {1, (serve(1, now, '', tonumber(ARGV[1]), 0, tonumber(f[1])))}
