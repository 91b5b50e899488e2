"""The store in an SQL database: one dialect, one pool, one table."""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, TypeVar, Unpack, get_args

from ...checks import check_choice, check_count, check_duration, check_flag, check_text
from ...errors import (
    ConfigurationError,
    DecodeError,
    InvalidNameError,
    ReadOnlyStoreError,
    StoreContentionError,
    UnsupportedDatabaseError,
)
from ...inbox import By, Inbox, Mode
from ...message import DEFAULT_NAMESPACE, Message, is_namespace
from ...outbox import Outbox, OutboxSettings, check_settings
from ...store import Claim, ClaimTerms, Features, Peeked, Settlement, Stats
from ...transaction import Transactions
from .claiming import Walk
from .dialects.mysql import MySQL
from .dialects.postgres import PostgreSQL
from .dialects.sqlite import SQLite
from .driver import finish
from .hints import Hints
from .lanes import Lanes
from .names import Names
from .pool import Connector, NetworkPool, Pool
from .schema import Schema
from .schemas.mysql import MySQLSchema
from .schemas.postgres import PostgresSchema
from .schemas.sqlite import SQLiteSchema
from .sessions import Pooler
from .statement import Result, Row, Script, Statement
from .upgrade import SCHEMA_TIMEOUT, apply_schema
from .url import Place

__all__ = ["MySQLStore", "PostgresStore", "SQLStore", "SQLiteStore"]

T = TypeVar("T")

_logger = logging.getLogger("postroom")

WEEK = timedelta(days=7)
TIMEOUT = timedelta(seconds=10)
#: How often suspects are asked for first, so that a constant load cannot starve them.
SUSPECTS_EVERY = 16
CONTENTION_RETRIES = 3


