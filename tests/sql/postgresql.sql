-- Made by `make sql`; the schema comes first, then what is asked of it.

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
    destination text,
    parked bigint,
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

CREATE INDEX IF NOT EXISTS "postroom_outbox_parked" ON "postroom_outbox" (namespace, destination, next_attempt_at, seq)
WHERE status = 'pending' AND parked = token;

CREATE OR REPLACE FUNCTION "postroom_outbox_json"(payload bytea) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
RETURN pg_catalog.convert_from(payload, 'UTF8')::pg_catalog.jsonb;
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
RETURN NULL;
END
$$;

GRANT EXECUTE ON FUNCTION "postroom_outbox_json"(bytea) TO PUBLIC;

CREATE OR REPLACE VIEW "postroom_outbox_published" AS
SELECT seq AS id, created_at, topic, type AS event_type,
CASE WHEN content_type = 'application/json' THEN "postroom_outbox_json"(payload) END AS data,
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
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    step integer
);

INSERT INTO "postroom_outbox_version" (version, step) SELECT 3, 1 WHERE NOT EXISTS (SELECT 1 FROM "postroom_outbox_version"
  WHERE version = 3);

-- add one message
SELECT pg_advisory_xact_lock(number) FROM unnest(:numbers::bigint[]) AS t(number);

-- add one message
INSERT INTO "postroom_outbox" (id, namespace, topic, type, "key", tenant_id, dedupe_key, payload, content_type,
    headers, next_attempt_at)
VALUES (:id::uuid, :namespace::text, :topic::text, :type::text, :key::text, :tenant_id::uuid,
    :dedupe_key::text, :payload::bytea, :content_type::text, (:headers::text)::jsonb,
    COALESCE(:due_at::timestamptz, statement_timestamp() + :delay::interval))
ON CONFLICT DO NOTHING;

-- add one message
SELECT id, topic, dedupe_key FROM "postroom_outbox"
WHERE namespace = :namespace::text AND topic = ANY (:topics::text[]) AND dedupe_key = ANY (:keys::text[]);

-- add a message that has nothing special
INSERT INTO "postroom_outbox" (id, namespace, topic, type, "key", payload, content_type)
VALUES (:id::uuid, :namespace::text, :topic::text, :type::text, :key::text, :payload::bytea,
    :content_type::text);

-- add several messages
INSERT INTO "postroom_outbox" (id, namespace, topic, type, "key", tenant_id, dedupe_key, payload, content_type,
    headers, next_attempt_at)
SELECT id, namespace, topic, type, k, tenant_id, dedupe_key, payload, content_type, headers::jsonb,
COALESCE(due_at, statement_timestamp() + delay)
FROM unnest(:ids::uuid[], :namespaces::text[], :topics::text[], :types::text[], :keys::text[],
    :tenant_ids::uuid[], :dedupe_keys::text[], :payloads::bytea[], :content_types::text[],
    :headerss::text[], :due_ats::timestamptz[], :delays::interval[])
AS t(id, namespace, topic, type, k, tenant_id, dedupe_key, payload, content_type, headers, due_at, delay)
ON CONFLICT DO NOTHING
RETURNING id;

-- add several messages that differ in their payload
INSERT INTO "postroom_outbox" (id, namespace, topic, type, "key", tenant_id, payload, content_type, headers,
    next_attempt_at)
SELECT id, :namespace::text, :topic::text, :type::text, :key::text, :tenant_id::uuid, payload,
:content_type::text, (:headers::text)::jsonb,
COALESCE(:due_at::timestamptz, statement_timestamp() + :delay::interval)
FROM unnest(:ids::uuid[], :payloads::bytea[]) AS t(id, payload);

-- claim messages without a key
WITH expired AS MATERIALIZED (
    SELECT id, octet_length(payload) + pg_column_size(headers) AS size FROM "postroom_outbox"
    WHERE namespace = :namespace::text AND "key" IS NULL AND status = 'processing' AND locked_until < now()
      AND attempts < :suspect_after AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)
    ORDER BY locked_until LIMIT :limit::bigint FOR UPDATE SKIP LOCKED
), due AS MATERIALIZED (
    SELECT id, octet_length(payload) + pg_column_size(headers) AS size FROM "postroom_outbox"
    WHERE namespace = :namespace AND "key" IS NULL AND status = 'pending' AND next_attempt_at <= now()
      AND attempts < :max_attempts AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)
    ORDER BY next_attempt_at, seq LIMIT :limit - (SELECT count(*) FROM expired) FOR UPDATE SKIP LOCKED
), chosen AS (
    SELECT id
    FROM (
        SELECT id, size, sum(size) OVER (ROWS UNBOUNDED PRECEDING) AS total
        FROM (SELECT * FROM expired UNION ALL SELECT * FROM due) AS either) AS summed
    WHERE total <= :max_bytes::bigint OR total = size
)
UPDATE "postroom_outbox"
SET status = 'processing', attempts = attempts + 1, token = token + 1,
locked_by = :worker::uuid, locked_until = (SELECT clock_timestamp()) + :duration::interval, updated_at = clock_timestamp()
WHERE id = ANY (ARRAY(SELECT id FROM chosen))
RETURNING id, topic, type, "key", payload, content_type, headers::text, tenant_id, dedupe_key, created_at,
attempts, token, seq;

