-- plain_inspect: read the holder of a lock of the plain format, and the waiters of this library.
-- KEYS: 1 the lock, 2 the note beside it. Returns {value or nothing, ms left (-1: no expiry), ms since the grant (-1: not known), owner of
-- each waiter}. Writes nothing.
local owner = redis.call('GET', KEYS[1])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local out = {owner or '', redis.call('PTTL', KEYS[1]), -1}
local all, waiting = redis.call('HGETALL', KEYS[2]), {}
for i = 1, #all, 2 do
  local at = tonumber(all[i + 1])
  if string.sub(all[i], 1, 2) == 'w:' and at and at <= now and now - at < 250 then
    out[#out + 1] = string.sub(all[i], 3)
  elseif all[i] == 'held' and at and at <= now then
    out[3] = now - at
  end
end
return out
