"""Hints to other processes that there is work: sent at once, or one for many while many are asked for."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ...errors import StoreError
from ...patience import call_in

__all__ = ["Hints"]

#: How many seconds apart hints are at least while they are asked for more often than CROWDED seconds apart.
APART = 0.01
CROWDED = 0.003


class Hints:
    """Asked for from any thread, sent on the loop that they were opened on."""

    def __init__(self, send: Callable[[], Awaitable[object]]) -> None:
        self._send = send
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False
        #: The one that is about to be sent, and all that are on their way.
        self._next: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        #: When one was last sent and last asked for, and whether that was right after the one before.
        self._sent = self._asked = -math.inf
        self._is_crowded = False

    def open(self) -> None:
        """Send from now on, on the loop that runs here."""
        self._loop, self._is_open = asyncio.get_running_loop(), True

    async def close(self) -> None:
        """Drop what is on its way, and whatever is asked for later."""
        self._is_open = False
        for hint in self._sending:
            hint.cancel()
        if self._sending:
            await asyncio.wait(self._sending)

    def ask(self) -> bool:
        """Send a hint about everything added until now; return False if hints have never been opened."""
        if self._loop is None:
            return False
        now = time.monotonic()
        self._is_crowded, self._asked = now - self._asked < CROWDED, now
        if self._next is None:  # else one is about to be sent, and will tell of this as well
            call_in(self._loop, self._begin)
        return True

    def _begin(self) -> None:
        if self._next is None and self._is_open:
            self._next = asyncio.create_task(self._send_soon())
            self._sending.add(self._next)
            self._next.add_done_callback(self._end)

    def _end(self, hint: asyncio.Task[None]) -> None:
        self._sending.discard(hint)
        if self._next is hint:  # cancelled before it began
            self._next = None

    async def _send_soon(self) -> None:
        try:
            wait = self._sent + APART - time.monotonic()
            if self._is_crowded and wait > 0:
                await asyncio.sleep(wait)
        finally:
            # What commits from here on is not covered by this hint and must be able to ask for the next.
            self._next = None
        self._sent = time.monotonic()
        with suppress(StoreError):  # a lost hint costs latency, never a message
            await self._send()
