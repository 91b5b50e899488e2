"""Middleware that tries again at once, before the broker is told of a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar

from ..checks import check_count, check_function
from ..errors import CommitUnknownError, DecodeError, RejectError, consists_of
from ..message import Message
from ..reporting import Reporter
from ..retry import Backoff, Delay, guarded
from .chain import Next
from .layers import RETRY

__all__ = ["RetryMiddleware"]


class RetryMiddleware:
    """Handles a message again that failed, a few times with a short wait; then the failure is the broker's.

    It stands outside the transaction, so that every attempt has one of its own. What is rejected or
    cannot be decoded is not tried again, and neither is a transaction whose outcome is unknown.
    """

    layer: ClassVar[int] = RETRY

    def __init__(
        self,
        attempts: int = 3,
        *,
        on: type[Exception] | tuple[type[Exception], ...] = Exception,
        backoff: Delay | None = None,
    ) -> None:
        """Set up.

        Args:
            attempts: How often a message is handled at the most.
            on: Which errors are worth another attempt.
            backoff: How long to wait after the first, the second… failure.
        """
        check_count("attempts", attempts)
        check_function("backoff", backoff, "the number of failures", optional=True)
        self._attempts = attempts
        self._on = on
        waits = backoff or Backoff(base=timedelta(milliseconds=50), max=timedelta(seconds=2))
        self._backoff: Delay = guarded(waits, Reporter(None))

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message, and again if it fails."""
        for failures in range(1, self._attempts):
            try:
                return await call_next(message)
            except self._on as error:
                # A payload is decoded by the same code at once as now; later there may be a newer version.
                if isinstance(error, CommitUnknownError) or consists_of(error, RejectError, DecodeError):
                    raise
                await asyncio.sleep(self._backoff(failures).total_seconds())
        return await call_next(message)
