"""Bounded scans of keyed claims in PostgreSQL: which messages they may skip, and which they must not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from math import inf
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import asyncpg
import pytest

from postroom import Message, Outbox
from postroom.store import Claim, ClaimTerms, Dead, Delivered, OnDead, Outcome, Release, Retry, Settlement
from postroom.stores import PostgresStore
from postroom.stores.sql.claiming import Walk
from postroom.stores.sql.dialects import postgres_bounds
from postroom.stores.sql.dialects.postgres import PostgreSQL
from postroom.stores.sql.dialects.postgres_bounds import Bounds, Floor, Writers
from postroom.stores.sql.names import Names
from postroom.stores.sql.statement import Result
from postroom.testing.servers import PostgresServer

Connection: TypeAlias = "asyncpg.Connection[Any]"

LEASE = timedelta(minutes=5)


def terms(on_dead: OnDead = "block") -> ClaimTerms:
    return ClaimTerms(worker=uuid4(), lease=LEASE, on_dead=on_dead)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every claim after the first one read the open writers, and run a survey as soon as they have ended."""
    for name, value in {"SLOW": -1.0, "SLOW_CLAIMS": 1, "PAGES": -1000, "PAUSE": 0.0, "DOUBT": 0.0, "SHARE": 0}.items():
        monkeypatch.setattr(postgres_bounds, name, value)


class Site:
    """A store whose bounds can be looked at, and a connection to look at its table."""

    def __init__(self, dsn: str, store: PostgresStore, connection: Connection) -> None:
        self.dsn = dsn
        self.store = store
        self.connection = connection
        self.outbox = Outbox()

    @property
    def bounds(self) -> Bounds:
        dialect = self.store.schema.dialect
        assert isinstance(dialect, PostgreSQL)
        return dialect.bounds.setdefault("default", Bounds())

    @property
    def floor(self) -> int:
        return self.bounds.floor.seq if self.bounds.floor else 0

    async def add(self, *names: str, key: str, connection: Connection | None = None, **options: Any) -> None:  # noqa: ANN401
        messages = [Message(topic="t", key=key, payload=name.encode()) for name in names]
        await self.outbox.add(connection or self.connection, messages, outside_transaction=True, **options)

    async def claim(self, limit: int = 100, *, on_dead: OnDead = "block") -> list[Claim]:
        return await self.store.claim(limit, terms(on_dead))

    async def settle(self, claims: Sequence[Claim], outcome: Outcome) -> None:
        assert await self.store.settle([Settlement(claim, outcome) for claim in claims]) == []

    async def deliver(self, limit: int = 100, *, on_dead: OnDead = "block") -> list[str]:
        """Claim and deliver; return the payloads."""
        claims = await self.claim(limit, on_dead=on_dead)
        await self.settle(claims, Delivered())
        return names(claims)

    async def pass_by(self, *, above: int = 0, on_dead: OnDead = "block") -> None:
        """Deliver messages of other keys until a floor has been found above them."""
        await self.add("first", key=uuid4().hex)
        assert "first" in await self.deliver(on_dead=on_dead)
        wanted = max(self.bounds.highest, above)
        for number in range(10):
            await self.add(f"other {number}", key=uuid4().hex)
            await self.deliver(on_dead=on_dead)
            if self.floor >= wanted:
                return
        raise AssertionError(f"the floor {self.floor} has not risen to {wanted}")

    async def seq(self, name: str) -> int:
        text = "SELECT seq FROM postroom_outbox WHERE payload = $1"
        return int(await self.connection.fetchval(text, name.encode()))

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Connection]:
        connection = await asyncpg.connect(self.dsn)
        try:
            yield connection
        finally:
            await connection.close()


@pytest.fixture
async def site(postgres_dsn: str) -> AsyncIterator[Site]:
    async with opened(postgres_dsn) as site:
        yield site


@asynccontextmanager
async def opened(dsn: str, driver: Literal["asyncpg", "psycopg"] = "asyncpg") -> AsyncIterator[Site]:
    store = PostgresStore(dsn, driver=driver)
    await store.apply_schema()
    await store.open()
    connection = await asyncpg.connect(dsn)
    try:
        yield Site(dsn, store, connection)
    finally:
        await connection.close()
        await store.close()


def names(claims: Sequence[Claim]) -> list[str]:
    return [claim.message.payload.decode() for claim in claims]


