"""The store's clock: put back, it makes messages wait, and a dispatcher says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from postroom import Dispatcher, events
from postroom.brokers import MemoryBroker
from postroom.clock_watch import ClockWatch
from postroom.stores import MemoryStore, MySQLStore, PostgresStore, SQLiteStore
from postroom.stores.redis import RedisStore, RedisStreamStore
from postroom.testing.waiting import until

NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
MS = timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("later", "back"),
    [
        (timedelta(seconds=5), None),
        (timedelta(seconds=4.1), None),  # within a second
        (timedelta(seconds=3.9), timedelta(seconds=1.1)),  # it goes on, but was put back
        (timedelta(seconds=5) - HOUR, HOUR),
        (timedelta(seconds=5) + HOUR, None),  # put forward, which makes nothing wait
        (timedelta(0), None),  # a clock that stands still, in a test
    ],
)
def test_a_clock_that_is_behind_what_it_must_say_was_put_back(later: timedelta, back: timedelta | None) -> None:
    watch = ClockWatch()

    assert watch.jump(NOON, asked=10.0, answered=10.0) is None
    assert watch.jump(NOON + later, asked=15.0, answered=15.0) == back


def test_an_answer_that_takes_long_is_no_jump() -> None:
    """The clock may have been read at any moment between the question and the answer."""
    watch = ClockWatch()
    watch.jump(NOON, asked=10.0, answered=19.0)  # read at 10.0

    assert watch.jump(NOON + timedelta(seconds=14), asked=24.0, answered=33.0) is None  # read at 24.0
    assert watch.jump(NOON + timedelta(seconds=28), asked=38.0, answered=38.0) is None


def test_a_clock_that_is_slowed_down_for_an_hour_is_no_jump() -> None:
    """NTP corrects by up to half a thousandth, which an outage of an hour adds up to 1.8 seconds."""
    watch = ClockWatch()
    watch.jump(NOON, asked=0.0, answered=0.0)

    assert watch.jump(NOON + HOUR * 0.9995, asked=3600.0, answered=3600.0) is None


def test_a_jump_is_told_once() -> None:
    watch = ClockWatch()
    watch.jump(NOON, asked=0.0, answered=0.0)
    jumps = [watch.jump(NOON - HOUR + timedelta(seconds=n), asked=n, answered=n) for n in (5.0, 10.0, 15.0)]

    assert jumps == [HOUR, None, None]


async def test_a_dispatcher_warns_once_when_the_clock_of_its_store_is_put_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    offset, looks = timedelta(0), 0
    told: list[events.Event] = []

    def listen(event: events.Event) -> None:
        told.append(event)
        events.log_event(event)

    def clock() -> datetime:
        nonlocal looks
        looks += 1
        return datetime.now(UTC) - offset

    store = MemoryStore(clock=clock)
    dispatcher = Dispatcher(store, MemoryBroker(), sweep_interval=10 * MS, listener=listen)
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: looks >= 20, "the clock is read", within=timedelta(seconds=60))
    offset = HOUR
    await until(lambda: bool(jumps(told)), "the jump is reported", within=timedelta(seconds=60))
    seen = looks
    await until(lambda: looks >= seen + 20, "the clock is read again", within=timedelta(seconds=60))
    await dispatcher.stop()
    await running

    [jump] = jumps(told)
    assert HOUR - timedelta(seconds=1) < jump.by <= HOUR
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in warnings if text.startswith("the store's clock was put back by 60 min")]


def jumps(told: list[events.Event]) -> list[events.ClockJumpedBack]:
    return [event for event in told if isinstance(event, events.ClockJumpedBack)]


@pytest.fixture(params=["sqlite", "asyncpg", "psycopg", "mariadb", "redis", "stream"])
async def store(request: pytest.FixtureRequest) -> AsyncGenerator[Any]:
    opened = _store(request)
    if not isinstance(opened, RedisStore | RedisStreamStore):
        await opened.apply_schema()
    await opened.open()
    yield opened
    await opened.close()


def _store(request: pytest.FixtureRequest) -> Any:  # noqa: ANN401
    match request.param:
        case "sqlite":
            return SQLiteStore(request.getfixturevalue("sqlite_path"))
        case "mariadb":
            return MySQLStore(request.getfixturevalue("mariadb_dsn"))
        case "redis":
            return RedisStore(request.getfixturevalue("redis_url"), namespace=uuid4().hex, profile="volatile")
        case "stream":
            url = request.getfixturevalue("redis_url")
            return RedisStreamStore(url, table=uuid4().hex, profile="volatile")
        case driver:
            return PostgresStore(request.getfixturevalue("postgres_dsn"), driver=driver)


async def test_every_store_reads_the_clock_of_its_server(store: Any) -> None:  # noqa: ANN401
    """It goes on, and on this machine it is that of everybody."""
    before = datetime.now(UTC)
    first = await store.clock()
    await until(_has_gone_on(store, first), "the clock goes on", within=timedelta(seconds=60))

    assert first.utcoffset() is not None
    assert abs(first - before) < timedelta(minutes=1)


def _has_gone_on(store: Any, first: datetime) -> Any:  # noqa: ANN401
    async def has_gone_on() -> bool:
        return bool(await store.clock() > first)

    return has_gone_on
