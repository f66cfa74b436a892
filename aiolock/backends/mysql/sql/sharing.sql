-- Locks that several may be in: who bids for them, who is in line, who is inside. The table of bids has a row for each.
-- States: 0 in the queue, 1 granted and not confirmed, 2 held, 3 forced out and not reported, 4 kept after its release, 5 watches.
-- Every decision is one transaction: `step`, what is requested, `serve`, COMMIT, what came of it. It begins with the row of the
-- lock, so decisions come one after the other; the row is changed, so that two nodes of a cluster cannot both decide.
-- A read weighs 1, a write as much as the capacity, permits as many as they are: then one sum says who fits.
-- What locks rows says by which key: a scan of a small table would wait for rows of other locks.

-- name: step
-- Tokens are at least 64 times the clock in microseconds, as everywhere; a row that was purged comes back with greater ones.
START TRANSACTION;
INSERT INTO {table} (id, namespace, family, name, label, token, since, expires_at, declared, capacity)
VALUES ({id}, {namespace}, {family}, {name}, '',
  64 * TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)), UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), {limit}, {limit})
ON DUPLICATE KEY UPDATE token = GREATEST(token, VALUES(token)), expires_at = VALUES(expires_at);
DELETE b FROM {bids} AS b FORCE INDEX (lock_id) WHERE b.lock_id = {id} AND b.expires_at <= UTC_TIMESTAMP(6)

-- name: settle
-- A semaphore has the limit of its first user until another one is set. An unused one is forgotten: a limit that
-- was set after a day, else after a minute.
UPDATE {table} SET capacity = IF(capacity = 0 OR since <= UTC_TIMESTAMP(6) - INTERVAL
      IF(declared = capacity, 60, 86400) SECOND, {limit}, capacity), declared = {limit}
WHERE id = {id} AND (declared = 0 OR (since <= UTC_TIMESTAMP(6) - INTERVAL IF(declared = capacity, 60, 86400) SECOND
  AND NOT EXISTS (SELECT 1 FROM {bids} WHERE lock_id = {id} AND state < 5)))

-- name: bid
-- Those who want something, in the order in which they came. Our own place is found again, and our own grant confirmed. With
-- another limit than the known ones nothing happens.
INSERT INTO {bids} (owner, lock_id, client, state, arrival, mode, weight, block, label, ttl, claim, token, since,
  expires_at)
SELECT w.owner, {id}, {client}, 0, w.place + (SELECT COALESCE(MAX(arrival), 0) FROM {bids} WHERE lock_id = {id}), w.mode,
  w.weight, w.block, w.label, w.ttl, w.claim, 0, UTC_TIMESTAMP(6),
  UTC_TIMESTAMP(6) + INTERVAL GREATEST(w.ttl, 3000000) MICROSECOND
FROM {table} AS t JOIN ({wanted}) AS w
WHERE t.id = {id}
  AND (w.capacity IN (t.declared, t.capacity) OR EXISTS (SELECT 1 FROM {bids} AS o WHERE o.owner = w.owner))
ON DUPLICATE KEY UPDATE
  {bids}.expires_at = IF({bids}.state IN (1, 2), UTC_TIMESTAMP(6) + INTERVAL {bids}.ttl MICROSECOND, {bids}.expires_at),
  {bids}.state = IF({bids}.state = 1, 2, {bids}.state)

-- name: wanted
-- One of them.
SELECT {place} AS place, _ascii{owner} AS owner, _ascii{mode} AS mode, {weight} AS weight, {block} AS block,
  {label} AS label, {ttl} AS ttl, {claim} AS claim, {limit} AS capacity

-- name: serve
-- A waiter enters as long as there is room for all that hold or come before it: none overtakes. Those of this client are told by the
-- answer and enter for their ttl, others for their claim. A node of a cluster may undo a transaction in the middle without a
-- word, and carry out the rest: outside of one, no waiter enters. For the same reason two may have arrived with one number.
SET @began = UTC_TIMESTAMP(6);
UPDATE (SELECT owner, state, SUM(weight) OVER line AS upto, SUM(IF(state = 0, block, 0)) OVER line - block AS before_it
  FROM {bids} FORCE INDEX (lock_id) WHERE lock_id = {id} AND state IN (0, 1, 2, 4)
  WINDOW line AS (ORDER BY state = 0, arrival, owner)) AS q
STRAIGHT_JOIN {table} AS t ON t.id = {id} AND q.upto <= t.capacity
STRAIGHT_JOIN {bids} AS b FORCE INDEX (PRIMARY) ON b.owner = q.owner
SET b.state = IF(b.owner IN ({ours}), 2, 1), b.token = t.token + 1 + q.before_it, b.since = UTC_TIMESTAMP(6),
  b.expires_at = UTC_TIMESTAMP(6) + INTERVAL IF(b.owner IN ({ours}), b.ttl, b.claim) MICROSECOND
