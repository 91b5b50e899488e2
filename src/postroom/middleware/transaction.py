"""The middleware that handles each message in a transaction."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal
from uuid import UUID

from ..checks import check_choice, check_count
from ..deadline import UNTIMED, Untimed, clock
from ..errors import (
    AlreadyHandledError,
    CommitUnknownError,
    StoreContentionError,
    StoreError,
    StorePermissionError,
    StoreTimeoutError,
)
from ..inbox import Inbox
from ..message import Message
from ..transaction import Opening, Transaction, Transactions, enter, handed_over, in_transaction, leave, transactions_of
from .chain import NOTHING, Next
from .layers import TRANSACTION

__all__ = ["TransactionMiddleware"]

#: How often in a row a message may lose its connection before it is suspected to be why, and of how many that is known.
PARDONED: Final = 20
REMEMBERED: Final = 1000


class TransactionMiddleware:
    """Handles each message in a transaction: committed when the handler ends well, rolled back whatever else happens.

    Adapters find it with `current_connection`. What other transactions stood in the way of is tried again from the
    start, a few times.
    """

    layer: ClassVar[int] = TRANSACTION

    def __init__(self, pool: object, *, nested: Literal["join", "savepoint"] = "join", retries: int = 3) -> None:
        """Set up.

        Args:
            pool: Where transactions are opened: an asyncpg or psycopg pool, SQLAlchemy's engine, ``sessionmaker`` or
                ``async_sessionmaker``, an asyncmy pool, the path of a SQLite file or a connection to it, Django's
                ``atomic``, or a store of postroom's.
            nested: What to do in a handler that is called from another handler's transaction on the same pool.
            retries: How often a transaction is tried again that others stood in the way of.

        Raises:
            UnknownConnectionError: Nothing is known of this kind of pool.
        """
        check_choice("nested", nested, ("join", "savepoint"))
        check_count("retries", retries, least=0)
        self.transactions: Transactions = transactions_of(pool)
        self._nested = nested
        self._retries = retries
        self._inbox: Inbox | None = None
        #: How often the connection was lost while a message was handled, for the latest of those that lost it.
        self._losses: dict[UUID, int] = {}

    def open_for(self, inbox: Inbox) -> None:
        """Let transactions mark their messages as they begin, if they can: one round trip less for each."""
        self._inbox = inbox

    def limit_to(self, timeout: timedelta | None) -> None:
        """Let the server end transactions of handlers that have ``timeout`` and whose process hangs, if it can."""
        limit: Callable[[timedelta | None], None] | None = getattr(self.transactions, "limit_to", None)
        if limit is not None:
            limit(timeout)

    def __call__(self, message: Message, call_next: Next) -> Coroutine[Any, Any, Sequence[Message]]:
        """Handle a message in a transaction.

        Raises:
            CommitUnknownError: The connection broke during COMMIT.
            TransactionAbortedError: A statement failed, its error was caught, and so nothing could be committed.
        """
        outer = in_transaction()
        return self._outermost(message, call_next) if outer is None else self._inside(outer, message, call_next)

    async def _outermost(self, message: Message, call_next: Next) -> Sequence[Message]:
        for attempt in range(self._retries):
            try:
                return await self._once(message, call_next)
            except StoreContentionError:
                await asyncio.sleep(random.uniform(0, 0.05) * 2**attempt)
        return await self._once(message, call_next)

    async def _once(self, message: Message, call_next: Next) -> Sequence[Message]:
        transaction: Transaction | None = None
        is_ending = False
        opening = handed_over(self.transactions) or self._opening(message)
        work = clock.get()
        work.wait()
        try:
            async with self.transactions.begin(opening) as transaction:
                outputs = NOTHING if _is_duplicate(opening) else await _timed(work, transaction, message, call_next)
                is_ending = True
        except AlreadyHandledError as error:
            if error.transaction is not transaction:
                raise
            return NOTHING
        except (StoreError, CommitUnknownError) as error:
            if isinstance(error, CommitUnknownError) and is_ending and transaction is not None:
                error.witness = transaction.witness
            error.is_outage = self._is_outage(error, transaction, message)
            raise
        finally:
            work.run()
        if self._losses:
            self._losses.pop(message.id, None)
        return outputs

    def _opening(self, message: Message) -> Opening | None:
        # A broker may have no id, which the inbox tells.
        has_id = isinstance(message.id, UUID)  # pyright: ignore[reportUnnecessaryIsInstance]
        return Opening(self._inbox, message) if self._inbox is not None and has_id else None

    def _is_outage(
        self, error: StoreError | CommitUnknownError, transaction: Transaction | None, message: Message
    ) -> bool:
        """Tell whether an error says nothing about the message.

        What comes before its handler begins never does, nor does a missing permission, unless the handler itself needs
        it. A connection that is lost while it runs may be lost to an outage, or to the message itself, which then loses
        it every time.
        """
        if transaction is None or transaction.is_preparing:
            return True
        if isinstance(error, StorePermissionError):
            return not error.is_of_handler
        if isinstance(error, StoreContentionError | StoreTimeoutError):
            return False
        self._losses[message.id] = losses = self._losses.pop(message.id, 0) + 1
        if len(self._losses) > REMEMBERED:
            del self._losses[next(iter(self._losses))]
        return losses <= PARDONED

    async def _inside(self, outer: Transaction, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message that another handler hands on: whatever that waits for is on the time of that handler."""
        token = clock.set(UNTIMED)
        try:
            if outer.opened_by is not self.transactions:
                return await self._outermost(message, call_next)
            return await self._joined(outer, message, call_next)
        finally:
            clock.reset(token)

    async def _joined(self, outer: Transaction, message: Message, call_next: Next) -> Sequence[Message]:
        try:
            if self._nested == "join":
                return await call_next(message)
            async with self.transactions.savepoint(outer):
                return await call_next(message)
        except AlreadyHandledError as error:
            # To roll back all would undo what is not this message's; from the start again, it is known to be handled.
            raise StoreContentionError(str(error)) from error


def _is_duplicate(opening: Opening | None) -> bool:
    """Tell whether another worker has handled the message after its claim was given up."""
    return opening is not None and opening.claim is not None and opening.claim.state == "duplicate"


async def _timed(work: Untimed, transaction: Transaction, message: Message, call_next: Next) -> Sequence[Message]:
    """Handle a message in its transaction; neither COMMIT nor ROLLBACK is on the time of the handler."""
    work.run()
    token = enter(transaction)
    try:
        outputs = await call_next(message)
    except BaseException:
        work.undo()
        raise
    finally:
        leave(token)
    work.commit()
    return outputs
