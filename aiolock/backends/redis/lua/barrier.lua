-- barrier: a write behind which WAIT tells how many replicas have it, and all that was written before.
-- KEYS[1] a key without another use. Returns nothing.
-- Safe: leaves nothing behind. Begins with a write that needs no memory, so that a full server prolongs what is held.
redis.call('HDEL', KEYS[1], 'f')
redis.call('HSET', KEYS[1], 'f', 1)
redis.call('HDEL', KEYS[1], 'f')
