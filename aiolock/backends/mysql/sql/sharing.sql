-- Locks with several holders: the table of requests has a row for each request, which is a position in the queue and then a hold.
-- States: 0 in the queue, 1 granted and not confirmed, 2 held, 3 forced out and not reported, 4 kept after its release, 5 watches.
-- Every decision is one transaction: `step`, what is requested, `serve`, COMMIT, what came of it. It begins with the row of the
-- lock, so decisions come one after the other; the row is changed, so that two nodes of a cluster cannot both decide.
-- A read weighs 1, a write as much as the capacity, permits as many as they are: then one sum says who fits.
-- A statement that locks rows names the key to find them by: a scan of a small table would wait for rows of other locks.

-- name: step
-- Tokens are at least 64 times the clock in microseconds, as everywhere; a row that was purged comes back with greater ones.
START TRANSACTION;
INSERT INTO {table} (id, namespace, family, name, label, token, since, expires_at, declared, capacity)
VALUES ({id}, {namespace}, {family}, {name}, '',
  64 * TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)), UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), {limit}, NULLIF({limit}, 0))
ON DUPLICATE KEY UPDATE token = GREATEST(token, VALUES(token)), expires_at = VALUES(expires_at);
DELETE r FROM {requests} AS r FORCE INDEX (lock_id) WHERE r.lock_id = {id} AND r.expires_at <= UTC_TIMESTAMP(6)

-- name: settle
-- A semaphore has the limit of its first user until another one is set; NULL is not known. An unused one is forgotten: a limit that
-- was set after a day, else after a minute.
UPDATE {table} SET capacity = IF(capacity IS NULL OR since <= UTC_TIMESTAMP(6) - INTERVAL
      IF(declared = capacity AND declared > 0, 60, 86400) SECOND, {limit}, capacity), declared = {limit}
WHERE id = {id} AND (declared = 0
  OR (since <= UTC_TIMESTAMP(6) - INTERVAL IF(declared = capacity AND declared > 0, 60, 86400) SECOND
  AND NOT EXISTS (SELECT 1 FROM {requests} WHERE lock_id = {id} AND state < 5)))

-- name: enqueue
-- Add requests to the queue, in the order in which they came. A repeated request finds its position again, and confirms its own
-- grant. With another limit than the known ones nothing happens.
INSERT INTO {requests} (owner, lock_id, client, state, arrival, mode, weight, block, label, ttl, confirmation_window, token,
  since, expires_at)
SELECT w.owner, {id}, {client}, 0, w.ordinal + (SELECT COALESCE(MAX(arrival), 0) FROM {requests} WHERE lock_id = {id}), w.mode,
  w.weight, w.block, w.label, w.ttl, w.confirmation_window, 0, UTC_TIMESTAMP(6),
  UTC_TIMESTAMP(6) + INTERVAL GREATEST(w.ttl, 3000000) MICROSECOND
FROM {table} AS t JOIN ({rows}) AS w
WHERE t.id = {id}
  AND (w.capacity IN (t.declared, t.capacity) OR EXISTS (SELECT 1 FROM {requests} AS o WHERE o.owner = w.owner))
ON DUPLICATE KEY UPDATE
  {requests}.expires_at = IF({requests}.state IN (1, 2) AND {requests}.extension = 0, UTC_TIMESTAMP(6) + INTERVAL {requests}.ttl MICROSECOND, {requests}.expires_at),
  {requests}.state = IF({requests}.state = 1, 2, {requests}.state)

-- name: request_row
-- One row of `enqueue`.
SELECT {ordinal} AS ordinal, _ascii{owner} AS owner, _ascii{mode} AS mode, {weight} AS weight, {block} AS block,
  {label} AS label, {ttl} AS ttl, {confirmation_window} AS confirmation_window, {limit} AS capacity

