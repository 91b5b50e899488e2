"""The tasks of a consumer, one for each message that is handled, and whether they are to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from typing import Any

from .broker import is_cancelled

__all__ = ["Crew"]


class Crew:
    """Starts tasks that know nothing of each other, and tells what is their own fault from what comes of the end."""

    def __init__(self) -> None:
        """Set up; to be opened by the task that the others work for."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: set[asyncio.Task[None]] = set()
        self._is_cancelling = False
        self._context = copy_context()
        self._head: asyncio.Task[Any] | None = None
        self._requests = 0

    def open(self) -> None:
        """Work for the current task: with its context, and not after it was cancelled."""
        self._context, self._head = copy_context(), asyncio.current_task()
        # There may be requests to cancel it that something has left behind.
        self._requests = self._head.cancelling() if self._head is not None else 0

    def start(self, work: Coroutine[Any, Any, None], ended: Callable[[asyncio.Task[None]], None]) -> None:
        """Start a task with a context of its own: what is left there, or in the task, is nobody else's."""
        task = asyncio.create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(partial(self._end, ended))

    def _end(self, ended: Callable[[asyncio.Task[None]], None], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._begun.discard(task)
        ended(task)

    def begin(self) -> None:
        """Say that the current task has begun, and has something to tidy up when it is cancelled."""
        task = asyncio.current_task()
        if task is not None:
            self._begun.add(task)

    async def wait(self, patience: timedelta) -> None:
        """Wait until those have ended that there are, but not too long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience.total_seconds())

    def cancel(self) -> None:
        """Cancel all that have begun; the others, which could not even tidy up, find out by themselves."""
        self._is_cancelling = True
        for task in self._begun:
            task.cancel()

    def give_up(self) -> None:
        """Cancel all, come what may."""
        self._is_cancelling = True
        for task in self._tasks:
            task.cancel()

    def is_ending(self, error: BaseException) -> bool:
        """Tell whether an error that the current task met comes of the end, and not of what it was doing.

        That it was asked to cancel does not tell: a TaskGroup of Python 3.11 whose child failed leaves such a request
        behind, and so do older libraries.
        """
        if not is_cancelled() or not isinstance(error, Exception | asyncio.CancelledError):
            return False
        if asyncio.current_task() not in self._tasks:
            return isinstance(error, asyncio.CancelledError)  # somebody else's task, of which no more is known
        # Whoever ends a whole program cancels its tasks in any order.
        return self._is_cancelling or (self._head is not None and self._head.cancelling() > self._requests)
