-- many_leave: give up what a request has or may still get: its hold, its position, or its arrival.
-- KEYS[1] the lock. ARGV: 1 request, 2 floor, 3 tombstone (as for leave), 4 keep (ms for which the hold stays without a holder).
-- Returns ms of the shortest confirmation window of the waiters that were granted, or -1 to go on; else 0, or -2 if the request had no hold.
-- Safe: takes only its own fields, in one atomic step, idempotent. The position that is left may be one that others could
-- not pass, so the queue is examined as well. Every write comes after one that needs no memory.
local request = ARGV[1]
local mine = string.match(request, '^%x+')
local f = redis.call('HMGET', KEYS[1], 'h:' .. request, 'r:' .. request, 'used', 'limit', 'next', 'head', 'tail', 'swept')
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
  redis.call('HDEL', KEYS[1], 'h:' .. request)
  -- No request to extend it has such a number.
  prolong(1, '0:' .. string.gsub(request, ':', ''), f[1], now + ARGV[4] * 1000, ARGV[4], f[5], 2^40)
  stay(1, ARGV[4] + 60000)
elseif f[1] then
  used = used - string.match(f[1], '^%d+ %d (%d+)')
  redis.call('HDEL', KEYS[1], 'h:' .. request)
  redis.call('HSET', KEYS[1], 'used', used)
elseif f[2] then
  remove_position(1, f[2], request, mine, redis.call('HGET', KEYS[1], 'p:' .. mine) or '')
end
if (f[1] or f[2]) and f[6] ~= f[7] then
  if due(now, f[5], f[8]) then used = sweep(1, now, mine) end
  window = serve(1, now, '', tonumber(ARGV[2]), used, tonumber(f[4] or 0))
end
if ARGV[3] == '1' then
  add_tombstone(1, request, now)
  stay(1, 120000)
end
if window == 0 and not f[1] then return -2 end
return window
