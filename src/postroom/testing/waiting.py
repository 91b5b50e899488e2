"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from datetime import timedelta

__all__ = ["until"]


async def until(
    condition: Callable[[], bool | Awaitable[bool]],
    what: str,
    *,
    within: timedelta = timedelta(minutes=2),
    every: timedelta = timedelta(milliseconds=5),
) -> None:
    """Wait until a condition holds; fail and say ``what`` was waited for if it never does.

    Example:
        >>> import asyncio
        >>> from postroom.testing.waiting import until
        >>> asyncio.run(until(lambda: 1 + 1 == 2, "arithmetic"))
    """
    try:
        async with asyncio.timeout(within.total_seconds()):
            while True:
                answer = condition()
                if await answer if inspect.isawaitable(answer) else answer:
                    return
                await asyncio.sleep(every.total_seconds())
    except TimeoutError:
        raise AssertionError(f"{what} did not happen within {within}") from None
