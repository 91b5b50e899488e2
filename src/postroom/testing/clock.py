"""A clock that stands still until it is told to go on, for tests of what depends on time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from ..errors import ConfigurationError

__all__ = ["VirtualClock"]

_BEGINNING: Final = datetime(2030, 1, 1, tzinfo=UTC)


class VirtualClock:
    """Tells the same moment until `advance` is called; for whatever takes a ``clock``, such as `MemoryStore`.

    Example:
        >>> from datetime import timedelta
        >>> from postroom.testing.clock import VirtualClock
        >>> clock = VirtualClock()
        >>> before = clock()
        >>> clock.advance(timedelta(hours=1)) - before
        datetime.timedelta(seconds=3600)
    """

    def __init__(self, now: datetime = _BEGINNING) -> None:
        """Set the clock; by default it is the first of January 2030.

        Raises:
            ConfigurationError: The moment has no time zone.
        """
        if now.utcoffset() is None:
            raise ConfigurationError(f"now={now} has no time zone; use datetime.now(UTC) or .astimezone()")
        self._now = now.astimezone(UTC)

    def __repr__(self) -> str:
        """Show the moment."""
        return f"VirtualClock({self._now.isoformat()})"

    def __call__(self) -> datetime:
        """Return the moment, in UTC."""
        return self._now

    def advance(self, by: timedelta) -> datetime:
        """Let time pass, and return the moment after it.

        Raises:
            ConfigurationError: Time would go back, which nothing that reads a clock is prepared for.
        """
        if by < timedelta(0):
            raise ConfigurationError(f"by={by} is negative, and time does not go back; make a new clock instead")
        self._now += by
        return self._now
