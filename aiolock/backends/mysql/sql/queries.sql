-- Everything that is sent in the lease mode and for diagnosis, one packet under each name.
-- {words} are filled in: numbers as they are, words of the library quoted, and texts of callers as hexadecimal digits: whatever
-- they contain, no character set and no sql_mode can read them as a part of the statement.

-- name: settings
-- First on every connection, whatever init_connect and the server's defaults have made of the session. A transaction that is
-- open ends, and ROLLBACK begins none: so the completion type comes before it. Texts and the name of the database are read
-- as UTF-8 from the first statement on. The comments have variables of MariaDB alone, and one of MySQL.
SET NAMES utf8mb4 COLLATE utf8mb4_bin;
SET SESSION completion_type=0, sql_mode='STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION', sql_safe_updates=0, sql_big_selects=1,
  sql_select_limit=18446744073709551615, innodb_lock_wait_timeout=1, time_zone='+00:00', timestamp=DEFAULT
  /*M!100000 , max_statement_time=0, idle_transaction_timeout=0, idle_readonly_transaction_timeout=0,
  idle_write_transaction_timeout=0 */ /*!80000 , max_execution_time=0 */;
ROLLBACK;
SET SESSION autocommit=1;
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
USE {database}

-- name: setup
-- The server ends a session that sends nothing for long: that is what makes a user lock a lease. By the user lock that is taken
-- here, other clients find this session and end it, so that this client verifies its holds. A server may have been told that SYSDATE is NOW. Databases are
-- called by one name where the server is blind to their case.
DO GET_LOCK({presence}, 0);
SET SESSION wait_timeout={wait_timeout}, lock_wait_timeout={lock_wait_timeout};
SHOW GLOBAL VARIABLES WHERE Variable_name IN ('read_only', 'super_read_only', 'innodb_read_only', 'wsrep_on',
  'group_replication_single_primary_mode', 'innodb_flush_log_at_trx_commit', 'innodb_rollback_on_timeout', 'log_bin',
  'binlog_format', 'performance_schema', 'server_uuid', 'server_uid', 'version', 'version_comment', 'ob_query_timeout');
SELECT CONNECTION_ID(), SLEEP(0.0001) = 0 AND SYSDATE(6) > NOW(6),
  IF(@@lower_case_table_names, LOWER(DATABASE()), DATABASE()), @@lower_case_table_names, @@hostname

-- name: turn
-- Not twice: a user lock is given back as often as it was got.
IF(IFNULL(IS_USED_LOCK({turnstile}), 0) = CONNECTION_ID(), 1, GET_LOCK({turnstile}, 0))

-- name: enter
-- Take the turnstile without waiting, and the row: with the turnstile if it is free, without it only if it has been
-- free for a while (then the client that should hand it over is stopped or dead). The request finds its own grant again. A turnstile
-- that came without the row is put back. What was extended is prolonged by no late copy of this. Tokens are at least {block} times the server's clock in microseconds, as in the
-- other modes, so those of a row that was lost or purged and comes back still rise.
SET @turn = {turn};
INSERT INTO {table} (id, namespace, family, name, owner, label, value, token, since, expires_at)
VALUES ({id}, {namespace}, {family}, {name}, {owner}, {label}, {value},
  {block} * TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)), UTC_TIMESTAMP(6),
  UTC_TIMESTAMP(6) + INTERVAL {ttl} MICROSECOND)
