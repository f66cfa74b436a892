-- register_watch: have a client notified when a register changes, and read its version.
-- KEYS[1] the register. ARGV: 1 the client, 2 life of the watch in ms (0: end it). Returns the stamp, or an empty string.
-- Safe: a version that was written before this step is in the answer, a later one is notified. A watch that is not renewed
-- ends by its life, and may keep the register that long, never less long.
local stamp = redis.call('HGET', KEYS[1], 'stamp') or ''
redis.call('HDEL', KEYS[1], 'w:' .. ARGV[1])
if ARGV[2] == '0' then return stamp end
local t = redis.call('TIME')
redis.call('HSET', KEYS[1], 'w:' .. ARGV[1], string.format('%.0f', t[1] * 1000000 + t[2] + ARGV[2] * 1000))
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return stamp