-- name: serve
-- A waiter enters as long as there is room for all that hold or come before it: none overtakes. Those of this client are notified by the
-- answer and enter for their ttl, others for their confirmation window. A node of a cluster may undo a transaction in the middle without a
-- word, and carry out the rest: outside of one, no waiter enters. For the same reason two may have arrived with one number.
SET @began = UTC_TIMESTAMP(6);
UPDATE (SELECT owner, state, SUM(weight) OVER queue AS upto, SUM(IF(state = 0, block, 0)) OVER queue - block AS before_it
  FROM {requests} FORCE INDEX (lock_id) WHERE lock_id = {id} AND state IN (0, 1, 2, 4)
  WINDOW queue AS (ORDER BY state = 0, arrival, owner)) AS q
STRAIGHT_JOIN {table} AS t ON t.id = {id} AND q.upto <= t.capacity
STRAIGHT_JOIN {requests} AS r FORCE INDEX (PRIMARY) ON r.owner = q.owner
SET r.state = IF(r.owner IN ({local_owners}), 2, 1), r.token = t.token + 1 + q.before_it, r.since = UTC_TIMESTAMP(6),
  r.expires_at = UTC_TIMESTAMP(6) + INTERVAL IF(r.owner IN ({local_owners}), r.ttl, r.confirmation_window) MICROSECOND
WHERE q.state = 0 /*M!100000 AND @@in_transaction */;
UPDATE {table} SET since = UTC_TIMESTAMP(6), token = GREATEST(token,
  (SELECT COALESCE(MAX(r.token + r.block - 1), 0) FROM {requests} AS r WHERE r.lock_id = {id} AND r.state IN (1, 2)))
WHERE id = {id}

-- name: withdraw
-- Requests that do not wait take no position.
DELETE r FROM {requests} AS r FORCE INDEX (PRIMARY) WHERE r.owner IN ({trying}) AND r.state = 0

-- name: outcome
-- First whether the transaction was not undone. Then, as it has been committed: the limits, the states of the requests that asked, the
-- claims of this client that hold the lock, and the grants that are not confirmed, each with whether it was made now.
SELECT 1 /*M!100000 AND @@in_transaction */;
COMMIT;
SELECT t.declared, t.capacity, r.owner, r.client, r.state, r.token, r.since >= @began
FROM {table} AS t LEFT JOIN {requests} AS r ON r.lock_id = t.id
  AND (r.state = 1 OR r.state = 2 AND r.owner IN ({local_owners}) OR r.owner IN ({asking}))
WHERE t.id = {id}

-- name: depart
-- The owners among them that have a hold, for the answer to a release.
SELECT owner FROM {requests} FORCE INDEX (PRIMARY) WHERE owner IN ({leaving}) AND state IN (1, 2);
DELETE r FROM {requests} AS r FORCE INDEX (PRIMARY) WHERE r.owner IN ({leaving}) AND r.state <> 4

-- name: reclaim
-- One that has been confirmed in the meantime has a holder.
DELETE FROM {requests} WHERE owner = {owner} AND state = 1

-- name: keep
UPDATE {requests} SET state = 4, expires_at = UTC_TIMESTAMP(6) + INTERVAL {keep} MICROSECOND
WHERE owner = {owner} AND state IN (1, 2);
DELETE FROM {requests} WHERE owner = {owner} AND state <> 4

-- name: downgrade
-- A write hold becomes a read hold; its token stays.
UPDATE {requests} SET mode = 'read', weight = 1, state = 2,
  expires_at = IF({prolong} AND extension = 0, UTC_TIMESTAMP(6) + INTERVAL ttl MICROSECOND, expires_at)
WHERE owner = {owner} AND state IN (1, 2)

-- name: force_out
-- They learn it by their next renewal; until then the rows say so.
DELETE r FROM {requests} AS r FORCE INDEX (lock_id) WHERE r.lock_id = {id} AND r.state = 4;
UPDATE {requests} FORCE INDEX (lock_id) SET state = 3, expires_at = UTC_TIMESTAMP(6) + INTERVAL ttl MICROSECOND
WHERE lock_id = {id} AND state IN (1, 2)

