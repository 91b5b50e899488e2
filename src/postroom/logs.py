"""The log: events as lines, repeated failures of one kind as one summary a minute."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, TypeAlias

from .collapse import Collapser, Repeats
from .event import Event
from .text import duration, traceback_of

__all__ = ["Collapsed", "log_event", "summed_up"]

MINUTE: Final = timedelta(minutes=1)

#: Writes an event, or the latest of its repeats.
Write: TypeAlias = Callable[[Event, Repeats[Event] | None], None]


class Collapsed:
    """A listener that passes events on to a function, repeated failures of one kind as one summary a minute."""

    def __init__(
        self, write: Write, *, window: timedelta = MINUTE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._collapser: Collapser[Event] = Collapser(window=window)
        self._timer_at = 0.0

    def __call__(self, event: Event) -> None:
        """Write an event, or hold it back."""
        if event.level < logging.WARNING and not self._collapser:
            self._write(event, None)  # as nearly always, at no cost
            return
        now = self._clock()
        self._summarise(self._collapser.due(now))
        if event.ends != "nothing":
            self._summarise(self._collapser.drain(now, place=event.place if event.ends == "place" else None))
        burst = event.burst or (1 if event.level == logging.WARNING else None)
        if burst is None or self._collapser.admit(event.kind(), _bare(event), now, burst=burst):
            self._write(event, None)
        elif now >= self._timer_at:
            self._arrange(now)

    def flush(self) -> None:
        """Write everything that was held back, and begin anew."""
        self._timer_at = 0.0
        self._summarise(self._collapser.drain(self._clock()))

    def write_due(self) -> None:
        """Write summaries whose time has come, although no event comes any more."""
        now = self._clock()
        self._timer_at = 0.0
        self._summarise(self._collapser.due(now))
        self._arrange(now)

    def _arrange(self, now: float) -> None:
        due = self._collapser.next_due()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # without a loop the next event brings the summary
            return
        if due is not None:
            self._timer_at = due
            loop.call_later(max(due - now, 0.0), self.write_due)

    def _summarise(self, summaries: list[Repeats[Event]]) -> None:
        for repeats in summaries:
            self._write(repeats.latest, repeats)


def _bare(event: Event) -> Event:
    """Return an event without its exception, which would keep a whole stack alive until the summary."""
    bare: Any = event  # not every event has an exception
    return event if getattr(event, "exception", None) is None else replace(bare, exception=None)


_logger = logging.getLogger("postroom")


def summed_up(text: str, repeats: Repeats[Event]) -> str:
    """Return the line that stands for repeats, made from that of the latest."""
    return f"{repeats.count} more in the last {duration(repeats.within)}, most recently: {text}"


def _log(event: Event, repeats: Repeats[Event] | None) -> None:
    if not _logger.isEnabledFor(event.level):
        return
    text, fields = event.text, event.as_dict()
    exception: BaseException | None = getattr(event, "exception", None)
    if repeats is not None:
        text, fields["repeats"] = summed_up(text, repeats), repeats.count
    file, line, function, _ = _logger.findCaller()
    info = None if exception is None else (type(exception), exception, exception.__traceback__)
    extra = {f"postroom_{name}": value for name, value in fields.items()}
    # The template and its values apart, so that error trackers group records by event.
    record = _logger.makeRecord("postroom", event.level, file, line, text, (event.shown(),), info, function, extra)
    if exception is not None:
        record.exc_text = traceback_of(exception)  # which formatters prefer to one with raw control characters
    _logger.handle(record)


#: Writes an event to the log ``postroom`` as one line, with its fields as extra attributes and its traceback.
log_event: Final[Collapsed] = Collapsed(_log)
