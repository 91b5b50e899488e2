"""The consumer of the crash matrix: it takes from the post, and each message inserts a row and leads to two outputs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import UUID

from postroom import Consumer, Message, Router, Transaction, current_transaction, transactional
from postroom.dead_letters import StoredDeadLetters
from postroom.errors import RejectError
from postroom.stores import SQLStore, store_from_url
from postroom.testing import failpoints
from postroom.testing.failpoints import Action, Failpoints
from postroom.testing.taps import TappedDeadLetters, TappedHandlers, TappedPool, TappedSubscriber

from .post import Reader
from .worker import Arm, Faults, Journal, Orders, commit_once, proxied

__all__ = ["POISON", "QUIET", "consume"]

#: What no handler can handle, and what leads to no outputs.
POISON = b'"poison"'
QUIET = b'"quiet"'
#: How long PostgreSQL and SQLite wait for a lock when they are impatient; MariaDB cannot wait for less than a second.
IMPATIENCE = timedelta(milliseconds=100)
#: Fails at COMMIT, and not before.
DEFERRED = """
    CREATE TEMP TABLE only_once (id integer UNIQUE DEFERRABLE INITIALLY DEFERRED) ON COMMIT DROP;
    INSERT INTO only_once VALUES (1), (1)
    """


async def execute(transaction: Transaction, sql: str) -> None:
    """Run a statement in the transaction of a handler."""
    connection = transaction.connection
    if isinstance(connection, sqlite3.Connection):
        await transaction.call(connection.execute, sql)
    elif hasattr(connection, "get_server_pid"):
        await connection.execute(sql)
    else:
        async with connection.cursor() as cursor:
            await cursor.execute(sql)


def session(transaction: Transaction) -> int:
    """Return the number by which the server knows the session; SQLite has no server."""
    connection = transaction.connection
    if isinstance(connection, sqlite3.Connection):
        return 0
    number: int = connection.get_server_pid() if hasattr(connection, "get_server_pid") else connection.thread_id()
    return number


class ReceivingFaults(Faults):
    """What goes wrong in a consumer alone."""

    def cancel_here(self, _: Arm) -> Action:
        """Cancel the task that handles the message, right at the point."""
        cancel = failpoints.cancel()

        async def act() -> None:
            cancel()
            await asyncio.sleep(0)

        return act

    def conflict(self, arm: Arm) -> Action:
        """Have the server say that other transactions stand in the way."""
        return self._running(
            f"DO $$ BEGIN RAISE EXCEPTION 'made to fail' USING ERRCODE = '{arm.what}'; END $$"
            if self._orders.url.startswith("postgres")
            else f"SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = {arm.what}"
        )

    def swallow(self, _: Arm) -> Action:
        """Let a statement fail, and say nothing about it."""
        run = self._running("SELECT * FROM there_is_no_such_table")

        async def act() -> None:
            with contextlib.suppress(Exception):
                await run()

        return act

    def defer(self, _: Arm) -> Action:
        """Break a rule that is checked at COMMIT."""
        return self._running(DEFERRED)

    def _running(self, sql: str) -> Callable[[], Awaitable[None]]:
        async def act() -> None:
            await execute(current_transaction(), sql)

        return act


@asynccontextmanager
async def pool_for(store: SQLStore, orders: Orders, url: str) -> AsyncGenerator[object]:
    """Yield where transactions are opened: on the store, or on a pool whose sessions do not wait long for a lock."""
    if not orders.is_impatient:
        yield store
    elif url.startswith("sqlite"):
        with contextlib.closing(
            sqlite3.connect(
                url.removeprefix("sqlite:///"),
                timeout=IMPATIENCE.total_seconds(),
                isolation_level=None,
                check_same_thread=False,
            )
        ) as connection:
            yield connection
    elif url.startswith("postgres"):
        import asyncpg  # noqa: PLC0415 -- most workers need none of these

        settings = {"lock_timeout": str(IMPATIENCE // timedelta(milliseconds=1))}
        async with asyncpg.create_pool(url, min_size=0, max_size=2, server_settings=settings) as pool:
            yield pool
    else:
        import asyncmy  # noqa: PLC0415

        place = urlsplit(url)
        async with asyncmy.create_pool(
            host=place.hostname,
            port=place.port,
            user=unquote(place.username or "root"),
            password=unquote(place.password or ""),
            database=place.path[1:],
            init_command="SET innodb_lock_wait_timeout = 1",
            minsize=0,
        ) as pool:
            yield pool


def routed(orders: Orders, journal: Journal) -> Router:
    """Return the handler: it has an effect, says so, and returns two messages."""
    router = Router()

    @router.on("crash")
    async def handle(message: Message, transaction: Transaction) -> list[Message]:
        await execute(
            transaction,
            f"INSERT INTO crash_business (namespace, id) VALUES ('{orders.namespace}', '{message.id}')",
        )
        journal.write("handled", id=message.id, attempt=message.attempt, session=session(transaction))
        if message.payload == POISON:
            raise RejectError("poison")
        if message.payload == QUIET:
            return []
        return [Message(topic="out", type="done", payload=b"%d" % number, key="a") for number in range(2)]

    return router


async def consume(orders: Orders, journal: Journal, worker: UUID) -> None:
    """Handle messages until told to stop."""
    points = Failpoints()
    async with proxied(orders) as (url, proxy):
        store = store_from_url(url, namespace=orders.namespace, timeout=timedelta(seconds=5))
        assert isinstance(store, SQLStore)
        await store.open()
        async with pool_for(store, orders, url) as pool:
            letters = StoredDeadLetters(store.inbox(orders.namespace), store.transactions())
            consumer = Consumer(
                TappedSubscriber(Reader(Path(orders.post), orders.name, takes_after=orders.takes_after), points),
                routed(orders, journal),
                transactional(
                    store,
                    consumer=orders.namespace,
                    pool=TappedPool(pool, points),
                    mode=orders.mode,
                    dead_letters=TappedDeadLetters(letters, points),
                    listener=journal.listen,
                ),
                TappedHandlers(points),
                timeout=timedelta(seconds=orders.handle_timeout),
                backoff=lambda _: timedelta(milliseconds=20),
                listener=journal.listen,
            )
            if not orders.is_cold:
                await commit_once(pool)
            ReceivingFaults(orders, points, proxy, worker).arm(journal)
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop_soon)
            try:
                await consumer.run()
            except RuntimeError as error:  # a subscriber that was made to fail
                journal.write("ended", error=str(error))
        await store.close()
