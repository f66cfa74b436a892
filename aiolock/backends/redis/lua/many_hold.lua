-- hold: one hold of a lock with several holders, as a field of its own. Part of the scripts that grant, prolong or keep.
-- ``h:<request>`` is: until (µs), 1 while a pushed grant has not been confirmed, weight, first token, tokens, since (µs),
-- ttl (ms), the number of the request that extended it (0: none), label. A hold weighs its permits, a reader 1, and a writer 2^30, which is the whole limit of a read-write lock: so one
-- rule is right for all of them, and a sum says whether a request can be granted.
local function hold(nth, request, ends, provisional, weight, token, count, now, ttl, label)
  redis.call('HSET', KEYS[nth], 'h:' .. request,
    string.format('%.0f %d %.0f %.0f %.0f %.0f %.0f 0 %s', ends, provisional, weight, token, count, now, ttl, label))
end

-- From now on it stands until then, which is a ttl from now, and is confirmed; once it was extended, only a request to extend it with
-- a higher number than that in the record changes its end. ``soonest`` is when the next hold ends, as far as is known; this
-- one is earlier if it is being kept, or the clock was set back. Begins with a write that needs no memory.
local function prolong(nth, request, record, ends, ttl, soonest, number)
  local last = tonumber(string.match(record, '^%d+ %d %d+ %d+ %d+ %d+ %d+ (%d+)'))
  if last > 0 and last >= (number or 0) then return end
  redis.call('HDEL', KEYS[nth], 'h:' .. request)
  redis.call('HSET', KEYS[nth], 'h:' .. request, (string.gsub(record, '^%d+ %d (%d+ %d+ %d+ %d+) %d+ %d+',
    string.format('%.0f 0 %%1 %.0f %.0f', ends, ttl, number or 0))))
  if tonumber(soonest or 0) > ends then redis.call('HSET', KEYS[nth], 'next', ends) end
end

-- The key must not expire before that many ms.
local function stay(nth, ms)
  if redis.call('PTTL', KEYS[nth]) < ms then redis.call('PEXPIRE', KEYS[nth], string.format('%.0f', ms)) end
end
