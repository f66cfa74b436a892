-- many_enter: acquire a read-write lock or permits, or join the queue.
-- KEYS[1] the lock. ARGV: 1 request, 2 ttl ms, 3 most tokens, 4 floor, 5 label, 6 the terms of a position, or nothing (as for
-- enter), 7 weight, 8 limit.
-- Returns {1, token, tokens, server µs, others wait}, {0, ticket, server µs, µs until a hold may end, it is first} or
-- {2, limit} if the lock is known with another limit: neither the first user's nor the one that was set.
-- Safe: one atomic step on one key, idempotent by request: asking again finds the grant or the position, and a request
-- that has a tombstone changes nothing. The first command fails on a key of another type, before anything is written.
local request, mine, weight = ARGV[1], string.match(ARGV[1], '^%x+'), tonumber(ARGV[7])
local t = redis.call('TIME')
local now, ttl, floor = t[1] * 1000000 + t[2], tonumber(ARGV[2]), tonumber(ARGV[4])
local f
local function read()
  f = redis.call('HMGET', KEYS[1], 'used', 'limit', 'first', 'head', 'tail', 'top', 'next', 'keep', 'h:' .. request,
    'x:' .. request, 'r:' .. request, 'swept')
  return tonumber(f[1] or 0), tonumber(f[2] or ARGV[8])
end
-- include tokens
-- include many_hold
local used, limit = read()
local function enter(waiting)
  local token, top = tokens(now, tonumber(f[6]), floor, tonumber(ARGV[3]))
  local ends = now + ttl * 1000
  hold(1, request, ends, 0, weight, token, top - token + 1, now, ttl, ARGV[5])
  redis.call('HSET', KEYS[1], 'used', used + weight, 'top', top, 'last', request, 'limit', f[2] or ARGV[8],
    'first', f[3] or ARGV[8], 'next', used > 0 and f[7] and math.min(f[7], ends) or ends,
    'swept', used > 0 and f[12] or now)
  stay(1, ttl + (f[8] or 60000))
  return {1, token, top - token + 1, now, waiting}
end
-- A sweep that is not needed may wait a minute: a hold that has expired and is in no waiter's way is still its owner's.
local quiet = used == 0 or now < tonumber(f[7] or 0) + 60000000
local named = not f[2] or ARGV[8] == f[2] or ARGV[8] == (f[3] or ARGV[8])
if f[4] == f[5] and not f[9] and not f[10] and named and used + weight <= limit and quiet then return enter(0) end
local newcomer = not f[9] and not f[11] and (ARGV[6] == '' or string.sub(ARGV[6], -2) == '-1')
if newcomer and not named then return {2, limit} end
-- The first user's number is known from now on, also if there is nothing to be had before the limit is set again.
if newcomer and f[2] and not f[3] and not f[10] then redis.call('HSET', KEYS[1], 'first', ARGV[8]) end
-- include positions
-- include park
-- include many_sweep
-- include many_serve
if f[10] then return {0, -1, now, 60000000, 0} end
local more = 0
if not f[9] then
  if due(now, f[7], f[12]) then used = sweep(1, now, mine) end
  if f[4] ~= f[5] then more = serve(1, now, request, floor, used, limit) end
  used = read()
  if not f[9] and f[4] == f[5] and used + weight <= limit then return enter(0) end
end
local waiting = f[4] ~= f[5] and 1 or 0
if f[9] then
  -- The request's own grant, whose answer or push may be lost: from now on it stands for a full ttl.
  local token, count = string.match(f[9], '^%d+ %d %d+ (%d+) (%d+) ')
  prolong(1, request, f[9], now + ttl * 1000, ttl, f[7])
  stay(1, ttl + (f[8] or 60000))
  return {1, tonumber(token), tonumber(count), now, waiting}
end
local left = more == -1 and 0 or used > 0 and f[7] and f[7] - now or 60000000
if ARGV[6] == '' then return {0, -1, now, left, 0} end
-- include many_join
local ticket, first = join(1, request, now, ARGV[6],
  string.format('%s %s %s %.0f %s', ARGV[2], ARGV[3], ARGV[4], weight, ARGV[5]))
return {0, ticket, now, left, first and 1 or 0}
