-- Made by `make sql`; the schema comes first, then what is asked of it.

CREATE TABLE IF NOT EXISTS `postroom_outbox` (
    id BINARY(16) NOT NULL,
    seq BIGINT NOT NULL AUTO_INCREMENT,
    namespace VARCHAR(100) NOT NULL,
    topic VARCHAR(249) NOT NULL,
    type VARCHAR(255) NOT NULL,
    `key` VARCHAR(255),
    tenant_id BINARY(16),
    dedupe_key VARCHAR(255),
    payload LONGBLOB NOT NULL,
    content_type VARCHAR(255) NOT NULL,
    headers LONGTEXT NOT NULL,
    status VARCHAR(10) NOT NULL DEFAULT 'pending',
    attempts INT NOT NULL DEFAULT 0,
    token BIGINT NOT NULL DEFAULT 0,
    next_attempt_at DATETIME(6) NOT NULL,
    locked_by BINARY(16),
    locked_until DATETIME(6),
    last_error TEXT,
    created_at DATETIME(6) NOT NULL,
    updated_at DATETIME(6) NOT NULL,
    delivered_at DATETIME(6),
    destination VARCHAR(200),
    parked BIGINT,
    ordered TINYINT GENERATED ALWAYS AS (`key` IS NOT NULL) VIRTUAL,
    unsettled TINYINT GENERATED ALWAYS AS
    (CASE WHEN `key` IS NOT NULL AND status IN ('pending', 'processing') THEN 1 END) VIRTUAL,
    is_parked TINYINT GENERATED ALWAYS AS
    (CASE WHEN status = 'pending' AND parked = token THEN 1 END) VIRTUAL,
    PRIMARY KEY (id),
    UNIQUE KEY `postroom_outbox_seq` (seq),
    UNIQUE KEY `postroom_outbox_dedupe` (namespace, topic, dedupe_key),
    KEY `postroom_outbox_ready` (namespace, status, ordered, next_attempt_at, seq),
    KEY `postroom_outbox_leased` (namespace, status, locked_until, seq),
    KEY `postroom_outbox_keyed` (namespace, unsettled, topic, `key`, seq),
    KEY `postroom_outbox_dead` (namespace, status, topic, `key`, seq),
    KEY `postroom_outbox_delivered` (namespace, status, delivered_at),
    KEY `postroom_outbox_parked` (namespace, is_parked, destination, next_attempt_at, seq),
    CONSTRAINT `postroom_outbox_status_check` CHECK (status IN ('pending', 'processing', 'delivered', 'dead')),
    CONSTRAINT `postroom_outbox_worker_check` CHECK ((status = 'processing') = (locked_by IS NOT NULL)),
    CONSTRAINT `postroom_outbox_lease_check` CHECK ((locked_by IS NULL) = (locked_until IS NULL))
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `postroom_outbox_lock` (number SMALLINT NOT NULL PRIMARY KEY) ENGINE=InnoDB;

CREATE OR REPLACE VIEW `postroom_outbox_published` AS
SELECT seq AS id, created_at, topic, type AS event_type,
CASE WHEN content_type = 'application/json' THEN CONVERT(payload USING utf8mb4) END AS data,
headers AS attributes, status = 'delivered' AS published
FROM `postroom_outbox`;

CREATE OR REPLACE VIEW `postroom_outbox_messages` AS
SELECT id, payload, headers AS properties, created_at, delivered_at AS published_at, attempts, last_error,
updated_at
FROM `postroom_outbox`;

CREATE TABLE IF NOT EXISTS `postroom_inbox` (
    consumer VARCHAR(100) NOT NULL,
    tenant_id BINARY(16) NOT NULL,
    message_id BINARY(16) NOT NULL,
    deliveries INT NOT NULL DEFAULT 1,
    created_at DATETIME(6) NOT NULL,
    PRIMARY KEY (consumer, tenant_id, message_id),
    KEY `postroom_inbox_old` (consumer, created_at)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `postroom_inbox_dead` (
    consumer VARCHAR(100) NOT NULL,
    tenant_id BINARY(16) NOT NULL,
    message_id BINARY(16) NOT NULL,
    topic LONGTEXT NOT NULL,
    type LONGTEXT NOT NULL,
    `key` LONGTEXT,
    namespace LONGTEXT NOT NULL,
    payload LONGBLOB NOT NULL,
    content_type LONGTEXT NOT NULL,
    headers LONGTEXT NOT NULL,
    attempts INT NOT NULL,
    error TEXT NOT NULL,
    died_at DATETIME(6) NOT NULL,
    PRIMARY KEY (consumer, tenant_id, message_id)
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE OR REPLACE VIEW `postroom_inbox_processed` AS
SELECT consumer AS subscriber, message_id, created_at
FROM `postroom_inbox`;

CREATE TABLE IF NOT EXISTS `postroom_outbox_tickets` (
    namespace VARCHAR(100) NOT NULL,
    ticket VARCHAR(255) NOT NULL,
    expires_at DATETIME(6) NOT NULL,
    status VARCHAR(10) NOT NULL,
    ended_at DATETIME(6),
    PRIMARY KEY (namespace, ticket),
    KEY `postroom_outbox_tickets_due` (namespace, status, expires_at, ticket),
    KEY `postroom_outbox_tickets_ended` (namespace, ended_at),
    CONSTRAINT `postroom_outbox_tickets_check` CHECK
    (status IN ('scheduled', 'expired', 'revoked') AND (status = 'scheduled') = (ended_at IS NULL))
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS `postroom_outbox_version` (
    version INT NOT NULL PRIMARY KEY,
    applied_at DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    step INT
) ENGINE=InnoDB;

INSERT IGNORE INTO `postroom_outbox_version` (version, step) VALUES (3, 1);

-- add one message
INSERT INTO `postroom_outbox_lock` (number) VALUES (:number) ON DUPLICATE KEY UPDATE number = number;

-- add one message
INSERT INTO `postroom_outbox` (id, namespace, topic, type, `key`, tenant_id, dedupe_key, payload, content_type, headers,
  next_attempt_at, created_at, updated_at) VALUES
(:id_a, :namespace_a, :topic_a, :type_a, :key_a, :tenant_id_a, :dedupe_key_a, :payload_a, :content_type_a, :headers_a,
  COALESCE(:due_at_a, UTC_TIMESTAMP(6) + INTERVAL :delay_a MICROSECOND), UTC_TIMESTAMP(6), UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE id = id;

-- add one message
SELECT id, topic, dedupe_key FROM `postroom_outbox` WHERE namespace = :namespace AND topic IN :topics
  AND dedupe_key IN :keys LOCK IN SHARE MODE;

-- add several messages
INSERT INTO `postroom_outbox` (id, namespace, topic, type, `key`, tenant_id, dedupe_key, payload, content_type, headers,
  next_attempt_at, created_at, updated_at) VALUES
(:id_a, :namespace_a, :topic_a, :type_a, :key_a, :tenant_id_a, :dedupe_key_a, :payload_a, :content_type_a, :headers_a,
  COALESCE(:due_at_a, UTC_TIMESTAMP(6) + INTERVAL :delay_a MICROSECOND), UTC_TIMESTAMP(6), UTC_TIMESTAMP(6)),
(:id_b, :namespace_b, :topic_b, :type_b, :key_b, :tenant_id_b, :dedupe_key_b, :payload_b, :content_type_b, :headers_b,
  COALESCE(:due_at_b, UTC_TIMESTAMP(6) + INTERVAL :delay_b MICROSECOND), UTC_TIMESTAMP(6), UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE id = id;

-- claim messages without a key
SELECT
id, LENGTH(payload) + LENGTH(headers), topic, type, `key`, CASE WHEN LENGTH(payload) + LENGTH(headers) <= :small THEN payload END,
  content_type,
CASE WHEN LENGTH(payload) + LENGTH(headers) <= :small THEN headers END, tenant_id, dedupe_key, created_at, attempts + 1,
  token + 1, seq
FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_leased`)
WHERE namespace = :namespace AND ordered = 0 AND status = 'processing' AND locked_until < UTC_TIMESTAMP(6)
  AND attempts < :suspect_after AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
ORDER BY locked_until, seq LIMIT :limit FOR UPDATE SKIP LOCKED;

-- claim messages without a key
SELECT
id, LENGTH(payload) + LENGTH(headers), topic, type, `key`, CASE WHEN LENGTH(payload) + LENGTH(headers) <= :small THEN payload END,
  content_type,
CASE WHEN LENGTH(payload) + LENGTH(headers) <= :small THEN headers END, tenant_id, dedupe_key, created_at, attempts + 1,
  token + 1, seq
FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
WHERE namespace = :namespace AND ordered = 0 AND status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6)
  AND attempts < :max_attempts AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
ORDER BY next_attempt_at, seq LIMIT :limit FOR UPDATE SKIP LOCKED;

-- claim messages without a key
UPDATE `postroom_outbox`
SET status = 'processing', attempts = attempts + 1, token = token + 1,
locked_by = :worker, locked_until = UTC_TIMESTAMP(6) + INTERVAL :duration MICROSECOND, updated_at = UTC_TIMESTAMP(6)
WHERE id IN :rows;

-- claim messages without a key
SELECT id, topic, type, `key`, payload, content_type, headers, tenant_id, dedupe_key, created_at, attempts, token, seq
  FROM `postroom_outbox` WHERE id IN :rows;

-- claim messages without a key, the newest first
SELECT
id, LENGTH(payload) + LENGTH(headers), topic, type, `key`, CASE WHEN LENGTH(payload) + LENGTH(headers) <= :small THEN payload END,
  content_type,
CASE WHEN LENGTH(payload) + LENGTH(headers) <= :small THEN headers END, tenant_id, dedupe_key, created_at, attempts + 1,
  token + 1, seq
FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
WHERE namespace = :namespace AND ordered = 0 AND status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6)
  AND attempts < :max_attempts AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
ORDER BY next_attempt_at DESC, seq DESC LIMIT :limit FOR UPDATE SKIP LOCKED;

-- claim messages with a key
SELECT topic, `key` FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_leased`)
WHERE namespace = :namespace AND ordered = 1 AND status = 'processing' AND locked_until < UTC_TIMESTAMP(6)
  AND attempts < :suspect_after AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
ORDER BY locked_until, seq LIMIT :limit;

-- claim messages with a key
SELECT topic, `key` FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
WHERE namespace = :namespace AND ordered = 1 AND status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6)
  AND attempts < :max_attempts AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
ORDER BY next_attempt_at, seq LIMIT :limit;

-- claim messages with a key
SELECT id, ((status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6) AND attempts < :max_attempts AND (:tenant_id IS NULL
  OR tenant_id = :tenant_id)) OR (status = 'processing' AND locked_until < UTC_TIMESTAMP(6) AND attempts < :suspect_after
  AND (:tenant_id IS NULL OR tenant_id = :tenant_id))) AND
(:skip_dead OR NOT EXISTS (
        SELECT 1 FROM `postroom_outbox` AS dead FORCE INDEX (`postroom_outbox_dead`)
        WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
        AND dead.`key` = head.`key` AND dead.seq < head.seq))
AS eligible
FROM `postroom_outbox` AS head FORCE INDEX (`postroom_outbox_keyed`)
WHERE unsettled = 1 AND namespace = :namespace AND topic = :topic AND `key` = :key
ORDER BY seq LIMIT :length;

-- claim messages with a key
SELECT
id, LENGTH(payload) + LENGTH(headers), topic, type, `key`, CASE WHEN LENGTH(payload) + LENGTH(headers) <= :small THEN payload END,
  content_type,
CASE WHEN LENGTH(payload) + LENGTH(headers) <= :small THEN headers END, tenant_id, dedupe_key, created_at, attempts + 1,
  token + 1, seq
FROM `postroom_outbox`
WHERE id IN :rows AND namespace = :namespace AND ((status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6)
  AND attempts < :max_attempts AND (:tenant_id IS NULL OR tenant_id = :tenant_id)) OR (status = 'processing'
  AND locked_until < UTC_TIMESTAMP(6) AND attempts < :suspect_after AND (:tenant_id IS NULL
  OR tenant_id = :tenant_id))) FOR UPDATE SKIP LOCKED;

-- claim messages with a key, the newest first
SELECT topic, `key` FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
WHERE namespace = :namespace AND ordered = 1 AND status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6)
  AND attempts < :max_attempts AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
ORDER BY next_attempt_at DESC, seq DESC LIMIT :limit;

-- claim behind keys that wait
SELECT topic, `key` FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_keyed`)
WHERE unsettled = 1 AND namespace = :namespace AND (topic > :topic OR (topic = :topic AND `key` > :key))
ORDER BY topic, `key` LIMIT 1;

-- claim a suspect
SELECT
id, LENGTH(payload) + LENGTH(headers), topic, type, `key`, CASE WHEN LENGTH(payload) + LENGTH(headers) <= :small THEN payload END,
  content_type,
CASE WHEN LENGTH(payload) + LENGTH(headers) <= :small THEN headers END, tenant_id, dedupe_key, created_at, attempts + 1,
  token + 1, seq
FROM `postroom_outbox` AS head FORCE INDEX (`postroom_outbox_leased`)
WHERE namespace = :namespace AND status = 'processing' AND locked_until < UTC_TIMESTAMP(6)
AND attempts >= :suspect_after AND attempts < :max_attempts AND (:tenant_id IS NULL OR tenant_id = :tenant_id)
AND
(:skip_dead OR NOT EXISTS (
        SELECT 1 FROM `postroom_outbox` AS dead FORCE INDEX (`postroom_outbox_dead`)
        WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
        AND dead.`key` = head.`key` AND dead.seq < head.seq))
AND NOT EXISTS (
    SELECT 1 FROM `postroom_outbox` AS earlier FORCE INDEX (`postroom_outbox_keyed`)
    WHERE unsettled = 1 AND earlier.namespace = head.namespace
    AND earlier.topic = head.topic AND earlier.`key` = head.`key` AND earlier.seq < head.seq)
ORDER BY locked_until, seq LIMIT 1 FOR UPDATE SKIP LOCKED;

-- peek
SELECT id, topic, `key`, seq, turn, since, TIMESTAMPDIFF(MICROSECOND, next_attempt_at, UTC_TIMESTAMP(6)) / 1000000
FROM (
    SELECT * FROM (
        SELECT id, namespace, topic, `key`, seq, next_attempt_at, 0 AS turn, locked_until AS since
          FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_leased`)
        WHERE namespace = :namespace AND status = 'processing' AND locked_until < UTC_TIMESTAMP(6)
        ORDER BY locked_until, seq LIMIT 1000) AS expired
    UNION ALL
    SELECT * FROM (
        SELECT id, namespace, topic, `key`, seq, next_attempt_at, 1 AS turn, next_attempt_at AS since
          FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
        WHERE namespace = :namespace AND ordered = 0 AND status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6)
        ORDER BY next_attempt_at, seq LIMIT 1000) AS without_key
    UNION ALL
    SELECT * FROM (
        SELECT id, namespace, topic, `key`, seq, next_attempt_at, 1 AS turn, next_attempt_at AS since
          FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
        WHERE namespace = :namespace AND ordered = 1 AND status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6)
        ORDER BY next_attempt_at, seq LIMIT 1000) AS with_key) AS head;

