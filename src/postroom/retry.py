"""When to try again: how long to wait after a failure, and when an outage is over."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeAlias

from .errors import ConfigurationError

__all__ = ["Backoff", "Breaker", "Delay"]

#: From the number of attempts so far to the wait before the next; a `Backoff` or your own function.
Delay: TypeAlias = Callable[[int], timedelta]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waits that double from ``base`` up to ``max``, each drawn from its upper half.

    Example:
        >>> from datetime import timedelta
        >>> from postroom import Backoff
        >>> Backoff(base=timedelta(seconds=2), jitter="none")(3)
        datetime.timedelta(seconds=8)
    """

    base: timedelta = timedelta(seconds=1)
    max: timedelta = timedelta(seconds=300)
    jitter: Literal["equal", "none"] = "equal"

    def __post_init__(self) -> None:
        """Refuse waits that cannot grow from base to max."""
        if not timedelta(0) < self.base <= self.max:
            raise ConfigurationError(f"backoff needs 0 < base <= max, not base={self.base}, max={self.max}")

    def __call__(self, attempts: int) -> timedelta:
        """Return the wait after ``attempts`` deliveries have failed."""
        # Doubling is stopped where it must have passed max, so that no number of attempts overflows.
        doublings = min(max(attempts - 1, 0), (self.max // self.base).bit_length())
        delay = min(self.base * 2**doublings, self.max)
        return delay if self.jitter == "none" else delay * random.uniform(0.5, 1.0)


@dataclass(slots=True)
class Breaker:
    """Tells whether a destination may be tried: closed, open, or one probe at a time.

    Times are seconds of one monotonic clock, given by the caller.
    """

    cooldown: Delay
    failures: int = field(default=0, init=False)
    _retry_at: float = field(default=0.0, init=False)
    _probing: bool = field(default=False, init=False)

    @property
    def is_closed(self) -> bool:
        """Whether everything may go."""
        return self.failures == 0

    def wait(self, now: float) -> float:
        """Return how many seconds the destination must be left alone."""
        return 0.0 if self.is_closed else max(self._retry_at - now, 0.0)

    def start_probe(self, now: float) -> bool:
        """Take the right to probe, which one caller has at a time."""
        if self._probing or self.wait(now) > 0:
            return False
        self._probing = True
        return True

    def end_probe(self) -> None:
        """Give the right to probe back without a verdict."""
        self._probing = False

    def succeed(self) -> bool:
        """Close; tell whether it was open."""
        was_open = not self.is_closed
        self.failures = 0
        self._probing = False
        return was_open

    def fail(self, now: float) -> bool:
        """Open, for longer each time a probe fails; tell whether it was closed."""
        was_closed = self.is_closed
        if was_closed or self._probing:
            self.failures += 1
            self._retry_at = now + self.cooldown(self.failures).total_seconds()
        self._probing = False
        return was_closed
