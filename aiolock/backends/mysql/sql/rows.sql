-- The statements about rows, one packet or a part of one under each name.
-- {words} are filled in: numbers as they are, and all texts and values as hexadecimal digits (X'…'), which no character set and no
-- sql_mode reads as a part of the statement.

-- name: settings
-- First on every connection, whatever init_connect and the server's defaults have made of the session. A transaction that is
-- open ends, and ROLLBACK begins none: so the completion type comes before it. The comments have variables of MariaDB alone, and
-- one of MySQL. A row that is locked is waited for as shortly as the server can.
SET NAMES utf8mb4 COLLATE utf8mb4_bin;
SET SESSION completion_type=0, sql_mode='STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION', sql_safe_updates=0, sql_big_selects=1,
  sql_select_limit=18446744073709551615, innodb_lock_wait_timeout=1, time_zone='+00:00', timestamp=DEFAULT
  /*M!100000 , max_statement_time=0, idle_transaction_timeout=0, idle_readonly_transaction_timeout=0,
  idle_write_transaction_timeout=0 */ /*!80000 , max_execution_time=0 */;
ROLLBACK;
SET SESSION autocommit=1;
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
USE {database}

-- name: variables
SET SESSION lock_wait_timeout={lock_wait_timeout}, wait_timeout=2147483;
SHOW GLOBAL VARIABLES WHERE Variable_name IN ('read_only', 'super_read_only', 'innodb_read_only', 'wsrep_on',
  'group_replication_single_primary_mode', 'innodb_flush_log_at_trx_commit', 'innodb_rollback_on_timeout', 'log_bin',
  'binlog_format', 'performance_schema', 'server_uuid', 'server_uid', 'version', 'version_comment', 'ob_query_timeout')

-- name: server
-- The identity of the server, in one word. By SHA2, because MySQL 9.6 removed SHA1 and MD5.
SHA2(CONCAT_WS('/', @@hostname, @@port, @@datadir, @@GLOBAL.server_id{numbers}), 256)

-- name: facts
-- A server may have been told that SYSDATE is NOW. Databases are called by one name where the server is blind to their case.
SELECT CONNECTION_ID(), SLEEP(0.0001) = 0 AND SYSDATE(6) > NOW(6),
  IF(@@lower_case_table_names, LOWER(DATABASE()), DATABASE()), @@lower_case_table_names,
  {server}, CONCAT(@@hostname, ':', @@port)

-- name: writable
SELECT @@GLOBAL.read_only IN ('0', 'OFF')

-- name: causal
-- On Galera a read waits until this node has applied what the others had committed before.
SET SESSION wsrep_sync_wait=1

-- name: tick
-- Microseconds by the clock of the server. SYSDATE, because the other clocks stand still from the beginning of a statement.
TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6))

-- name: clock
SELECT {tick}

-- name: row
-- One row, or NULL for its absence; the tick is taken when it was read.
SELECT {what}, r.version, {tick} FROM (SELECT 1) AS one LEFT JOIN {table} AS r ON r.k = {key}

-- name: rows
SELECT k, {what}, version FROM {table} WHERE k IN ({keys})

-- name: insert
-- The tick comes back in the answer to the write: it is the argument of LAST_INSERT_ID. A row that is there stays as it is.
INSERT INTO {table} (k, version, expires, value)
VALUES ({key}, IF(LAST_INSERT_ID({tick}), {version}, NULL), {expires}, {value}) ON DUPLICATE KEY UPDATE k = k

-- name: update
UPDATE {table} SET version = IF(LAST_INSERT_ID({tick}), {version}, NULL), value = {value}, expires = {expires}
WHERE k = {key} AND version = {expected}

-- name: update_unlocked
-- It waits for no row: one that is locked by another transaction is not found.
UPDATE (SELECT k FROM {table} FORCE INDEX (PRIMARY) WHERE k = {key} LIMIT 1 FOR UPDATE SKIP LOCKED) AS free
STRAIGHT_JOIN {table} AS t FORCE INDEX (PRIMARY) ON t.k = free.k
SET t.version = IF(LAST_INSERT_ID({tick}), {version}, NULL), t.value = {value}, t.expires = {expires}
WHERE t.version = {expected}

-- name: delete
DELETE FROM {table} WHERE k = {key} AND version = {expected}

-- name: delete_unlocked
DELETE t FROM (SELECT k FROM {table} FORCE INDEX (PRIMARY) WHERE k = {key} LIMIT 1 FOR UPDATE SKIP LOCKED) AS free
STRAIGHT_JOIN {table} AS t FORCE INDEX (PRIMARY) ON t.k = free.k
WHERE t.version = {expected}

