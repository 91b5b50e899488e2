-- Made by `make sql`; the schema comes first, then what is asked of it.

CREATE TABLE IF NOT EXISTS "postroom_outbox" (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    namespace TEXT NOT NULL,
    topic TEXT NOT NULL,
    type TEXT NOT NULL,
    "key" TEXT,
    tenant_id TEXT,
    dedupe_key TEXT,
    payload BLOB NOT NULL,
    content_type TEXT NOT NULL,
    headers TEXT NOT NULL DEFAULT '{}',
    status TEXT NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'processing', 'delivered', 'dead')),
    attempts INTEGER NOT NULL DEFAULT 0,
    token INTEGER NOT NULL DEFAULT 0,
    next_attempt_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    locked_by TEXT,
    locked_until INTEGER,
    last_error TEXT,
    created_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    updated_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    delivered_at INTEGER,
    destination TEXT,
    parked INTEGER,
    CHECK ((status = 'processing') = (locked_by IS NOT NULL)),
    CHECK ((locked_by IS NULL) = (locked_until IS NULL))
);

CREATE UNIQUE INDEX IF NOT EXISTS "postroom_outbox_dedupe" ON "postroom_outbox" (namespace, topic, dedupe_key)
WHERE dedupe_key IS NOT NULL;

CREATE INDEX IF NOT EXISTS "postroom_outbox_ready" ON "postroom_outbox" (namespace, next_attempt_at, seq)
WHERE status = 'pending' AND "key" IS NULL;

CREATE INDEX IF NOT EXISTS "postroom_outbox_ready_keyed" ON "postroom_outbox" (namespace, next_attempt_at, seq)
WHERE status = 'pending' AND "key" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "postroom_outbox_leased" ON "postroom_outbox" (namespace, locked_until, seq)
WHERE status = 'processing';

CREATE INDEX IF NOT EXISTS "postroom_outbox_keyed" ON "postroom_outbox" (namespace, topic, "key", seq)
WHERE "key" IS NOT NULL AND status IN ('pending', 'processing');

CREATE INDEX IF NOT EXISTS "postroom_outbox_dead" ON "postroom_outbox" (namespace, topic, "key", seq)
WHERE status = 'dead';

CREATE INDEX IF NOT EXISTS "postroom_outbox_delivered" ON "postroom_outbox" (namespace, delivered_at)
WHERE status = 'delivered';

CREATE INDEX IF NOT EXISTS "postroom_outbox_parked" ON "postroom_outbox" (namespace, destination, next_attempt_at, seq)
WHERE status = 'pending' AND parked = token;

CREATE VIEW IF NOT EXISTS "postroom_outbox_published" AS
SELECT seq AS id, strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch') AS created_at, topic,
type AS event_type,
CASE WHEN content_type = 'application/json' THEN CAST(payload AS TEXT) END AS data,
headers AS attributes, status = 'delivered' AS published
FROM "postroom_outbox";

CREATE VIEW IF NOT EXISTS "postroom_outbox_messages" AS
SELECT id, payload, headers AS properties,
strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch') AS created_at,
strftime('%Y-%m-%dT%H:%M:%fZ', delivered_at / 1000.0, 'unixepoch') AS published_at,
attempts, last_error,
strftime('%Y-%m-%dT%H:%M:%fZ', updated_at / 1000.0, 'unixepoch') AS updated_at
FROM "postroom_outbox";

CREATE TABLE IF NOT EXISTS "postroom_inbox" (
    consumer TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    message_id TEXT NOT NULL,
    created_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    PRIMARY KEY (consumer, tenant_id, message_id)
);

CREATE INDEX IF NOT EXISTS "postroom_inbox_old" ON "postroom_inbox" (consumer, created_at);

CREATE TABLE IF NOT EXISTS "postroom_inbox_dead" (
    consumer TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    message_id TEXT NOT NULL,
    topic TEXT NOT NULL,
    type TEXT NOT NULL,
    "key" TEXT,
    namespace TEXT NOT NULL,
    payload BLOB NOT NULL,
    content_type TEXT NOT NULL,
    headers TEXT NOT NULL DEFAULT '{}',
    attempts INTEGER NOT NULL,
    error TEXT NOT NULL,
    died_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    PRIMARY KEY (consumer, tenant_id, message_id)
);

