-- Everything that is sent to a PostgreSQL server, one statement under each name; the table is filled in, everything else is
-- bound. The only array type is text[]: for any other one the driver would ask the server's catalogue first.
--
-- A row is searched for backwards, as the last with this key, and written where it was found. While any transaction is open
-- elsewhere in the database, no earlier version of a row can be removed, and the index leads to all of them, in the order of their
-- places; the newest one is nearly always behind the others. With key = $1 the server would look at each before it came to that.

-- name: settings
-- First on every connection, whatever role, database and server have set. The time-out of statements comes before the others,
-- because one of a millisecond might end them. A table is found by the index on its key, also while the planner does not know
-- yet how large it is. Warnings are shown, because one can say that a commit did not reach the replica.
SET statement_timeout = 0;
SET quote_all_identifiers = off;
SET lock_timeout = {lock_timeout};
SET idle_session_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET client_min_messages = warning;
SET search_path = pg_catalog, pg_temp;
SET default_transaction_isolation = 'read committed';
SET default_transaction_read_only = off;
SET default_transaction_deferrable = off;
SET synchronous_commit = on;
SET row_security = off;
SET jit = off;
SET plan_cache_mode = force_generic_plan;
SET enable_nestloop = on;
SET enable_indexscan = on;
SET enable_tidscan = on;
SET enable_seqscan = off;
SET enable_hashjoin = off;
SET enable_mergejoin = off

-- name: settings_17
SET transaction_timeout = 0

-- name: writer_settings
-- A row that a transaction keeps locked holds up the other writes of this connection, heartbeats among them, for no longer.
SET lock_timeout = {lock_timeout}

