"""Breakers: how many probes there are, and how quickly many parts recover."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from postroom import Message
from postroom.breakers import INVITE_AGAIN, MAX_CREDIT, Breakers
from postroom.destination import Naming

COOLDOWN = timedelta(seconds=10)


class Clock:
    """Monotonic time that only moves when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def breakers_of(messages: list[Message]) -> Breakers:
    """Return breakers of which each message has opened one, while their destination works."""
    breakers = Breakers(Naming(), lambda _: COOLDOWN, lambda _: None)
    for message in messages:
        breakers.fail([message], "down")
        breakers.answer([Message(topic="t", payload=b"")])
    return breakers


def probes(breakers: Breakers) -> Iterator[str]:
    while (invited := breakers.next_probe()) is not None:
        yield invited[0]


MESSAGES = [Message(topic="t", key=str(number), payload=b"") for number in range(500)]


def test_at_most_twenty_probes_begin_in_a_second_while_none_is_answered(clock: Clock) -> None:
    breakers = breakers_of(MESSAGES)
    clock.now += COOLDOWN.total_seconds()

    begun = 0
    for _ in range(1000):
        begun += sum(1 for _ in probes(breakers))
        clock.now += 0.001

    assert 15 <= begun <= 20


def test_an_answered_probe_pays_for_two_more(clock: Clock) -> None:
    """Hundreds of keys whose endpoints work again must not wait for twenty probes a second."""
    breakers = breakers_of(MESSAGES)
    clock.now += COOLDOWN.total_seconds()
    by_name = {breakers.naming.part(message): message for message in MESSAGES}

    rounds = 0
    while breakers and rounds < 20:
        rounds += 1
        for name in list(probes(breakers)):
            assert breakers.admit(by_name[name]).waits_for is None
            breakers.answer([by_name[name]])
            breakers.end_probe(by_name[name])

    assert not breakers
    assert rounds <= 20


def test_a_failed_probe_ends_the_hurry(clock: Clock) -> None:
    breakers = breakers_of(MESSAGES)
    clock.now += COOLDOWN.total_seconds()
    by_name = {breakers.naming.part(message): message for message in MESSAGES}
    [first] = probes(breakers)
    assert breakers.admit(by_name[first]).is_probe
    breakers.answer([by_name[first]])
    second = next(iter(probes(breakers)))
    assert breakers.admit(by_name[second]).is_probe

    breakers.fail([by_name[second]], "down")

    assert list(probes(breakers)) == []


def test_the_hurry_is_bounded(clock: Clock) -> None:
    breakers = breakers_of(MESSAGES)
    breakers.answer(MESSAGES[: 2 * MAX_CREDIT])
    clock.now += COOLDOWN.total_seconds()

    assert len(list(probes(breakers))) <= MAX_CREDIT + 1


def test_ever_more_messages_become_due_for_a_name_that_none_of_them_probes(clock: Clock) -> None:
    """The messages of a renamed destination go elsewhere: one of them a second would take for ever."""
    breakers = Breakers(Naming(), lambda _: COOLDOWN, lambda _: None)
    breakers.find(["old"])

    invited: list[tuple[str, int] | None] = []
    for _ in range(5):
        invited.append(breakers.next_probe())
        clock.now += INVITE_AGAIN

    assert invited == [("old", 1), ("old", 2), ("old", 4), ("old", 8), ("old", 16)]


def test_one_message_becomes_due_for_a_destination_that_is_known_to_be_down(clock: Clock) -> None:
    [message, *_] = MESSAGES
    breakers = breakers_of([message])

    for _ in range(5):
        clock.now += max(COOLDOWN.total_seconds(), INVITE_AGAIN)
        assert breakers.next_probe() == (breakers.naming.part(message), 1)


def test_what_is_found_beyond_the_limit_is_left_to_a_later_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """To forget a breaker for each one that is found would mean that none of them is ever probed."""
    monkeypatch.setattr("postroom.breakers.MAX_BREAKERS", 2)
    breakers = breakers_of([])

    breakers.find(["a", "b", "c"])
    first = [name for name in "abc" if breakers.is_down(name)]
    breakers.answer([Message(topic="a", payload=b"")])
    breakers.find(["b", "c"])

    assert first == ["a", "b"]
    assert [name for name in "abc" if breakers.is_down(name)] == ["b", "c"]
    assert breakers.is_searching
