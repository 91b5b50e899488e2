"""What SQL stores promise besides the contract: SQLite among processes, hints of PostgreSQL, codes and versions."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pymysql
import pytest

from postroom.errors import (
    ConfigurationError,
    ReadOnlyStoreError,
    SchemaMissingError,
    StoreAuthenticationError,
    StoreContentionError,
    StoreError,
    StorePermissionError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnknownURLError,
    UnsupportedDatabaseError,
)
from postroom.message import Message
from postroom.outbox import Outbox
from postroom.store import ClaimTerms, Dead, Outcome, Retry, Settlement
from postroom.stores import MySQLStore, PostgresStore, SQLiteStore
from postroom.stores.sql.dialect import Dialect, Server
from postroom.stores.sql.dialects.mysql import MySQL, parse_version
from postroom.stores.sql.dialects.postgres import PostgreSQL
from postroom.stores.sql.dialects.sqlite import SQLite
from postroom.stores.sql.errors import mysql_error, postgres_error, sqlite_error
from postroom.stores.sql.names import Names
from postroom.stores.sql.sqlite_pool import SQLitePool
from postroom.stores.sql.statement import Row, Script, Statement
from postroom.stores.sql.url import Place
from postroom.testing.cancelling import Moment, cuts
from postroom.testing.faults import FaultProxy
from postroom.testing.waiting import until
from postroom.text import MAX_ERROR
from tests.rooms import SQLiteRoom

from .worlds import POSTGRES_DRIVERS

TERMS = ClaimTerms(worker=uuid4())


def ask(text: str) -> Script[object]:
    answer = yield Statement(text, {}, returns=True)
    return answer.rows[0][0]


def fill(path: Path, count: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        SQLiteStore.create_tables(connection)
        Outbox().add(connection, [Message(topic="t", payload=b"{}") for _ in range(count)])
        connection.commit()


# -- MySQL -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("G11")
async def test_a_claim_that_is_the_victim_of_a_deadlock_is_repeated(
    mariadb_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims at the same time update the same index; the server has rolled back one of them."""
    store = MySQLStore(mariadb_dsn)
    await store.apply_schema()
    url = urlsplit(mariadb_dsn)
    with closing(
        pymysql.connect(host=url.hostname, port=url.port or 0, user="root", database=url.path[1:])
    ) as connection:
        Outbox().add(connection, Message(topic="t", payload=b"{}"))
        connection.commit()
    claim, victims = MySQL.claim_loose, 2

    def deadlocked(self: MySQL, namespace: str, limit: int, terms: ClaimTerms) -> Script[Sequence[Row]]:
        nonlocal victims
        claimed = yield from claim(self, namespace, limit, terms)
        if victims:
            victims -= 1
            yield Statement("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'Deadlock found'", {})
        return claimed

    monkeypatch.setattr(MySQL, "claim_loose", deadlocked)

    [claimed] = await store.claim(1, TERMS)

    assert (claimed.message.attempt, victims) == (1, 0)
    await store.close()


# -- SQLite ----------------------------------------------------------------------------------------------------------

CLAIMER = """
import asyncio, json, sys
from datetime import timedelta
from uuid import uuid4
from postroom.store import ClaimTerms, Delivered, Settlement
from postroom.stores import SQLiteStore

async def main() -> None:
    # Locks of SQLite are not fair: where the disk is slow, one process may be passed over for long.
    store = SQLiteStore(sys.argv[1], timeout=timedelta(seconds=60))
    terms, mine = ClaimTerms(worker=uuid4()), []
    await store.open()
    print("ready", flush=True)
    sys.stdin.readline()
    while claims := await store.claim(3, terms):
        mine += [str(claim.message.id) for claim in claims]
        assert await store.settle([Settlement(claim, Delivered()) for claim in claims]) == []
    await store.close()
    print(json.dumps(mine))

asyncio.run(main())
"""