-- name: force_out_token
-- Only the hold that has the token, as `force_token`.
UPDATE {requests} FORCE INDEX (lock_id) SET state = 3, expires_at = UTC_TIMESTAMP(6) + INTERVAL ttl MICROSECOND
WHERE lock_id = {id} AND state IN (1, 2) AND expires_at > UTC_TIMESTAMP(6) AND {its_token}

-- name: its_token
{token} BETWEEN IF({reported} BETWEEN token AND token + block - 1, {reported}, token) AND token + block - 1

-- name: forced_out
SELECT DISTINCT client FROM {requests} WHERE lock_id = {id} AND state = 3 AND ({its_token})

-- name: resize
UPDATE {table} SET capacity = {capacity}, since = UTC_TIMESTAMP(6) WHERE id = {id}

-- name: extend_hold
-- A late copy, of this or of a renewal, changes nothing: the number rises with each request of the owner.
UPDATE {requests} SET state = 2, extension = {number}, expires_at = UTC_TIMESTAMP(6) + INTERVAL {life} MICROSECOND
WHERE owner = {owner} AND state IN (1, 2) AND extension < {number} AND expires_at > UTC_TIMESTAMP(6);
SELECT state FROM {requests} WHERE owner = {owner} AND expires_at > UTC_TIMESTAMP(6)

-- name: confirm_grants
-- It waits for no row: rows that are locked are passed over, and found again by the next poll.
UPDATE (SELECT owner FROM {requests} FORCE INDEX (PRIMARY) WHERE owner IN ({owners}) LIMIT {count} FOR UPDATE SKIP LOCKED) AS free
STRAIGHT_JOIN {requests} AS r FORCE INDEX (PRIMARY) ON r.owner = free.owner
SET r.state = 2, r.expires_at = UTC_TIMESTAMP(6) + INTERVAL r.ttl MICROSECOND
WHERE r.state IN (1, 2) AND r.extension = 0 AND r.expires_at > UTC_TIMESTAMP(6)

-- name: renew_holds
-- It waits for no row: rows that are locked are passed over.
UPDATE (SELECT owner FROM {requests} FORCE INDEX (PRIMARY) WHERE owner IN ({ids}) LIMIT {count} FOR UPDATE SKIP LOCKED) AS free
STRAIGHT_JOIN {requests} AS t FORCE INDEX (PRIMARY) ON t.owner = free.owner
SET t.state = 2, t.expires_at = UTC_TIMESTAMP(6) + INTERVAL t.ttl MICROSECOND, t.present = {present}
WHERE t.state IN (1, 2) AND t.extension = 0 AND t.expires_at > UTC_TIMESTAMP(6);
SELECT owner, requested FROM {requests} WHERE owner IN ({ids}) AND requested IS NOT NULL

-- name: verify_holds
-- As `verify`: each row with its owner while it is a hold, and with the owner that was forced off.
SELECT owner, IF(state IN (1, 2), owner, NULL), IF(state = 3, owner, NULL), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at)
FROM {requests} WHERE owner IN ({ids}) AND expires_at > UTC_TIMESTAMP(6);
SELECT owner, requested FROM {requests} WHERE owner IN ({ids}) AND requested IS NOT NULL

-- name: requests
SELECT owner, state, token, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) FROM {requests} WHERE owner IN ({owners}) AND expires_at > UTC_TIMESTAMP(6)

-- name: request_release_shared
UPDATE {requests} FORCE INDEX (lock_id) SET requested = {reason}
WHERE lock_id = {id} AND state IN (1, 2) AND expires_at > UTC_TIMESTAMP(6);
SELECT COUNT(*) FROM {requests} WHERE lock_id = {id} AND state IN (1, 2) AND expires_at > UTC_TIMESTAMP(6)

