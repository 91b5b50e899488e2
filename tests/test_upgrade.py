"""Tables are brought up to date while they are in use, from every earlier version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from postroom.errors import SchemaVersionError, StoreContentionError
from postroom.message import Message
from postroom.outbox import Outbox
from postroom.store import ClaimTerms, Delivered, Settlement
from postroom.stores import PostgresStore, SQLiteStore
from postroom.stores.sql import schema, upgrade
from postroom.stores.sql.schema import Change, Schema
from postroom.stores.sql.statement import Script, Statement
from postroom.stores.sql.store import SQLStore
from postroom.testing.waiting import until
from tests.rooms import (
    EARLIER,
    ROOMS,
    Connection,
    PostgresRoom,
    Room,
    SQLiteRoom,
    applied,
    differences,
    earlier,
)

T = TypeVar("T")

TERMS = ClaimTerms(worker=Message(topic="t", payload=b"").id)
PATIENCE = timedelta(minutes=1)


@pytest.fixture(params=ROOMS)
def room(request: pytest.FixtureRequest) -> Room:
    kind, fixture = ROOMS[request.param]
    return kind(str(request.getfixturevalue(fixture)))


@pytest.fixture(params=["postgres", "mariadb"])
def served(request: pytest.FixtureRequest) -> Room:
    kind, fixture = ROOMS[request.param]
    return kind(str(request.getfixturevalue(fixture)))


@pytest.fixture
def postgres(postgres_dsn: str) -> PostgresRoom:
    return PostgresRoom(postgres_dsn)


@contextmanager
def transaction(room: Room) -> Iterator[Connection]:
    with closing(room.connect()) as connection:
        connection.cursor().execute("BEGIN")
        yield connection
        connection.cursor().execute("COMMIT")


def added(room: Room, count: int = 1) -> None:
    with transaction(room) as connection:
        for number in range(count):
            Outbox().add(connection, Message(topic="t", payload=b"{}", key=(None, "k")[number % 2]))


def shapes(tables: Schema) -> Script[tuple[dict[str, str], dict[str, str]]]:
    """Return every part of the tables with its definition: as they are, and as they would be if they were new."""
    found: dict[str, str] = {}
    wanted: dict[str, str] = {}
    for group in tables.ddl:
        found |= yield from tables.describe(group)
        wanted |= yield from tables.wanted(group)
    return found, wanted


async def asked(store: SQLStore, script: Script[T], *, atomic: bool = True) -> T:
    """Run a script on a connection of the store's own."""
    return await store._pool.run(script, atomic=atomic, timeout=PATIENCE)  # noqa: SLF001


# -- the same in the end -----------------------------------------------------------------------------------------


def test_every_earlier_version_is_kept_for_tests() -> None:
    assert tuple(schema.EARLIER) == EARLIER, "keep what `postroom schema print` printed before the step"


@pytest.mark.requirement("S1-04", "S1-10")
@pytest.mark.parametrize("version", EARLIER)
async def test_an_upgraded_schema_is_the_same_as_a_new_one_and_keeps_its_messages(room: Room, version: str) -> None:
    """Whatever the database was created with, on request only; until then the store says what to do."""
    earlier(room, version)
    added(room, 3)
    store = room.store()
    with pytest.raises(SchemaVersionError) as caught:
        await store.open()
    outdated = await store.check_schema()

    mended = [await store.apply_schema(), await store.apply_schema()]

    assert str(caught.value) == (
        f"the schema of postroom_outbox has version {version}, version 3.1 is needed; run `postroom schema apply`"
    )
    assert outdated[0] == f"version is {version}, should be 3.1; run `postroom schema apply`"
    assert mended == [True, False]
    assert await store.check_schema() == []
    await store.open()
    claims = [*await store.claim(10, TERMS), *await store.claim(10, TERMS)]
    await store.settle([Settlement(claim, Delivered()) for claim in claims])
    assert (await store.stats()).delivered == 3
    found, wanted = await asked(store, shapes(store.schema))
    assert found == wanted
    await store.close()


@pytest.mark.requirement("S1-09")
@pytest.mark.parametrize("version", EARLIER)
async def test_the_printed_upgrade_makes_the_same_schema_on_a_plain_connection(room: Room, version: str) -> None:
    """For migrations of one's own, statement by statement: no transaction can build an index concurrently."""
    earlier(room, version)
    added(room)

    room.run(*room.store().schema.upgrade(schema.EARLIER[version]))

    assert await differences(room) == []
    assert await applied(room) is False


async def test_tables_are_upgraded_through_a_connection_of_the_application(sqlite_path: Path) -> None:
    """In its transaction, so that a roll-back leaves the tables as they were."""
    room = SQLiteRoom(str(sqlite_path))
    earlier(room, "3")
    before = room.everything()
    with closing(room.connect()) as connection:
        connection.execute("BEGIN")
        SQLiteStore.create_tables(connection)
        connection.execute("ROLLBACK")
        rolled_back = room.everything()

        SQLiteStore.create_tables(connection)

    assert rolled_back == before
    assert await differences(room) == []


async def test_a_schema_that_is_newer_by_additions_is_accepted_and_stays_as_it_is(room: Room) -> None:
    """An older release runs, restarts, checks and applies on tables of a later one."""
    await applied(room)
    quote = room.quote
    room.run(
        f"UPDATE {quote}postroom_outbox_version{quote} SET step = 7",
        f"ALTER TABLE {quote}postroom_outbox{quote} ADD later_addition INT",
    )
    before = room.everything()
    store = room.store()

    assert await store.open() is True
    assert await store.check_schema() == []
    assert await store.apply_schema() is False
    added(room)
    assert len(await store.claim(10, TERMS)) == 1
    await store.close()
    assert room.everything() == before
    assert room.run("SELECT max(step) FROM postroom_outbox_version")[0][0] == 7


