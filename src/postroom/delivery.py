"""A delivery: a message in somebody's hands, to be acknowledged or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from datetime import timedelta

from . import events
from .errors import NoDeliveryError
from .message import Message
from .store import Dead, Delivered, Outcome, Release, Retry

__all__ = ["Delivery", "current_delivery", "share"]

#: The delivery that is being handled.
current: ContextVar[Delivery | None] = ContextVar("postroom_delivery", default=None)


class Delivery:
    """A message with ack and nack; the first of them counts, later ones do nothing."""

    def __init__(self, message: Message, settle: Callable[[Outcome], Awaitable[None]]) -> None:
        self.message = message
        self._settle = settle
        self._outcome: Outcome | None = None
        self._settled: asyncio.Future[Outcome] | None = None
        #: Whether a handler may settle it, which can be cancelled at any time: what it says is told all the same.
        self.is_handled: bool = False
        self._telling: asyncio.Future[None] | None = None
        #: The listener of the consumer that handles the message, as it was given and as it never raises.
        self.listener: events.Listener | None = None
        self.tell: events.Listener | None = None
        #: Whether a middleware has reported what became of the message, so that its consumer does not.
        self.is_reported: bool = False

    def __repr__(self) -> str:
        """Show the message's identity, never its payload, nor what an error says of it."""
        return f"Delivery({self.message!r}, outcome={type(self._outcome).__name__ if self._outcome else None})"

    @property
    def outcome(self) -> Outcome | None:
        """What was said of the message; None while it is open."""
        return self._outcome

    @property
    def error(self) -> str | None:
        """Why the message was not acknowledged, as the first nack or reject said it."""
        return self._outcome.error if isinstance(self._outcome, Retry | Dead) else None

    async def settled(self) -> Outcome:
        """Wait until something was said of the message, by whomever, and return it."""
        if self._outcome is not None:
            return self._outcome
        if self._settled is None:
            self._settled = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._settled)

    async def ack(self) -> None:
        """Say that the message is done; when this returns, it is recorded or the lease was lost.

        Raises:
            StoreUnavailableError: Nobody is there any more to record it; the message will come again.
        """
        await self.settle(Delivered())

    async def nack(self, error: str = "nack", *, delay: timedelta | None = None) -> None:
        """Say that the message failed and should come again, by default after the usual backoff."""
        await self.settle(Retry(error, delay))

    async def reject(self, error: str) -> None:
        """Say that the message can never succeed: it becomes dead."""
        await self.settle(Dead(error))

    async def release(self) -> None:
        """Give the message back as if it had never been handed out; no attempt is spent."""
        await self.settle(Release())

    async def settle(self, outcome: Outcome) -> None:
        """Say what became of the message; only the first time counts."""
        if self._outcome is not None:
            return
        if not self.is_handled:
            await self.record(outcome)
            return
        self._decide(outcome)
        self._telling = asyncio.ensure_future(self._settle(outcome))
        await asyncio.shield(self._telling)

    async def record(self, outcome: Outcome) -> None:
        """Settle, and wait for what a handler has said already; who is cancelled here may leave the broker untold.

        Raises:
            Exception: The broker did not take note of it.
        """
        if self._outcome is None:
            self._decide(outcome)
            await self._settle(outcome)
        elif self._telling is not None:
            await self._telling

    def _decide(self, outcome: Outcome) -> None:
        self._outcome = outcome
        if self._settled is not None:
            self._settled.set_result(outcome)


def current_delivery() -> Delivery:
    """Return the delivery that is being handled, for whoever acknowledges by hand."""
    delivery = current.get()
    if delivery is None:
        raise NoDeliveryError
    return delivery


def share(delivery: Delivery, outputs: Sequence[Message]) -> list[Delivery]:
    """Return a delivery for each output; ``delivery`` is acknowledged when all are, and fails with the first that does.

    Each output counts once, however often it is settled. Without outputs nobody would ever settle, so the caller
    acknowledges.
    """
    open_outputs = len(outputs)

    async def settle(outcome: Outcome) -> None:
        nonlocal open_outputs
        open_outputs -= 1
        if not isinstance(outcome, Delivered):
            await delivery.settle(outcome)
        elif not open_outputs:
            await delivery.ack()

    return [Delivery(output, settle) for output in outputs]
