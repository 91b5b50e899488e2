"""Repeats of one kind of event: the first is let through, the others are counted and summed up once a minute."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Collapser", "Kind", "Repeats"]

T = TypeVar("T")


class Kind(NamedTuple):
    """What makes two events repeats of each other."""

    event: str
    #: The topic, the store call or whatever else the event is about.
    place: str
    #: The error, without what differs from message to message.
    error: str


@dataclass(frozen=True, slots=True)
class Repeats(Generic[T]):
    """Events of one kind that were held back."""

    latest: T
    count: int
    within: timedelta


@dataclass(slots=True)
class _Window(Generic[T]):
    began: float
    let_through: int = 1
    count: int = 0
    latest: T | None = None

    def take(self, now: float) -> Repeats[T] | None:
        """Return what was held back, and count from zero again."""
        count, latest, self.count, self.latest = self.count, self.latest, 0, None
        return None if latest is None else Repeats(latest, count, timedelta(seconds=now - self.began))


class Collapser(Generic[T]):
    """Decides which events are let through; may be used from several threads.

    Times are seconds of one monotonic clock, given by the caller. Memory is bounded: beyond ``kinds`` kinds within one
    window, all further ones of an event count as one.
    """

    def __init__(self, *, window: timedelta = timedelta(minutes=1), kinds: int = 100) -> None:
        self._length = window.total_seconds()
        self._kinds = kinds
        #: In the order in which they end, since all are equally long.
        self._windows: dict[Kind, _Window[T]] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Return whether any kind is known."""
        return bool(self._windows)

    def admit(self, kind: Kind, item: T, now: float, *, burst: int = 1) -> bool:
        """Return whether an event is let through, as the first ``burst`` of its kind are; others are held back."""
        with self._lock:
            if kind not in self._windows and len(self._windows) >= self._kinds:
                kind = Kind(kind.event, "", "")
            window = self._windows.get(kind)
            if window is None:
                self._windows[kind] = _Window(now)
                return True
            if window.let_through < burst:
                window.let_through += 1
                return True
            window.count, window.latest = window.count + 1, item
            return False

    def due(self, now: float) -> list[Repeats[T]]:
        """Return what was held back in windows that are over; kinds without repeats are forgotten."""
        summaries: list[Repeats[T]] = []
        with self._lock:
            while self._windows:
                kind, window = next(iter(self._windows.items()))
                if now < window.began + self._length:
                    break
                del self._windows[kind]
                repeats = window.take(now)
                if repeats is not None:
                    summaries.append(repeats)
                    # The summary shows the latest of them, so it counts as one that was let through.
                    self._windows[kind] = _Window(now)
        return summaries

    def drain(self, now: float, *, place: str | None = None) -> list[Repeats[T]]:
        """Return everything that was held back and forget all kinds, or the repeats of one ``place`` alone."""
        with self._lock:
            windows = [window for kind, window in self._windows.items() if place in {None, kind.place}]
            if place is None:
                self._windows.clear()
            return [repeats for window in windows if (repeats := window.take(now)) is not None]

    def next_due(self) -> float | None:
        """Return when to look for summaries again; None if nothing is held back."""
        with self._lock:
            if not any(window.count for window in self._windows.values()):
                return None
            return next(iter(self._windows.values())).began + self._length
