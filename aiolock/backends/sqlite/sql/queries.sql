-- name: get
-- All keys are one value, a list in JSON: a statement takes some number of values only, and old versions no more than 999.
SELECT key, CASE WHEN ?2 THEN CAST(value AS BLOB) ELSE x'' END, version FROM aiolock
WHERE version <> '' AND key IN (SELECT value FROM json_each(?1))

-- name: insert
-- A row without a version, which no client writes, counts as absent.
INSERT INTO aiolock (version, value, expires, key) VALUES (?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET version = excluded.version, value = excluded.value, expires = excluded.expires
WHERE aiolock.version = ''

-- name: update
UPDATE aiolock SET version = ?, value = ?, expires = ? WHERE key = ? AND version = ?

-- name: delete
DELETE FROM aiolock WHERE key = ? AND version = ?

-- name: page
SELECT key, version, CAST(value AS BLOB) FROM aiolock WHERE version <> '' AND key >= ? AND key > ? ORDER BY key LIMIT 500

-- name: purge
-- Keys are printable ASCII: nothing that begins with the prefix comes after the prefix and a DEL.
DELETE FROM aiolock
WHERE key IN (SELECT key FROM aiolock WHERE key >= ?1 AND key < ?1 || char(127) AND expires <= ?2
  AND key NOT IN (SELECT value FROM json_each(?3)) LIMIT 500)