CREATE VIEW IF NOT EXISTS "postroom_inbox_processed" AS
SELECT consumer AS subscriber, message_id,
strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch') AS created_at
FROM "postroom_inbox";

CREATE TABLE IF NOT EXISTS "postroom_outbox_tickets" (
    namespace TEXT NOT NULL,
    ticket TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('scheduled', 'expired', 'revoked')),
    ended_at INTEGER,
    PRIMARY KEY (namespace, ticket),
    CHECK ((status = 'scheduled') = (ended_at IS NULL))
);

CREATE INDEX IF NOT EXISTS "postroom_outbox_tickets_due" ON "postroom_outbox_tickets" (namespace, expires_at, ticket)
WHERE status = 'scheduled';

CREATE INDEX IF NOT EXISTS "postroom_outbox_tickets_ended" ON "postroom_outbox_tickets" (namespace, ended_at)
WHERE ended_at IS NOT NULL;

CREATE TABLE IF NOT EXISTS "postroom_outbox_version" (
    version INTEGER PRIMARY KEY,
    applied_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    step INTEGER
);

INSERT INTO "postroom_outbox_version" (version, step) SELECT 3, 1 WHERE NOT EXISTS (SELECT 1 FROM "postroom_outbox_version"
  WHERE version = 3);

-- add one message
INSERT INTO "postroom_outbox" (id, namespace, topic, type, "key", tenant_id, dedupe_key, payload, content_type, headers,
  next_attempt_at, created_at, updated_at) VALUES
(:id_a, :namespace_a, :topic_a, :type_a, :key_a, :tenant_id_a, :dedupe_key_a, :payload_a, :content_type_a, :headers_a,
  COALESCE(:due_at_a, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + :delay_a),
  CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER), CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER))
ON CONFLICT DO NOTHING RETURNING id;

-- add one message
SELECT id, topic, dedupe_key FROM "postroom_outbox" WHERE namespace = :namespace AND dedupe_key IN :keys AND topic IN :topics;

-- add several messages
INSERT INTO "postroom_outbox" (id, namespace, topic, type, "key", tenant_id, dedupe_key, payload, content_type, headers,
  next_attempt_at, created_at, updated_at) VALUES
(:id_a, :namespace_a, :topic_a, :type_a, :key_a, :tenant_id_a, :dedupe_key_a, :payload_a, :content_type_a, :headers_a,
  COALESCE(:due_at_a, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + :delay_a),
  CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER), CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
(:id_b, :namespace_b, :topic_b, :type_b, :key_b, :tenant_id_b, :dedupe_key_b, :payload_b, :content_type_b, :headers_b,
  COALESCE(:due_at_b, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + :delay_b),
  CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER), CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER))
ON CONFLICT DO NOTHING RETURNING id;

-- claim messages without a key
SELECT seq, length(payload) + length(headers) FROM "postroom_outbox"
WHERE namespace = :namespace AND "key" IS NULL AND status = 'processing'
  AND locked_until < CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AND attempts < :suspect_after
  AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
ORDER BY locked_until, seq LIMIT :limit;

-- claim messages without a key
SELECT seq, length(payload) + length(headers) FROM "postroom_outbox"
WHERE namespace = :namespace AND "key" IS NULL AND status = 'pending'
  AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AND attempts < :max_attempts
  AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
ORDER BY next_attempt_at, seq LIMIT :limit;

-- claim messages without a key
UPDATE "postroom_outbox"
SET status = 'processing', attempts = attempts + 1, token = token + 1,
locked_by = :worker, locked_until = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + :duration,
  updated_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
WHERE seq IN :rows
RETURNING id, topic, type, "key", payload, content_type, headers, tenant_id, dedupe_key, created_at, attempts, token, seq;

