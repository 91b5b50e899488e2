"""The dispatcher as a process: its memory over a long backlog, and two of them at work together."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postroom import Delivered, Dispatcher, Message, Outcome

from ..contenders.postroom import Postroom

__all__ = ["contender"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


class Watched:
    """A publisher that does nothing but look at the memory of its process."""

    def __init__(self, count: int) -> None:
        self._warm = count // 20
        self.delivered = 0
        self.first = 0
        self.most = 0

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome]:
        self.delivered += len(messages)
        if self.delivered >= self._warm:
            self.first = self.first or _resident()
            self.most = max(self.most, _resident())
        return [Delivered()] * len(messages)


class Busy:
    """A publisher that costs processor time for every message."""

    def __init__(self, cost: float) -> None:
        self._cost = cost
        self.delivered = 0

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome]:
        for _ in messages:
            end = time.thread_time() + self._cost
            while time.thread_time() < end:
                pass
        self.delivered += len(messages)
        return [Delivered()] * len(messages)


class Dispatching(Postroom):
    """One dispatcher in this process."""

    async def growth(self, count: int) -> dict[str, float]:
        """Drain a backlog; return by how many megabytes the process grew after the first twentieth of it."""
        publisher = Watched(count)
        await Dispatcher(self.store(), publisher).run(until_idle=True)
        return {"growth": (publisher.most - publisher.first) / 2**20, "missing": count - publisher.delivered}

    async def work(self, cost: float) -> dict[str, float]:
        """Drain a backlog at a cost for each message; return when it began and ended by the system's clock."""
        publisher = Busy(cost)
        began = time.monotonic()
        await Dispatcher(self.store(), publisher).run(until_idle=True)
        return {"began": began, "ended": time.monotonic(), "delivered": publisher.delivered}


def contender(dsn: str, **options: Any) -> Dispatching:  # noqa: ANN401 -- as for every contender
    """Return a dispatcher at work on one database."""
    return Dispatching(dsn, **options)
