-- positions: remove a position of a queue, and find the next one. Part of serve, many_serve and leave.
-- ``nth`` is the number of the lock's key, here and in the other parts: proxies that check scripts take a key for one only
-- where it is written KEYS[…].
-- ``remove_position`` begins with a write that needs no memory. ``skip`` returns the first number from ``n`` on, below ``stop``, under
-- which there is a position, else ``stop``. Holes are positions that were left; 1,000 of them take the server about 0.5 ms.
local function remove_position(nth, n, request, process, presence)
  redis.call('HDEL', KEYS[nth], 'q:' .. n, 'r:' .. request)
  local life, notified, positions = string.match(presence, '^(%d+) (%S+) (%d+)$')
  if not positions or positions == '1' then
    redis.call('HDEL', KEYS[nth], 'p:' .. process)
  else
    redis.call('HSET', KEYS[nth], 'p:' .. process, life .. ' ' .. notified .. ' ' .. (positions - 1))
  end
end
local function skip(nth, n, stop)
  local size = 8
  while n < stop do
    local names = {}
    for k = n, math.min(stop, n + size) - 1 do names[#names + 1] = 'q:' .. k end
    local found = redis.call('HMGET', KEYS[nth], unpack(names))
    for k = 1, #names do
      if found[k] then return n + k - 1 end
    end
    n, size = n + #names, math.min(1000, 4 * size)
  end
  return stop
end
