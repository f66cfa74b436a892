-- messages: send messages to clients. Part of the scripts that do. ``mute`` takes its place for a server that takes no such script.
-- A message is a hint, and an account that may not publish sends none: the state is in the key.
-- ``push`` tells a waiter's client of its grant, if it is subscribed at this server. It returns how many got the message; nothing if none
-- was published: a token that was is used up, whatever the number.
-- The subscribers are counted before: replication carries every message to the replicas, also one that has no receiver here, and a client that is
-- subscribed at one of them would believe a grant that is taken back here. They are counted on the channel of the client's present
-- ``subscription`` alone: the server may not have noticed the end of an earlier one. Without the right to count, the message names no token, and the
-- client asks. Without the right to publish, no push arrives, and a mark is left instead.
-- include channel
-- include unsent
local function tell(nth, process, text)
  redis.pcall('PUBLISH', channel(KEYS[nth], process), text)
end
local function push(nth, process, subscription, request, token, count, now, window, waiting)
  local to = channel(KEYS[nth], process)
  local subscribed = redis.pcall('PUBSUB', 'NUMSUB', to .. subscription)[2]
  if subscribed == 0 then return nil end
  local reached = redis.pcall('PUBLISH', to, subscribed
    and string.format('g %s %.0f %.0f %.0f %.0f %d', request, token, count, now, window, waiting) or 'n ' .. request)
  if type(reached) == 'table' then return unsent(nth, now) end
  return reached
end
