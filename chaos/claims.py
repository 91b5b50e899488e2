"""The checks of claims: one at a time for each message, and whoever lost one has nothing more to say."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final

from .audit import Change
from .evidence import OPEN, Evidence, Violation

__all__ = ["fenced", "one_claim"]

#: What the status of a message is after a settlement.
_AFTER: Final = {"delivered": "delivered", "retry": "pending", "dead": "dead", "release": "pending"}


def one_claim(evidence: Evidence) -> Iterator[Violation]:
    """C4: claims of a message follow each other; each has the next token, and starts when the one before has ended."""
    for identity, changes in _by_id(evidence).items():
        state = ("pending", 0)
        for change in changes:
            yield from _broken_chain(identity, change, state)
            state = (change.new_status, change.new_token)
        row = evidence.row(identity)
        if row is not None and (row.status, row.token) != state:
            yield Violation("C4", f"the row says {row.status} {row.token}, its changes {state[0]} {state[1]}", identity)
    granted = {(change.id, change.new_token) for change in evidence.changes if change.new_token != change.old_token}
    holders = Counter((one.id, one.token) for one in evidence.claimed)
    for (identity, token), number in holders.items():
        if number > 1:
            yield Violation("C4", f"token {token} was given out {number} times", identity)
        if (identity, token) not in granted:
            yield Violation("C4", f"token {token} was given out, but the store has no such claim", identity)


def _broken_chain(identity: str, change: Change, state: tuple[str, int]) -> Iterator[Violation]:
    if (change.old_status, change.old_token) != state:
        yield Violation("C4", f"a change begins at {change.old_status} {change.old_token}, not at {state}", identity)
    if change.new_token == change.old_token:
        return
    if (change.new_status, change.new_token) != ("processing", change.old_token + 1):
        yield Violation("C4", f"token {change.old_token} became {change.new_token}, {change.new_status}", identity)
    if change.old_status not in OPEN:
        yield Violation("C4", f"claimed again after it was {change.old_status}", identity)
    if change.old_status == "processing" and change.old_until is not None and change.at < change.old_until:
        yield Violation("C4", f"token {change.new_token} was granted before the lease before it ended", identity)


def fenced(evidence: Evidence) -> Iterator[Violation]:
    """C5: a settlement was accepted under the current token only, and nothing was settled that nobody asked for."""
    made = {(c.id, c.new_token, c.new_status) for c in evidence.changes if c.new_token == c.old_token}
    for one in evidence.settled:
        if one.accepted and (one.id, one.token, _AFTER[one.outcome]) not in made:
            yield Violation("C5", f"{one.outcome} under token {one.token} was accepted, but not recorded", one.id)
    yield from _renewed(evidence)
    asked = {(one.id, one.token, _AFTER[one.outcome]) for one in evidence.settled}
    for change in evidence.changes:
        step = (change.old_status, change.new_status)
        is_same = step[0] == step[1] and change.old_until == change.new_until
        # Not every update is one: adding a message that is there already touches its row in MariaDB.
        if change.new_token != change.old_token or step == ("processing", "processing") or is_same:
            continue
        if step not in _LEGAL:
            yield Violation("C5", f"went from {step[0]} to {step[1]} under token {change.new_token}", change.id)
        elif change.new_status != "dead" and (change.id, change.new_token, change.new_status) not in asked:
            yield Violation("C5", f"{change.new_status} under token {change.new_token}, asked by nobody", change.id)


def _renewed(evidence: Evidence) -> Iterator[Violation]:
    """C5 of leases: each renewal that a worker was told of is there, under its own token."""
    made = Counter(
        (change.id, change.new_token)
        for change in evidence.changes
        if (change.old_token, change.old_status, change.new_status) == (change.new_token, "processing", "processing")
    )
    for (identity, token), number in Counter((one.id, one.token) for one in evidence.extended).items():
        if number > made[identity, token]:
            yield Violation("C5", f"the lease of token {token} was renewed, but not that of its claim", identity)


#: Changes that keep the token. The sweep buries by itself; a worker that was only slow may still confirm.
_LEGAL: Final = frozenset(
    {
        ("processing", "delivered"),
        ("processing", "pending"),
        ("processing", "dead"),
        ("pending", "dead"),
        ("dead", "delivered"),
    }
)


def _by_id(evidence: Evidence) -> dict[str, list[Change]]:
    found: dict[str, list[Change]] = defaultdict(list)
    for change in evidence.changes:
        found[change.id].append(change)
    return found
