-- place: take a place out of the line, and tell a process something. Part of serve and many_seat.
-- Begins with a write that needs no memory. A message is a hint, and who may not publish tells nobody: what counts is in
-- the key.
local function unplace(lock, n, request, process, presence)
  redis.call('HDEL', lock, 'q:' .. n, 'r:' .. request)
  local life, hears, places = string.match(presence, '^(%d+) (%a) (%d+)$')
  if not places or places == '1' then
    redis.call('HDEL', lock, 'p:' .. process)
  else
    redis.call('HSET', lock, 'p:' .. process, life .. ' ' .. hears .. ' ' .. (places - 1))
  end
end

local function channel(lock, process)
  return string.match(lock, '^(.*:1:)%a+:{') .. 'to:' .. process
end
