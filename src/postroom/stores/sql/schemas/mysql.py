"""The tables of MySQL and MariaDB."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import ClassVar

from ....errors import StoreContentionError
from ..schema import STEP, VERSION, Change, Group, Schema
from ..statement import Script

__all__ = ["MySQLSchema"]

_LINE = re.compile(r"^(?:(PRIMARY KEY|UNIQUE KEY|KEY|CONSTRAINT) )?(?:`(\w+)` ?)?(.*?),?$")


class MySQLSchema(Schema):
    """Tables of MySQL; a wanted one is built as a temporary table, for the server to describe both."""

    version: ClassVar[str] = """
        CREATE TABLE IF NOT EXISTS {version} (
            version INT NOT NULL PRIMARY KEY,
            applied_at DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
            step INT
        ) ENGINE=InnoDB
        """
    record_version: ClassVar[str] = f"INSERT IGNORE INTO {{version}} (version, step) VALUES ({VERSION}, {STEP})"
    exists = "SELECT count(*) FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = :table"
    outbox: ClassVar[str] = """
        CREATE TABLE IF NOT EXISTS {outbox} (
            id BINARY(16) NOT NULL,
            seq BIGINT NOT NULL AUTO_INCREMENT,
            namespace VARCHAR(100) NOT NULL,
            topic VARCHAR(249) NOT NULL,
            type VARCHAR(255) NOT NULL,
            {key} VARCHAR(255),
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
            ordered TINYINT GENERATED ALWAYS AS ({key} IS NOT NULL) VIRTUAL,
            unsettled TINYINT GENERATED ALWAYS AS
                (CASE WHEN {key} IS NOT NULL AND status IN ('pending', 'processing') THEN 1 END) VIRTUAL,
            is_parked TINYINT GENERATED ALWAYS AS
                (CASE WHEN status = 'pending' AND parked = token THEN 1 END) VIRTUAL,
            PRIMARY KEY (id),
            UNIQUE KEY {seq} (seq),
            UNIQUE KEY {dedupe} (namespace, topic, dedupe_key),
            KEY {ready} (namespace, status, ordered, next_attempt_at, seq),
            KEY {leased} (namespace, status, locked_until, seq),
            KEY {keyed} (namespace, unsettled, topic, {key}, seq),
            KEY {dead} (namespace, status, topic, {key}, seq),
            KEY {delivered} (namespace, status, delivered_at),
            KEY {parked} (namespace, is_parked, destination, next_attempt_at, seq),
            CONSTRAINT {status_check} CHECK (status IN ('pending', 'processing', 'delivered', 'dead')),
            CONSTRAINT {worker_check} CHECK ((status = 'processing') = (locked_by IS NOT NULL)),
            CONSTRAINT {lease_check} CHECK ((locked_by IS NULL) = (locked_until IS NULL))
        ) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
        """
    inbox: ClassVar[str] = """
        CREATE TABLE IF NOT EXISTS {inbox} (
            consumer VARCHAR(100) NOT NULL,
            tenant_id BINARY(16) NOT NULL,
            message_id BINARY(16) NOT NULL,
            deliveries INT NOT NULL DEFAULT 1,
            created_at DATETIME(6) NOT NULL,
            PRIMARY KEY (consumer, tenant_id, message_id),
            KEY {inbox_old} (consumer, created_at)
        ) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
        """
    # A letter may be dead for the length of its parts, so these have no limit of ours.
    dead: ClassVar[str] = """
        CREATE TABLE IF NOT EXISTS {inbox_dead} (
            consumer VARCHAR(100) NOT NULL,
            tenant_id BINARY(16) NOT NULL,
            message_id BINARY(16) NOT NULL,
            topic LONGTEXT NOT NULL,
            type LONGTEXT NOT NULL,
            {key} LONGTEXT,
            namespace LONGTEXT NOT NULL,
            payload LONGBLOB NOT NULL,
            content_type LONGTEXT NOT NULL,
            headers LONGTEXT NOT NULL,
            attempts INT NOT NULL,
            error TEXT NOT NULL,
            died_at DATETIME(6) NOT NULL,
            PRIMARY KEY (consumer, tenant_id, message_id)
        ) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
        """
    tickets: ClassVar[str] = """
        CREATE TABLE IF NOT EXISTS {tickets} (
            namespace VARCHAR(100) NOT NULL,
            ticket VARCHAR(255) NOT NULL,
            expires_at DATETIME(6) NOT NULL,
            status VARCHAR(10) NOT NULL,
            ended_at DATETIME(6),
            PRIMARY KEY (namespace, ticket),
            KEY {tickets_due} (namespace, status, expires_at, ticket),
            KEY {tickets_ended} (namespace, ended_at),
            CONSTRAINT {tickets_check} CHECK
                (status IN ('scheduled', 'expired', 'revoked') AND (status = 'scheduled') = (ended_at IS NULL))
        ) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
        """
    models: ClassVar[Mapping[Group, Sequence[str]]] = {
        "outbox": (outbox,),
        "inbox": (inbox, dead),
        "tickets": (tickets,),
        "version": (version,),
    }
    ddl: ClassVar[Mapping[Group, Sequence[str]]] = {
        "outbox": (
            outbox,
            "CREATE TABLE IF NOT EXISTS {lock} (number SMALLINT NOT NULL PRIMARY KEY) ENGINE=InnoDB",
            """
            CREATE OR REPLACE VIEW {published} AS
            SELECT seq AS id, created_at, topic, type AS event_type,
                   CASE WHEN content_type = 'application/json' THEN CONVERT(payload USING utf8mb4) END AS data,
                   headers AS attributes, status = 'delivered' AS published
            FROM {outbox}
            """,
            """
            CREATE OR REPLACE VIEW {messages} AS
            SELECT id, payload, headers AS properties, created_at, delivered_at AS published_at, attempts, last_error,
                   updated_at
            FROM {outbox}
            """,
        ),
        "inbox": (
            inbox,
            dead,
            """
            CREATE OR REPLACE VIEW {inbox_processed} AS
            SELECT consumer AS subscriber, message_id, created_at
            FROM {inbox}
            """,
        ),
        "tickets": (tickets,),
        "version": (version,),
    }
    # Apart from each other, since MySQL adds a virtual column at once only if nothing else is changed with it.
    steps: ClassVar[Sequence[Sequence[Change]]] = (
        (
            Change(group="version", part="column {table}_version.step", texts=("ALTER TABLE {version} ADD step INT",)),
            Change(part="column destination", texts=("ALTER TABLE {outbox} ADD destination VARCHAR(200)",)),
            Change(part="column parked", texts=("ALTER TABLE {outbox} ADD parked BIGINT",)),
            Change(
                part="column is_parked",
                texts=(
                    """
                    ALTER TABLE {outbox} ADD is_parked TINYINT GENERATED ALWAYS AS
                        (CASE WHEN status = 'pending' AND parked = token THEN 1 END) VIRTUAL
                    """,
                ),
            ),
            Change(
                part="key {table}_parked",
                texts=(
                    """
                    ALTER TABLE {outbox} ADD KEY {parked} (namespace, is_parked, destination, next_attempt_at, seq),
                        ALGORITHM=INPLACE, LOCK=NONE
                    """,
                ),
            ),
        ),
    )

    # A hash, because the server's locks have names of at most 64 characters.
    locking: ClassVar[str] = "SELECT GET_LOCK(SHA2(CONCAT(DATABASE(), '.', :table), 256), 60)"
    unlocking: ClassVar[str] = "SELECT RELEASE_LOCK(SHA2(CONCAT(DATABASE(), '.', :table), 256))"

    def lock(self) -> Script[None]:
        # DDL commits by itself, so the lock belongs to the connection.
        taken = yield self.dialect.query(self.locking, table=self.dialect.names.table)
        if taken.rows[0][0] != 1:
            raise StoreContentionError("another `schema apply` has been running for a minute; try again later")

    def unlock(self) -> Script[None]:
        yield self.dialect.query(self.unlocking, table=self.dialect.names.table)

    def limit_waits(self, longest: timedelta) -> Script[None]:
        # In seconds. With 0, MariaDB gives up at once and MySQL, which knows no 0, after a second.
        yield self.dialect.sql(f"SET SESSION lock_wait_timeout = {longest // timedelta(seconds=1)}")

    def unlimit_waits(self) -> Script[None]:
        yield self.dialect.sql("SET SESSION lock_wait_timeout = DEFAULT")

    def describe(self, group: Group) -> Script[dict[str, str]]:
        parts: dict[str, str] = {}
        for table, prefix in self.tables(group).items():
            there = yield self.dialect.query(self.exists, table=table)
            if there.rows[0][0]:
                shown = yield self.dialect.query(f"SHOW CREATE TABLE `{table}`")
                parts |= _parts(shown.rows[0][1], prefix)
        for name in self._others(group):
            there = yield self.dialect.query(self.exists, table=name)
            if there.rows[0][0]:
                parts[f"table or view {name}"] = ""
        return parts

    def wanted(self, group: Group) -> Script[dict[str, str]]:
        parts: dict[str, str] = {}
        for (table, prefix), model in zip(self.tables(group).items(), self.models[group], strict=True):
            yield self.dialect.sql(model.replace("CREATE TABLE IF NOT EXISTS", "CREATE TEMPORARY TABLE"))
            shown = yield self.dialect.query(f"SHOW CREATE TABLE `{table}`")
            yield self.dialect.sql(f"DROP TEMPORARY TABLE `{table}`")
            parts |= _parts(shown.rows[0][1], prefix)
        return parts | {f"table or view {name}": "" for name in self._others(group)}

    def _others(self, group: Group) -> list[str]:
        """Return what is only looked for, and not at."""
        names = self.dialect.names
        if group == "inbox":
            return [f"{names.inbox}_processed"]
        suffixes = ("lock", "published", "messages") if group == "outbox" else ()
        return [f"{names.table}_{suffix}" for suffix in suffixes]


def _parts(text: str, prefix: str) -> dict[str, str]:
    """Return columns, keys and checks by name, from what SHOW CREATE TABLE says."""
    parts: dict[str, str] = {}
    for line in text.splitlines()[1:-1]:
        match = _LINE.match(line.strip())
        if match is not None:
            kind = (match[1] or "column").lower()
            parts[f"{kind} {prefix}{match[2] or ''}".strip(" .")] = match[3]
    return parts
