"""A delivery: a message in somebody's hands, to be acknowledged or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

from .message import Message
from .store import Dead, Delivered, Outcome, Retry

__all__ = ["Delivery"]


class Delivery:
    """A message with ack and nack; the first of them counts, later ones do nothing."""

    def __init__(self, message: Message, settle: Callable[[Outcome], Awaitable[None]]) -> None:
        self.message = message
        self._settle = settle
        self._outcome: Outcome | None = None

    def __repr__(self) -> str:
        """Show the message's identity, never its payload."""
        return f"Delivery({self.message!r}, outcome={self._outcome!r})"

    @property
    def outcome(self) -> Outcome | None:
        """What was said of the message; None while it is open."""
        return self._outcome

    async def ack(self) -> None:
        """Say that the message is done; when this returns, it is recorded or the lease was lost.

        Raises:
            StoreUnavailableError: Nobody is there any more to record it; the message will come again.
        """
        await self._once(Delivered())

    async def nack(self, error: str = "nack", *, delay: timedelta | None = None) -> None:
        """Say that the message failed and should come again, by default after the usual backoff."""
        await self._once(Retry(error, delay))

    async def reject(self, error: str) -> None:
        """Say that the message can never succeed: it becomes dead."""
        await self._once(Dead(error))

    async def _once(self, outcome: Outcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
            await self._settle(outcome)