-- peek
SELECT line.topic, line.`key`, (
    SELECT earlier.seq FROM `postroom_outbox` AS earlier FORCE INDEX (`postroom_outbox_keyed`)
    WHERE unsettled = 1 AND earlier.namespace = :namespace
    AND earlier.topic = line.topic AND earlier.`key` = line.`key` AND earlier.seq < line.last
    AND NOT (earlier.status = 'pending' AND earlier.next_attempt_at <= UTC_TIMESTAMP(6))
    AND NOT (earlier.status = 'processing' AND earlier.locked_until < UTC_TIMESTAMP(6))
    ORDER BY earlier.seq LIMIT 1), (
    SELECT dead.seq FROM `postroom_outbox` AS dead FORCE INDEX (`postroom_outbox_dead`)
    WHERE dead.status = 'dead' AND dead.namespace = :namespace
    AND dead.topic = line.topic AND dead.`key` = line.`key`
    ORDER BY dead.seq LIMIT 1)
FROM (
    SELECT topic, `key`, max(seq) AS last FROM (
        SELECT * FROM (
            SELECT id, namespace, topic, `key`, seq, next_attempt_at, 0 AS turn, locked_until AS since
              FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_leased`)
            WHERE namespace = :namespace AND status = 'processing' AND locked_until < UTC_TIMESTAMP(6)
            ORDER BY locked_until, seq LIMIT 1000) AS expired
        UNION ALL
        SELECT * FROM (
            SELECT id, namespace, topic, `key`, seq, next_attempt_at, 1 AS turn, next_attempt_at AS since
              FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
            WHERE namespace = :namespace AND ordered = 0 AND status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6)
            ORDER BY next_attempt_at, seq LIMIT 1000) AS without_key
        UNION ALL
        SELECT * FROM (
            SELECT id, namespace, topic, `key`, seq, next_attempt_at, 1 AS turn, next_attempt_at AS since
              FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
            WHERE namespace = :namespace AND ordered = 1 AND status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6)
            ORDER BY next_attempt_at, seq LIMIT 1000) AS with_key) AS head
    WHERE `key` IS NOT NULL GROUP BY topic, `key`) AS line;

-- settle, keeping what was delivered
UPDATE `postroom_outbox`
SET status = 'delivered', delivered_at = UTC_TIMESTAMP(6), updated_at = UTC_TIMESTAMP(6),
locked_by = NULL, locked_until = NULL, last_error = NULL
WHERE id IN :ids AND token = :token AND status NOT IN ('pending', 'delivered');

-- settle, keeping what was delivered
SELECT id, token, status FROM `postroom_outbox` WHERE id IN :ids FOR UPDATE;

-- settle, keeping what was delivered
UPDATE `postroom_outbox` JOIN (SELECT :id_a AS id, :delay_a AS delay, :error_a AS error) AS changed
  ON `postroom_outbox`.id = changed.id
SET status = 'pending', next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL changed.delay MICROSECOND,
last_error = changed.error, locked_by = NULL, locked_until = NULL, updated_at = UTC_TIMESTAMP(6);

-- settle, keeping what was delivered
UPDATE `postroom_outbox` JOIN (SELECT :id_a AS id, :delay_a AS delay, :error_a AS error) AS changed
  ON `postroom_outbox`.id = changed.id
SET status = 'dead', last_error = changed.error,
locked_by = NULL, locked_until = NULL, updated_at = UTC_TIMESTAMP(6);

-- settle, keeping what was delivered
UPDATE `postroom_outbox` JOIN (SELECT :id_a AS id, :delay_a AS delay, :error_a AS error) AS changed
  ON `postroom_outbox`.id = changed.id
SET status = 'pending', attempts = attempts - 1, locked_by = NULL, locked_until = NULL,
next_attempt_at = CASE WHEN changed.delay > 0 THEN UTC_TIMESTAMP(6) + INTERVAL changed.delay MICROSECOND
ELSE next_attempt_at END,
updated_at = UTC_TIMESTAMP(6);

-- settle, keeping what was delivered
UPDATE `postroom_outbox` JOIN (SELECT :id_a AS id, :delay_a AS delay, :error_a AS error) AS changed
  ON `postroom_outbox`.id = changed.id
SET status = 'pending', attempts = attempts - 1, locked_by = NULL, locked_until = NULL,
next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL changed.delay MICROSECOND,
destination = changed.error, parked = token, updated_at = UTC_TIMESTAMP(6);

-- settle, deleting what was delivered
DELETE FROM `postroom_outbox` WHERE id IN :ids AND token = :token AND status NOT IN ('pending', 'delivered');

-- extend leases
UPDATE `postroom_outbox` SET locked_until = UTC_TIMESTAMP(6) + INTERVAL :duration MICROSECOND, updated_at = UTC_TIMESTAMP(6)
  WHERE id IN :ids;

-- list destinations with parked messages
SELECT destination FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_parked`)
WHERE is_parked = 1 AND namespace = :namespace AND destination > :after
ORDER BY destination LIMIT :limit;

-- unpark
SELECT id FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_parked`)
WHERE is_parked = 1 AND namespace = :namespace AND destination = :destination
ORDER BY next_attempt_at, seq LIMIT :limit FOR UPDATE SKIP LOCKED;

-- unpark
SELECT (
    SELECT id FROM `postroom_outbox` AS head FORCE INDEX (`postroom_outbox_keyed`)
    WHERE unsettled = 1 AND head.namespace = chosen.namespace
    AND head.topic = chosen.topic AND head.`key` = chosen.`key`
    ORDER BY head.seq LIMIT 1)
FROM `postroom_outbox` AS chosen
WHERE chosen.id IN :rows AND chosen.`key` IS NOT NULL;

-- unpark
UPDATE `postroom_outbox`
SET next_attempt_at = created_at, parked = NULL, updated_at = UTC_TIMESTAMP(6)
WHERE id IN :rows AND parked = token AND destination = :destination
AND status NOT IN ('processing', 'delivered', 'dead');

-- sweep
SELECT id FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_leased`)
WHERE namespace = :namespace AND status = 'processing' AND locked_until < UTC_TIMESTAMP(6) AND attempts >= :max_attempts
ORDER BY locked_until LIMIT 1000 FOR UPDATE SKIP LOCKED;

-- sweep
UPDATE `postroom_outbox`
SET status = 'dead', locked_by = NULL, locked_until = NULL, updated_at = UTC_TIMESTAMP(6),
last_error = COALESCE(:reason, last_error, 'no attempts left')
WHERE id IN :ids AND attempts >= :max_attempts AND status NOT IN ('pending', 'delivered', 'dead')
  AND locked_until < UTC_TIMESTAMP(6);

-- sweep
SELECT id FROM (
    SELECT id, attempts FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
    WHERE namespace = :namespace AND ordered = 0 AND status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6)
    ORDER BY next_attempt_at, seq LIMIT 1000) AS front
