"""Marks: what stands of a message while it is handled and afterwards, and whose it is."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final
from uuid import uuid4

from ...errors import StoreError
from .client import Client
from .scripts import alone

__all__ = ["Mark", "Renewal", "drop", "milliseconds"]

#: How often a lease is renewed before it would end.
PER_LEASE: Final = 3


@dataclass(slots=True)
class Mark:
    """The key that says what became of a transaction, and the token that says whose transaction it was."""

    key: str
    #: For how long it is kept after the commit.
    kept: timedelta
    #: Whether somebody has claimed it before the commit; one that is not claimed must not be there.
    is_claimed: bool
    token: str = field(default_factory=lambda: uuid4().hex)

    @property
    def expected(self) -> str:
        """What it must hold for a commit, nothing if it must not be there."""
        return f"p:{self.token}" if self.is_claimed else ""


def milliseconds(duration: timedelta) -> int:
    """Return a duration as the server wants it, which takes no less than one."""
    return max(duration // timedelta(milliseconds=1), 1)


async def drop(client: Client, mark: Mark) -> list[str]:
    """Give a claim up; return DROPPED or LOST, or what a commit has made of it: DONE, or PARTIAL and why."""
    arguments = mark.token, mark.expected, milliseconds(mark.kept)
    answer: list[bytes] = await client.evaluate(alone("drop"), [mark.key], *arguments)
    return [word.decode(errors="replace") for word in answer]


class Renewal:
    """Keeps a lease while a handler runs, up to a limit: one that hangs must not hold its message for ever."""

    def __init__(self, client: Client, mark: Mark, *, lease: timedelta, longest: timedelta) -> None:
        self._client = client
        self._mark = mark
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + longest.total_seconds()
        self._every = lease.total_seconds() / PER_LEASE
        self._task: asyncio.Task[None] | None = None
        # Most handlers end before, and a timer costs less than a task.
        self._timer = self._loop.call_later(self._every, self._begin)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._renew())

    async def _renew(self) -> None:
        is_mine = True
        while is_mine and self._loop.time() + self._every < self._end:
            with contextlib.suppress(StoreError):  # it is tried again before the lease ends
                lease = milliseconds(self._lease)
                is_mine = (
                    await self._client.evaluate(alone("renew_mark"), [self._mark.key], self._mark.token, lease) == 1
                )
            await asyncio.sleep(self._every)

    async def stop(self) -> None:
        """Renew no more."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