-- claim messages without a key, the newest first
SELECT seq, length(payload) + length(headers) FROM "postroom_outbox"
WHERE namespace = :namespace AND "key" IS NULL AND status = 'pending'
  AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AND attempts < :max_attempts
  AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
ORDER BY next_attempt_at DESC, seq DESC LIMIT :limit;

-- claim messages with a key
SELECT topic, "key" FROM "postroom_outbox"
WHERE namespace = :namespace AND "key" IS NOT NULL AND status = 'processing'
  AND locked_until < CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AND attempts < :suspect_after
  AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
ORDER BY locked_until, seq LIMIT :limit;

-- claim messages with a key
SELECT topic, "key" FROM "postroom_outbox"
WHERE namespace = :namespace AND "key" IS NOT NULL AND status = 'pending'
  AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AND attempts < :max_attempts
  AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
ORDER BY next_attempt_at, seq LIMIT :limit;

-- claim messages with a key
SELECT seq, ((status = 'pending' AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
  AND attempts < :max_attempts AND (:tenant_id IS NULL OR tenant_id = :tenant_id)) OR (status = 'processing'
  AND locked_until < CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AND attempts < :suspect_after
  AND (:tenant_id IS NULL OR tenant_id = :tenant_id))) AND
(:skip_dead OR NOT EXISTS (
        SELECT 1 FROM "postroom_outbox" AS dead
        WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
        AND dead."key" = head."key" AND dead.seq < head.seq))
AS eligible
FROM "postroom_outbox" AS head
WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace AND topic = :topic AND "key" = :key
ORDER BY seq LIMIT :length;

-- claim messages with a key
SELECT seq, length(payload) + length(headers) FROM "postroom_outbox"
WHERE seq IN :rows AND namespace = :namespace AND ((status = 'pending'
  AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AND attempts < :max_attempts
  AND (:tenant_id IS NULL OR tenant_id = :tenant_id)) OR (status = 'processing'
  AND locked_until < CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AND attempts < :suspect_after
  AND (:tenant_id IS NULL OR tenant_id = :tenant_id)));

-- claim messages with a key
SELECT topic, "key" FROM "postroom_outbox"
WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace AND (topic, "key") > (:topic, :key)
ORDER BY topic, "key" LIMIT 1;

-- claim messages with a key, the newest first
SELECT topic, "key" FROM "postroom_outbox"
WHERE namespace = :namespace AND "key" IS NOT NULL AND status = 'pending'
  AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AND attempts < :max_attempts
  AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
ORDER BY next_attempt_at DESC, seq DESC LIMIT :limit;

-- claim a suspect
SELECT seq, length(payload) + length(headers) FROM "postroom_outbox" AS head
WHERE namespace = :namespace AND status = 'processing'
  AND locked_until < CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
AND attempts >= :suspect_after AND attempts < :max_attempts AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
AND
(:skip_dead OR NOT EXISTS (
        SELECT 1 FROM "postroom_outbox" AS dead
        WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
        AND dead."key" = head."key" AND dead.seq < head.seq))
AND NOT EXISTS (
    SELECT 1 FROM "postroom_outbox" AS earlier
    WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND earlier.namespace = head.namespace
    AND earlier.topic = head.topic AND earlier."key" = head."key" AND earlier.seq < head.seq)
ORDER BY locked_until, seq LIMIT 1;

-- peek
SELECT id, topic, "key", seq, turn, since, (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - next_attempt_at) / 1000.0
FROM (
    SELECT * FROM (
        SELECT id, namespace, topic, "key", seq, next_attempt_at, 0 AS turn, locked_until AS since FROM "postroom_outbox"
        WHERE namespace = :namespace AND status = 'processing'
          AND locked_until < CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
        ORDER BY locked_until, seq LIMIT 1000) AS expired
    UNION ALL
    SELECT * FROM (
        SELECT id, namespace, topic, "key", seq, next_attempt_at, 1 AS turn, next_attempt_at AS since FROM "postroom_outbox"
        WHERE namespace = :namespace AND "key" IS NULL AND status = 'pending'
          AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
        ORDER BY next_attempt_at, seq LIMIT 1000) AS without_key
    UNION ALL
    SELECT * FROM (
        SELECT id, namespace, topic, "key", seq, next_attempt_at, 1 AS turn, next_attempt_at AS since FROM "postroom_outbox"
        WHERE namespace = :namespace AND "key" IS NOT NULL AND status = 'pending'
          AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
        ORDER BY next_attempt_at, seq LIMIT 1000) AS with_key) AS head;

