"""The middleware that puts aside what failed too often or was rejected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from .. import events
from ..broker import describe
from ..checks import check_count, check_methods
from ..dead_letters import DeadLetters
from ..deadline import off_the_clock
from ..errors import CommitUnknownError, StoreError, is_outage, is_rejection
from ..message import Message
from ..reporting import Reporter
from .chain import NOTHING, Next
from .layers import DEAD_LETTERS

__all__ = ["DeadLetterMiddleware", "no_fault_of_the_message"]


class DeadLetterMiddleware:
    """Puts a message aside that has failed too often, or was rejected with `RejectError`, and has it acknowledged then.

    An error of the store is no fault of the message, and a transaction of which nobody knows whether it was committed
    is no failure: neither puts a message aside.
    """

    layer: ClassVar[int] = DEAD_LETTERS

    def __init__(
        self,
        letters: DeadLetters,
        *,
        max_attempts: int = 10,
        was_handled: Callable[[Message], Awaitable[bool]] | None = None,
        listener: events.Listener | None = None,
    ) -> None:
        """Set up.

        Args:
            letters: Where the messages go.
            max_attempts: After how many deliveries a message that failed is put aside.
            was_handled: Tells whether a message was handled, which may have been delivered so often for another reason.
            listener: Called with each, as the listener of the consumer is.
        """
        check_methods("letters", letters, ("bury",), "a place for dead letters")
        check_count("max_attempts", max_attempts)
        self._letters = letters
        self._max_attempts = max_attempts
        self._was_handled = was_handled
        self._report = Reporter(listener)

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message, or put it aside."""
        if message.attempt > self._max_attempts:
            with no_fault_of_the_message():
                was_handled = self._was_handled is not None and await self._was_handled(message)
            if was_handled:
                return NOTHING
            # Handled so often without an error, it must have killed whoever handled it.
            return await self._bury(
                message, f"delivered {message.attempt} times without an outcome: it may kill its worker"
            )
        try:
            return await call_next(message)
        except Exception as error:
            is_spent = message.attempt >= self._max_attempts and not is_outage(error)
            if not is_rejection(error) and not is_spent:
                raise
            return await self._bury(message, describe(error), error)

    async def _bury(self, message: Message, error: str, raised: Exception | None = None) -> Sequence[Message]:
        with no_fault_of_the_message():
            await self._letters.bury(message, error)
        at = (message.id, message.type, message.attempt)
        self._report(events.DeadLettered(*at, error, message.topic, message.key, raised))
        return NOTHING


@contextmanager
def no_fault_of_the_message() -> Generator[None]:
    """Have neither an error of the store nor waiting for it cost a delivery: the handler did nothing of it."""
    try:
        with off_the_clock():
            yield
    except (StoreError, CommitUnknownError) as error:
        error.is_outage = True
        raise
