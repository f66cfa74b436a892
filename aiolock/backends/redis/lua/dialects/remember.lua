-- remember: have a note live for at least so many ms more. Part of the scripts of the dialects.
local function remember(ms)
  if redis.call('PTTL', KEYS[2]) < ms then redis.call('PEXPIRE', KEYS[2], ms) end
end