-- claim messages without a key, the newest first
WITH expired AS MATERIALIZED (
    SELECT id, octet_length(payload) + pg_column_size(headers) AS size FROM "postroom_outbox"
    WHERE namespace = :namespace::text AND "key" IS NULL AND status = 'processing' AND locked_until < now()
      AND attempts < :suspect_after AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)
    ORDER BY locked_until LIMIT :limit::bigint FOR UPDATE SKIP LOCKED
), due AS MATERIALIZED (
    SELECT id, octet_length(payload) + pg_column_size(headers) AS size FROM "postroom_outbox"
    WHERE namespace = :namespace AND "key" IS NULL AND status = 'pending' AND next_attempt_at <= now()
      AND attempts < :max_attempts AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)
    ORDER BY next_attempt_at DESC, seq DESC LIMIT :limit - (SELECT count(*) FROM expired) FOR UPDATE SKIP LOCKED
), chosen AS (
    SELECT id
    FROM (
        SELECT id, size, sum(size) OVER (ROWS UNBOUNDED PRECEDING) AS total
        FROM (SELECT * FROM expired UNION ALL SELECT * FROM due) AS either) AS summed
    WHERE total <= :max_bytes::bigint OR total = size
)
UPDATE "postroom_outbox"
SET status = 'processing', attempts = attempts + 1, token = token + 1,
locked_by = :worker::uuid, locked_until = (SELECT clock_timestamp()) + :duration::interval, updated_at = clock_timestamp()
WHERE id = ANY (ARRAY(SELECT id FROM chosen))
RETURNING id, topic, type, "key", payload, content_type, headers::text, tenant_id, dedupe_key, created_at,
attempts, token, seq;

-- claim messages with a key
WITH expired AS MATERIALIZED (
    SELECT topic, "key" FROM "postroom_outbox"
    WHERE namespace = :namespace::text AND "key" IS NOT NULL AND status = 'processing' AND locked_until < now()
      AND attempts < :suspect_after AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)
    ORDER BY locked_until LIMIT :window::bigint
), due AS MATERIALIZED (
    SELECT topic, "key", row_number() OVER () AS turn
    FROM (
        SELECT topic, "key" FROM "postroom_outbox"
        WHERE namespace = :namespace AND "key" IS NOT NULL AND status = 'pending' AND next_attempt_at <= now()
          AND attempts < :max_attempts AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)
        ORDER BY next_attempt_at, seq LIMIT :window) AS first
), mark AS (
    SELECT :window IN ((SELECT count(*) FROM expired), (SELECT count(*) FROM due)) AS is_full
), keys AS MATERIALIZED (
    SELECT topic, "key", min(turn) AS turn
    FROM (SELECT topic, "key", 0 AS turn FROM expired UNION ALL SELECT * FROM due) AS either
    GROUP BY topic, "key"
),
heads AS MATERIALIZED (
    SELECT keys.topic, keys."key"
    FROM (SELECT * FROM keys ORDER BY turn) AS keys CROSS JOIN LATERAL (
        SELECT ((status = 'pending' AND next_attempt_at <= now() AND attempts < :max_attempts AND (:tenant_id::uuid IS NULL
          OR tenant_id = :tenant_id)) OR (status = 'processing' AND locked_until < now() AND attempts < :suspect_after
          AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id))) AND
        (:skip_dead::boolean OR NOT EXISTS (
                SELECT 1 FROM "postroom_outbox" AS dead
                WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
                AND dead."key" = head."key" AND dead.seq < head.seq))
        AS eligible
        FROM "postroom_outbox" AS head
        WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace
        AND topic = keys.topic AND "key" = keys."key"
        ORDER BY seq LIMIT 1) AS head
    WHERE head.eligible
    LIMIT :limit::bigint
), planned AS MATERIALIZED (
    SELECT run.id, heads.topic, heads."key", run.place, row_number() OVER () AS turn
    FROM heads CROSS JOIN LATERAL (
        SELECT id, row_number() OVER (ORDER BY seq) AS place, bool_and(eligible) OVER (ORDER BY seq) AS unbroken
        FROM (
            SELECT id, seq, ((status = 'pending' AND next_attempt_at <= now() AND attempts < :max_attempts
              AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)) OR (status = 'processing' AND locked_until < now()
              AND attempts < :suspect_after AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id))) AND
            (:skip_dead::boolean OR NOT EXISTS (
                    SELECT 1 FROM "postroom_outbox" AS dead
                    WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
                    AND dead."key" = head."key" AND dead.seq < head.seq))
            AS eligible
            FROM "postroom_outbox" AS head
            WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace
            AND topic = heads.topic AND "key" = heads."key"
            ORDER BY seq
            LIMIT GREATEST(:limit / GREATEST((SELECT count(*) FROM heads), 1), :run::bigint)) AS next
    ) AS run
    WHERE run.unbroken
    LIMIT :limit
), locked AS MATERIALIZED (
    SELECT id, octet_length(payload) + pg_column_size(headers) AS size FROM "postroom_outbox"
    WHERE id = ANY (ARRAY(SELECT id FROM planned)) AND ((status = 'pending' AND next_attempt_at <= now()
      AND attempts < :max_attempts AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)) OR (status = 'processing'
      AND locked_until < now() AND attempts < :suspect_after AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)))
    FOR UPDATE SKIP LOCKED
), chosen AS (
    SELECT id
    FROM (
        -- What was taken meanwhile leaves a gap; nothing behind a gap may go.
        SELECT id, size, sum(size) OVER (ORDER BY turn) AS total
        FROM (
            SELECT id, size, turn, place, row_number() OVER (PARTITION BY topic, "key" ORDER BY place) AS nth
            FROM planned JOIN locked USING (id)) AS numbered
        WHERE nth = place) AS summed
    WHERE total <= :max_bytes::bigint OR total = size
), taken AS (
    UPDATE "postroom_outbox"
    SET status = 'processing', attempts = attempts + 1, token = token + 1,
    locked_by = :worker::uuid, locked_until = (SELECT clock_timestamp()) + :duration::interval, updated_at = clock_timestamp()
    WHERE id = ANY (ARRAY(SELECT id FROM chosen))
    RETURNING id, topic, type, "key", payload, content_type, headers::text, tenant_id, dedupe_key, created_at,
    attempts, token, seq
)
-- One row at least, for what is told of the claim itself.
SELECT taken.*, mark.* FROM mark LEFT JOIN taken ON true;

