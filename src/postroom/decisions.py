"""Due-time decisions: a ticket ends once, expired or revoked, and the event that says so is stored in the same step."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, TypeAlias, Unpack, overload
from uuid import UUID, uuid3

from .errors import InvalidDueTimeError, InvalidTicketError
from .message import MAX_KEY, is_key
from .outbox import Addition, AsyncConnection, Options, Outbox, SyncConnection, check_moment
from .writer import writer_of

__all__ = [
    "Cancel",
    "Cancelled",
    "Decide",
    "Decided",
    "Decisions",
    "Due",
    "Duplicate",
    "Enqueued",
    "Expired",
    "FindDue",
    "Forget",
    "NotDue",
    "Placed",
    "Question",
    "Renew",
    "Revoked",
    "Schedule",
    "Scheduled",
    "Stale",
    "expiry_id",
    "from_milliseconds",
    "to_milliseconds",
]

#: Under which ids of this kind are made; it stands for nothing else, and must never change.
_IDS: Final = UUID("43231916-9159-4802-8445-08152ad8a105")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


# -- what becomes of a ticket ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The ticket ends at the time that was asked for."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The ticket has ended by this very call, and its event is stored."""

    id: UUID


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The event was stored before, so that nothing more was."""

    id: UUID


@dataclass(frozen=True, slots=True)
class Revoked:
    """The ticket was revoked before; nothing was stored."""


@dataclass(frozen=True, slots=True)
class Expired:
    """The ticket has expired before, and its event says so; nothing was stored, and what to do is yours to decide."""


@dataclass(frozen=True, slots=True)
class NotDue:
    """The ticket has not ended yet, by the store's clock; nothing was stored."""


@dataclass(frozen=True, slots=True)
class Stale:
    """What was asked for is out of date; nothing was stored.

    The ticket ends at ``expires_at``; None says that no such ticket is open, or that it was never known.
    """

    expires_at: datetime | None = None


#: What `Decisions.schedule` and `Decisions.renew` answer.
Placed: TypeAlias = Scheduled | Stale | Revoked | Expired
#: What `Decisions.decide` answers.
Decided: TypeAlias = Enqueued | Duplicate | Revoked | NotDue | Stale
#: What `Decisions.cancel` answers.
Cancelled: TypeAlias = Enqueued | Duplicate | Revoked | Expired | Stale


class Due(NamedTuple):
    """A ticket whose time has come."""

    ticket: str
    expires_at: datetime


# -- what a store is asked ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Schedule:
    """Note down when a ticket ends, unless it is known."""

    ticket: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Renew:
    """Have an open ticket end at another time."""

    ticket: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class FindDue:
    """Find tickets whose time has come, without taking them."""

    limit: int
    due_cutoff: datetime | None = None


@dataclass(frozen=True, slots=True)
class Decide:
    """End a ticket as expired, if it is due, ends at this time and was not revoked."""

    ticket: str
    expires_at: datetime
    addition: Addition
    is_revoked: bool
    due_cutoff: datetime | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a ticket as revoked, if it is open."""

    ticket: str
    addition: Addition


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete tickets that have ended long ago."""

    older_than: timedelta
    limit: int


#: What the port of decisions is asked; each answer is one atomic step, by the store's clock.
Question: TypeAlias = Schedule | Renew | FindDue | Decide | Cancel | Forget


def expiry_id(namespace: str, ticket: str, expires_at: datetime) -> UUID:
    """Return the id of the event that a ticket has expired: the same for whoever decides it, and however often.

    Example:
        >>> from datetime import UTC, datetime
        >>> from postroom.decisions import expiry_id
        >>> expiry_id("shop", "ticket-7", datetime(2026, 1, 1, tzinfo=UTC)).version
        3
    """
    # Ids are unique in a table, which namespaces share.
    return uuid3(uuid3(_IDS, namespace), f"{ticket}|{to_milliseconds(expires_at)}")


