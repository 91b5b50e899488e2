"""Two producers at once: who waits for whom, and what the loser learns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiosqlite
import asyncmy
import asyncpg
import pytest
import sqlalchemy

from postroom import AddResult, Outbox
from postroom.stores import MySQLStore, PostgresStore, SQLiteStore
from postroom.stores.sql.dialects.mysql import _LOCKS
from postroom.stores.sql.dialects.postgres import lock_number
from postroom.testing.waiting import until

from .worlds import SQL_SERVERS


class Site(Protocol):
    """A database on which several transactions can be open."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction, and commit or roll it back at its end."""
        ...

    async def waiting(self) -> bool:
        """Tell whether some transaction waits for the lock of another."""
        ...

    async def stored(self, column: str = "topic") -> list[str]:
        """Return a column of all messages, in the order of ``seq``."""
        ...


@dataclass
class Postgres:
    dsn: str

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        connection = await asyncpg.connect(self.dsn)
        try:
            async with connection.transaction():
                yield connection
        finally:
            await connection.close()

    async def _ask(self, sql: str) -> list[Any]:
        connection = await asyncpg.connect(self.dsn)
        try:
            return [row[0] for row in await connection.fetch(sql)]
        finally:
            await connection.close()

    async def waiting(self) -> bool:
        blocked = "cardinality(pg_blocking_pids(pid)) > 0"
        sql = f"SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND {blocked}"
        return bool(await self._ask(sql))

    async def stored(self, column: str = "topic") -> list[str]:
        return await self._ask(f"SELECT {column} FROM postroom_outbox ORDER BY seq")


@dataclass
class MariaDB:
    dsn: str

    def _connect(self) -> Any:  # noqa: ANN401
        url = sqlalchemy.make_url(self.dsn)
        return asyncmy.connect(host=url.host, port=url.port, user=url.username, database=url.database)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        async with self._connect() as connection:
            try:
                yield connection
            except BaseException:
                await connection.rollback()
                raise
            await connection.commit()

    async def _ask(self, sql: str, column: int = 0) -> list[Any]:
        async with self._connect() as connection, connection.cursor() as cursor:
            await cursor.execute(sql)
            return [row[column] for row in await cursor.fetchall()]

    async def waiting(self) -> bool:
        ours = await self._ask("SELECT id FROM information_schema.processlist WHERE db = DATABASE()")
        # Not innodb_trx: its contents stay as they are while anybody asks for them more often than ten times a second.
        [status] = await self._ask("SHOW ENGINE INNODB STATUS", 2)
        blocked = [text for text in status.split("---TRANSACTION") if "LOCK WAIT" in text]
        return any(f"thread id {number}," in text for text in blocked for number in ours)

    async def stored(self, column: str = "topic") -> list[str]:
        return await self._ask(f"SELECT {column} FROM postroom_outbox ORDER BY seq")


@pytest.fixture(params=SQL_SERVERS)
async def site(request: pytest.FixtureRequest) -> Site:
    """A server with the tables of the outbox."""
    dsn: str = request.getfixturevalue(f"{request.param}_dsn")
    store = PostgresStore(dsn) if request.param == "postgres" else MySQLStore(dsn)
    await store.apply_schema()
    await store.close()
    return Postgres(dsn) if request.param == "postgres" else MariaDB(dsn)


class RolledBackError(Exception):
    """What a test ends a transaction with."""


@asynccontextmanager
async def rolled_back() -> AsyncGenerator[None]:
    with pytest.raises(RolledBackError):
        yield


async def add_and_commit(site: Site, outbox: Outbox, **options: Any) -> Any:  # noqa: ANN401
    async with site.transaction() as connection:
        return await outbox.add(connection, options.pop("event", {}), **options)


STRICT = Outbox(strict_order=True)
MANY: list[dict[str, int]] = [{"n": 1}, {"n": 2}]


@pytest.mark.requirement("G6")
@pytest.mark.parametrize("event", [{}, MANY], ids=["one", "many"])
async def test_in_strict_order_a_key_waits_for_the_transaction_that_added_to_it_before(
    site: Site, event: object
) -> None:
    """So that the order of a key is the order of its commits."""
    async with site.transaction() as first:
        await STRICT.add(first, event, topic="t", key="k", type="first")
        second = asyncio.create_task(add_and_commit(site, STRICT, event=event, topic="t", key="k", type="second"))
        await until(site.waiting, "the second transaction waits for the first")
        finished_early = second.done()
    await asyncio.wait_for(second, 20)

    assert not finished_early
    count = len(event) if isinstance(event, list) else 1
    assert await site.stored("type") == ["first"] * count + ["second"] * count


@pytest.mark.requirement("G6")
async def test_in_strict_order_seq_is_commit_order_also_when_the_first_adds_again(site: Site) -> None:
    """Without the lock the second message of the first transaction would come after the other's."""
    async with site.transaction() as first:
        await STRICT.add(first, {}, topic="t", key="k", type="first")
        second = asyncio.create_task(add_and_commit(site, STRICT, topic="t", key="k", type="second"))
        await until(site.waiting, "the second transaction waits for the first")
        await STRICT.add(first, {}, topic="t", key="k", type="first again")
    await asyncio.wait_for(second, 20)

    assert await site.stored("type") == ["first", "first again", "second"]


@pytest.mark.requirement("G6")
async def test_in_strict_order_other_keys_and_no_key_do_not_wait(site: Site) -> None:
    """A busy key holds back itself alone."""
    async with site.transaction() as first:
        await STRICT.add(first, {}, topic="t", key="k")
        await asyncio.wait_for(add_and_commit(site, STRICT, topic="other-key", key="l"), 20)
        await asyncio.wait_for(add_and_commit(site, STRICT, topic="other-topic", key="k"), 20)
        await asyncio.wait_for(add_and_commit(site, STRICT, topic="no-key"), 20)

    assert await site.stored() == ["t", "other-key", "other-topic", "no-key"]


