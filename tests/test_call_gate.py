"""How many calls run at once, and who may begin another while some of them hang."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest

from postroom import call_gate
from postroom.call_gate import CallGate
from postroom.slots import STUCK
from postroom.testing.waiting import until


class Clock:
    """The monotonic clock, which tests put forward."""

    def __init__(self) -> None:
        self._real, self._ahead = time.monotonic, 0.0

    def __call__(self) -> float:
        return self._real() + self._ahead

    def put_forward(self, seconds: float) -> None:
        self._ahead += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


async def begin(gate: CallGate, *destinations: str) -> list[asyncio.Task[None]]:
    entering = [asyncio.create_task(gate.enter(destination)) for destination in destinations]
    for _ in range(3):
        await asyncio.sleep(0)
    return entering


def entered(entering: list[asyncio.Task[None]]) -> list[bool]:
    return [task.done() for task in entering]


async def test_so_many_calls_run_at_once_and_the_others_follow_in_turn() -> None:
    gate = CallGate(2)
    calls = await begin(gate, "a", "a", "b", "a")
    assert entered(calls) == [True, True, False, False]

    gate.leave("a", is_answered=True)
    await asyncio.sleep(0)
    assert entered(calls) == [True, True, True, False]

    gate.leave("b", is_answered=True)
    await asyncio.sleep(0)
    assert entered(calls) == [True] * 4


async def test_a_call_takes_the_place_of_one_that_hangs(clock: Clock) -> None:
    """The destination that hangs gets no place more, and its calls give none back when they end."""
    gate = CallGate(2)
    await begin(gate, "hangs", "hangs")
    waiting = await begin(gate, "hangs", "healthy", "other")
    assert entered(waiting) == [False] * 3

    clock.put_forward(2 * STUCK)
    await until(lambda: waiting[1].done() and waiting[2].done(), "the places of those that hang being taken")
    assert not waiting[0].done()

    gate.leave("hangs", is_answered=False)
    gate.leave("hangs", is_answered=False)
    await asyncio.sleep(0)
    assert not waiting[0].done()
    gate.leave("healthy", is_answered=True)
    await waiting[0]


async def test_a_slow_destination_never_exceeds_the_limit(clock: Clock) -> None:
    gate = CallGate(2)
    await begin(gate, "slow", "slow")
    waiting = await begin(gate, "slow")

    clock.put_forward(2 * STUCK)
    done, _ = await asyncio.wait(waiting, timeout=5 * call_gate.LOOK_EVERY)

    assert not done
    assert not gate.is_hogged_by("slow"), "it keeps nobody waiting but itself"
    waiting[0].cancel()


async def test_a_destination_that_answers_does_not_hang(clock: Clock) -> None:
    gate = CallGate(3)
    await begin(gate, "a", "a", "b")

    clock.put_forward(2 * STUCK)
    assert gate.is_hogged_by("a")
    gate.leave("a", is_answered=True)
    await begin(gate, "b")

    assert not gate.is_hogged_by("a")
    assert gate.is_hogged_by("b")


async def test_a_call_that_is_cancelled_while_it_waits_takes_no_place() -> None:
    gate = CallGate(1)
    await begin(gate, "a")
    given_up, granted, last = await begin(gate, "b", "c", "d")

    given_up.cancel()
    gate.leave("a", is_answered=True)
    granted.cancel()  # although its turn has come
    await asyncio.wait([given_up, granted])

    await asyncio.wait_for(last, timedelta(seconds=30).total_seconds())


def test_a_gate_looks_for_calls_that_hang_in_a_second_loop_too() -> None:
    """The timer of the first loop ended with it."""
    gate = CallGate(1)

    async def wait_in_vain() -> None:
        await begin(gate, "a")
        waiting = await begin(gate, "b")
        waiting[0].cancel()

    async def take_the_place() -> None:
        await asyncio.wait_for(gate.enter("b"), timedelta(seconds=30).total_seconds())

    asyncio.run(wait_in_vain())
    asyncio.run(take_the_place())


async def test_a_destination_that_hangs_takes_no_place_of_those_that_work(clock: Clock) -> None:
    """Its calls that wait stand first in line, and have to let others pass."""
    gate = CallGate(2, hanging=2)
    await begin(gate, "hangs", "hangs")
    waiting = await begin(gate, "hangs", "healthy", "healthy", "healthy")
    clock.put_forward(2 * STUCK)
    await until(lambda: entered(waiting) == [False, True, True, False], "the places of those that hang being taken")

    gate.leave("healthy", is_answered=True)
    await asyncio.sleep(0)
    assert entered(waiting) == [False, True, True, True]

    gate.leave("healthy", is_answered=True)
    gate.leave("healthy", is_answered=True)
    await asyncio.sleep(0)
    assert entered(waiting) == [False, True, True, True]

    gate.leave("hangs", is_answered=True)
    await asyncio.sleep(0)
    assert entered(waiting) == [True] * 4


async def test_a_call_that_is_given_up_keeps_its_place_until_it_returns() -> None:
    """It runs on a thread, of which there are not more than places."""
    gate = CallGate(1)
    await begin(gate, "slow")
    waiting = await begin(gate, "other")
    gate.linger("slow")
    gate.leave("slow", is_answered=False)
    await asyncio.sleep(0)
    assert entered(waiting) == [False]

    gate.end_lingering("slow")
    await asyncio.sleep(0)
    assert entered(waiting) == [True]


async def test_a_destination_whose_calls_linger_is_let_in_without_a_place() -> None:
    """Whoever enters learns that it is clogged; nobody waits for a place that may never be free."""
    gate = CallGate(call_gate.MAX_LINGERING)
    await begin(gate, *["hangs"] * call_gate.MAX_LINGERING)
    waiting = await begin(gate, "hangs", "other")
    for _ in range(call_gate.MAX_LINGERING):
        assert not gate.is_clogged("hangs")
        gate.linger("hangs")
        gate.leave("hangs", is_answered=False)
    await asyncio.sleep(0)
    late = await begin(gate, "hangs")

    assert gate.is_clogged("hangs")
    assert (entered(waiting), entered(late)) == ([True, False], [True])
    gate.leave("hangs", is_answered=False)
    gate.leave("hangs", is_answered=False)
    assert entered(waiting) == [True, False]

    gate.end_lingering("hangs")
    await asyncio.sleep(0)
    assert entered(waiting) == [True, True]


@pytest.mark.parametrize("size", [1, 2])
async def test_a_destination_whose_calls_that_linger_take_all_places_is_let_in(size: int) -> None:
    """With fewer places than calls may linger, none could begin any more, and none would learn why."""
    gate = CallGate(size)
    await begin(gate, *["hangs"] * size)
    waiting = await begin(gate, "hangs")
    for _ in range(size):
        gate.linger("hangs")
        gate.leave("hangs", is_answered=False)
    await asyncio.sleep(0)

    assert gate.is_clogged("hangs")
    assert entered(waiting) == [True]