-- peek
SELECT line.topic, line."key", (
    SELECT earlier.seq FROM "postroom_outbox" AS earlier
    WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND earlier.namespace = :namespace
    AND earlier.topic = line.topic AND earlier."key" = line."key" AND earlier.seq < line.last
    AND NOT (earlier.status = 'pending' AND earlier.next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER))
    AND NOT (earlier.status = 'processing' AND earlier.locked_until < CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER))
    ORDER BY earlier.seq LIMIT 1), (
    SELECT dead.seq FROM "postroom_outbox" AS dead
    WHERE dead.status = 'dead' AND dead.namespace = :namespace
    AND dead.topic = line.topic AND dead."key" = line."key"
    ORDER BY dead.seq LIMIT 1)
FROM (
    SELECT topic, "key", max(seq) AS last FROM (
        SELECT * FROM (
            SELECT id, namespace, topic, "key", seq, next_attempt_at, 0 AS turn, locked_until AS since FROM "postroom_outbox"
            WHERE namespace = :namespace AND status = 'processing'
              AND locked_until < CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
            ORDER BY locked_until, seq LIMIT 1000) AS expired
        UNION ALL
        SELECT * FROM (
            SELECT id, namespace, topic, "key", seq, next_attempt_at, 1 AS turn, next_attempt_at AS since FROM "postroom_outbox"
            WHERE namespace = :namespace AND "key" IS NULL AND status = 'pending'
              AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
            ORDER BY next_attempt_at, seq LIMIT 1000) AS without_key
        UNION ALL
        SELECT * FROM (
            SELECT id, namespace, topic, "key", seq, next_attempt_at, 1 AS turn, next_attempt_at AS since FROM "postroom_outbox"
            WHERE namespace = :namespace AND "key" IS NOT NULL AND status = 'pending'
              AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
            ORDER BY next_attempt_at, seq LIMIT 1000) AS with_key) AS head
    WHERE "key" IS NOT NULL GROUP BY topic, "key") AS line;

-- peek
SELECT id, topic, type, "key", payload, content_type, headers, tenant_id, dedupe_key, created_at, attempts, token, seq
  FROM "postroom_outbox" WHERE id IN :rows;

-- settle, keeping what was delivered
UPDATE "postroom_outbox"
SET status = 'delivered', delivered_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER),
  updated_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER),
locked_by = NULL, locked_until = NULL, last_error = NULL
WHERE id IN :ids AND token = :token AND status NOT IN ('pending', 'delivered');

-- settle, keeping what was delivered
SELECT id, token, status FROM "postroom_outbox" WHERE id IN :ids;

-- settle, keeping what was delivered
UPDATE "postroom_outbox"
SET status = 'pending', next_attempt_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + changed.delay,
  last_error = changed.error,
locked_by = NULL, locked_until = NULL, updated_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
FROM (
    SELECT json_extract(value, '$[0]') AS changed_id, json_extract(value, '$[1]') AS delay,
    json_extract(value, '$[2]') AS error
    FROM json_each(:changes)) AS changed
WHERE id = changed.changed_id;

-- settle, keeping what was delivered
UPDATE "postroom_outbox"
SET status = 'dead', last_error = changed.error,
locked_by = NULL, locked_until = NULL, updated_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
FROM (
    SELECT json_extract(value, '$[0]') AS changed_id, json_extract(value, '$[1]') AS delay,
    json_extract(value, '$[2]') AS error
    FROM json_each(:changes)) AS changed
WHERE id = changed.changed_id;

