"""Broken variants of the sending half: claims, outcomes and producers."""

# ruff: noqa: ARG001, B010, SLF001 -- private parts are set by name, under the types of those that they replace

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from postroom import outbox, verdict
from postroom.errors import CommitUnknownError
from postroom.message import Message
from postroom.outbox import Addition, Outbox
from postroom.store import Claim, ClaimTerms, Dead, Delivered, Release, Retry, Settlement
from postroom.stores.sql import settling
from postroom.stores.sql.adding import Adding
from postroom.stores.sql.claiming import Claiming, Walk
from postroom.stores.sql.driver import Steps
from postroom.stores.sql.statement import Row, Script
from postroom.stores.sql.store import SQLStore
from postroom.stores.sql.writer import SQLWriter

from .registry import ASYNCPG, PLAIN, Patched, reword, variant

# They are found by their names.
__all__: list[str] = []


def _change_outcomes(change: Callable[[Settlement], Settlement]) -> None:
    sound = SQLStore.settle

    async def settle(self: SQLStore, settlements: Sequence[Settlement]) -> list[Claim]:
        return await sound(self, [change(settlement) for settlement in settlements])

    setattr(SQLStore, "settle", settle)


def _change_answers(kind: type, change: Callable[[], object]) -> None:
    sound: Patched = verdict._clean

    def clean(answer: object) -> object:
        return change() if isinstance(answer, kind) else sound(answer)

    setattr(verdict, "_clean", clean)


# -- tokens ----------------------------------------------------------------------------------------------------------


@variant("Whoever settles a message settles it, whether or not its claim is still the current one.")
def no_token() -> None:
    reword({r"AND NOT \(\(id, token\) NOT IN \(.*?\)\)\)": "", r"AND \{outbox\}\.token = held\.token": ""})

    def is_current(settlement: Settlement, state: tuple[int, str] | None) -> bool:
        return state is not None and state[1] == "processing"

    setattr(settling, "is_current", is_current)


@variant("A claim is proved by the id of its worker, which is the same for a stale claim of that worker.", stores=PLAIN)
def worker_instead_of_token() -> None:
    claim, workers = SQLStore.claim, dict[UUID, UUID]()

    async def remember(self: SQLStore, limit: int, terms: ClaimTerms) -> list[Claim]:
        claims = await claim(self, limit, terms)
        workers.update((one.message.id, terms.worker) for one in claims)
        return claims

    def settle(
        self: settling.Settling, settlements: Sequence[Settlement], *, keep_delivered: bool
    ) -> Script[list[Claim]]:
        ids = [self.uuid(settlement.claim.message.id) for settlement in settlements]
        held = yield self.query(
            "SELECT id, locked_by FROM {outbox} WHERE id IN :ids AND status = 'processing'", ids=ids
        )
        holders = {self.to_uuid(row[0]): self.to_uuid(row[1]) for row in held.rows}
        mine = [s for s in settlements if holders.get(s.claim.message.id) == workers.get(s.claim.message.id, "nobody")]
        yield from self._settling(mine, keep_delivered=keep_delivered)
        return [settlement.claim for settlement in settlements if settlement not in mine]

    setattr(SQLStore, "claim", remember)
    setattr(settling.Settling, "settle", settle)


@variant("A lease is renewed by whoever once had it, though another worker holds it now.", stores=PLAIN)
def extend_without_token() -> None:
    def extend(self: settling.Settling, claims: Sequence[Claim], lease: timedelta) -> Script[list[Claim]]:
        yield self.sql(
            "UPDATE {outbox} SET locked_until = {later}, updated_at = {now} WHERE id IN :ids AND status = 'processing'",
            ids=[self.uuid(claim.message.id) for claim in claims],
            duration=self.duration(lease),
        )
        return []

    setattr(settling.Settling, "extend", extend)


# -- claims ----------------------------------------------------------------------------------------------------------


@variant("Messages are read and published, but nothing in the store says that somebody has them.")
def select_instead_of_claim() -> None:
    taken = r"status = 'processing', attempts = attempts \+ 1, token = token \+ 1,\s+"
    reword({taken + r"locked_by = :worker(::uuid)?, locked_until = \{later\}, ": ""})


@variant("Any message of a key may go out, also before those that stand in front of it.", stores=PLAIN)
def no_head_of_key() -> None:
    def claim_keyed(self: Claiming, namespace: str, limit: int, terms: ClaimTerms, walk: Walk) -> Script[Sequence[Row]]:
        params = self._eligibility(namespace, terms)
        found: list[Row] = []
        for text in (self._expired, self._due):
            some = yield self.query(text.replace("{loose}", "{ordered}"), limit=limit - len(found), **params)
            found += some.rows
        return (yield from self._take(found, terms))

    setattr(Claiming, "claim_keyed", claim_keyed)


@variant("A lease keeps nobody away: what one worker holds the next one takes.")
def claim_ignores_leases() -> None:
    reword({r"locked_until < \{now\}": "locked_until IS NOT NULL"}, only="suspect_after")


