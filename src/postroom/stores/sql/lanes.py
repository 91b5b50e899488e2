"""Lanes: messages with a key and messages without one, which are claimed by statements of their own."""

from __future__ import annotations

from typing import Final

__all__ = ["Lanes"]

#: How many claims in a row may leave out the messages with a key, or those without one.
PASSED_OVER: Final = 4


class Lanes:
    """Decides with which lane a claim begins; it looks into the other one if there is nothing in the first."""

    def __init__(self) -> None:
        self._keyed_first = False
        self._newest_keyed_first = False
        self._passed_over = 0

    def first(self, *, newest_first: bool) -> bool:
        """Tell whether a claim begins with the messages that have a key.

        Claims from the newest on take turns, whatever they bring: two of them see what was added last, with a key or
        without, although one lane is full of messages that have to wait.
        """
        if not newest_first:
            return self._keyed_first
        self._newest_keyed_first = not self._newest_keyed_first
        return self._newest_keyed_first

    def report(self, *, first: bool, last: bool, found: int, limit: int) -> None:
        """Take note of the lanes in which a claim from the oldest on looked first and last, and of what it found.

        The lane that brought something goes first, for there may be more; but it must not starve the other.
        """
        if last != first:
            self._keyed_first, self._passed_over = last if found else first, 0
            return
        self._passed_over += 1
        if found == limit or self._passed_over == PASSED_OVER:
            self._keyed_first, self._passed_over = not first, 0
