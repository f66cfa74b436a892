-- sweep: delete from a note what is over, once it has many fields. Part of the scripts of the dialects.
-- Those of clients that died stay behind while others keep the note alive. A tombstone counts for 60 s.
local function sweep(now, fresh)
  if redis.call('HLEN', KEYS[2]) <= 64 then return end
  local all = redis.call('HGETALL', KEYS[2])
  for i = 1, #all, 2 do
    local kind, at = string.match(all[i], '^(%l+):'), tonumber(all[i + 1])
    local lives = kind == 'x' and 60000 or kind == 'w' and fresh or kind == 'pause' and 1000
    if lives and not (at and at <= now + 1000 and at > now - lives) then redis.call('HDEL', KEYS[2], all[i]) end
  end
end