-- claim messages with a key, the newest first
WITH expired AS MATERIALIZED (
    SELECT topic, "key" FROM "postroom_outbox"
    WHERE namespace = :namespace::text AND "key" IS NOT NULL AND status = 'processing' AND locked_until < now()
      AND attempts < :suspect_after AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)
    ORDER BY locked_until LIMIT :window::bigint
), due AS MATERIALIZED (
    SELECT topic, "key", row_number() OVER () AS turn
    FROM (
        SELECT topic, "key" FROM "postroom_outbox"
        WHERE namespace = :namespace AND "key" IS NOT NULL AND status = 'pending' AND next_attempt_at <= now()
          AND attempts < :max_attempts AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)
        ORDER BY next_attempt_at DESC, seq DESC LIMIT :window) AS first
), mark AS (
    SELECT :window IN ((SELECT count(*) FROM expired), (SELECT count(*) FROM due)) AS is_full
), keys AS MATERIALIZED (
    SELECT topic, "key", min(turn) AS turn
    FROM (SELECT topic, "key", 0 AS turn FROM expired UNION ALL SELECT * FROM due) AS either
    GROUP BY topic, "key"
),
heads AS MATERIALIZED (
    SELECT keys.topic, keys."key"
    FROM (SELECT * FROM keys ORDER BY turn) AS keys CROSS JOIN LATERAL (
        SELECT ((status = 'pending' AND next_attempt_at <= now() AND attempts < :max_attempts AND (:tenant_id::uuid IS NULL
          OR tenant_id = :tenant_id)) OR (status = 'processing' AND locked_until < now() AND attempts < :suspect_after
          AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id))) AND
        (:skip_dead::boolean OR NOT EXISTS (
                SELECT 1 FROM "postroom_outbox" AS dead
                WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
                AND dead."key" = head."key" AND dead.seq < head.seq))
        AS eligible
        FROM "postroom_outbox" AS head
        WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace
        AND topic = keys.topic AND "key" = keys."key"
        ORDER BY seq LIMIT 1) AS head
    WHERE head.eligible
    LIMIT :limit::bigint
), planned AS MATERIALIZED (
    SELECT run.id, heads.topic, heads."key", run.place, row_number() OVER () AS turn
    FROM heads CROSS JOIN LATERAL (
        SELECT id, row_number() OVER (ORDER BY seq) AS place, bool_and(eligible) OVER (ORDER BY seq) AS unbroken
        FROM (
            SELECT id, seq, ((status = 'pending' AND next_attempt_at <= now() AND attempts < :max_attempts
              AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)) OR (status = 'processing' AND locked_until < now()
              AND attempts < :suspect_after AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id))) AND
            (:skip_dead::boolean OR NOT EXISTS (
                    SELECT 1 FROM "postroom_outbox" AS dead
                    WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
                    AND dead."key" = head."key" AND dead.seq < head.seq))
            AS eligible
            FROM "postroom_outbox" AS head
            WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace
            AND topic = heads.topic AND "key" = heads."key"
            ORDER BY seq
            LIMIT GREATEST(:limit / GREATEST((SELECT count(*) FROM heads), 1), :run::bigint)) AS next
    ) AS run
    WHERE run.unbroken
    LIMIT :limit
), locked AS MATERIALIZED (
    SELECT id, octet_length(payload) + pg_column_size(headers) AS size FROM "postroom_outbox"
    WHERE id = ANY (ARRAY(SELECT id FROM planned)) AND ((status = 'pending' AND next_attempt_at <= now()
      AND attempts < :max_attempts AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)) OR (status = 'processing'
      AND locked_until < now() AND attempts < :suspect_after AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)))
    FOR UPDATE SKIP LOCKED
), chosen AS (
    SELECT id
    FROM (
        -- What was taken meanwhile leaves a gap; nothing behind a gap may go.
        SELECT id, size, sum(size) OVER (ORDER BY turn) AS total
        FROM (
            SELECT id, size, turn, place, row_number() OVER (PARTITION BY topic, "key" ORDER BY place) AS nth
            FROM planned JOIN locked USING (id)) AS numbered
        WHERE nth = place) AS summed
    WHERE total <= :max_bytes::bigint OR total = size
), taken AS (
    UPDATE "postroom_outbox"
    SET status = 'processing', attempts = attempts + 1, token = token + 1,
    locked_by = :worker::uuid, locked_until = (SELECT clock_timestamp()) + :duration::interval, updated_at = clock_timestamp()
    WHERE id = ANY (ARRAY(SELECT id FROM chosen))
    RETURNING id, topic, type, "key", payload, content_type, headers::text, tenant_id, dedupe_key, created_at,
    attempts, token, seq
)
-- One row at least, for what is told of the claim itself.
SELECT taken.*, mark.* FROM mark LEFT JOIN taken ON true;

