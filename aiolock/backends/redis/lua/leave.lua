-- leave: give up what a request has or may still get: its hold, its position, or its arrival.
-- KEYS[1] the lock. ARGV: 1 request, 2 floor, 3 tombstone (1: an earlier copy may still arrive, and must then change nothing),
-- 4 keep (ms for which the lock stays taken without a holder).
-- Returns -2 if the request had no hold, else 0, ms of the confirmation window of the waiter that was granted the lock, or -1 to go on (by a
-- heartbeat).
-- Safe: compares the owner, in one atomic step, idempotent. Tombstones last 60 s, as does the key after them. Every write
-- comes after one that needs no memory, so that a full server forgets nothing and keeps nothing.
local request = ARGV[1]
local f = redis.call('HMGET', KEYS[1], 'owner', 'head', 'tail', 'r:' .. request, 'until')
-- include tokens
-- include serve
-- include tombstone
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local window = f[1] == request and 0 or -2
if f[1] == request and ARGV[4] ~= '0' then
  redis.call('PEXPIRE', KEYS[1], ARGV[4] + 60000)
  redis.call('HSET', KEYS[1], 'owner', '0:' .. string.match(request, '%x+$'), 'until', now + ARGV[4] * 1000, 'provisional', 0,
    'ttl', ARGV[4])
elseif f[1] == request then
  window = serve(1, now, '', tonumber(ARGV[2]))
elseif f[4] then
  local mine = string.match(request, '^%x+')
  remove_position(1, f[4], request, mine, redis.call('HGET', KEYS[1], 'p:' .. mine) or '')
  if f[4] == f[2] then
    -- At most so many holes that the server is not held up.
    local head, tail = tonumber(f[2]), tonumber(f[3])
    local stop = math.min(tail, head + 2500)
    head = skip(1, head + 1, stop)
    redis.call('HSET', KEYS[1], 'head', head)
    if head == stop and head < tail then window = -1 end
  end
end
if ARGV[3] == '1' then
  add_tombstone(1, request, now)
  local life = f[1] and math.floor(math.max(0, f[5] - now) / 1000) or 0
  if redis.call('PTTL', KEYS[1]) < life + 120000 then redis.call('PEXPIRE', KEYS[1], life + 120000) end
end
return window