WHERE attempts >= :max_attempts;

-- sweep
SELECT id FROM (
    SELECT id, attempts FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
    WHERE namespace = :namespace AND ordered = 1 AND status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6)
    ORDER BY next_attempt_at, seq LIMIT 1000) AS front
WHERE attempts >= :max_attempts;

-- purge
DELETE FROM `postroom_outbox`
WHERE namespace = :namespace AND status = 'delivered' AND delivered_at <= UTC_TIMESTAMP(6) - INTERVAL :duration MICROSECOND
LIMIT :limit;

-- stats
SELECT (SELECT count(*) FROM (SELECT 1 AS one FROM `postroom_outbox` WHERE namespace = :namespace AND status = 'pending'
  AND ordered = 0 LIMIT 10000) AS counted_0),
(SELECT count(*) FROM (SELECT 1 AS one FROM `postroom_outbox` WHERE namespace = :namespace AND status = 'pending'
  AND ordered = 1 LIMIT 10000) AS counted_1),
(SELECT count(*) FROM (SELECT 1 AS one FROM `postroom_outbox` WHERE namespace = :namespace
  AND status = 'processing' LIMIT 10000) AS counted_2),
(SELECT count(*) FROM (SELECT 1 AS one FROM `postroom_outbox` WHERE namespace = :namespace
  AND status = 'delivered' LIMIT 10000) AS counted_3),