ON DUPLICATE KEY UPDATE
  token = IF(owner <=> VALUES(owner) OR expires_at > UTC_TIMESTAMP(6) - INTERVAL IF(@turn = 1, 0, {grace}) MICROSECOND,
    token, GREATEST(token + {block}, VALUES(token))),
  since = IF(owner <=> VALUES(owner) OR expires_at > UTC_TIMESTAMP(6) - INTERVAL IF(@turn = 1, 0, {grace}) MICROSECOND,
    since, VALUES(since)),
  label = IF(expires_at > UTC_TIMESTAMP(6) - INTERVAL IF(@turn = 1, 0, {grace}) MICROSECOND, label, VALUES(label)),
  value = IF(expires_at > UTC_TIMESTAMP(6) - INTERVAL IF(@turn = 1, 0, {grace}) MICROSECOND, value, VALUES(value)),
  requested = IF(owner <=> VALUES(owner)
      OR expires_at > UTC_TIMESTAMP(6) - INTERVAL IF(@turn = 1, 0, {grace}) MICROSECOND, requested, NULL),
  extension = IF(owner <=> VALUES(owner)
      OR expires_at > UTC_TIMESTAMP(6) - INTERVAL IF(@turn = 1, 0, {grace}) MICROSECOND, extension, 0),
  owner = IF(expires_at > UTC_TIMESTAMP(6) - INTERVAL IF(@turn = 1, 0, {grace}) MICROSECOND, owner, VALUES(owner)),
  expires_at = IF(owner <=> VALUES(owner) AND extension = 0
      OR expires_at <= UTC_TIMESTAMP(6) - INTERVAL IF(@turn = 1, 0, {grace}) MICROSECOND,
    VALUES(expires_at), expires_at);
SELECT IF(owner <=> {owner}, token, 0), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at), @turn,
  IF(NOT owner <=> {owner} AND @turn = 1 AND {put_back}, RELEASE_LOCK({turnstile}), 0)
FROM {table} WHERE id = {id}

-- name: unlocked
-- An error if the row is locked; without a transaction, nothing stays.
SELECT id FROM {table} WHERE id = {id} FOR UPDATE NOWAIT

-- name: leave
-- It ends now, or later if it is kept after its release.
UPDATE {table} SET owner = NULL, expires_at = UTC_TIMESTAMP(6) + INTERVAL {keep} MICROSECOND
WHERE id = {id} AND owner = {owner}

-- name: put_back
DO RELEASE_LOCK({turnstile})

-- name: renew
-- It waits for no row: rows that are locked are passed over. By the key, because a scan of a small table
-- would wait for rows of others.
UPDATE (SELECT id FROM {table} FORCE INDEX (PRIMARY) WHERE id IN ({ids}) LIMIT {count} FOR UPDATE SKIP LOCKED) AS free
STRAIGHT_JOIN {table} AS t FORCE INDEX (PRIMARY) ON t.id = free.id
SET t.expires_at = UTC_TIMESTAMP(6) + INTERVAL {ttl} MICROSECOND, t.present = {present}
WHERE t.owner IN ({owners}) AND t.extension = 0 AND t.expires_at > UTC_TIMESTAMP(6);
SELECT owner, requested FROM {table} WHERE id IN ({ids}) AND requested IS NOT NULL

-- name: extend
-- A late copy, of this or of a renewal, changes nothing: the number rises with each request of the owner.
UPDATE {table} SET extension = {number}, expires_at = UTC_TIMESTAMP(6) + INTERVAL {life} MICROSECOND
WHERE id = {id} AND owner = {owner} AND extension < {number} AND expires_at > UTC_TIMESTAMP(6);
SELECT owner, forced, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) FROM {table} WHERE id = {id}

-- name: verify
-- It prolongs nothing, and waits for no row: rows are read as they were last committed. Owner, and the owner that was forced off.
SELECT id, owner, forced, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) FROM {table} WHERE id IN ({ids});
SELECT owner, requested FROM {table} WHERE id IN ({ids}) AND requested IS NOT NULL

-- name: request_release
UPDATE {table} SET requested = {reason} WHERE id = {id} AND owner IS NOT NULL AND expires_at > UTC_TIMESTAMP(6);
SELECT COUNT(*) FROM {table} WHERE id = {id} AND owner IS NOT NULL AND expires_at > UTC_TIMESTAMP(6)

-- name: wait_for_turnstile
SELECT GET_LOCK({turnstile}, 31536000) /*{who}*/

-- name: poll
SELECT IFNULL(MAX(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at)), 0), IFNULL(IS_USED_LOCK({turnstile}), 0)
FROM {table} WHERE id = {id}

-- name: kill_holder
-- Only if it is still the one that was seen.
KILL IF(IS_USED_LOCK({turnstile}) = {number}, {number}, 0)

-- name: inspect
-- A row without an owner is kept after its release.
SELECT label, token, since, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at), owner IS NOT NULL, value, present
FROM {table} WHERE id = {id} AND expires_at > UTC_TIMESTAMP(6)

