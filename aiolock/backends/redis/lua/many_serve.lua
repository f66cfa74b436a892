-- many_serve: grant the head of the queue, as many as fit together, each for a confirmation window. Part of the scripts after which
-- a waiter may fit. Returns ms of the shortest confirmation window given, 0 if there is none, -1 if there is more to examine; the weight
-- in use then; and whether one of ``mine``, a client or a request, was granted, which reads this answer and needs no push.
-- The first that can be reached and does not fit ends it, so no waiter starves behind those that need less room. Positions of
-- clients that are gone, parked or not subscribed are dropped as in serve: their clients keep the ticket. Writes begin
-- with one that needs no memory. One step examines 250 positions and 2,500 holes, so that the server is not held up.
-- include messages
local function serve(nth, now, mine, floor, used, limit)
  local f = redis.call('HMGET', KEYS[nth], 'head', 'tail', 'top', 'next', 'keep', 'swept')
  local head, tail, top, soonest = tonumber(f[1] or 0), tonumber(f[2] or 0), tonumber(f[3]), tonumber(f[4])
  local n, stop, most, shortest, longest, last, handed = head, math.min(tail, head + 2500), 250, nil, 0, nil, false
  local full, swept, published = false, f[6] or 0, false
  if used == 0 then soonest, swept = nil, now end
  while n < stop and most > 0 do
    local position = redis.call('HGET', KEYS[nth], 'q:' .. n)
    if not position then
      n = skip(nth, n + 1, stop)
    else
      most = most - 1
      local request, process, ttl, block, seen, weight, label =
        string.match(position, '^((%x+):%x+) (%d+) (%d+) (%d+) (%d+) (.*)$')
      local presence = redis.call('HGET', KEYS[nth], 'p:' .. process) or ''
      local life, notified, subscription = string.match(presence, '^(%d+) (%a)(%S*)')
      local own = process == mine or request == mine
      local there = life and tonumber(life) >= now and (notified ~= 'k' or own) and
        (notified ~= 'n' or own or life - now <= 12000000)
      full = there and used + weight > limit
      if full then break end
      remove_position(nth, n, request, process, presence)
      if there then
        local window = math.min(tonumber(ttl), math.max(1000, math.floor(ttl / 10)))
        local token, new = tokens(now, top, math.max(floor, tonumber(seen)), tonumber(block))
        local reached = 1
        if notified == 's' and not own then
          reached = push(nth, process, subscription, request, token, new - token + 1, now, window, n + 1 < tail and 1 or 0)
          if reached then top, published = new, true end
        end
        if reached and reached > 0 then
          hold(nth, request, now + window * 1000, 1, weight, token, new - token + 1, now, ttl, label)
          used, top, last, handed = used + weight, new, request, handed or own
          shortest, longest = math.min(shortest or window, window), math.max(longest, window)
          soonest = math.min(soonest or math.huge, now + window * 1000)
        end
      end
      n = n + 1
    end
  end
  if n > head then
    redis.call('HDEL', KEYS[nth], 'head')
    redis.call('HSET', KEYS[nth], 'head', n)
  end
  if last then
    redis.call('HSET', KEYS[nth], 'used', used, 'top', top, 'last', last, 'next', soonest, 'swept', swept)
    stay(nth, longest + (f[5] or 60000))
  elseif published then
    redis.call('HSET', KEYS[nth], 'top', top)
  end
  return not full and n < tail and -1 or shortest or 0, used, handed
end
