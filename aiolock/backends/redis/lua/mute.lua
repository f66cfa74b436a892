-- mute: the place of messages for a server that takes no script with PUBLISH or PUBSUB, such as a proxy that checks scripts. No client is
-- told of anything: waiters and holders ask, and the position of a waiter that does not is passed over, as if its client were not subscribed.
-- Its next heartbeat finds the mark that is left for it, and its client asks from then on.
-- include unsent
local function tell() end
local function push(nth, process, subscription, request, token, count, now) unsent(nth, now) end