(SELECT count(*) FROM (SELECT 1 AS one FROM `postroom_outbox` WHERE namespace = :namespace
  AND status = 'dead' LIMIT 10000) AS counted_4);

-- stats
SELECT TIMESTAMPDIFF(MICROSECOND, next_attempt_at, UTC_TIMESTAMP(6)) / 1000000 FROM (
    SELECT min(next_attempt_at) AS next_attempt_at FROM `postroom_outbox`
    WHERE namespace = :namespace AND status = 'pending' AND ordered = 0 AND next_attempt_at <= UTC_TIMESTAMP(6)) AS due
UNION ALL
SELECT TIMESTAMPDIFF(MICROSECOND, created_at, UTC_TIMESTAMP(6)) / 1000000 FROM (
    SELECT min(created_at) AS created_at FROM (
        SELECT created_at FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_parked`)
        WHERE is_parked = 1 AND namespace = :namespace AND destination IS NOT NULL
        ORDER BY destination, next_attempt_at, seq LIMIT 1000) AS first) AS parked;

-- stats
WITH head AS (
    SELECT namespace, topic, `key`, seq, next_attempt_at FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
    WHERE namespace = :namespace AND status = 'pending' AND ordered = 1 AND next_attempt_at <= UTC_TIMESTAMP(6)
    ORDER BY next_attempt_at, seq LIMIT 1000)
SELECT (SELECT count(*) FROM head),
(SELECT TIMESTAMPDIFF(MICROSECOND, next_attempt_at, UTC_TIMESTAMP(6)) / 1000000 FROM head WHERE
    head.seq = (
        SELECT earlier.seq FROM `postroom_outbox` AS earlier FORCE INDEX (`postroom_outbox_keyed`)
        WHERE unsettled = 1 AND earlier.namespace = head.namespace
        AND earlier.topic = head.topic AND earlier.`key` = head.`key`
        ORDER BY earlier.seq LIMIT 1)
    AND (
        SELECT dead.seq FROM `postroom_outbox` AS dead FORCE INDEX (`postroom_outbox_dead`)
        WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
        AND dead.`key` = head.`key` AND dead.seq < head.seq
        ORDER BY dead.seq LIMIT 1) IS NULL
    ORDER BY next_attempt_at, seq LIMIT 1);

-- stats
SELECT topic, `key`,
CASE WHEN status = 'pending' AND next_attempt_at <= UTC_TIMESTAMP(6) AND
head.seq = (
    SELECT earlier.seq FROM `postroom_outbox` AS earlier FORCE INDEX (`postroom_outbox_keyed`)
    WHERE unsettled = 1 AND earlier.namespace = head.namespace
    AND earlier.topic = head.topic AND earlier.`key` = head.`key`
    ORDER BY earlier.seq LIMIT 1)
AND (
    SELECT dead.seq FROM `postroom_outbox` AS dead FORCE INDEX (`postroom_outbox_dead`)
    WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
    AND dead.`key` = head.`key` AND dead.seq < head.seq
    ORDER BY dead.seq LIMIT 1) IS NULL
THEN TIMESTAMPDIFF(MICROSECOND, next_attempt_at, UTC_TIMESTAMP(6)) / 1000000 END
FROM (
    SELECT namespace, topic, `key`, seq, status, next_attempt_at FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_keyed`)
    WHERE unsettled = 1 AND namespace = :namespace AND (topic > :topic OR (topic = :topic AND `key` > :key))
    ORDER BY topic, `key`, seq LIMIT 1) AS head;

