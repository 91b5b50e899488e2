"""The outbox: what it refuses, what it stores, and when it tells the dispatcher."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, make_dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pymysql
import pytest
import sqlalchemy
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from postroom import AddResult, ClaimTerms, Delivered, Limits, Message, Outbox, Settlement
from postroom.errors import (
    EncodeError,
    InvalidDedupeKeyError,
    InvalidDueTimeError,
    InvalidHeaderError,
    InvalidKeyError,
    InvalidMessageError,
    InvalidNameError,
    InvalidTopicError,
    MessageError,
    NotInTransactionError,
    PayloadTooLargeError,
    PostroomError,
    TenantMismatchError,
    UnknownConnectionError,
    UnsupportedDatabaseError,
)
from postroom.message import validate
from postroom.stores import MemoryStore, PostgresStore, SQLiteStore, SQLStore, store_from_url
from postroom.testing.clients import MariaDBClient, PostgresClient

from .worlds import DATABASES

TENANT = UUID("0197a4c2-7e6b-7d3e-9f51-3a2b1c0d4e5f")


class Rated(NamedTuple):
    stars: int


# -- the databases ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Database:
    """One database with the tables of the outbox in it."""

    kind: str
    url: str

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Open a sync connection that begins transactions by itself."""
        parsed = sqlalchemy.make_url(self.url)
        connection: Any
        if self.kind == "sqlite":
            connection = sqlite3.connect(parsed.database or "")
        elif self.kind == "postgres":
            connection = psycopg.connect(self.url)
        else:
            connection = pymysql.connect(
                host=parsed.host, port=parsed.port or 0, user=parsed.username, database=parsed.database
            )
        try:
            yield connection
        finally:
            connection.close()

    def look(self, sql: str) -> list[tuple[Any, ...]]:
        with self.connected() as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            return list(cursor.fetchall())

    def count(self) -> int:
        counted: int = self.look("SELECT count(*) FROM postroom_outbox")[0][0]
        return counted

    def store(self, namespace: str = "default") -> SQLStore:
        opened = store_from_url(self.url, namespace=namespace, keep_delivered=timedelta(0))
        assert isinstance(opened, SQLStore)
        return opened


async def apply_schema(store: SQLStore) -> None:
    await store.apply_schema()
    await store.close()


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest) -> Database:
    """A database of this test's own."""
    kind: str = request.param
    name = {"sqlite": "sqlite_path", "postgres": "postgres_dsn", "mariadb": "mariadb_dsn"}[kind]
    place = request.getfixturevalue(name)
    made = Database(kind, f"sqlite:///{place}" if kind == "sqlite" else place)
    asyncio.run(apply_schema(made.store()))
    return made


@pytest.fixture(scope="module", params=DATABASES)
def shared(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Database]:
    """A database for tests that leave nothing behind."""
    kind: str = request.param
    if kind == "sqlite":
        made = Database(kind, f"sqlite:///{tmp_path_factory.mktemp('shared') / 'shop.sqlite3'}")
        asyncio.run(apply_schema(made.store()))
        yield made
        return
    server: PostgresClient | MariaDBClient = request.getfixturevalue(f"{kind}_server")
    name = f"test_{uuid4().hex}"
    made = Database(kind, server.create_database(name))
    try:
        asyncio.run(apply_schema(made.store()))
        yield made
    finally:
        server.drop_database(name)


# -- what is refused -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """One thing that `add` must not take, why, and what the error must advise."""

    error: type[PostroomError]
    remedy: str
    event: object
    options: dict[str, Any]
    outbox: Outbox


def refusal(
    error: type[PostroomError],
    remedy: str,
    event: object = None,
    *,
    outbox: Outbox | None = None,
    **options: Any,  # noqa: ANN401
) -> Refusal:
    chosen = {"card": "canary-4111"} if event is None else event
    if not isinstance(chosen, Message):
        options = {"topic": "orders", **options}
    return Refusal(error, remedy, chosen, options, outbox or Outbox())


