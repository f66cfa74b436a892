-- probe: test whether this account may do what the other scripts do.
-- KEYS[1] a key without another use. Returns, for each command that is refused, its name and the error.
-- Safe: leaves nothing behind. Begins with writes that need no memory, so that a full server can be connected to; writes
-- only if it may also remove what it has written.
local lock = KEYS[1]
local refused = {}
local function try(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then
    refused[#refused + 1] = (...)
    refused[#refused + 1] = answer.err
  end
end
try('HDEL', lock, 'f')
try('PEXPIRE', lock, 1000)
if #refused == 0 then
  try('HSET', lock, 'f', 1)
  redis.call('HDEL', lock, 'f')
end
try('HGET', lock, 'f')
try('HGETALL', lock)
try('HMGET', lock, 'f')
try('HEXISTS', lock, 'f')
try('PTTL', lock)
try('TIME')
return refused
