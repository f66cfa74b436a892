-- many_ask: ask everybody who is inside to let go.
-- KEYS[1] the lock. ARGV: 1 why. Returns 1 if anybody is; what is kept for nobody has nobody to ask.
-- Safe: changes nothing but ``asked``, which the next renewals read as well, should messages be lost. It carries the time,
-- so that those who enter later are not meant.
local lock = KEYS[1]
local t = redis.call('TIME')
local now, found, all = t[1] * 1000000 + t[2], 0, redis.call('HGETALL', lock)
-- include place
local asked = string.format('%.0f %s', now, ARGV[1])
for i = 1, #all, 2 do
  local request = string.match(all[i], '^h:(.*)$')
  if request and string.sub(request, 1, 2) ~= '0:' and tonumber(string.match(all[i + 1], '^%d+')) > now then
    redis.pcall('PUBLISH', channel(lock, string.match(request, '^%x+')), 'a ' .. request .. ' ' .. asked)
    found = 1
  end
end
if found == 1 then
  redis.call('HDEL', lock, 'asked')
  redis.call('HSET', lock, 'asked', asked)
end
return found
