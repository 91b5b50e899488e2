"""The schema on real databases: applied on request, checked to the letter, never made by itself."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import string
import subprocess
import sys
from contextlib import ExitStack, closing
from datetime import timedelta
from uuid import uuid4

import psycopg
import pymysql
import pytest

from postroom.errors import InvalidNameError, SchemaError, SchemaMissingError, SchemaVersionError, StoreError
from postroom.message import Message
from postroom.outbox import Outbox
from postroom.store import ClaimTerms, Delivered, Settlement
from postroom.stores import PostgresStore
from postroom.stores.sql.dialects.sqlite import SQLite
from postroom.stores.sql.names import Names
from postroom.stores.sql.schemas.sqlite import SQLiteSchema
from postroom.testing.clients import PostgresClient
from postroom.writer import writer_of
from tests.rooms import ROOMS, MariaDBRoom, PostgresRoom, Room, SQLiteRoom, applied, differences

TERMS = ClaimTerms(worker=Message(topic="t", payload=b"").id)


@pytest.fixture(params=ROOMS)
def room(request: pytest.FixtureRequest) -> Room:
    kind, fixture = ROOMS[request.param]
    return kind(str(request.getfixturevalue(fixture)))


@pytest.fixture
def postgres(postgres_dsn: str) -> PostgresRoom:
    return PostgresRoom(postgres_dsn)


@pytest.fixture
def mariadb(mariadb_dsn: str) -> MariaDBRoom:
    return MariaDBRoom(mariadb_dsn)


# -- apply -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S1-10")
async def test_apply_creates_everything_and_the_second_time_says_that_there_was_nothing_to_do(room: Room) -> None:
    """Applying is idempotent, and changes nothing when it is repeated."""
    first = await applied(room)
    before = room.everything()

    second = await applied(room)

    assert (first, second) == (True, False)
    assert await differences(room) == []
    assert room.everything() == before
    assert room.run(f"SELECT version FROM {room.quote}postroom_outbox_version{room.quote}")[0][0] == 3


APPLY = """
import asyncio, sys
from datetime import timedelta
from postroom.stores import MySQLStore, PostgresStore, SQLiteStore

async def main() -> None:
    store = {store}({where!r}, timeout=timedelta(seconds=60))
    print("ready", flush=True)
    sys.stdin.readline()
    print(await store.apply_schema())
    await store.close()

