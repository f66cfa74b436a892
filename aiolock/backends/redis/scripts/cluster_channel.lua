-- channel: where a process is told something about a key, at this node of a cluster. It takes the place of channel there.
-- A cluster brings every message to all its nodes, but PUBLISH counts who listens at this one. So each node has a channel
-- of its own: whoever hears it was counted, and is told by this node's clock. Who may not ask for the node tells nobody.
local function channel(key, process)
  local node = redis.pcall('CLUSTER', 'MYID')
  return string.match(key, '^(.*:1:)[%a.]+:{') .. 'to:' .. process .. '@' .. (type(node) == 'string' and node or '')
end
