-- sweep: end the holds that have expired, and count the others. Part of many_enter, many_leave and many_heartbeat.
-- Returns the weight in use then. ``next`` is a time before which no hold ends, so this is not called more often than that.
-- A grant that was not confirmed in time parks its client, unless it is ``mine``. Marks of forced holds (z) go after 60 s. Begins with a
-- write that needs no memory.
-- ``swept`` is when all holds were examined: a clock that shows an earlier time was set back. Then, and whenever it is seen, a hold
-- that would stand for longer than its ttl from now is ended a ttl from now. Safe: its owner renewed or asked before now, for
-- one ttl at most. A step that is shorter than the time since then is not seen, and is shorter than a ttl.
local function due(now, soonest, swept)
  return soonest and (now >= tonumber(soonest) or now < tonumber(swept or 0))
end

local function sweep(nth, now, mine)
  redis.call('HDEL', KEYS[nth], 'next')
  local all, used, soonest = redis.call('HGETALL', KEYS[nth]), 0, nil
  for i = 1, #all, 2 do
    local what, request = string.match(all[i], '^([hz]):(.*)$')
    local ends, provisional, weight, ttl = string.match(all[i + 1], '^(%d+) (%d) (%d+) %d+ %d+ %d+ (%d+) ')
    if what == 'h' and tonumber(ends) > now then
      if ends - now > ttl * 1000 then
        ends = now + ttl * 1000
        redis.call('HSET', KEYS[nth], all[i], (string.gsub(all[i + 1], '^%d+', string.format('%.0f', ends))))
      end
      used, soonest = used + weight, math.min(soonest or math.huge, tonumber(ends))
    elseif what == 'h' then
      redis.call('HDEL', KEYS[nth], all[i])
      if provisional == '1' then park(nth, request, mine) end
    elseif what == 'z' and math.abs(now - all[i + 1]) > 60000000 then
      redis.call('HDEL', KEYS[nth], all[i])
    end
  end
  redis.call('HSET', KEYS[nth], 'used', used, 'swept', now)
  if soonest then redis.call('HSET', KEYS[nth], 'next', soonest) end
  return used
end