async def test_a_message_whose_transaction_commits_late_is_not_passed_over(site: Site) -> None:
    async with site.producer() as late:
        transaction = late.transaction()
        await transaction.start()
        await site.add("late", key="k", connection=late)
        await site.add("early", key="k")
        assert await site.deliver() == ["early"]  # nothing else is there for anybody to see
        for number in range(5):
            await site.add(f"other {number}", key=f"o{number}")
            assert await site.deliver() == [f"other {number}"]
        passed = site.floor
        await transaction.commit()
        late_seq = await site.seq("late")

    assert passed < late_seq
    assert await site.deliver() == ["late"]
    await site.pass_by(above=late_seq)


async def test_a_message_that_committed_late_goes_before_those_of_its_key_that_were_added_afterwards(
    site: Site,
) -> None:
    await site.add("zeroth", key="k")
    await site.pass_by()
    async with site.producer() as late:
        transaction = late.transaction()
        await transaction.start()
        await site.add("first", key="k", connection=late)
        for number in range(5):
            await site.add(f"other {number}", key=f"o{number}")
            assert await site.deliver() == [f"other {number}"]
        await transaction.commit()
    await site.add("second", key="k")

    claims = await site.claim(1)

    assert names(claims) == ["first"]
    assert await site.deliver() == []  # the first is in flight
    await site.settle(claims, Delivered())
    assert await site.deliver() == ["second"]


async def test_a_transaction_that_began_before_the_floor_and_adds_behind_it_is_not_passed_over(site: Site) -> None:
    """What counts is the number of a message, and that is drawn when it is added."""
    async with site.producer() as long:
        transaction = long.transaction()
        await transaction.start()
        await long.fetchval("SELECT count(*) FROM postroom_outbox")
        await site.pass_by()
        await site.add("first", key="k", connection=long)
        await site.add("second", key="j")
        assert await site.deliver() == ["second"]
        await transaction.commit()

    assert await site.deliver() == ["first"]


@pytest.mark.parametrize("state", ["in flight", "backed off", "scheduled", "dead"])
async def test_a_key_that_waits_is_an_exception_and_its_later_messages_stay_behind(site: Site, state: str) -> None:
    await site.add("head", key="k", delay=timedelta(hours=1 if state == "scheduled" else 0))
    claims = await site.claim()
    outcomes: dict[str, Outcome] = {"backed off": Retry("no", timedelta(hours=1)), "dead": Dead("no")}
    if state in outcomes:
        await site.settle(claims, outcomes[state])
    await site.pass_by(above=await site.seq("head"))
    await site.add("follower", key="k")

    assert site.bounds.floor
    assert site.bounds.floor.exceptions["t", "k"] == (await site.seq("head"), state != "in flight")
    assert await site.deliver() == []

    if state == "in flight":
        await site.settle(claims, Delivered())
        assert await site.deliver() == ["follower"]
    else:
        # The same statement redrives a dead message and makes the others due.
        text = "UPDATE postroom_outbox SET status = 'pending', next_attempt_at = now() WHERE payload = 'head'"
        await site.connection.execute(text)
        assert await site.deliver() == ["head", "follower"]


async def test_a_message_that_is_redriven_goes_before_the_others_of_its_key_however_many_are_due(site: Site) -> None:
    """A window that other messages fill does not show it."""
    await site.add("head", key="k")
    await site.settle(await site.claim(), Dead("no"))
    await site.pass_by(above=await site.seq("head"))
    await site.add("follower", key="k", due_at=(await site.connection.fetchval("SELECT now() - interval '1 hour'")))
    for number in range(8):
        await site.add(f"o{number}", key=f"o{number}")
    await site.connection.execute(
        "UPDATE postroom_outbox SET status = 'pending', next_attempt_at = now() WHERE payload = 'head'"
    )

    claims = await site.claim(1)  # which looks at four

    assert names(claims) == ["head"]


async def test_a_floor_that_lets_dead_messages_pass_is_none_where_they_hold_back_others(site: Site) -> None:
    await site.add("head", key="k")
    await site.settle(await site.claim(on_dead="skip"), Dead("no"))
    head = await site.seq("head")
    await site.pass_by(above=head, on_dead="skip")
    assert site.bounds.floor
    assert not site.bounds.floor.exceptions
    # Redriven, and backed off again, it holds back the later ones of its key; no survey has seen that yet.
    site.bounds.next_look = float("inf")
    text = "UPDATE postroom_outbox SET status = 'pending', next_attempt_at = now() + interval '1 hour' WHERE seq = $1"
    await site.connection.execute(text, head)
    await site.add("follower", key="k")

    assert await site.deliver(on_dead="block") == []


