"""Failpoints: named moments in the life of a message at which a test makes something go wrong.

Nothing in postroom knows of them, and no setting switches them on. A test puts taps around what it builds: an outbox,
a store with its driver, a publisher, a subscriber, transactions (`postroom.testing.taps`). A tap calls
`Failpoints.hit` before and after it passes a call on.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, TypeAlias

from ..errors import ConfigurationError
from .faults import FaultProxy

__all__ = [
    "POINTS",
    "Action",
    "Failpoints",
    "block",
    "cancel",
    "cut",
    "kill",
    "lose_reply",
    "raising",
    "wait",
]

#: What goes wrong. What it returns is awaited where there is an event loop to wait in.
Action: TypeAlias = Callable[[], object]

_CALLS: Final = ("claim", "settle", "release", "extend", "sweep", "purge")


def _around(*calls: str) -> list[str]:
    return [f"{call}.{moment}" for call in calls for moment in ("before", "after")]


#: ``statement`` comes before each statement, ``applied`` after the last of them and before the COMMIT if there is one;
#: ``sent`` when the destination has a message and nobody has heard of it. Between ``tx.begun`` and ``handle.before`` an
#: inbox is asked; between ``handle.after`` and ``commit.before`` an outbox is written to.
POINTS: Final = frozenset(
    {"tx.begin", "tx.begun", "add.before", "add.after", "commit.before", "commit.after"}
    | {"publish.before", "publish.sent", "publish.confirmed"}
    | {"deliver.after", *_around("handle", "bury", "ack", "nack")}
    | {f"{call}.{moment}" for call in _CALLS for moment in ("before", "statement", "applied", "after")}
)


class Failpoints:
    """Which action waits at which point.

    Example:
        >>> points = Failpoints()
        >>> points.on("claim.after", kill, nth=2)
    """

    def __init__(self) -> None:
        #: How often each point was reached.
        self.hits: Counter[str] = Counter()
        self._armed: dict[tuple[str, int], Action] = {}

    def on(self, point: str, action: Action, *, nth: int = 1) -> None:
        """Have an action taken when a point is reached for the ``nth`` time."""
        if point not in POINTS:
            raise ConfigurationError(f"there is no failpoint {point!r}; there are {', '.join(sorted(POINTS))}")
        self._armed[point, nth] = action

    async def hit(self, point: str) -> None:
        """Take the action that waits here, and await it if it can be."""
        answer = self._act(point)
        if inspect.isawaitable(answer):
            await answer

    def hit_now(self, point: str) -> None:
        """Take the action that waits here, which must not want to be awaited."""
        answer = self._act(point)
        if inspect.iscoroutine(answer):
            answer.close()
            raise ConfigurationError(f"nothing can be awaited at {point}; use an action that blocks")

    def _act(self, point: str) -> object:
        self.hits[point] += 1
        action = self._armed.get((point, self.hits[point]))
        return None if action is None else action()


# -- actions -------------------------------------------------------------------------------------------------------


def kill() -> None:
    """End this process as a crash does: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # a signal to another thread may take a moment; not a line may run meanwhile


def raising(error: BaseException) -> Action:
    """Raise an error."""

    def act() -> None:
        raise error

    return act


def block(until: timedelta | Callable[[], bool]) -> Action:
    """Stand still with the whole event loop, as in a long garbage collection."""

    def act() -> None:
        for pause in _pauses(until):
            time.sleep(pause)

    return act


def wait(until: timedelta | Callable[[], bool]) -> Action:
    """Let this call alone take long, as over a slow network."""

    async def act() -> None:
        for pause in _pauses(until):
            await asyncio.sleep(pause)

    return act


def _pauses(until: timedelta | Callable[[], bool]) -> Iterator[float]:
    if isinstance(until, timedelta):
        yield until.total_seconds()
        return
    while not until():
        yield 0.005


def cancel(task: asyncio.Task[Any] | None = None) -> Action:
    """Cancel a task, by default the one that is at the point."""

    def act() -> None:
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)
        elif current := asyncio.current_task():
            current.cancel()

    return act


def cut(proxy: FaultProxy) -> Action:
    """Reset all connections through a proxy."""
    return proxy.cut


def lose_reply(proxy: FaultProxy, pattern: bytes, *, nth: int = 1) -> Action:
    """From here on, lose the reply to the ``nth`` request that holds ``pattern``, and its connection."""
    return lambda: proxy.drop_reply(pattern, nth)
