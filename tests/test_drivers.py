"""Drivers on networks and servers that fail: an error of ours in time, a fresh connection, nothing left behind."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, urlsplit
from uuid import uuid4

import psycopg
import pymysql
import pytest

from postroom.errors import (
    ConfigurationError,
    ReadOnlyStoreError,
    StoreAuthenticationError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from postroom.message import Message
from postroom.outbox import Outbox
from postroom.store import ClaimTerms, Delivered, Settlement
from postroom.stores import MySQLStore, PostgresStore
from postroom.stores.sql.statement import Script, Statement
from postroom.stores.sql.store import SQLStore
from postroom.testing.faults import Direction, FaultProxy
from postroom.testing.servers import MariaDBServer, PostgresServer
from postroom.testing.waiting import until

from .worlds import POSTGRES_DRIVERS

TERMS = ClaimTerms(worker=uuid4())
TIMEOUT = timedelta(seconds=3)
#: For calls that are to end well, or at once.
PATIENCE = timedelta(seconds=20)
#: What a call may take over its timeout: throwing away the connection, on a busy machine.
MARGIN = 8
Kind = Literal["asyncpg", "psycopg", "asyncmy"]
Connection: TypeAlias = Any  # two libraries, one PEP
KINDS: tuple[Kind, ...] = (*POSTGRES_DRIVERS, "asyncmy")


def ask(text: str) -> Script[Any]:
    answer = yield Statement(text, {}, returns=True)
    return answer.rows[0][0]


@dataclass(slots=True)
class Site:
    """One database behind a proxy, with a plain connection around it."""

    kind: Kind
    dsn: str
    proxy: FaultProxy

    @property
    def url(self) -> str:
        parts = urlsplit(self.dsn)
        return parts._replace(netloc=f"{parts.username}@127.0.0.1:{self.proxy.port}").geturl()

    def store(self, *, timeout: timedelta = PATIENCE, connections: int = 5) -> SQLStore:
        return store_of(self.kind, self.url, timeout=timeout, connections=connections)

    def connect(self) -> Connection:
        return connect(self.kind, self.dsn)

    def run(self, text: str) -> list[Any]:
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(text)
            return list(cursor.fetchall()) if cursor.description else []

    def add(self, *keys: str | None) -> list[Message]:
        messages = [Message(topic="t", payload=b"{}", key=key) for key in keys]
        with closing(self.connect()) as connection:
            connection.cursor().execute("BEGIN")
            Outbox().add(connection, messages)
            connection.cursor().execute("COMMIT")
        return messages

    def sessions(self) -> list[str]:
        """Return what each session of the store is doing."""
        if self.kind == "asyncmy":
            text = (
                "SELECT CASE WHEN command <> 'Sleep' THEN 'active' WHEN trx_id THEN 'in transaction' ELSE 'idle' END "
                "FROM information_schema.processlist "
                "LEFT JOIN information_schema.innodb_trx ON trx_mysql_thread_id = id "
                "WHERE db = DATABASE() AND id <> CONNECTION_ID()"
            )
        else:
            text = (
                "SELECT state FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
                "AND backend_type = 'client backend'"
            )
        return [row[0] for row in self.run(text)]


def store_of(kind: Kind, url: str, *, timeout: timedelta = PATIENCE, connections: int = 5) -> SQLStore:
    if kind == "asyncmy":
        return MySQLStore(url, timeout=timeout, connections=connections)
    return PostgresStore(url, driver=kind, timeout=timeout, connections=connections)


def connect(kind: Kind, dsn: str) -> Connection:
    if kind != "asyncmy":
        return psycopg.connect(dsn, autocommit=True)
    url = urlsplit(dsn)
    return pymysql.connect(
        host=url.hostname or "", port=url.port or 0, user=url.username, database=url.path[1:], autocommit=True
    )


@pytest.fixture(params=KINDS)
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """A database with a schema, behind a proxy."""
    dsn = request.getfixturevalue("mariadb_dsn" if request.param == "asyncmy" else "postgres_dsn")
    store = store_of(request.param, dsn)
    await store.apply_schema()
    await store.close()
    async with FaultProxy("127.0.0.1", urlsplit(dsn).port or 0) as proxy:
        yield Site(request.param, dsn, proxy)


@asynccontextmanager
async def opened(store: SQLStore) -> AsyncIterator[SQLStore]:
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def within(limit: float) -> AsyncIterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit


# -- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("directions", [(), ("requests",), ("replies",)], ids=["both ways", "requests", "replies"])
async def test_a_silent_link_ends_in_a_timeout_and_its_connection_is_not_used_again(
    site: Site, directions: tuple[Direction, ...]
) -> None:
    """No driver ends a call on a black-holed link by itself."""
    async with opened(site.store(timeout=TIMEOUT)) as store:
        site.proxy.black_hole(*directions)
        async with within(TIMEOUT.total_seconds() + MARGIN):
            with pytest.raises(StoreTimeoutError, match=r"127\.0\.0\.1:\d+/\w+ did not answer within 3 s"):
                await store.claim(10, TERMS)
        # What was held back may reach the server late, and must find nothing to claim.
        site.proxy.heal()
        await until(lambda: site.proxy.open == 0, "the silent connection is closed")
        site.add(None)

        assert len(await store.claim(10, TERMS)) == 1
        assert site.proxy.accepted == 2


async def test_a_link_that_is_silent_from_the_beginning_ends_in_a_timeout(site: Site) -> None:
    """Connecting has the same deadline as everything else."""
    site.proxy.black_hole()
    store = site.store(timeout=TIMEOUT)

    async with within(TIMEOUT.total_seconds() + MARGIN):
        with pytest.raises(StoreTimeoutError):
            await store.open()

    await store.close()
    site.proxy.heal()
    await until(lambda: site.proxy.open == 0, "the half-made connection is closed")


@pytest.mark.requirement("G11")
async def test_many_calls_on_a_silent_link_all_end_in_time(site: Site) -> None:
    """Waiting for a connection counts towards the deadline."""
    async with opened(site.store(timeout=TIMEOUT, connections=2)) as store:
        site.proxy.black_hole()

        async with within(TIMEOUT.total_seconds() + 2 * MARGIN):
            answers = await asyncio.gather(*(store.claim(1, TERMS) for _ in range(10)), return_exceptions=True)

        assert {type(answer) for answer in answers} == {StoreTimeoutError}
        site.proxy.heal()
        assert await store.claim(1, TERMS) == []


async def test_a_cut_link_is_unavailable_once_and_then_works(site: Site) -> None:
    """One failed call throws away all idle connections."""
    async with opened(site.store()) as store:
        await asyncio.gather(*(store.stats() for _ in range(5)))
        assert site.proxy.cut() > 1

        with pytest.raises(StoreUnavailableError, match="check that the server runs, and its host and port"):
            await store.claim(10, TERMS)

        assert await store.claim(10, TERMS) == []


async def test_a_link_that_is_cut_during_a_call_is_unavailable_at_once(site: Site) -> None:
    """The call does not wait for its deadline."""
    sleep = "SELECT SLEEP(30)" if site.kind == "asyncmy" else "SELECT pg_sleep(30)"
    async with opened(site.store()) as store:
        call = asyncio.create_task(store._run(ask(sleep), atomic=True))  # noqa: SLF001
        await until(lambda: "active" in site.sessions(), "the call is under way")
        async with within(MARGIN):
            site.proxy.cut()
            with pytest.raises(StoreUnavailableError):
                await call

        assert await store.claim(10, TERMS) == []


@pytest.mark.requirement("G12")
async def test_a_reply_that_breaks_off_is_unavailable(site: Site) -> None:
    """Half an answer is none."""
    site.add(*[None] * 50)
    async with opened(site.store()) as store:
        await store.stats()
        site.proxy.truncate(after=1000)

        with pytest.raises(StoreUnavailableError):
            await store.claim(50, TERMS)

        site.proxy.heal()
        # It was claimed, as far as the database knows, or not at all; never in part.
        assert len(await store.claim(50, TERMS)) in {0, 50}


@pytest.mark.requirement("G12", "S2-37")
async def test_a_settlement_whose_reply_was_lost_can_be_repeated(site: Site) -> None:
    """The token is still ours, so saying it twice is no loss."""
    [message] = site.add(None)
    wire = {"asyncpg": message.id.bytes, "psycopg": message.id.hex.encode(), "asyncmy": b"COMMIT"}
    async with opened(site.store()) as store:
        [claim] = await store.claim(1, TERMS)
        site.proxy.drop_reply(wire[site.kind])
        with pytest.raises(StoreUnavailableError):
            await store.settle([Settlement(claim, Delivered())])
        assert site.proxy.dropped == 1
        assert site.run("SELECT status FROM postroom_outbox") == [("delivered",)]

        assert await store.settle([Settlement(claim, Delivered())]) == []


async def test_a_port_where_nobody_listens_is_unavailable(site: Site) -> None:
    """What cannot be reached is told as such, with the address and without delay."""
    await site.proxy.refuse()
    store = site.store()

    async with within(MARGIN):
        with pytest.raises(
            StoreUnavailableError, match=rf"127\.0\.0\.1:{site.proxy.port}/.*check that the server runs"
        ):
            await store.open()

    await site.proxy.accept()
    async with opened(store):
        assert await store.claim(1, TERMS) == []


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("G11")
async def test_the_pool_never_exceeds_its_size(site: Site) -> None:
    """Connections are bounded, however many calls there are."""
    async with opened(site.store(connections=3)) as store:
        site.proxy.latency = timedelta(milliseconds=2)

        await asyncio.gather(*(store.stats() for _ in range(30)))

        assert site.proxy.accepted == 3
        assert len(site.sessions()) == 3
    await until(lambda: site.sessions() == [], "all sessions end")


@pytest.mark.requirement("G11")
async def test_a_call_that_is_cancelled_anywhere_leaves_no_transaction_and_no_connection(site: Site) -> None:
    """Cancelled while connecting, beginning, claiming or committing."""
    site.add(*[None] * 20, *["k"] * 20)
    dice = random.Random(5)
    store = site.store(connections=2)
    site.proxy.latency = timedelta(milliseconds=1)
    for number in range(60):
        call = asyncio.create_task(store.claim(1, TERMS))
        await asyncio.sleep(dice.uniform(0, 0.03))
        call.cancel()
        await asyncio.wait({call})
        if number % 5 == 0:
            await store.close()

    site.proxy.heal()
    await store.stats()

    await until(lambda: site.sessions() == ["idle"], "the sessions of cancelled calls end")
    await until(lambda: site.proxy.open == 1, "their connections end")
    await store.close()
    await until(lambda: site.sessions() == [], "all sessions end")


FORK = """
import asyncio, os, sys
from datetime import timedelta
from postroom.stores import MySQLStore, PostgresStore
from postroom.stores.sql.statement import Statement

