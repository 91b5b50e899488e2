"""How long to wait, and when to try again."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom import Backoff
from postroom.errors import ConfigurationError
from postroom.retry import Breaker

SECOND = timedelta(seconds=1)


@pytest.mark.requirement("S2-42", "S4-17")
def test_waits_double_from_base_and_stop_at_max() -> None:
    """The delay is min(base * 2^(attempts-1), max), clamped before any jitter."""
    backoff = Backoff(base=SECOND, max=10 * SECOND, jitter="none")

    waits = [backoff(attempts).total_seconds() for attempts in (1, 2, 3, 4, 5, 6)]

    assert waits == [1, 2, 4, 8, 10, 10]


@pytest.mark.requirement("S2-42")
@given(st.integers(1, 10**9))
def test_jitter_stays_in_the_upper_half_for_any_number_of_attempts(attempts: int) -> None:
    """Jitter is uniform in [delay/2, delay], and no number of attempts overflows."""
    plain = Backoff(base=SECOND, max=300 * SECOND, jitter="none")(attempts)
    jittered = Backoff(base=SECOND, max=300 * SECOND)(attempts)

    assert plain / 2 <= jittered <= plain


@pytest.mark.requirement("S2-42")
def test_jitter_spreads_over_the_whole_range() -> None:
    """The jitter is spread, not a constant factor."""
    waits = [Backoff(base=SECOND)(1).total_seconds() for _ in range(500)]

    # Hypothesis seeds `random` the same way for each example, so that only here many values are drawn.
    assert 0.5 <= min(waits) < 0.55
    assert 0.95 < max(waits) <= 1


@pytest.mark.requirement("S2-43")
@pytest.mark.parametrize(("base", "longest"), [(0, 1), (-1, 1), (2, 1)])
def test_a_backoff_that_cannot_grow_is_refused(base: int, longest: int) -> None:
    """The policy is checked once, when it is made, and cannot change later."""
    with pytest.raises(ConfigurationError, match="base"):
        Backoff(base=base * SECOND, max=longest * SECOND)


@pytest.mark.requirement("S2-43")
def test_a_backoff_cannot_be_changed() -> None:
    """Base, max and jitter are immutable."""
    with pytest.raises(AttributeError):
        Backoff().base = SECOND  # type: ignore[misc]


def breaker() -> Breaker:
    return Breaker(Backoff(base=SECOND, max=4 * SECOND, jitter="none"))


@pytest.mark.requirement("G13")
def test_a_breaker_lets_one_probe_through_after_its_cooldown() -> None:
    """One probe at a time tests a destination that is down."""
    down = breaker()
    down.fail(100.0)

    assert not down.start_probe(100.5)
    assert down.start_probe(101.0)
    assert not down.start_probe(101.0)


@pytest.mark.requirement("G13")
def test_a_failed_probe_waits_longer_and_other_failures_do_not_count() -> None:
    """Batches that were under way when the outage began do not stretch it."""
    down = breaker()
    down.fail(100.0)
    down.fail(100.1)
    down.fail(100.2)
    assert down.may_probe(101.0)

    down.start_probe(101.0)
    down.fail(101.0)
    down.end_probe()

    assert not down.may_probe(102.9)
    assert down.may_probe(103.0)


def test_only_the_first_failure_is_news() -> None:
    """An outage is told once, not with every batch."""
    down = breaker()

    assert [down.fail(1.0), down.fail(1.1)] == [True, False]