-- settle, keeping what was delivered
UPDATE "postroom_outbox"
SET status = 'pending', attempts = attempts - 1,
next_attempt_at = CASE WHEN changed.delay > 0 THEN CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + changed.delay ELSE next_attempt_at END,
locked_by = NULL, locked_until = NULL, updated_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
FROM (
    SELECT json_extract(value, '$[0]') AS changed_id, json_extract(value, '$[1]') AS delay,
    json_extract(value, '$[2]') AS error
    FROM json_each(:changes)) AS changed
WHERE id = changed.changed_id;

-- settle, keeping what was delivered
UPDATE "postroom_outbox"
SET status = 'pending', attempts = attempts - 1,
  next_attempt_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + changed.delay,
destination = changed.error, parked = token,
locked_by = NULL, locked_until = NULL, updated_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
FROM (
    SELECT json_extract(value, '$[0]') AS changed_id, json_extract(value, '$[1]') AS delay,
    json_extract(value, '$[2]') AS error
    FROM json_each(:changes)) AS changed
WHERE id = changed.changed_id;

-- settle, deleting what was delivered
DELETE FROM "postroom_outbox" WHERE id IN :ids AND token = :token AND status NOT IN ('pending', 'delivered');

-- extend leases
UPDATE "postroom_outbox" SET locked_until = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + :duration,
  updated_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) WHERE id IN :ids;

-- list destinations with parked messages
WITH RECURSIVE names (destination, place) AS (
    SELECT destination, 1
    FROM (
        SELECT destination FROM "postroom_outbox"
        WHERE status = 'pending' AND parked = token AND namespace = :namespace AND destination > :after
        ORDER BY destination LIMIT 1) AS first
    UNION ALL
    SELECT (
        SELECT destination FROM "postroom_outbox"
        WHERE status = 'pending' AND parked = token AND namespace = :namespace AND destination > names.destination
        ORDER BY destination LIMIT 1), names.place + 1
    FROM names
    WHERE names.destination IS NOT NULL AND names.place < :limit)
SELECT destination FROM names WHERE destination IS NOT NULL ORDER BY place;

-- unpark
SELECT seq FROM "postroom_outbox"
WHERE status = 'pending' AND parked = token AND namespace = :namespace AND destination = :destination
ORDER BY next_attempt_at, seq LIMIT :limit;

-- unpark
SELECT (
    SELECT seq FROM "postroom_outbox" AS head
    WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND head.namespace = chosen.namespace
    AND head.topic = chosen.topic AND head."key" = chosen."key"
    ORDER BY head.seq LIMIT 1)
FROM "postroom_outbox" AS chosen
WHERE chosen.seq IN :rows AND chosen."key" IS NOT NULL;

-- unpark
UPDATE "postroom_outbox"
SET next_attempt_at = created_at, parked = NULL, updated_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
WHERE seq IN :rows AND parked = token AND destination = :destination
AND status NOT IN ('processing', 'delivered', 'dead');

-- sweep
SELECT id FROM "postroom_outbox"
WHERE namespace = :namespace AND status = 'processing'
  AND locked_until < CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AND attempts >= :max_attempts
ORDER BY locked_until LIMIT 1000;

-- sweep
UPDATE "postroom_outbox"
SET status = 'dead', locked_by = NULL, locked_until = NULL,
  updated_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER),
last_error = COALESCE(:reason, last_error, 'no attempts left')
WHERE id IN :ids AND attempts >= :max_attempts AND status NOT IN ('pending', 'delivered', 'dead')
  AND locked_until < CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER);

-- sweep
SELECT id FROM (
    SELECT id, attempts FROM "postroom_outbox"
    WHERE namespace = :namespace AND "key" IS NULL AND status = 'pending'
      AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
    ORDER BY next_attempt_at, seq LIMIT 1000) AS front
WHERE attempts >= :max_attempts;

-- sweep
SELECT id FROM (
    SELECT id, attempts FROM "postroom_outbox"
    WHERE namespace = :namespace AND "key" IS NOT NULL AND status = 'pending'
      AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
    ORDER BY next_attempt_at, seq LIMIT 1000) AS front
