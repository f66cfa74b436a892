-- serve: make the next waiter the holder, for a confirmation window. Part of enter, release, leave, heartbeat and force.
-- Returns the ms of that window, 0 without a waiter, -1 if there is more to examine: 500 positions and 2,500
-- holes are what one step examines, so that the server is not held up. After -1 the lock is free, but a newcomer cannot acquire
-- it, because a live waiter may be further back: the sender, or the next heartbeat of a waiter, goes on.
-- A position whose client was silent for three heartbeats is dropped. One whose client is parked (flag k) or not
-- subscribed any more is dropped too, but its client keeps the ticket and comes back to it: a count of 0 never means
-- dead. A count above 0 proves nothing, hence the window. The presence of a client that is not pushed to, and that reaches
-- further than any heartbeat sets it (12 s), was written before the clock was set back, and counts as silent: a live client
-- writes it again. ``mine``, a client or a request, reads this answer and needs no push. Writes begin with one that needs no
-- memory.
-- include positions
-- include messages
local function serve(nth, now, mine, floor)
  redis.call('HDEL', KEYS[nth], 'owner')
  local f = redis.call('HMGET', KEYS[nth], 'head', 'tail', 'top')
  local head, tail, published = tonumber(f[1] or 0), tonumber(f[2] or 0), nil
  local n, stop, most = head, math.min(tail, head + 2500), 500
  while n < stop and most > 0 do
    local position = redis.call('HGET', KEYS[nth], 'q:' .. n)
    if not position then
      n = skip(nth, n + 1, stop)
    else
      most = most - 1
      local request, process, ttl, block, seen, label =
        string.match(position, '^((%x+):%x+) (%d+) (%d+) (%d+) (.*)$')
      local presence = redis.call('HGET', KEYS[nth], 'p:' .. process) or ''
      local life, notified, subscription = string.match(presence, '^(%d+) (%a)(%S*)')
      local own = process == mine or request == mine
      remove_position(nth, n, request, process, presence)
      if life and tonumber(life) >= now and (notified ~= 'k' or own) and (notified ~= 'n' or own or life - now <= 12000000) then
        local window = math.min(tonumber(ttl), math.max(1000, math.floor(ttl / 10)))
        local token, top = tokens(now, published or tonumber(f[3]), math.max(floor, tonumber(seen)), tonumber(block))
        local reached = 1
        if notified == 's' and not own then
          reached = push(nth, process, subscription, request, token, top - token + 1, now, window, n + 1 < tail and 1 or 0)
          published = reached and top or published
        end
        if reached and reached > 0 then
          redis.call('HSET', KEYS[nth], 'owner', request, 'until', now + window * 1000, 'token', token, 'top', top,
            'label', label, 'since', now, 'provisional', 1, 'ttl', ttl, 'head', n + 1)
          redis.call('PEXPIRE', KEYS[nth], window + 60000)
          return window
        end
      end
      n = n + 1
    end
  end
  if published then redis.call('HSET', KEYS[nth], 'top', published) end
  if n > head then redis.call('HSET', KEYS[nth], 'head', n) end
  return n < tail and -1 or 0
end
