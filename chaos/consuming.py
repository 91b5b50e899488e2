"""The checks of consumers: each effect once, and nothing acknowledged before its effect is there to stay."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from .evidence import Effect, Evidence, Violation
from .groups import UNHANDLED

__all__ = ["OUTAGES", "absorbed", "ack_rule", "effect_once", "handled_in_order", "letters_in_budget", "neglected"]

#: What a handler fails with that is no fault of its message.
OUTAGES: Final = frozenset({"StoreUnavailableError", "StoreTimeoutError", "CommitUnknownError"})


def absorbed(evidence: Evidence) -> int:
    """Return how many duplicates an inbox has kept from their handler, or from having an effect."""
    return sum(event["op"] == "event" and event["name"] == "DuplicateSkipped" for event in evidence.events)


def _kinds(evidence: Evidence) -> dict[str, str]:
    return {one.id: one.kind for one in evidence.sent}


def effect_once(evidence: Evidence) -> Iterator[Violation]:
    """C7: one effect for each consumer and message, with its mark in the inbox; none of what its handler undid."""
    kinds = _kinds(evidence)
    made = Counter((one.consumer, one.id) for one in evidence.effects)
    for (consumer, identity), number in made.items():
        if number > 1:
            yield Violation("C7", f"{number} effects at {consumer}", identity)
        if kinds.get(identity) in UNHANDLED:
            yield Violation("C7", f"an effect at {consumer}, though its handler always fails", identity)
        if (consumer, identity) not in evidence.marks:
            yield Violation("C7", f"an effect at {consumer}, but no mark in its inbox", identity)
    for consumer, identity in evidence.marks:
        if (consumer, identity) not in made:
            yield Violation("C7", f"marked in the inbox of {consumer}, but no effect", identity)


def ack_rule(evidence: Evidence) -> Iterator[Violation]:
    """C8: what was acknowledged had its effect before, durably, or is a dead letter."""
    effects = {(one.consumer, one.id): one for one in evidence.effects}
    letters = {(one.consumer, one.id) for one in evidence.letters}
    begun = {one.handle: one.t for one in evidence.begun}
    ended = {one.handle: one.t for one in evidence.handled}
    for ack in evidence.acks:
        effect = effects.get((ack.consumer, ack.id))
        if effect is None and (ack.consumer, ack.id) not in letters:
            yield Violation("C8", f"acknowledged by {ack.consumer}, but no effect and no dead letter", ack.id)
        elif effect is not None and begun.get(effect.handle, ack.t) >= ack.t and (ack.consumer, ack.id) not in letters:
            yield Violation("C8", f"acknowledged by {ack.consumer} before its effect was even begun", ack.id)
        if ended.get(ack.handle, ack.t) >= ack.t:
            yield Violation("C8", f"acknowledged by {ack.consumer} before its transaction had ended", ack.id)


def neglected(evidence: Evidence) -> Iterator[Violation]:
    """C1 of consumers: whatever the broker has confirmed, every group has handled or put aside."""
    accounted = {(one.consumer, one.id) for one in evidence.effects}
    accounted |= {(one.consumer, one.id) for one in evidence.letters}
    for identity in {one.id for one in evidence.received if one.topic in evidence.topics}:
        for group in evidence.groups:
            if (group, identity) not in accounted:
                yield Violation("C1", f"received, and neither handled nor put aside by {group}", identity)


def handled_in_order(evidence: Evidence) -> Iterator[Violation]:
    """C6 of consumers: effects of a key follow each other; one that was put aside may have it later."""
    sent = {one.id: one for one in evidence.sent if one.added}
    aside = {(one.consumer, one.id) for one in evidence.letters}
    orders: dict[tuple[str, str, str], list[Effect]] = defaultdict(list)
    for effect in evidence.effects:
        message = sent.get(effect.id)
        if message is not None and message.key is not None and (effect.consumer, effect.id) not in aside:
            orders[effect.consumer, message.topic, message.key].append(effect)
    for (consumer, _, key), effects in orders.items():
        for before, after in pairwise(effects):
            if sent[after.id].n < sent[before.id].n:
                what = f"{consumer} handled number {sent[after.id].n} after {sent[before.id].n}"
                yield Violation("C6", what, after.id, key)


def letters_in_budget(evidence: Evidence) -> Iterator[Violation]:
    """C9 of consumers: a dead letter has a reason, and was tried as often as it may be, unless it was rejected.

    That the database was away costs no message an attempt.
    """
    for event in evidence.events:
        if event["op"] == "nack" and event["error"] in OUTAGES:
            yield Violation("C9", f"{event['error']} at {event['consumer']} cost it an attempt", event["id"])
    kinds, received = _kinds(evidence), {one.id for one in evidence.received}
    for letter in evidence.letters:
        if not letter.error:
            yield Violation("C9", f"a dead letter of {letter.consumer} without a reason", letter.id)
        if letter.id not in received:
            yield Violation("C9", f"a dead letter of {letter.consumer} that never was received", letter.id)
        if letter.attempts < evidence.handlings and kinds.get(letter.id) != "spurned":
            yield Violation("C9", f"a dead letter of {letter.consumer} after {letter.attempts} deliveries", letter.id)
