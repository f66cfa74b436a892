-- report: keep what the holder reports of its present lease, and when (µs). Part of renew and many_renew.
-- Nothing depends on it: it is right for the hold whose tokens contain its token, and shown to those who inspect the lock.
local function report(nth, now, present, before)
  if present ~= '' then
    redis.call('HSET', KEYS[nth], 'present', string.format('%.0f %s', now, present))
  elseif before then
    redis.call('HDEL', KEYS[nth], 'present')
  end
end
