-- Writes the stock unless a later holder of the lock has written before.
-- KEYS: the hash of the goods. ARGV: the new stock, the fencing token of the writer.
-- Returns 1 if it was written, 0 if it was refused.
-- Tokens have at most 19 digits: compared as text of one length, because numbers here are exact to 2^53 only.
local last = redis.call('HGET', KEYS[1], 'token') or '0'
local pad = function(text) return string.rep('0', 20 - #text) .. text end
if pad(ARGV[2]) < pad(last) then
  return 0
end
redis.call('HSET', KEYS[1], 'stock', ARGV[1], 'token', ARGV[2])
return 1
