-- many_heartbeat: the same as heartbeat, for locks with several holders.
-- KEYS, ARGV and answers are those of heartbeat; the µs are those until a hold may end.
-- Safe: a hold that it ends has expired by the server's clock; the waiters that it grants are next in the queue.
-- include tokens
-- include positions
-- include park
-- include many_hold
-- include many_sweep
-- include many_serve
local mine = ARGV[1]
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local answer = {now}
for i = 1, #KEYS do
  local f = redis.pcall('HMGET', KEYS[i], 'used', 'limit', 'head', 'tail', 'next', 'p:' .. mine, 'swept', 'unsent')
  -- A key of another type fails the requests of its own waiters; the positions in other queues go on.
  local broken = f.err and string.find(f.err, 'WRONGTYPE', 1, true)
  if f.err and not broken then return f end
  local counted = string.match(f[6] or '', '(%d+)$')
  local used, window, handed, state, unsent = tonumber(f[1] or 0), 0, broken, 0, tonumber(f[8] or 0) > now
  if counted then
    redis.call('HDEL', KEYS[i], 'p:' .. mine)
    redis.call('HSET', KEYS[i], 'p:' .. mine, string.format('%.0f %s %s', now + ARGV[2] * 1000, ARGV[3], counted))
    stay(i, ARGV[2] + 60000)
  end
  if f[3] ~= f[4] then
    if due(now, f[5], f[7]) then used = sweep(i, now, mine) end
    window, used, handed = serve(i, now, mine, tonumber(ARGV[4]), used, tonumber(f[2] or 0))
    f = redis.call('HMGET', KEYS[i], 'used', 'limit', 'head', 'tail', 'next')
  end
  local first = not broken and redis.call('HGET', KEYS[i], 'q:' .. (f[3] or 0))
  if handed or tonumber(counted or 0) < tonumber(ARGV[4 + i]) then
    state = unsent and 3 or 2
  elseif first and string.match(first, '^%x+') == mine then
    state = 1
  end
  answer[i + 1] = {used > 0 and f[5] and math.max(0, f[5] - now) or 0, window, state}
end
return answer
