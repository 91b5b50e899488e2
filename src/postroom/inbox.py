"""The inbox: remembers which messages a consumer has handled, in the transaction of what the handler did."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Final, Literal, TypeAlias, get_args
from uuid import UUID, uuid5

from .checks import check_choice, check_duration, check_text
from .errors import ConfigurationError, InvalidNameError
from .message import Message, is_namespace
from .transaction import Transaction, Transactions
from .writer import writer_of

__all__ = ["By", "Inbox", "Mode"]

#: Whether a message is marked before its handler runs, or after it.
Mode: TypeAlias = Literal["pessimistic", "optimistic"]
#: By what a consumer knows a message again.
By: TypeAlias = Literal["id", "dedupe_key"]

#: Names the ids that stand for dedupe keys in an inbox; a change would forget all of them.
_DEDUPE_KEYS: Final = UUID("6f1d3c52-9a0e-5b7c-8d43-2e7f90a1b6c4")

#: How many rows one pass of the cleanup deletes.
CHUNK = 1000


class _Undone(Exception):  # noqa: N818 -- no error: it rolls back what was only a question
    """Ends a transaction without keeping it."""


class Inbox:
    """What one consumer has handled, by the ids of messages or by their dedupe keys.

    The row of a message is written in the transaction of its effect: either both are there or neither. Two deliveries
    at the same time end with one effect: the second waits for the first, and runs only if that was rolled back.

    Example:
        >>> from datetime import timedelta
        >>> from postroom import Inbox
        >>> Inbox("stock", retention=timedelta(days=1), redelivery_horizon=timedelta(days=4))
        Traceback (most recent call last):
            ...
        postroom.errors.ConfigurationError: inbox of 'stock': messages are forgotten after 1 day, 0:00:00 and may come \
again for 4 days, 0:00:00, so their effect could happen twice; raise retention=
    """

    def __init__(  # noqa: PLR0913 -- one keyword for each choice a user has
        self,
        consumer: str,
        *,
        table: str = "postroom_inbox",
        schema: str | None = None,
        mode: Mode = "pessimistic",
        by: By = "id",
        retention: timedelta = timedelta(days=7),
        redelivery_horizon: timedelta | None = None,
    ) -> None:
        """Set up an inbox; no connection is made.

        Args:
            consumer: Who handles the messages. Each consumer of a message needs a name of its own, or one of them
                takes the other's messages for handled.
            table: The name of the inbox table.
            schema: The database schema that the table is in.
            mode: ``pessimistic`` marks a message first, so that its handler never runs twice at once;
                ``optimistic`` marks it last, which keeps locks shorter, and undoes what was done twice.
            by: ``id`` recognises a message by its id. ``dedupe_key`` takes messages of one namespace, tenant and topic
                with the same dedupe key for one message, whatever their ids are; one without a key is recognised by
                its id.
            retention: How long a message is remembered.
            redelivery_horizon: For how long after its first delivery a message may come again.

        Raises:
            ConfigurationError: Messages would be forgotten while they may still come again.
            InvalidNameError: Nobody can be called so.
        """
        if not is_namespace(consumer):
            raise InvalidNameError("consumer", consumer, "1 to 100 printable characters")
        self.consumer = consumer
        self.table = table
        self.schema = schema
        self.mode: Mode = mode
        self.by: By = by
        self.retention = retention
        check_text("table", table)
        check_text("schema", schema, optional=True)
        check_choice("mode", mode, get_args(Mode))
        check_choice("by", by, get_args(By))
        check_duration("retention", retention)
        check_duration("redelivery_horizon", redelivery_horizon, zero=True, optional=True)
        self.check_horizon(redelivery_horizon)

    def check_horizon(self, horizon: timedelta | None) -> None:
        """Refuse to forget messages that may come again."""
        if horizon is not None and self.retention < horizon:
            raise ConfigurationError(
                f"inbox of {self.consumer!r}: messages are forgotten after {self.retention} and may come again for "
                f"{horizon}, so their effect could happen twice; raise retention="
            )

    def known(self, message: Message) -> Message:
        """Return a message under the id by which this inbox knows it: its own, or one made of its dedupe key."""
        if self.by == "id" or message.dedupe_key is None:
            return message
        # As in the outbox, where services of other namespaces may use the same keys.
        name = "\0".join((message.namespace, str(message.tenant_id or ""), message.topic, message.dedupe_key))
        return replace(message, id=uuid5(_DEDUPE_KEYS, name))

    async def admit(self, transaction: Transaction, message: Message) -> bool:
        """Mark a message as handled in a transaction; tell whether it was not before.

        While another transaction that marked it is open, this waits for its end.
        """
        admitted: bool = await transaction.do(writer_of(transaction.connection).admit, self, message)
        return admitted

    async def has(self, transaction: Transaction, message: Message) -> bool:
        """Tell whether a message is marked, without waiting for anybody."""
        found: bool = await transaction.do(writer_of(transaction.connection).has, self, message)
        return found

    async def was_handled(self, transactions: Transactions, message: Message) -> bool:
        """Tell whether a message is marked, on a connection of its own.

        It waits for a transaction that is marking it right now, such as one whose COMMIT is still under way.
        """
        is_new = True
        with suppress(_Undone):
            async with transactions.begin() as transaction:
                is_new = await self.admit(transaction, message)
                raise _Undone
        return not is_new

    async def purge(self, transactions: Transactions, *, limit: int = CHUNK) -> int:
        """Delete rows past their retention, in a transaction of their own; return how many, at most ``limit``."""
        async with transactions.begin() as transaction:
            count: int = await transaction.do(writer_of(transaction.connection).purge_inbox, self, limit)
            return count
