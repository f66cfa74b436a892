-- Sent on connections of callers, in their transactions, and about these. A caller's search path may find other functions and
-- types first, so each is named with its schema. Nothing here fails but by a time-out, a deadlock or the end of the connection: an
-- error would leave the caller's transaction aborted. What may wait is sent behind a savepoint. All values that come and go are of the
-- type cstring: no column is, and the driver asks the codecs that a program has set for its own types.

-- name: place
-- The server, its present run, and the database: an advisory lock excludes no client of another one.
SELECT pg_catalog.textout(pg_catalog.concat_ws('/', s.system_identifier,
    extract(epoch FROM pg_catalog.pg_postmaster_start_time()), pg_catalog.current_database())) AS place,
  pg_catalog.nameout(pg_catalog.current_database()) AS database, pg_catalog.int4out(pg_catalog.pg_backend_pid()) AS pid,
  pg_catalog.textout(pg_catalog.current_setting('transaction_isolation')) AS isolation
FROM pg_catalog.pg_control_system() AS s

-- name: try_advisory
-- NULL if another transaction has it. The mark is a setting of the transaction, which goes when the lock goes: at the end of the
-- transaction, and when that goes back to an earlier savepoint.
SELECT pg_catalog.textout(CASE WHEN pg_catalog.pg_try_advisory_xact_lock(pg_catalog.int8in($1)) THEN
  pg_catalog.set_config('aiolock.marks',
    pg_catalog.concat(pg_catalog.current_setting('aiolock.marks', true), pg_catalog.textin($2)), true) END)

-- name: wait_advisory
-- As plain text, because two statements need one round trip then.
SELECT pg_catalog.pg_advisory_xact_lock({key});
SELECT pg_catalog.set_config('aiolock.marks',
  pg_catalog.concat(pg_catalog.current_setting('aiolock.marks', true), '{mark}'), true)

-- name: find_mark
-- Find the mark, and remove it: 0 if it was not there.
SELECT pg_catalog.int4out(pg_catalog.strpos(m.marks, pg_catalog.textin($1))), pg_catalog.textout(
  pg_catalog.set_config('aiolock.marks', pg_catalog.replace(m.marks, pg_catalog.textin($1), ''), true))
FROM (SELECT pg_catalog.current_setting('aiolock.marks', true) AS marks OFFSET 0) AS m

-- name: waits
-- On a connection of the client: whether a session waits for a lock. A request to cancel is ignored before that.
SELECT 1 FROM pg_locks WHERE pid = $1 AND NOT granted

-- name: advisory
-- On a connection of the client: those that have an advisory lock, and those that wait for it, in their order.
SELECT l.granted, coalesce('connection ' || l.pid, 'a prepared transaction') AS label,
  extract(epoch FROM coalesce(a.xact_start, clock_timestamp()))::float8 AS since
FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.classid = $1 AND l.objid = $2
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY l.waitstart

-- name: share_free
-- The row of a lock, locked until the end of the transaction: no other client enters before. None if another one has it locked.
SELECT pg_catalog.textout(pg_catalog.encode(value, 'hex')) AS value FROM {table}
WHERE key OPERATOR(pg_catalog.=) pg_catalog.textin($1) FOR SHARE SKIP LOCKED

-- name: share
SELECT pg_catalog.textout(pg_catalog.encode(value, 'hex')) AS value FROM {table}
WHERE key OPERATOR(pg_catalog.=) pg_catalog.textin($1) FOR SHARE
