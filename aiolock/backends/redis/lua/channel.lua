-- channel: the channel of a client, named after a key. Part of messages. In a cluster it is cluster_channel.
local function channel(key, process)
  return string.match(key, '^(.*:1:)[%a.]+:{') .. 'to:' .. process
end
