"""What the store itself says: triggers that write down every change of a message, and the tables at the end.

For Redis, which has neither, `chaos.in_redis` says it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

import psycopg
import pymysql

from .desk import BUSINESS, EFFECTS

__all__ = ["Change", "Effect", "Letter", "MariaDBTruth", "Row", "SqlTruth", "Truth", "truth_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A message as the outbox table has it at the end."""

    id: str
    seq: int
    topic: str
    key: str | None
    dedupe: str | None
    status: str
    attempts: int
    token: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One update of a message, written in the same transaction; moments are whole numbers of the store's clock."""

    id: str
    old_status: str
    new_status: str
    old_token: int
    new_token: int
    old_until: int | None
    new_until: int | None
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a handler wrote: whose it is, of which hand-out it came, and the output that goes with it."""

    consumer: str
    id: str
    handle: int
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A message that a consumer has put aside."""

    consumer: str
    id: str
    attempts: int
    error: str


class Truth(ABC):
    """Looks into the database of a run, past the library and past all proxies."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def install(self) -> None:
        """Have every change of a message written down from now on."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return all messages of the outbox, in the order of their arrival."""

    @abstractmethod
    def changes(self) -> list[Change]:
        """Return what was written down of changes, in order."""

    @abstractmethod
    def business(self) -> set[str]:
        """Return the ids that producers have written themselves."""

    @abstractmethod
    def effects(self) -> list[Effect]:
        """Return what handlers wrote, in order."""

    @abstractmethod
    def marks(self) -> set[tuple[str, str]]:
        """Return which messages the inbox knows, by consumer."""

    @abstractmethod
    def letters(self) -> list[Letter]:
        """Return the dead letters beside the inbox."""

    @abstractmethod
    def unsettled(self) -> tuple[int, int]:
        """Return how many messages wait, but for those behind a dead one of their key, and how many are done."""

    def sessions(self) -> list[str]:
        """Return what other sessions there are, each with its state."""
        return []

    def idle_transactions(self) -> list[str]:
        """Return the sessions that hold a transaction open and do nothing."""
        return []

    def oddities(self) -> list[str]:
        """Return what is in the store that never should be."""
        return []

    @abstractmethod
    def version(self) -> str:
        """Return which database this is."""

    def close(self) -> None:  # noqa: B027 -- most connect anew for each look
        """Look no more."""


class SqlTruth(Truth):
    """Looks into tables, and has a trigger write down what happens to one of them."""

    #: The text form of an id, and a moment as a number, of the prefix that is filled in.
    id_text: ClassVar[str]
    moment: ClassVar[str]
    now: ClassVar[str]
    quote: ClassVar[str] = '"'
    number: ClassVar[str]
    before: ClassVar[str] = ""
    after: ClassVar[str] = ""

    @abstractmethod
    def query(self, sql: str) -> Sequence[Sequence[Any]]:
        """Run a statement on a connection of its own and commit it."""

    def install(self) -> None:
        """Create the business table, the audit table and the trigger that fills it."""
        self.query(f"CREATE TABLE {BUSINESS} (id VARCHAR(36) NOT NULL PRIMARY KEY)")
        self.query(f"""
            CREATE TABLE {EFFECTS} (
                number {self.number}, consumer VARCHAR(100) NOT NULL, id VARCHAR(36) NOT NULL,
                handle BIGINT NOT NULL, output VARCHAR(36) NOT NULL)
            """)
        self.query(f"""
            CREATE TABLE chaos_audit (
                number {self.number},
                id VARCHAR(36) NOT NULL,
                old_status VARCHAR(10), new_status VARCHAR(10), old_token BIGINT, new_token BIGINT,
                old_until BIGINT, new_until BIGINT, at BIGINT)
            """)
        insert = f"""
            INSERT INTO chaos_audit (id, old_status, new_status, old_token, new_token, old_until, new_until, at)
            VALUES ({self.id_text}, OLD.status, NEW.status, OLD.token, NEW.token,
                {self.moment.format("OLD.locked_until")}, {self.moment.format("NEW.locked_until")},
                {self.moment.format(self.now)});
            """
        for statement in self._trigger(insert):
            self.query(statement)

    def _trigger(self, insert: str) -> list[str]:
        head = "CREATE TRIGGER chaos_written AFTER UPDATE ON postroom_outbox FOR EACH ROW"
        return [f"{head} {self.before} {insert} {self.after}"]

    def rows(self) -> list[Row]:
        names = f"{self.id_text.replace('NEW.', '')}, seq, topic, {self.quote}key{self.quote}, dedupe_key"
        found = self.query(f"SELECT {names}, status, attempts, token, last_error FROM postroom_outbox ORDER BY seq")
        fields = ("id", "seq", "topic", "key", "dedupe", "status", "attempts", "token", "error")
        return [Row(**dict(zip(fields, row, strict=True))) for row in found]

    def changes(self) -> list[Change]:
        """Return what the trigger wrote, in order."""
        fields = ("id", "old_status", "new_status", "old_token", "new_token", "old_until", "new_until", "at")
        found = self.query(f"SELECT {', '.join(fields)} FROM chaos_audit ORDER BY number")
        return [Change(**dict(zip(fields, row, strict=True))) for row in found]

    def business(self) -> set[str]:
        """Return the ids that the producers' own table has."""
        return {str(row[0]) for row in self.query(f"SELECT id FROM {BUSINESS}")}

    def effects(self) -> list[Effect]:
        """Return what handlers wrote, in order."""
        fields = ("consumer", "id", "handle", "output")
        found = self.query(f"SELECT {', '.join(fields)} FROM {EFFECTS} ORDER BY number")
        return [Effect(**dict(zip(fields, row, strict=True))) for row in found]

    @property
    def _message_id(self) -> str:
        return self.id_text.replace("NEW.id", "message_id")

    def marks(self) -> set[tuple[str, str]]:
        """Return which messages the inbox knows, by consumer."""
        found = self.query(f"SELECT consumer, {self._message_id} FROM postroom_inbox")
        return {(str(consumer), str(identity)) for consumer, identity in found}

    def letters(self) -> list[Letter]:
        """Return the dead letters beside the inbox."""
        found = self.query(f"SELECT consumer, {self._message_id}, attempts, error FROM postroom_inbox_dead")
        fields = ("consumer", "id", "attempts", "error")
        return [Letter(**dict(zip(fields, row, strict=True))) for row in found]

    def unsettled(self) -> tuple[int, int]:
        """Return how many messages wait, but for those behind a dead one of their key, and how many are done."""
        key = f"{self.quote}key{self.quote}"
        found = self.query(f"""
            SELECT status, count(*) FROM postroom_outbox AS head
            WHERE status NOT IN ('pending', 'processing') OR NOT EXISTS (
                SELECT 1 FROM postroom_outbox AS dead WHERE dead.status = 'dead' AND dead.namespace = head.namespace
                AND dead.topic = head.topic AND dead.{key} = head.{key} AND dead.seq < head.seq)
            GROUP BY status
            """)
        counts = {str(status): int(number) for status, number in found}
        waiting = counts.get("pending", 0) + counts.get("processing", 0)
        return waiting, sum(counts.values()) - waiting


