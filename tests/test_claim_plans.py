"""What claims read: the index that was made for them, and no more of it when the backlog grows."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import psycopg
import pymysql
import pytest

from postroom import Message
from postroom.store import Claim, ClaimTerms, Delivered, Release, Settlement
from postroom.stores import MySQLStore, PostgresStore, SQLiteStore
from postroom.stores.sql.claiming import Walk, in_order
from postroom.stores.sql.dialect import Dialect
from postroom.stores.sql.dialects.mysql import MySQL
from postroom.stores.sql.dialects.postgres import PostgreSQL
from postroom.stores.sql.dialects.sqlite import SQLite
from postroom.stores.sql.names import Names
from postroom.stores.sql.statement import Result, Statement

from .worlds import DATABASES

TERMS = ClaimTerms(worker=uuid4(), max_bytes=4 << 20)
NEWEST = ClaimTerms(worker=uuid4(), max_bytes=4 << 20, newest_first=True)
LIMIT = 100
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Statistics = Literal["none", "fresh", "stale"]

# Rows lie in random order, so that nothing is found by luck.
FILL = """
    INSERT INTO postroom_outbox (id, namespace, topic, type, key, payload, content_type, status, next_attempt_at,
                                 delivered_at, attempts)
    SELECT gen_random_uuid(), 'default', 't', 't', CASE WHEN keyed THEN kind || n % 500 END,
           repeat('x', 100)::bytea, 'text/plain', status, clock_timestamp() + due,
           CASE WHEN status = 'delivered' THEN clock_timestamp() - interval '8 days' END, 0
    FROM (
        SELECT n, n % 2 = 0 AS keyed, 'k' AS kind, 'pending' AS status, n * interval '1 ms' - interval '1 h' AS due
        FROM generate_series(1, $1::int) AS n
        UNION ALL
        SELECT n, n % 2 = 0, 'later', 'pending', interval '1 h' FROM generate_series(1, $2::int) AS n
        UNION ALL
        SELECT n, n % 2 = 0, 'k', 'delivered', interval '0' FROM generate_series(1, $3::int) AS n) AS rows
    ORDER BY random()
    """


# Of each destination the same number is parked, and everything of it stands before what is due.
FILL_PARKED = """
    INSERT INTO postroom_outbox (id, namespace, topic, type, key, payload, content_type, next_attempt_at, created_at,
                                 token, parked, destination)
    SELECT gen_random_uuid(), 'default', 't', 't', CASE WHEN n % 2 = 0 THEN 'parked' || n END, 'x', 'text/plain',
           clock_timestamp() + interval '1 h', clock_timestamp() - interval '1 day', 1, 1, 'd' || n % 50
    FROM generate_series(1, 100000) AS n
    ORDER BY random()
    """


#: How many messages of one key are due.
FILLED = 20_000
FILL_ONE_KEY = f"""
    INSERT INTO postroom_outbox (id, namespace, topic, type, key, payload, content_type, next_attempt_at)
    SELECT gen_random_uuid(), 'default', 't', 't', 'k', 'x', 'text/plain', clock_timestamp() - interval '1 h'
    FROM generate_series(1, {FILLED}) AS n
    """


async def fill(connection: Connection, *, due: int, backed_off: int, delivered: int) -> None:
    await connection.execute(FILL, due, backed_off, delivered)


@asynccontextmanager
async def backlog(dsn: str, statistics: Statistics, due: int) -> AsyncIterator[Connection]:
    """Yield a connection to an outbox with a backlog, and with more or less knowledge of it."""
    store = PostgresStore(dsn)
    await store.apply_schema()
    await store.close()
    connection: Connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("ALTER TABLE postroom_outbox SET (autovacuum_enabled = false)")
        if statistics == "stale":
            await fill(connection, due=10, backed_off=10, delivered=10_000)
            await connection.execute("ANALYZE postroom_outbox")
        await fill(connection, due=due, backed_off=20_000, delivered=50_000)
        if statistics == "fresh":
            await connection.execute("ANALYZE postroom_outbox")
        yield connection
    finally:
        await connection.close()


def nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from nodes(part)


async def explained(connection: Connection, statement: Statement) -> Mapping[str, Any]:
    """Run a statement, take it back, and return its plan as it is made for these very values."""
    text, values = statement.bind("numeric", arrays=True)
    transaction = connection.transaction()
    await transaction.start()
    try:
        told = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {text}", *values)
    finally:
        await transaction.rollback()
    plan: Mapping[str, Any] = json.loads(told)[0]["Plan"]
    return plan


def buffers(plan: Mapping[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


def postgres_statements() -> dict[str, tuple[Statement, set[str]]]:
    """Return what is run often, and which indexes it should use besides the primary key."""
    dialect = PostgreSQL(Names())
    walk = {"from_topic": "t", "from_key": "k5", "window": 4 * LIMIT, "run": 8, "limit": LIMIT}
    alike = [Claim(Message(topic="t", payload=b"", token=1)) for _ in range(LIMIT)]
    differing = [Claim(Message(topic="t", payload=b"", token=token)) for token in range(LIMIT)]
    walked = dialect.query(dialect._claim_walked, **walk, **dialect._claiming("default", TERMS))  # noqa: SLF001
    return {
        "loose": (next(dialect.claim_loose("default", LIMIT, TERMS)), {"leased", "ready"}),
        "loose from the newest": (next(dialect.claim_loose("default", LIMIT, NEWEST)), {"leased", "ready"}),
        "seen from the newest": (
            next(dialect.claim_keyed("default", LIMIT, NEWEST, Walk())),
            {"leased", "ready_keyed", "keyed", "dead"},
        ),
        "seen": (
            next(dialect.claim_keyed("default", LIMIT, TERMS, Walk())),
            {"leased", "ready_keyed", "keyed", "dead"},
        ),
        "walked": (walked, {"keyed", "dead"}),
        "suspect": (next(dialect.claim_suspect("default", TERMS)), {"leased", "keyed", "dead"}),
        "settle": (next(dialect._delivering(alike, keep=True)), set()),  # noqa: SLF001
        "settle different tokens": (next(dialect._delivering(differing, keep=True)), set()),  # noqa: SLF001
        "purge": (dialect.purge("default", timedelta(days=7), 1000), {"delivered"}),
        "peek": (next(dialect.peek("default", LIMIT, None)), {"leased", "ready", "ready_keyed"}),
        "peek at what waits": (
            dialect.query(dialect._stops, namespace="default"),  # noqa: SLF001
            {"leased", "ready", "ready_keyed", "keyed", "dead"},
        ),
        "oldest": (dialect.query(dialect._oldest, namespace="default"), {"ready", "parked"}),  # noqa: SLF001
        "oldest with a key": (
            dialect.query(dialect._oldest_keyed, namespace="default"),  # noqa: SLF001
            {"ready_keyed", "keyed", "dead"},
        ),
        "next head": (
            dialect.query(dialect._next_head, namespace="default", topic="t", key="k5"),  # noqa: SLF001
            {"keyed", "dead"},
        ),
        "next namespace": (next(dialect.due_elsewhere("shop")), {"ready", "ready_keyed"}),
        "due elsewhere": (
            dialect.query(dialect._due_there, namespace="default"),  # noqa: SLF001
            {"leased", "ready", "ready_keyed"},
        ),
        "parked": (next(dialect.parked("default", "", 100)), {"parked"}),
        "unpark": (next(dialect.unpark("default", "d7", LIMIT)), {"parked", "keyed"}),
    }


@pytest.mark.requirement("S2-09", "S2-10", "S4-06")
@pytest.mark.parametrize("statistics", ["none", "fresh", "stale"])
async def test_every_frequent_statement_uses_the_index_made_for_it(postgres_dsn: str, statistics: Statistics) -> None:
    """With or without statistics nothing is scanned, sorted or fetched in bulk."""
    async with backlog(postgres_dsn, statistics, 50_000) as connection:
        for name, (statement, indexes) in postgres_statements().items():
            plan = await explained(connection, statement)

            kinds = {node["Node Type"] for node in nodes(plan) if node.get("Relation Name") == "postroom_outbox"}
            used = {node["Index Name"] for node in nodes(plan) if "Index Name" in node}
            wanted = {f"postroom_outbox_{index}" for index in indexes}
            assert "Seq Scan" not in kinds, name
            assert wanted <= used, name
            assert used - wanted <= {"postroom_outbox_pkey"}, name


@pytest.mark.requirement("S2-09", "S2-10")
@pytest.mark.parametrize("name", ["loose", "seen", "walked", "suspect"])
async def test_a_claim_reads_no_more_when_the_backlog_is_fifty_times_as_long(postgres_dsn: str, name: str) -> None:
    """The cost of a claim is that of its batch."""
    statement, _ = postgres_statements()[name]
    async with backlog(postgres_dsn, "fresh", 1_000) as connection:
        small = buffers(await explained(connection, statement))
        await fill(connection, due=49_000, backed_off=0, delivered=0)
        await connection.execute("ANALYZE postroom_outbox")

        large = buffers(await explained(connection, statement))

    assert large <= 3 * small + 100, (large, small)


async def test_a_peek_reads_the_line_of_a_key_once(postgres_dsn: str) -> None:
    """Not once more for each of its messages, which on MariaDB takes longer than a call may."""
    async with backlog(postgres_dsn, "none", 0) as connection:
        await connection.execute(FILL_ONE_KEY)
        await connection.execute("ANALYZE postroom_outbox")
        script = PostgreSQL(Names()).peek("default", LIMIT, None)
        first = next(script)
        then = script.send(Result([(uuid4(), "t", "k", 1, 1, None, 1.0)], 1))

        read = [buffers(await explained(connection, statement)) for statement in (first, then)]

    assert sum(read) < FILLED


@pytest.mark.requirement("G13", "S2-09")
@pytest.mark.parametrize("statistics", ["fresh", "stale"])
async def test_parked_messages_cost_claims_nothing(postgres_dsn: str, statistics: Statistics) -> None:
    """With a hundred thousand of them; and what looks for them reads what it returns, whoever counts."""
    names = ["loose", "loose from the newest", "seen", "seen from the newest", "suspect", "oldest with a key"]
    statements = postgres_statements()
    async with backlog(postgres_dsn, statistics, 1_000) as connection:
        before = {name: buffers(await explained(connection, statements[name][0])) for name in names}
        await connection.execute(FILL_PARKED)
        if statistics == "fresh":
            await connection.execute("ANALYZE postroom_outbox")

        after = {name: buffers(await explained(connection, statements[name][0])) for name in names}
        plans = {name: await explained(connection, statements[name][0]) for name in ("parked", "unpark", "oldest")}

    assert {name: (after[name], before[name]) for name in names if after[name] > 2 * before[name] + 100} == {}
    for name, plan in plans.items():
        used = {node.get("Index Name") for node in nodes(plan)}
        assert "postroom_outbox_parked" in used, (name, used)
        assert buffers(plan) < 40 * LIMIT, (name, buffers(plan))


@pytest.mark.requirement("S2-09")
async def test_claims_of_one_connection_stay_cheap_when_a_burst_fills_a_small_table(postgres_dsn: str) -> None:
    """A plan that was kept from the time when the table was small would read all of it."""
    store = PostgresStore(postgres_dsn, connections=1)
    await store.apply_schema()
    await store.open()
    connection: Connection = await asyncpg.connect(postgres_dsn)
    try:
        await connection.execute("ALTER TABLE postroom_outbox SET (autovacuum_enabled = false)")
        await fill(connection, due=0, backed_off=30, delivered=30)
        await connection.execute("ANALYZE postroom_outbox")
        for _ in range(12):
            assert await store.claim(LIMIT, TERMS) == []
        await fill(connection, due=50_000, backed_off=20_000, delivered=50_000)
        before = await reads(connection)
        for _ in range(8):
            claims = await store.claim(LIMIT, TERMS)
            await store.settle([Settlement(claim, Delivered()) for claim in claims])
            assert len(claims) == LIMIT

        await store.close()  # whereupon the server counts what it has done
        after = await reads(connection)
    finally:
        await connection.close()
        await store.close()

    assert after["seq_tup_read"] - before["seq_tup_read"] == 0
    assert after["index rows"] - before["index rows"] < 8 * 40 * LIMIT


async def reads(connection: Connection) -> dict[str, int]:
    """Return how many rows of the outbox have been read, in bulk and by index, once the counters stand still."""
    query = """
        SELECT pg_stat_clear_snapshot(), seq_tup_read,
               (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname = 'postroom_outbox')
        FROM pg_stat_user_tables WHERE relname = 'postroom_outbox'
        """
    await connection.execute("SELECT pg_stat_force_next_flush()")
    others = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'postroom'"
    )
    for _ in range(500):
        if await connection.fetchval(others) == 0:
            break
        await connection.execute("SELECT pg_sleep(0.01)")
        await connection.execute("SELECT pg_stat_clear_snapshot()")
        if (
            await connection.fetchval("SELECT state FROM pg_stat_activity WHERE application_name = 'postroom'")
        ) == "idle":
            break
    row = await connection.fetchrow(query)
    assert row is not None
    return {"seq_tup_read": row[1], "index rows": int(row[2])}


# -- the databases whose claims go step by step --------------------------------------------------------------------


def stepwise_statements(dialect: Dialect) -> dict[str, tuple[Statement, set[str]]]:
    """Return the steps of claims and of upkeep, with the indexes that they should use."""
    terms = dialect._eligibility("default", TERMS)  # noqa: SLF001
    ready_keyed = "ready_keyed" if isinstance(dialect, SQLite) else "ready"
    rows = [number if isinstance(dialect, SQLite) else dialect.uuid(uuid4()) for number in range(10)]
    return {
        "expired": (dialect.query(dialect._expired, limit=LIMIT, **terms), {"leased"}),  # noqa: SLF001
        "due": (dialect.query(dialect._due, limit=LIMIT, **terms), {"ready"}),  # noqa: SLF001
        "newest": (dialect.query(in_order(dialect._due, NEWEST), limit=LIMIT, **terms), {"ready"}),  # noqa: SLF001
        "newest_keys": (
            dialect.query(in_order(dialect._due_keys, NEWEST), limit=LIMIT, **terms),  # noqa: SLF001
            {ready_keyed},
        ),
        "expired_keys": (dialect.query(dialect._expired_keys, limit=LIMIT, **terms), {"leased"}),  # noqa: SLF001
        "due_keys": (dialect.query(dialect._due_keys, limit=LIMIT, **terms), {ready_keyed}),  # noqa: SLF001
        "run": (dialect.query(dialect._run, topic="t", key="k1", length=8, **terms), {"keyed", "dead"}),  # noqa: SLF001
        "lock": (dialect.query(dialect._lock, rows=rows, **terms), {"primary"}),  # noqa: SLF001
        "suspect": (dialect.query(dialect._suspect, **terms), {"leased", "keyed", "dead"}),  # noqa: SLF001
        "first_parked": (next(dialect.unpark("default", "d7", LIMIT)), {"parked"}),
        "heads_of": (dialect.query(dialect._heads_of, rows=rows), {"primary", "keyed"}),  # noqa: SLF001
        "next_key": (dialect.query(dialect._next_key, namespace="default", topic="t", key="k5"), {"keyed"}),  # noqa: SLF001
        "purge": (dialect.purge("default", timedelta(days=7), LIMIT), {"delivered"}),
    }


@pytest.mark.requirement("S2-09", "S2-10", "S4-06")
def test_sqlite_uses_the_index_made_for_each_step(sqlite_path: Path) -> None:
    """No step scans or sorts."""
    with closing(sqlite3.connect(sqlite_path)) as connection:
        SQLiteStore.create_tables(connection)
        for name, (statement, indexes) in stepwise_statements(SQLite(Names())).items():
            text, values = statement.bind("qmark", arrays=False)

            plan = " ; ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {text}", values))

            assert all(used(index) in plan for index in indexes), (name, plan)
            assert "SCAN" not in plan, (name, plan)
            assert "TEMP B-TREE" not in plan, (name, plan)


def used(index: str) -> str:
    """Return how SQLite says that it finds rows."""
    return "USING INTEGER PRIMARY KEY" if index == "primary" else f" INDEX postroom_outbox_{index} "


SQLITE_PARKED = """
    INSERT INTO postroom_outbox (id, namespace, topic, type, key, payload, content_type, next_attempt_at, created_at,
                                 updated_at, token, parked, destination)
    WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 100000)
    SELECT printf('%032d', n), 'default', 't', 't', CASE WHEN n % 2 = 0 THEN 'parked' || n END, 'x', 'text/plain',
           unixepoch() * 1000 + 3600000, 0, 0, 1, 1, 'd' || (n % 50)
    FROM numbers
    """


@pytest.mark.requirement("G13")
async def test_sqlite_steps_over_parked_messages(sqlite_path: Path) -> None:
    """A hundred thousand of them take no more steps than some."""
    store = SQLiteStore(sqlite_path)
    await store.apply_schema()
    with closing(sqlite3.connect(sqlite_path)) as connection:
        connection.execute(SQLITE_PARKED)
        connection.commit()
        dialect = SQLite(Names())
        statements = [
            next(dialect.parked("default", "", 100)),
            next(dialect.unpark("default", "d7", LIMIT)),
            dialect.query(dialect._oldest, namespace="default"),  # noqa: SLF001
            dialect.query(dialect._due, limit=LIMIT, **dialect._eligibility("default", TERMS)),  # noqa: SLF001
            dialect.query(dialect._oldest_keyed, namespace="default"),  # noqa: SLF001
            next(dialect.due_elsewhere("shop")),
            dialect.query(dialect._next_namespace, after="default"),  # noqa: SLF001
            dialect.query(dialect._due_there, namespace="default"),  # noqa: SLF001
        ]
        steps = [_steps(connection, statement) for statement in statements]

    assert max(steps) < 400 * LIMIT, steps
    assert len(await store.parked()) == 50
    assert await store.unpark("d7", 10) == 10
    assert len(await store.claim(100, TERMS)) == 10
    await store.close()


def _steps(connection: sqlite3.Connection, statement: Statement) -> int:
    """Return about how many instructions the virtual machine took."""
    text, values = statement.bind("qmark", arrays=False)
    count = 0

    def step() -> None:
        nonlocal count
        count += 100

    connection.set_progress_handler(step, 100)
    connection.execute(text, values).fetchall()
    connection.set_progress_handler(None, 0)
    return count


MARIADB_PARKED = """
    INSERT INTO postroom_outbox (id, namespace, topic, type, `key`, payload, content_type, headers, next_attempt_at,
                                 created_at, updated_at, token, parked, destination)
    SELECT UNHEX(REPLACE(UUID(), '-', '')), 'default', 't', 't', IF(seq % 2, NULL, CONCAT('parked', seq)), 'x',
           'text/plain', '{}', UTC_TIMESTAMP(6) + INTERVAL 1 HOUR, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), 1, 1,
           CONCAT('d', seq % 50)
    FROM seq_1_to_100000
    """


@pytest.mark.requirement("G13")
@pytest.mark.parametrize("statistics", ["SELECT 1", "ANALYZE TABLE postroom_outbox"], ids=["without", "fresh"])
async def test_mariadb_steps_over_parked_messages(mariadb_dsn: str, statistics: str) -> None:
    """Counted by the server itself; a hundred thousand of them are read by those alone that look for them."""
    store = MySQLStore(mariadb_dsn)
    await store.apply_schema()
    await store.close()
    url = urlsplit(mariadb_dsn)
    dialect = MySQL(Names())
    statements = {
        "parked": (next(dialect.parked("default", "", 100)), 200),
        "unpark": (next(dialect.unpark("default", "d7", LIMIT)), 2 * LIMIT),
        "oldest": (dialect.query(dialect._oldest, namespace="default"), 2500),  # noqa: SLF001
        "due": (dialect.query(dialect._due, limit=LIMIT, **dialect._eligibility("default", TERMS)), 10),  # noqa: SLF001
        "oldest with a key": (dialect.query(dialect._oldest_keyed, namespace="default"), 20),  # noqa: SLF001
        "first namespace": (next(dialect.due_elsewhere("shop")), 5),
        "next namespace": (dialect.query(dialect._next_namespace, after="default"), 5),  # noqa: SLF001
        "due elsewhere": (dialect.query(dialect._due_there, namespace="default"), 10),  # noqa: SLF001
    }
    with (
        closing(
            pymysql.connect(host=url.hostname, port=url.port or 0, user="root", database=url.path[1:])
        ) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(MARIADB_PARKED)
        connection.commit()
        cursor.execute(statistics)
        read: dict[str, int] = {}
        for name, (statement, _) in statements.items():
            text, values = statement.bind("format", arrays=False)
            cursor.execute("FLUSH STATUS")
            cursor.execute(text, values)
            cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
            read[name] = sum(int(count) for _, count in cursor.fetchall())
            connection.rollback()

    assert {name: count for name, count in read.items() if count > statements[name][1]} == {}


MARIADB_FILL = """
    INSERT INTO postroom_outbox (id, namespace, topic, type, `key`, payload, content_type, headers, status,
                                 next_attempt_at, delivered_at, created_at, updated_at)
    SELECT UNHEX(REPLACE(UUID(), '-', '')), 'default', 't', 't', IF(seq %% 2, NULL, CONCAT('k', seq %% 200)), 'x',
           'text/plain', '{}', %s, UTC_TIMESTAMP(6) + INTERVAL %s MINUTE, IF(%s = 'delivered', '2020-01-01', NULL),
           UTC_TIMESTAMP(6), UTC_TIMESTAMP(6)
    FROM seq_1_to_20000
    """


@pytest.mark.requirement("S2-09", "S2-10", "S4-06")
async def test_mariadb_reads_by_the_right_index_and_no_more_than_it_takes(mariadb_dsn: str) -> None:
    """Counted by the server itself, row by row, with and without fresh statistics."""
    store = MySQLStore(mariadb_dsn)
    await store.apply_schema()
    await store.close()
    url = urlsplit(mariadb_dsn)
    with (
        closing(
            pymysql.connect(host=url.hostname, port=url.port or 0, user="root", database=url.path[1:])
        ) as connection,
        connection.cursor() as cursor,
    ):
        for status, minutes in (("pending", -60), ("pending", 60), ("delivered", 0)):
            cursor.execute(MARIADB_FILL, (status, minutes, status))
        connection.commit()
        for statistics in ("SELECT 1", "ANALYZE TABLE postroom_outbox"):
            cursor.execute(statistics)
            for name, (statement, indexes) in stepwise_statements(MySQL(Names())).items():
                text, values = statement.bind("format", arrays=False)
                cursor.execute(f"EXPLAIN {text}", values)
                plan: Any = cursor.fetchall()
                cursor.execute("FLUSH STATUS")
                cursor.execute(text, values)
                cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
                read = sum(int(count) for _, count in cursor.fetchall())
                connection.rollback()

                wanted = {"PRIMARY" if index == "primary" else f"postroom_outbox_{index}" for index in indexes}
                assert {row[5] for row in plan} == wanted, (name, plan)
                assert not any("filesort" in row[9] for row in plan), (name, plan)
                assert read <= 2 * LIMIT, (name, read, plan)


# -- progress ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("G6")
@pytest.mark.parametrize("kind", DATABASES)
async def test_a_key_behind_more_blocked_keys_than_a_claim_looks_at_gets_its_turn(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """The walk over the keys goes on where the last one ended, in every dialect."""
    store, add = await outbox_of(request, kind)
    await store.apply_schema()
    await store.open()
    # A hundred keys whose head waits for an hour, with a follower each that is due and stands before all others.
    add([(f"blocked{n:03}", minutes) for n in range(100) for minutes in (60, -60)])
    add([("zebra", -1), ("aardvark", -1)])

    claimed: set[str | None] = set()
    for _ in range(60):
        claims = await store.claim(2, TERMS)
        claimed |= {claim.message.key for claim in claims}
        await store.settle([Settlement(claim, Release(timedelta(hours=1))) for claim in claims])
    await store.close()

    assert claimed == {"zebra", "aardvark"}


INSERT_POSTGRES = """
    INSERT INTO postroom_outbox (id, namespace, topic, type, key, payload, content_type, headers, next_attempt_at,
                                 created_at, updated_at)
    VALUES (%s, 'default', 't', 't', %s, 'x', 'text/plain', '{}', now() + %s * interval '1 min', now(), now())
    """


async def outbox_of(request: pytest.FixtureRequest, kind: str) -> tuple[Any, Any]:
    """Return a store, and what adds messages by key and minutes until they are due."""
    columns = (
        "id, namespace, topic, type, {key}, payload, content_type, headers, next_attempt_at, created_at, updated_at"
    )
    where = str(request.getfixturevalue({"sqlite": "sqlite_path"}.get(kind, f"{kind}_dsn")))
    if kind == "sqlite":
        text = (
            f"INSERT INTO postroom_outbox ({columns.format(key='key')}) VALUES "
            "(?, 'default', 't', 't', ?, x'00', 'text/plain', '{}', unixepoch() * 1000 + ? * 60000, 0, 0)"
        )
        return SQLiteStore(where), lambda rows: _run_sqlite(where, text, rows)
    if kind == "mariadb":
        text = (
            f"INSERT INTO postroom_outbox ({columns.format(key='`key`')}) VALUES (%s, 'default', 't', 't', %s, 'x', "
            "'text/plain', '{}', UTC_TIMESTAMP(6) + INTERVAL %s MINUTE, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6))"
        )
        return MySQLStore(where), lambda rows: _run_mariadb(where, text, rows)
    return PostgresStore(where), lambda rows: _run_postgres(where, INSERT_POSTGRES, rows)


def _run_sqlite(where: str, text: str, rows: list[tuple[str, int]]) -> None:
    with closing(sqlite3.connect(where)) as connection, connection:
        connection.executemany(text, [(str(uuid4()), key, minutes) for key, minutes in rows])


def _run_mariadb(where: str, text: str, rows: list[tuple[str, int]]) -> None:
    url = urlsplit(where)
    with closing(
        pymysql.connect(host=url.hostname, port=url.port or 0, user="root", database=url.path[1:])
    ) as connection:
        connection.cursor().executemany(text, [(uuid4().bytes, key, minutes) for key, minutes in rows])
        connection.commit()


def _run_postgres(where: str, text: str, rows: Sequence[tuple[str | None, int]]) -> None:
    with psycopg.connect(where) as connection:
        connection.cursor().executemany(text.encode(), [(uuid4(), key, minutes) for key, minutes in rows])


# -- order ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("G6")
async def test_nothing_is_claimed_behind_a_head_that_another_claim_has_locked(postgres_dsn: str) -> None:
    """Wherever the walk begins, also at the greatest key, after which it comes to the same key again."""
    store = PostgresStore(postgres_dsn)
    await store.apply_schema()
    await store.open()
    _run_postgres(postgres_dsn, INSERT_POSTGRES, [("a", -1)] * 200)
    connection: Connection = await asyncpg.connect(postgres_dsn)
    try:
        async with connection.transaction():
            # As another dispatcher's claim that has not ended yet.
            await connection.execute("SELECT id FROM postroom_outbox ORDER BY seq LIMIT 1 FOR UPDATE")
            claims = [claim for _ in range(6) for claim in await store.claim(32, TERMS)]
        freed = [claim for _ in range(2) for claim in await store.claim(32, TERMS)]
    finally:
        await connection.close()
        await store.close()

    assert claims == []
    assert len(freed) == 32


@pytest.mark.requirement("G2", "G6")
@pytest.mark.parametrize("kind", DATABASES)
async def test_a_key_behind_a_clogged_window_gets_its_turn_though_every_claim_finds_something(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """A busy key before the blocked ones does not keep claims from looking behind them."""
    store, add = await outbox_of(request, kind)
    await store.apply_schema()
    await store.open()
    add([(f"blocked{n:03}", minutes) for n in range(100) for minutes in (60, -60)])
    add([("zebra", -1), ("aardvark", -1)])

    claimed: set[str | None] = set()
    for _ in range(60):
        add([("hot", -120)])
        claims = await store.claim(2, TERMS)
        claimed |= {claim.message.key for claim in claims}
        outcomes = {"hot": Delivered()}
        await store.settle([Settlement(c, outcomes.get(c.message.key, Release(timedelta(hours=1)))) for c in claims])
    await store.close()

    assert claimed == {"hot", "zebra", "aardvark"}


@pytest.mark.requirement("G4", "S2-50")
async def test_a_claim_on_postgresql_asks_no_more_once_it_has_taken_something(postgres_dsn: str) -> None:
    """Each statement commits, so what one took must not depend on whether the next one succeeds."""
    store = PostgresStore(postgres_dsn)
    await store.apply_schema()
    await store.open()
    _run_postgres(postgres_dsn, INSERT_POSTGRES, [("a", -1), (None, -1)])

    claims = [await store.claim(10, TERMS) for _ in range(3)]
    await store.close()

    assert sorted(len(batch) for batch in claims) == [0, 1, 1]
    assert {claim.message.key for batch in claims for claim in batch} == {"a", None}
