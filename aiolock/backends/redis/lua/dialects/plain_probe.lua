-- plain_probe: test whether this account may do what the scripts of the plain format do.
-- KEYS: 1 a key without another use. Returns, for each command that is refused, its name and the error.
-- Safe: leaves nothing behind, and writes only if it may also remove what it has written.
local refused = {}
local function note(command, answer)
  if type(answer) == 'table' and answer.err then
    refused[#refused + 1] = command
    refused[#refused + 1] = answer.err
  end
end
note('DEL', redis.pcall('DEL', KEYS[1]))
note('PEXPIRE', redis.pcall('PEXPIRE', KEYS[1], 1000))
note('HDEL', redis.pcall('HDEL', KEYS[1], 'f'))
if #refused == 0 then
  note('SET', redis.pcall('SET', KEYS[1], 1, 'PX', 1000))
  redis.call('DEL', KEYS[1])
  note('HSET', redis.pcall('HSET', KEYS[1], 'f', 1))
  redis.call('DEL', KEYS[1])
end
note('GET', redis.pcall('GET', KEYS[1]))
note('HGET', redis.pcall('HGET', KEYS[1], 'f'))
note('HMGET', redis.pcall('HMGET', KEYS[1], 'f'))
note('HGETALL', redis.pcall('HGETALL', KEYS[1]))
note('HLEN', redis.pcall('HLEN', KEYS[1]))
note('PTTL', redis.pcall('PTTL', KEYS[1]))
note('TIME', redis.pcall('TIME'))
return refused
