-- inspect: read the holder and the waiters, in order. For administrators.
-- KEYS[1] the lock. Returns {server µs, until, token, tokens (0: kept after its release), since, label, what was reported of the
-- present lease} with empty strings for a free lock, then up to 1,000 labels of waiters. Writes nothing.
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local f = redis.call('HMGET', KEYS[1], 'owner', 'until', 'token', 'since', 'label', 'head', 'tail', 'top', 'present')
local answer = {now, '', '', '', '', '', ''}
if f[1] and tonumber(f[2]) > now then
  local tokens = string.sub(f[1], 1, 2) == '0:' and 0 or f[8] - f[3] + 1
  answer = {now, f[2], f[3], tokens, f[4], f[5], f[9] or ''}
end
local head, tail = tonumber(f[6] or 0), tonumber(f[7] or 0)
for n = head, tail - 1 do
  local position = redis.call('HGET', KEYS[1], 'q:' .. n)
  if position then
    local process, label = string.match(position, '^(%x+):%x+ %d+ %d+ %d+ (.*)$')
    local life = string.match(redis.call('HGET', KEYS[1], 'p:' .. process) or '', '^%d+')
    if life and tonumber(life) >= now then answer[#answer + 1] = label end
  end
  if #answer > 1006 then break end
end
return answer
