-- plain_force: take a lock of the plain format from its holder. For administrators.
-- KEYS: 1 the lock, 2 the note beside it. ARGV: 1 channel. Returns 1 if there was a holder.
-- The holder learns it by its next renewal, a foreign one when its library looks.
if not redis.call('GET', KEYS[1]) then return 0 end
local t = redis.call('TIME')
-- include dialects/remember
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[2], 'left', t[1] * 1000 + math.floor(t[2] / 1000))
remember(60000)
redis.pcall('PUBLISH', ARGV[1], KEYS[1])
return 1