class Unencodable:
    def __repr__(self) -> str:
        return "canary-4111"


MESSAGE = Message(topic="orders", payload=b"canary-4111")
LONG = make_dataclass("X" * 300, [("card", str)])("canary-4111")
REFUSALS = {
    "empty topic": refusal(InvalidTopicError, "pass another topic=", topic=""),
    "long topic": refusal(InvalidTopicError, "1 to 249", topic="x" * 250),
    "control character in a topic": refusal(InvalidTopicError, "without control", topic="a\nb"),
    "lone surrogate in a topic": refusal(InvalidTopicError, "without control", topic="\ud83d"),
    "no topic": refusal(InvalidMessageError, "needs topic=", topic=None),
    "empty key": refusal(InvalidKeyError, "pass key=None", key=""),
    "long key": refusal(InvalidKeyError, "1 to 255", key="x" * 256),
    "NUL in a key": refusal(InvalidKeyError, "without control", key="a\x00"),
    "key that is a number": refusal(InvalidKeyError, "must be text", key=42),
    "empty dedupe key": refusal(InvalidDedupeKeyError, "1 to 255", dedupe_key=""),
    "long dedupe key": refusal(InvalidDedupeKeyError, "hash a longer one", dedupe_key="x" * 256),
    "lone surrogate in a dedupe key": refusal(InvalidDedupeKeyError, "without control", dedupe_key="\udfff"),
    "long type": refusal(InvalidMessageError, "pass type=", type="x" * 256),
    "content type with LF": refusal(InvalidMessageError, "pass content_type=", content_type="a\nb"),
    "header with CR LF": refusal(InvalidHeaderError, "CR and LF", headers={"h": "canary-4111\r\nx: y"}),
    "header name with a blank": refusal(InvalidHeaderError, "use 1 to 128 of", headers={"a b": "canary-4111"}),
    "too many headers": refusal(InvalidHeaderError, "at most 64", headers={f"h{n}": "canary-4111" for n in range(65)}),
    "too large headers": refusal(InvalidHeaderError, "at most 8192", headers={"h": "canary-4111" * 1000}),
    "headers in a list": refusal(InvalidHeaderError, "pass a mapping", headers=[("h", "canary-4111")]),
    "value without a JSON form": refusal(EncodeError, "a codec of your own", {"a": Unencodable()}),
    "bare value": refusal(EncodeError, "pass a dict", "canary-4111"),
    "not a number": refusal(EncodeError, "pass a dict", {"a": float("nan"), "b": "canary-4111"}),
    "large payload": refusal(PayloadTooLargeError, "send a reference", b"canary-4111" * 24_000),
    "payload over a limit of the outbox": refusal(
        PayloadTooLargeError, "over the limit of 10", b"canary-4111", outbox=Outbox(limits=Limits(payload=10))
    ),
    "text as the payload of a Message": refusal(
        InvalidMessageError,
        "bytes, not str",
        Message(topic="orders", payload="canary-4111"),  # type: ignore[arg-type]
    ),
    "moment without a time zone": refusal(
        InvalidDueTimeError,
        r"use datetime\.now\(UTC\)",
        due_at=datetime(2030, 1, 1),  # noqa: DTZ001
    ),
    "moment before 1970": refusal(InvalidDueTimeError, "1970", due_at=datetime(1969, 1, 1, tzinfo=UTC)),
    "moment at the end of time": refusal(InvalidDueTimeError, "9998", due_at=datetime.max.replace(tzinfo=UTC)),
    "moment as text": refusal(InvalidDueTimeError, "convert", due_at="2030-01-01"),
    "moment and delay": refusal(
        InvalidDueTimeError, "not both", due_at=datetime(2030, 1, 1, tzinfo=UTC), delay=timedelta(seconds=1)
    ),
    "negative delay": refusal(InvalidDueTimeError, "leave it out", delay=timedelta(seconds=-1)),
    "endless delay": refusal(InvalidDueTimeError, "a shorter one", delay=timedelta.max),
    "delay as a number": refusal(InvalidDueTimeError, "convert", delay=5),
    "tenant and dedupe key that differ": refusal(
        TenantMismatchError, "opaque_dedupe_keys=True", tenant_id=TENANT, dedupe_key="order-42"
    ),
    "tenant as text": refusal(InvalidMessageError, "UUID, not str", tenant_id=str(TENANT)),
    "Message and topic": refusal(InvalidMessageError, "leave them out", MESSAGE, topic="orders"),
    "Message and dedupe key": refusal(InvalidMessageError, "leave them out", MESSAGE, dedupe_key="k"),
    "one dedupe key for many": refusal(InvalidMessageError, "pass Message objects", [{}, {}], dedupe_key="k"),
    "bad one among many": refusal(EncodeError, "pass a dict", [{}, Unencodable()]),
    "large payload among many": refusal(PayloadTooLargeError, "send a reference", [{}, {"a": "canary-4111" * 24_000}]),
    "long type among many": refusal(InvalidMessageError, "pass type=", [{}, LONG]),
    "misspelt option": refusal(InvalidMessageError, "takes no dedup_key; it takes content_type", dedup_key="k"),
    "table name that is none": refusal(
        InvalidNameError, "use a lower-case letter", outbox=Outbox(table="Robert'); --")
    ),
    "schema name that is none": refusal(InvalidNameError, "use a lower-case letter", outbox=Outbox(schema="a.b")),
}


