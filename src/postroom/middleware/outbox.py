"""The middleware that adds what handlers return to the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from ..message import Message
from ..outbox import Outbox
from ..transaction import required_transaction
from .chain import NOTHING, Next
from .layers import OUTBOX, TRANSACTION

__all__ = ["OutboxMiddleware"]


class OutboxMiddleware:
    """Adds what a handler returns to the outbox, in its transaction, and hands nothing on."""

    layer: ClassVar[int] = OUTBOX
    needs: ClassVar[int] = TRANSACTION

    def __init__(self, outbox: Outbox, *, topic: str | None = None) -> None:
        """Set up.

        Args:
            outbox: Adds the messages.
            topic: Where all of them go; by default each says it itself.
        """
        self._outbox = outbox
        self._topic = topic

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message and keep what comes of it."""
        # Asked for before there is anything to write: a stack without one should not work for a while.
        transaction = required_transaction("the outbox")
        outputs = await call_next(message)
        if outputs:
            if self._topic is not None:
                outputs = [replace(output, topic=self._topic) for output in outputs]
            await transaction.do(self._outbox.add, list(outputs))
            if self._outbox.wake is not None:
                transaction.after_commit(self._outbox.wake)
        return NOTHING