-- name: waiters
-- Statements of the same account are visible without any right.
SELECT * FROM {processlist} WHERE ID <> CONNECTION_ID() AND INFO LIKE {pattern}

-- name: arrivals
-- When the statements of these sessions began, where the account may see it. MySQL's list of processes counts whole seconds.
SELECT t.PROCESSLIST_ID, s.TIMER_START FROM performance_schema.threads AS t
JOIN performance_schema.events_statements_current AS s ON s.THREAD_ID = t.THREAD_ID
WHERE t.PROCESSLIST_ID IN ({sessions})

-- name: force
UPDATE {table} SET forced = owner, owner = NULL, expires_at = UTC_TIMESTAMP(6)
WHERE id = {id} AND expires_at > UTC_TIMESTAMP(6);
SELECT IFNULL(IS_USED_LOCK({turnstile}), 0)

-- name: force_token
-- Only the hold that has the token: one of its own, from that on which its last renewal has reported.
UPDATE {table} SET forced = owner, owner = NULL, expires_at = UTC_TIMESTAMP(6)
WHERE id = {id} AND owner IS NOT NULL AND expires_at > UTC_TIMESTAMP(6) AND {token} BETWEEN
  IF({reported} BETWEEN token AND token + {block} - 1, {reported}, token) AND token + {block} - 1;
SELECT IFNULL(IS_USED_LOCK({turnstile}), 0)

-- name: reported
-- The token in what a renewal has reported; 0 if nothing was.
CAST(IF(present LIKE '% %', SUBSTRING_INDEX(SUBSTRING_INDEX(present, ' ', 2), ' ', -1), '0') AS UNSIGNED)

-- name: ping
DO 0

-- name: aged
-- Locks that were not needed for long, a page at a time. A row that comes back starts at the clock, which must be
-- ahead of every token that it had. Rows of the row mode have no deadline, and do not say when they were used: of these,
-- those that were made so long ago.
SELECT id FROM {table} AS t WHERE namespace = {namespace} AND id > {after} AND ({long_ago}) ORDER BY id LIMIT {count}

-- name: long_ago
(t.expires_at < UTC_TIMESTAMP(6) - INTERVAL {idle} MICROSECOND
  AND t.token + 4096 < {block} * TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))
OR (t.expires_at > '9999-01-01' AND t.since < UTC_TIMESTAMP(6) - INTERVAL {idle} MICROSECOND)

-- name: purge
-- Requests go before the rows of their locks, and the row of a lock that has any stays. It waits for no row: a client that
-- has one locked keeps it, and one that waits for one finds none, and makes it anew.
DELETE r FROM {requests} AS r FORCE INDEX (lock_id)
WHERE r.lock_id IN ({ids}) AND r.expires_at < UTC_TIMESTAMP(6) - INTERVAL {idle} MICROSECOND;
DELETE t FROM
  (SELECT id FROM {table} FORCE INDEX (PRIMARY) WHERE id IN ({ids}) LIMIT {count} FOR UPDATE SKIP LOCKED) AS free
STRAIGHT_JOIN {table} AS t FORCE INDEX (PRIMARY) ON t.id = free.id
WHERE ({long_ago}) AND NOT EXISTS (SELECT 1 FROM {requests} AS r WHERE r.lock_id = t.id)

-- name: aged_registers
SELECT id FROM {registers} WHERE namespace = {namespace} AND id > {after}
  AND expires_at < UTC_TIMESTAMP(6) - INTERVAL {idle} MICROSECOND ORDER BY id LIMIT {count}

-- name: purge_registers
-- With the watches of clients that are gone.
DELETE r FROM {requests} AS r FORCE INDEX (lock_id)
WHERE r.lock_id IN ({ids}) AND r.expires_at < UTC_TIMESTAMP(6) - INTERVAL {idle} MICROSECOND;
DELETE FROM {registers} WHERE id IN ({ids}) AND expires_at < UTC_TIMESTAMP(6) - INTERVAL {idle} MICROSECOND

-- name: names
-- The locks that are held or waited for; rows of the row mode have no deadline, and do not say.
SELECT name, family FROM {table} AS t WHERE namespace = {namespace}
  AND ((family IN ('lock', 'election') AND expires_at > UTC_TIMESTAMP(6) AND expires_at < '9999-01-01')
    OR EXISTS (SELECT 1 FROM {requests} AS r
      WHERE r.lock_id = t.id AND r.state IN (0, 1, 2, 4) AND r.expires_at > UTC_TIMESTAMP(6)))

