"""The checker: every promise of outbox and inbox as a pure function over the evidence of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from .claims import fenced, one_claim
from .consuming import ack_rule, effect_once, handled_in_order, letters_in_budget, neglected
from .evidence import OPEN, Evidence, Violation

__all__ = ["CHECKS", "Violation", "blocked_ids", "check", "duplicates"]

#: Of which no attempt is spent, the second only if the destination answered for nothing else meanwhile.
_OUTAGE: Final = frozenset({"outage", "unanswered"})
#: What shows a dispatcher that a destination is not down; an error of a publisher that is no outage does, too.
_ANSWERED: Final = frozenset({"delivered", "refused", "rejected", "panic"})
#: How many nanoseconds later than its dispatcher a publisher may see a call begin.
_MOMENT: Final = 100_000_000
#: More than any healthy dispatcher of this size needs.
_VITALS: Final = {"fds": 64, "threads": 24, "tasks": 64}


def check(evidence: Evidence) -> list[Violation]:
    """Return every violation of every check."""
    return [violation for one in CHECKS.values() for violation in one(evidence)]


def duplicates(evidence: Evidence) -> int:
    """Return how many receptions were not the first of their message: allowed, but counted."""
    return len(evidence.received) - len({one.id for one in evidence.received})


def blocked_ids(evidence: Evidence) -> set[str]:
    """Return the messages that rightly wait for ever, since a dead one of their key holds them back.

    One whose worker died meanwhile stays in processing, with a lease that has run out.
    """
    if evidence.on_dead != "block" or not evidence.ordered:
        return set()
    first_dead: dict[tuple[str, str], int] = {}
    for row in evidence.rows:
        if row.status == "dead" and row.key is not None:
            place = (row.topic, row.key)
            first_dead[place] = min(row.seq, first_dead.get(place, row.seq))
    return {
        row.id
        for row in evidence.rows
        if row.status in OPEN and row.key is not None and row.seq > first_dead.get((row.topic, row.key), row.seq)
    }


def lost(evidence: Evidence) -> Iterator[Violation]:
    """C1: what was surely committed is received, or dead, or rightly held back by a dead one."""
    received = {one.id for one in evidence.received}
    accounted = received | {row.id for row in evidence.rows if row.status == "dead"} | blocked_ids(evidence)
    for one in evidence.sent:
        if one.end == "ok" and one.added and one.id not in accounted:
            row = evidence.row(one.id)
            yield Violation("C1", f"committed, never received, {row.status if row else 'no row'}", one.id)
    for row in evidence.rows:
        if row.status == "delivered" and row.id not in received:
            yield Violation("C1", "marked as delivered, never received", row.id)
    yield from neglected(evidence)


def phantom(evidence: Evidence) -> Iterator[Violation]:
    """C2: what was received was sent, was not rolled back, and has a row."""
    ends = {one.id: one.end for one in evidence.sent if one.added}
    for identity in {one.id for one in evidence.received}:
        if identity not in ends:
            yield Violation("C2", "received, never sent", identity)
        elif ends[identity] == "fail":
            yield Violation("C2", "received, though its transaction failed", identity)
        elif evidence.row(identity) is None:
            yield Violation("C2", "received, but there is no row", identity)
    for row in evidence.rows:
        if ends.get(row.id, "fail") == "fail":
            yield Violation("C2", "there is a row of a transaction that failed or never was", row.id)


def atomic(evidence: Evidence) -> Iterator[Violation]:
    """C3: the business row is there if and only if the message is."""
    for one in evidence.sent:
        if one.added and (one.id in evidence.business) != (evidence.row(one.id) is not None):
            has = "business row" if one.id in evidence.business else "message"
            yield Violation("C3", f"after {one.end} there is only the {has}", one.id)


def in_order(evidence: Evidence) -> Iterator[Violation]:
    """C6: first receptions of a key rise without a gap; only the dead may be passed, and only where that is allowed."""
    if not evidence.ordered:
        return
    firsts: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for one in evidence.received:
        if one.key is not None:
            firsts[one.topic, one.key].setdefault(one.id, one.n)
    for place, order in firsts.items():
        numbers = list(order.values())
        if numbers != sorted(numbers):
            yield Violation("C6", f"first received in the order {_shown(numbers)}", key=place[1])
    sent = {one.id: one.n for one in evidence.sent if one.added}
    for row in evidence.rows:
        order = firsts.get((row.topic, row.key or ""), {})
        is_passed = row.id not in order and sent.get(row.id, 0) < max(order.values(), default=0)
        if is_passed and not (row.status == "dead" and evidence.on_dead == "skip"):
            yield Violation("C6", f"number {sent.get(row.id)} was passed, {row.status}", row.id, row.key or "")
    yield from handled_in_order(evidence)


def _shown(order: list[int]) -> str:
    wrong = next(place for place in range(1, len(order)) if order[place] < order[place - 1])
    return ", ".join(str(number) for number in order[max(wrong - 3, 0) : wrong + 3])


def within_budget(evidence: Evidence) -> Iterator[Violation]:
    """C9: no more attempts than allowed, none for an outage, and for every death a reason and the attempts."""
    kinds = {one.id: one.kind for one in evidence.sent}
    for row in evidence.rows:
        kind = kinds.get(row.id, "plain")
        if row.attempts > evidence.max_attempts:
            yield Violation("C9", f"{row.attempts} attempts of {evidence.max_attempts}", row.id)
        if row.status == "dead" and not row.error:
            yield Violation("C9", "dead without a reason", row.id)
        if row.status == "dead" and kind != "reject" and row.attempts < evidence.max_attempts:
            yield Violation("C9", f"dead after only {row.attempts} attempts", row.id)
    yield from _misspent(evidence)
    yield from letters_in_budget(evidence)


def _misspent(evidence: Evidence) -> Iterator[Violation]:
    """C9 of attempts: each claim costs one, unless it was given back, as it must be in an outage."""
    outcomes = {(one.id, one.token): one.outcome for one in evidence.settled}
    released = Counter(
        change.id
        for change in evidence.changes
        if (change.old_status, change.new_status) == ("processing", "pending")
        and outcomes.get((change.id, change.new_token)) == "release"
    )
    for row in evidence.rows:
        if row.attempts != row.token - released[row.id]:
            spent = f"{row.token} claims, {released[row.id]} of them given back, but {row.attempts} attempts"
            yield Violation("C9", spent, row.id)
    answers = {(one.id, one.token, one.worker): one for one in evidence.answers}
    asked = {(one.id, one.token, one.worker): one.asked for one in reversed(evidence.settled)}
    heard = _heard(evidence, asked)
    for settled in evidence.settled:
        place = (settled.id, settled.token, settled.worker)
        answer = answers.get(place)
        if answer is None or answer.word not in _OUTAGE or settled.outcome == "release":
            continue
        began, ended = answer.t - answer.took - _MOMENT, asked[place]
        others = heard.get((settled.worker, answer.destination), ())
        if answer.word == "outage" or not any(first <= ended and last >= began for first, last in others):
            yield Violation("C9", f"{settled.outcome} under token {settled.token} in an outage", settled.id)


def _heard(
    evidence: Evidence, asked: Mapping[tuple[str, int, str], int]
) -> Mapping[tuple[str, str], Sequence[tuple[int, int]]]:
    """Return when each worker heard each destination answer: after its publisher did, and before it asked to settle."""
    times: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for one in evidence.answers:
        if one.word in _ANSWERED:
            settled = asked.get((one.id, one.token, one.worker), one.t)
            times[one.worker, one.destination].append((one.t, max(settled, one.t)))
    return times


def deduped(evidence: Evidence) -> Iterator[Violation]:
    """C10: one message for each dedupe key, and a repeat is told of only if that message is there."""
    if not evidence.dedupes:
        return
    stored: dict[tuple[str, str], str] = {}
    for row in evidence.rows:
        if row.dedupe is not None:
            place = (row.topic, row.dedupe)
            if place in stored:
                yield Violation("C10", f"two messages with the dedupe key {row.dedupe}", row.id)
            stored[place] = row.id
    yield from _added_twice(evidence)
    for one in evidence.sent:
        if one.dedupe is not None and not one.added and one.end == "ok":
            winner = stored.get((one.topic, one.dedupe))
            if winner is None or one.id not in {winner, "None"}:
                yield Violation("C10", f"told that {one.dedupe} was there before as {one.id}, it is {winner}", one.id)


def _added_twice(evidence: Evidence) -> Iterator[Violation]:
    """Go by what producers were told, since a store that forgets the keys has rows without any."""
    added: dict[tuple[str, str], str] = {}
    for one in evidence.sent:
        if one.dedupe is not None and one.added and one.end == "ok":
            first = added.setdefault((one.topic, one.dedupe), one.id)
            if first != one.id:
                yield Violation("C10", f"{one.dedupe} was added as {first}, and then once more", one.id)


def conserved(evidence: Evidence) -> Iterator[Violation]:
    """C11: every message is in one state that it may end in, and what dispatchers count is what happened."""
    rightly = blocked_ids(evidence)
    for row in evidence.rows:
        if row.status in OPEN and row.id not in rightly:
            yield Violation("C11", f"still {row.status} after {row.attempts} attempts", row.id)
    for event in evidence.events:
        if event["op"] == "stop" and "counts" in event:
            since = max(e["t"] for e in evidence.events if e["op"] == "start" and e["proc"] == event["proc"])
            own = [one for one in evidence.settled if one.worker == event["proc"] and one.t >= since and one.accepted]
            counted = event["counts"].get("MessagesDelivered", 0)
            happened = sum(1 for one in own if one.outcome == "delivered")
            if counted != happened:
                yield Violation("C11", f"{event['proc']} counted {counted} deliveries, its store {happened}")


def alive(evidence: Evidence) -> Iterator[Violation]:
    """C12: once all faults are over, everything is settled in bounded time."""
    if evidence.undrained:
        yield Violation("C12", f"{evidence.undrained} messages still waited when nothing moved any more")


def clean(evidence: Evidence) -> Iterator[Violation]:
    """C13: processes end in good order, and leave nothing behind and hoard nothing."""
    for complaint in evidence.complaints:
        yield Violation("C13", complaint)
    last = {event["proc"]: event for event in evidence.events if event["op"] == "vitals"}
    for process, event in last.items():
        for name, limit in _VITALS.items():
            if event[name] > limit:
                yield Violation("C13", f"{process} held {event[name]} {name} at the end")


CHECKS: Final[dict[str, Callable[[Evidence], Iterator[Violation]]]] = {
    "C1": lost,
    "C2": phantom,
    "C3": atomic,
    "C4": one_claim,
    "C5": fenced,
    "C6": in_order,
    "C7": effect_once,
    "C8": ack_rule,
    "C9": within_budget,
    "C10": deduped,
    "C11": conserved,
    "C12": alive,
    "C13": clean,
}
