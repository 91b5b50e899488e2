"""When to try again: how long to wait after a failure, and when an outage is over."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeAlias

from .checks import check_choice, check_duration
from .errors import ConfigurationError
from .events import BackoffFailed, Listener, log_event
from .text import describe

__all__ = ["Backoff", "Breaker", "Delay", "guarded"]

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
        check_duration("base", self.base)
        check_duration("max", self.max)
        check_choice("jitter", self.jitter, ("equal", "none"))
        if self.base > self.max:
            raise ConfigurationError(f"base={self.base} must not be longer than max={self.max}")

    def __call__(self, attempts: int) -> timedelta:
        """Return the wait after ``attempts`` deliveries have failed."""
        # Doubling is stopped where it must have passed max, so that no number of attempts overflows.
        doublings = min(max(attempts - 1, 0), (self.max // self.base).bit_length())
        delay = min(self.base * (1 << doublings), self.max)
        return delay if self.jitter == "none" else delay * random.uniform(0.5, 1.0)


@dataclass(slots=True)
class Breaker:
    """Tells when a destination that is down may be tried again, by one caller at a time.

    Times are seconds of one monotonic clock, given by the caller.
    """

    cooldown: Delay
    failures: int = field(default=0, init=False)
    _retry_at: float = field(default=0.0, init=False)
    _probing: bool = field(default=False, init=False)

    def may_probe(self, now: float) -> bool:
        """Tell whether the destination has been left alone for long enough, and nobody is trying it."""
        return not self._probing and now >= self._retry_at

    def wait(self, now: float) -> timedelta:
        """Return how long the destination must still be left alone."""
        return timedelta(seconds=max(self._retry_at - now, 0.0))

    def start_probe(self, now: float) -> bool:
        """Take the right to try the destination, which one caller has at a time."""
        if not self.may_probe(now):
            return False
        self._probing = True
        return True

    def end_probe(self) -> None:
        """Give the right back; to be called after `fail`, if that is the verdict."""
        self._probing = False

    def end_cooldown(self) -> None:
        """Let the destination be tried at once."""
        self._retry_at = 0.0

    def fail(self, now: float) -> bool:
        """Leave the destination alone, for longer each time a probe fails; tell whether this is the first time."""
        first = self.failures == 0
        if first or self._probing:
            self.failures += 1
            self._retry_at = now + self.cooldown(self.failures).total_seconds()
        return first


def guarded(delay: Delay, tell: Listener = log_event) -> Delay:
    """Return a delay that never raises: where yours fails, the default is used and the failure is reported."""

    def wait(attempts: int) -> timedelta:
        try:
            answer = delay(attempts)
            if answer >= timedelta(0):
                return answer
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 -- whatever a function of the user raises is reported
            tell(BackoffFailed(describe(error), error))
        return Backoff()(attempts)

    return wait
