-- many_leave: give up what a request has or may still get: its hold, its position, or its arrival.
-- KEYS[1] the lock. ARGV: 1 request, 2 floor, 3 tombstone (as for leave), 4 keep (ms for which the hold stays without a holder).
-- Returns ms of the shortest confirmation window of the waiters that were granted, or -1 to go on; else 0, or -2 if the request had no hold.
-- Safe: takes only its own fields, in one atomic step, idempotent. The position that is left may be one that others could
-- not pass, so the queue is examined as well. Every write comes after one that needs no memory.
local lock, request = KEYS[1], ARGV[1]
local mine = string.match(request, '^%x+')
local f = redis.call('HMGET', lock, 'h:' .. request, 'r:' .. request, 'used', 'limit', 'next', 'head', 'tail', 'swept')
-- include tokens
-- include positions
-- include park
-- include tombstone
-- include many_hold
-- include many_sweep
-- include many_serve
local t = redis.call('TIME')
local now, used, window = t[1] * 1000000 + t[2], tonumber(f[3] or 0), 0
if f[1] and ARGV[4] ~= '0' then
  redis.call('HDEL', lock, 'h:' .. request)
  -- No request to extend it has such a number.
  prolong(lock, '0:' .. string.gsub(request, ':', ''), f[1], now + ARGV[4] * 1000, ARGV[4], f[5], 2^40)
  stay(lock, ARGV[4] + 60000)
elseif f[1] then
  used = used - string.match(f[1], '^%d+ %d (%d+)')
  redis.call('HDEL', lock, 'h:' .. request)
  redis.call('HSET', lock, 'used', used)
elseif f[2] then
  remove_position(lock, f[2], request, mine, redis.call('HGET', lock, 'p:' .. mine) or '')
end
if (f[1] or f[2]) and f[6] ~= f[7] then
  if due(now, f[5], f[8]) then used = sweep(lock, now, mine) end
  window = serve(lock, now, '', tonumber(ARGV[2]), used, tonumber(f[4] or 0))
end
if ARGV[3] == '1' then
  add_tombstone(lock, request, now)
  stay(lock, 120000)
end
if window == 0 and not f[1] then return -2 end
return window
