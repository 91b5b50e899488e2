"""Claims of an inbox that stands outside of its transaction, which takes them over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...inbox import Inbox
from ...message import Message
from ...transaction import ClaimState, Transaction

__all__ = ["RedisInboxClaim"]


class RedisInboxClaim:
    """A message that is claimed in Redis, with the recorder whose commit marks it as done.

    The claim is the one of an inbox inside of a transaction, only earlier: the mark, its token and the renewal of its
    lease belong to the recorder from the beginning.
    """

    def __init__(self, inbox: Inbox, message: Message, open_: Callable[[], Awaitable[Transaction]]) -> None:
        """Set up; nothing is claimed yet.

        Args:
            inbox: Which consumer claims it.
            message: The message.
            open_: Returns a transaction that nothing was recorded in.
        """
        self.state: ClaimState = "given_up"
        self._inbox = inbox
        self._message = message
        self._open = open_
        self._transaction: Transaction | None = None

    async def hold(self) -> Transaction:
        """Claim the message, or find that it was handled before."""
        transaction = self._transaction = await self._open()
        self.state = "held"  # before the call: if its answer is lost, the claim may be there
        try:
            if not await self._inbox.admit(transaction, self._message):
                self.state = "duplicate"
                await transaction.connection.end()
        except BaseException:
            await self.give_up()
            raise
        return transaction

    async def take(self) -> Transaction:
        """Return the transaction that completes the claim, which is claimed again if it was given up."""
        transaction = self._transaction
        if self.state != "held" or transaction is None:
            transaction = await self.hold()
        if self.state == "held":
            self.state = "taken"
        return transaction

    async def give_up(self) -> None:
        """Let the message be handled again at once, unless a transaction has taken it over."""
        if self.state != "held" or self._transaction is None:
            return
        self.state = "given_up"
        recorder = self._transaction.connection
        recorder.close()
        try:
            await recorder.give_up()
        finally:
            await recorder.end()