-- name: inspect_shared
SELECT state, label, token, since, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at), weight, mode, IF(state = 4, 0, block), present
FROM {requests} WHERE lock_id = {id} AND state IN (0, 1, 2, 4) AND expires_at > UTC_TIMESTAMP(6) ORDER BY arrival, owner;
SELECT declared, capacity, TIMESTAMPDIFF(MICROSECOND, since, UTC_TIMESTAMP(6)) FROM {table} WHERE id = {id}

-- --- waiting

-- name: take_wake_lock
-- A client that grants something to this client finds this session by the name of a user lock.
SELECT IF(IFNULL(IS_USED_LOCK({wake_lock}), 0) = CONNECTION_ID(), 1, GET_LOCK({wake_lock}, 0))

-- name: take_sleep_lock
-- The user lock that the listener waits for while it sleeps: the main session has it, and does not give it back.
DO IF(IFNULL(IS_USED_LOCK({sleep_lock}), 0) = CONNECTION_ID(), 1, GET_LOCK({sleep_lock}, 0))

-- name: release_sleep_lock
-- The main session that had it is gone.
DO RELEASE_LOCK({sleep_lock})

-- name: granted
-- A packet on the listener's session has one statement only: when KILL QUERY comes between two, the server sends no
-- answer for the second.
SELECT r.owner, t.id, t.family, t.name FROM {requests} AS r JOIN {table} AS t ON t.id = r.lock_id
WHERE r.client = {client} AND r.state = 1 AND r.expires_at > UTC_TIMESTAMP(6)

-- name: ended
-- Locks for which this client waits, and of which a hold or a position is over.
SELECT t.id, t.family, t.name FROM {table} AS t
WHERE t.id IN (SELECT w.lock_id FROM {requests} AS w WHERE w.client = {client} AND w.state = 0)
  AND EXISTS (SELECT 1 FROM {requests} AS r WHERE r.lock_id = t.id AND r.expires_at <= UTC_TIMESTAMP(6))

-- name: register_versions
SELECT id, version FROM {registers} WHERE id IN ({watched}) AND expires_at > UTC_TIMESTAMP(6)

-- name: listen
-- A client that grants something to this client ends this statement; a grant that was committed just before is found by it. On MariaDB
-- not by SLEEP: a KILL QUERY that comes as it begins stands still for 2 s, and with it all that sleep at that server.
SELECT IF(
  EXISTS (SELECT 1 FROM {requests} WHERE client = {client} AND state = 1 AND expires_at > UTC_TIMESTAMP(6))
  OR EXISTS (SELECT 1 FROM {registers} WHERE expires_at > UTC_TIMESTAMP(6) AND ({changed})), 0,
  /*M!100000 GET_LOCK({sleep_lock}, */ /*!80000 SLEEP( */ GREATEST(0, LEAST({timeout},
    (SELECT COALESCE(MIN(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), r.expires_at)), 1000000000) / 1000000
      FROM {requests} AS r
      WHERE r.lock_id IN (SELECT w.lock_id FROM {requests} AS w WHERE w.client = {client} AND w.state = 0))))))

-- name: prolong
-- Positions and watches live for a ttl, and at least 3 s, from when their client prolonged them. Those that are locked at
-- this moment are passed over: there are two more times.
UPDATE (SELECT owner FROM {requests} FORCE INDEX (PRIMARY) WHERE owner IN ({owners}) LIMIT {count} FOR UPDATE SKIP LOCKED) AS free
STRAIGHT_JOIN {requests} AS r FORCE INDEX (PRIMARY) ON r.owner = free.owner
SET r.expires_at = UTC_TIMESTAMP(6) + INTERVAL GREATEST(r.ttl, 3000000) MICROSECOND
WHERE r.state IN (0, 5) AND r.expires_at > UTC_TIMESTAMP(6)

-- name: wake
-- Only if it listens at this moment: else it polls before it sleeps.
KILL QUERY IFNULL(IS_USED_LOCK({wake_lock}), 0)

-- name: end_session
-- The end of a session makes its client ask at once whether its holds are there.
KILL IFNULL(IS_USED_LOCK({client}), 0)
