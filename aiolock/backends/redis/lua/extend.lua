-- extend: set the life of a hold that is not renewed.
-- KEYS[1] the lock. ARGV: 1 request, 2 life ms, 3 number of this among the requests to extend the hold.
-- Returns {server µs, -1 (taken by force), 0 (gone), 1 (held) or 2 (held, others wait)}.
-- Safe: compares the owner, and the number with the highest that was carried out: a late copy changes nothing. From the first one on
-- no other script prolongs the hold. Begins with a write that needs no memory.
local request = ARGV[1]
local f = redis.call('HMGET', KEYS[1], 'owner', 'head', 'tail', 'extended', 'forced')
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if f[1] ~= request then return {now, f[5] == request and -1 or 0} end
-- include extension
if tonumber(ARGV[3]) > extension(f[4], request) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2] + 60000)
  redis.call('HSET', KEYS[1], 'until', now + ARGV[2] * 1000, 'provisional', 0, 'ttl', ARGV[2],
    'extended', request .. ' ' .. ARGV[3])
end
return {now, f[2] == f[3] and 1 or 2}