@pytest.mark.requirement("S2-22")
def test_the_result_of_a_duplicate_is_false_in_a_condition_and_no_tuple() -> None:
    """``if outbox.add(...):`` asks whether something was added."""
    identity = UUID(int=1)
    new, duplicate = AddResult(identity, is_new=True), AddResult(identity, is_new=False)

    assert new
    assert not duplicate
    assert not isinstance(new, tuple)
    assert (duplicate.id, duplicate.is_new) == (identity, False)
    assert duplicate == AddResult(identity, is_new=False) != new


@pytest.mark.requirement("S2-17")
def test_a_named_tuple_is_one_event_with_every_option(sqlite_path: Path) -> None:
    """A dedupe key may stand for it, as for any one event."""
    connection = sqlite3.connect(sqlite_path)
    SQLiteStore.create_tables(connection)
    with closing(connection), connection:
        results = [Outbox().add(connection, Rated(5), topic="ratings", dedupe_key="r-1") for _ in range(2)]

    assert [result.is_new for result in results] == [True, False]


@pytest.mark.requirement("G11", "S1-11", "S1-27", "S2-15")
@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_with_its_remedy_and_nothing_is_written(shared: Database, name: str) -> None:
    """Every mistake has an error that says what to do, and shows no payload and no header."""
    bad = REFUSALS[name]

    with shared.connected() as connection:
        with pytest.raises(bad.error, match=bad.remedy) as caught:
            bad.outbox.add(connection, bad.event, **bad.options)
        connection.commit()

    assert type(caught.value) is bad.error
    text = "".join(str(error) for error in (caught.value, caught.value.__cause__, caught.value.__context__))
    assert "canary" not in text
    assert shared.count() == 0


@pytest.mark.requirement("S4-03")
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (object, "pass the connection or session that holds your transaction: asyncpg, psycopg"),
        (lambda: "postgresql://localhost/shop", "builtins.str; pass the connection"),
        (lambda: orm.sessionmaker(), "acquire one and begin a transaction"),  # noqa: PLW0108
        (lambda: async_sessionmaker(), "acquire one and begin a transaction"),  # noqa: PLW0108
        (lambda: sqlalchemy.create_engine("sqlite://"), "acquire one and begin a transaction"),
        (lambda: create_async_engine("sqlite+aiosqlite://"), "acquire one and begin a transaction"),
    ],
    ids=["object", "url", "sessionmaker", "async_sessionmaker", "engine", "async engine"],
)
def test_what_holds_no_transaction_is_refused(make: Callable[[], Any], remedy: str) -> None:
    """The error names what is accepted, and a pool is told from a connection."""
    with pytest.raises(UnknownConnectionError, match=remedy):
        Outbox().add(make(), {"n": 1}, topic="t")


