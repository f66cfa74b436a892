-- many_inspect: read holders and waiters, in order. For administrators.
-- KEYS[1] the lock. Returns {server µs, limit (-1: not known), holds, positions, what was reported of the present lease}: each hold is "until weight token
-- tokens since label" (no tokens: kept after its release), in the order of their tokens, and each position "weight label"; at
-- most 1,000 of either. Writes nothing.
local t = redis.call('TIME')
local now, limit, field, order, holds, positions = t[1] * 1000000 + t[2], 0, {}, {}, {}, {}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  field[all[i]] = all[i + 1]
  if string.sub(all[i], 1, 2) == 'h:' then
    local ends, weight, token, count, since, label = string.match(all[i + 1], '^(%d+) %d (%d+) (%d+) (%d+) (%d+) %d+ %d+ (.*)$')
    if tonumber(ends) > now then
      if string.sub(all[i], 3, 4) == '0:' then count = 0 end
      order[#order + 1] = {tonumber(token), string.format('%s %s %s %s %s %s', ends, weight, token, count, since, label)}
    end
  end
end
table.sort(order, function(a, b) return a[1] < b[1] end)
for i = 1, math.min(#order, 1000) do holds[i] = order[i][2] end
for n = tonumber(field.head or 0), tonumber(field.tail or 0) - 1 do
  local position = field['q:' .. n]
  if position and #positions < 1000 then
    local process, weight, label = string.match(position, '^(%x+):%x+ %d+ %d+ %d+ (%d+) (.*)$')
    local life = string.match(field['p:' .. process] or '', '^%d+')
    if life and tonumber(life) >= now then positions[#positions + 1] = weight .. ' ' .. label end
  end
end
return {now, tonumber(field.limit or -1), holds, positions, field.present or ''}
