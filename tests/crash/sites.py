"""The databases of the crash matrix, looked at from outside through plain connections."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit
from uuid import UUID, uuid4

import psycopg
import pymysql

from postroom import AddResult, Delivered, Outbox
from postroom.store import ClaimTerms, Settlement
from postroom.stores import SQLStore, store_from_url

__all__ = ["Row", "Site", "site_of"]

BUSINESS = "CREATE TABLE IF NOT EXISTS crash_business (namespace varchar(64) NOT NULL, id varchar(36) NOT NULL)"


@dataclass(frozen=True, slots=True)
class Row:
    """A message as the store has it."""

    id: UUID
    status: str
    token: int
    attempts: int
    #: When the lease ends, in seconds since 1970.
    locked_until: float | None


class Site:
    """One database; every case works in a namespace of its own."""

    mark: ClassVar[str] = "%s"
    identity: ClassVar[str] = "id"
    lease_end: ClassVar[str]
    now: ClassVar[str]
    #: How many sessions wait for a lock.
    waiting: ClassVar[str] = ""

    def __init__(self, url: str) -> None:
        self.url = url

    def connect(self) -> Any:  # noqa: ANN401 -- of three libraries
        raise NotImplementedError

    def uuid(self, value: Any) -> UUID:  # noqa: ANN401 -- of three libraries
        return UUID(value)

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """Yield a connection in a transaction, which is committed."""
        with closing(self.connect()) as connection:
            yield connection
            connection.commit()

    def prepare(self) -> None:
        """Create the tables."""

        async def apply() -> None:
            store = store_from_url(self.url)
            assert isinstance(store, SQLStore)
            await store.apply_schema()
            await store.close()

        asyncio.run(apply())
        with self.connection() as connection:
            connection.cursor().execute(BUSINESS)

    def seed(self, namespace: str, keys: Sequence[str | None]) -> list[UUID]:
        """Commit one message for each key, together with its business row."""
        outbox, added = Outbox(namespace=namespace), list[AddResult]()
        with self.connection() as connection:
            for number, key in enumerate(keys):
                added.append(outbox.add(connection, {"n": number}, topic="t", key=key))
                sql = f"INSERT INTO crash_business (namespace, id) VALUES ({self.mark}, {self.mark})"
                connection.cursor().execute(sql, (namespace, str(added[-1].id)))
        return [one.id for one in added if one.id is not None]

    def spend(self, namespace: str, attempts: int, *, delivered: bool = False) -> None:
        """Use up attempts as a worker would that crashed each time; or have the messages delivered by then."""

        async def claim() -> None:
            store = store_from_url(self.url, namespace=namespace)
            await store.open()
            terms = ClaimTerms(worker=uuid4(), lease=timedelta(milliseconds=1), max_attempts=attempts)
            left = len(self.rows(namespace))
            while left:
                claims = await store.claim(left, terms)
                left -= len(claims)
                if delivered:
                    await store.settle([Settlement(one, Delivered()) for one in claims])
            await store.close()

        asyncio.run(claim())

    def rows(self, namespace: str) -> list[Row]:
        """Return the messages of a namespace in the order in which they were added."""
        sql = (
            f"SELECT {self.identity}, status, token, attempts, {self.lease_end} "
            f"FROM postroom_outbox WHERE namespace = {self.mark} ORDER BY seq"
        )
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(sql, (namespace,))
            found = cursor.fetchall()
        return [
            Row(self.uuid(one[0]), one[1], one[2], one[3], None if one[4] is None else float(one[4])) for one in found
        ]

    def end_leases(self, namespace: str) -> None:
        """Let all leases of a namespace end now."""
        leased = f"namespace = {self.mark} AND status = 'processing'"
        with self.connection() as connection:
            sql = f"UPDATE postroom_outbox SET locked_until = {self.now} WHERE {leased}"
            connection.cursor().execute(sql, (namespace,))

    def business(self, namespace: str) -> list[UUID]:
        """Return for which messages there is a business row."""
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(f"SELECT id FROM crash_business WHERE namespace = {self.mark}", (namespace,))
            return [UUID(one[0]) for one in cursor.fetchall()]

    def marks(self, consumer: str) -> int:
        """Return how many messages the inbox of a consumer knows."""
        return self._count(f"FROM postroom_inbox WHERE consumer = {self.mark}", consumer)

    def letters(self, consumer: str) -> int:
        """Return how many dead letters a consumer has."""
        return self._count(f"FROM postroom_inbox_dead WHERE consumer = {self.mark}", consumer)

    def has_waiting(self) -> bool:
        """Tell whether somebody waits for a lock; of SQLite nobody can tell."""
        return not self.waiting or self._count(self.waiting) > 0

    def _count(self, rest: str, *values: str) -> int:
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(f"SELECT count(*) {rest}", values)
            [[count]] = cursor.fetchall()
        return int(count)


class PostgresSite(Site):
    lease_end = "extract(epoch FROM locked_until)"
    now = "clock_timestamp()"
    waiting = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

    def connect(self) -> Any:  # noqa: ANN401
        return psycopg.connect(self.url)

    def uuid(self, value: Any) -> UUID:  # noqa: ANN401
        return UUID(str(value))


class MariaDBSite(Site):
    lease_end = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', locked_until) / 1000000"
    now = "UTC_TIMESTAMP(6)"
    waiting = (
        "FROM information_schema.processlist JOIN information_schema.innodb_trx ON trx_mysql_thread_id = id"
        " WHERE db = DATABASE() AND trx_state = 'LOCK WAIT'"
    )

    def connect(self) -> Any:  # noqa: ANN401
        url = urlsplit(self.url)
        return pymysql.connect(
            host=url.hostname or "",
            port=url.port or 3306,
            user=unquote(url.username or "root"),
            password=unquote(url.password or ""),
            database=url.path[1:],
        )

    def uuid(self, value: Any) -> UUID:  # noqa: ANN401
        return UUID(bytes=value)


class SQLiteSite(Site):
    mark = "?"
    lease_end = "locked_until / 1000.0"
    now = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"

    def connect(self) -> Any:  # noqa: ANN401
        return sqlite3.connect(self.url.removeprefix("sqlite:///"))


def site_of(url: str) -> Site:
    """Return the site that a URL leads to."""
    kinds = {"postgresql": PostgresSite, "mysql": MariaDBSite, "mariadb": MariaDBSite, "sqlite": SQLiteSite}
    return kinds[url.partition(":")[0]](url)