async def test_with_too_many_exceptions_the_floor_is_lowered(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_bounds, "EXCEPTIONS", 2)
    for number in range(4):
        await site.add(f"waiting {number}", key=f"w{number}", delay=timedelta(hours=1))
    third = await site.seq("waiting 2")

    for number in range(5):
        await site.add(f"other {number}", key=f"o{number}")
        await site.deliver()

    assert site.bounds.floor == Floor(
        third - 1,
        {("t", "w0"): (await site.seq("waiting 0"), True), ("t", "w1"): (await site.seq("waiting 1"), True)},
    )


async def test_what_is_released_is_found_again_at_once(site: Site) -> None:
    await site.pass_by()
    await site.add("a", key="k")
    claims = await site.claim()
    await site.connection.execute("UPDATE postroom_outbox SET next_attempt_at = now() - interval '1 hour'")
    # Nothing but the release makes the next claim look from the start.
    site.bounds.next_look, site.bounds.due_from = float("inf"), await epoch(site)
    assert await site.deliver() == []

    await site.settle(claims, Release())

    assert await site.deliver() == ["a"]


async def test_what_commits_late_is_looked_for_without_a_survey(site: Site) -> None:
    """Otherwise it would wait until a survey is due, which may be long in a large table."""
    await site.pass_by()
    site.bounds.next_survey = float("inf")
    async with site.producer() as late:
        transaction = late.transaction()
        await transaction.start()
        await site.add("late", key="k", connection=late)
        added = await epoch(site)
        async with asyncio.timeout(60):
            while site.bounds.due_from <= added:
                assert await site.deliver() == []
        await transaction.commit()

    assert await site.deliver() == ["late"]


