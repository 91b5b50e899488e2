"""The middleware that skips messages that were handled before, and what forgets them in the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from .. import events
from ..checks import check_duration, check_type
from ..deadline import off_the_clock
from ..errors import AlreadyHandledError, InvalidMessageError, MiddlewareOrderError, TransactionError
from ..inbox import CHUNK, Inbox
from ..message import Message
from ..patience import UPKEEP, persist
from ..reporting import Reporter
from ..transaction import (
    ClaimingTransactions,
    Opening,
    Transactions,
    hand_over,
    in_transaction,
    required_transaction,
    take_back,
)
from .chain import NOTHING, Next
from .dead_letters import no_fault_of_the_message
from .layers import INBOX, TRANSACTION

__all__ = ["InboxMiddleware", "purge_forever"]


class InboxMiddleware:
    """Skips messages that this consumer has handled; they are acknowledged, and counted by an event.

    It stands inside of `TransactionMiddleware`. In Redis it may stand outside as well: it claims a message before its
    transaction begins, which completes the claim with its commit.
    """

    layer: ClassVar[int] = INBOX
    needs: ClassVar[int] = TRANSACTION

    def __init__(
        self,
        inbox: Inbox,
        *,
        cleanup_interval: timedelta = timedelta(minutes=1),
        listener: events.Listener | None = None,
    ) -> None:
        """Set up.

        Args:
            inbox: Remembers the messages.
            cleanup_interval: How often messages past their retention are forgotten, while a consumer runs.
            listener: Called with duplicates, as the listener of the consumer is.
        """
        check_type("inbox", inbox, Inbox)
        check_duration("cleanup_interval", cleanup_interval)
        self.inbox = inbox
        self._cleanup_interval = cleanup_interval
        self._report = Reporter(listener)
        self._transactions: Transactions | None = None
        self._claiming: ClaimingTransactions | None = None
        self._is_connected = asyncio.Event()

    def run_on(self, transactions: Transactions) -> None:
        """Clean the inbox in these transactions."""
        self._refuse_to_claim_elsewhere(None)
        self._transactions = transactions
        self._is_connected.set()

    @property
    def can_claim_first(self) -> bool:
        """Whether it may stand outside of a transaction that completes its claims."""
        return self.inbox.mode == "pessimistic"

    def claim_on(self, transactions: ClaimingTransactions) -> None:
        """Claim messages before one of these transactions begins inside of this middleware."""
        self._refuse_to_claim_elsewhere(transactions)
        self._claiming = self._transactions = transactions
        self._is_connected.set()

    def _refuse_to_claim_elsewhere(self, transactions: ClaimingTransactions | None) -> None:
        """Raise if claims of one stack would be made for another, whose transaction does not complete them."""
        if self._transactions is not None and self._claiming is not transactions:
            raise MiddlewareOrderError(
                "an InboxMiddleware that stands outside of its transaction belongs to one list of middlewares; create "
                "another one for this list"
            )

    async def serve(self, tell: events.Listener) -> None:
        """Delete inbox rows past their retention, until cancelled; a consumer does this while it runs."""
        await self._is_connected.wait()  # for the first message, where nothing else tells of transactions
        if self._transactions is not None:
            await purge_forever(self.inbox, self._transactions, tell, every=self._cleanup_interval)

    def check_horizon(self, horizon: timedelta | None) -> None:
        """Refuse a broker that may hand out a message again after the inbox has forgotten it."""
        self.inbox.check_horizon(horizon)

    def __call__(self, message: Message, call_next: Next) -> Coroutine[Any, Any, Sequence[Message]]:
        """Handle a message unless it was handled before."""
        if self._claiming is None:
            return self._inside(message, call_next)
        outer = in_transaction()
        if outer is not None and outer.opened_by is self._claiming:
            return self._nested(self._claiming.savepoint(outer), message, call_next)
        return self._outside(self._claiming, message, call_next)

    async def _outside(self, claiming: ClaimingTransactions, message: Message, call_next: Next) -> Sequence[Message]:
        """Claim a message, and hand the claim over to the transaction that begins inside."""
        self._check_id(message)
        with no_fault_of_the_message():
            claim = await claiming.claim(self.inbox, message)
        if claim is None:
            self._skip(message)
            return NOTHING
        opening = Opening(self.inbox, message, claim)
        token = hand_over(claiming, opening)
        try:
            outputs = await call_next(message)
            if claim.state not in {"done", "duplicate"}:
                # A middleware in between has answered in place of the transaction, so this is the end of the message.
                with no_fault_of_the_message():
                    async with claiming.begin(opening):
                        pass
        except BaseException:
            await claim.give_up()
            raise
        finally:
            take_back(token)
        if claim.state == "duplicate":
            self._skip(message)
        return outputs

    async def _nested(
        self, savepoint: AbstractAsyncContextManager[None], message: Message, call_next: Next
    ) -> Sequence[Message]:
        """Handle a message of another handler in its transaction: what fails must not stay marked in that."""
        async with savepoint:
            return await self._inside(message, call_next)

    async def _inside(self, message: Message, call_next: Next) -> Sequence[Message]:
        transaction = required_transaction("the inbox")
        if self._transactions is None:
            self.run_on(transaction.opened_by)
        self._check_id(message)
        transaction.witness = partial(self.inbox.was_handled, transaction.opened_by, message)
        is_optimistic = self.inbox.mode == "optimistic"
        is_admitted, transaction.is_admitted = transaction.is_admitted, None
        if is_admitted is None:
            transaction.is_preparing = True
            with off_the_clock():
                is_admitted = (
                    not await self.inbox.has(transaction, message)
                    if is_optimistic
                    else (await self.inbox.admit(transaction, message))
                )
            transaction.is_preparing = False
        if not is_admitted:
            self._skip(message)
            return NOTHING
        outputs = await call_next(message)
        if is_optimistic and not await self.inbox.admit(transaction, message):
            self._skip(message)
            raise AlreadyHandledError(message.id, transaction)
        return outputs

    def _check_id(self, message: Message) -> None:
        if not self.inbox.known(message).id:  # type: ignore[truthy-bool]  # a broker may have none
            raise InvalidMessageError("the message has no id, by which the inbox could know it again")

    def _skip(self, message: Message) -> None:
        at = (message.id, message.type, message.topic, message.key)
        self._report(events.DuplicateSkipped(self.inbox.consumer, *at))


async def purge_forever(inbox: Inbox, transactions: Transactions, tell: events.Listener, *, every: timedelta) -> None:
    """Delete inbox rows past their retention, in chunks that leave the database to the handlers in between."""
    while True:
        await asyncio.sleep(every.total_seconds() * random.uniform(0.75, 1.0))
        total, count = 0, CHUNK
        while count == CHUNK:
            purge = partial(inbox.purge, transactions)
            count = await persist("purge inbox", purge, tell, only=(*UPKEEP, TransactionError)) or 0
            total += count
            await asyncio.sleep(0.01)
        if total:
            tell(events.InboxPurged(inbox.consumer, total))
