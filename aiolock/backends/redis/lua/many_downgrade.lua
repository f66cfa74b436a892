-- many_downgrade: turn a write hold into a read hold, and grant the readers who are next.
-- KEYS[1] the lock. ARGV: 1 request, 2 ttl ms, or 0 to prolong nothing, 3 floor.
-- Returns {1, token, tokens, server µs, others wait, ms of the shortest confirmation window (or -1)}, {0, server µs} if the hold is
-- gone, or {-1, server µs} if it was taken by force.
-- Safe: one atomic step, so there is no moment at which it is neither; asking again finds it done. It stands for a full ttl
-- from then, unless it is not prolonged. Begins with a write that needs no memory.
local request = ARGV[1]
local f = redis.call('HMGET', KEYS[1], 'h:' .. request, 'used', 'limit', 'keep', 'z:' .. request)
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if not f[1] then return {f[5] and -1 or 0, now} end
-- include tokens
-- include positions
-- include many_hold
-- include many_serve
local weight, token, count = string.match(f[1], '^%d+ %d (%d+) (%d+) (%d+)')
local record = string.gsub(f[1], '^(%d+) %d %d+', '%1 0 1', 1)
redis.call('HDEL', KEYS[1], 'h:' .. request)
redis.call('HSET', KEYS[1], 'h:' .. request, record)
if ARGV[2] ~= '0' then prolong(1, request, record, now + ARGV[2] * 1000, ARGV[2]) end
local used = f[2] - weight + 1
redis.call('HSET', KEYS[1], 'used', used)
stay(1, ARGV[2] + (f[4] or 60000))
local window = serve(1, now, '', tonumber(ARGV[3]), used, tonumber(f[3]))
local queue = redis.call('HMGET', KEYS[1], 'head', 'tail')
return {1, tonumber(token), tonumber(count), now, queue[1] ~= queue[2] and 1 or 0, window}
