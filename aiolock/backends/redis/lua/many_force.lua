-- many_force: take a lock from all its holders, notify them, and grant the next waiters. For administrators.
-- KEYS[1] the lock. ARGV: 1 floor, 2 the token of the only hold that is taken, or nothing. Returns {1 if there was a holder, ms of the shortest confirmation window}.
-- A hold that is kept after its release, or that has expired, has no token. Safe in one atomic step; the validity of the old holds may overlap with the next ones', which is why they are notified.
local f = redis.call('HMGET', KEYS[1], 'limit', 'used', 'present')
if not f[1] or f[2] == '0' then return {0, 0} end
-- include current
-- include tokens
-- include positions
-- include many_hold
-- include many_serve
local t = redis.call('TIME')
local now, all, used = t[1] * 1000000 + t[2], redis.call('HGETALL', KEYS[1]), 0
for i = 1, #all, 2 do
  local request = string.match(all[i], '^h:(.*)$')
  local ends, weight, token, count = string.match(all[i + 1], '^(%d+) %d (%d+) (%d+) (%d+)')
  if request and ARGV[2] ~= '' and (string.sub(request, 1, 2) == '0:' or tonumber(ends) <= now
    or not current(ARGV[2], token, token + count - 1, f[3])) then
    used = used + weight
  elseif request then
    redis.call('HDEL', KEYS[1], all[i])
    redis.call('HSET', KEYS[1], 'z:' .. request, now)
    tell(1, string.match(request, '^%x+'), 'f ' .. request)
  end
end
if used == tonumber(f[2]) then return {0, 0} end
redis.call('HSET', KEYS[1], 'used', used)
return {1, (serve(1, now, '', tonumber(ARGV[1]), used, tonumber(f[1])))}
