-- park: note that the client of a grant that it did not confirm in time is stopped or cut off: it is granted nothing until it sends a command.
-- Part of enter and heartbeat; ``mine`` is the client that sent this one.
local function park(nth, owner, mine)
  local process = string.match(owner, '^%x+')
  local life, positions = string.match(redis.call('HGET', KEYS[nth], 'p:' .. process) or '', '^(%d+) %S+ (%d+)$')
  if life and process ~= mine then
    redis.call('HDEL', KEYS[nth], 'p:' .. process)
    redis.call('HSET', KEYS[nth], 'p:' .. process, life .. ' k ' .. positions)
  end
end
