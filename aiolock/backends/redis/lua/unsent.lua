-- unsent: mark the lock of a waiter that waits for a message which this client may not send. Part of messages and mute.
-- The heartbeats of those who wait for messages read the mark for half a minute, and their clients ask for as long.
local function unsent(nth, now)
  redis.call('HSET', KEYS[nth], 'unsent', string.format('%.0f', now + 30000000))
end