@pytest.mark.requirement("S4-03")
async def test_a_pool_of_asyncpg_is_refused(postgres_dsn: str) -> None:
    """Each statement on a pool may use another connection, so that it can hold no transaction."""
    async with asyncpg.create_pool(postgres_dsn, min_size=0) as pool:
        with pytest.raises(UnknownConnectionError, match="acquire one and begin a transaction"):
            Outbox().add(pool, {"n": 1}, topic="t")  # type: ignore[call-overload]


@pytest.mark.requirement("S4-03")
def test_a_database_without_a_dialect_is_refused() -> None:
    """SQLAlchemy also speaks to databases that postroom does not know."""
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection:
        engine.dialect.name = "oracle"
        with pytest.raises(UnsupportedDatabaseError, match="use PostgreSQL, MySQL, MariaDB or SQLite"):
            Outbox().add(connection, {"n": 1}, topic="t")
    engine.dispose()


@pytest.mark.requirement("S2-05")
def test_a_namespace_that_is_none_is_refused_at_once() -> None:
    """A namespace is a name."""
    with pytest.raises(InvalidNameError, match="1 to 100 printable"):
        Outbox(namespace="")


@pytest.mark.requirement("G11", "S2-24")
def test_a_payload_exactly_at_the_limit_is_stored(database: Database) -> None:
    """A limit is the largest size that is allowed."""
    payload = b"\xff" * (256 * 1024)

    with database.connected() as connection:
        Outbox().add(connection, payload, topic="t")
        connection.commit()

    assert [bytes(row[0]) for row in database.look("SELECT payload FROM postroom_outbox")] == [payload]


@pytest.mark.requirement("S1-25", "S1-26")
def test_an_empty_list_writes_nothing_and_needs_a_transaction_all_the_same(sqlite_path: Path) -> None:
    """What is wrong with many is wrong with none."""
    connection = sqlite3.connect(sqlite_path, isolation_level=None)
    SQLiteStore.create_tables(connection)
    with pytest.raises(NotInTransactionError):
        Outbox().add(connection, [], topic="t")
    connection.execute("BEGIN")
    assert Outbox().add(connection, [], topic="t") == []
    assert connection.execute("SELECT count(*) FROM postroom_outbox").fetchone() == (0,)
    connection.close()


# -- what is stored --------------------------------------------------------------------------------------------


def accepted(**parts: Any) -> bool:  # noqa: ANN401
    try:
        validate(Message(**{"topic": "t", "type": "t", "payload": b"", **parts}), Limits())
    except MessageError:
        return False
    return True


# Any text at all: what is not accepted is left out by the rules themselves, so that a rule too lax shows.
TEXT = st.one_of(
    st.text(min_size=1, max_size=20), st.text(st.characters(min_codepoint=0x300), min_size=1, max_size=255)
)
KEYS = TEXT.filter(lambda text: accepted(key=text))
MESSAGES = st.builds(
    Message,
    topic=TEXT.filter(lambda text: accepted(topic=text)),
    type=KEYS,
    payload=st.binary(max_size=300),
    key=st.none() | KEYS,
    content_type=KEYS,
    headers=st.dictionaries(
        st.text("abcXYZ019!#$%&'*+.^_`|~-", min_size=1, max_size=20),
        st.text(max_size=30).filter(lambda text: accepted(headers={"h": text})),
        max_size=5,
    ),
    dedupe_key=st.none() | KEYS,
    tenant_id=st.none(),
)
AWKWARD = Message(
    topic="e\u0301te\u0301\U0001f600" * 20,
    type="\U0010ffff\ufffe",
    payload=bytes(range(256)) + b"\x00\xff'\"\\%s:name?$1",
    key="\U0001f468\u200d\U0001f469\u200d\U0001f467" * 51,
    content_type="%s %% :name ? $1 ' \" \\ ;--",
    headers={"%s": "\u2028 ' \" \\ %s :name \U0001f600 ", "a'b": "", "A'B": "{}"},
    dedupe_key="\U0001f600" * 255,
)