store = {store}
number = Statement({text!r}, {{}}, returns=True)

def script():
    answer = yield number
    return answer.rows[0][0]

async def session():
    return await store._pool.run(script(), timeout=timedelta(seconds=5))

loop = asyncio.new_event_loop()
before = loop.run_until_complete(session())
child = os.fork()
if child == 0:
    inner = asyncio.new_event_loop()
    inner.run_until_complete(store.open())
    print("child", inner.run_until_complete(session()), flush=True)
    inner.run_until_complete(store.close())
    os._exit(0)
os.waitpid(child, 0)
after = loop.run_until_complete(session())
print("parent", before, after, flush=True)
loop.run_until_complete(store.close())
os._exit(0)
"""


def test_a_forked_child_does_not_use_the_connections_of_its_parent(site: Site) -> None:
    """A server that forks its workers after start must not mix up two conversations."""
    text = "SELECT CONNECTION_ID()" if site.kind == "asyncmy" else "SELECT pg_backend_pid()"
    store = (
        f"MySQLStore({site.dsn!r})" if site.kind == "asyncmy" else f"PostgresStore({site.dsn!r}, driver={site.kind!r})"
    )

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK.format(store=store, text=text)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    words = done.stdout.split()
    assert words[0::2][:1] == ["child"], done.stderr
    child, before, after = words[1], words[3], words[4]
    assert before == after
    assert child != before


@pytest.mark.requirement("G3")
async def test_claims_are_durable_whatever_the_database_defaults_to(site: Site) -> None:
    """Claims flush the log, and see what others have committed since."""
    name = urlsplit(site.dsn).path[1:]
    if site.kind != "asyncmy":
        site.run(f"ALTER DATABASE {name} SET synchronous_commit = off")
        site.run(f"ALTER DATABASE {name} SET default_transaction_isolation = 'read committed'")
    text = "SELECT @@tx_isolation" if site.kind == "asyncmy" else "SELECT current_setting('synchronous_commit')"
    async with opened(site.store()) as store:
        answer = await store._run(ask(text), atomic=True)  # noqa: SLF001

    assert answer == ("READ-COMMITTED" if site.kind == "asyncmy" else "on")


# -- servers ---------------------------------------------------------------------------------------------------------


async def survives_a_killed_server(server: PostgresServer | MariaDBServer, kinds: tuple[Kind, ...]) -> None:
    for kind in kinds:
        store = store_of(kind, server.dsn, timeout=timedelta(seconds=10))
        await store.apply_schema()
        async with opened(store):
            await asyncio.to_thread(server.kill9)
            with pytest.raises(StoreUnavailableError):
                await store.claim(1, TERMS)
            with pytest.raises(StoreUnavailableError):
                await store.claim(1, TERMS)
            await asyncio.to_thread(server.start)

            assert await store.claim(1, TERMS) == []


async def test_a_store_outlives_the_crash_of_its_postgresql(private_postgres: PostgresServer) -> None:
    """It is unavailable while the server is down, and works when it is back."""
    await survives_a_killed_server(private_postgres, ("asyncpg", "psycopg"))


async def test_a_store_outlives_the_crash_of_its_mariadb(private_mariadb: MariaDBServer) -> None:
    """It is unavailable while the server is down, and works when it is back."""
    await survives_a_killed_server(private_mariadb, ("asyncmy",))


@pytest.mark.requirement("G3")
async def test_a_standby_is_refused_because_claims_need_the_primary(private_postgres: PostgresServer) -> None:
    """A server in recovery takes no claims, whichever driver asks."""
    store = store_of("asyncpg", private_postgres.dsn)
    await store.apply_schema()
    await store.close()
    assert private_postgres.home
    (private_postgres.home / "data" / "standby.signal").touch()
    await asyncio.to_thread(private_postgres.restart)

    for kind in ("asyncpg", "psycopg"):
        store = store_of(kind, private_postgres.dsn)
        with pytest.raises(ReadOnlyStoreError, match="use the primary"):
            await store.open()
        with pytest.raises(ReadOnlyStoreError, match="connect to the primary"):
            await store.claim(1, TERMS)
        await store.close()


@pytest.mark.requirement("G3")
@pytest.mark.parametrize("kind", POSTGRES_DRIVERS)
async def test_a_read_only_database_is_refused(kind: Kind, postgres_dsn: str) -> None:
    """Also where it is no standby."""
    store = store_of(kind, postgres_dsn)
    await store.apply_schema()
    await store.close()
    with closing(connect(kind, postgres_dsn)) as connection:
        connection.execute(f"ALTER DATABASE {urlsplit(postgres_dsn).path[1:]} SET default_transaction_read_only = on")

    with pytest.raises(ReadOnlyStoreError):
        await store.open()

    with pytest.raises(ReadOnlyStoreError, match=r"(?i)readonlysql"):
        await store.claim(1, TERMS)
    await store.close()


@pytest.mark.requirement("G3")
async def test_a_read_only_mariadb_is_refused(private_mariadb: MariaDBServer) -> None:
    """By the setting when it is opened, and by the server's own refusal afterwards."""
    store = MySQLStore(private_mariadb.dsn)
    await store.apply_schema()
    await store.close()
    private_mariadb.client.query(
        "CREATE USER app@127.0.0.1// GRANT SELECT, INSERT, UPDATE, DELETE ON test.* TO app@127.0.0.1"
    )
    with closing(connect("asyncmy", private_mariadb.dsn)) as connection:
        connection.cursor().execute("BEGIN")
        Outbox().add(connection, Message(topic="t", payload=b"{}"))
        connection.cursor().execute("COMMIT")
    private_mariadb.client.query("SET GLOBAL read_only = 1")

    store = MySQLStore(private_mariadb.dsn.replace("root@", "app@"))
    with pytest.raises(ReadOnlyStoreError, match="use the primary"):
        await store.open()
    with pytest.raises(ReadOnlyStoreError, match=r"1290.*connect to the primary"):
        await store.claim(1, TERMS)
    await store.close()