WHERE q.state = 0 /*M!100000 AND @@in_transaction */;
UPDATE {table} SET since = UTC_TIMESTAMP(6), token = GREATEST(token,
  (SELECT COALESCE(MAX(b.token + b.block - 1), 0) FROM {bids} AS b WHERE b.lock_id = {id} AND b.state IN (1, 2)))
WHERE id = {id}

-- name: withdraw
-- Those who do not wait take no place.
DELETE b FROM {bids} AS b FORCE INDEX (PRIMARY) WHERE b.owner IN ({trying}) AND b.state = 0

-- name: outcome
-- Whether it was not undone; then, as it has been committed, the limits, how those stand who asked, which claims of this client hold it, and
-- who was granted something and has not confirmed it: whether now, or before.
SELECT 1 /*M!100000 AND @@in_transaction */;
COMMIT;
SELECT t.declared, t.capacity, b.owner, b.client, b.state, b.token, b.since >= @began
FROM {table} AS t LEFT JOIN {bids} AS b ON b.lock_id = t.id
  AND (b.state = 1 OR b.state = 2 AND b.owner IN ({ours}) OR b.owner IN ({asking}))
WHERE t.id = {id}

-- name: depart
-- Who of them is inside, for those who believe that they are.
SELECT owner FROM {bids} FORCE INDEX (PRIMARY) WHERE owner IN ({leaving}) AND state IN (1, 2);
DELETE b FROM {bids} AS b FORCE INDEX (PRIMARY) WHERE b.owner IN ({leaving}) AND b.state <> 4

-- name: bury
-- One that has been confirmed in the meantime has a holder.
DELETE FROM {bids} WHERE owner = {owner} AND state = 1

-- name: keep
UPDATE {bids} SET state = 4, expires_at = UTC_TIMESTAMP(6) + INTERVAL {keep} MICROSECOND
WHERE owner = {owner} AND state IN (1, 2);
DELETE FROM {bids} WHERE owner = {owner} AND state <> 4

-- name: weaken
-- A write hold becomes a read hold; its token stays.
UPDATE {bids} SET mode = 'read', weight = 1, state = 2, expires_at = UTC_TIMESTAMP(6) + INTERVAL ttl MICROSECOND
WHERE owner = {owner} AND state IN (1, 2)

-- name: force_out
-- They are told by their next renewal; until then the rows say so.
DELETE b FROM {bids} AS b FORCE INDEX (lock_id) WHERE b.lock_id = {id} AND b.state = 4;
UPDATE {bids} FORCE INDEX (lock_id) SET state = 3, expires_at = UTC_TIMESTAMP(6) + INTERVAL ttl MICROSECOND
WHERE lock_id = {id} AND state IN (1, 2)

-- name: forced_out
SELECT DISTINCT client FROM {bids} WHERE lock_id = {id} AND state = 3

-- name: resize
UPDATE {table} SET capacity = {capacity}, since = UTC_TIMESTAMP(6) WHERE id = {id}

-- name: confirm_bids
-- It waits for no row: rows that are locked are passed over, and found again by the next look.
UPDATE (SELECT owner FROM {bids} FORCE INDEX (PRIMARY) WHERE owner IN ({owners}) LIMIT {count} FOR UPDATE SKIP LOCKED) AS free
STRAIGHT_JOIN {bids} AS b FORCE INDEX (PRIMARY) ON b.owner = free.owner
SET b.state = 2, b.expires_at = UTC_TIMESTAMP(6) + INTERVAL b.ttl MICROSECOND
WHERE b.state IN (1, 2) AND b.expires_at > UTC_TIMESTAMP(6)

-- name: renew_bid
-- One that was passed over; it waits.
UPDATE {bids} SET state = 2, expires_at = UTC_TIMESTAMP(6) + INTERVAL ttl MICROSECOND
WHERE owner = {owner} AND state IN (1, 2) AND expires_at > UTC_TIMESTAMP(6)

-- name: renew_bids
-- It waits for no row: rows that are locked are passed over.
UPDATE (SELECT owner FROM {bids} FORCE INDEX (PRIMARY) WHERE owner IN ({owners}) LIMIT {count} FOR UPDATE SKIP LOCKED) AS free
STRAIGHT_JOIN {bids} AS b FORCE INDEX (PRIMARY) ON b.owner = free.owner
SET b.state = 2, b.expires_at = UTC_TIMESTAMP(6) + INTERVAL b.ttl MICROSECOND
WHERE b.state IN (1, 2) AND b.expires_at > UTC_TIMESTAMP(6);
SELECT owner, requested FROM {bids} WHERE owner IN ({owners}) AND requested IS NOT NULL

-- name: renewed_bids
SELECT owner, state, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) FROM {bids}
WHERE owner IN ({owners}) AND expires_at > UTC_TIMESTAMP(6)