-- name: facts
-- Those that follow are shown to every role by their names, and to few by their state. Subscribers of a publication follow as well.
SELECT version() AS version, pg_is_in_recovery() AS recovering, pg_backend_pid() AS pid,
  current_setting('fsync') AS fsync, current_setting('full_page_writes') AS full_page_writes,
  current_setting('synchronous_standby_names') AS names,
  ARRAY(SELECT coalesce(r.application_name, '') FROM pg_stat_replication AS r
    WHERE NOT EXISTS (SELECT FROM pg_replication_slots AS s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')) AS followers,
  'run ' || extract(epoch FROM pg_postmaster_start_time()) AS run

-- name: timeline
SELECT CASE WHEN pg_is_in_recovery() THEN '' ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END

-- name: product
-- A version with the name of another product, or with none, and a relation that only one of them has.
SELECT CASE WHEN EXISTS (SELECT 1 FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  WHERE n.nspname = 'sys' AND c.relname = 'iam_pg_role_mappings') THEN 'Aurora DSQL' ELSE pg_catalog.version() END

-- name: process
SELECT pg_backend_pid()

-- name: get
-- Values only where they are wanted. The clock is read after the row, in the same statement. The process tells whether the
-- session is still the one of the login.
SELECT CASE WHEN k.wanted = 'value' THEN r.value END AS value, r.version,
  (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS tick, pg_backend_pid() AS process
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS k (key, wanted, place)
LEFT JOIN LATERAL (
  SELECT value, version FROM {table} WHERE key >= k.key AND key <= k.key ORDER BY key DESC LIMIT 1
) AS r ON true
ORDER BY k.place

-- name: insert
INSERT INTO {table} AS r (key, value, version, expires)
VALUES ($1, $2, $3, clock_timestamp() + make_interval(secs => $4))
ON CONFLICT (key) DO NOTHING
RETURNING (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS tick, set_config('synchronous_commit', $5, true)

-- name: update
UPDATE {table} SET value = $2, version = $3, expires = clock_timestamp() + make_interval(secs => $4)
WHERE ctid = (SELECT ctid FROM {table} WHERE key >= $1 AND key <= $1 ORDER BY key DESC LIMIT 1)
  AND key = $1 AND version = $6
RETURNING (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS tick, set_config('synchronous_commit', $5, true),
  (SELECT count(pg_notify($8 || address, $1)) FROM unnest(string_to_array($7, ',')) AS address)

-- name: several
-- Several edits, each by its own version, and notifications; {skip} is empty, or passes rows over that are locked. Rows are
-- locked in the order of their keys, inserted ones first, so that two such statements never wait for each other. A row that
-- another transaction has changed meanwhile is read again when its lock is there, and has another version then. An edit
-- is handed from each step to the next one: to find it again there would take a search of all of them.
WITH edit AS MATERIALIZED (
  SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[])
    AS e (key, expected, version, value, ttl, notify)
), inserted AS (
  INSERT INTO {table} AS r (key, value, version, expires)
  SELECT key, decode(value, 'base64'), version, clock_timestamp() + make_interval(secs => ttl::float8)
  FROM edit WHERE expected = '' ORDER BY key
  ON CONFLICT (key) DO NOTHING
  RETURNING r.key
), locked AS MATERIALIZED (
  SELECT e.*, r.ctid AS place FROM edit AS e
  JOIN LATERAL (
    SELECT ctid AS place FROM {table} WHERE key >= e.key AND key <= e.key ORDER BY key DESC LIMIT 1
  ) AS found ON true
  JOIN {table} AS r ON r.ctid = found.place AND r.key = e.key AND r.version = e.expected
  WHERE e.expected <> '' AND (SELECT count(*) FROM inserted) >= 0
  ORDER BY r.key FOR UPDATE OF r {skip}
), updated AS (
  UPDATE {table} AS r
  SET value = decode(l.value, 'base64'), version = l.version,
    expires = clock_timestamp() + make_interval(secs => l.ttl::float8)
  FROM locked AS l
  WHERE r.ctid = l.place AND r.key = l.key AND r.version = l.expected AND l.value IS NOT NULL
  RETURNING r.key, l.notify
), deleted AS (
  DELETE FROM {table} AS r USING locked AS l
  WHERE r.ctid = l.place AND r.key = l.key AND r.version = l.expected AND l.value IS NULL
  RETURNING r.key, l.notify
), made AS MATERIALIZED (
  SELECT i.key, e.notify FROM inserted AS i JOIN edit AS e ON e.key = i.key
  UNION ALL SELECT key, notify FROM updated UNION ALL SELECT key, notify FROM deleted
)
SELECT m.key, (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS tick,
  set_config('synchronous_commit', $7, true),
  (SELECT count(pg_notify($8 || address, m.key)) FROM unnest(string_to_array(m.notify, ',')) AS address)
FROM made AS m

-- name: enter
-- A read and a compare-and-set in one statement: nothing that it finds in the row by its snapshot may have changed when it has the
-- lock of the row. A statement that read the row again after it had waited would judge it by a session as old as its
-- snapshot. The session row is locked until the commit: a heartbeat that was answered later has ruled out every copy of this
-- statement, because it names the version before. It waits for no lock of a row, and declines instead; an insertion
-- waits for one of the same key. The time is read when both locks are there.
WITH found AS MATERIALIZED (
  SELECT value, version, ctid AS place, encode(substr(value, length($3) + 1), 'escape') AS rest
  FROM {table} WHERE key >= $1 AND key <= $1 ORDER BY key DESC LIMIT 1
), free AS MATERIALIZED (
  SELECT substring(f.rest FROM '^[0-9]+')::int8 AS last, substring(f.rest FROM '[^0-9].*$') AS rest, f.place
  FROM found AS f JOIN {table} AS r ON r.ctid = f.place AND r.key = $1 AND r.version = f.version
  WHERE substr(f.value, 1, length($3)) = convert_to($3, 'UTF8')
    AND f.rest ~ '^[0-9]{1,18}(}|,"f":[[]["0-9a-z ,]*[]]})$'
  FOR NO KEY UPDATE OF r SKIP LOCKED
), session AS MATERIALIZED (
  SELECT FROM {table} AS s
  WHERE s.ctid = (SELECT ctid FROM {table} WHERE key >= $7 AND key <= $7 ORDER BY key DESC LIMIT 1)
    AND s.key = $7 AND s.version = $8
    AND (EXISTS (SELECT FROM free) OR NOT EXISTS (SELECT FROM found))
  FOR SHARE OF s SKIP LOCKED
), topped AS MATERIALIZED (
  SELECT f.last, f.rest, f.place, greatest(f.last + 1, $6::int8 + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::int8) AS top
  FROM session LEFT JOIN free AS f ON true
), minted AS MATERIALIZED (
  SELECT *, CASE WHEN last > 0 THEN greatest(last, $6, top - $5::int8) + 1 ELSE top END AS first FROM topped
), made AS MATERIALIZED (
  SELECT last IS NULL AS absent, place, convert_to($3 || top || ',"h":[' || $4 || ',"b":' || top - first + 1 || ',"t":' || first || '}]'
    || coalesce(rest, '}'), 'UTF8') AS value
  FROM minted
), updated AS (
  UPDATE {table} AS r SET value = m.value, version = $2, expires = NULL
  FROM made AS m WHERE r.ctid = m.place AND r.key = $1 AND NOT m.absent
  RETURNING r.value, r.version
), inserted AS (
  INSERT INTO {table} AS r (key, value, version) SELECT $1, value, $2 FROM made WHERE absent
  ON CONFLICT (key) DO NOTHING
  RETURNING r.value, r.version
), entered AS (
  SELECT value, version FROM updated UNION ALL SELECT value, version FROM inserted
)
SELECT coalesce(e.value, f.value) AS value, coalesce(e.version, f.version) AS version, f.version AS before,
  (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS tick
FROM (SELECT) AS one LEFT JOIN entered AS e ON true LEFT JOIN found AS f ON true

-- name: scan
-- Keys are printable ASCII: nothing that begins with the prefix comes after the prefix and a DEL.
SELECT key, value, version, (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS tick
FROM {table} WHERE key >= $1 AND key < $1 || chr(127) AND key > $2
ORDER BY key LIMIT $3

-- name: purge
-- One page: checks the rows again as it deletes them, and leaves those alone that another transaction is at.
WITH page AS MATERIALIZED (
  SELECT key FROM {table}
  WHERE key >= $1 AND key < $1 || chr(127) AND key > $2 AND expires <= clock_timestamp() - make_interval(secs => $3)
    AND key <> ALL ($5::text[])
  ORDER BY key LIMIT $4 FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM {table} AS r USING page AS p
  WHERE r.key = p.key AND r.expires <= clock_timestamp() - make_interval(secs => $3)
  RETURNING r.key
)
SELECT max(key) AS last, (SELECT count(*) FROM gone) AS gone FROM page

-- name: described
-- The table as the server knows it: NULL instead of a row that is not there.
SELECT c.relkind::text AS kind, c.relpersistence::text AS persistence, obj_description(c.oid, 'pg_class') AS comment,
  (SELECT string_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
      || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
      || CASE WHEN l.collname = 'C' THEN ' C' ELSE '' END, ', ' ORDER BY a.attnum)
    FROM pg_attribute AS a LEFT JOIN pg_collation AS l ON l.oid = a.attcollation
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped) AS columns,
  (SELECT string_agg(a.attname, ', ') FROM pg_index AS i
    JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
    WHERE i.indrelid = c.oid AND i.indisprimary AND i.indisvalid) AS key,
  concat_ws(', ',
    CASE WHEN NOT has_table_privilege(c.oid, 'SELECT') THEN 'SELECT' END,
    CASE WHEN NOT has_table_privilege(c.oid, 'INSERT') THEN 'INSERT' END,
    CASE WHEN NOT has_table_privilege(c.oid, 'UPDATE') THEN 'UPDATE' END,
    CASE WHEN NOT has_table_privilege(c.oid, 'DELETE') THEN 'DELETE' END) AS missing
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = $2

-- name: server_settings
SELECT name, setting FROM pg_settings WHERE name IN ('max_connections')

-- name: oldest_transaction
-- Of those in this database that have a snapshot or have written: earlier versions of rows cannot be removed before they end. No row
-- if there is none. A role without pg_read_all_stats sees its own sessions, and prepared transactions.
SELECT what, extract(epoch FROM clock_timestamp() - begun)::float8 AS age FROM (
  SELECT 'process ' || pid || coalesce(' (' || nullif(application_name, '') || ')', '') AS what, xact_start AS begun
  FROM pg_stat_activity
  WHERE datname = current_database() AND pid <> pg_backend_pid() AND coalesce(backend_xmin, backend_xid) IS NOT NULL
  UNION ALL SELECT 'prepared transaction ' || gid, prepared FROM pg_prepared_xacts WHERE database = current_database()
) AS open WHERE begun IS NOT NULL ORDER BY begun LIMIT 1

-- name: encrypted
-- Without a row where the server was built without TLS.
SELECT coalesce((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), false)
