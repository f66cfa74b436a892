-- enter: acquire the lock, or join its queue.
-- KEYS[1] the lock. ARGV: 1 request, 2 ttl ms, 3 most tokens, 4 floor (the highest token seen), 5 label, 6 the terms of a
-- position, or nothing: its life in ms, how the client learns of a grant (n: by asking; s: by push, followed by what the channel
-- of its present subscription has in addition), and the ticket of an earlier position (-1: none).
-- Returns {1, token, tokens, server µs, others wait} or {0, ticket, server µs, µs until the hold ends, it is first}.
-- Safe: one atomic step on one key, idempotent by request: asking again finds the grant or the position, and a request
-- that has a tombstone changes nothing. The first command fails on a key of another type, before anything is written.
local request = ARGV[1]
local f = redis.call('HMGET', KEYS[1], 'owner', 'until', 'top', 'head', 'tail', 'x:' .. request, 'ttl')
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
-- include tokens
local function enter(waiting)
  local token, top = tokens(now, tonumber(f[3]), tonumber(ARGV[4]), tonumber(ARGV[3]))
  redis.call('HSET', KEYS[1], 'owner', request, 'until', now + ARGV[2] * 1000, 'token', token, 'top', top,
    'label', ARGV[5], 'since', now, 'provisional', 0, 'ttl', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[2] + 60000)
  return {1, token, top - token + 1, now, waiting}
end
if not f[1] and f[4] == f[5] and not f[6] then return enter(0) end
-- include serve
-- include park
-- include rewind
local mine = string.match(request, '^%x+')
if f[6] then return {0, -1, now, 60000000, 0} end
if f[1] then f[2] = rewind(1, now, f[2], f[7]) end
if f[1] ~= request and (not f[1] or tonumber(f[2]) <= now) then
  if f[1] and redis.call('HGET', KEYS[1], 'provisional') == '1' then park(1, f[1], mine) end
  local handed_over = serve(1, now, request, tonumber(ARGV[4]))
  f = redis.call('HMGET', KEYS[1], 'owner', 'until', 'top', 'head', 'tail')
  -- No waiter could be reached: the request is granted, and the others come back to their tickets. If not all of them were
  -- examined, it waits behind them.
  if not f[1] and handed_over ~= -1 then return enter(f[4] ~= f[5] and 1 or 0) end
end
if f[1] == request then
  -- The request's own grant, whose answer or push may be lost: from now on it stands for a full ttl. Once it was extended,
  -- this is a late copy.
-- include extension
  local g = redis.call('HMGET', KEYS[1], 'token', 'top', 'extended')
  if extension(g[3], request) == 0 then
    redis.call('PEXPIRE', KEYS[1], ARGV[2] + 60000)
    redis.call('HSET', KEYS[1], 'until', now + ARGV[2] * 1000, 'provisional', 0)
  end
  return {1, tonumber(g[1]), g[2] - g[1] + 1, now, f[4] ~= f[5] and 1 or 0}
end
local left = f[1] and f[2] - now or 0
if ARGV[6] == '' then return {0, -1, now, left, 0} end
-- include join
local ticket = tonumber(redis.call('HGET', KEYS[1], 'r:' .. request))
if not ticket then
  local head, tail, life = tonumber(f[4] or 0), tonumber(f[5] or 0), nil
  ticket, life = join_queue(1, request, now, ARGV[6],
    string.format('%s %s %s %s', ARGV[2], ARGV[3], ARGV[4], ARGV[5]), head, tail)
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.max(left / 1000, life) + 60000))
  if f[1] and f[4] == f[5] then
    -- Without the right to publish, the holder learns of the demand with its next renewal.
    tell(1, string.match(f[1], '^%x+'), 'd ' .. f[1])
  end
  f[4] = math.min(head, ticket)
end
return {0, ticket, now, left, ticket == tonumber(f[4]) and 1 or 0}