def to_milliseconds(moment: datetime) -> int:
    """Return a moment as every store keeps it: up to the next millisecond, so that nothing ends early."""
    return -((_EPOCH - moment) // _MILLISECOND)


def from_milliseconds(count: int) -> datetime:
    """Return a stored moment."""
    return _EPOCH + count * _MILLISECOND


class Decisions:
    """The tickets of an outbox: each ends at a known time, unless it is renewed or revoked before.

    Deciding that a ticket has expired, looking whether it was revoked, and storing the event are one step: a script in
    Redis, and in SQL databases the caller's transaction, which locks the ticket. So a ticket has one ending, and one
    event that tells of it, whoever else is deciding, revoking or renewing it at the same time.

    Every method takes what `Outbox.add` takes, and its answer is awaited alike: the connection that holds your
    transaction, or a client of redis-py's. In a pipeline only `schedule` works, and hopes for the best.

    Example:
        >>> import sqlite3
        >>> from datetime import UTC, datetime
        >>> from postroom import Outbox
        >>> from postroom.decisions import Decisions
        >>> from postroom.stores import SQLiteStore
        >>> decisions = Decisions(Outbox(namespace="shop"))
        >>> connection = sqlite3.connect(":memory:")
        >>> SQLiteStore.create_tables(connection)
        >>> with connection:
        ...     decisions.schedule(connection, "ticket-7", datetime(2026, 1, 1, tzinfo=UTC))
        Scheduled()
        >>> with connection:
        ...     [due] = decisions.find_due(connection)
        ...     first = decisions.decide(connection, *due, {"ticket": due.ticket}, topic="tickets.expired")
        >>> with connection:
        ...     second = decisions.decide(connection, *due, {"ticket": due.ticket}, topic="tickets.expired")
        >>> type(first).__name__, type(second).__name__, first.id == second.id
        ('Enqueued', 'Duplicate', True)
        >>> connection.close()
    """

    def __init__(self, outbox: Outbox) -> None:
        """Set up decisions whose events go to an outbox; no connection is made."""
        self.outbox = outbox

    @overload
    def schedule(
        self, connection: AsyncConnection, ticket: str, expires_at: datetime
    ) -> Coroutine[Any, Any, Placed]: ...
    @overload
    def schedule(self, connection: SyncConnection, ticket: str, expires_at: datetime) -> Placed: ...
    def schedule(self, connection: object, ticket: str, expires_at: datetime) -> object:
        """Note down when a ticket ends; it may be said again, but only `renew` changes it.

        Raises:
            InvalidTicketError: The name of the ticket cannot be stored everywhere.
            InvalidDueTimeError: ``expires_at`` does not name one moment.
        """
        return self._ask(connection, Schedule(_checked(ticket), _moment(expires_at)))

    @overload
    def renew(self, connection: AsyncConnection, ticket: str, expires_at: datetime) -> Coroutine[Any, Any, Placed]: ...
    @overload
    def renew(self, connection: SyncConnection, ticket: str, expires_at: datetime) -> Placed: ...
    def renew(self, connection: object, ticket: str, expires_at: datetime) -> object:
        """Have a ticket end at another time; also one that is due, as long as nobody has decided it."""
        return self._ask(connection, Renew(_checked(ticket), _moment(expires_at)))

    @overload
    def find_due(
        self, connection: AsyncConnection, *, limit: int = ..., due_cutoff: datetime | None = ...
    ) -> Coroutine[Any, Any, list[Due]]: ...
    @overload
    def find_due(
        self, connection: SyncConnection, *, limit: int = ..., due_cutoff: datetime | None = ...
    ) -> list[Due]: ...
    def find_due(self, connection: object, *, limit: int = 100, due_cutoff: datetime | None = None) -> object:
        """Return tickets whose time has come, the oldest first; this only looks, and takes nothing.

        Args:
            connection: What holds the transaction.
            limit: How many at the most.
            due_cutoff: Only tickets that end at this moment or before; one that the store's clock has not reached yet
                changes nothing.
        """
        return self._ask(connection, FindDue(limit, _cutoff(due_cutoff)))

    @overload
    def decide(
        self,
        connection: AsyncConnection,
        ticket: str,
        expires_at: datetime,
        event: object,
        *,
        is_revoked: bool = ...,
        due_cutoff: datetime | None = ...,
        **options: Unpack[Options],
    ) -> Coroutine[Any, Any, Decided]: ...
    @overload
    def decide(
        self,
        connection: SyncConnection,
        ticket: str,
        expires_at: datetime,
        event: object,
        *,
        is_revoked: bool = ...,
        due_cutoff: datetime | None = ...,
        **options: Unpack[Options],
    ) -> Decided: ...
    def decide(
        self,
        connection: object,
        ticket: str,
        expires_at: datetime,
        event: object,
        *,
        is_revoked: bool = False,
        due_cutoff: datetime | None = None,
        **options: Unpack[Options],
    ) -> object:
        """End a ticket that is due, and store the event that says so; of all who try, one does.

        Args:
            connection: What holds the transaction.
            ticket: The name of the ticket.
            expires_at: When it ends, as `find_due` told; if it was renewed since, the answer is `Stale`.
            event: What `Outbox.add` takes; its id is `expiry_id`, whatever it was.
            is_revoked: Whether you know from elsewhere that it was revoked: it ends so, without an event.
            due_cutoff: Decide only about a ticket that ends at this moment or before, and answer `NotDue` otherwise;
                one that the store's clock has not reached yet changes nothing.
            options: Those of `Outbox.add`.
        """
        moment = _moment(expires_at)
        addition = self.outbox.prepare(event, **options)
        identity = expiry_id(self.outbox.namespace, _checked(ticket), moment)
        named = addition._replace(message=replace(addition.message, id=identity), given=True)
        return self._ask(connection, Decide(ticket, moment, named, is_revoked, _cutoff(due_cutoff)))

    @overload
    def cancel(
        self, connection: AsyncConnection, ticket: str, event: object, **options: Unpack[Options]
    ) -> Coroutine[Any, Any, Cancelled]: ...
    @overload
    def cancel(
        self, connection: SyncConnection, ticket: str, event: object, **options: Unpack[Options]
    ) -> Cancelled: ...
    def cancel(self, connection: object, ticket: str, event: object, **options: Unpack[Options]) -> object:
        """Revoke a ticket that has not ended, also one that is due, and store the event that says so.

        To say it again is answered with `Revoked`, so a call whose answer got lost may be repeated.
        """
        return self._ask(connection, Cancel(_checked(ticket), self.outbox.prepare(event, **options)))

    @overload
    def forget(
        self, connection: AsyncConnection, *, older_than: timedelta, limit: int = ...
    ) -> Coroutine[Any, Any, int]: ...
    @overload
    def forget(self, connection: SyncConnection, *, older_than: timedelta, limit: int = ...) -> int: ...
    def forget(self, connection: object, *, older_than: timedelta, limit: int = 1000) -> object:
        """Delete up to ``limit`` tickets that ended longer ago, never an open one; return how many.

        What is forgotten can be scheduled again: keep tickets for longer than anybody may repeat `schedule`.
        """
        return self._ask(connection, Forget(older_than, limit))

    def _ask(self, connection: object, question: Question) -> Any:  # noqa: ANN401 -- each question has its own answer
        return writer_of(connection).ask(connection, self.outbox, question)


def _checked(ticket: str) -> str:
    if not is_key(ticket):
        raise InvalidTicketError(ticket, MAX_KEY)
    return ticket


def _moment(expires_at: datetime) -> datetime:
    """Return a moment as it is stored."""
    _check("expires_at", expires_at)
    return from_milliseconds(to_milliseconds(expires_at))


def _cutoff(moment: datetime | None) -> datetime | None:
    """Return the last moment of which a ticket may be that ends at a cutoff or before."""
    if moment is None:
        return None
    _check("due_cutoff", moment)
    return from_milliseconds((moment - _EPOCH) // _MILLISECOND)


def _check(name: str, moment: datetime) -> None:
    if not isinstance(moment, datetime):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers without types
        raise InvalidDueTimeError(f"{name} is a datetime; convert it first")
    check_moment(name, moment)