-- claim behind keys that wait
WITH RECURSIVE walked AS (
    SELECT :from_topic::text AS topic, :from_key::text AS "key", 0 AS step, 0 AS lap
    UNION ALL
    SELECT next.topic, next."key", walked.step + 1, walked.lap + next.lap
    FROM walked CROSS JOIN LATERAL (
        (SELECT topic, "key", 0 AS lap FROM "postroom_outbox"
            WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace::text
            AND (topic, "key") > (walked.topic, walked."key")
            ORDER BY topic, "key" LIMIT 1)
        UNION ALL -- after the last key comes the first
        (SELECT topic, "key", 1 FROM "postroom_outbox"
            WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace
            ORDER BY topic, "key" LIMIT 1)
        LIMIT 1) AS next
    WHERE walked.step < :window::bigint
    -- Once around is enough, also from the last key, after which every key comes before it.
    AND (walked.lap + next.lap = 0
        OR (walked.lap + next.lap = 1 AND (next.topic, next."key") <= (:from_topic, :from_key)))
), mark AS (
    SELECT topic, "key" FROM walked ORDER BY step DESC LIMIT 1
), keys AS MATERIALIZED (
    -- A key that came twice would be planned twice, and then a gap in it would not be seen.
    SELECT topic, "key", min(step) AS turn FROM walked WHERE step > 0 GROUP BY topic, "key"
),
heads AS MATERIALIZED (
    SELECT keys.topic, keys."key"
    FROM (SELECT * FROM keys ORDER BY turn) AS keys CROSS JOIN LATERAL (
        SELECT ((status = 'pending' AND next_attempt_at <= now() AND attempts < :max_attempts AND (:tenant_id::uuid IS NULL
          OR tenant_id = :tenant_id)) OR (status = 'processing' AND locked_until < now() AND attempts < :suspect_after
          AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id))) AND
        (:skip_dead::boolean OR NOT EXISTS (
                SELECT 1 FROM "postroom_outbox" AS dead
                WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
                AND dead."key" = head."key" AND dead.seq < head.seq))
        AS eligible
        FROM "postroom_outbox" AS head
        WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace
        AND topic = keys.topic AND "key" = keys."key"
        ORDER BY seq LIMIT 1) AS head
    WHERE head.eligible
    LIMIT :limit::bigint
), planned AS MATERIALIZED (
    SELECT run.id, heads.topic, heads."key", run.place, row_number() OVER () AS turn
    FROM heads CROSS JOIN LATERAL (
        SELECT id, row_number() OVER (ORDER BY seq) AS place, bool_and(eligible) OVER (ORDER BY seq) AS unbroken
        FROM (
            SELECT id, seq, ((status = 'pending' AND next_attempt_at <= now() AND attempts < :max_attempts
              AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)) OR (status = 'processing' AND locked_until < now()
              AND attempts < :suspect_after AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id))) AND
            (:skip_dead::boolean OR NOT EXISTS (
                    SELECT 1 FROM "postroom_outbox" AS dead
                    WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
                    AND dead."key" = head."key" AND dead.seq < head.seq))
            AS eligible
            FROM "postroom_outbox" AS head
            WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace
            AND topic = heads.topic AND "key" = heads."key"
            ORDER BY seq
            LIMIT GREATEST(:limit / GREATEST((SELECT count(*) FROM heads), 1), :run::bigint)) AS next
    ) AS run
    WHERE run.unbroken
    LIMIT :limit
), locked AS MATERIALIZED (
    SELECT id, octet_length(payload) + pg_column_size(headers) AS size FROM "postroom_outbox"
    WHERE id = ANY (ARRAY(SELECT id FROM planned)) AND ((status = 'pending' AND next_attempt_at <= now()
      AND attempts < :max_attempts AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)) OR (status = 'processing'
      AND locked_until < now() AND attempts < :suspect_after AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)))
    FOR UPDATE SKIP LOCKED
), chosen AS (
    SELECT id
    FROM (
        -- What was taken meanwhile leaves a gap; nothing behind a gap may go.
        SELECT id, size, sum(size) OVER (ORDER BY turn) AS total
        FROM (
            SELECT id, size, turn, place, row_number() OVER (PARTITION BY topic, "key" ORDER BY place) AS nth
            FROM planned JOIN locked USING (id)) AS numbered
        WHERE nth = place) AS summed
    WHERE total <= :max_bytes::bigint OR total = size
), taken AS (
    UPDATE "postroom_outbox"
    SET status = 'processing', attempts = attempts + 1, token = token + 1,
    locked_by = :worker::uuid, locked_until = (SELECT clock_timestamp()) + :duration::interval, updated_at = clock_timestamp()
    WHERE id = ANY (ARRAY(SELECT id FROM chosen))
    RETURNING id, topic, type, "key", payload, content_type, headers::text, tenant_id, dedupe_key, created_at,
    attempts, token, seq
)
-- One row at least, for what is told of the claim itself.
SELECT taken.*, mark.* FROM mark LEFT JOIN taken ON true;

