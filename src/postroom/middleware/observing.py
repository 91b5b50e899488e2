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
from ..text import labelled
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
    """Logs what was handled, how long it took and how it ended, under the name ``postroom``; never a payload."""

    def __init__(self, *, level: int = logging.INFO) -> None:
        self._level = level
        self._logger = logging.getLogger("postroom")

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message and log it."""
        began, ended = time.monotonic(), ""
        try:
            outputs = await call_next(message)
            ended = f"handler returned {len(outputs)} messages"
        except BaseException as error:
            ended = f"handler failed with {type(error).__name__}"  # its text may quote the payload
            raise
        finally:
            took = time.monotonic() - began
            fields = {"topic": message.topic, "type": message.type, "key": message.key, "attempt": message.attempt}
            subject = " ".join(labelled(name, value) for name, value in fields.items() if value is not None)
            extra: dict[str, object] = {f"postroom_{name}": value for name, value in fields.items()}
            extra |= {"postroom_message_id": message.id, "postroom_duration": took}
            self._logger.log(
                self._level, "message %s %s: %s after %.3f s", message.id, subject, ended, took, extra=extra
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
            at = (message.id, message.type, message.attempt)
            self._tell(events.HandlingFailed(*at, describe(error), message.topic, message.key, error))
            raise
        took = timedelta(seconds=time.monotonic() - began)
        self._tell(events.Handled(message.id, message.type, took, message.topic, message.key))
        return outputs