# -- secrets ---------------------------------------------------------------------------------------------------------

SECRET = "c4n/ary pa$$w%rd"  # noqa: S105


def everything_said(error: BaseException) -> Iterator[str]:
    """Yield the text and the fields of an error and of all that are chained to it."""
    chain: list[BaseException | None] = [error]
    for one in chain:
        if one is not None:
            yield f"{one} {one!r} {one.args!r} {getattr(one, '__dict__', {})!r}"
            chain += [one.__cause__, one.__context__]


async def is_kept_secret(kind: Kind, url: str, caplog: pytest.LogCaptureFixture, hurt: Callable[[str], str]) -> None:
    good = store_of(kind, url.replace("SECRET", quote(SECRET, safe="")))
    await good.apply_schema()
    async with opened(good):
        assert (await good.stats()).pending == 0

    caplog.set_level(0)
    bad = store_of(kind, hurt(url).replace("SECRET", quote(SECRET, safe="")))
    with pytest.raises(StoreError) as caught:
        await bad.open()
    await bad.close()

    said = " ".join([*everything_said(caught.value), repr(bad), caplog.text])
    for form in (SECRET, quote(SECRET), quote(SECRET, safe="")):
        assert form not in said
    assert isinstance(caught.value, StoreAuthenticationError)
    assert str(caught.value).endswith("; check the user, the password and the name of the database")