-- name: schema_there
SELECT 1 FROM {table} WHERE FALSE;
SELECT 1 FROM {requests} WHERE FALSE;
SELECT 1 FROM {registers} WHERE FALSE

-- name: schema_whole
SELECT TABLE_NAME, COLUMN_NAME, COLUMN_TYPE, COLLATION_NAME, IS_NULLABLE FROM information_schema.columns
WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({named});
SELECT TABLE_NAME, INDEX_NAME, COLUMN_NAME FROM information_schema.statistics
WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({named}) ORDER BY SEQ_IN_INDEX;
SELECT TABLE_NAME, ENGINE, TABLE_COMMENT FROM information_schema.tables
WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({named})

-- name: take_slot
-- NULL if another session has it. The mark comes first: a slot without it is that of another version.
IF(GET_LOCK({mark}, 0) = 1, IF(GET_LOCK({slot}, 0) = 1, 1, NULLIF(RELEASE_LOCK({mark}), 1)), NULL)

-- name: slots_in_use
-- Each slot that is in use, by which session, and which session has its mark; of 4096, which are counted in digits.
SELECT n, used, IS_USED_LOCK(CONCAT('{prefix}:', n, ':{version}')) FROM (
  SELECT n, IS_USED_LOCK(CONCAT('{prefix}:', n)) AS used FROM (
    SELECT a.d + 16 * b.d + 256 * c.d AS n FROM
    (SELECT 0 AS d UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL SELECT 5
      UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9 UNION ALL SELECT 10 UNION ALL SELECT 11
      UNION ALL SELECT 12 UNION ALL SELECT 13 UNION ALL SELECT 14 UNION ALL SELECT 15) AS a,
    (SELECT 0 AS d UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL SELECT 5
      UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9 UNION ALL SELECT 10 UNION ALL SELECT 11
      UNION ALL SELECT 12 UNION ALL SELECT 13 UNION ALL SELECT 14 UNION ALL SELECT 15) AS b,
    (SELECT 0 AS d UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL SELECT 5
      UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9 UNION ALL SELECT 10 UNION ALL SELECT 11
      UNION ALL SELECT 12 UNION ALL SELECT 13 UNION ALL SELECT 14 UNION ALL SELECT 15) AS c
  ) AS numbers
) AS slots WHERE used IS NOT NULL

-- name: comments
SELECT TABLE_NAME, TABLE_COMMENT FROM information_schema.tables
WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({named})

-- name: take
-- Take a user lock, unless the session has it already. The answer is the time at which the session has it, which is later than
-- that of any earlier holder; 0 if another session has it, -1 if the server has become read_only. SYSDATE, because the other
-- clocks stand still from the beginning of a statement; the time zone of the session is UTC.
SELECT IF(@@GLOBAL.read_only NOT IN ('0', 'OFF'), -1,
  IF(IF(IFNULL(IS_USED_LOCK({lock}), 0) = CONNECTION_ID(), 1, GET_LOCK({lock}, 0)) = 1,
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6)), 0)) AS t

-- name: queue_up
-- Take a user lock as above on a session that waits for it; the time is that of the grant.
SELECT IF(GET_LOCK({lock}, 31536000) = 1, IF(@@GLOBAL.read_only IN ('0', 'OFF'),
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6)), -1), 0) AS t /*{who}*/

-- name: release
-- Release a user lock; the answer is 1 if the session had it.
SELECT RELEASE_LOCK({lock})

-- name: confirm
-- An answer proves that the session is there, and the lock with it; -1 if the server has become read_only.
SELECT IF(@@GLOBAL.read_only IN ('0', 'OFF'), TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)), -1)

-- name: have
-- For each lock 1 if the session has it, and then whether the server may be written to.
SELECT CONCAT_WS(',', {held}), @@GLOBAL.read_only IN ('0', 'OFF')

-- name: user
SELECT ID, USER, HOST FROM {processlist} WHERE ID = IS_USED_LOCK({lock});
SELECT * FROM {processlist} WHERE ID <> CONNECTION_ID() AND INFO LIKE {pattern}

