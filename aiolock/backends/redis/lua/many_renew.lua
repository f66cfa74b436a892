-- many_renew: prolong holds of locks with several holders, and confirm grants that were pushed.
-- KEYS the locks. ARGV: those of renew. Only a writer, which is alone, reports a present lease.
-- Returns the same as renew.
-- Safe: touches its own field only; a hold that has expired is still its owner's until a waiter needs the room. Each
-- begins with a write that needs no memory.
-- include many_hold
-- include report
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local answer = {now}
for i = 1, #KEYS do
  local request, ttl, present = ARGV[3 * i - 2], ARGV[3 * i - 1], ARGV[3 * i]
  local f = redis.pcall('HMGET', KEYS[i], 'h:' .. request, 'head', 'tail', 'keep', 'asked', 'z:' .. request,
    'next', 'present')
  -- A key of another type has cost its own hold, and must not cost others.
  if f.err and not string.find(f.err, 'WRONGTYPE', 1, true) then return f end
  if f[1] then
    if ttl ~= '0' then
      prolong(i, request, f[1], now + ttl * 1000, ttl, f[7])
      stay(i, ttl + (f[4] or 60000))
      report(i, now, present, f[8])
    end
    answer[i + 1] = f[2] == f[3] and 1 or 2
    -- Every hold from before the request reports it, also if its message was lost.
    local since, asked = string.match(f[1], '^%d+ %d %d+ %d+ %d+ (%d+)'), string.match(f[5] or '', '^%d+')
    if asked and tonumber(since) <= tonumber(asked) then answer[i + 1] = {answer[i + 1], request .. ' ' .. f[5]} end
  else
    answer[i + 1] = f[6] and -1 or 0
  end
end
return answer