#: Ways to make a URL that the server refuses while it holds the password.
HURTS: list[Callable[[str], str]] = [
    lambda url: url.replace("canary:", "nobody:"),
    lambda url: url.replace("SECRET@", "SECRETx@"),
    lambda url: f"{url}_that_is_not_there",
]


@pytest.mark.parametrize("kind", POSTGRES_DRIVERS)
async def test_postgresql_refuses_credentials_without_telling_the_password(
    kind: Kind, private_postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The error says what to check, and neither it nor its causes nor the log tells the secret."""
    assert private_postgres.home
    rules = "host all canary 127.0.0.1/32 scram-sha-256\nhost all nobody 127.0.0.1/32 scram-sha-256\n"
    rules += "host all all 127.0.0.1/32 trust\n"
    (private_postgres.home / "data" / "pg_hba.conf").write_text(rules)
    with closing(connect(kind, private_postgres.dsn)) as connection:
        connection.execute(f"CREATE ROLE canary SUPERUSER LOGIN PASSWORD '{SECRET}'".encode())
        connection.execute("SELECT pg_reload_conf()")
    url = f"postgresql://canary:SECRET@127.0.0.1:{private_postgres.port}/postgres"
    await until(lambda: refused(url.replace("SECRET", "wrong")), "the server has read its rules anew")

    for hurt in HURTS:
        await is_kept_secret(kind, url, caplog, hurt)


def refused(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return True
    return False


async def test_mariadb_refuses_credentials_without_telling_the_password(
    private_mariadb: MariaDBServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The error says what to check, and neither it nor its causes nor the log tells the secret."""
    with closing(connect("asyncmy", private_mariadb.dsn)) as connection:
        cursor = connection.cursor()
        cursor.execute("CREATE USER canary@127.0.0.1 IDENTIFIED BY %s", (SECRET,))
        cursor.execute("GRANT ALL ON *.* TO canary@127.0.0.1")
    url = f"mysql://canary:SECRET@127.0.0.1:{private_mariadb.port}/test"

    for hurt in HURTS:
        await is_kept_secret("asyncmy", url, caplog, hurt)


# -- locked tables -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("G13")
@pytest.mark.parametrize("kind", POSTGRES_DRIVERS)
async def test_calls_that_timed_out_do_not_pile_up_on_a_locked_table(kind: Kind, postgres_dsn: str) -> None:
    """A server does not notice that nobody waits for its answer any more, so it is told when to give up."""
    store = store_of(kind, postgres_dsn, timeout=timedelta(seconds=2), connections=2)
    await store.apply_schema()

    def waiting() -> int:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'postroom'"
        )
        return int(cursor.fetchone()[0])

    with closing(connect(kind, postgres_dsn)) as connection, connection.cursor() as cursor, connection.transaction():
        async with opened(store):
            cursor.execute("LOCK TABLE postroom_outbox IN ACCESS EXCLUSIVE MODE")
            for _ in range(6):
                with pytest.raises(StoreTimeoutError):
                    await store.claim(1, TERMS)
            await until(lambda: waiting() <= 2, "the server gives up")


