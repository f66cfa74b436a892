-- extension: the highest number of a request to extend the hold of ``request`` that was carried out, 0 for none. Part of enter,
-- renew and extend. ``extended`` is the request and that number; it may be that of an earlier hold.
local function extension(extended, request)
  if not extended or string.sub(extended, 1, #request + 1) ~= request .. ' ' then return 0 end
  return tonumber(string.sub(extended, #request + 2))
end
