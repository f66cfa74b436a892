-- rewind: end a hold a ttl from now, if it would end later: the server's clock was set back. Part of enter and heartbeat.
-- Returns until when it stands. Safe: its owner renewed or asked before now, for one ttl at most, so it is certain of
-- less than that. A dead holder costs one ttl more at most, counted from the first request after the step.
local function rewind(nth, now, ends, ttl)
  if not ttl or ends - now <= ttl * 1000 then return ends end
  ends = string.format('%.0f', now + ttl * 1000)
  redis.call('HDEL', KEYS[nth], 'until')
  redis.call('HSET', KEYS[nth], 'until', ends)
  return ends
end
