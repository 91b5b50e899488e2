"""What a publisher's answers mean."""

from __future__ import annotations

from datetime import timedelta

import pytest

from postroom import Dead, Delivered, Message, Outcome, Release, Retry
from postroom.verdict import NO_ANSWER, Verdict, judge

SECOND = timedelta(seconds=1)


def message(topic: str = "t", key: str | None = None, attempt: int = 1) -> Message:
    return Message(topic=topic, payload=b"", key=key, attempt=attempt)


def verdict_of(
    *pairs: tuple[Message, Outcome | None], max_attempts: int = 3, alive: frozenset[str] = frozenset()
) -> Verdict:
    return judge(
        [pair[0] for pair in pairs],
        [pair[1] for pair in pairs],
        destinations=[pair[0].topic for pair in pairs],
        alive=alive,
        backoff=lambda attempts: attempts * SECOND,
        max_attempts=max_attempts,
    )


@pytest.mark.requirement("S2-38")
def test_a_failure_waits_as_long_as_its_attempts_say() -> None:
    """Next_attempt_at follows the policy, by the attempts so far."""
    verdict = verdict_of((message(attempt=2), Retry("no")))

    assert verdict.outcomes == [Retry("no", 2 * SECOND)]


def test_a_publisher_may_choose_the_wait() -> None:
    """A Retry-After of the destination wins over the backoff."""
    assert verdict_of((message(), Retry("no", 9 * SECOND))).outcomes == [Retry("no", 9 * SECOND)]


@pytest.mark.requirement("G2")
def test_a_delivery_of_a_kind_of_its_own_is_a_delivery() -> None:
    """A publisher may say more than a store knows; the store must still be able to record it."""

    class Confirmed(Delivered):
        pass

    verdict = verdict_of((message(), Confirmed()), (message(), Delivered()))

    assert [type(outcome) for outcome in verdict.outcomes] == [Delivered, Delivered]


@pytest.mark.requirement("S2-44")
def test_the_last_attempt_that_fails_makes_a_message_dead() -> None:
    """Attempts >= max_attempts at failure is dead."""
    verdict = verdict_of((message(attempt=2), Retry("no")), (message(attempt=3), Retry("no")))

    assert verdict.outcomes == [Retry("no", 2 * SECOND), Dead("no")]


@pytest.mark.requirement("G9")
def test_silence_beside_an_answer_of_the_same_topic_is_a_failure() -> None:
    """A message that hangs on a destination that works spends its attempts."""
    verdict = verdict_of((message(), None), (message(), Delivered()))

    assert verdict.outcomes == [Retry(NO_ANSWER, SECOND), Delivered()]
    assert verdict.down == []


@pytest.mark.requirement("G9")
def test_silence_while_other_calls_are_answered_is_a_failure() -> None:
    """What the destination answered in another call counts as well."""
    verdict = verdict_of((message("a"), None), (message("b"), None), alive=frozenset({"a"}))

    assert verdict.outcomes == [Retry(NO_ANSWER, SECOND), Release()]
    assert verdict.down == [1]


@pytest.mark.requirement("G13")
def test_silence_of_a_whole_topic_is_an_outage() -> None:
    """When nothing is heard of a topic, it is down and no attempt is spent."""
    verdict = verdict_of((message("a"), None), (message("a"), Release()), (message("b"), Delivered()))

    assert verdict.outcomes == [Release(), Release(), Delivered()]
    assert (verdict.answered, verdict.down) == ([2], [0, 1])


@pytest.mark.requirement("G13")
def test_an_outage_spends_no_attempt_even_on_the_last() -> None:
    """The last attempt is not used up by a destination that is down."""
    assert verdict_of((message(attempt=3), Release())).outcomes == [Release()]


@pytest.mark.requirement("G6")
def test_what_follows_a_failed_head_is_released() -> None:
    """When one of a run fails, the rest of its run is released; other keys are not touched."""
    verdict = verdict_of(
        (message(key="a"), Delivered()),
        (message(key="a"), Retry("no")),
        (message(key="a"), None),
        (message(key="b"), Delivered()),
        (message(), Delivered()),
    )

    assert verdict.outcomes == [Delivered(), Retry("no", SECOND), Release(), Delivered(), Delivered()]
    assert verdict.down == []


def test_a_delivery_is_recorded_whatever_stands_before_it() -> None:
    """What was confirmed is confirmed, also by a publisher that broke the order."""
    verdict = verdict_of((message(key="a"), Retry("no")), (message(key="a"), Delivered()))

    assert verdict.outcomes == [Retry("no", SECOND), Delivered()]