class SQLStore:
    """The messages of one namespace in one outbox table."""

    def __init__(
        self,
        schema: Schema,
        pool: Pool,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        keep_delivered: timedelta = WEEK,
        timeout: timedelta = TIMEOUT,
        features: Features | None = None,
        **outbox: Unpack[OutboxSettings],
    ) -> None:
        """Set up a store; no connection is made.

        Args:
            schema: The tables, in the words of one database.
            pool: Runs statements on that database.
            namespace: Whose messages these are.
            keep_delivered: How long delivered messages stay; zero deletes them at once, which is fastest.
            timeout: How long one call to the database may take.
            features: What the store promises.
            outbox: Settings of the store's `outbox`: ``codec``, ``limits``, ``strict_order``, ``opaque_dedupe_keys``.
        """
        check_settings(type(self).__name__, outbox, OutboxSettings)
        if not is_namespace(namespace):
            raise InvalidNameError("namespace", namespace, "1 to 100 printable characters")
        check_duration("keep_delivered", keep_delivered, zero=True)
        check_duration("timeout", timeout)
        self.namespace = namespace
        self.features: Features = features or Features(separates_keys=True)
        self.keep_delivered = keep_delivered
        self.schema = schema
        self._dialect = schema.dialect
        self._pool = pool
        self._timeout = timeout
        self._is_open = False
        #: How many claims are made before suspects are asked for first.
        self._until_suspects = SUSPECTS_EVERY
        self._lanes = Lanes()
        self._walk = Walk()
        self._outbox_settings = outbox

    def __repr__(self) -> str:
        """Leave out where the database is: its URL may hold a password."""
        return f"{type(self).__name__}(namespace={self.namespace!r}, table={self._dialect.names.table!r})"

    async def open(self) -> bool:
        """Connect, and check server and schema; tell whether the store was closed before."""
        if self._is_open:
            return False
        await self._run(self._opening(), atomic=False)
        self._is_open = True
        return True

    def _opening(self) -> Script[None]:
        server = yield from self._dialect.probe()
        if not self._dialect.is_supported(server):
            version = ".".join(str(part) for part in server.version)
            raise UnsupportedDatabaseError(f"{server.product} {version}", self._dialect.needed)
        if server.read_only:
            raise ReadOnlyStoreError("the connection leads to a replica or a read-only server; use the primary")
        yield from self.schema.verify()

    async def close(self) -> None:
        """Close all connections."""
        self._is_open = False
        await self._pool.close()

    async def apply_schema(self) -> bool:
        """Create the tables or bring them up to date while they are in use; return whether there was anything to do."""
        return await apply_schema(self.schema, self._pool)

    async def check_schema(self) -> list[str]:
        """Return how the tables differ from what this version needs; nothing is changed."""
        return await self._pool.run(self.schema.check(), timeout=SCHEMA_TIMEOUT)

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        """Lease up to ``limit`` messages that are due."""
        if limit < 1:
            return []
        if self._dialect.claims_deadlock:
            rows, suspect = await self._retrying(lambda: self._claiming(limit, terms))
        else:
            rows, suspect = await self._run(self._claiming(limit, terms), atomic=self._dialect.atomic)
        claims = [self._claim(row, suspect=suspect) for row in sorted(rows, key=lambda row: row[12])]
        return [claim for claim in claims if claim is not None]

    def _claiming(self, limit: int, terms: ClaimTerms) -> Script[tuple[Sequence[Row], bool]]:
        self._until_suspects -= 1
        if self._until_suspects <= 0:
            suspects = yield from self._dialect.claim_suspect(self.namespace, terms)
            # A worker that dies three times leaves many behind: every other claim is theirs until they are gone.
            self._until_suspects = 2 if suspects else SUSPECTS_EVERY
            if suspects:
                return suspects, True
        rows: Sequence[Row] = []
        first = keyed = self._lanes.first(newest_first=terms.newest_first)
        for keyed in (first, not first):
            # Not both at once: the second would have to know how many bytes the first has taken, and on PostgreSQL,
            # where there is no transaction around them, what the first took is lost to us if the second fails.
            rows = yield from self._claim_lane(limit, terms, keyed=keyed)
            if rows:
                break
        if not terms.newest_first:
            self._lanes.report(first=first, last=keyed, found=len(rows), limit=limit)
        if rows:
            return rows, False
        self._until_suspects = SUSPECTS_EVERY
        return (yield from self._dialect.claim_suspect(self.namespace, terms)), True

    def _claim_lane(self, limit: int, terms: ClaimTerms, *, keyed: bool) -> Script[Sequence[Row]]:
        if keyed:
            return self._dialect.claim_keyed(self.namespace, limit, terms, self._walk)
        return self._dialect.claim_loose(self.namespace, limit, terms)

    def _claim(self, row: Row, *, suspect: bool) -> Claim | None:
        try:
            return Claim(self._dialect.decode(row, self.namespace), suspect)
        except DecodeError as error:
            try:
                identity = self._dialect.to_uuid(row[0])
            except (ValueError, TypeError, AttributeError):
                return None  # without its id nothing can be said of it; the sweep will bury it
            # Topic and key tell the dispatcher which later messages a dead one holds back.
            message = Message(
                id=identity,
                topic=str(row[1]),
                key=row[3],
                payload=b"",
                namespace=self.namespace,
                attempt=row[10],
                token=row[11],
            )
            return Claim(message, suspect, broken=str(error))

    async def peek(self, limit: int, *, topic: str | None = None) -> list[Peeked]:
        """Return up to ``limit`` messages that claims would bring next; change nothing."""
        if limit < 1:
            return []
        rows = await self._run(self._dialect.peek(self.namespace, limit, topic), atomic=False)
        found = [(self._claim(row, suspect=False), timedelta(seconds=age)) for row, age in rows]
        return [Peeked(claim.message, due_for, claim.broken) for claim, due_for in found if claim is not None]

    async def settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        """Record what became of claims; return those that were lost."""
        if not settlements:
            return []
        keep = self.keep_delivered > timedelta(0)
        return await self._retrying(lambda: self._dialect.settle(settlements, keep_delivered=keep))

    async def extend(self, claims: Sequence[Claim], lease: timedelta) -> list[Claim]:
        """Lease claims anew from now on; return those that were lost."""
        return await self._retrying(lambda: self._dialect.extend(claims, lease)) if claims else []

    async def sweep(self, terms: ClaimTerms) -> int:
        """Make messages dead that have no attempt left."""
        return await self._retrying(lambda: self._dialect.sweep(self.namespace, terms))

    async def clock(self) -> datetime:
        """Return what the database's clock says."""
        found = await self._run(_one(self._dialect.query("SELECT {now}")), atomic=False)
        return self._dialect.to_time(found.rows[0][0])

    async def parked(self, *, after: str = "", limit: int = 100) -> list[str]:
        """Return destinations that have parked messages, in the order of the database."""
        return await self._run(self._dialect.parked(self.namespace, after, limit), atomic=False) if limit > 0 else []

    async def unpark(self, destination: str, limit: int) -> int:
        """Make messages due that are parked for a destination; return how many."""
        if limit < 1:
            return 0
        return await self._retrying(lambda: self._dialect.unpark(self.namespace, destination, limit))

    async def purge(self, *, older_than: timedelta, limit: int = 1000) -> int:
        """Delete delivered messages past their retention, one chunk of them."""
        deleted = await self._retrying(lambda: _one(self._dialect.purge(self.namespace, older_than, limit)))
        return deleted.count

    async def stats(self) -> Stats:
        """Tell how the namespace is doing."""
        return await self._run(self._dialect.stats(self.namespace), atomic=False)

    async def due_elsewhere(self) -> dict[str, int]:
        """Return a few other namespaces in which messages are due and no worker holds any, with how many."""
        return await self._run(self._dialect.due_elsewhere(self.namespace), atomic=False)

    async def listen(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` at every hint of another process."""
        await self._pool.listen(self._dialect.channel(self.namespace), wake, timeout=self._timeout)

    def outbox(self, *, wake: Callable[[], object] | None = None) -> Outbox:
        """Return what adds messages to this store, with its settings; ``wake`` is called after commits it notices."""
        names = self._dialect.names
        return Outbox(
            namespace=self.namespace, table=names.table, schema=names.schema, wake=wake, **self._outbox_settings
        )

    def inbox(
        self,
        consumer: str,
        *,
        mode: Mode = "pessimistic",
        by: By = "id",
        retention: timedelta = WEEK,
        redelivery_horizon: timedelta | None = None,
    ) -> Inbox:
        """Return the inbox of a consumer in this store.

        Raises:
            ConfigurationError: Messages would be forgotten while they may still come again.
        """
        names = self._dialect.names
        return Inbox(
            consumer,
            table=names.inbox,
            schema=names.schema,
            mode=mode,
            by=by,
            retention=retention,
            redelivery_horizon=redelivery_horizon,
        )

    def transactions(self) -> Transactions:
        """Return what opens transactions on connections of the store's own; always the same."""
        return self._pool.transactions(timeout=self._timeout)

    async def _run(self, script: Script[T], *, atomic: bool) -> T:
        return await self._pool.run(script, atomic=atomic, timeout=self._timeout)

    async def _retrying(self, make: Callable[[], Script[T]]) -> T:
        for attempt in range(CONTENTION_RETRIES):
            try:
                return await self._run(make(), atomic=self._dialect.atomic)
            except StoreContentionError:
                await asyncio.sleep(random.uniform(0, 0.05) * 2**attempt)
        return await self._run(make(), atomic=self._dialect.atomic)


class PostgresStore(SQLStore):
    """A store in PostgreSQL.

    Example:
        >>> from postroom.stores import PostgresStore
        >>> PostgresStore("postgresql://app:secret@localhost/shop", namespace="shop")
        PostgresStore(namespace='shop', table='postroom_outbox')
    """

    def __init__(  # noqa: PLR0913 -- one keyword for each choice a user has
        self,
        dsn: str,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        table: str = "postroom_outbox",
        inbox: str = "postroom_inbox",
        schema: str | None = None,
        driver: Literal["asyncpg", "psycopg"] = "asyncpg",
        keep_delivered: timedelta = WEEK,
        timeout: timedelta = TIMEOUT,
        connections: int = 5,
        pooler: Pooler | None = None,
        **outbox: Unpack[OutboxSettings],
    ) -> None:
        """Set up a store.

        Args:
            dsn: The database; begins with ``postgresql://``.
            namespace: Whose messages these are.
            table: The name of the outbox table.
            inbox: The name of the inbox table.
            schema: The schema that the tables are in; by default the first of the search path.
            driver: The library that connects.
            keep_delivered: How long delivered messages stay.
            timeout: How long one call may take.
            connections: The size of the pool for the store's own calls, and of the one for transactions of handlers.
            pooler: ``"transaction"`` if ``dsn`` leads to PgBouncer or another pooler that gives a server session to a
                client for one transaction only; None for a direct connection or a pooler in session mode.
            outbox: Settings of the store's `outbox`: ``codec``, ``limits``, ``strict_order``, ``opaque_dedupe_keys``.
        """
        check_text("dsn", dsn)
        check_choice("pooler", pooler, (None, *get_args(Pooler)))
        check_choice("driver", driver, ("asyncpg", "psycopg"))
        check_duration("timeout", timeout)
        check_count("connections", connections)
        place = Place.parse(dsn, schemes=("postgresql", "postgres"))
        super().__init__(
            PostgresSchema(PostgreSQL(Names(table=table, schema=schema, inbox=inbox))),
            NetworkPool(place, _connector(driver)(place, timeout=timeout, pooler=pooler), size=connections),
            namespace=namespace,
            keep_delivered=keep_delivered,
            timeout=timeout,
            features=Features(wakeups=pooler is None, separates_keys=True),
            **outbox,
        )
        self._pooler = pooler
        self._hints = Hints(self._notify)
        self._has_warned = False

    async def open(self) -> bool:
        """Connect, and check server and schema; tell whether the store was closed before."""
        opened = await super().open()
        self._hints.open()
        return opened

    async def close(self) -> None:
        """Close all connections; hints that are on their way are dropped."""
        try:
            await self._hints.close()
        finally:  # who stops waiting must not leave the connections open
            await super().close()

    async def listen(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` at every hint of another process; return at once behind a pooler, which has none."""
        if self._pooler is None:
            await super().listen(wake)
            return
        _logger.info(
            "%r: LISTEN does not work through a pooler in transaction mode, so the dispatcher finds new messages by "
            "polling; its poll_interval bounds how long they wait",
            self,
        )

    def notify(self) -> None:
        """Hint to dispatchers of other processes that there is work; under load at most once in ten milliseconds.

        May be called from any thread. A hint that fails is dropped, since dispatchers poll as well. So are hints before
        the store was opened, whose connections they are sent on: the first of them is a warning in the log.
        """
        if not self._hints.ask() and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "%r: hints are dropped, since the store is not open in this process, and dispatchers find messages by "
                "polling; call `await store.open()` at the start to deliver at once",
                self,
            )

    def outbox(self, *, wake: Callable[[], object] | None = None) -> Outbox:
        """Return what adds messages to this store; after a commit that is known of, `notify` hints at them."""
        return super().outbox(wake=wake or self.notify)

    async def _notify(self) -> None:
        channel = self._dialect.channel(self.namespace)
        # A hint need not survive a crash, so nobody waits for the disk.
        text = "SELECT set_config('synchronous_commit', 'off', true), pg_notify(:channel::text, '')"
        await self._run(_one(self._dialect.query(text, channel=channel)), atomic=False)


class MySQLStore(SQLStore):
    """A store in MySQL or MariaDB.

    Example:
        >>> from postroom.stores import MySQLStore
        >>> MySQLStore("mysql://app:secret@localhost/shop", namespace="shop")
        MySQLStore(namespace='shop', table='postroom_outbox')
    """

    def __init__(  # noqa: PLR0913 -- one keyword for each choice a user has
        self,
        url: str,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        table: str = "postroom_outbox",
        inbox: str = "postroom_inbox",
        keep_delivered: timedelta = WEEK,
        timeout: timedelta = TIMEOUT,
        connections: int = 5,
        **outbox: Unpack[OutboxSettings],
    ) -> None:
        """Set up a store on ``url``, which begins with ``mysql://`` or ``mariadb://``."""
        from .drivers.mysql import AsyncmyConnector  # noqa: PLC0415 -- an extra

        check_text("url", url)
        check_count("connections", connections)
        place = Place.parse(url, schemes=("mysql", "mariadb"))
        super().__init__(
            MySQLSchema(MySQL(Names(table=table, inbox=inbox))),
            NetworkPool(place, AsyncmyConnector(place), size=connections),
            namespace=namespace,
            keep_delivered=keep_delivered,
            timeout=timeout,
            **outbox,
        )


class SQLiteStore(SQLStore):
    """A store in a SQLite file.

    Example:
        >>> from postroom.stores import SQLiteStore
        >>> SQLiteStore("shop.sqlite3", namespace="shop")
        SQLiteStore(namespace='shop', table='postroom_outbox')
    """

    def __init__(  # noqa: PLR0913 -- one keyword for each choice a user has
        self,
        path: str | Path,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        table: str = "postroom_outbox",
        inbox: str = "postroom_inbox",
        keep_delivered: timedelta = WEEK,
        timeout: timedelta = TIMEOUT,
        wal: bool = True,
        **outbox: Unpack[OutboxSettings],
    ) -> None:
        """Set up a store on a file.

        Args:
            path: Where the file is; `apply_schema` creates it.
            namespace: Whose messages these are.
            table: The name of the outbox table.
            inbox: The name of the inbox table.
            keep_delivered: How long delivered messages stay.
            timeout: How long one call may take.
            wal: Switch the file to write-ahead logging, which is for good and for all who use it.
            outbox: Settings of the store's `outbox`: ``codec``, ``limits``, ``strict_order``, ``opaque_dedupe_keys``.
        """
        from .sqlite_pool import SQLitePool  # noqa: PLC0415 -- loads the C library

        check_duration("timeout", timeout)
        check_flag("wal", wal)
        if str(path) == ":memory:" or str(path) == "":
            raise ConfigurationError(
                "a SQLite store needs a file, since a dispatcher opens it again; or use MemoryStore"
            )
        self._file = SQLitePool(Path(path), wal=wal, busy_timeout=timeout / 2)
        super().__init__(
            SQLiteSchema(SQLite(Names(table=table, inbox=inbox))),
            self._file,
            namespace=namespace,
            keep_delivered=keep_delivered,
            timeout=timeout,
            **outbox,
        )

    async def open(self) -> bool:
        """Connect, and check SQLite and schema; tell whether the store was closed before."""
        try:
            return await super().open()
        except BaseException:
            # A caller whose opening failed or was cancelled has nothing to close. The thread goes on by itself, maybe
            # waiting for a lock: to wait for it here would hold up the cancellation.
            self._file.disconnect()
            raise

    async def apply_schema(self) -> bool:
        """Create the file and its tables, or bring them up to date; return whether there was anything to do."""
        await self._file.create()
        return await super().apply_schema()

    def disconnect(self) -> None:
        """Close all connections where nothing can be awaited; the next call connects again."""
        self._is_open = False
        closed = self._file.disconnect()
        if closed is not None:
            closed.result()

    @staticmethod
    def create_tables(
        connection: sqlite3.Connection, *, table: str = "postroom_outbox", inbox: str = "postroom_inbox"
    ) -> None:
        """Create the tables through a connection of your own, in its transaction if one is open."""
        from .drivers.sqlite import SQLiteDriver  # noqa: PLC0415 -- loads the C library

        was_in_transaction = connection.in_transaction
        schema = SQLiteSchema(SQLite(Names(table=table, inbox=inbox)))
        finish(SQLiteDriver(is_async=False).run(connection, schema.apply()))
        if connection.in_transaction and not was_in_transaction:
            connection.commit()  # of the transaction that sqlite3 opens by itself before an INSERT


def _connector(driver: Literal["asyncpg", "psycopg"]) -> Callable[..., Connector]:
    if driver == "asyncpg":
        from .drivers.asyncpg import AsyncpgConnector  # noqa: PLC0415 -- an extra

        return AsyncpgConnector
    from .drivers.psycopg import PsycopgConnector  # noqa: PLC0415 -- an extra

    return PsycopgConnector


def _one(statement: Statement) -> Script[Result]:
    return (yield statement)