-- claim a suspect
WITH chosen AS MATERIALIZED (SELECT id FROM "postroom_outbox" AS head
    WHERE namespace = :namespace AND status = 'processing' AND locked_until < now()
    AND attempts >= :suspect_after AND attempts < :max_attempts AND (:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)
    AND
    (:skip_dead::boolean OR NOT EXISTS (
            SELECT 1 FROM "postroom_outbox" AS dead
            WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
            AND dead."key" = head."key" AND dead.seq < head.seq))
    AND NOT EXISTS (
        SELECT 1 FROM "postroom_outbox" AS earlier
        WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND earlier.namespace = head.namespace
        AND earlier.topic = head.topic AND earlier."key" = head."key" AND earlier.seq < head.seq)
    ORDER BY locked_until, seq LIMIT 1 FOR UPDATE SKIP LOCKED
)
UPDATE "postroom_outbox"
SET status = 'processing', attempts = attempts + 1, token = token + 1,
locked_by = :worker::uuid, locked_until = (SELECT clock_timestamp()) + :duration::interval, updated_at = clock_timestamp()
WHERE id = ANY (ARRAY(SELECT id FROM chosen))
RETURNING id, topic, type, "key", payload, content_type, headers::text, tenant_id, dedupe_key, created_at,
attempts, token, seq;

-- peek
SELECT id, topic, "key", seq, turn, since, extract(epoch FROM now() - next_attempt_at)
FROM (
    SELECT * FROM (
        SELECT id, namespace, topic, "key", seq, next_attempt_at, 0 AS turn, locked_until AS since FROM "postroom_outbox"
        WHERE namespace = :namespace AND status = 'processing' AND locked_until < now()
        ORDER BY locked_until, seq LIMIT 1000) AS expired
    UNION ALL
    SELECT * FROM (
        SELECT id, namespace, topic, "key", seq, next_attempt_at, 1 AS turn, next_attempt_at AS since FROM "postroom_outbox"
        WHERE namespace = :namespace AND "key" IS NULL AND status = 'pending' AND next_attempt_at <= now()
        ORDER BY next_attempt_at, seq LIMIT 1000) AS without_key
    UNION ALL
    SELECT * FROM (
        SELECT id, namespace, topic, "key", seq, next_attempt_at, 1 AS turn, next_attempt_at AS since FROM "postroom_outbox"
        WHERE namespace = :namespace AND "key" IS NOT NULL AND status = 'pending' AND next_attempt_at <= now()
        ORDER BY next_attempt_at, seq LIMIT 1000) AS with_key) AS head;