@variant("A lease that ran out still keeps everybody away.")
def lease_never_expires() -> None:
    reword({r"locked_until < \{now\}": "locked_until IS NULL"}, only="suspect_after")


@variant("Messages that were tried for the last time by a worker that died stay in its name for ever.")
def missing_sweep() -> None:
    async def sweep(self: SQLStore, terms: ClaimTerms) -> int:
        return 0

    setattr(SQLStore, "sweep", sweep)


# -- outcomes --------------------------------------------------------------------------------------------------------


@variant("Messages are marked as delivered when they are claimed, before anybody has them.")
def settle_before_publish() -> None:
    sound = SQLStore.claim

    async def claim(self: SQLStore, limit: int, terms: ClaimTerms) -> list[Claim]:
        claims = await sound(self, limit, terms)
        await self.settle([Settlement(one, Delivered()) for one in claims])
        return claims

    setattr(SQLStore, "claim", claim)


@variant("Where no answer came the message counts as delivered.")
def timeout_is_success() -> None:
    _change_answers(type(None), Delivered)


@variant("Where no answer came the message counts as failed, which costs it an attempt.")
def timeout_is_failure() -> None:
    _change_answers(type(None), lambda: Retry("no answer came in time"))


@variant("A destination that is down costs every message an attempt.")
def attempts_spent_in_an_outage() -> None:
    _change_answers(Release, lambda: Retry("the destination is down"))


@variant("A message that is given back untried has an attempt less.")
def release_counts_as_attempt() -> None:
    reword({r"attempts = attempts - 1": "attempts = attempts"})


@variant("A message that failed is tried again at once.")
def retry_ignores_backoff() -> None:
    def hurried(settlement: Settlement) -> Settlement:
        outcome = settlement.outcome
        return Settlement(settlement.claim, Retry(outcome.error)) if isinstance(outcome, Retry) else settlement

    _change_outcomes(hurried)


@variant("A message that failed once is not tried again.")
def dead_on_first_failure() -> None:
    def buried(settlement: Settlement) -> Settlement:
        outcome = settlement.outcome
        return Settlement(settlement.claim, Dead(outcome.error)) if isinstance(outcome, Retry) else settlement

    _change_outcomes(buried)


@variant("A message that failed forgets its key, and so its place.")
def key_dropped_by_retry() -> None:
    reword({r"SET status = 'pending', next_attempt_at": "SET {key} = NULL, status = 'pending', next_attempt_at"})


@variant("The cleanup deletes what is old, delivered or not.")
def purge_deletes_undelivered() -> None:
    reword({r"status = 'delivered' AND delivered_at <=": "created_at <="}, only="DELETE")


# -- producers -------------------------------------------------------------------------------------------------------


@variant(
    "Messages are written through another connection than the caller's, and so in no transaction of its.",
    stores=ASYNCPG,
)
def add_outside_the_transaction() -> None:
    sound: Patched = SQLWriter._steps

    def steps(self: SQLWriter, task: Patched, wake: Patched, connection: Patched) -> Steps[object]:
        import asyncpg  # noqa: PLC0415 -- an extra, and needed here alone

        if task.identifier != "outbox":
            return (yield from sound(self, task, wake, connection))
        settings, (host, port) = connection._params, connection._addr
        other = yield asyncpg.connect(host=host, port=port, user=settings.user, database=settings.database)
        transaction = other.transaction()
        yield transaction.start()
        added = yield from sound(self, task, wake, other)
        yield transaction.commit()
        yield other.close()
        return added

    setattr(SQLWriter, "_steps", steps)


@variant("A commit whose answer was lost is taken for a failed one, and its messages are deleted.", stores=ASYNCPG)
def blind_undo() -> None:
    transaction, additions = Outbox.transaction, outbox.Outbox._additions

    def remember(self: Patched, *arguments: Patched) -> list[Addition]:
        made = additions(self, *arguments)
        self.made = [*getattr(self, "made", ()), *(addition.message for addition in made)]
        return made

    @contextlib.asynccontextmanager
    async def undo(self: Patched, pool: Patched) -> AsyncGenerator[Patched]:
        try:
            async with transaction(self, pool) as connection:
                yield connection
        except CommitUnknownError:
            messages: list[Message] = self.made
            ids = [message.id for message in messages]
            await pool.execute("DELETE FROM postroom_outbox WHERE id = ANY ($1::uuid[])", ids)
            raise

    setattr(Outbox, "_additions", remember)
    setattr(Outbox, "transaction", undo)


@variant("A dedupe key is taken and forgotten, so that a repeat is a second message.")
def dedupe_ignored() -> None:
    sound: Patched = Adding._values

    def values(self: Adding, addition: Addition) -> dict[str, Any]:
        return {**sound(self, addition), "dedupe_key": None}

    setattr(Adding, "_values", values)
