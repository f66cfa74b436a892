-- plain_enter: request a lock of the plain format, and take it if it is free.
-- KEYS: 1 the lock, 2 the note beside it. ARGV: 1 owner, 2 ttl ms, 3 whether it waits, 4 process, and in ms 5 turn, 6 turn after a
-- foreign holder, 7 pause, 8 for how long a foreign holder counts as seen.
-- Returns {1, whether other clients are known to wait, ms left of the turn} or {0, ms until it may be free (-1: no
-- expiry), the value that holds it or nothing}.
-- Safe: the key is set only where this script found none, or was found with the own value, which no other request ever has: a lost answer,
-- asked again. A copy that arrives after the request was given up finds the tombstone. The note decides only who waits for how long.
local me, wait = ARGV[1], ARGV[3] == '1'
-- A key of another type is refused here, before anything is written.
local owner = redis.call('GET', KEYS[1])
local n = redis.call('HMGET', KEYS[2], 'x:' .. me, 'since', 'left', 'pause', 'seen', 'wait', 'pause:' .. ARGV[4], 'w:' .. me)
local ttl, turn, after, yield, seen = tonumber(ARGV[2]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
-- A time in the future counts as absent: the clock was set back.
local function age(at)
  at = tonumber(at)
  return at and at <= now and now - at or nil
end
local function ahead(at, most)
  at = tonumber(at)
  return at and at > now and at <= now + most and at - now or nil
end
-- include dialects/sweep
-- include dialects/remember
local function waits()
  if not n[8] then sweep(now, 250) end
  redis.call('HSET', KEYS[2], 'w:' .. me, now)
  remember(60000)
end
local foreign = age(n[5]) and age(n[5]) < seen
if foreign then turn = after end
local demand = (foreign or age(n[6]) and age(n[6]) < 250) and 1 or 0
if owner == me then
  redis.call('PEXPIRE', KEYS[1], ttl)
  return {1, demand, math.max(0, turn - (age(n[2]) or 0))}
end
if n[1] then return {0, 60000, ''} end
if owner then
  if string.sub(owner, 1, 8) ~= 'aiolock:' then
    redis.call('HSET', KEYS[2], 'seen', now)
    redis.call('HDEL', KEYS[2], 'since', 'pause')
    remember(60000)
  end
  if wait then
    redis.call('HSET', KEYS[2], 'wait', now)
    waits()
  end
  return {0, redis.call('PTTL', KEYS[1]), owner}
end
if wait then
  -- The client that left while others of this library waited leaves it to them for a moment.
  local pause = ahead(n[7], 20) or yield > 0 and ahead(n[4], yield)
  if not pause and yield > 0 and age(n[2]) and age(n[2]) >= turn and age(n[3]) and age(n[3]) < 100 then
    -- The turn of this library's clients is over: foreign clients that poll find the lock free.
    pause = yield
    redis.call('HSET', KEYS[2], 'pause', now + yield)
    redis.call('HDEL', KEYS[2], 'since')
  end
  if pause then
    waits()
    return {0, pause, ''}
  end
end
redis.call('SET', KEYS[1], me, 'PX', ttl)
local since = age(n[2])
if not since or not age(n[3]) or age(n[3]) >= 100 then
  since = 0
  redis.call('HSET', KEYS[2], 'since', now)
end
redis.call('HSET', KEYS[2], 'held', now)
if n[8] then redis.call('HDEL', KEYS[2], 'w:' .. me) end
remember(60000 + ttl)
return {1, demand, math.max(0, turn - since)}
