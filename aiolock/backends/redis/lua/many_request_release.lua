-- many_request_release: ask all holders of a lock to release it.
-- KEYS[1] the lock. ARGV: 1 the reason. Returns 1 if there is a holder, 0 also for holds that are kept after their release.
-- Safe: changes nothing but ``asked``, which the next renewals read as well, should messages be lost. It carries the time,
-- so that it is not taken for later holders'.
local t = redis.call('TIME')
local now, found, all = t[1] * 1000000 + t[2], 0, redis.call('HGETALL', KEYS[1])
-- include messages
local asked = string.format('%.0f %s', now, ARGV[1])
for i = 1, #all, 2 do
  local request = string.match(all[i], '^h:(.*)$')
  if request and string.sub(request, 1, 2) ~= '0:' and tonumber(string.match(all[i + 1], '^%d+')) > now then
    tell(1, string.match(request, '^%x+'), 'a ' .. request .. ' ' .. asked)
    found = 1
  end
end
if found == 1 then
  redis.call('HDEL', KEYS[1], 'asked')
  redis.call('HSET', KEYS[1], 'asked', asked)
end
return found
