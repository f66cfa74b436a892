-- plain_renew: prolong holds of the plain format, or only verify them.
-- KEYS the locks. ARGV for each: owner, ttl ms (0 prolongs nothing). Returns for each 1, or 0 if the hold is gone.
-- Safe: only the own value is prolonged, which no other request ever has. A key of another type is not the own value.
local out = {}
for i = 1, #KEYS do
  out[i] = 0
  if redis.pcall('GET', KEYS[i]) == ARGV[2 * i - 1] then
    out[i] = 1
    if ARGV[2 * i] ~= '0' then redis.call('PEXPIRE', KEYS[i], ARGV[2 * i]) end
  end
end
return out