-- peek
SELECT line.topic, line."key", (
    SELECT earlier.seq FROM "postroom_outbox" AS earlier
    WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND earlier.namespace = :namespace
    AND earlier.topic = line.topic AND earlier."key" = line."key" AND earlier.seq < line.last
    AND NOT (earlier.status = 'pending' AND earlier.next_attempt_at <= now())
    AND NOT (earlier.status = 'processing' AND earlier.locked_until < now())
    ORDER BY earlier.seq LIMIT 1), (
    SELECT dead.seq FROM "postroom_outbox" AS dead
    WHERE dead.status = 'dead' AND dead.namespace = :namespace
    AND dead.topic = line.topic AND dead."key" = line."key"
    ORDER BY dead.seq LIMIT 1)
FROM (
    SELECT topic, "key", max(seq) AS last FROM (
        SELECT * FROM (
            SELECT id, namespace, topic, "key", seq, next_attempt_at, 0 AS turn, locked_until AS since FROM "postroom_outbox"
            WHERE namespace = :namespace AND status = 'processing' AND locked_until < now()
            ORDER BY locked_until, seq LIMIT 1000) AS expired
        UNION ALL
        SELECT * FROM (
            SELECT id, namespace, topic, "key", seq, next_attempt_at, 1 AS turn, next_attempt_at AS since FROM "postroom_outbox"
            WHERE namespace = :namespace AND "key" IS NULL AND status = 'pending' AND next_attempt_at <= now()
            ORDER BY next_attempt_at, seq LIMIT 1000) AS without_key
        UNION ALL
        SELECT * FROM (
            SELECT id, namespace, topic, "key", seq, next_attempt_at, 1 AS turn, next_attempt_at AS since FROM "postroom_outbox"
            WHERE namespace = :namespace AND "key" IS NOT NULL AND status = 'pending' AND next_attempt_at <= now()
            ORDER BY next_attempt_at, seq LIMIT 1000) AS with_key) AS head
    WHERE "key" IS NOT NULL GROUP BY topic, "key") AS line;

-- peek
SELECT id, topic, type, "key", payload, content_type, headers::text, tenant_id, dedupe_key, created_at,
attempts, token, seq
FROM "postroom_outbox"
WHERE id = ANY (:rows::uuid[]);

-- settle, keeping what was delivered
UPDATE "postroom_outbox"
SET status = 'delivered', delivered_at = clock_timestamp(), updated_at = clock_timestamp(),
locked_by = NULL, locked_until = NULL, last_error = NULL
WHERE id = ANY (:ids::uuid[]) AND token = :token::bigint AND status NOT IN ('pending', 'delivered');

-- settle, keeping what was delivered
SELECT id, token, status FROM "postroom_outbox" WHERE id = ANY (:ids::uuid[]);

-- settle, keeping what was delivered
UPDATE "postroom_outbox"
SET status = 'pending', next_attempt_at = clock_timestamp() + held.delay, last_error = held.error,
locked_by = NULL, locked_until = NULL, updated_at = clock_timestamp()
FROM unnest(:ids::uuid[], :tokens::bigint[], :delays::interval[], :errors::text[])
AS held(id, token, delay, error)
WHERE "postroom_outbox".id = held.id AND "postroom_outbox".token = held.token AND status NOT IN ('pending', 'delivered', 'dead');

-- settle, keeping what was delivered
UPDATE "postroom_outbox"
SET status = 'dead', last_error = held.error,
locked_by = NULL, locked_until = NULL, updated_at = clock_timestamp()
FROM unnest(:ids::uuid[], :tokens::bigint[], :delays::interval[], :errors::text[])
AS held(id, token, delay, error)
WHERE "postroom_outbox".id = held.id AND "postroom_outbox".token = held.token AND status NOT IN ('pending', 'delivered', 'dead');

-- settle, keeping what was delivered
UPDATE "postroom_outbox"
SET status = 'pending', attempts = attempts - 1,
next_attempt_at = CASE WHEN held.delay > interval '0' THEN clock_timestamp() + held.delay
ELSE next_attempt_at END,
locked_by = NULL, locked_until = NULL, updated_at = clock_timestamp()
FROM unnest(:ids::uuid[], :tokens::bigint[], :delays::interval[], :errors::text[])
AS held(id, token, delay, error)
WHERE "postroom_outbox".id = held.id AND "postroom_outbox".token = held.token AND status NOT IN ('pending', 'delivered', 'dead');

-- settle, keeping what was delivered
UPDATE "postroom_outbox"
SET status = 'pending', attempts = attempts - 1, next_attempt_at = (SELECT clock_timestamp()) + :duration::interval,
destination = held.error, parked = "postroom_outbox".token,
locked_by = NULL, locked_until = NULL, updated_at = clock_timestamp()
FROM unnest(:ids::uuid[], :tokens::bigint[], :delays::interval[], :errors::text[])
AS held(id, token, delay, error)
WHERE "postroom_outbox".id = held.id AND "postroom_outbox".token = held.token AND status NOT IN ('pending', 'delivered', 'dead');