async def epoch(site: Site) -> float:
    return float(await site.connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8"))


@pytest.mark.parametrize("key", ["k", None])
async def test_a_lease_that_ran_out_is_found_behind_the_bound(site: Site, key: str | None) -> None:
    await site.pass_by()
    await site.outbox.add(site.connection, Message(topic="t", key=key, payload=b"a"), outside_transaction=True)
    assert names(await site.store.claim(10, ClaimTerms(worker=uuid4(), lease=timedelta(milliseconds=1)))) == ["a"]

    claims: list[Claim] = []
    async with asyncio.timeout(30):
        while not claims:
            claims = await site.claim()

    assert names(claims) == ["a"]


async def test_after_a_failover_nothing_is_passed_over(site: Site) -> None:
    """The server that takes over may have lost the last numbers, and draw them again."""
    await site.pass_by()
    site.bounds.server, site.bounds.floor = "another", Floor(10**9, {})
    site.bounds.next_look = float("inf")
    await site.add("a", "b", key="k")
    claims = await site.claim(1)
    site.bounds.server, site.bounds.floor = "another", Floor(10**9, {})
    site.bounds.is_active = True

    assert names(claims) == ["a"]
    assert await site.deliver() == []
    assert site.bounds.floor is None

    site.bounds.server, site.bounds.next_look, site.bounds.is_active = "another", 0.0, True
    assert await site.deliver() == []
    assert site.bounds.server == ""


async def test_a_store_that_is_opened_again_knows_nothing(site: Site) -> None:
    await site.pass_by()
    await site.store.close()
    await site.store.open()

    assert site.bounds == Bounds()


async def test_while_a_snapshot_is_held_a_claim_reads_no_more_than_it_has_to(site: Site) -> None:
    """And without bounds it reads every message of the last minutes."""
    async with site.producer() as stranger, stranger.transaction(isolation="repeatable_read"):
        await stranger.fetchval("SELECT count(*) FROM postroom_outbox")
        for _ in range(20):
            await site.add(*map(str, range(100)), key="k")
            assert len(await site.deliver()) == 100
        await site.pass_by()
        ended = await epoch(site)
        async with asyncio.timeout(60):
            while site.bounds.due_from <= ended:
                assert await site.deliver() == []
        await site.add("next", key="k")

        plain, bounded = [await pages(site, is_active=is_active) for is_active in (False, True)]

    assert bounded * 120 < plain


async def pages(site: Site, *, is_active: bool) -> int:
    """Return how many pages a claim reads, with and without its bounds."""
    site.bounds.next_look = float("inf")
    site.bounds.is_active = is_active
    dialect = site.store.schema.dialect
    assert isinstance(dialect, PostgreSQL)
    params = {**dialect._claiming("default", terms()), "limit": 1, "window": 4, "run": 1}  # noqa: SLF001
    text, values = next(dialect.look(dialect._claim_seen, params, terms())).bind("numeric", arrays=True)  # noqa: SLF001
    transaction = site.connection.transaction()
    await transaction.start()
    try:
        plan = json.loads(await site.connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {text}", *values))
    finally:
        await transaction.rollback()
    return int(plan[0]["Plan"]["Shared Hit Blocks"]) + int(plan[0]["Plan"]["Shared Read Blocks"])


async def test_two_stores_keep_the_order_of_keys_while_transactions_commit_late(postgres_dsn: str) -> None:
    """Both move their own bounds, and each sees only what it claims itself."""
    async with opened(postgres_dsn) as one, opened(postgres_dsn) as two:
        arrived: dict[str, list[int]] = {f"k{key}": [] for key in range(4)}
        produced = asyncio.gather(*(produce(one, key) for key in arrived))
        async with asyncio.timeout(60):
            await asyncio.gather(*(consume(site, arrived) for site in (one, two)))
        await produced

        assert one.bounds.floor
        assert two.bounds.floor
    assert arrived == {key: list(range(COUNT)) for key in arrived}


async def test_a_message_that_committed_late_and_is_in_flight_in_another_store_holds_back_later_ones(
    postgres_dsn: str,
) -> None:
    """Here only what is remembered of the key decides, since the message in flight is not among those that are due."""
    async with opened(postgres_dsn) as one, opened(postgres_dsn) as two, one.producer() as late:
        await one.pass_by()
        transaction = late.transaction()
        await transaction.start()
        await one.add("first", key="k", connection=late)
        await one.add("second", key="k")
        assert await one.deliver() == ["second"]
        for number in range(3):
            await one.add(f"other {number}", key=f"o{number}")
            assert await one.deliver() == [f"other {number}"]
        await transaction.commit()
        claims = await two.claim()
        assert names(claims) == ["first"]
        await one.add("third", key="k")

        assert await one.deliver() == []
        await two.settle(claims, Delivered())
        assert await one.deliver() == ["third"]


COUNT = 40


async def produce(site: Site, key: str) -> None:
    """Add messages one after the other; every transaction stays open while others commit."""
    async with site.producer() as connection:
        for number in range(COUNT):
            async with connection.transaction():
                await site.add(str(number), key=key, connection=connection)
                await asyncio.sleep(0.002 * (number % 5))


async def consume(site: Site, arrived: dict[str, list[int]]) -> None:
    while any(len(numbers) < COUNT for numbers in arrived.values()):
        claims = await site.claim(3)
        for claim in claims:
            assert claim.message.key
            arrived[claim.message.key].append(int(claim.message.payload))
        await asyncio.sleep(0.001)
        await site.settle(claims, Delivered())


async def test_bounds_work_with_psycopg(postgres_dsn: str) -> None:
    async with opened(postgres_dsn, "psycopg") as site:
        await site.add("head", key="k", delay=timedelta(hours=1))
        await site.pass_by(above=await site.seq("head"))
        await site.add("follower", key="k")

        assert site.bounds.floor
        assert site.bounds.floor.exceptions
        assert await site.deliver() == []


@pytest.mark.prove
async def test_a_transaction_that_is_prepared_is_waited_for() -> None:
    with PostgresServer(settings={"max_prepared_transactions": "5"}) as server:
        async with opened(server.create_database("bounds")) as site, site.producer() as late:
            await site.add("zeroth", key="k")
            await site.pass_by()
            await late.execute("BEGIN")
            await site.add("late", key="k", connection=late)
            await site.add("other", key="o")
            assert await site.deliver() == ["other"]
            await late.execute("PREPARE TRANSACTION 'late'")
            for number in range(5):
                await site.add(f"other {number}", key=f"o{number}")
                assert await site.deliver() == [f"other {number}"]
            passed = site.floor
            await late.execute("COMMIT PREPARED 'late'")
            late_seq = await site.seq("late")
            await site.add("later", key="k")

            assert passed < late_seq
            assert await site.deliver() == ["late", "later"]


def test_transactions_have_ended_when_none_of_them_writes_any_more() -> None:
    writers = Writers(7, {"1/1", "2/1"})

    assert not writers.have_ended({"1/1": False, "2/1": False, "3/1": False})
    assert not writers.have_ended({"2/1": False, "3/1": False, "1/2": False})
    assert writers.have_ended({"3/1": False, "1/2": False})


def test_a_transaction_that_goes_on_under_another_name_once_it_is_prepared_has_not_ended() -> None:
    writers = Writers(7, {"1/1"})

    assert not writers.have_ended({"-1/700": True, "1/2": False})
    assert not writers.have_ended({"-1/700": True, "-1/701": True})
    assert writers.have_ended({"-1/701": True})  # which was prepared when all had ended


def test_a_transaction_may_be_prepared_at_any_time_before_all_have_ended() -> None:
    writers = Writers(7, {"1/1"})

    assert not writers.have_ended({"1/1": False})
    assert not writers.have_ended({"-1/700": True})
    assert writers.have_ended({})


def test_claims_are_in_doubt_after_several_slow_ones_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLOW": 0.01, "SLOW_CLAIMS": 3}.items():
        monkeypatch.setattr(postgres_bounds, name, value)
    bounds = Bounds()

    for seconds in (0.02, 0.02, 0.001, 0.02, 0.02):
        bounds.timed(10, seconds)
    assert not bounds.is_in_doubt

    bounds.timed(10, 0.02)
    assert bounds.is_in_doubt


def test_the_start_of_a_key_is_its_head_unless_lower_messages_may_still_appear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_bounds, "STARTS", 2)
    bounds = Bounds()

    bounds.claimed([row("a", 8), row("a", 7), row("b", 11), [None] * 13], confirmed=9)
    assert bounds.highest == 11
    assert bounds.starts == {("t", "a"): 7, ("t", "b"): 10}

    bounds.claimed([row("a", 12)], confirmed=11)
    bounds.claimed([row("c", 13)], confirmed=11)
    assert bounds.starts == {("t", "a"): 12, ("t", "c"): 12}


@pytest.mark.parametrize("is_lowered", [True, False], ids=["lowered meanwhile", "undisturbed"])
def test_a_claim_does_not_raise_a_bound_that_was_lowered_while_it_ran(is_lowered: bool) -> None:  # noqa: FBT001
    """What was released meanwhile is due below the bound that the claim has found, and would be passed over."""
    dialect = PostgreSQL(Names())
    bounds = dialect.bounds["default"] = Bounds(is_active=True, server="1", next_look=inf)
    looking = dialect.claim_keyed("default", 10, terms(), Walk())
    next(looking)

    if is_lowered:
        dialect.forget_bounds()
    with pytest.raises(StopIteration):
        looking.send(Result([[*row("k", 7), False, 500.0, "1"]], 1))

    assert bounds.due_from == (-inf if is_lowered else 500.0)


def row(key: str, seq: int) -> list[object]:
    return ["id", "t", "t", key, *[None] * 8, seq]


def test_bounds_are_switched_by_the_pages_that_are_read_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_bounds, "PAGES", 1000)
    bounds = Bounds()

    bounds.measured(900)
    assert not bounds.is_active

    bounds.measured(1001)
    bounds.floor = Floor(1, {})
    bounds.measured(300)
    assert bounds.is_active

    bounds.measured(200)
    assert not bounds.is_active
    assert bounds.floor is None


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_held_snapshot_switches_the_bounds_on_and_its_end_off(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, driver: Literal["asyncpg", "psycopg"]
) -> None:
    monkeypatch.setattr(postgres_bounds, "PAGES", 20)
    async with opened(postgres_dsn, driver) as site, site.producer() as stranger:
        await site.connection.execute("ALTER TABLE postroom_outbox SET (autovacuum_enabled = false)")
        async with stranger.transaction(isolation="repeatable_read"):
            await stranger.fetchval("SELECT count(*) FROM postroom_outbox")
            assert await site.deliver() == []
            assert await site.deliver() == []
            assert not site.bounds.is_active
            for _ in range(15):
                await site.add(*map(str, range(100)), key="k")
                await site.deliver()
            await site.deliver()
            assert site.bounds.is_active
        await site.connection.execute("VACUUM postroom_outbox")
        async with asyncio.timeout(60):
            while site.bounds.is_active:
                await site.deliver()