@pytest.mark.requirement("G4", "S2-32", "S2-49")
def test_processes_that_claim_from_one_sqlite_file_share_it_without_any_being_locked_out(sqlite_path: Path) -> None:
    """Every writer waits for its turn, and no message is claimed twice."""
    fill(sqlite_path, 240)
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", CLAIMER, sqlite_path], stdin=pipe, stdout=pipe, stderr=pipe, text=True
                )
            )
            for _ in range(6)
        ]
        for process in processes:
            assert process.stdout
            process.stdout.readline()
        for process in processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [process.communicate(timeout=60) for process in processes]

    assert [error for _, error in told if error] == []
    claimed = Counter(identity for answer, _ in told for identity in json.loads(answer))
    assert len(claimed) == 240
    assert set(claimed.values()) == {1}


@pytest.mark.requirement("G4", "S2-32")
async def test_stores_of_one_process_claim_from_one_sqlite_file_at_once(sqlite_path: Path) -> None:
    """Also from several threads, which is what each store has one of."""
    fill(sqlite_path, 200)
    stores = [SQLiteStore(sqlite_path, timeout=timedelta(seconds=60)) for _ in range(8)]

    batches = await asyncio.gather(*(store.claim(5, TERMS) for _ in range(5) for store in stores))
    for store in stores:
        await store.close()

    identities = [claim.message.id for batch in batches for claim in batch]
    assert len(identities) == len(set(identities)) == 200


async def test_a_sqlite_commit_survives_the_loss_of_power(sqlite_path: Path) -> None:
    """The log is written ahead, and flushed at every commit."""
    fill(sqlite_path, 1)
    pool = SQLitePool(sqlite_path)

    journal = await pool.run(ask("PRAGMA journal_mode"), timeout=timedelta(seconds=5))
    flushed = await pool.run(ask("PRAGMA synchronous"), timeout=timedelta(seconds=5))
    await pool.close()

    assert (journal, flushed) == ("wal", 2)


@pytest.mark.requirement("G11")
async def test_a_sqlite_file_that_stays_locked_is_contention_within_the_timeout(sqlite_path: Path) -> None:
    """A writer that never ends keeps nobody waiting for ever."""
    fill(sqlite_path, 1)
    store = SQLiteStore(sqlite_path, timeout=timedelta(seconds=6))
    await store.open()
    with closing(sqlite3.connect(sqlite_path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with asyncio.timeout(12):
            with pytest.raises(StoreContentionError, match="database is locked"):
                await store.claim(1, TERMS)
        other.execute("ROLLBACK")

    assert len(await store.claim(1, TERMS)) == 1
    await store.close()


SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) SELECT count(*) FROM n"


async def test_a_slow_sqlite_statement_is_interrupted_by_its_own_timeout_alone(sqlite_path: Path) -> None:
    """One that waits behind it and gives up does not take it along."""
    fill(sqlite_path, 1)
    pool = SQLitePool(sqlite_path)
    brief, long = timedelta(milliseconds=50), timedelta(minutes=5)

    slow = asyncio.create_task(pool.run(ask(SLOW.format(3_000_000)), timeout=long))
    await asyncio.sleep(0)
    with pytest.raises(StoreTimeoutError):
        await pool.run(ask("SELECT 1"), timeout=brief)
    assert not slow.done()
    assert await slow == 3_000_000

    with pytest.raises(StoreTimeoutError, match=r"did not answer within 0\.05 s"):
        await pool.run(ask(SLOW.format(10**12)), timeout=brief)
    assert await pool.run(ask("SELECT 1"), timeout=long) == 1
    await pool.close()


class Interruption(BaseException):
    """As KeyboardInterrupt is: no Exception."""


async def test_a_sqlite_script_that_is_interrupted_leaves_no_transaction(sqlite_path: Path) -> None:
    """The next one could not begin."""
    pool = SQLitePool(sqlite_path)
    fill(sqlite_path, 1)

    def interrupted() -> Script[None]:
        yield Statement("SELECT 1", {}, returns=True)
        raise Interruption

    with pytest.raises(Interruption):
        await pool.run(interrupted(), timeout=timedelta(seconds=5))

    assert await pool.run(ask("SELECT 1"), timeout=timedelta(seconds=5)) == 1
    await pool.close()


@pytest.mark.requirement("G4", "G11")
async def test_a_cancelled_sqlite_call_happens_whole_or_not_at_all(sqlite_path: Path) -> None:
    """The store can be used on, and every message is still claimed once."""
    fill(sqlite_path, 100)
    store = SQLiteStore(sqlite_path)
    await store.open()
    for number in range(50):
        call = asyncio.create_task(store.claim(1, TERMS))
        await asyncio.sleep(0.0002 * (number % 5))
        call.cancel()
        await asyncio.wait({call})
    rest = await store.claim(100, TERMS)
    await store.close()

    with closing(sqlite3.connect(sqlite_path)) as connection:
        rows = connection.execute("SELECT status, attempts FROM postroom_outbox").fetchall()
    assert set(rows) == {("processing", 1)}
    assert 50 <= len(rest) <= 100


def threads_of_stores() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("postroom-sqlite")}


