-- channel: where a process is told something about a key. Part of place and doc_write. In a cluster it is cluster_channel.
-- A message is a hint, and who may not publish tells nobody: what counts is in the key.
local function channel(key, process)
  return string.match(key, '^(.*:1:)[%a.]+:{') .. 'to:' .. process
end
