"""One message at a time to a worker that has nothing else to do, which everybody does alike."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from .contender import payload

__all__ = ["Bell"]


class Bell:
    """Is rung by a handler when it begins, and tells how long after the commit that was."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()
        self._moment = 0.0

    def ring(self) -> None:
        """Take the time: a handler begins."""
        self._moment = time.perf_counter()
        self._rung.set()

    async def latencies(self, count: int, commit: Callable[[bytes], Awaitable[None]]) -> list[float]:
        """Commit messages one by one, each a short while after the one before it was handled.

        A handler that begins before the producer hears of its own commit counts as 0.
        """
        latencies: list[float] = []
        for number in range(count):
            await asyncio.sleep(random.uniform(0.005, 0.02))
            self._rung.clear()
            await commit(payload(number))
            committed = time.perf_counter()
            await asyncio.wait_for(self._rung.wait(), 30)
            latencies.append(max(self._moment - committed, 0.0))
        return latencies
