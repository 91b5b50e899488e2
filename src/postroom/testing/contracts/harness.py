"""The harness: what the contract suite and the state machine need of a store that is to be tested."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Unpack, cast
from uuid import UUID, uuid4

from ...message import Message
from ...outbox import AddResult, Options, Outbox
from ...store import Claim, ClaimTerms, Store

__all__ = ["MINUTE", "SECOND", "TERMS", "StoreHarness", "StoredRow", "numbered", "numbers", "states", "terms"]

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """A message as it lies in the store, with every moment told from now."""

    id: UUID
    status: str
    attempts: int
    token: int
    #: How long until it is due; zero or less once it is.
    due_in: timedelta
    #: Who holds it and for how long yet; both None unless it is being processed.
    worker: UUID | None
    lease_left: timedelta | None
    last_error: str | None
    #: How long ago the row was last changed.
    unchanged_for: timedelta


class StoreHarness(ABC):
    """One empty store under test, opened, and what its users and its clock can do to it."""

    #: Whether `damage` can make a stored row unreadable.
    can_damage: ClassVar[bool] = False

    store: Store

    @abstractmethod
    async def another(self, *, namespace: str | None = None, keep_delivered: timedelta | None = None) -> Store:
        """Open one more store object on the same data, like `store` but for what is given."""

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Begin a transaction of the store's users, on a connection of its own.

        Yields what `Outbox.add` takes; commits at the end, and rolls back when left by an error.
        """

    @abstractmethod
    async def advance(self, by: timedelta) -> None:
        """Let time pass for the store: leases end, what was delayed is due, what is kept grows old."""

    @abstractmethod
    async def rows(self) -> list[StoredRow]:
        """Return everything that is stored, of all namespaces, in order of arrival."""

    @abstractmethod
    async def close(self) -> None:
        """Close all stores."""

    async def damage(self, message_id: UUID) -> None:
        """Make the headers of a stored row unreadable."""
        raise NotImplementedError

    async def hint(self) -> None:
        """Hint to other processes that there is work, for stores whose features have ``wakeups``."""
        raise NotImplementedError

    async def write(
        self,
        transaction: Any,  # noqa: ANN401 -- of whatever library
        *events: object,
        namespace: str | None = None,
        **options: Unpack[Options],
    ) -> list[AddResult]:
        """Add messages in a transaction that is open."""
        outbox = Outbox(namespace=namespace or self.store.namespace)
        # Which of the two it is depends on the connection, of which nothing is known here.
        written = cast("list[AddResult] | Awaitable[list[AddResult]]", outbox.add(transaction, list(events), **options))
        return await written if isinstance(written, Awaitable) else written

    async def add(self, *events: object, namespace: str | None = None, **options: Unpack[Options]) -> list[AddResult]:
        """Add messages in a transaction that commits."""
        async with self.transaction() as transaction:
            return await self.write(transaction, *events, namespace=namespace, **options)

    async def add_and_roll_back(self, *events: object, **options: Unpack[Options]) -> list[AddResult]:
        """Add messages in a transaction that does not commit."""
        added: list[AddResult] = []
        with suppress(_RolledBack):
            async with self.transaction() as transaction:
                added = await self.write(transaction, *events, **options)
                raise _RolledBack
        return added


class _RolledBack(Exception):  # noqa: N818 -- what happened, not what went wrong
    """Ends a transaction."""


def terms(**changes: Any) -> ClaimTerms:  # noqa: ANN401 -- those of ClaimTerms
    """Return terms of a new worker: half a minute's lease, ten attempts."""
    chosen: dict[str, Any] = {"worker": uuid4(), "lease": 30 * SECOND, "max_attempts": 10, **changes}
    return ClaimTerms(**chosen)


#: The terms of a worker of no special interest.
TERMS = terms()


def numbered(number: int, **fields: Any) -> Message:  # noqa: ANN401 -- those of Message
    """Return a message that can be told by its number."""
    chosen: dict[str, Any] = {"topic": "orders", "type": "order.placed", **fields}
    return Message(payload=str(number).encode(), **chosen)


def numbers(claims: Sequence[Claim]) -> list[int]:
    """Return which messages were claimed."""
    return [int(claim.message.payload) for claim in claims]


def states(rows: Sequence[StoredRow]) -> list[tuple[str, int, int]]:
    """Return status, attempts and token of rows."""
    return [(row.status, row.attempts, row.token) for row in rows]