# -- while it is in use ------------------------------------------------------------------------------------------


@contextmanager
def attempts_of(tables: Schema, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Write down which part is tried to be added, each time."""
    tried: list[str] = []
    make = tables.make

    def counted(change: Change, *, wait: timedelta = timedelta(0)) -> Script[None]:
        tried.append(tables.part(change))
        return make(change, wait=wait)

    with monkeypatch.context() as patched:
        patched.setattr(tables, "make", counted)
        yield tried


@pytest.mark.requirement("S1-10")
async def test_an_upgrade_makes_way_for_transactions_that_are_open(
    served: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind an upgrade that waited for them, every producer would wait as well, or deadlock."""
    earlier(served, "3")
    store = served.store()
    with attempts_of(store.schema, monkeypatch) as tried, transaction(served) as connection:
        connection.cursor().execute("SELECT count(*) FROM postroom_outbox")
        upgrading = asyncio.create_task(store.apply_schema())
        await until(lambda: tried.count("column destination") >= 3, "the third attempt", within=PATIENCE)

        async with asyncio.timeout(PATIENCE.total_seconds()):
            await asyncio.to_thread(added, served)  # by another connection
        Outbox().add(connection, Message(topic="t", payload=b"{}"))  # by the one that has read

        assert not upgrading.done()
    assert await upgrading is True
    assert await store.check_schema() == []
    assert len(await store.claim(10, TERMS)) == 2
    await store.close()


async def test_an_upgrade_that_never_gets_its_table_says_what_is_in_its_way(
    served: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier(served, "3")
    monkeypatch.setattr(upgrade, "GIVE_UP_AFTER", timedelta(0))
    store = served.store()
    with transaction(served) as connection:
        connection.cursor().execute("SELECT count(*) FROM postroom_outbox")

        with pytest.raises(StoreContentionError, match="column destination was not added to postroom_outbox: other"):
            await store.apply_schema()

    await store.close()


@pytest.mark.requirement("S1-10")
@pytest.mark.parametrize("version", [*(pytest.param(v, marks=pytest.mark.prove) for v in EARLIER[:-1]), EARLIER[-1]])
async def test_upgrades_at_once_all_succeed(room: Room, version: str) -> None:
    """Replicas that start together may all upgrade."""
    earlier(room, version)
    added(room, 3)

    told = await asyncio.gather(*(applied(room) for _ in range(4)))

    assert any(told)
    assert await differences(room) == []
    assert await applied(room) is False


async def test_an_index_that_was_left_half_made_is_made_again(postgres: PostgresRoom) -> None:
    """What was killed while it built an index concurrently leaves one that no query uses."""
    await applied(postgres)
    added(postgres)
    postgres.run(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'postroom_outbox_parked'::regclass",
        "UPDATE postroom_outbox_version SET step = NULL",
    )

    assert await applied(postgres) is True

    assert await differences(postgres) == []


async def test_psycopg_upgrades_as_asyncpg_does(postgres: PostgresRoom) -> None:
    earlier(postgres, "3")
    store = PostgresStore(postgres.where, driver="psycopg")

    mended = await store.apply_schema()

    assert mended is True
    assert await store.check_schema() == []
    await store.close()


async def test_an_index_is_built_while_a_long_transaction_writes(postgres: PostgresRoom) -> None:
    """It waits for the transaction, and nobody waits for it."""
    await applied(postgres)
    postgres.run("DROP INDEX postroom_outbox_parked", "UPDATE postroom_outbox_version SET step = NULL")
    store = postgres.store()
    building = (
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX CONCURRENTLY%' AND state = 'active'"
    )
    with transaction(postgres) as connection:
        Outbox().add(connection, Message(topic="t", payload=b"{}"))
        upgrading = asyncio.create_task(store.apply_schema())
        await until(lambda: postgres.run(building)[0][0] > 0, "the build", within=PATIENCE)

        await asyncio.to_thread(added, postgres)
        claimed = await store.claim(10, TERMS)
        await store.settle([Settlement(claim, Delivered()) for claim in claimed])

        assert len(claimed) == 1
        assert not upgrading.done()
    assert await upgrading is True
    assert await store.check_schema() == []
    limit = await asked(store, shown("SHOW statement_timeout"), atomic=False)
    await store.close()
    assert limit == "20s"


@pytest.mark.parametrize("index", ["postroom_outbox_ready", "postroom_outbox_dedupe"])
async def test_an_index_that_was_dropped_is_built_again_while_others_write(postgres: PostgresRoom, index: str) -> None:
    """Every producer would wait behind one that locks its table, for as long as the oldest transaction is open."""
    await applied(postgres)
    postgres.run(f"DROP INDEX {index}")
    store = postgres.store()
    building = (
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%INDEX CONCURRENTLY%' AND wait_event_type = 'Lock'"
    )
    with transaction(postgres) as connection:
        Outbox().add(connection, Message(topic="t", payload=b"{}"))
        mending = asyncio.create_task(store.apply_schema())
        await until(lambda: postgres.run(building)[0][0] > 0, "the build", within=PATIENCE)

        async with asyncio.timeout(PATIENCE.total_seconds()):
            await asyncio.to_thread(added, postgres)

        assert not mending.done()
    assert await mending is True
    assert await store.check_schema() == []
    assert await store.apply_schema() is False
    await store.close()


def shown(text: str) -> Script[object]:
    return (yield Statement(text, {}, returns=True)).rows[0][0]
