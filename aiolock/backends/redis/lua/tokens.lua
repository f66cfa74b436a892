-- tokens: the fencing tokens that a grant carries. Part of enter and serve.
-- They follow the server's clock in µs, so they rise even when the key was lost, and a block never runs ahead of it:
-- it takes the tokens between the last one given (stored) or seen (floor) and now. A key without history gives one.
local function tokens(now, stored, floor, most)
  local top = math.max(now, (stored or 0) + 1, floor + 1)
  if not stored then return top, top end
  return math.max(stored, floor, top - most) + 1, top
end