@asynccontextmanager
async def leaving_the_file_closed(path: Path) -> AsyncIterator[None]:
    """See that no thread and no connection is left; SQLite deletes its log when the last connection is closed."""
    others = threads_of_stores()
    yield
    await until(lambda: threads_of_stores() <= others, "the end of the thread")
    assert not path.with_name(f"{path.name}-wal").exists()


@pytest.mark.requirement("S4-12")
async def test_a_cancelled_opening_of_a_sqlite_file_closes_it_without_waiting_for_its_thread(sqlite_path: Path) -> None:
    """The thread waits for a lock, and the caller, who has nothing to close, does not wait for the thread."""
    fill(sqlite_path, 1)
    store = SQLiteStore(sqlite_path, timeout=timedelta(minutes=10))
    async with leaving_the_file_closed(sqlite_path):
        with closing(sqlite3.connect(sqlite_path, isolation_level=None)) as other:
            others = threads_of_stores()
            other.execute("BEGIN IMMEDIATE")
            opening = asyncio.create_task(store.open())
            await until(lambda: threads_of_stores() > others, "the start of the thread")

            opening.cancel()

            with pytest.raises(asyncio.CancelledError):
                async with asyncio.timeout(20):
                    await opening
            other.execute("ROLLBACK")

    assert await store.open()
    await store.close()


@pytest.mark.requirement("S4-12")
async def test_a_sqlite_file_is_closed_whenever_its_opening_is_cancelled(sqlite_path: Path) -> None:
    """Before the thread begins, while it connects, and when it is done."""
    fill(sqlite_path, 1)
    moments: tuple[Moment, ...] = ("waiting", "answered")
    for moment in moments:
        for cut in cuts(moment=moment):
            store = SQLiteStore(sqlite_path)
            async with leaving_the_file_closed(sqlite_path):
                await cut.run(store.open())
                if not cut.happened:
                    await store.close()


@pytest.mark.requirement("S4-12")
async def test_a_sqlite_file_whose_opening_fails_is_closed(sqlite_path: Path) -> None:
    """It has no tables, so that there is nothing to work with."""
    with closing(sqlite3.connect(sqlite_path)) as connection:
        connection.execute("CREATE TABLE other (id int)")
    store = SQLiteStore(sqlite_path)
    async with leaving_the_file_closed(sqlite_path):
        with pytest.raises(SchemaMissingError):
            await store.open()


FORK = """
import asyncio, os, sys
from uuid import uuid4
from postroom.store import ClaimTerms, Dead, Outcome, Retry, Settlement
from postroom.stores import SQLiteStore

store, terms = SQLiteStore(sys.argv[1]), ClaimTerms(worker=uuid4())

def claim():
    return len(asyncio.new_event_loop().run_until_complete(store.claim(1, terms)))

counts = [claim()]
child = os.fork()
if child == 0:
    os._exit(10 + claim())
counts.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 10)
counts.append(claim())
print(counts, flush=True)
os._exit(0)
"""


def test_a_forked_child_opens_the_sqlite_file_itself(sqlite_path: Path) -> None:
    """SQLite must not be carried over a fork, and its thread is not."""
    fill(sqlite_path, 5)

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, sqlite_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stdout.strip() == "[1, 1, 1]", done.stderr


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (lambda path: path.write_bytes(b"no database at all" * 100), StoreUnavailableError, "not a database"),
        (lambda path: path.mkdir(), StoreUnavailableError, "unable to open database file"),
    ],
)
async def test_a_damaged_sqlite_file_is_told_as_such(sqlite_path: Path, damage: object, kind: type, words: str) -> None:
    """With its path, and as an error of ours."""
    assert callable(damage)
    damage(sqlite_path)
    store = SQLiteStore(sqlite_path)

    with pytest.raises(kind, match=words) as caught:
        await store.open()

    await store.close()
    assert str(sqlite_path) in str(caught.value)


