-- doc_write: replace the value of a register, if it is still the version that was read.
-- KEYS[1] the register. ARGV: 1 value, 2 stamp of the version that it replaces (empty: there must be none), 3 write id,
-- 4 keep in ms, 5 floor (the highest time in a stamp that was seen).
-- Returns the new stamp, or nothing if it was another version. Notifies the clients that watch.
-- Safe: compare and set in one atomic step on one key. A stamp is a time in µs that only grows, and the id of the write, so no
-- two writes have the same one, also if the register was forgotten in between. Begins with a write that needs no memory only
-- where there is a version already.
-- include channel
local doc = KEYS[1]
local all, field = redis.call('HGETALL', doc), {}
for i = 1, #all, 2 do field[all[i]] = all[i + 1] end
if (field.stamp or '') ~= ARGV[2] then return false end
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local last = tonumber(string.match(field.stamp or '', '^%d+') or 0)
local stamp = string.format('%.0f-%s', math.max(now, last + 1, ARGV[5] + 1), ARGV[3])
if field.stamp then redis.call('HDEL', doc, 'stamp') end
redis.call('HSET', doc, 'value', ARGV[1], 'stamp', stamp)
redis.call('PEXPIRE', doc, ARGV[4])
for name, till in pairs(field) do
  local process = string.match(name, '^w:(%x+)$')
  if process and tonumber(till) > now then
    redis.pcall('PUBLISH', channel(doc, process), 'c ' .. doc)
  elseif process then
    redis.call('HDEL', doc, name)
  end
end
return stamp
