"""Middleware that watches: logs, events for metrics, and exceptions that would end more than one message."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import timedelta

from .. import events
from ..broker import describe
from ..errors import PostroomError
from ..message import Message
from ..reporting import Reporter
from .chain import Next

__all__ = ["EventsMiddleware", "HandlerCrashedError", "LogMiddleware", "RecoverMiddleware"]


class HandlerCrashedError(PostroomError):
    """A handler raised what is meant to end the process."""


class RecoverMiddleware:
    """Makes an error of what would end the whole consumer, such as ``sys.exit()`` deep in a library.

    What comes from outside, the interrupt of a user or the end of the task, passes.
    """

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message; whatever ends it ends this message only."""
        try:
            return await call_next(message)
        except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            raise HandlerCrashedError(f"the handler of {message.type!r} raised {describe(error)}") from error


class LogMiddleware:
    """Writes to the log ``postroom`` what was handled, how long it took and how it ended; never a payload."""

    def __init__(self, *, level: int = logging.INFO) -> None:
        self._level = level
        self._logger = logging.getLogger("postroom")

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message and log it."""
        began, ended = time.monotonic(), ""
        try:
            outputs = await call_next(message)
            ended = f"returned {len(outputs)} messages"
        except BaseException as error:
            ended = f"failed with {type(error).__name__}"  # its text may quote the payload
            raise
        finally:
            took = time.monotonic() - began
            extra = {"postroom_message_id": message.id, "postroom_duration": took}
            self._logger.log(
                self._level,
                "handler of %r, message %s: %s after %.3f s",
                message.type,
                message.id,
                ended,
                took,
                extra=extra,
            )
        return outputs


class EventsMiddleware:
    """Tells a listener how each message was handled: what metrics are made of.

    A consumer reports the same to its own listener; one that is given to both hears each event once.
    """

    def __init__(self, listener: events.Listener) -> None:
        self._tell = Reporter(listener).alone

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message and tell of it."""
        began = time.monotonic()
        try:
            outputs = await call_next(message)
        except Exception as error:
            self._tell(events.HandlingFailed(message.id, message.type, message.attempt, describe(error)))
            raise
        self._tell(events.Handled(message.id, message.type, timedelta(seconds=time.monotonic() - began)))
        return outputs
