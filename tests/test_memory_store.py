"""`MemoryStore` under a clock that stands still; the contract tests the rest."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

from postroom import Message, Outbox
from postroom.store import ClaimTerms, Retry, Settlement
from postroom.stores import MemoryStore
from postroom.testing.clock import VirtualClock


async def test_what_is_due_at_this_moment_is_swept() -> None:
    """A claim would take it, so a sweep must not leave it."""
    store = MemoryStore(clock=VirtualClock())
    with store.transaction() as transaction:
        Outbox().add(transaction, Message(topic="t", payload=b"{}"))
    terms = ClaimTerms(worker=uuid4(), max_attempts=2)
    [claim] = await store.claim(1, terms)
    await store.settle([Settlement(claim, Retry("it failed", timedelta(0)))])

    assert await store.sweep(ClaimTerms(worker=uuid4(), max_attempts=1)) == 1