async def test_a_sqlite_store_says_that_its_folder_is_missing(tmp_path: Path) -> None:
    """It makes the file, and not the folder."""
    store = SQLiteStore(tmp_path / "no" / "such.sqlite3")

    with pytest.raises(StoreUnavailableError, match="is not a directory; create it first"):
        await store.open()

    await store.close()


async def _begin(store: SQLiteStore) -> None:
    async with store.transactions().begin():
        pass


CALLS: dict[str, Callable[[SQLiteStore], Awaitable[object]]] = {
    "open": SQLiteStore.open,
    "stats": SQLiteStore.stats,
    "check_schema": SQLiteStore.check_schema,
    "claim": lambda store: store.claim(1, TERMS),
    "sweep": lambda store: store.sweep(TERMS),
    "purge": lambda store: store.purge(older_than=timedelta(0)),
    "begin": _begin,
}


@pytest.mark.parametrize("call", CALLS)
async def test_no_call_creates_a_sqlite_file_that_is_missing(tmp_path: Path, call: str) -> None:
    """A mistyped name is an error that names it, not an empty file."""
    path = tmp_path / "shpo.sqlite3"
    store = SQLiteStore(path)

    with pytest.raises(SchemaMissingError) as caught:
        await CALLS[call](store)

    await store.close()
    assert str(caught.value) == (
        f"{path} does not exist; run `postroom schema apply` or call `SQLiteStore.apply_schema` to create it"
    )
    assert os.listdir(tmp_path) == []  # noqa: PTH208 -- whose like is not for coroutines


@pytest.mark.parametrize("name", ["50% off?.db", "a#b.db", "mode=ro&x.db", "ä b.db", "file:x.db"])
@pytest.mark.parametrize("wal", [True, False])
async def test_apply_creates_a_sqlite_file_of_any_name(tmp_path: Path, name: str, *, wal: bool) -> None:
    """A name is never read as an option of SQLite."""
    store = SQLiteStore(tmp_path / name, wal=wal)

    assert await store.apply_schema() is True
    assert (await store.stats()).pending == 0

    await store.close()
    assert os.listdir(tmp_path) == [name]  # noqa: PTH208 -- whose like is not for coroutines


async def test_a_sqlite_file_that_cannot_be_created_is_reported_with_its_path(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "missing" / "shop.sqlite3")

    with pytest.raises(StoreUnavailableError, match=r"missing.shop\.sqlite3 cannot be created: No such file"):
        await store.apply_schema()

    await store.close()


# -- hints of PostgreSQL -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def hinting(dsn: str, driver: Literal["asyncpg", "psycopg"]) -> AsyncIterator[tuple[PostgresStore, list[str]]]:
    """Yield an open store, and a list that grows with every notification the server sends."""
    store = PostgresStore(dsn, driver=driver)
    await store.apply_schema()
    await store.open()
    heard: list[str] = []
    listener = await asyncpg.connect(dsn)
    channel = store.schema.dialect.channel(store.namespace)
    await listener.add_listener(channel, lambda *_: heard.append("hint"))
    try:
        yield store, heard
    finally:
        await listener.close()
        await store.close()


@pytest.fixture(params=POSTGRES_DRIVERS)
def driver(request: pytest.FixtureRequest) -> Literal["asyncpg", "psycopg"]:
    name: Literal["asyncpg", "psycopg"] = request.param
    return name


@pytest.mark.requirement("G11")
async def test_a_hundred_hints_at_once_are_one_notification(
    postgres_dsn: str, driver: Literal["asyncpg", "psycopg"]
) -> None:
    """NOTIFY takes a lock that all commits share, so hints are gathered."""
    async with hinting(postgres_dsn, driver) as (store, heard):
        for _ in range(100):
            store.notify()
        await until(lambda: bool(heard), "the hint arrives")
        # Another one comes after all that were sent before it.
        store.notify()
        await until(lambda: len(heard) >= 2, "the next hint arrives")

        assert len(heard) == 2