@pytest.mark.requirement("S4-07")
@pytest.mark.parametrize("kind", POSTGRES_DRIVERS)
async def test_a_schema_may_take_longer_to_apply_than_any_other_call(kind: Kind, postgres_dsn: str) -> None:
    """DDL waits for the transactions of others; what ends a claim does not end it."""
    store = store_of(kind, postgres_dsn, timeout=timedelta(seconds=0.1))
    await store.apply_schema()
    with closing(connect(kind, postgres_dsn)) as connection, connection.cursor() as cursor:
        with connection.transaction():
            cursor.execute("LOCK TABLE postroom_outbox_version IN ACCESS EXCLUSIVE MODE")
            applying = asyncio.create_task(store.apply_schema())
            checking = asyncio.create_task(store.check_schema())
            ended, _ = await asyncio.wait({applying, checking}, timeout=1)
        applied, differences = await asyncio.wait_for(asyncio.gather(applying, checking), 20)
    await store.close()

    assert not ended
    assert (applied, differences) == (False, [])


@pytest.mark.requirement("G4")
@pytest.mark.parametrize("kind", POSTGRES_DRIVERS)
async def test_claims_are_read_committed_whatever_the_database_defaults_to(kind: Kind, postgres_dsn: str) -> None:
    """In a stricter isolation claims at the same time would fail instead of skipping each other's rows."""
    with closing(connect(kind, postgres_dsn)) as connection:
        name = urlsplit(postgres_dsn).path[1:]
        connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_isolation = serializable')
    store = store_of(kind, postgres_dsn)

    isolation = await store._run(ask("SELECT current_setting('transaction_isolation')"), atomic=False)  # noqa: SLF001
    await store.close()

    assert isolation == "read committed"


