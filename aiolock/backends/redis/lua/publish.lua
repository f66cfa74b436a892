-- publish: test whether scripts may count the subscribers of a channel, and publish on it.
-- KEYS[1] a key without another use. ARGV: 1 the channel. Returns how many are subscribed at this server, and how many received an empty
-- message; -1 for what is refused.
-- Safe: writes nothing.
return {redis.pcall('PUBSUB', 'NUMSUB', ARGV[1])[2] or -1, tonumber(redis.pcall('PUBLISH', ARGV[1], '')) or -1}
