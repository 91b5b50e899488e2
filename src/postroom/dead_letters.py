"""Dead letters of a consumer: what it could not handle, kept where somebody will find it."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from .broker import Attempt, attempts_of, why_not
from .errors import PublishUnknownError
from .inbox import Inbox
from .message import Message, uuid7
from .publisher import AnyPublisher, as_publisher
from .store import Delivered, Outcome
from .transaction import Transactions
from .writer import writer_of

__all__ = ["DeadLetters", "PublishedDeadLetters", "StoredDeadLetters"]

ERROR = "postroom-error"
CONSUMER = "postroom-consumer"
#: What headers have room for.
LONGEST = 1000


class DeadLetters(Protocol):
    """Where a consumer puts messages aside."""

    async def bury(self, message: Message, error: str) -> None:
        """Keep a message for good; when this returns, it is durable. To bury it twice keeps it once."""
        ...


class StoredDeadLetters:
    """Rows beside the inbox, one for each consumer and message."""

    def __init__(self, inbox: Inbox, transactions: Transactions) -> None:
        self._inbox = inbox
        self._transactions = transactions

    async def bury(self, message: Message, error: str) -> None:
        """Write a row in a transaction of its own."""
        if not message.id:  # type: ignore[truthy-bool]  # a broker may have none, and all of those would be one
            message = replace(message, id=uuid7())
        async with self._transactions.begin() as transaction:
            await transaction.do(writer_of(transaction.connection).bury, self._inbox, message, error)


class PublishedDeadLetters:
    """Messages to a topic for dead letters; a crash after it leads to a second one with the same id."""

    def __init__(self, publisher: AnyPublisher, topic: str, *, consumer: str) -> None:
        self._publisher = as_publisher(publisher)
        self._topic = topic
        self._consumer = consumer

    async def bury(self, message: Message, error: str) -> None:
        """Publish the message as it was, with the error beside it."""
        # A header travels to every broker if it is printable ASCII.
        plain = "".join(c if c.isascii() and c.isprintable() else "?" for c in error[:LONGEST])
        headers = {**message.headers, ERROR: plain, CONSUMER: self._consumer}
        letter = replace(message, topic=self._topic, headers=headers)
        attempts = await attempts_of(self._publisher, [letter])
        called: Attempt[Outcome] = attempts[0] if len(attempts) == 1 else Attempt()
        if not isinstance(called.answer, Delivered):
            raise PublishUnknownError(
                f"the dead letter of {message.id} was not confirmed by {self._topic!r}: {why_not(called)}"
            ) from called.error
