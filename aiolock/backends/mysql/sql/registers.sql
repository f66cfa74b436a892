-- Registers: small values that are changed by compare-and-set; latches, barriers and observers stand on them.
-- Versions are at least the server's clock in microseconds, so a register that was forgotten and comes back has new ones.

-- name: read_register
SELECT value, version FROM {registers} WHERE id = {id} AND expires_at > UTC_TIMESTAMP(6)

-- name: update_register
UPDATE {registers} SET value = {value}, expires_at = UTC_TIMESTAMP(6) + INTERVAL {keep} MICROSECOND,
  version = LAST_INSERT_ID(GREATEST(version + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))))
WHERE id = {id} AND version = {version} AND expires_at > UTC_TIMESTAMP(6)

-- name: create_register
-- One that is over is none. Assignments are made from left to right: the expiry comes last.
INSERT INTO {registers} (id, namespace, family, name, value, version, expires_at)
VALUES ({id}, {namespace}, {family}, {name}, {value},
  LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))),
  UTC_TIMESTAMP(6) + INTERVAL {keep} MICROSECOND)
ON DUPLICATE KEY UPDATE
  value = IF(expires_at <= UTC_TIMESTAMP(6), VALUES(value), value),
  version = IF(expires_at <= UTC_TIMESTAMP(6), LAST_INSERT_ID(GREATEST(version + 1, VALUES(version))), version),
  expires_at = IF(expires_at <= UTC_TIMESTAMP(6), VALUES(expires_at), expires_at)

-- name: register_written
-- The version that the write made, and the clients that watch.
SELECT LAST_INSERT_ID();
SELECT DISTINCT client FROM {requests} WHERE lock_id = {id} AND state = 5 AND expires_at > UTC_TIMESTAMP(6)

-- name: watch
-- A version that was written before is in the answer; a later write wakes this client.
DELETE r FROM {requests} AS r FORCE INDEX (lock_id) WHERE r.lock_id = {id} AND r.expires_at <= UTC_TIMESTAMP(6);
INSERT INTO {requests} (owner, lock_id, client, state, arrival, mode, weight, block, label, ttl, confirmation_window, token,
  since, expires_at)
VALUES ({owner}, {id}, {client}, 5, 0, '', 0, 0, '', {ttl}, 0, 0, UTC_TIMESTAMP(6),
  UTC_TIMESTAMP(6) + INTERVAL {ttl} MICROSECOND)
ON DUPLICATE KEY UPDATE expires_at = VALUES(expires_at);
SELECT version FROM {registers} WHERE id = {id} AND expires_at > UTC_TIMESTAMP(6)
