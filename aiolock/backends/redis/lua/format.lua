-- format: the version of the data format of a namespace; the first client writes its own.
-- KEYS[1] <namespace>:format. ARGV: 1 the client's version. Returns the version.
-- Safe: one atomic step, so of two versions that come at once one wins. The key is the only one that does not expire.
-- Begins with a write that needs no memory, so that a full server can be connected to.
local version = redis.call('HGET', KEYS[1], 'version')
if not version then
  redis.call('HDEL', KEYS[1], 'version')
  redis.call('HSET', KEYS[1], 'version', ARGV[1])
  version = ARGV[1]
end
return version
