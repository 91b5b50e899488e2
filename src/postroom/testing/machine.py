"""The state machine: random programs, run on a store and on the reference model at once, that must always agree.

Example:
    >>> from postroom.testing.machine import check_store
    >>> def test_my_store_agrees_with_the_model():
    ...     check_store(make_my_harness)  # an async function that returns a StoreHarness on an empty store
"""

# ruff: noqa: S101 -- what is proved is said as tests say it

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,  # pyright: ignore[reportUnknownVariableType] -- not typed
)

from ..message import Message
from ..store import Claim, ClaimTerms, Dead, Delivered, Outcome, Release, Retry, Settlement, Store
from .contracts.harness import StoreHarness
from .model import Model, ModelRow

__all__ = ["StoreMachine", "check_store"]

MINUTE: Final = timedelta(minutes=1)
# Sums of the steps never come near the others: real time, which passes too, cannot decide anything.
STEPS: Final = (20, 60)
LEASE: Final = 50
DELAY: Final = 30
MAX_ATTEMPTS: Final = 5
#: Bytes of a payload: what a store counts besides is far less.
SIZE: Final = 2000
TENANT: Final = UUID("11111111-1111-4111-8111-111111111111")

_OUTCOMES: Final[Sequence[Outcome]] = (
    Delivered(),
    Retry("no"),
    Retry("later", DELAY * MINUTE),
    Dead("never"),
    Release(),
    Release(DELAY * MINUTE),
    Release(destination="east"),
    Release(destination="west"),
)


#: Which of the claims, the latest first: those that are still held are more interesting than old ones.
_NUMBERS: Final = st.integers(0, 15)


def check_store(make: Callable[[], Awaitable[StoreHarness]], *, examples: int = 50, steps: int = 40) -> Counter[str]:
    """Run random programs on a store; return how often each noteworthy thing happened.

    Args:
        make: Returns a harness on an empty store; called in the event loop of each program.
        examples: How many programs; the environment variable ``POSTROOM_HYPOTHESIS_EXAMPLES`` overrides it.
        steps: How long a program may be.
    """
    seen: Counter[str] = Counter()
    profile = settings(
        max_examples=int(os.environ.get("POSTROOM_HYPOTHESIS_EXAMPLES", examples)),
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )

    class Machine(StoreMachine):
        def __init__(self) -> None:
            super().__init__(make, seen)

    run_state_machine_as_test(Machine, settings=profile)
    return seen


def _pick(claims: Sequence[Claim], number: int) -> list[Claim]:
    return [claims[-1 - number % len(claims)]] if claims else []


def _messages() -> st.SearchStrategy[list[dict[str, Any]]]:
    message = st.fixed_dictionaries(
        {
            "topic": st.sampled_from(["orders", "orders", "bills"]),
            "key": st.sampled_from([None, "a", "a", "b"]),
            "dedupe": st.sampled_from([None, None, None, "x", "y"]),
            "tenant_id": st.sampled_from([None, None, TENANT]),
        }
    )
    return st.lists(message, min_size=1, max_size=4)


def _message(topic: str, key: str | None, dedupe: str | None, tenant_id: UUID | None) -> Message:
    # A dedupe key of a tenant has to begin with it.
    prefix = "" if tenant_id is None else f"{tenant_id.hex}/"
    dedupe_key = None if dedupe is None else prefix + dedupe
    return Message(topic=topic, type="t", payload=b"x" * SIZE, key=key, dedupe_key=dedupe_key, tenant_id=tenant_id)