@pytest.mark.requirement("G5", "S2-16", "S2-19", "S2-25")
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=st.lists(MESSAGES, min_size=1, max_size=5, unique_by=lambda m: (m.topic, m.dedupe_key or m.id)))
@example(messages=[AWKWARD])
@example(messages=[AWKWARD, Message(topic="t", type="t", payload=b"", tenant_id=TENANT, dedupe_key=f"{TENANT.hex}/1")])
def test_what_is_accepted_comes_back_unchanged(shared: Database, messages: list[Message]) -> None:
    """Text of any script and bytes of any value survive every database."""
    with shared.connected() as connection:
        added = Outbox().add(connection, messages)
        connection.commit()

    claimed = asyncio.run(drain(shared.store()))

    assert added == [AddResult(message.id, is_new=True) for message in messages]
    assert sorted(claimed, key=lambda message: message.id) == sorted(messages, key=lambda message: message.id)
    assert {message.id: dict(message.headers) for message in claimed} == {m.id: dict(m.headers) for m in messages}


async def drain(store: SQLStore) -> list[Message]:
    """Take everything out of a store."""
    terms = ClaimTerms(worker=uuid4())
    messages: list[Message] = []
    try:
        while claims := await store.claim(100, terms):
            messages += [claim.message for claim in claims]
            await store.settle([Settlement(claim, Delivered()) for claim in claims])
    finally:
        await store.close()
    return messages


@dataclass(frozen=True)
class OrderPlaced:
    order_id: int


@pytest.mark.requirement("S1-23", "S2-16", "S2-17")
@pytest.mark.parametrize(
    ("event", "options", "expected"),
    [
        (OrderPlaced(42), {}, (b'{"order_id":42}', "order.placed", "application/json")),
        ({"a": "é"}, {}, ('{"a":"é"}'.encode(), "orders", "application/json")),
        (b"\x00\xff", {}, (b"\x00\xff", "orders", "application/octet-stream")),
        (bytearray(b"x"), {"type": "raw"}, (b"x", "raw", "application/octet-stream")),
        (memoryview(b"x"), {"content_type": "text/plain"}, (b"x", "orders", "text/plain")),
    ],
)
def test_an_event_is_encoded_and_named(event: object, options: dict[str, Any], expected: tuple[object, ...]) -> None:
    """The type is that of the event's class, or what is said."""
    message = Outbox(namespace="shop").prepare(event, topic="orders", **options).message

    assert (message.payload, message.type, message.content_type) == expected
    assert message.namespace == "shop"


@pytest.mark.requirement("G5", "S2-05")
def test_a_message_is_written_as_it_is_under_the_namespace_of_the_outbox() -> None:
    """A message that is passed on keeps its id."""
    message = Message(topic="orders", payload=b"{}", key="42", headers={"a": "b"})

    prepared = Outbox(namespace="shop").prepare(message)

    assert prepared.given
    assert prepared.message.namespace == "shop"
    assert prepared.message.type == "orders"
    assert (prepared.message.id, prepared.message.key, prepared.message.headers) == (message.id, "42", {"a": "b"})


@pytest.mark.requirement("S2-16")
async def test_headers_changed_before_the_add_is_awaited_do_not_change_the_message(postgres_dsn: str) -> None:
    """What was checked is what is written."""
    await apply_schema(Database("postgres", postgres_dsn).store())
    headers = {"a": "b"}
    connection = await asyncpg.connect(postgres_dsn)
    async with connection.transaction():
        adding = Outbox().add(connection, {"n": 1}, topic="t", headers=headers)
        headers["bad\r\n"] = "x"
        await adding
    stored = await connection.fetchval("SELECT headers::text FROM postroom_outbox")
    await connection.close()

    assert stored == '{"a": "b"}'


