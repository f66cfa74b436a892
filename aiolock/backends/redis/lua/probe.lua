-- probe: test whether this account may do what the other scripts do.
-- KEYS[1] a key without another use. Returns, for each command that is refused, its name and the error.
-- Safe: leaves nothing behind. Begins with writes that need no memory, so that a full server can be connected to; writes
-- only if it may also remove what it has written.
local refused = {}
local function note(command, answer)
  if type(answer) == 'table' and answer.err then
    refused[#refused + 1] = command
    refused[#refused + 1] = answer.err
  end
end
note('HDEL', redis.pcall('HDEL', KEYS[1], 'f'))
note('PEXPIRE', redis.pcall('PEXPIRE', KEYS[1], 1000))
if #refused == 0 then
  note('HSET', redis.pcall('HSET', KEYS[1], 'f', 1))
  redis.call('HDEL', KEYS[1], 'f')
end
note('HGET', redis.pcall('HGET', KEYS[1], 'f'))
note('HGETALL', redis.pcall('HGETALL', KEYS[1]))
note('HMGET', redis.pcall('HMGET', KEYS[1], 'f'))
note('HEXISTS', redis.pcall('HEXISTS', KEYS[1], 'f'))
note('PTTL', redis.pcall('PTTL', KEYS[1]))
note('TIME', redis.pcall('TIME'))
return refused
