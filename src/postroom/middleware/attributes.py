"""Middleware that reads and writes what stands on a message: ids that tell a story, its time, its subject."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from ..deadline import clock
from ..errors import ConfigurationError, ExpiredError, RejectError
from ..message import Message
from .chain import Next

__all__ = ["CorrelationMiddleware", "DeadlineMiddleware", "RequiredMiddleware", "SubjectMiddleware"]

CORRELATION: Final = "ce-correlationid"
CAUSATION: Final = "ce-causationid"
EXPIRY: Final = "ce-expirytime"


class CorrelationMiddleware:
    """Gives outputs the ids that tell which story they belong to, and which message led to them.

    The correlation id is that of the message, or its own id if it begins the story; the causation id is its id.
    """

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message and mark what comes of it."""
        outputs = await call_next(message)
        if not outputs:
            return outputs
        story = {CORRELATION: message.headers.get(CORRELATION, str(message.id)), CAUSATION: str(message.id)}
        return [replace(output, headers={**story, **output.headers}) for output in outputs]


class SubjectMiddleware:
    """Gives outputs without a key one, by default that of the message, so that a story stays in order."""

    def __init__(self, subject: Callable[[Message, Message], str | None] | None = None) -> None:
        """Set up.

        Args:
            subject: Returns the key of an output, given the message and the output.
        """
        self._subject: Callable[[Message, Message], str | None] = subject or _same_subject

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message and name the subject of what comes of it."""
        return [self._named(message, output) for output in await call_next(message)]

    def _named(self, message: Message, output: Message) -> Message:
        key = None if output.key is not None else self._subject(message, output)
        return output if key is None else replace(output, key=key)


def _same_subject(message: Message, _: Message) -> str | None:
    return message.key


class DeadlineMiddleware:
    """Handles a message only until its ``expirytime``, an extension of CloudEvents; outputs inherit it.

    What came too late is rejected with `ExpiredError`; a handler that is still at work then is cancelled, unless its
    transaction is being committed.
    """

    def __init__(self, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message while it means something."""
        text = message.headers.get(EXPIRY)
        if text is None:
            return await call_next(message)
        left = (_moment(text) - self._clock()).total_seconds()
        late = ExpiredError(f"the message was to be handled before {text}")
        if left <= 0:
            raise late
        deadline = asyncio.timeout(left)
        try:
            async with deadline:
                outputs = await _excused(deadline, message, call_next)
        except TimeoutError:
            if deadline.expired():
                raise late from None
            raise
        return [replace(output, headers={EXPIRY: text, **output.headers}) for output in outputs]


async def _excused(deadline: asyncio.Timeout, message: Message, call_next: Next) -> Sequence[Message]:
    """Handle a message whose deadline does not count while a transaction inside it is being committed."""
    work = clock.get()
    before = work.excuse(deadline)
    try:
        return await call_next(message)
    finally:
        work.excuse(before)  # a transaction around this one commits after the deadline has ended


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise RejectError(f"the header {EXPIRY} is not a moment of RFC 3339") from None
    if moment.utcoffset() is None:
        raise RejectError(f"the header {EXPIRY} has no time zone")
    return moment


class RequiredMiddleware:
    """Rejects messages that lack an attribute of CloudEvents or a header."""

    def __init__(self, *names: str) -> None:
        """Set up.

        Args:
            names: Attributes such as ``subject``, ``source`` or ``time``, or names of headers.
        """
        if not names:
            raise ConfigurationError("RequiredMiddleware needs the names of what is required")
        self._names = names

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message that has what it needs."""
        attributes = message.attributes
        present = {name for name, value in (*attributes.items(), *message.headers.items()) if value}
        # A source that nobody gave is made up of the namespace, which tells nothing.
        if "ce-source" not in message.headers:
            present.discard("source")
        missing = [name for name in self._names if name not in present and f"ce-{name}" not in present]
        if missing:
            raise RejectError(f"the message lacks {', '.join(missing)}")
        return await call_next(message)