@pytest.mark.requirement("G4", "G9", "S2-28")
@pytest.mark.parametrize("key", [None, "a"])
async def test_the_sweep_leaves_a_message_that_is_claimed_while_it_looks(site: Site, key: str | None) -> None:
    """Dispatchers may allow different numbers of attempts; what one has in flight the other keeps."""
    site.add(key)
    site.run("UPDATE postroom_outbox SET attempts = 5")
    worker = f"X'{uuid4().hex}'" if site.kind == "asyncmy" else f"'{uuid4()}'"
    async with opened(site.store()) as store:
        with closing(site.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute("BEGIN")
            # As the claim of a dispatcher that allows ten attempts, and that has not ended yet.
            cursor.execute(
                "UPDATE postroom_outbox SET status = 'processing', attempts = 6, token = 1, "
                f"locked_by = {worker}, locked_until = '2100-01-01 00:00:00'"
            )
            sweeping = asyncio.create_task(store.sweep(ClaimTerms(worker=uuid4(), max_attempts=5)))
            await until(lambda: sweeping.done() or "active" in site.sessions(), "the sweep waits for the row")
            cursor.execute("COMMIT")
        buried = await sweeping

    assert buried == 0
    assert site.run("SELECT status, attempts FROM postroom_outbox") == [("processing", 6)]


@pytest.mark.requirement("S4-03")
@pytest.mark.parametrize("query", ["ssl_ca=/etc/ca.pem&ssl=true", "ssl_mode=REQUIRED", "ssl=perhaps", "ssl"])
def test_a_mysql_option_that_is_not_understood_is_refused_by_name(query: str) -> None:
    """An option that were dropped could be the one that asks for encryption."""
    name = query.partition("=")[0]
    with pytest.raises(ConfigurationError, match=rf"\b{name}\b"):
        MySQLStore(f"mysql://app:secret@localhost/shop?{query}")


@pytest.mark.requirement("S4-03")
async def test_mysql_over_tls_is_asked_for_by_the_url(mariadb_dsn: str) -> None:
    """A server without a certificate is refused instead of being talked to in the clear."""
    store = MySQLStore(f"{mariadb_dsn}?ssl=true", timeout=timedelta(seconds=10))

    with pytest.raises(StoreError, match=r"(?i)ssl"):
        await store.open()
    await store.close()