-- settle, deleting what was delivered
DELETE FROM "postroom_outbox" WHERE id = ANY (:ids::uuid[]) AND token = :token::bigint AND status NOT IN ('pending', 'delivered');

-- extend leases
UPDATE "postroom_outbox" SET locked_until = (SELECT clock_timestamp()) + :duration::interval, updated_at = clock_timestamp()
WHERE id = ANY (:ids::uuid[])
AND NOT ((id, token) NOT IN (SELECT * FROM unnest(:ids::uuid[], :tokens::bigint[])))
AND status NOT IN ('pending', 'delivered', 'dead');

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
WITH chosen AS MATERIALIZED (
    SELECT id, topic, "key" FROM "postroom_outbox"
    WHERE status = 'pending' AND parked = token AND namespace = :namespace::text AND destination = :destination::text
    ORDER BY next_attempt_at, seq LIMIT :limit::bigint FOR UPDATE SKIP LOCKED
), heads AS MATERIALIZED (
    SELECT id FROM "postroom_outbox"
    WHERE id = ANY (ARRAY(
            SELECT (
                SELECT id FROM "postroom_outbox"
                WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace
                AND topic = keys.topic AND "key" = keys."key"
                ORDER BY seq LIMIT 1)
            FROM (SELECT DISTINCT topic, "key" FROM chosen WHERE "key" IS NOT NULL) AS keys))
    AND parked = token AND destination = :destination AND status NOT IN ('processing', 'delivered', 'dead')
    FOR UPDATE SKIP LOCKED
)
UPDATE "postroom_outbox"
SET next_attempt_at = created_at, parked = NULL, updated_at = clock_timestamp()
WHERE id = ANY (ARRAY(SELECT id FROM chosen UNION SELECT id FROM heads));

-- sweep
UPDATE "postroom_outbox"
SET status = 'dead', locked_by = NULL, locked_until = NULL, updated_at = clock_timestamp(),
last_error = COALESCE(:reason::text, last_error, 'no attempts left')
WHERE id = ANY (ARRAY(
        SELECT id FROM "postroom_outbox"
        WHERE namespace = :namespace AND status = 'processing' AND locked_until < now() AND attempts >= :max_attempts
        ORDER BY locked_until LIMIT 1000 FOR UPDATE SKIP LOCKED
)) AND attempts >= :max_attempts AND status NOT IN ('pending', 'delivered', 'dead') AND locked_until < now();

-- sweep
UPDATE "postroom_outbox"
SET status = 'dead', locked_by = NULL, locked_until = NULL, updated_at = clock_timestamp(),
last_error = COALESCE(:reason::text, last_error, 'no attempts left')
WHERE id = ANY (ARRAY(
        SELECT id FROM (
            SELECT id, attempts FROM "postroom_outbox"
            WHERE namespace = :namespace AND "key" IS NULL AND status = 'pending' AND next_attempt_at <= now()
            ORDER BY next_attempt_at, seq LIMIT 1000) AS front
        WHERE attempts >= :max_attempts
)) AND attempts >= :max_attempts AND status NOT IN ('processing', 'delivered', 'dead') AND next_attempt_at <= now();

-- sweep
UPDATE "postroom_outbox"
SET status = 'dead', locked_by = NULL, locked_until = NULL, updated_at = clock_timestamp(),
last_error = COALESCE(:reason::text, last_error, 'no attempts left')
WHERE id = ANY (ARRAY(
        SELECT id FROM (
            SELECT id, attempts FROM "postroom_outbox"
            WHERE namespace = :namespace AND "key" IS NOT NULL AND status = 'pending' AND next_attempt_at <= now()
            ORDER BY next_attempt_at, seq LIMIT 1000) AS front
        WHERE attempts >= :max_attempts
)) AND attempts >= :max_attempts AND status NOT IN ('processing', 'delivered', 'dead') AND next_attempt_at <= now();

-- purge
DELETE FROM "postroom_outbox"
WHERE id = ANY (ARRAY(
        SELECT id FROM "postroom_outbox"
        WHERE namespace = :namespace AND status = 'delivered' AND delivered_at <= now() - :duration::interval
        ORDER BY delivered_at LIMIT :limit FOR UPDATE SKIP LOCKED));

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
SELECT extract(epoch FROM now() - next_attempt_at) FROM (
    SELECT min(next_attempt_at) AS next_attempt_at FROM "postroom_outbox"
    WHERE namespace = :namespace AND status = 'pending' AND "key" IS NULL AND next_attempt_at <= now()) AS due
