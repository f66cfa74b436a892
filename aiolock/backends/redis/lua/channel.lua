-- channel: the channel of a client, named after a key. Part of positions and register_write. In a cluster it is cluster_channel.
-- A message is a hint, and an account that may not publish sends none: the state is in the key.
local function channel(key, process)
  return string.match(key, '^(.*:1:)[%a.]+:{') .. 'to:' .. process
end