WHERE attempts >= :max_attempts;

-- purge
DELETE FROM "postroom_outbox"
WHERE id IN (
    SELECT id FROM "postroom_outbox"
    WHERE namespace = :namespace AND status = 'delivered'
      AND delivered_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - :duration
    ORDER BY delivered_at LIMIT :limit);

-- stats
SELECT (SELECT count(*) FROM (SELECT 1 AS one FROM "postroom_outbox" WHERE namespace = :namespace AND status = 'pending'
  AND "key" IS NULL LIMIT 10000) AS counted_0),
(SELECT count(*) FROM (SELECT 1 AS one FROM "postroom_outbox" WHERE namespace = :namespace AND status = 'pending'
  AND "key" IS NOT NULL LIMIT 10000) AS counted_1),
(SELECT count(*) FROM (SELECT 1 AS one FROM "postroom_outbox" WHERE namespace = :namespace
  AND status = 'processing' LIMIT 10000) AS counted_2),
(SELECT count(*) FROM (SELECT 1 AS one FROM "postroom_outbox" WHERE namespace = :namespace
  AND status = 'delivered' LIMIT 10000) AS counted_3),
(SELECT count(*) FROM (SELECT 1 AS one FROM "postroom_outbox" WHERE namespace = :namespace
  AND status = 'dead' LIMIT 10000) AS counted_4);

-- stats
SELECT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - next_attempt_at) / 1000.0 FROM (
    SELECT min(next_attempt_at) AS next_attempt_at FROM "postroom_outbox"
    WHERE namespace = :namespace AND status = 'pending' AND "key" IS NULL
      AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)) AS due
UNION ALL
SELECT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - created_at) / 1000.0 FROM (
    SELECT min(created_at) AS created_at FROM (
        SELECT created_at FROM "postroom_outbox"
        WHERE status = 'pending' AND parked = token AND namespace = :namespace AND destination IS NOT NULL
        ORDER BY destination, next_attempt_at, seq LIMIT 1000) AS first) AS parked;

-- stats
WITH head AS (
    SELECT namespace, topic, "key", seq, next_attempt_at FROM "postroom_outbox"
    WHERE namespace = :namespace AND status = 'pending' AND "key" IS NOT NULL
      AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
    ORDER BY next_attempt_at, seq LIMIT 1000)
SELECT (SELECT count(*) FROM head),
(SELECT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - next_attempt_at) / 1000.0 FROM head WHERE
    head.seq = (
        SELECT earlier.seq FROM "postroom_outbox" AS earlier
        WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND earlier.namespace = head.namespace
        AND earlier.topic = head.topic AND earlier."key" = head."key"
        ORDER BY earlier.seq LIMIT 1)
    AND (
        SELECT dead.seq FROM "postroom_outbox" AS dead
        WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
        AND dead."key" = head."key" AND dead.seq < head.seq
        ORDER BY dead.seq LIMIT 1) IS NULL
    ORDER BY next_attempt_at, seq LIMIT 1);

-- stats
SELECT topic, "key",
CASE WHEN status = 'pending' AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AND
head.seq = (
    SELECT earlier.seq FROM "postroom_outbox" AS earlier
    WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND earlier.namespace = head.namespace
    AND earlier.topic = head.topic AND earlier."key" = head."key"
    ORDER BY earlier.seq LIMIT 1)
AND (
    SELECT dead.seq FROM "postroom_outbox" AS dead
    WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
    AND dead."key" = head."key" AND dead.seq < head.seq
    ORDER BY dead.seq LIMIT 1) IS NULL
THEN (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - next_attempt_at) / 1000.0 END
FROM (
    SELECT namespace, topic, "key", seq, status, next_attempt_at FROM "postroom_outbox"
    WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace AND (topic, "key") > (:topic, :key)
    ORDER BY topic, "key", seq LIMIT 1) AS head;

-- look for messages of other namespaces
SELECT namespace FROM (
    SELECT namespace FROM "postroom_outbox"
    WHERE status = 'pending' AND "key" IS NULL AND namespace > :after
    ORDER BY namespace, next_attempt_at, seq LIMIT 1) AS first_loose
