-- current: test whether a hold has a token: one of its own, from that on which its last renewal has reported. Part of force and many_force.
local function current(token, first, last, present)
  token, first, last = tonumber(token), tonumber(first), tonumber(last)
  local reported = tonumber(string.match(present or '', '^%d+ (%d+)') or 0)
  if reported >= first and reported <= last then first = reported end
  return token >= first and token <= last
end
