"""The store in memory: for tests, demos, and as the shortest reading of what a store does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from ..errors import NotInTransactionError
from ..message import DEFAULT_NAMESPACE, Message
from ..outbox import Added, Addition, Outbox, Writer
from ..store import Claim, ClaimTerms, Dead, Delivered, Features, Release, Retry, Settlement, Stats

__all__ = ["MemoryStore", "MemoryTransaction"]


@dataclass(slots=True)
class _Row:
    message: Message
    due: datetime
    status: str = "pending"
    locked_until: datetime | None = None
    error: str | None = None
    changed: datetime | None = None


class MemoryStore:
    """Messages in a list; they end with the process."""

    features = Features(durable=False)

    def __init__(
        self,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        keep_delivered: timedelta = timedelta(days=7),
    ) -> None:
        self.namespace = namespace
        self.keep_delivered = keep_delivered
        self.rows: list[_Row] = []
        self._clock = clock

    @contextmanager
    def transaction(self) -> Iterator[MemoryTransaction]:
        """Open a transaction for `Outbox.add`; leaving it with an error discards what was added."""
        transaction = MemoryTransaction(self)
        yield transaction
        transaction.commit()

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        """Lease up to ``limit`` messages that are due."""
        now, claims, held = self._clock(), list[Claim](), set[tuple[str, str]]()
        for row in sorted(self._mine(), key=lambda row: row.message.key is None and row.due > now):
            message, order = row.message, (row.message.topic, row.message.key or "")
            expired = row.status == "processing" and row.locked_until is not None and row.locked_until < now
            due = (row.status == "pending" and row.due <= now) or expired
            ours = terms.tenant_id in {None, message.tenant_id}
            taken = due and ours and message.attempt < terms.max_attempts and len(claims) < limit
            if message.key is not None:
                blocks = row.status in {"pending", "processing"} or (row.status == "dead" and terms.on_dead == "block")
                taken = taken and order not in held
                held |= {order} if blocks and not taken else set()
            if taken:
                row.status, row.locked_until, row.changed = "processing", now + terms.lease, now
                row.message = replace(message, attempt=message.attempt + 1, token=message.token + 1)
                claims.append(Claim(row.message))
        return claims

    async def settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        """Record what became of claims; return those that were lost."""
        return [s.claim for s in settlements if not self._settle(s)]

    def _settle(self, settlement: Settlement) -> bool:
        now, outcome = self._clock(), settlement.outcome
        row = self._current(settlement.claim)
        if row is None:
            return isinstance(outcome, Delivered) and not self.has(settlement.claim.message)
        states = {Delivered: "delivered", Retry: "pending", Release: "pending", Dead: "dead"}
        wanted = states[type(outcome)]
        if row.status != "processing" and (row.status, wanted) != ("dead", "delivered"):
            return row.status == wanted
        row.status, row.locked_until, row.changed = wanted, None, now
        match outcome:
            case Delivered():
                row.error = None
                if not self.keep_delivered:
                    self.rows.remove(row)
            case Retry(error, delay):
                row.error, row.due = error, now + (delay or timedelta(0))
            case Dead(error):
                row.error = error
            case Release(delay):
                row.due, row.message = now + delay, replace(row.message, attempt=row.message.attempt - 1)
        return True

    async def extend(self, claims: Sequence[Claim], lease: timedelta) -> list[Claim]:
        """Lease claims anew from now on; return those that were lost."""
        lost: list[Claim] = []
        for claim in claims:
            row = self._current(claim)
            if row is None or row.status != "processing":
                lost.append(claim)
            else:
                row.locked_until = self._clock() + lease
        return lost

    async def sweep(self, terms: ClaimTerms) -> int:
        """Make messages dead that have no attempt left."""
        now, count = self._clock(), 0
        for row in self._mine():
            expired = row.status == "processing" and row.locked_until is not None and row.locked_until < now
            if row.message.attempt >= terms.max_attempts and (expired or (row.status == "pending" and row.due <= now)):
                row.error = "the lease ran out on the last attempt" if expired else row.error or "no attempts left"
                row.status, row.locked_until, count = "dead", None, count + 1
        return count

    async def purge(self, *, older_than: timedelta, limit: int = 1000) -> int:
        """Delete delivered messages past their retention."""
        limit_time = self._clock() - older_than
        old = [r for r in self._mine() if r.status == "delivered" and r.changed is not None and r.changed <= limit_time]
        for row in old[:limit]:
            self.rows.remove(row)
        return len(old[:limit])

    async def stats(self) -> Stats:
        """Tell how the namespace is doing."""
        now = self._clock()
        states = [row.status for row in self._mine()]
        ages = [now - row.due for row in self._mine() if row.status == "pending" and row.due <= now]
        counts = {state: states.count(state) for state in ("pending", "processing", "delivered", "dead")}
        return Stats(**counts, oldest_due=max(ages, default=None))

    async def listen(self, wake: Callable[[], None]) -> None:
        """Return at once: nothing reaches memory from another process."""

    def add(self, addition: Addition) -> Added:
        """Store one message, unless its id or dedupe key is there."""
        message, now = addition.message, self._clock()
        for row in self.rows:
            there = row.message
            same = (there.namespace, there.topic, there.dedupe_key) == (message.namespace, message.topic, message.dedupe_key)
            if there.id == message.id or (same and message.dedupe_key is not None):
                return Added(there.id, added=False)
        self.rows.append(_Row(replace(message, time=now), addition.due_at or now + addition.delay))
        return Added(message.id, added=True)

    def has(self, message: Message) -> bool:
        """Tell whether a message is stored."""
        return any(row.message.id == message.id for row in self.rows)

    def _mine(self) -> list[_Row]:
        return [row for row in self.rows if row.message.namespace == self.namespace]

    def _current(self, claim: Claim) -> _Row | None:
        found = (row for row in self.rows if row.message.id == claim.message.id)
        return next((row for row in found if row.message.token == claim.message.token), None)


@dataclass(slots=True)
class MemoryTransaction:
    """Messages that wait for a commit."""

    store: MemoryStore
    waiting: list[Addition] = field(default_factory=list[Addition])
    is_open: bool = True

    def commit(self) -> None:
        """Store what was added."""
        for addition in self.waiting:
            self.store.add(addition)
        self.is_open = False

    def write(
        self, connection: MemoryTransaction, additions: Sequence[Addition], outbox: Outbox, *, outside_transaction: bool
    ) -> list[Added]:
        """Note messages down for the commit."""
        if not self.is_open and not outside_transaction:
            raise NotInTransactionError("use `with store.transaction() as transaction:`")
        trial = MemoryStore(namespace=self.store.namespace)
        trial.rows = list(self.store.rows)
        for addition in self.waiting:
            trial.add(addition)
        added = [trial.add(addition) for addition in additions]
        self.waiting += additions
        return added


def writer_for(connection: object) -> Writer | None:
    """Return what writes through a connection, None if nothing does."""
    return connection if isinstance(connection, MemoryTransaction) else None