@pytest.mark.requirement("S1-23")
def test_a_codec_of_ones_own_is_used() -> None:
    """The payload is whatever the codec makes of the event."""

    class Upper:
        content_type = "text/upper"

        def encode(self, event: object) -> bytes:
            return repr(event).upper().encode()

        def decode(self, payload: bytes, _: object = object, /) -> object:
            return payload

    message = Outbox(codec=Upper()).prepare({"a": 1}, topic="t").message

    assert (message.payload, message.content_type) == (b"{'A': 1}", "text/upper")


@pytest.mark.requirement("S2-12", "S2-13", "S2-15")
def test_a_tenant_and_an_opaque_dedupe_key_are_stored_apart(database: Database) -> None:
    """With the switch on, the two may differ; without a tenant it is a system event."""
    with database.connected() as connection:
        Outbox(opaque_dedupe_keys=True).add(connection, {}, topic="t", tenant_id=TENANT, dedupe_key="order-42")
        Outbox().add(connection, {}, topic="t", tenant_id=TENANT, dedupe_key=f"{TENANT}/order-42")
        Outbox().add(connection, {}, topic="t", dedupe_key="system")
        connection.commit()
    terms = ClaimTerms(worker=uuid4())

    claimed = asyncio.run(claim(database.store(), terms))

    assert {(m.tenant_id, m.dedupe_key) for m in claimed} == {
        (TENANT, "order-42"),
        (TENANT, f"{TENANT}/order-42"),
        (None, "system"),
    }


async def claim(store: SQLStore, terms: ClaimTerms) -> list[Message]:
    try:
        return [claim.message for claim in await store.claim(100, terms)]
    finally:
        await store.close()


# -- when it is due --------------------------------------------------------------------------------------------

SECONDS_UNTIL_DUE = {
    "sqlite": "(next_attempt_at - created_at) / 1000.0",
    "postgres": "extract(epoch FROM next_attempt_at - created_at)",
    "mariadb": "TIMESTAMPDIFF(MICROSECOND, created_at, next_attempt_at) / 1000000",
}
DUE = {
    "sqlite": "next_attempt_at / 1000.0",
    "postgres": "extract(epoch FROM next_attempt_at)",
    # Not UNIX_TIMESTAMP(), which would read the time zone of the session into it.
    "mariadb": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', next_attempt_at) / 1000000",
}


@pytest.mark.requirement("S2-24")
@pytest.mark.parametrize("many", [False, True])
def test_a_delay_is_counted_by_the_clock_of_the_store(database: Database, *, many: bool) -> None:
    """From when it was stored, whatever the time zone of server and client."""
    event: object = [{}, {}] if many else {}
    with database.connected() as connection:
        Outbox().add(connection, event, topic="t", delay=timedelta(hours=1, milliseconds=500))
        connection.commit()

    [row, *_] = database.look(f"SELECT {SECONDS_UNTIL_DUE[database.kind]} FROM postroom_outbox")

    assert float(row[0]) == pytest.approx(3600.5, abs=1)
    assert asyncio.run(claim(database.store(), ClaimTerms(worker=uuid4()))) == []


@pytest.mark.requirement("S2-24")
@pytest.mark.parametrize("many", [False, True])
def test_a_moment_is_stored_exactly_in_whatever_time_zone_it_was_given(database: Database, *, many: bool) -> None:
    """An aware moment means the same everywhere."""
    event: object = [{}, {}] if many else {}
    moment = datetime(2031, 7, 1, 3, 4, 5, 678_000, tzinfo=timezone(timedelta(hours=-9, minutes=-30)))
    with database.connected() as connection:
        Outbox().add(connection, event, topic="t", due_at=moment)
        connection.commit()

    [row, *_] = database.look(f"SELECT {DUE[database.kind]} FROM postroom_outbox")

    assert float(row[0]) == pytest.approx(moment.timestamp(), abs=0.001)