-- look for messages of other namespaces
SELECT namespace FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
WHERE namespace > :after
ORDER BY namespace LIMIT 1;

-- look for messages of other namespaces
SELECT (
    SELECT count(*) FROM (
        SELECT 1 AS one FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_leased`)
        WHERE status = 'processing' AND namespace = :namespace AND locked_until > UTC_TIMESTAMP(6)
        ORDER BY locked_until, seq LIMIT 1) AS held),
(
    SELECT count(*) FROM (
        SELECT 1 AS one FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
        WHERE status = 'pending' AND ordered = 0 AND namespace = :namespace AND next_attempt_at <= UTC_TIMESTAMP(6)
        ORDER BY next_attempt_at, seq LIMIT 1000) AS due_loose),
(
    SELECT count(*) FROM (
        SELECT 1 AS one FROM `postroom_outbox` FORCE INDEX (`postroom_outbox_ready`)
        WHERE status = 'pending' AND ordered = 1 AND namespace = :namespace AND next_attempt_at <= UTC_TIMESTAMP(6)
        ORDER BY next_attempt_at, seq LIMIT 1000) AS due_ordered);

-- mark a message as handled
INSERT INTO `postroom_inbox` (consumer, tenant_id, message_id, created_at)
VALUES (:consumer, :tenant_id, :message_id, UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE deliveries = deliveries + 1;

-- look for the mark of a message
SELECT 1 FROM `postroom_inbox`
WHERE consumer = :consumer AND tenant_id = :tenant_id AND message_id = :message_id;

-- purge the inbox
SELECT tenant_id, message_id FROM `postroom_inbox` FORCE INDEX (`postroom_inbox_old`)
WHERE consumer = :consumer AND created_at <= UTC_TIMESTAMP(6) - INTERVAL :duration MICROSECOND
ORDER BY created_at LIMIT :limit FOR UPDATE SKIP LOCKED;

-- purge the inbox
DELETE FROM `postroom_inbox` WHERE consumer = :consumer AND tenant_id = :tenant_id AND message_id IN :ids;

-- keep a dead letter
INSERT INTO `postroom_inbox_dead` (consumer, tenant_id, message_id, topic, type, `key`, namespace, payload,
    content_type, headers, attempts, error, died_at)
VALUES (:consumer, :tenant_id, :message_id, :topic, :type, :key, :namespace, :payload,
    :content_type, :headers, :attempts, :error, UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE consumer = consumer;

-- schedule a ticket
INSERT INTO `postroom_outbox_tickets` (namespace, ticket, expires_at, status)
VALUES (:namespace, :ticket, :expires_at, 'scheduled')
ON DUPLICATE KEY UPDATE ticket = ticket;

-- schedule a ticket
SELECT status, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', expires_at) DIV 1000, expires_at <= UTC_TIMESTAMP(6)
  FROM `postroom_outbox_tickets`
WHERE namespace = :namespace AND ticket = :ticket FOR UPDATE;

-- renew a ticket
UPDATE `postroom_outbox_tickets` SET expires_at = :expires_at
WHERE namespace = :namespace AND ticket = :ticket;

-- find tickets that are due
SELECT ticket, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', expires_at) DIV 1000 FROM `postroom_outbox_tickets`
WHERE namespace = :namespace AND status = 'scheduled' AND expires_at <= UTC_TIMESTAMP(6)
ORDER BY expires_at, ticket LIMIT :limit;

-- find tickets that are due at a moment
SELECT ticket, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', expires_at) DIV 1000 FROM `postroom_outbox_tickets`
WHERE namespace = :namespace AND status = 'scheduled' AND expires_at <= UTC_TIMESTAMP(6) AND expires_at <= :due_cutoff
ORDER BY expires_at, ticket LIMIT :limit;

-- decide
UPDATE `postroom_outbox_tickets` SET status = :status, ended_at = UTC_TIMESTAMP(6)
WHERE namespace = :namespace AND ticket = :ticket;

-- forget tickets
DELETE FROM `postroom_outbox_tickets`
WHERE namespace = :namespace AND ended_at <= UTC_TIMESTAMP(6) - INTERVAL :duration MICROSECOND
LIMIT :limit;

-- look at the server
SELECT VERSION(), @@read_only;