-- name: verify_bids
-- It prolongs nothing, and waits for no row: rows are read as they were last committed.
SELECT owner, state, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) FROM {bids}
WHERE owner IN ({owners}) AND expires_at > UTC_TIMESTAMP(6);
SELECT owner, requested FROM {bids} WHERE owner IN ({owners}) AND requested IS NOT NULL

-- name: bids
SELECT owner, state, token, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) FROM {bids} WHERE owner IN ({owners}) AND expires_at > UTC_TIMESTAMP(6)

-- name: request_bids
UPDATE {bids} FORCE INDEX (lock_id) SET requested = {reason}
WHERE lock_id = {id} AND state IN (1, 2) AND expires_at > UTC_TIMESTAMP(6);
SELECT COUNT(*) FROM {bids} WHERE lock_id = {id} AND state IN (1, 2) AND expires_at > UTC_TIMESTAMP(6)

-- name: inspect_bids
SELECT state, label, token, since, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at), weight, mode
FROM {bids} WHERE lock_id = {id} AND state IN (0, 1, 2, 4) AND expires_at > UTC_TIMESTAMP(6) ORDER BY arrival, owner;
SELECT declared, capacity, TIMESTAMPDIFF(MICROSECOND, since, UTC_TIMESTAMP(6)) FROM {table} WHERE id = {id}

-- --- waiting

-- name: take_wake_lock
-- A client that grants us something finds this session by the name of a user lock.
SELECT IF(IFNULL(IS_USED_LOCK({wake_lock}), 0) = CONNECTION_ID(), 1, GET_LOCK({wake_lock}, 0))

-- name: take_sleep_lock
-- What the listener waits for while it sleeps: the main session has it, and does not give it back.
DO IF(IFNULL(IS_USED_LOCK({sleep_lock}), 0) = CONNECTION_ID(), 1, GET_LOCK({sleep_lock}, 0))

-- name: release_sleep_lock
-- The main session that had it is gone.
DO RELEASE_LOCK({sleep_lock})

-- name: hear_grants
-- What is sent to the listener is one statement in each packet: when KILL QUERY comes between two, the server sends no
-- answer for the second.
SELECT b.owner, t.id, t.family, t.name FROM {bids} AS b JOIN {table} AS t ON t.id = b.lock_id
WHERE b.client = {client} AND b.state = 1 AND b.expires_at > UTC_TIMESTAMP(6)

-- name: hear_ends
-- Locks for which this client waits, and of which a hold or a position is over.
SELECT t.id, t.family, t.name FROM {table} AS t
WHERE t.id IN (SELECT w.lock_id FROM {bids} AS w WHERE w.client = {client} AND w.state = 0)
  AND EXISTS (SELECT 1 FROM {bids} AS b WHERE b.lock_id = t.id AND b.expires_at <= UTC_TIMESTAMP(6))

-- name: hear_documents
SELECT id, version FROM {documents} WHERE id IN ({watched}) AND expires_at > UTC_TIMESTAMP(6)

-- name: listen
-- A client that grants us something ends this; a grant that came just before is seen, because it was committed before. On MariaDB
-- not by SLEEP: a KILL QUERY that comes as it begins stands still for 2 s, and with it all that sleep at that server.
SELECT IF(
  EXISTS (SELECT 1 FROM {bids} WHERE client = {client} AND state = 1 AND expires_at > UTC_TIMESTAMP(6))
  OR EXISTS (SELECT 1 FROM {documents} WHERE expires_at > UTC_TIMESTAMP(6) AND ({changed})), 0,
  /*M!100000 GET_LOCK({sleep_lock}, */ /*!80000 SLEEP( */ GREATEST(0, LEAST({look},
    (SELECT COALESCE(MIN(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), b.expires_at)), 1000000000) / 1000000
      FROM {bids} AS b
      WHERE b.lock_id IN (SELECT w.lock_id FROM {bids} AS w WHERE w.client = {client} AND w.state = 0))))))

-- name: stay
-- Positions and watches live for a ttl, and at least 3 s, from when their client prolonged them. Those that are locked at
-- this moment are passed over: there are two more times.
UPDATE (SELECT owner FROM {bids} FORCE INDEX (PRIMARY) WHERE owner IN ({owners}) LIMIT {count} FOR UPDATE SKIP LOCKED) AS free
STRAIGHT_JOIN {bids} AS b FORCE INDEX (PRIMARY) ON b.owner = free.owner
SET b.expires_at = UTC_TIMESTAMP(6) + INTERVAL GREATEST(b.ttl, 3000000) MICROSECOND
WHERE b.state IN (0, 5) AND b.expires_at > UTC_TIMESTAMP(6)

-- name: wake
-- Only if it listens at this moment: else it looks before it sleeps.
KILL QUERY IFNULL(IS_USED_LOCK({wake_lock}), 0)

-- name: shake
-- The end of a session makes its client ask at once whether its holds are there.
KILL IFNULL(IS_USED_LOCK({client}), 0)