class PostgresTruth(SqlTruth):
    """PostgreSQL."""

    id_text = "NEW.id::text"
    moment = "(extract(epoch FROM {}) * 1000000)::bigint"
    now = "clock_timestamp()"
    number = "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"

    def query(self, sql: str) -> Sequence[Sequence[Any]]:
        with psycopg.connect(self.url, autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def _trigger(self, insert: str) -> list[str]:
        function = (
            f"CREATE FUNCTION chaos_audit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {insert} RETURN NULL; END $$"
        )
        trigger = (
            "CREATE TRIGGER chaos_written AFTER UPDATE ON postroom_outbox FOR EACH ROW EXECUTE FUNCTION chaos_audit()"
        )
        return [function, trigger]

    def sessions(self) -> list[str]:
        found = self.query("""
            SELECT application_name, state, query FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
            """)
        return [" ".join(str(field) for field in row) for row in found]

    def idle_transactions(self) -> list[str]:
        return [session for session in self.sessions() if "idle in transaction" in session]

    def version(self) -> str:
        return f"PostgreSQL {self.query('SHOW server_version')[0][0]}"


class MariaDBTruth(SqlTruth):
    """MariaDB."""

    id_text = "LOWER(CONCAT_WS('-', SUBSTR(HEX(NEW.id), 1, 8), SUBSTR(HEX(NEW.id), 9, 4), SUBSTR(HEX(NEW.id), 13, 4), SUBSTR(HEX(NEW.id), 17, 4), SUBSTR(HEX(NEW.id), 21)))"  # noqa: E501
    moment = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {})"
    now = "UTC_TIMESTAMP(6)"
    quote = "`"
    number = "BIGINT AUTO_INCREMENT PRIMARY KEY"

    @property
    def place(self) -> dict[str, Any]:
        """How the library is told where the database is."""
        url = urlsplit(self.url)
        return {"host": url.hostname, "port": url.port, "user": url.username, "database": url.path[1:]}

    def query(self, sql: str) -> Sequence[Sequence[Any]]:
        opened = pymysql.connect(**self.place, autocommit=True, connect_timeout=5)
        with contextlib.closing(opened) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            rows: Sequence[Sequence[Any]] = cursor.fetchall()
            return rows

    def sessions(self) -> list[str]:
        found = self.query("""
            SELECT command, state, info FROM information_schema.processlist
            WHERE db = DATABASE() AND id <> CONNECTION_ID()
            """)
        return [" ".join(str(field) for field in row) for row in found]

    def idle_transactions(self) -> list[str]:
        found = self.query("""
            SELECT trx_mysql_thread_id, trx_started FROM information_schema.innodb_trx
            JOIN information_schema.processlist ON id = trx_mysql_thread_id
            WHERE command = 'Sleep' AND id <> CONNECTION_ID()
            """)
        return [" ".join(str(field) for field in row) for row in found]

    def version(self) -> str:
        return f"MariaDB {self.query('SELECT VERSION()')[0][0]}"


class SQLiteTruth(SqlTruth):
    """SQLite."""

    id_text = "NEW.id"
    moment = "{}"
    now = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
    number = "INTEGER PRIMARY KEY AUTOINCREMENT"
    before = "BEGIN"
    after = "END"

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=20)) as connection:
            connection.isolation_level = None
            yield connection

    def query(self, sql: str) -> Sequence[Sequence[Any]]:
        with self._connection() as connection:
            return connection.execute(sql).fetchall()

    def version(self) -> str:
        return f"SQLite {sqlite3.sqlite_version}"


def truth_of(store: str, url: str) -> Truth:
    """Return what looks into a store."""
    if store in {"redis", "redis-stream"}:
        from .in_redis import RedisTruth, StreamTruth  # noqa: PLC0415 -- it needs the values of this module

        return RedisTruth(url) if store == "redis" else StreamTruth(url)
    kinds: dict[str, type[Truth]] = {
        "postgres": PostgresTruth,
        "pgbouncer": PostgresTruth,
        "mariadb": MariaDBTruth,
        "sqlite": SQLiteTruth,
    }
    return kinds[store](url)
