-- heartbeat: extend a client's positions in queues, and let time pass for their locks.
-- KEYS the locks. ARGV: 1 the client, 2 life of a position in ms, 3 how it learns of a grant (as for enter), 4 floor, then for each
-- lock how many positions it certainly has there (more may be on their way, or being left).
-- Returns the server's time in µs, then for each lock {µs until the hold ends, ms of the confirmation window of a grant
-- that was just made (or -1), state}: state 1 the client is first in the queue, 2 ask again (it was granted the lock, or positions are gone),
-- 3 the same, where a client uses the lock that may send no messages, else 0.
-- Safe: a hold that it ends has expired by the server's clock; the waiter that it grants is next in the queue.
-- include tokens
-- include serve
-- include park
-- include rewind
local mine = ARGV[1]
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local answer = {now}
for i = 1, #KEYS do
  local f = redis.pcall('HMGET', KEYS[i], 'owner', 'until', 'head', 'tail', 'provisional', 'p:' .. mine, 'ttl', 'unsent')
  -- A key of another type fails the requests of its own waiters; the positions in other queues go on.
  local broken = f.err and string.find(f.err, 'WRONGTYPE', 1, true)
  if f.err and not broken then return f end
  local counted = string.match(f[6] or '', '(%d+)$')
  local window, state, unsent = 0, 0, tonumber(f[8] or 0) > now
  if counted then
    redis.call('PEXPIRE', KEYS[i], string.format('%.0f',
      math.max(f[1] and f[2] - now or 0, ARGV[2] * 1000) / 1000 + 60000))
    redis.call('HSET', KEYS[i], 'p:' .. mine, string.format('%.0f %s %s', now + ARGV[2] * 1000, ARGV[3], counted))
  end
  if f[1] then f[2] = rewind(i, now, f[2], f[7]) end
  if (f[1] and tonumber(f[2]) <= now) or (not f[1] and f[3] ~= f[4]) then
    if f[1] and f[5] == '1' then park(i, f[1], mine) end
    window = serve(i, now, mine, tonumber(ARGV[4]))
    f = redis.call('HMGET', KEYS[i], 'owner', 'until', 'head', 'tail', 'provisional')
  end
  local first = not broken and redis.call('HGET', KEYS[i], 'q:' .. (f[3] or 0))
  if not broken and f[3] ~= f[4] and not first then
    -- The first in the queue has left, before a long row of holes.
    local head = skip(i, f[3] + 1, math.min(f[4], f[3] + 2500))
    redis.call('HDEL', KEYS[i], 'head')
    redis.call('HSET', KEYS[i], 'head', head)
    first = redis.call('HGET', KEYS[i], 'q:' .. head)
    if not first and head < tonumber(f[4]) then window = -1 end
  end
  local handed = f[1] and f[5] == '1' and string.match(f[1], '^%x+') == mine
  if broken or handed or tonumber(counted or 0) < tonumber(ARGV[4 + i]) then
    state = unsent and 3 or 2
  elseif first and string.match(first, '^%x+') == mine then
    state = 1
  end
  answer[i + 1] = {f[1] and math.max(0, f[2] - now) or 0, window, state}
end
return answer
