"""Slots of destinations that have not answered yet: who comes in, and who has to be parked."""

from __future__ import annotations

import asyncio
import time

import pytest

from postroom.slots import FOR_ONE, STUCK, UnprovenSlots


def test_a_destination_that_is_alone_comes_in_with_all_its_messages() -> None:
    slots = UnprovenSlots(2, members=3)

    assert all(slots.join("orders") for _ in range(10))


def test_several_destinations_share_the_room() -> None:
    slots = UnprovenSlots(2, members=3)

    assert [slots.join(name) for name in "abcd"] == [True, True, True, False]


async def test_nothing_comes_in_while_the_calls_under_way_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of further destinations are parked instead, so that they do not take the place of healthy ones."""
    slots, now = UnprovenSlots(2, members=100), time.monotonic()
    for _ in range(2):
        assert slots.join("hangs")
        assert await slots.acquire("hangs")

    monkeypatch.setattr(time, "monotonic", lambda: now + 10 * STUCK)
    is_stuck = not slots.join("other")
    slots.release("hangs")

    assert is_stuck
    assert slots.join("other")


async def test_others_come_in_while_a_call_hangs_as_long_as_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other keys of the same destination too, until it has all the slots that one may have."""
    slots, now = UnprovenSlots(20, members=100), time.monotonic()
    for _ in range(FOR_ONE - 1):
        assert slots.join("hangs")
        assert await slots.acquire("hangs")

    monkeypatch.setattr(time, "monotonic", lambda: now + 10 * STUCK)
    assert slots.join("other")
    assert slots.join("hangs")
    assert await slots.acquire("hangs")
    monkeypatch.setattr(time, "monotonic", lambda: now + 20 * STUCK)

    assert slots.is_stuck("hangs")
    assert not slots.join("hangs")
    assert slots.join("other")


async def test_a_free_slot_goes_to_a_message_that_waits() -> None:
    slots = UnprovenSlots(1, members=100)
    assert slots.join("a")
    assert slots.join("b")
    assert await slots.acquire("a")
    waiting = asyncio.create_task(slots.acquire("b"))
    await asyncio.sleep(0)
    assert not waiting.done()

    slots.release("a")

    assert await waiting


async def test_a_destination_that_is_known_lets_go_of_all_that_wait() -> None:
    slots = UnprovenSlots(1, members=100)
    for _ in range(3):
        assert slots.join("a")
    assert await slots.acquire("a")
    waiting = [asyncio.create_task(slots.acquire("a")) for _ in range(2)]
    await asyncio.sleep(0)

    slots.dissolve("a")

    assert await asyncio.gather(*waiting) == [False, False]