async def test_hints_may_come_from_other_threads(postgres_dsn: str, driver: Literal["asyncpg", "psycopg"]) -> None:
    """A sync producer commits on a thread of its own."""
    async with hinting(postgres_dsn, driver) as (store, heard):
        threads = [threading.Thread(target=store.notify) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)

        await until(lambda: bool(heard), "the hint arrives")

        assert len(heard) <= 20


async def test_a_store_that_is_opened_again_sends_hints_again(postgres_dsn: str) -> None:
    """A hint that was dropped at close does not stand for those that come later."""
    store = PostgresStore(postgres_dsn)
    await store.apply_schema()
    await store.open()
    woken = asyncio.Event()

    store.notify()
    await store.close()
    await store.open()
    listening = asyncio.create_task(store.listen(woken.set))
    await asyncio.wait_for(woken.wait(), 10)  # it begins with a wake-up
    woken.clear()
    store.notify()

    await asyncio.wait_for(woken.wait(), 10)
    listening.cancel()
    await asyncio.wait({listening})
    await store.close()


@pytest.mark.requirement("G2")
@pytest.mark.parametrize("text", ["abc", "0x" + "0" * 30, "0" * 31 + "_", " " + "0" * 31, "0" * 33])
def test_a_text_that_is_no_id_is_not_taken_for_one(text: str) -> None:
    """Published under an invented id, a row could never be settled."""
    with pytest.raises(ValueError, match=r"no id|non-hexadecimal"):
        SQLite(Names()).to_uuid(text)


@pytest.mark.requirement("G2")
@pytest.mark.parametrize("trickling", ["with a key", "without one"])
async def test_a_trickle_of_messages_starves_no_others(postgres_dsn: str, trickling: str) -> None:
    """Every claim finds something new of the one kind, and still the other kind has its turn."""
    store = PostgresStore(postgres_dsn)
    await store.apply_schema()
    await store.open()
    connection = await asyncpg.connect(postgres_dsn)
    outbox, keyed = Outbox(), trickling == "with a key"
    waiting = await outbox.add(connection, {}, topic="t", key=None if keyed else "k", outside_transaction=True)

    claimed: list[object] = []
    for number in range(6):
        key = f"k{number}" if keyed else None
        await outbox.add(connection, {}, topic="t", key=key, outside_transaction=True)
        claimed += [claim.message.id for claim in await store.claim(10, TERMS)]

    await connection.close()
    await store.close()
    assert waiting.id in claimed


