-- renew: prolong holds, and confirm grants that were pushed.
-- KEYS the locks. ARGV: for each, its request, its ttl in ms, or 0 to verify the hold and prolong nothing, and what it reports of
-- the present lease, for people: token, age in µs, local waiters, label; or nothing.
-- Returns the server's time in µs, then for each -1 (taken by force), 0 (gone), 1 (held) or 2 (held, others wait), or a
-- list of that and ``request µs reason`` if its release was asked for.
-- Safe: compares the owner, and prolongs nothing that was extended; a hold that has expired but was granted to no other is still its owner's. Each begins with a
-- write that needs no memory.
-- include report
-- include extension
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local answer = {now}
for i = 1, #KEYS do
  local request, ttl, present = ARGV[3 * i - 2], ARGV[3 * i - 1], ARGV[3 * i]
  local f = redis.pcall('HMGET', KEYS[i], 'owner', 'head', 'tail', 'asked', 'present', 'extended')
  -- A key of another type has cost its own hold, and must not cost others.
  if f.err and not string.find(f.err, 'WRONGTYPE', 1, true) then return f end
  if f[1] == request then
    if ttl ~= '0' and extension(f[6], request) == 0 then
      redis.call('PEXPIRE', KEYS[i], ttl + 60000)
      redis.call('HSET', KEYS[i], 'until', now + ttl * 1000, 'provisional', 0)
      report(i, now, present, f[5])
    end
    answer[i + 1] = f[2] == f[3] and 1 or 2
    if f[4] and string.match(f[4], '^%S+') == f[1] then answer[i + 1] = {answer[i + 1], f[4]} end
  else
    answer[i + 1] = not f.err and redis.call('HGET', KEYS[i], 'forced') == request and -1 or 0
  end
end
return answer
