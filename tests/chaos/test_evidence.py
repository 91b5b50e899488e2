"""What is made of evidence where a store says less, or says it later: a pipeline, a stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from chaos.audit import Row
from chaos.checker import CHECKS
from chaos.evidence import Evidence, Received, Sent, gather
from chaos.history import Event

FIRST, SECOND = str(UUID(int=1)), str(UUID(int=2))


def event(op: str, stage: str, **fields: Any) -> Event:  # noqa: ANN401 -- as histories have it
    return {"t": 1, "proc": "p0", "op": op, "type": stage, **fields}


def invoked(identity: str) -> Event:
    message = {"id": identity, "topic": "mail", "key": None, "n": 0, "kind": "plain", "dedupe": "d", "added": True}
    return event("enqueue", "invoke", tx="t", messages=[message], hoped=True)


def row(identity: str, **known: Any) -> Row:  # noqa: ANN401
    fields: dict[str, Any] = {"topic": "mail", "key": None, "dedupe": "d", "attempts": 1, "token": 1, **known}
    return Row(id=identity, seq=1, status="delivered", **fields)


def test_what_a_pipeline_says_at_its_end_counts_more_than_what_was_hoped() -> None:
    """Whoever adds in a pipeline is told of a duplicate when it is executed."""
    events = [invoked(SECOND), event("enqueue", "ok", tx="t", answers=[UUID(int=1).hex])]

    [sent] = gather(events, rows=[row(FIRST)]).sent

    assert (sent.id, sent.added, sent.end) == (FIRST, False, "ok")


@pytest.mark.parametrize(
    ("rows", "expected"), [([row(FIRST)], (FIRST, False)), ([row(SECOND)], (SECOND, True)), ([], (SECOND, True))]
)
def test_a_repeat_of_which_nobody_was_told_is_known_by_what_is_there(
    rows: list[Row], expected: tuple[str, bool]
) -> None:
    """The answer was lost: it was a repeat if another message has its dedupe key."""
    [sent] = gather([invoked(SECOND)], rows=rows).sent

    assert (sent.id, sent.added) == expected
    assert sent.end == "info"


def test_nothing_is_asked_of_a_store_that_it_does_not_promise() -> None:
    """A stream keeps no order and knows no duplicates, and says so; whoever promises it is held to it."""
    rows = [row(FIRST, key="k"), row(SECOND, key="k")]
    received = [
        Received(t=1, id=SECOND, topic="mail", key="k", n=2),
        Received(t=2, id=FIRST, topic="mail", key="k", n=1),
    ]
    sent = [Sent(id=one, topic="mail", key="k", n=n, dedupe="d") for n, one in enumerate((FIRST, SECOND), start=1)]
    strict = Evidence(rows=rows, received=received, sent=sent)
    loose = replace(strict, ordered=False, dedupes=False)

    assert all(list(CHECKS[check](strict)) for check in ("C6", "C10"))
    assert not any(list(CHECKS[check](loose)) for check in ("C6", "C10"))