@pytest.mark.requirement("S2-24")
def test_a_moment_in_the_past_is_due_at_once(database: Database) -> None:
    """Only the future can be waited for."""
    with database.connected() as connection:
        Outbox().add(connection, {}, topic="t", due_at=datetime.now(UTC) - timedelta(seconds=1))
        Outbox().add(connection, {}, topic="t")
        connection.commit()

    assert len(asyncio.run(claim(database.store(), ClaimTerms(worker=uuid4())))) == 2


# -- the wake-up -----------------------------------------------------------------------------------------------


class Bell:
    """Counts how often it was rung."""

    def __init__(self) -> None:
        self.rung = 0

    def __call__(self) -> None:
        self.rung += 1


@contextmanager
def session_on(path: Path) -> Iterator[orm.Session]:
    connection = sqlite3.connect(path)
    SQLiteStore.create_tables(connection)
    connection.commit()
    connection.close()
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    with orm.Session(engine) as session:
        yield session
    engine.dispose()


@pytest.mark.requirement("S2-34")
def test_a_session_wakes_once_after_its_commit(sqlite_path: Path) -> None:
    """However much was added, one hint is enough; and none before the commit."""
    bell = Bell()
    outbox = Outbox(wake=bell)
    with session_on(sqlite_path) as session:
        for n in range(3):
            outbox.add(session, {"n": n}, topic="t")
        before = bell.rung
        session.commit()
        after = bell.rung
        session.execute(sqlalchemy.text("SELECT 1"))
        session.commit()

    assert (before, after, bell.rung) == (0, 1, 1)


@pytest.mark.requirement("G3")
@pytest.mark.parametrize("end", ["rollback", "close"])
def test_a_session_does_not_wake_for_what_was_rolled_back(sqlite_path: Path, end: str) -> None:
    """Nor does the commit of a later transaction, to which nothing was added."""
    bell = Bell()
    outbox = Outbox(wake=bell)
    with session_on(sqlite_path) as session:
        outbox.add(session, {"n": 1}, topic="t")
        getattr(session, end)()
        session.execute(sqlalchemy.text("SELECT 1"))
        session.commit()
        silent = bell.rung
        outbox.add(session, {"n": 2}, topic="t")
        session.commit()

    assert (silent, bell.rung) == (0, 1)


@pytest.mark.requirement("G3")
def test_a_session_does_not_wake_when_a_savepoint_is_released(sqlite_path: Path) -> None:
    """SQLAlchemy tells of it as of a commit, though nothing is visible yet."""
    bell = Bell()
    outbox = Outbox(wake=bell)
    with session_on(sqlite_path) as session:
        with session.begin_nested():
            outbox.add(session, {"n": 1}, topic="t")
        released = bell.rung
        session.commit()

    assert (released, bell.rung) == (0, 1)


