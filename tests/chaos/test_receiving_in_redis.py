"""What the broken variants of inbox and commit in Redis get wrong, one script for each, on a real server.

All of them pass on the sound library; `tests/test_variants.py` shows that each fails on the variant it is meant for.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from chaos.desk import EFFECTS_KEY
from chaos.stores import HandlingInRedis
from chaos.variants import applied
from postroom import Consumer, Delivered, Message, Outcome, Release, Retry, Transaction
from postroom.errors import StoreTimeoutError
from postroom.inbox import Mode
from postroom.stores.redis import RedisStore
from postroom.stores.redis.client import Client
from postroom.stores.redis.scripts import Script, alone, calling

from .test_receiving import Room, message

ROOT: Final = Path(__file__).parents[2]
#: A lease that somebody can wait for, and for how long one is renewed.
SHORT: Final = timedelta(milliseconds=300)
NEVER: Final = timedelta(0)
PATIENCE: Final = 60

MakeRoom: TypeAlias = Callable[..., Room]


def room_on(url: str, *, lease: timedelta = SHORT, longest: timedelta = timedelta(minutes=10)) -> Room:
    """Return a room on a server of Redis's kind."""
    store = RedisStore(url)
    return Room("redis", url, HandlingInRedis(store, store, lease=lease, longest=longest))


@pytest.fixture
async def on_redis(valkey_url: str) -> AsyncIterator[MakeRoom]:
    """What makes rooms on Valkey."""
    made: list[Room] = []

    def make(**leases: timedelta) -> Room:
        made.append(room_on(valkey_url, **leases))
        return made[-1]

    yield make
    for room in made:
        await room.store.close()
        room.truth.close()


async def insist(room: Room, consumer: Consumer, sent: Message) -> tuple[Outcome, int, int]:
    """Deliver a message as a broker does, until it is acknowledged; return what was said of it then."""
    async with asyncio.timeout(PATIENCE):
        while True:
            sent = replace(sent, token=sent.token + 1)
            said = await room.deliver(consumer, sent)
            if said[0] == Delivered():
                return said
            await asyncio.sleep(0.02)


@pytest.mark.requirement("S0-16", "S0-17", "S0-18", "S0-19")
async def test_a_message_whose_consumer_died_is_handled_when_it_comes_again(on_redis: MakeRoom) -> None:
    """Who died before the commit holds a message until the lease ends, no longer."""
    room, sent = on_redis(), message()
    consumer = room.consumer(room.effect)
    dying = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.chaos.dying", room.truth.url, str(sent.id), *applied), cwd=ROOT
    )
    assert await dying.wait() == -signal.SIGKILL

    said = await insist(room, consumer, sent)

    assert said == (Delivered(), 1, 0), "a message without an effect was acknowledged"


@pytest.mark.requirement("G7", "S0-35")
async def test_a_duplicate_in_redis_is_acknowledged_and_has_no_effect(on_redis: MakeRoom) -> None:
    """The commit has left a mark."""
    room, twice = on_redis(), message()
    consumer = room.consumer(room.effect)

    first = await room.deliver(consumer, twice)
    second = await room.deliver(consumer, replace(twice, attempt=2, token=2))

    assert (first, second) == ((Delivered(), 1, 0), (Delivered(), 1, 0))


@pytest.mark.requirement("G8")
async def test_a_message_that_somebody_else_is_handling_is_given_back(on_redis: MakeRoom) -> None:
    """That one may fail yet, as it does here."""
    room, sent = on_redis(lease=timedelta(seconds=PATIENCE)), message()
    begun, other = asyncio.Event(), asyncio.Event()

    async def fail_once(received: Message, transaction: Transaction) -> None:
        await room.effect(received, transaction)
        if received.token == 1:
            begun.set()
            await other.wait()
            raise RuntimeError("the first one fails")

    consumer = room.consumer(fail_once)
    async with asyncio.timeout(PATIENCE):
        first = asyncio.create_task(room.deliver(consumer, sent))
        await begun.wait()
        second, effects, _ = await room.deliver(consumer, replace(sent, token=2))
        other.set()
        failed, _, _ = await first

    assert isinstance(second, Release), f"a message without an effect was settled as {second}"
    assert effects == 0
    assert isinstance(failed, Retry)
    assert await insist(room, consumer, sent) == (Delivered(), 1, 0)