@pytest.mark.requirement("G11")
async def test_a_hint_before_open_is_a_warning_once_and_after_close_is_dropped(
    postgres_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing connects again behind the back of a store that was closed."""
    store = PostgresStore(postgres_dsn)
    for _ in range(3):
        store.notify()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "call `await store.open()`" in caplog.text
    assert caplog.records[0].exc_info is None
    await store.apply_schema()
    await store.open()
    store.notify()
    await asyncio.sleep(0)

    await store.close()
    store.notify()
    await asyncio.sleep(0.05)

    connection = await asyncpg.connect(postgres_dsn)
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"

    async def is_alone() -> bool:
        return bool(await connection.fetchval(sessions) == 0)

    await until(is_alone, "all sessions end")
    await connection.close()


async def test_listening_wakes_at_every_hint_and_ends_with_an_error_when_it_is_cut(
    postgres_dsn: str, driver: Literal["asyncpg", "psycopg"]
) -> None:
    """Whoever listens learns that it is over, and may begin again."""
    url = urlsplit(postgres_dsn)
    async with FaultProxy("127.0.0.1", url.port or 0) as proxy:
        through = url._replace(netloc=f"{url.username}@127.0.0.1:{proxy.port}").geturl()
        store = PostgresStore(through, driver=driver)
        await store.apply_schema()
        await store.open()
        for _ in range(2):
            woken: list[str] = []
            listening = asyncio.create_task(store.listen(partial(woken.append, "hint")))
            await until(partial(bool, woken), "it wakes at the beginning, for what came before")

            # A hint on a connection that was cut is lost, so it is given until it arrives.
            await until(partial(_hinted, store, woken), "it wakes at a hint", every=timedelta(milliseconds=50))
            proxy.cut()

            with pytest.raises(StoreUnavailableError):
                await listening
        await store.close()


def _hinted(store: PostgresStore, woken: list[str]) -> bool:
    store.notify()
    return len(woken) >= 2


@pytest.mark.requirement("G11")
async def test_listening_can_be_cancelled_and_leaves_no_session(
    postgres_dsn: str, driver: Literal["asyncpg", "psycopg"]
) -> None:
    """The connection that listens is closed with it."""
    url = urlsplit(postgres_dsn)
    async with FaultProxy("127.0.0.1", url.port or 0) as proxy:
        store = PostgresStore(url._replace(netloc=f"{url.username}@127.0.0.1:{proxy.port}").geturl(), driver=driver)
        woken = asyncio.Event()
        listening = asyncio.create_task(store.listen(woken.set))
        await woken.wait()

        listening.cancel()
        await asyncio.wait({listening})

        assert listening.cancelled()
        await until(lambda: proxy.open == 0, "the listening connection is closed")


async def test_listening_on_a_silent_link_ends_in_a_timeout(
    postgres_dsn: str, driver: Literal["asyncpg", "psycopg"]
) -> None:
    """It has the store's deadline to begin with."""
    url = urlsplit(postgres_dsn)
    async with FaultProxy("127.0.0.1", url.port or 0) as proxy:
        proxy.black_hole()
        through = url._replace(netloc=f"{url.username}@127.0.0.1:{proxy.port}").geturl()
        store = PostgresStore(through, driver=driver, timeout=timedelta(milliseconds=300))

        async with asyncio.timeout(8):
            with pytest.raises(StoreTimeoutError, match=r"did not answer within 0\.3 s"):
                await store.listen(lambda: None)


# -- codes, versions, addresses --------------------------------------------------------------------------------------

AUTHENTICATION, CONTENTION, READ_ONLY = StoreAuthenticationError, StoreContentionError, ReadOnlyStoreError
TIMEOUT, UNAVAILABLE = StoreTimeoutError, StoreUnavailableError


@pytest.mark.parametrize(
    ("codes", "error"),
    [
        (["40001", "40P01", "55P03"], CONTENTION),
        (["25006"], READ_ONLY),
        (["28P01", "28000", "3D000"], AUTHENTICATION),
        (["42501"], StorePermissionError),
        (["57014"], TIMEOUT),
        (["08000", "08006", "53100", "53300", "57P01", "57P02", "57P03"], UNAVAILABLE),
        (["42P01", "23505", "", None, "99999"], StoreError),
    ],
)
def test_every_state_of_postgresql_means_one_error(codes: list[str | None], error: type[StoreError]) -> None:
    """By code, since words are translated."""
    assert {code: postgres_error(code) for code in codes} == dict.fromkeys(codes, error)


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ([1020, 1205, 1213], CONTENTION),
        ([1045, 1049, 1698], AUTHENTICATION),
        ([1044, 1142, 1143, 1227, 1370], StorePermissionError),
        ([1290, 1792, 1836], READ_ONLY),
        ([1969, 3024], TIMEOUT),
        ([1021, 1040, 1053, 1114, 1203, 1927, 2000, 2003, 2006, 2013, 2999, 0], UNAVAILABLE),
        ([1062, 1146, 1999, 3000], StoreError),
    ],
)
def test_every_number_of_mysql_means_one_error(numbers: list[int], error: type[StoreError]) -> None:
    """Those of the server, and from 2000 to 2999 those of its client."""
    assert {number: mysql_error(number) for number in numbers} == dict.fromkeys(numbers, error)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["SQLITE_BUSY", "SQLITE_BUSY_SNAPSHOT", "SQLITE_LOCKED", "SQLITE_LOCKED_SHAREDCACHE"], CONTENTION),
        (["SQLITE_READONLY", "SQLITE_READONLY_DBMOVED"], READ_ONLY),
        (["SQLITE_INTERRUPT"], TIMEOUT),
        (["SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_IOERR", "SQLITE_IOERR_READ", "SQLITE_FULL"], UNAVAILABLE),
        (["SQLITE_ERROR", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CORRUPT"], StoreError),
    ],
)
def test_every_code_of_sqlite_means_one_error(names: list[str], error: type[StoreError]) -> None:
    """Also in its extended forms."""
    assert {name: sqlite_error(name) for name in names} == dict.fromkeys(names, error)


