-- Documents: small values that are changed by compare-and-set; latches, barriers and observers stand on them.
-- Versions are at least the server's clock in microseconds, so a document that was forgotten and comes back has new ones.

-- name: read_document
SELECT value, version FROM {documents} WHERE id = {id} AND expires_at > UTC_TIMESTAMP(6)

-- name: write_document
UPDATE {documents} SET value = {value}, expires_at = UTC_TIMESTAMP(6) + INTERVAL {keep} MICROSECOND,
  version = LAST_INSERT_ID(GREATEST(version + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))))
WHERE id = {id} AND version = {version} AND expires_at > UTC_TIMESTAMP(6)

-- name: make_document
-- One that is over is none. Assignments are made from left to right: the expiry comes last.
INSERT INTO {documents} (id, namespace, family, name, value, version, expires_at)
VALUES ({id}, {namespace}, {family}, {name}, {value},
  LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))),
  UTC_TIMESTAMP(6) + INTERVAL {keep} MICROSECOND)
ON DUPLICATE KEY UPDATE
  value = IF(expires_at <= UTC_TIMESTAMP(6), VALUES(value), value),
  version = IF(expires_at <= UTC_TIMESTAMP(6), LAST_INSERT_ID(GREATEST(version + 1, VALUES(version))), version),
  expires_at = IF(expires_at <= UTC_TIMESTAMP(6), VALUES(expires_at), expires_at)

-- name: told_document
-- Which version that made, and who watches.
SELECT LAST_INSERT_ID();
SELECT DISTINCT client FROM {bids} WHERE lock_id = {id} AND state = 5 AND expires_at > UTC_TIMESTAMP(6)

-- name: watch
-- What was written before is in the answer, what is written later wakes us.
DELETE b FROM {bids} AS b FORCE INDEX (lock_id) WHERE b.lock_id = {id} AND b.expires_at <= UTC_TIMESTAMP(6);
INSERT INTO {bids} (owner, lock_id, client, state, arrival, mode, weight, block, label, ttl, claim, token, since,
  expires_at)
VALUES ({owner}, {id}, {client}, 5, 0, '', 0, 0, '', {ttl}, 0, 0, UTC_TIMESTAMP(6),
  UTC_TIMESTAMP(6) + INTERVAL {ttl} MICROSECOND)
ON DUPLICATE KEY UPDATE expires_at = VALUES(expires_at);
SELECT version FROM {documents} WHERE id = {id} AND expires_at > UTC_TIMESTAMP(6)
