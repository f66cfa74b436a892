-- channel: the channel of a client at this node of a cluster, named after a key. It takes the place of channel there.
-- A cluster brings every message to all its nodes, but PUBLISH counts the subscribers at this one. So each node has a channel
-- of its own: a subscriber was counted, and the message is by this node's clock. Without the right to ask for the node's id,
-- no message is sent.
local function channel(key, process)
  local node = redis.pcall('CLUSTER', 'MYID')
  return string.match(key, '^(.*:1:)[%a.]+:{') .. 'to:' .. process .. '@' .. (type(node) == 'string' and node or '')
end