@pytest.mark.requirement("G1")
def test_a_session_on_several_databases_writes_a_batch_to_one(tmp_path: Path) -> None:
    """Some choose another one for every statement; what is added at once belongs together."""
    with session_on(tmp_path / "a") as first, session_on(tmp_path / "b") as second:
        engines = [first.get_bind(), second.get_bind()]

        class InTurn(orm.Session):
            def get_bind(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401
                engines.reverse()
                return engines[0]

        with InTurn() as session:
            Outbox().add(session, [{"n": n} for n in range(600)], topic="t")
            session.commit()
        stored = [
            session.execute(sqlalchemy.text("SELECT count(*) FROM postroom_outbox")).scalar_one()
            for session in (first, second)
        ]

    assert sorted(stored) == [0, 600]


@pytest.mark.requirement("G3")
def test_a_scoped_session_listens_to_itself_alone(sqlite_path: Path) -> None:
    """A listener on the registry would hear the commits of all threads."""
    bell = Bell()
    with session_on(sqlite_path) as other:
        scoped = orm.scoped_session(orm.sessionmaker(other.get_bind()))
        Outbox(wake=bell).add(scoped, {"n": 1}, topic="t")
        with orm.Session(other.get_bind()) as stranger, scoped.session_factory() as sibling:
            for session in (stranger, sibling):
                session.execute(sqlalchemy.text("SELECT 1"))
                session.commit()
        silent = bell.rung
        scoped.commit()
        scoped.remove()

    assert (silent, bell.rung) == (0, 1)


@pytest.mark.requirement("G12")
def test_hints_of_a_store_that_was_not_opened_are_reported_once(
    sqlite_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With what to do, and not with a traceback at every commit."""
    store = PostgresStore("postgresql://localhost/shop", namespace="shop")
    outbox = Outbox(wake=store.notify)
    with session_on(sqlite_path) as session, caplog.at_level(logging.WARNING, logger="postroom"):
        for n in range(3):
            outbox.add(session, {"n": n}, topic="t")
            session.commit()

    [record] = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert "PostgresStore(namespace='shop', table='postroom_outbox'): hints are dropped" in record.message
    assert "call `await store.open()`" in record.message


@pytest.mark.requirement("G12")
def test_a_wake_up_that_fails_does_not_fail_the_commit(sqlite_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A commit that happened must not look like one that did not; it is logged, since someone should know."""

    def broken() -> None:
        raise RuntimeError("the dispatcher is gone")

    with session_on(sqlite_path) as session, caplog.at_level(logging.WARNING, logger="postroom"):
        Outbox(wake=broken).add(session, {"n": 1}, topic="t")
        session.commit()
        stored = session.execute(sqlalchemy.text("SELECT count(*) FROM postroom_outbox")).scalar_one()

    assert stored == 1
    [record] = caplog.records
    assert record.message.startswith("a callback after a commit failed; the commit stands")
    assert record.message.endswith("RuntimeError: the dispatcher is gone")


@asynccontextmanager
async def async_session_on(path: Path) -> AsyncGenerator[AsyncSession]:
    with session_on(path):
        pass
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    async with AsyncSession(engine) as session:
        yield session
    await engine.dispose()


@pytest.mark.requirement("G3", "S2-34")
async def test_an_async_session_wakes_after_its_commit_and_not_after_a_rollback(sqlite_path: Path) -> None:
    """As the sync session that it wraps."""
    bell = Bell()
    outbox = Outbox(wake=bell)
    async with async_session_on(sqlite_path) as session:
        await outbox.add(session, {"n": 1}, topic="t")
        await session.rollback()
        silent = bell.rung
        await outbox.add(session, {"n": 1}, topic="t")
        await session.commit()

    assert (silent, bell.rung) == (0, 1)


@pytest.mark.requirement("S2-21", "S4-01")
def test_the_memory_store_takes_messages_in_its_own_transactions() -> None:
    """For tests and demos, with the same call."""
    store = MemoryStore()
    with store.transaction() as transaction:
        added = Outbox().add(transaction, {"n": 1}, topic="t")
    with pytest.raises(RuntimeError), store.transaction() as transaction:
        Outbox().add(transaction, {"n": 2}, topic="t")
        raise RuntimeError

    assert [row.message.id for row in store.rows] == [added.id]


@pytest.mark.requirement("G1")
def test_a_transaction_of_the_memory_store_that_has_ended_takes_messages_only_if_asked() -> None:
    """What is added after the end would be stored whatever became of the business change."""
    store = MemoryStore()
    with store.transaction() as transaction:
        pass

    with pytest.raises(NotInTransactionError):
        Outbox().add(transaction, {"n": 1}, topic="t")
    added = Outbox().add(transaction, {"n": 2}, topic="t", outside_transaction=True)

    assert [row.message.id for row in store.rows] == [added.id]