asyncio.run(main())
"""


@pytest.mark.requirement("S1-10")
@pytest.mark.parametrize("size", [2, 10])
def test_processes_that_apply_at_once_all_succeed_and_one_of_them_creates(room: Room, size: int) -> None:
    """Replicas that start together may all apply the schema."""
    script = APPLY.format(store=type(room.store()).__name__, where=room.where)
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True))
            for _ in range(size)
        ]
        ready = [process.stdout.readline() for process in processes if process.stdout]
        for process in processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [process.communicate(timeout=60)[0].strip() for process in processes]

    assert ready == ["ready\n"] * size
    assert sorted(told) == ["False"] * (size - 1) + ["True"]


@pytest.mark.requirement("S1-10")
async def test_connections_that_apply_at_once_all_succeed_and_one_of_them_creates(room: Room) -> None:
    """The same within one process, where they truly meet."""
    told = await asyncio.gather(*(applied(room) for _ in range(10)))

    assert sorted(told) == [False] * 9 + [True]
    assert await differences(room) == []


@pytest.mark.requirement("S1-10")
@pytest.mark.parametrize("done", [1, 2, 3, 4, -5, -4, -3, -2, -1])
async def test_apply_finishes_what_was_killed_half_way(room: Room, done: int) -> None:
    """Every statement can be run again, wherever the one before was killed."""
    room.run(*room.statements(Names())[:done])
    assert (await differences(room)) != []

    assert await applied(room) is True

    assert await differences(room) == []


@pytest.mark.requirement("S1-10")
async def test_a_failed_apply_leaves_nothing_behind_on_postgresql(postgres: PostgresRoom) -> None:
    """There DDL is transactional, so a half-made schema is never seen."""
    postgres.run("CREATE VIEW postroom_outbox_published AS SELECT 1 AS stands_in_the_way")
    before = postgres.everything()

    with pytest.raises(StoreError, match="view"):
        await applied(postgres)

    assert postgres.everything() == before


FLAWS = {
    SQLiteRoom: ("last_error TEXT", "last_error BLOB", "column last_error is 'BLOB', should be 'TEXT'"),
    PostgresRoom: ("last_error text", "last_error json", "column last_error is 'json', should be 'text'"),
    MariaDBRoom: (
        "last_error TEXT",
        "last_error INT",
        "column last_error is 'int(11) DEFAULT NULL', should be 'text DEFAULT NULL'",
    ),
}


@pytest.mark.requirement("S1-10")
async def test_apply_never_alters_a_table_but_says_what_is_wrong_with_it(room: Room) -> None:
    """To alter may lock for long or lose data, so it is left to people."""
    right, wrong, sentence = FLAWS[type(room)]
    room.run(*(text.replace(right, wrong) for text in room.statements(Names())))
    before = room.everything()
    assert await differences(room) == [sentence]

    with pytest.raises(SchemaError) as caught:
        await applied(room)

    assert str(caught.value) == f"postroom_outbox is there but not as needed; repair it: {sentence}"
    if not isinstance(room, MariaDBRoom):  # where views are replaced at every run
        assert room.everything() == before


# -- check -------------------------------------------------------------------------------------------------------

SABOTAGE: dict[tuple[str, str], list[str]] = {
    ("sqlite", "DROP INDEX postroom_outbox_ready"): ["index postroom_outbox_ready is missing"],
    ("sqlite", "DROP VIEW postroom_outbox_messages"): ["view postroom_outbox_messages is missing"],
    ("sqlite", "DELETE FROM postroom_outbox_version"): [
        "version is missing, should be 3.1; run `postroom schema apply`"
    ],
    ("sqlite", "DROP TABLE postroom_outbox_version"): [
        "version is missing, should be 3.1; run `postroom schema apply`",
        *(f"column postroom_outbox_version.{name} is missing" for name in ("version", "applied_at", "step")),
    ],
    (
        "sqlite",
        'DROP INDEX postroom_outbox_leased; CREATE INDEX "postroom_outbox_leased" ON "postroom_outbox" (namespace)',
    ): [
        (
            "index postroom_outbox_leased is 'ON \"postroom_outbox\" (namespace)', should be "
            "'ON \"postroom_outbox\" (namespace, locked_until, seq) WHERE status = \\'processing\\''"
        )
    ],
    ("sqlite", "DROP INDEX postroom_inbox_old"): ["index postroom_inbox_old is missing"],
    ("sqlite", "DROP VIEW postroom_inbox_processed"): ["view postroom_inbox_processed is missing"],
    (
        "sqlite",
        (
            "DROP VIEW postroom_inbox_processed; DROP TABLE postroom_inbox; "
            'CREATE TABLE "postroom_inbox" (\n consumer TEXT,\n tenant_id TEXT NOT NULL,\n message_id TEXT NOT NULL\n)'
        ),
    ): [
        "column postroom_inbox.consumer is 'TEXT', should be 'TEXT NOT NULL'",
        "column postroom_inbox.created_at is missing",
        "constraint PRIMARY KEY (consumer, tenant_id, message_id) of postroom_inbox is missing",
        "index postroom_inbox_old is missing",
        "view postroom_inbox_processed is missing",
    ],
    ("postgres", "ALTER TABLE postroom_inbox ALTER created_at DROP DEFAULT"): [
        (
            "column postroom_inbox.created_at is 'timestamp with time zone NOT NULL', "
            "should be 'timestamp with time zone NOT NULL DEFAULT clock_timestamp()'"
        )
    ],
    ("postgres", "ALTER TABLE postroom_inbox_dead DROP CONSTRAINT postroom_inbox_dead_pkey"): [
        "constraint PRIMARY KEY (consumer, tenant_id, message_id) of postroom_inbox_dead is missing",
        "index postroom_inbox_dead_pkey is missing",
    ],
    ("postgres", "DROP INDEX postroom_inbox_old"): ["index postroom_inbox_old is missing"],
    ("postgres", "DROP VIEW postroom_inbox_processed"): ["view postroom_inbox_processed is missing"],
    ("mariadb", "ALTER TABLE postroom_inbox MODIFY consumer VARCHAR(99) NOT NULL"): [
        "column postroom_inbox.consumer is 'varchar(99) NOT NULL', should be 'varchar(100) NOT NULL'"
    ],
    ("mariadb", "ALTER TABLE postroom_inbox_dead DROP PRIMARY KEY"): ["primary key postroom_inbox_dead is missing"],
    ("mariadb", "DROP INDEX postroom_inbox_old ON postroom_inbox"): [
        "key postroom_inbox.postroom_inbox_old is missing"
    ],
    ("mariadb", "DROP VIEW postroom_inbox_processed"): ["table or view postroom_inbox_processed is missing"],
    ("postgres", "ALTER TABLE postroom_outbox ALTER topic DROP NOT NULL"): [
        "column topic is 'text', should be 'text NOT NULL'"
    ],
    ("postgres", "ALTER TABLE postroom_outbox ALTER token TYPE integer"): [
        "column token is 'integer NOT NULL DEFAULT 0', should be 'bigint NOT NULL DEFAULT 0'"
    ],
    ("postgres", "ALTER TABLE postroom_outbox ALTER status DROP DEFAULT"): [
        "column status is 'text NOT NULL', should be \"text NOT NULL DEFAULT 'pending'::text\""
    ],
    ("postgres", "DROP INDEX postroom_outbox_ready"): ["index postroom_outbox_ready is missing"],
    ("postgres", "DROP INDEX postroom_outbox_dedupe"): ["index postroom_outbox_dedupe is missing"],
    ("postgres", "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'postroom_outbox_dead'::regclass"): [
        (
            "index postroom_outbox_dead is "
            "\"btree (namespace, topic, key, seq) WHERE (status = 'dead'::text) INVALID\", should be "
            "\"btree (namespace, topic, key, seq) WHERE (status = 'dead'::text)\""
        )
    ],
    (
        "postgres",
        (
            "DROP INDEX postroom_outbox_delivered; "
            "CREATE INDEX postroom_outbox_delivered ON postroom_outbox (namespace, delivered_at) WHERE status = 'dead'"
        ),
    ): [
        (
            "index postroom_outbox_delivered is \"btree (namespace, delivered_at) WHERE (status = 'dead'::text)\", "
            "should be \"btree (namespace, delivered_at) WHERE (status = 'delivered'::text)\""
        )
    ],
    ("postgres", "ALTER TABLE postroom_outbox DROP CONSTRAINT postroom_outbox_status_check"): [
        (
            "constraint CHECK ((status = ANY "
            "(ARRAY['pending'::text, 'processing'::text, 'delivered'::text, 'dead'::text]))) is missing"
        )
    ],
    ("postgres", "DROP VIEW postroom_outbox_published"): ["view postroom_outbox_published is missing"],
    ("postgres", "DELETE FROM postroom_outbox_version"): [
        "version is missing, should be 3.1; run `postroom schema apply`"
    ],
    ("mariadb", "ALTER TABLE postroom_outbox MODIFY topic VARCHAR(249)"): [
        "column topic is 'varchar(249) DEFAULT NULL', should be 'varchar(249) NOT NULL'"
    ],
    ("mariadb", "ALTER TABLE postroom_outbox MODIFY attempts BIGINT NOT NULL DEFAULT 0"): [
        "column attempts is 'bigint(20) NOT NULL DEFAULT 0', should be 'int(11) NOT NULL DEFAULT 0'"
    ],
    ("mariadb", "DROP INDEX postroom_outbox_ready ON postroom_outbox"): ["key postroom_outbox_ready is missing"],
    ("mariadb", "DROP INDEX postroom_outbox_dedupe ON postroom_outbox"): [
        "unique key postroom_outbox_dedupe is missing"
    ],
    ("mariadb", "ALTER TABLE postroom_outbox DROP CONSTRAINT postroom_outbox_lease_check"): [
        "constraint postroom_outbox_lease_check is missing"
    ],
    ("mariadb", "DROP VIEW postroom_outbox_published"): ["table or view postroom_outbox_published is missing"],
    ("mariadb", "DROP TABLE postroom_outbox_lock"): ["table or view postroom_outbox_lock is missing"],
    ("mariadb", "DELETE FROM postroom_outbox_version"): [
        "version is missing, should be 3.1; run `postroom schema apply`"
    ],
}


@pytest.mark.parametrize(("kind", "sabotage"), SABOTAGE)
async def test_check_tells_exactly_what_differs(request: pytest.FixtureRequest, kind: str, sabotage: str) -> None:
    """An operator is told what is wrong, in a sentence each."""
    room_kind, fixture = ROOMS[kind]
    room = room_kind(str(request.getfixturevalue(fixture)))
    await applied(room)
    room.run(*sabotage.split("; "))

    assert await differences(room) == SABOTAGE[kind, sabotage]


@pytest.mark.requirement("S1-04")
async def test_check_of_an_empty_database_names_the_tables_and_changes_nothing(room: Room) -> None:
    """Checking creates nothing."""
    before = room.everything()

    [found] = await differences(room)

    assert found == (
        "tables postroom_outbox, postroom_inbox, postroom_inbox_dead, postroom_outbox_tickets, postroom_outbox_version "
        "are missing; run `postroom schema apply`"
    )
    assert room.everything() == before


async def test_check_without_the_outbox_alone_names_every_part_of_it(room: Room) -> None:
    """One table is enough to see that the others were there: what is missing was dropped, not never made."""
    await applied(room)
    room.run("DROP VIEW postroom_outbox_published", "DROP VIEW postroom_outbox_messages", "DROP TABLE postroom_outbox")

    found = await differences(room)

    assert {"column id is missing", "column payload is missing"} <= set(found)
    assert not [difference for difference in found if "postroom_inbox" in difference]


# -- versions ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S1-04")
async def test_a_store_without_its_table_says_how_to_make_it(room: Room) -> None:
    """Opening creates nothing."""
    room.run("SELECT 1")  # with which SQLite creates an empty file
    store = room.store()

    with pytest.raises(SchemaMissingError) as caught:
        await store.open()

    await store.close()
    assert str(caught.value) == (
        "table postroom_outbox does not exist; run `postroom schema apply` or the SQL of `postroom schema print`"
    )
    assert room.everything() == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "INSERT INTO postroom_outbox_version (version) VALUES (99)",
            "the schema of postroom_outbox has version 99, version 3.1 is needed; upgrade postroom",
        ),
        (
            "UPDATE postroom_outbox_version SET version = 0",
            "the schema of postroom_outbox has version 0.1, version 3.1 is needed; run `postroom schema apply`",
        ),
        (
            "DELETE FROM postroom_outbox_version",
            "the schema of postroom_outbox has version 0, version 3.1 is needed; run `postroom schema apply`",
        ),
    ],
)
async def test_a_store_refuses_another_version_and_says_what_to_do(room: Room, change: str, sentence: str) -> None:
    """Neither an old nor a new schema is guessed at."""
    await applied(room)
    room.run(change)
    store = room.store()

    with pytest.raises(SchemaVersionError) as caught:
        await store.open()

    await store.close()
    assert str(caught.value) == sentence


@pytest.mark.requirement("S1-10")
async def test_an_old_release_does_not_apply_over_a_newer_schema(room: Room) -> None:
    """A rolling deployment must not take a schema back."""
    await applied(room)
    room.run("INSERT INTO postroom_outbox_version (version) VALUES (99)", "DROP VIEW postroom_outbox_messages")
    before = room.everything()

    with pytest.raises(SchemaVersionError, match="upgrade postroom"):
        await applied(room)

    assert room.everything() == before


# -- by hand -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S1-09")
async def test_the_printed_statements_make_the_same_schema_on_a_plain_connection(room: Room) -> None:
    """They are made for your own migrations, without a database at hand, and may be run twice."""
    texts = room.statements(Names(table="my_outbox"))

    room.run(*texts)
    room.run(*texts)

    assert await differences(room, table="my_outbox") == []
    store = room.store(table="my_outbox")
    await store.open()
    await store.close()


@pytest.mark.requirement("S1-09")
def test_the_printed_statements_run_in_psql(postgres: PostgresRoom) -> None:
    """They need no library of ours."""
    script = ";\n".join(postgres.statements(Names(schema="apart")))

    PostgresClient(postgres.where).query(script)

    assert asyncio.run(differences(postgres, schema="apart")) == []


@pytest.mark.requirement("S1-11")
async def test_tables_and_schemas_can_have_other_names_side_by_side(postgres: PostgresRoom) -> None:
    """Names are configurable, and several outboxes do not meet."""
    for table, schema in (("a", None), ("b", None), ("a", "apart")):
        assert await applied(postgres, table=table, schema=schema) is True
        assert await differences(postgres, table=table, schema=schema) == []
    with postgres.connect() as connection, connection.transaction():
        Outbox(table="a", schema="apart").add(connection, Message(topic="t", payload=b"x"))

    counts = [postgres.run(f"SELECT count(*) FROM {name}")[0][0] for name in ("a", "b", "apart.a")]

    assert counts == [0, 0, 1]


def _random_name(dice: random.Random) -> str:
    alphabet = dice.choice(
        [string.ascii_lowercase + "_", string.ascii_lowercase + string.digits + "_", string.printable, "äß\x00\"`'; -"]
    )
    return "".join(dice.choice(alphabet) for _ in range(dice.choice([0, 1, 2, 5, 20, 44, 45, 46, 63])))


WORDS = [
    "select",
    "table",
    "order",
    "user",
    "group",
    "key",
    "all",
    "index",
    "values",
    "_",
    "a" * 45,
    "sqlite_a",
    "pg_a",
]


@pytest.mark.requirement("S1-11")
def test_a_name_is_either_refused_or_works_quoted() -> None:
    """Two thousand names, some of them words of SQL, none of which can break out."""
    dice = random.Random(11)
    accepted = 0
    with closing(sqlite3.connect(":memory:")) as connection:
        for name in [*WORDS, *(_random_name(dice) for _ in range(2000))]:
            try:
                names = Names(table=name)
            except InvalidNameError:
                continue
            accepted += 1
            for text in SQLiteSchema(SQLite(names)).statements():
                connection.execute(text)
            [(found,)] = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = ?", (name,))
            assert found == 1
            connection.execute(f'DROP TABLE "{name}"')
            connection.execute(f'DROP TABLE "{name}_version"')
            connection.execute(f'DROP VIEW "{name}_messages"')
            connection.execute(f'DROP VIEW "{name}_published"')

    assert 200 < accepted < 1900


@pytest.mark.requirement("S1-11")
@pytest.mark.parametrize("name", ["select", "order", "_", "a" * 45])
async def test_words_of_sql_and_the_longest_name_work_on_servers(name: str, room: Room) -> None:
    """Identifiers are quoted, and there is room for the names of indexes."""
    assert await applied(room, table=name) is True

    assert await differences(room, table=name) == []


@pytest.mark.requirement("S1-11")
@pytest.mark.parametrize("name", ["", "A", "a b", "a;b", 'a"b', "a`b", "a" * 46, "1a", "ä", "a\n", "sqlite_x", "pg_x"])
@pytest.mark.parametrize("kind", ["table", "schema"])
def test_a_name_that_is_no_plain_identifier_is_refused(kind: str, name: str) -> None:
    """Identifiers cannot be bound, so they are checked."""
    with pytest.raises(InvalidNameError, match=f"cannot name a {kind}; use a lower-case letter"):
        PostgresStore("postgresql://localhost/shop", **{kind: name})  # type: ignore[arg-type]


@pytest.mark.requirement("S1-11")
@pytest.mark.parametrize("name", ["", "A", "a;b", "a" * 46, "sqlite_x", "pg_x"])
def test_the_name_of_an_inbox_is_checked_like_that_of_an_outbox(name: str) -> None:
    """Identifiers cannot be bound, so they are checked."""
    with pytest.raises(InvalidNameError, match="cannot name a table; use a lower-case letter"):
        PostgresStore("postgresql://localhost/shop", inbox=name)


@pytest.mark.requirement("S1-11")
@pytest.mark.parametrize(
    ("table", "inbox", "shared"),
    [("a", "a", "a"), ("a_dead", "a", "a_dead"), ("a", "a_version", "a_version"), ("b", "b_messages", "b_messages")],
)
def test_an_inbox_cannot_be_called_as_a_part_of_the_outbox(table: str, inbox: str, shared: str) -> None:
    """PostgreSQL keeps tables, views and indexes under one roof."""
    with pytest.raises(InvalidNameError, match=f"{shared} would be a part of the outbox {table} as well"):
        Names(table=table, inbox=inbox)


@pytest.mark.requirement("S1-11")
@pytest.mark.parametrize(("table", "inbox"), [("a", "select"), ("a", "a" * 45), ("mail", "mail_inbox")])
async def test_an_inbox_can_have_another_name(room: Room, table: str, inbox: str) -> None:
    """Also a word of SQL, also the longest."""
    names = Names(table=table, inbox=inbox)
    room.run(*room.statements(names))
    found = room.run(f"SELECT count(*) FROM {room.quote}{inbox}_dead{room.quote}")

    assert found[0][0] == 0
    assert await differences_of(room, names) == []


async def differences_of(room: Room, names: Names) -> list[str]:
    store = room.store(table=names.table, inbox=names.inbox)
    try:
        return await store.check_schema()
    finally:
        await store.close()


# -- what is in it -----------------------------------------------------------------------------------------------


@pytest.mark.requirement("S1-04", "S1-12")
async def test_no_work_ever_changes_the_schema(room: Room) -> None:
    """Neither constructors nor opening, adding, claiming, settling or upkeep run any DDL."""
    await applied(room)
    before = room.everything()

    store = room.store()
    await store.open()
    with closing(room.connect()) as connection:
        connection.execute("BEGIN IMMEDIATE") if isinstance(room, SQLiteRoom) else connection.cursor().execute("BEGIN")
        Outbox().add(connection, [Message(topic="t", payload=b"{}", key=key) for key in (None, "k")])
        connection.cursor().execute("COMMIT")
    claims = [*await store.claim(10, TERMS), *await store.claim(10, TERMS)]
    await store.settle([Settlement(claim, Delivered()) for claim in claims])
    await store.sweep(TERMS)
    await store.stats()
    await store.purge(older_than=timedelta(0))
    with closing(room.connect()) as connection:
        connection.execute("BEGIN IMMEDIATE") if isinstance(room, SQLiteRoom) else connection.cursor().execute("BEGIN")
        writer, inbox = writer_of(connection), store.inbox("stock")
        writer.admit(connection, inbox, claims[0].message)
        writer.bury(connection, inbox, claims[0].message, "no")
        writer.purge_inbox(connection, inbox, 10)
        connection.cursor().execute("COMMIT")
    await store.close()

    assert len(claims) == 2
    assert room.everything() == before


@pytest.mark.requirement("S1-08", "S4-04", "S4-05")
async def test_the_views_show_the_tables_of_the_seeds(room: Room) -> None:
    """Their columns, filled from the one table; published only once it is delivered."""
    await applied(room)
    store = room.store()
    with closing(room.connect()) as connection:
        connection.cursor().execute("BEGIN")
        message = Message(topic="orders", type="order.placed", payload=b'{"a": 1}', content_type="application/json")
        raw = Message(topic="raw", payload=b"\xff", content_type="application/octet-stream")
        Outbox().add(connection, [message, raw])
        connection.cursor().execute("COMMIT")

    pending = room.run("SELECT topic, event_type, data, published FROM postroom_outbox_published ORDER BY id")
    unpublished = room.run("SELECT count(*) FROM postroom_outbox_messages WHERE published_at IS NULL")[0][0]
    claims = await store.claim(10, TERMS)
    await store.settle([Settlement(claim, Delivered()) for claim in claims if claim.message.topic == "orders"])
    await store.close()

    assert [(row[0], row[1], bool(row[3])) for row in pending] == [
        ("orders", "order.placed", False),
        ("raw", "raw", False),
    ]
    assert pending[0][2] in ({"a": 1}, '{"a": 1}')
    assert pending[1][2] is None
    assert unpublished == 2
    after = room.run("SELECT topic, published FROM postroom_outbox_published ORDER BY id")
    assert [(topic, bool(published)) for topic, published in after] == [("orders", True), ("raw", False)]
    stamped = room.run("SELECT attempts FROM postroom_outbox_messages WHERE published_at >= created_at")
    assert [row[0] for row in stamped] == [1]
    assert columns(room, "postroom_outbox_published") == [
        *("id", "created_at", "topic", "event_type", "data", "attributes", "published")
    ]
    assert columns(room, "postroom_outbox_messages") == [
        *("id", "payload", "properties", "created_at", "published_at", "attempts", "last_error", "updated_at")
    ]


#: What a producer may have written by raw SQL, or under the wrong content type.
NOT_JSON = (
    *(b"not json", b"", b'"\\u0000"', b"\x00", b"\xff", b'{"a": "\xff"}', b'"\\ud800"', b"1e999999"),
    b"[" * 100_000,
)


async def test_payloads_that_are_no_json_do_not_spoil_the_view(room: Room) -> None:
    """Their rows have no data, or the text as it is; all other rows are shown."""
    await applied(room)
    good = b'{"a": 1}'
    with closing(room.connect()) as connection:
        connection.cursor().execute("BEGIN")
        for payload in NOT_JSON:
            messages = [Message(topic="t", payload=body, content_type="application/json") for body in (good, payload)]
            Outbox().add(connection, messages)
        connection.cursor().execute("COMMIT")

    shown = [row[0] for row in room.run("SELECT data FROM postroom_outbox_published ORDER BY id")]

    assert [data in ({"a": 1}, '{"a": 1}') for data in shown] == [True, False] * len(NOT_JSON)
    if isinstance(room, PostgresRoom):
        assert shown[1::2] == [None] * len(NOT_JSON)


async def test_a_role_that_may_only_read_the_view_can_read_it_where_functions_are_not_for_everyone(
    postgres: PostgresRoom,
) -> None:
    """The view calls a function, and PostgreSQL asks whether the reader may."""
    postgres.run("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC")
    await applied(postgres, schema="apart")
    role = f"reader_{uuid4().hex}"
    postgres.run(f"CREATE ROLE {role}", f"GRANT SELECT ON apart.postroom_outbox_published TO {role}")
    postgres.run(f"GRANT USAGE ON SCHEMA apart TO {role}")
    with postgres.connect() as connection:
        with connection.transaction():
            message = Message(topic="t", payload=b"1", content_type="application/json")
            Outbox(schema="apart").add(connection, message)
        connection.execute(f"SET ROLE {role}".encode())

        shown = connection.execute("SELECT data FROM apart.postroom_outbox_published").fetchall()

        connection.execute("RESET ROLE")
        connection.execute(f"DROP OWNED BY {role}".encode())
        connection.execute(f"DROP ROLE {role}".encode())

    assert shown == [(1,)]


def columns(room: Room, view: str) -> list[str]:
    with closing(room.connect()) as connection:
        cursor = connection.cursor()
        cursor.execute(f"SELECT * FROM {view}")
        names = [column[0] for column in cursor.description]
        cursor.close()
        return names


BAD_ROWS = [
    "UPDATE postroom_outbox SET status = 'sent'",
    "UPDATE postroom_outbox SET status = 'processing'",
    "UPDATE postroom_outbox SET status = NULL",
    "UPDATE postroom_outbox SET locked_by = id",
    "UPDATE postroom_outbox SET locked_by = id, locked_until = created_at",
    "UPDATE postroom_outbox SET status = 'processing', locked_by = id",
    "UPDATE postroom_outbox SET status = 'processing', locked_until = created_at",
]


@pytest.mark.requirement("S2-07")
@pytest.mark.parametrize("bad", BAD_ROWS)
async def test_the_database_refuses_a_row_in_an_impossible_state(room: Room, bad: str) -> None:
    """A known status, and a lock exactly while it is processing."""
    await applied(room)
    with closing(room.connect()) as connection:
        connection.cursor().execute("BEGIN")
        Outbox().add(connection, Message(topic="t", payload=b""))
        connection.cursor().execute("COMMIT")

    with pytest.raises(
        (psycopg.IntegrityError, pymysql.err.IntegrityError, pymysql.err.OperationalError, sqlite3.IntegrityError)
    ):
        room.run(bad)

    room.run("UPDATE postroom_outbox SET status = 'processing', locked_by = id, locked_until = created_at")


@pytest.mark.requirement("S2-06")
async def test_the_columns_of_the_outbox_are_those_that_were_asked_for(room: Room) -> None:
    """Names as given, and one row for each dedupe key."""
    await applied(room)

    assert set(columns(room, "postroom_outbox")) >= {
        *("id", "namespace", "topic", "tenant_id", "dedupe_key", "payload", "status", "attempts", "next_attempt_at"),
        *("locked_by", "locked_until", "last_error", "created_at", "updated_at"),
    }


@pytest.mark.requirement("S1-07")
async def test_the_inbox_has_the_columns_that_were_asked_for(room: Room) -> None:
    """Its key is the consumer and the id; a view has them under the names of the seed."""
    await applied(room)
    message = Message(topic="t", payload=b"{}")
    with closing(room.connect()) as connection:
        connection.cursor().execute("BEGIN")
        writer_of(connection).admit(connection, room.store().inbox("stock"), message)
        connection.cursor().execute("COMMIT")

    shown = room.run("SELECT subscriber, created_at FROM postroom_inbox_processed")

    assert set(columns(room, "postroom_inbox")) >= {"consumer", "tenant_id", "message_id", "created_at"}
    assert columns(room, "postroom_inbox_processed") == ["subscriber", "message_id", "created_at"]
    assert columns(room, "postroom_inbox_dead") == [
        *("consumer", "tenant_id", "message_id", "topic", "type", "key", "namespace", "payload", "content_type"),
        *("headers", "attempts", "error", "died_at"),
    ]
    assert [row[0] for row in shown] == ["stock"]
    assert shown[0][1]
    insert = "INSERT INTO postroom_inbox (consumer, tenant_id, message_id, created_at) "
    with pytest.raises((psycopg.IntegrityError, pymysql.err.IntegrityError, sqlite3.IntegrityError)):
        room.run(insert + "SELECT consumer, tenant_id, message_id, created_at FROM postroom_inbox")