UNION ALL
SELECT extract(epoch FROM now() - created_at) FROM (
    SELECT min(created_at) AS created_at FROM (
        SELECT created_at FROM "postroom_outbox"
        WHERE status = 'pending' AND parked = token AND namespace = :namespace AND destination IS NOT NULL
        ORDER BY destination, next_attempt_at, seq LIMIT 1000) AS first) AS parked;

-- stats
WITH head AS (
    SELECT namespace, topic, "key", seq, next_attempt_at FROM "postroom_outbox"
    WHERE namespace = :namespace AND status = 'pending' AND "key" IS NOT NULL AND next_attempt_at <= now()
    ORDER BY next_attempt_at, seq LIMIT 1000)
SELECT (SELECT count(*) FROM head),
(SELECT extract(epoch FROM now() - next_attempt_at) FROM head WHERE
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
CASE WHEN status = 'pending' AND next_attempt_at <= now() AND
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
THEN extract(epoch FROM now() - next_attempt_at) END
FROM (
    SELECT namespace, topic, "key", seq, status, next_attempt_at FROM "postroom_outbox"
    WHERE "key" IS NOT NULL AND status IN ('pending', 'processing') AND namespace = :namespace AND (topic, "key") > (:topic::text,
      :key::text)
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
        WHERE status = 'processing' AND namespace = :namespace AND locked_until > now()
        ORDER BY locked_until, seq LIMIT 1) AS held),
(
    SELECT count(*) FROM (
        SELECT 1 AS one FROM "postroom_outbox"
        WHERE status = 'pending' AND "key" IS NULL AND namespace = :namespace AND next_attempt_at <= now()
        ORDER BY next_attempt_at, seq LIMIT 1000) AS due_loose),
(
    SELECT count(*) FROM (
        SELECT 1 AS one FROM "postroom_outbox"
        WHERE status = 'pending' AND "key" IS NOT NULL AND namespace = :namespace AND next_attempt_at <= now()
        ORDER BY next_attempt_at, seq LIMIT 1000) AS due_ordered);

-- mark a message as handled
INSERT INTO "postroom_inbox" (consumer, tenant_id, message_id, created_at)
VALUES (:consumer, :tenant_id, :message_id, now())
ON CONFLICT DO NOTHING;

-- look for the mark of a message
SELECT 1 FROM "postroom_inbox"
WHERE consumer = :consumer AND tenant_id = :tenant_id AND message_id = :message_id;

-- purge the inbox
DELETE FROM "postroom_inbox"
WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM "postroom_inbox"
        WHERE consumer = :consumer AND created_at <= now() - :duration::interval
        ORDER BY created_at LIMIT :limit FOR UPDATE SKIP LOCKED));

-- keep a dead letter
INSERT INTO "postroom_inbox_dead" (consumer, tenant_id, message_id, topic, type, "key", namespace, payload,
    content_type, headers, attempts, error, died_at)
VALUES (:consumer, :tenant_id, :message_id, :topic, :type, :key, :namespace, :payload,
    :content_type, (:headers::text)::jsonb, :attempts, :error, now())
ON CONFLICT DO NOTHING;

-- schedule a ticket
INSERT INTO "postroom_outbox_tickets" (namespace, ticket, expires_at, status)
VALUES (:namespace, :ticket, :expires_at, 'scheduled')
ON CONFLICT DO NOTHING;

-- schedule a ticket
SELECT status, (extract(epoch FROM expires_at) * 1000)::bigint, expires_at <= now() FROM "postroom_outbox_tickets"
WHERE namespace = :namespace AND ticket = :ticket FOR UPDATE;

-- renew a ticket
UPDATE "postroom_outbox_tickets" SET expires_at = :expires_at
WHERE namespace = :namespace AND ticket = :ticket;

-- find tickets that are due
SELECT ticket, (extract(epoch FROM expires_at) * 1000)::bigint FROM "postroom_outbox_tickets"
WHERE namespace = :namespace AND status = 'scheduled' AND expires_at <= now()
ORDER BY expires_at, ticket LIMIT :limit;

-- find tickets that are due at a moment
SELECT ticket, (extract(epoch FROM expires_at) * 1000)::bigint FROM "postroom_outbox_tickets"
WHERE namespace = :namespace AND status = 'scheduled' AND expires_at <= now() AND expires_at <= :due_cutoff
ORDER BY expires_at, ticket LIMIT :limit;

-- decide
UPDATE "postroom_outbox_tickets" SET status = :status, ended_at = now()
WHERE namespace = :namespace AND ticket = :ticket;

-- forget tickets
DELETE FROM "postroom_outbox_tickets"
WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM "postroom_outbox_tickets"
        WHERE namespace = :namespace AND ended_at <= now() - :duration::interval
        ORDER BY ended_at LIMIT :limit FOR UPDATE SKIP LOCKED));

-- look at the server
SELECT current_setting('server_version_num')::int, current_setting('transaction_read_only')::boolean;
