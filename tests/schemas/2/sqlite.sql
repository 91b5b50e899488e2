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

CREATE TABLE IF NOT EXISTS "postroom_outbox_version" (
    version INTEGER PRIMARY KEY,
    applied_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER))
);

INSERT INTO "postroom_outbox_version" (version) SELECT 2 WHERE NOT EXISTS (SELECT 1 FROM "postroom_outbox_version" WHERE version = 2);
