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
    ordered TINYINT GENERATED ALWAYS AS (`key` IS NOT NULL) VIRTUAL,
    unsettled TINYINT GENERATED ALWAYS AS
        (CASE WHEN `key` IS NOT NULL AND status IN ('pending', 'processing') THEN 1 END) VIRTUAL,
    PRIMARY KEY (id),
    UNIQUE KEY `postroom_outbox_seq` (seq),
    UNIQUE KEY `postroom_outbox_dedupe` (namespace, topic, dedupe_key),
    KEY `postroom_outbox_ready` (namespace, status, ordered, next_attempt_at, seq),
    KEY `postroom_outbox_leased` (namespace, status, locked_until, seq),
    KEY `postroom_outbox_keyed` (namespace, unsettled, topic, `key`, seq),
    KEY `postroom_outbox_dead` (namespace, status, topic, `key`, seq),
    KEY `postroom_outbox_delivered` (namespace, status, delivered_at),
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

CREATE TABLE IF NOT EXISTS `postroom_outbox_version` (
    version INT NOT NULL PRIMARY KEY,
    applied_at DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)
) ENGINE=InnoDB;

INSERT IGNORE INTO `postroom_outbox_version` (version) VALUES (1);