UNION ALL
SELECT namespace FROM (
    SELECT namespace FROM "postroom_outbox"
    WHERE status = 'pending' AND "key" IS NOT NULL AND namespace > :after
    ORDER BY namespace, next_attempt_at, seq LIMIT 1) AS first_ordered
ORDER BY namespace LIMIT 1;

-- look for messages of other namespaces
SELECT (
    SELECT count(*) FROM (
        SELECT 1 AS one FROM "postroom_outbox"
        WHERE status = 'processing' AND namespace = :namespace
          AND locked_until > CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
        ORDER BY locked_until, seq LIMIT 1) AS held),
(
    SELECT count(*) FROM (
        SELECT 1 AS one FROM "postroom_outbox"
        WHERE status = 'pending' AND "key" IS NULL AND namespace = :namespace
          AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
        ORDER BY next_attempt_at, seq LIMIT 1000) AS due_loose),
(
    SELECT count(*) FROM (
        SELECT 1 AS one FROM "postroom_outbox"
        WHERE status = 'pending' AND "key" IS NOT NULL AND namespace = :namespace
          AND next_attempt_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
        ORDER BY next_attempt_at, seq LIMIT 1000) AS due_ordered);

-- mark a message as handled
INSERT INTO "postroom_inbox" (consumer, tenant_id, message_id, created_at)
VALUES (:consumer, :tenant_id, :message_id, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER))
ON CONFLICT DO NOTHING;

-- look for the mark of a message
SELECT 1 FROM "postroom_inbox"
WHERE consumer = :consumer AND tenant_id = :tenant_id AND message_id = :message_id;

-- purge the inbox
DELETE FROM "postroom_inbox"
WHERE rowid IN (
    SELECT rowid FROM "postroom_inbox"
    WHERE consumer = :consumer AND created_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - :duration
    ORDER BY created_at LIMIT :limit);

-- keep a dead letter
INSERT INTO "postroom_inbox_dead" (consumer, tenant_id, message_id, topic, type, "key", namespace, payload,
    content_type, headers, attempts, error, died_at)
VALUES (:consumer, :tenant_id, :message_id, :topic, :type, :key, :namespace, :payload,
    :content_type, :headers, :attempts, :error, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER))
ON CONFLICT DO NOTHING;

-- schedule a ticket
INSERT INTO "postroom_outbox_tickets" (namespace, ticket, expires_at, status)
VALUES (:namespace, :ticket, :expires_at, 'scheduled')
ON CONFLICT DO NOTHING;

-- schedule a ticket
UPDATE "postroom_outbox_tickets" SET status = status
WHERE namespace = :namespace AND ticket = :ticket;

-- schedule a ticket
SELECT status, expires_at, expires_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) FROM "postroom_outbox_tickets"
WHERE namespace = :namespace AND ticket = :ticket;

-- renew a ticket
UPDATE "postroom_outbox_tickets" SET expires_at = :expires_at
WHERE namespace = :namespace AND ticket = :ticket;

-- find tickets that are due
SELECT ticket, expires_at FROM "postroom_outbox_tickets"
WHERE namespace = :namespace AND status = 'scheduled' AND expires_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
ORDER BY expires_at, ticket LIMIT :limit;

-- find tickets that are due at a moment
SELECT ticket, expires_at FROM "postroom_outbox_tickets"
WHERE namespace = :namespace AND status = 'scheduled' AND expires_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
  AND expires_at <= :due_cutoff
ORDER BY expires_at, ticket LIMIT :limit;

-- decide
UPDATE "postroom_outbox_tickets" SET status = :status, ended_at = CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
WHERE namespace = :namespace AND ticket = :ticket;

-- forget tickets
DELETE FROM "postroom_outbox_tickets"
WHERE rowid IN (
    SELECT rowid FROM "postroom_outbox_tickets"
    WHERE namespace = :namespace AND ended_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - :duration
    ORDER BY ended_at LIMIT :limit);

-- look at the server
SELECT sqlite_version();
