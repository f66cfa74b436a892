-- register_write: replace the value of a register, if it is still the version that was read.
-- KEYS[1] the register. ARGV: 1 value, 2 stamp of the version that it replaces (empty: there must be none), 3 write id,
-- 4 keep in ms, 5 floor (the highest time in a stamp that was seen).
-- Returns the new stamp, or nothing if it was another version. Notifies the clients that watch.
-- Safe: compare and set in one atomic step on one key. A stamp is a time in µs that only grows, and the id of the write, so no
-- two writes have the same one, also if the register was forgotten in between. Begins with a write that needs no memory only
-- where there is a version already.
-- include messages
local all, field = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do field[all[i]] = all[i + 1] end
if (field.stamp or '') ~= ARGV[2] then return false end
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local last = tonumber(string.match(field.stamp or '', '^%d+') or 0)
local stamp = string.format('%.0f-%s', math.max(now, last + 1, ARGV[5] + 1), ARGV[3])
if field.stamp then redis.call('HDEL', KEYS[1], 'stamp') end
redis.call('HSET', KEYS[1], 'value', ARGV[1], 'stamp', stamp)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
for name, ends in pairs(field) do
  local process = string.match(name, '^w:(%x+)$')
  if process and tonumber(ends) > now then
    tell(1, process, 'c ' .. KEYS[1])
  elseif process then
    redis.call('HDEL', KEYS[1], name)
  end
end
return stamp
