-- place: take a place out of the line. Part of serve and many_seat. Begins with a write that needs no memory.
local function unplace(lock, n, request, process, presence)
  redis.call('HDEL', lock, 'q:' .. n, 'r:' .. request)
  local life, hears, places = string.match(presence, '^(%d+) (%a) (%d+)$')
  if not places or places == '1' then
    redis.call('HDEL', lock, 'p:' .. process)
  else
    redis.call('HSET', lock, 'p:' .. process, life .. ' ' .. hears .. ' ' .. (places - 1))
  end
end
-- include channel