async def overtaken(room: Room, *, first_fails: bool) -> Outcome:
    """Have a message handled by one whose lease ends meanwhile, and by another; return what the first said of it."""
    sent, begun, done = message(), asyncio.Event(), asyncio.Event()

    async def linger(received: Message, transaction: Transaction) -> None:
        await room.effect(received, transaction)
        if received.token == 1:
            begun.set()
            await done.wait()
            if first_fails:
                raise RuntimeError("the first one fails, late")

    consumer = room.consumer(linger)
    async with asyncio.timeout(PATIENCE):
        first = asyncio.create_task(room.deliver(consumer, sent))
        await begun.wait()
        await insist(room, consumer, sent)
        done.set()
        late, _, _ = await first
    await insist(room, consumer, sent)
    return late


@pytest.mark.requirement("G7")
async def test_who_was_away_for_too_long_has_no_effect(on_redis: MakeRoom) -> None:
    """The commit finds the mark of another one, and applies nothing."""
    room = on_redis(longest=NEVER)

    late = await overtaken(room, first_fails=False)

    assert len(room.truth.effects()) == 1, "the effect happened twice"
    assert late == Delivered()


@pytest.mark.requirement("S0-37")
async def test_who_fails_too_late_leaves_the_mark_of_another_alone(on_redis: MakeRoom) -> None:
    """Only the own claim is given up, so that the message stays known as handled."""
    room = on_redis(longest=NEVER)

    late = await overtaken(room, first_fails=True)

    assert len(room.truth.effects()) == 1, "the effect happened twice"
    assert isinstance(late, Retry)


@pytest.mark.requirement("G7", "S0-30")
async def test_a_commit_that_cannot_be_applied_as_a_whole_has_no_effect(on_redis: MakeRoom) -> None:
    """A command that would fail after another was applied is found before."""
    room, sent = on_redis(), message()

    async def stumble(received: Message, transaction: Transaction) -> None:
        await room.effect(received, transaction)
        if received.attempt == 1:
            # The key of effects holds a list by then.
            await transaction.connection.hset(EFFECTS_KEY, "field", "value")

    consumer = room.consumer(stumble)
    first, effects, _ = await room.deliver(consumer, sent)

    assert effects == 0, "a part of the effect is there"
    assert isinstance(first, Retry)
    assert await room.deliver(consumer, replace(sent, attempt=2, token=2)) == (Delivered(), 1, 0)


def slow_once(monkeypatch: pytest.MonkeyPatch, script: Callable[[], Script]) -> None:
    """Have the first call of a script get lost on its way, so that nobody answers in time."""
    sound, digest = Client.evaluate, script().digest
    lost: list[Script] = []

    async def evaluate(self: Client, wanted: Script, *rest: Any) -> Any:  # noqa: ANN401 -- the library's own
        if wanted.digest == digest and not lost:
            lost.append(wanted)
            raise StoreTimeoutError("it did not answer")
        return await sound(self, wanted, *rest)

    monkeypatch.setattr(Client, "evaluate", evaluate)


@pytest.mark.requirement("G8", "S0-36")
@pytest.mark.parametrize(
    ("script", "mode"),
    [
        pytest.param(lambda: calling("commit", "enqueue"), "pessimistic", id="commit"),
        pytest.param(lambda: alone("admit"), "pessimistic", id="mark"),
        pytest.param(lambda: alone("admit"), "optimistic", id="mark at the end"),
    ],
)
async def test_a_message_that_the_server_did_not_answer_for_in_time_has_lost_no_attempt(
    on_redis: MakeRoom, monkeypatch: pytest.MonkeyPatch, script: Callable[[], Script], mode: Mode
) -> None:
    """A server that is slow is no fault of the message, wherever that strikes."""
    room, sent = on_redis(), message()
    consumer = room.consumer(room.effect, mode=mode)
    slow_once(monkeypatch, script)

    first, effects, _ = await room.deliver(consumer, sent)

    assert isinstance(first, Release), f"an outage led to {first}"
    assert effects == 0
    assert await insist(room, consumer, sent) == (Delivered(), 1, 0)