POSTGRES, MYSQL, SQLITE = PostgreSQL(Names()), MySQL(Names()), SQLite(Names())


@pytest.mark.parametrize(
    ("dialect", "server", "is_supported"),
    [
        (POSTGRES, Server("PostgreSQL", (12,)), False),
        (POSTGRES, Server("PostgreSQL", (13,)), True),
        (POSTGRES, Server("PostgreSQL", (18,)), True),
        (MYSQL, parse_version("5.7.44-log"), False),
        (MYSQL, parse_version("8.0.0-dmr"), False),
        (MYSQL, parse_version("8.0.1"), True),
        (MYSQL, parse_version("8.4.3"), True),
        (MYSQL, parse_version("10.5.22-MariaDB-1:10.5.22+maria~deb11"), False),
        (MYSQL, parse_version("10.6.0-MariaDB"), True),
        (MYSQL, parse_version("5.5.5-10.11.6-MariaDB-0+deb12u1"), True),
        (MYSQL, parse_version("5.5.5-10.3.39-MariaDB"), False),
        (MYSQL, parse_version("11.8.2-MariaDB-log"), True),
        (MYSQL, parse_version("what is this"), False),
        (SQLITE, Server("SQLite", (3, 34, 1)), False),
        (SQLITE, Server("SQLite", (3, 35, 0)), True),
    ],
)
def test_a_server_is_supported_from_the_version_that_has_what_claims_need(
    dialect: Dialect, server: Server, *, is_supported: bool
) -> None:
    """SKIP LOCKED, or RETURNING where there is one writer."""
    assert dialect.is_supported(server) is is_supported


def test_an_old_server_is_told_with_what_would_do() -> None:
    """The error names both versions."""
    text = str(UnsupportedDatabaseError("MariaDB 10.5.22", MYSQL.needed))

    assert "MariaDB 10.5.22" in text
    assert text.endswith("use MySQL 8.0.1 or MariaDB 10.6 or later")


def test_a_place_never_shows_its_password() -> None:
    """Neither as text nor as a representation, however it was given."""
    place = Place.parse("postgresql+psycopg://a%40b:p%2Fw@db:5433/shop?password=other%20one", schemes=("postgresql",))

    assert str(place) == "postgresql://a@b@db:5433/shop"
    assert (place.user, place.password, place.host, place.port, place.database) == ("a@b", "p/w", "db", 5433, "shop")
    assert {"p/w", "p%2Fw", "other one", "other%20one", "other+one"} <= set(place.secrets)
    for secret in place.secrets:
        assert secret not in repr(place)


@pytest.mark.parametrize(
    "url", ["", "shop", "redis://u:canary@h/0", "postgres//u:canary@h", "mysql://u:canary@h:port/x"]
)
def test_an_address_that_is_not_understood_is_refused_without_repeating_it(url: str) -> None:
    """Any part of it may be the password."""
    for store in (PostgresStore, MySQLStore):
        if not url.startswith("mysql") or store is MySQLStore:
            with pytest.raises(UnknownURLError, match="unsupported URL") as caught:
                store(url)
            assert "canary" not in str(caught.value)


@pytest.mark.parametrize("path", ["", ":memory:"])
def test_a_sqlite_store_needs_a_file(path: str) -> None:
    """A dispatcher of another process must find the messages."""
    with pytest.raises(ConfigurationError, match="a SQLite store needs a file"):
        SQLiteStore(path)


@pytest.mark.parametrize("outcome", [Retry("ä" * 100_000), Dead("ä" * 100_000)], ids=["retried", "dead"])
async def test_of_a_long_error_the_beginning_is_stored(sqlite_path: Path, outcome: Outcome) -> None:
    """G11: an error may hold whatever a broker answered."""
    room = SQLiteRoom(str(sqlite_path))
    store = room.store()
    await store.apply_schema()
    with closing(room.connect()) as connection:
        store.outbox().add(connection, {"n": 1}, topic="t", outside_transaction=True)

    await store.settle([Settlement(claim, outcome) for claim in await store.claim(1, ClaimTerms(worker=uuid4()))])
    await store.close()

    assert room.run("SELECT last_error FROM postroom_outbox") == [("ä" * MAX_ERROR,)]