-- name: note
-- Right behind a write, if that has changed its row: a row for each client that is to read it.
INSERT INTO {notes} (address, tick, k) SELECT a.address, {tick}, {key} FROM ({addresses}) AS a
WHERE ROW_COUNT() = 1 ON DUPLICATE KEY UPDATE k = VALUES(k)

-- name: wake
-- End the sleep of the client that has this user lock. If none has it, this is an error.
KILL QUERY IFNULL(IS_USED_LOCK({lock}), 0)

-- name: asleep
-- The sessions in whose statement this mark stands; those of the same account are visible without any right.
SELECT ID FROM {processlist} WHERE ID <> CONNECTION_ID() AND INFO LIKE {pattern}

-- name: kill
KILL QUERY {number}

-- name: mark
-- By this user lock others find the session. A statement that sleeps is to keep no old versions of rows alive meanwhile: it sees
-- what is not committed yet instead.
DO GET_LOCK({lock}, 1);
SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED

-- name: hold_sleep
-- On the connection for writes: while that lives, the user lock for which the listening one waits is not to be had.
DO GET_LOCK({lock}, 0)

-- name: sleep
-- It ends at once if there is a note already, and else by KILL QUERY. By a user lock, because all that sleep in SLEEP share one mutex
-- of the server, which a KILL QUERY waits for.
SELECT IF(EXISTS(SELECT 1 FROM {notes} WHERE address IN ({addresses}) AND tick > {last}), -1, GET_LOCK({lock}, {seconds}))
  /*{mark}*/

-- name: let_go
DO RELEASE_LOCK({lock})

-- name: noted
-- Those that are committed.
SELECT tick, k FROM {notes} WHERE address IN ({addresses}) AND tick > {last}
  /*M! LOCK IN SHARE MODE */ /*!80000 FOR SHARE */ SKIP LOCKED

-- name: forget_notes
DELETE FROM {notes} WHERE address IN ({addresses}) AND tick < {last}

-- name: old_notes
-- Of clients that are gone.
DELETE FROM {notes} WHERE tick < {last} LIMIT {count}

-- name: scan
SELECT k, value, version FROM {table} WHERE k > {after} AND k < {end} ORDER BY k LIMIT {count}

-- name: aged
SELECT k FROM {table} WHERE k > {after} AND k < {end} AND expires <= {tick} - {idle} ORDER BY k LIMIT {count}

-- name: purge
-- It waits for no row: one that is locked is in use.
DELETE t FROM
  (SELECT k FROM {table} FORCE INDEX (PRIMARY) WHERE k IN ({keys}) LIMIT {count} FOR UPDATE SKIP LOCKED) AS free
STRAIGHT_JOIN {table} AS t FORCE INDEX (PRIMARY) ON t.k = free.k
WHERE t.expires <= {tick} - {idle}

-- name: caller_server
-- On the caller's connection: whose it is, and where. The end of its answer says whether there is a transaction.
SELECT CONNECTION_ID(), {server}, CONCAT(@@hostname, ':', @@port), @@character_set_client LIMIT 1

-- name: caller_end
-- Only on the server that was meant: elsewhere the number is a stranger's.
KILL QUERY IF({server} = {there}, {number}, 0)

-- name: confirm
-- On the caller's connection: the row stays locked until the end of the transaction, so no other client enters before. A locking
-- read finds what was committed last, whatever the transaction has seen before.
SELECT value FROM {whole} FORCE INDEX (PRIMARY) WHERE k = {key} LIMIT 1 LOCK IN SHARE MODE

-- name: snapshot
-- On the caller's connection: what its plain reads see.
SELECT k, value FROM {whole} WHERE k IN ({keys}) LIMIT 2

-- name: schema_there
SELECT 1 FROM {table} WHERE FALSE;
SELECT 1 FROM {notes} WHERE FALSE

-- name: schema_whole
SELECT TABLE_NAME, COLUMN_NAME, COLUMN_TYPE, COLLATION_NAME, IS_NULLABLE FROM information_schema.columns
WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({named});
SELECT TABLE_NAME, INDEX_NAME, COLUMN_NAME FROM information_schema.statistics
WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({named}) ORDER BY SEQ_IN_INDEX;
SELECT TABLE_NAME, ENGINE, TABLE_COMMENT FROM information_schema.tables
WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({named})
