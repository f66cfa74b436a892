-- park: a claim that lapsed says that its process is stopped or cut off: nothing more is handed to it until it speaks.
-- Part of enter and beat; ``mine`` is speaking at this moment.
local function park(lock, owner, mine)
  local process = string.match(owner, '^%x+')
  local life, places = string.match(redis.call('HGET', lock, 'p:' .. process) or '', '^(%d+) %a (%d+)$')
  if life and process ~= mine then
    redis.call('HDEL', lock, 'p:' .. process)
    redis.call('HSET', lock, 'p:' .. process, life .. ' k ' .. places)
  end
end