@pytest.mark.requirement("G6")
async def test_without_strict_order_nobody_waits_and_seq_may_differ_from_commit_order(site: Site) -> None:
    """The default, for producers that are serialised by a lock of their own or need no order."""
    async with site.transaction() as first:
        await Outbox().add(first, {}, topic="committed-last", key="k")
        await asyncio.wait_for(add_and_commit(site, Outbox(), topic="committed-first", key="k"), 20)

    assert await site.stored() == ["committed-last", "committed-first"]


@pytest.mark.requirement("G6")
async def test_transactions_that_add_the_same_keys_crosswise_do_not_deadlock(site: Site) -> None:
    """The locks of one add are taken in one order, whatever the order of the messages."""

    async def add(keys: list[str]) -> None:
        messages = [STRICT.prepare({}, topic="t", key=key).message for key in keys]
        for _ in range(5):
            async with site.transaction() as connection:
                await STRICT.add(connection, [STRICT.prepare({}, topic=m.topic, key=m.key).message for m in messages])

    keys = [f"key-{n}" for n in range(8)]
    await asyncio.wait_for(asyncio.gather(add(keys), add(keys[::-1]), add(keys), add(keys[::-1])), 60)

    assert len(await site.stored()) == 4 * 5 * 8


@pytest.mark.requirement("G6")
async def test_an_add_of_several_statements_holds_no_lock_while_it_waits_for_one_that_comes_before(site: Site) -> None:
    """Or two large adds, one the other way round, would each wait for what the other has locked."""
    numbers = {f"key-{n}": lock_number("default", "t", f"key-{n}") for n in range(20)}
    early = min(numbers, key=lambda key: (numbers[key] % _LOCKS, key))
    late = max(numbers, key=lambda key: (numbers[key] % _LOCKS * (numbers[key] > numbers[early]), key))
    # The key whose lock comes first is that of the last message, which has a statement of its own.
    messages = [STRICT.prepare({}, topic="t", key=key).message for key in [late] * 500 + [early]]

    async with site.transaction() as first:
        await STRICT.add(first, {}, topic="t", key=early)
        large = asyncio.create_task(add_and_commit(site, STRICT, event=messages))
        await until(site.waiting, "the large add waits for its last key")
        await asyncio.wait_for(add_and_commit(site, STRICT, topic="t", key=late), 10)
    await asyncio.wait_for(large, 20)

    assert len(await site.stored()) == 503


@pytest.mark.requirement("G6")
async def test_on_sqlite_there_is_one_writer_so_that_seq_is_commit_order(sqlite_path: Path) -> None:
    """The second transaction cannot even begin to write."""
    store = SQLiteStore(sqlite_path)
    await store.apply_schema()
    await store.close()
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(aiosqlite.connect(sqlite_path, timeout=0)) for _ in range(2)]
        await STRICT.add(first, {}, topic="first", key="k")
        with pytest.raises(aiosqlite.OperationalError, match="locked"):
            await STRICT.add(second, {}, topic="second", key="k")
        await first.commit()
        await STRICT.add(second, {}, topic="second", key="k")
        await second.commit()
        found = await second.execute_fetchall("SELECT topic FROM postroom_outbox ORDER BY seq")

    assert [row[0] for row in found] == ["first", "second"]


# -- one dedupe key --------------------------------------------------------------------------------------------


@pytest.mark.requirement("G10", "S2-22", "S2-23", "S2-48")
async def test_the_loser_of_a_race_waits_and_learns_that_it_was_there_already(site: Site) -> None:
    """One row, and both know its id."""
    async with site.transaction() as first:
        winner = await Outbox().add(first, {"n": 1}, topic="t", dedupe_key="k")
        second = asyncio.create_task(add_and_commit(site, Outbox(), topic="t", dedupe_key="k"))
        await until(site.waiting, "the second transaction waits for the first")
        finished_early = second.done()
    loser = await asyncio.wait_for(second, 20)

    assert not finished_early
    assert winner.is_new
    assert loser == AddResult(winner.id, is_new=False)
    assert await site.stored() == ["t"]


@pytest.mark.requirement("G10", "S2-22", "S2-23")
async def test_if_the_first_of_a_race_rolls_back_the_second_is_added(site: Site) -> None:
    """Only what was committed counts as already there."""
    async with rolled_back(), site.transaction() as first:
        await Outbox().add(first, {"n": 1}, topic="t", dedupe_key="k")
        second = asyncio.create_task(add_and_commit(site, Outbox(), topic="t", dedupe_key="k"))
        await until(site.waiting, "the second transaction waits for the first")
        raise RolledBackError
    added = await asyncio.wait_for(second, 20)

    assert added.is_new
    assert await site.stored() == ["t"]


@pytest.mark.requirement("G10", "S2-22", "S2-48")
async def test_in_a_race_of_batches_each_message_is_stored_once(site: Site) -> None:
    """Also where only some of them are there already."""
    outbox = Outbox()

    def batch(*keys: str) -> list[Any]:
        return [outbox.prepare({}, topic=f"topic-{key}", dedupe_key=key).message for key in keys]

    async with site.transaction() as first:
        won = await outbox.add(first, batch("a", "b"))
        second = asyncio.create_task(add_and_commit(site, outbox, event=batch("b", "c")))
        await until(site.waiting, "the second transaction waits for the first")
    lost = await asyncio.wait_for(second, 20)

    assert [item.is_new for item in won] == [True, True]
    assert lost[0] == AddResult(won[1].id, is_new=False)
    assert lost[1].is_new
    assert await site.stored() == ["topic-a", "topic-b", "topic-c"]
