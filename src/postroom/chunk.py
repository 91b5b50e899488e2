"""How much one call to a store takes: less after a call that took too long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from .errors import StoreTimeoutError

__all__ = ["Chunk"]

T = TypeVar("T")

#: After how many calls in time the next one takes twice as much.
CALM = 16


class Chunk:
    """A number that is halved when a call times out, down to one, and grows again when calls end in time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.size: int = most
        self._in_time = 0

    def share(self, of: int) -> int:
        """Return the part of another amount that stands to it as the size to the most, at least one."""
        return max(of * self.size // self.most, 1)

    async def call(self, do: Callable[[int], Awaitable[T]]) -> T:
        """Make a call with as much as it may take now."""
        try:
            result = await do(self.size)
        except (TimeoutError, StoreTimeoutError, asyncio.CancelledError):  # cancelled: by a deadline of the caller
            self.size, self._in_time = max(self.size // 2, 1), 0
            raise
        self._in_time += 1
        if self._in_time >= CALM:
            self.size, self._in_time = min(self.size * 2, self.most), 0
        return result