class StoreMachine(RuleBasedStateMachine):
    """A random program: three store objects on the same data, one of which keeps nothing that was delivered."""

    def __init__(self, make: Callable[[], Awaitable[StoreHarness]], seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen
        self.model: Model = Model()
        self.stores: list[Store] = []
        #: Every claim that ever was. Programs point at them by number: what is drawn must not depend on what a store
        #: did, since claims at the same time may share the messages in more than one way.
        self.claims: list[Claim] = []
        self.last: list[Settlement] = []
        self.tokens: dict[UUID, int] = {}
        # A loop of its own, so that no connection is shared between two programs.
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self.harness: StoreHarness = self.loop.run_until_complete(self._open(make))

    async def _open(self, make: Callable[[], Awaitable[StoreHarness]]) -> StoreHarness:
        harness = await make()
        self.stores = [harness.store, await harness.another(), await harness.another(keep_delivered=timedelta(0))]
        return harness

    def teardown(self) -> None:
        """Close everything."""
        self.loop.run_until_complete(self.harness.close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    # -- add ---------------------------------------------------------------------------------------------------

    @initialize(specs=_messages())
    def begin(self, specs: list[dict[str, Any]]) -> None:
        """Begin with something to do."""
        self.add(specs, 0)

    @rule(specs=_messages(), delay=st.sampled_from([0, 0, DELAY]))
    def add_messages(self, specs: list[dict[str, Any]], delay: int) -> None:
        """Add messages in one transaction."""
        self.add(specs, delay)

    def add(self, specs: list[dict[str, Any]], delay: int) -> None:
        """Add messages, and compare what was told of each."""
        messages = [_message(**spec) for spec in specs]
        added = self.loop.run_until_complete(self.harness.add(*messages, delay=delay * MINUTE))
        assert added == [self.model.add(message, delay) for message in messages]
        self.seen["duplicate"] += sum(not one.is_new for one in added)

    @rule(specs=_messages())
    def add_and_roll_back(self, specs: list[dict[str, Any]]) -> None:
        """Add messages in a transaction that does not commit."""
        self.loop.run_until_complete(self.harness.add_and_roll_back(*[_message(**spec) for spec in specs]))

    # -- claim -------------------------------------------------------------------------------------------------

    @rule(
        which=st.integers(0, 2),
        limit=st.sampled_from([1, 2, 3, 100]),
        on_dead=st.sampled_from(["block", "block", "skip"]),
        tenant_id=st.sampled_from([None, None, None, TENANT]),
        max_bytes=st.sampled_from([None, None, 1, 2 * SIZE, 4 * SIZE]),
        newest_first=st.booleans(),
    )
    def claim(self, which: int, limit: int, **changes: Any) -> None:  # noqa: ANN401 -- those of ClaimTerms
        """Claim, and check every promise about what may be claimed and what must be."""
        self._claim(limit, which, **changes)

    def _claim(self, limit: int, which: int, **changes: Any) -> list[Claim]:  # noqa: ANN401 -- those of ClaimTerms
        terms = self._terms(**changes)
        claims = self.loop.run_until_complete(self.stores[which].claim(limit, terms))
        self._take(claims, limit, terms, complete=True)
        return claims

    @rule(limits=st.tuples(st.integers(1, 4), st.integers(1, 4)))
    def claim_at_once(self, limits: tuple[int, int]) -> None:
        """Let two stores claim at the same time; what one has locked, the other may miss."""
        terms = self._terms()

        async def claim_at_once() -> list[list[Claim]]:
            pairs = zip(self.stores, limits, strict=False)
            return await asyncio.gather(*[store.claim(limit, terms) for store, limit in pairs])

        batches = self.loop.run_until_complete(claim_at_once())
        for claims, limit in zip(batches, limits, strict=True):
            self._take(claims, limit, terms, complete=False)

    def _terms(self, **changes: Any) -> ClaimTerms:  # noqa: ANN401 -- those of ClaimTerms
        return ClaimTerms(worker=uuid4(), lease=LEASE * MINUTE, max_attempts=MAX_ATTEMPTS, **changes)

    def _take(self, claims: Sequence[Claim], limit: int, terms: ClaimTerms, *, complete: bool) -> None:
        expired = sum(row.status == "processing" for row in self.model.rows)
        self.model.take(claims, limit, terms, LEASE, complete=complete)
        self.claims += claims
        keys = Counter((claim.message.topic, claim.message.key) for claim in claims if claim.message.key is not None)
        self.seen["claimed"] += len(claims)
        self.seen["suspect"] += any(claim.suspect for claim in claims)
        self.seen["run of a key"] += max(keys.values(), default=0) > 1
        self.seen["claimed again"] += any(claim.message.token > 1 for claim in claims) and expired > 0

    # -- settle ------------------------------------------------------------------------------------------------

    @rule(number=_NUMBERS, outcome=st.sampled_from(_OUTCOMES), which=st.integers(0, 2))
    def settle_one(self, number: int, outcome: Outcome, which: int) -> None:
        """Settle any claim that ever was: one that is held, one that was lost, one that is settled."""
        self._settle([Settlement(claim, outcome) for claim in _pick(self.claims, number)], which)

    @rule(
        outcomes=st.lists(st.sampled_from(_OUTCOMES), min_size=1, max_size=4), number=_NUMBERS, which=st.integers(0, 2)
    )
    def settle_many(self, outcomes: list[Outcome], number: int, which: int) -> None:
        """Settle several messages that are held, each in its own way."""
        held = [self._claim_of(row) for row in self.model.rows if row.status == "processing"]
        begin = number % max(len(held), 1)
        claims = held[begin:] + held[:begin]
        self._settle([Settlement(claim, outcome) for claim, outcome in zip(claims, outcomes, strict=False)], which)

    @rule(number=_NUMBERS, outcome=st.sampled_from([Delivered(), *_OUTCOMES]), which=st.integers(0, 2))
    def settle_dead(self, number: int, outcome: Outcome, which: int) -> None:
        """Settle a message that is dead, whose worker may only have been slow; if none is, one dies first."""
        if not any(row.status == "dead" for row in self.model.rows):
            self._settle([Settlement(claim, Dead("never")) for claim in self._claim(1, which)], which)
        dead = [self._claim_of(row) for row in self.model.rows if row.status == "dead"]
        self._settle([Settlement(claim, outcome) for claim in _pick(dead, number)], which)

    @rule(which=st.integers(0, 2))
    def settle_again(self, which: int) -> None:
        """Repeat a call whose answer might have been lost."""
        self._settle(self.last, which)

    def _claim_of(self, row: ModelRow) -> Claim:
        return Claim(replace(row.message, attempt=row.attempts, token=row.token))

    def _settle(self, settlements: list[Settlement], which: int) -> None:
        store = self.stores[which]
        if any(isinstance(one.outcome, Release) and one.outcome.destination for one in settlements):
            # What is parked later goes later, and some clocks do not tell two calls apart.
            self.model.turns += 1
            self.loop.run_until_complete(self.harness.advance(timedelta(seconds=1)))
        lost = self.loop.run_until_complete(store.settle(settlements))
        expected: list[Claim] = []
        for settlement in settlements:
            self._note(settlement)
            told = self.model.settle(settlement.claim, settlement.outcome, keep=bool(store.keep_delivered))
            expected += [settlement.claim] if told == "lost" else []
            self.seen[f"settlement {told}"] += 1
        assert lost == expected
        self.last = settlements

    def _note(self, settlement: Settlement) -> None:
        row = self.model.find(settlement.claim.message.id)
        if row is not None and row.token == settlement.claim.message.token:
            late = row.until is not None and row.until < self.model.now
            self.seen["late settlement"] += late
            self.seen["delivered after death"] += row.status == "dead" and isinstance(settlement.outcome, Delivered)

    @rule(which=st.integers(0, 2), destination=st.sampled_from(["east", "west"]), limit=st.sampled_from([1, 2, 100]))
    def unpark(self, which: int, destination: str, limit: int) -> None:
        """Make messages due that are parked for a destination."""
        unparked = self.loop.run_until_complete(self.stores[which].unpark(destination, limit))
        assert unparked == self.model.unpark(destination, limit)
        self.seen["unparked"] += unparked

    @rule(number=_NUMBERS, which=st.integers(0, 2))
    def extend(self, number: int, which: int) -> None:
        """Prolong the lease of any claim that ever was."""
        claims = _pick(self.claims, number)
        lost = self.loop.run_until_complete(self.stores[which].extend(claims, LEASE * MINUTE))
        assert lost == [claim for claim in claims if not self.model.extend(claim, LEASE)]
        self.seen["extended"] += len(claims) - len(lost)

    # -- upkeep ------------------------------------------------------------------------------------------------

    @rule(minutes=st.sampled_from(STEPS))
    def advance(self, minutes: int) -> None:
        """Let time pass, less than a lease or more."""
        self.loop.run_until_complete(self.harness.advance(minutes * MINUTE))
        self.model.now += minutes

    @rule(which=st.integers(0, 1), times=st.integers(1, 4))
    def crash(self, which: int, times: int) -> None:
        """Claim everything and let the leases run out, which makes suspects and spends attempts."""
        for _ in range(times):
            self._claim(100, which)
            self.advance(STEPS[-1])

    @rule(which=st.integers(0, 2), max_attempts=st.sampled_from([1, 2, MAX_ATTEMPTS]))
    def sweep(self, which: int, max_attempts: int) -> None:
        """Bury what has no attempt left, also by a budget that is smaller than that of the claims."""
        terms = ClaimTerms(worker=uuid4(), max_attempts=max_attempts)
        swept = self.loop.run_until_complete(self.stores[which].sweep(terms))
        assert swept == self.model.sweep(max_attempts)
        self.seen["swept"] += swept

    @rule(which=st.integers(0, 2), older_than=st.sampled_from([0, DELAY]), limit=st.integers(1, 3))
    def purge(self, which: int, older_than: int, limit: int) -> None:
        """Delete some of what was delivered; if nothing was, deliver something first."""
        if not any(row.status == "delivered" for row in self.model.rows):
            self._settle([Settlement(claim, Delivered()) for claim in self._claim(2, which)], 0)
        purged = self.loop.run_until_complete(self.stores[which].purge(older_than=older_than * MINUTE, limit=limit))
        left = {row.id for row in self.loop.run_until_complete(self.harness.rows())}
        assert purged == self.model.purge(left, older_than, limit)
        self.seen["purged"] += purged

    @rule(which=st.integers(0, 2))
    def count(self, which: int) -> None:
        """Compare the stats."""
        stats = self.loop.run_until_complete(self.stores[which].stats())
        states = Counter(row.status for row in self.model.rows)
        assert (stats.pending, stats.processing) == (states["pending"], states["processing"])
        assert (stats.delivered, stats.dead) == (states["delivered"], states["dead"])
        assert self.loop.run_until_complete(self.stores[which].parked()) == self.model.parked()

    @rule(which=st.integers(0, 2))
    def reopen(self, which: int) -> None:
        """Close a store and open it again."""
        self.loop.run_until_complete(self._reopen(self.stores[which]))

    async def _reopen(self, store: Store) -> None:
        await store.close()
        await store.open()

    # -- always ------------------------------------------------------------------------------------------------

    @invariant()
    def the_store_holds_what_the_model_holds(self) -> None:
        """Compare every row, and see that no token ever falls."""
        rows = self.loop.run_until_complete(self.harness.rows())
        self.model.check(rows)
        assert all(row.token >= self.tokens.get(row.id, 0) for row in rows)
        self.tokens = {row.id: row.token for row in rows}
