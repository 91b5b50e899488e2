"""Calls to a store that may be away: made again until they succeed."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Final, TypeVar

from . import events
from .broker import describe
from .errors import PostroomError, StoreError, StorePermissionError
from .retry import Backoff

__all__ = ["UPKEEP", "call_in", "persist"]

T = TypeVar("T")

#: What upkeep survives: deliveries do not depend on it, so that it waits for a permission that it lacks.
UPKEEP: Final = (StoreError, StorePermissionError)

_BACKOFF = Backoff(base=timedelta(milliseconds=100), max=timedelta(seconds=5))


async def persist(
    operation: str,
    call: Callable[[], Awaitable[T]],
    tell: events.Listener,
    *,
    only: type[PostroomError] | tuple[type[PostroomError], ...] = StoreError,
    until: asyncio.Event | None = None,
    deadline: float | None = 60.0,
) -> T | None:
    """Make a call until it succeeds, and return its result; or None once ``until`` is set.

    Survives errors of the kind ``only`` and calls that take longer than ``deadline`` seconds; each is an event. A
    missing permission is raised unless ``only`` names it, since no retry grants it.
    """
    never = asyncio.Event()
    survived: tuple[type[Exception], ...] = (TimeoutError, *(only if isinstance(only, tuple) else (only,)))
    is_denial_survived = StorePermissionError in survived
    failures = 0
    while until is None or not until.is_set():
        try:
            async with asyncio.timeout(deadline):
                result = await call()
        except survived as error:
            if isinstance(error, StorePermissionError) and not is_denial_survived:
                raise
            failures += 1
            delay = _BACKOFF(failures)
            is_late = deadline is not None and not str(error)
            said = f"TimeoutError: no answer within {deadline:g} s" if is_late else describe(error)
            tell(events.StoreFailed(operation, said, failures, delay))
            with suppress(TimeoutError):
                async with asyncio.timeout(delay.total_seconds()):
                    await (until or never).wait()
        else:
            if failures:
                tell(events.StoreRecovered(operation))
            return result
    return None


def call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call something in the thread of a loop: at once if this is it, or soon; never if the loop has been closed."""
    try:
        is_here = asyncio.get_running_loop() is loop
    except RuntimeError:  # no loop runs in this thread
        is_here = False
    if is_here:
        contextvars.Context().run(callback)  # what it starts is none of the caller's, whose variables it would inherit
        return
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
