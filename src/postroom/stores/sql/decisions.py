"""Due-time decisions as statements: the row of a ticket is locked before anything is said or written about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

from ...decisions import (
    Cancel,
    Decide,
    Due,
    Duplicate,
    Enqueued,
    Expired,
    FindDue,
    Forget,
    NotDue,
    Placed,
    Question,
    Renew,
    Revoked,
    Schedule,
    Scheduled,
    Stale,
    from_milliseconds,
)
from ...errors import StoreContentionError
from .adding import Adding
from .statement import Script

if TYPE_CHECKING:
    from .dialect import Dialect

__all__ = ["Deciding", "Ticket", "answering"]

Ending: TypeAlias = Literal["expired", "revoked"]
_TRIES: Final = 3


class Ticket(NamedTuple):
    """The row of a ticket, which nobody else can change until the transaction ends."""

    status: Literal["scheduled", "expired", "revoked"]
    expires_at: int
    is_due: bool


class Deciding(Adding):
    """The statements about tickets."""

    def schedule_ticket(self, namespace: str, question: Schedule) -> Script[Placed]:
        """Note down when a ticket ends, unless it is known."""
        params = self._ticket(namespace, question.ticket)
        for _ in range(_TRIES):
            yield self.sql(self._schedule, **params, expires_at=self.time(question.expires_at))
            found = yield from self._held(namespace, question.ticket)
            # One that has ended may be forgotten between the two statements, and is not known then.
            if found is None:
                continue
            if found.status == "scheduled" and self._differs(found, question):
                return Stale(from_milliseconds(found.expires_at))
            return _placed(found)
        raise StoreContentionError("the ticket is forgotten as soon as it is there; schedule it again")

    _schedule: ClassVar[str] = """
        INSERT INTO {tickets} (namespace, ticket, expires_at, status)
        VALUES (:namespace, :ticket, :expires_at, 'scheduled')
        ON CONFLICT DO NOTHING
        """

    def renew_ticket(self, namespace: str, question: Renew) -> Script[Placed]:
        """Have an open ticket end at another time."""
        found = yield from self._held(namespace, question.ticket)
        if found is None:
            return Stale()
        if found.status == "scheduled":
            params = self._ticket(namespace, question.ticket)
            yield self.sql(self._renew, **params, expires_at=self.time(question.expires_at))
        return _placed(found)

    _renew: ClassVar[str] = """
        UPDATE {tickets} SET expires_at = :expires_at
        WHERE namespace = :namespace AND ticket = :ticket
        """

    def find_due(self, namespace: str, question: FindDue) -> Script[list[Due]]:
        """Find tickets whose time has come, and lock nothing."""
        wanted: dict[str, Any] = {"namespace": namespace, "limit": max(question.limit, 0)}
        if question.due_cutoff is None:
            found = yield self.query(self._due_tickets, **wanted)
        else:
            found = yield self.query(self._due_until, **wanted, due_cutoff=self.time(question.due_cutoff))
        return [Due(row[0], from_milliseconds(int(row[1]))) for row in found.rows]

    _due_tickets: ClassVar[str] = """
        SELECT ticket, {expiry} FROM {tickets}
        WHERE namespace = :namespace AND status = 'scheduled' AND expires_at <= {now}
        ORDER BY expires_at, ticket LIMIT :limit
        """

    _due_until: ClassVar[str] = """
        SELECT ticket, {expiry} FROM {tickets}
        WHERE namespace = :namespace AND status = 'scheduled' AND expires_at <= {now} AND expires_at <= :due_cutoff
        ORDER BY expires_at, ticket LIMIT :limit
        """

    def decide(
        self, namespace: str, question: Decide, *, strict_order: bool
    ) -> Script[Enqueued | Duplicate | Revoked | NotDue | Stale]:
        """End a ticket as expired, if it is due, ends at this time and was not revoked."""
        found = yield from self._held(namespace, question.ticket)
        refusal = self._refusal(found, question)
        if refusal is not None:
            return refusal
        if question.is_revoked:
            yield from self._end(namespace, question.ticket, "revoked")
            return Revoked()
        return (yield from self._tell(namespace, question, "expired", strict_order=strict_order))

    def _refusal(self, found: Ticket | None, question: Decide) -> Duplicate | Revoked | NotDue | Stale | None:
        """Return why a ticket cannot expire now, None if it can."""
        if found is None or found.status == "revoked":
            return Stale() if found is None else Revoked()
        if found.status == "expired":
            return Stale() if self._differs(found, question) else Duplicate(question.addition.message.id)
        if self._differs(found, question):
            return Stale(from_milliseconds(found.expires_at))
        is_after = question.due_cutoff is not None and question.expires_at > question.due_cutoff
        return None if found.is_due and not is_after else NotDue()

    def cancel(
        self, namespace: str, question: Cancel, *, strict_order: bool
    ) -> Script[Enqueued | Duplicate | Revoked | Expired | Stale]:
        """End a ticket as revoked, if it is open."""
        found = yield from self._held(namespace, question.ticket)
        if found is None:
            return Stale()
        if found.status == "scheduled":
            return (yield from self._tell(namespace, question, "revoked", strict_order=strict_order))
        return Revoked() if found.status == "revoked" else Expired()

    def forget_tickets(self, namespace: str, question: Forget) -> Script[int]:
        """Delete tickets that have ended long ago; return how many."""
        duration, limit = self.duration(question.older_than), max(question.limit, 0)
        deleted = yield self.sql(self._forget, namespace=namespace, duration=duration, limit=limit)
        return deleted.count

    _forget: ClassVar[str]

    def _tell(
        self, namespace: str, question: Decide | Cancel, ending: Ending, *, strict_order: bool
    ) -> Script[Enqueued | Duplicate]:
        [added] = yield from self.add([question.addition], strict_order=strict_order)
        yield from self._end(namespace, question.ticket, ending)
        identity = added.id or question.addition.message.id
        return Enqueued(identity) if added.is_new else Duplicate(identity)

    def _end(self, namespace: str, ticket: str, ending: Ending) -> Script[None]:
        yield self.sql(self._ended, **self._ticket(namespace, ticket), status=ending)

    _ended: ClassVar[str] = """
        UPDATE {tickets} SET status = :status, ended_at = {now}
        WHERE namespace = :namespace AND ticket = :ticket
        """

    def _held(self, namespace: str, ticket: str) -> Script[Ticket | None]:
        """Lock the row of a ticket, and read it as it is now."""
        found = yield self.query(self._hold, **self._ticket(namespace, ticket))
        return Ticket(found.rows[0][0], int(found.rows[0][1]), bool(found.rows[0][2])) if found.rows else None

    _hold: ClassVar[str] = """
        SELECT status, {expiry}, expires_at <= {now} FROM {tickets}
        WHERE namespace = :namespace AND ticket = :ticket{holding}
        """

    def _differs(self, found: Ticket, question: Schedule | Decide) -> bool:
        return from_milliseconds(found.expires_at) != question.expires_at

    def _ticket(self, namespace: str, ticket: str) -> dict[str, Any]:
        return {"namespace": namespace, "ticket": ticket}


def _placed(found: Ticket) -> Placed:
    if found.status == "scheduled":
        return Scheduled()
    return Revoked() if found.status == "revoked" else Expired()


def answering(namespace: str, question: Question, *, strict_order: bool) -> Callable[[Dialect], Script[Any]]:
    """Return what answers a question, once the dialect is known."""

    def script(dialect: Dialect) -> Script[Any]:
        match question:
            case Schedule():
                return dialect.schedule_ticket(namespace, question)
            case Renew():
                return dialect.renew_ticket(namespace, question)
            case FindDue():
                return dialect.find_due(namespace, question)
            case Decide():
                return dialect.decide(namespace, question, strict_order=strict_order)
            case Cancel():
                return dialect.cancel(namespace, question, strict_order=strict_order)
            case Forget():
                return dialect.forget_tickets(namespace, question)

    return script