-- name: make_row
-- In a transaction of its own, before it is locked.
INSERT IGNORE INTO {table} (id, namespace, family, name, label, token, since, expires_at)
VALUES ({id}, {namespace}, {family}, {name}, '', 0, UTC_TIMESTAMP(6), '9999-12-31')

-- name: lock_row
-- It is also sent on connections of callers: these may have another database, a limit, and a character set in which a
-- literal is compared with every row.
SELECT id FROM {whole} WHERE id = _ascii{id} LIMIT 1 FOR UPDATE /*{who}*/

-- name: wait_row
-- A waiter whose client is gone without a word stays until this time is over; one that is well lines up again.
SET SESSION innodb_lock_wait_timeout={wait};
START TRANSACTION

-- name: try_row
START TRANSACTION;
SELECT id FROM {whole} WHERE id = {id} FOR UPDATE NOWAIT;
SELECT IF(@@GLOBAL.read_only IN ('0', 'OFF'), TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)), -1)

-- name: confirm_row
-- In the transaction that has the row, if there was one.
SELECT id FROM {whole} WHERE id = {id} FOR UPDATE NOWAIT;
SELECT IF(@@GLOBAL.read_only IN ('0', 'OFF'), TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)), -1)

-- name: row_free
SELECT id FROM {whole} WHERE id = _ascii{id} LIMIT 1 FOR UPDATE NOWAIT

-- name: server
-- The identity of the server, in one word. By SHA2, because MySQL 9.6 removed SHA1 and MD5.
SHA2(CONCAT_WS('/', @@hostname, @@port, @@datadir, @@GLOBAL.server_id{numbers}), 256)

-- name: caller_row
-- On the main session: whether there is a row to lock, and on which server, which must take writes.
SELECT COUNT(*) FROM {table} WHERE id = {id};
SELECT {server}, CONCAT(@@hostname, ':', @@port), @@GLOBAL.read_only IN ('0', 'OFF')

-- name: caller_server
-- On the caller's connection: whose it is, and where. The end of its answer says whether there is a transaction.
SELECT CONNECTION_ID(), {server}, CONCAT(@@hostname, ':', @@port), @@character_set_client LIMIT 1

-- name: caller_mark
-- Behind the lock: when the transaction ends, or goes back to where it had no lock, this is gone as well.
SAVEPOINT {mark}

-- name: caller_check
RELEASE SAVEPOINT {mark}

-- name: caller_end
-- Only on the server that was meant: elsewhere the number is a stranger's.
KILL QUERY IF({server} = '{there}', {number}, 0)

-- name: confirm_address
-- On the main session: the hold, and the server, which must take writes.
{shown};
SELECT {server}, CONCAT(@@hostname, ':', @@port), @@GLOBAL.read_only IN ('0', 'OFF')

-- name: confirm_hold
-- On the caller's connection: its row stays locked until the end of the transaction, so no other client enters before. Locking
-- reads find what was committed last, whatever the transaction has seen before.
SELECT owner FROM {whole} FORCE INDEX (PRIMARY) WHERE id = {id} LOCK IN SHARE MODE

-- name: confirm_request
-- Decisions about a lock lock its row first: none is made before the end of the transaction.
SELECT r.owner FROM {whole} AS t FORCE INDEX (PRIMARY) STRAIGHT_JOIN {whole_requests} AS r FORCE INDEX (PRIMARY)
  ON r.owner = {owner} AND r.lock_id = t.id AND r.state IN (1, 2)
WHERE t.id = {id} LOCK IN SHARE MODE

-- name: shown_hold
-- A plain read, which sees what the transaction sees: the first token of the hold, and the one that a renewal has reported last.
SELECT token, SUBSTRING_INDEX(SUBSTRING_INDEX(present, ' ', 2), ' ', -1) FROM {whole} FORCE INDEX (PRIMARY)
WHERE id = {id} AND owner = {owner}

-- name: shown_request
SELECT token, SUBSTRING_INDEX(SUBSTRING_INDEX(present, ' ', 2), ' ', -1) FROM {whole_requests} FORCE INDEX (PRIMARY)
WHERE owner = {owner} AND lock_id = {id} AND state IN (1, 2)
