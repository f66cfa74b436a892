-- mute: the place of messages for a server that takes no script with PUBLISH or PUBSUB, such as a proxy that checks scripts. No client is
-- told of anything: waiters and holders ask, and a waiter that wants messages is passed over as one that is not subscribed.
local function tell() end
local function push() end
