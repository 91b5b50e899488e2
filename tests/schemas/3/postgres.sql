CREATE TABLE IF NOT EXISTS "postroom_outbox" (
    id uuid PRIMARY KEY,
    seq bigint NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 1),
    namespace text NOT NULL,
    topic text NOT NULL,
    type text NOT NULL,
    "key" text,
    tenant_id uuid,
    dedupe_key text,
    payload bytea NOT NULL,
    content_type text NOT NULL,
    headers jsonb NOT NULL DEFAULT '{}',
    status text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'processing', 'delivered', 'dead')),
    attempts integer NOT NULL DEFAULT 0,
    token bigint NOT NULL DEFAULT 0,
    next_attempt_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    locked_by uuid,
    locked_until timestamptz,
    last_error text,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    delivered_at timestamptz,
    CHECK ((status = 'processing') = (locked_by IS NOT NULL)),
    CHECK ((locked_by IS NULL) = (locked_until IS NULL))
) WITH (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.05
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

CREATE OR REPLACE VIEW "postroom_outbox_published" AS
SELECT seq AS id, created_at, topic, type AS event_type,
       CASE WHEN content_type = 'application/json' THEN convert_from(payload, 'UTF8')::jsonb END AS data,
       headers AS attributes, status = 'delivered' AS published
FROM "postroom_outbox";

CREATE OR REPLACE VIEW "postroom_outbox_messages" AS
SELECT id, payload, headers AS properties, created_at, delivered_at AS published_at, attempts, last_error,
       updated_at
FROM "postroom_outbox";

CREATE TABLE IF NOT EXISTS "postroom_inbox" (
    consumer text NOT NULL,
    tenant_id uuid NOT NULL,
    message_id uuid NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, tenant_id, message_id)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

CREATE INDEX IF NOT EXISTS "postroom_inbox_old" ON "postroom_inbox" (consumer, created_at);

CREATE TABLE IF NOT EXISTS "postroom_inbox_dead" (
    consumer text NOT NULL,
    tenant_id uuid NOT NULL,
    message_id uuid NOT NULL,
    topic text NOT NULL,
    type text NOT NULL,
    "key" text,
    namespace text NOT NULL,
    payload bytea NOT NULL,
    content_type text NOT NULL,
    headers jsonb NOT NULL DEFAULT '{}',
    attempts integer NOT NULL,
    error text NOT NULL,
    died_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, tenant_id, message_id)
);

CREATE OR REPLACE VIEW "postroom_inbox_processed" AS
SELECT consumer AS subscriber, message_id, created_at
FROM "postroom_inbox";

CREATE TABLE IF NOT EXISTS "postroom_outbox_tickets" (
    namespace text NOT NULL,
    ticket text NOT NULL,
    expires_at timestamptz NOT NULL,
    status text NOT NULL CHECK (status IN ('scheduled', 'expired', 'revoked')),
    ended_at timestamptz,
    PRIMARY KEY (namespace, ticket),
    CHECK ((status = 'scheduled') = (ended_at IS NULL))
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

CREATE INDEX IF NOT EXISTS "postroom_outbox_tickets_due" ON "postroom_outbox_tickets" (namespace, expires_at, ticket)
WHERE status = 'scheduled';

CREATE INDEX IF NOT EXISTS "postroom_outbox_tickets_ended" ON "postroom_outbox_tickets" (namespace, ended_at)
WHERE ended_at IS NOT NULL;

CREATE TABLE IF NOT EXISTS "postroom_outbox_version" (
    version integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

INSERT INTO "postroom_outbox_version" (version) SELECT 3 WHERE NOT EXISTS (SELECT 1 FROM "postroom_outbox_version" WHERE version = 3);
