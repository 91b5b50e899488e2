"""The evidence of a run: its histories and tables, as values that the checker can reason about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID

from .audit import Change, Effect, Letter, Row
from .groups import OUTPUTS
from .history import Event

__all__ = [
    "OPEN",
    "Answer",
    "Claimed",
    "Effect",
    "Evidence",
    "Handling",
    "Letter",
    "Received",
    "Sent",
    "Settled",
    "Violation",
    "gather",
]

#: The states in which a message still waits for something.
OPEN: Final = frozenset({"pending", "processing"})


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken, and the message or key whose events show it."""

    check: str
    what: str
    id: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A message that a producer wanted to add; ``end`` says how its transaction went: ok, fail or info."""

    id: str
    topic: str = "orders"
    key: str | None = None
    n: int = 0
    kind: str = "plain"
    dedupe: str | None = None
    #: False for a repeat, of which ``id`` then is the message that was there before.
    added: bool = True
    end: str = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message that the receiver has taken."""

    t: int
    id: str
    topic: str = "orders"
    key: str | None = None
    n: int = 0
    token: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A claim that a dispatcher was granted, by its own account."""

    t: int
    worker: str
    id: str
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A settlement that a dispatcher asked for; ``accepted`` is None while the answer is unknown."""

    t: int
    worker: str
    id: str
    token: int
    outcome: str
    accepted: bool | None = True
    #: When it was asked for.
    asked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a publisher heard of one message."""

    t: int
    worker: str
    id: str
    token: int
    word: str
    destination: str = ""
    #: How many nanoseconds the call took that ended at ``t``.
    took: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """A moment in the handling of a message by a consumer, under the number of its hand-out."""

    t: int
    consumer: str
    id: str
    handle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of a run."""

    sent: Sequence[Sent] = ()
    received: Sequence[Received] = ()
    claimed: Sequence[Claimed] = ()
    #: Claims whose lease was renewed, by the account of who held them.
    extended: Sequence[Claimed] = ()
    settled: Sequence[Settled] = ()
    answers: Sequence[Answer] = ()
    rows: Sequence[Row] = ()
    changes: Sequence[Change] = ()
    business: frozenset[str] = frozenset()
    #: What handlers wrote, what the inbox knows, and the dead letters beside it.
    effects: Sequence[Effect] = ()
    marks: frozenset[tuple[str, str]] = frozenset()
    letters: Sequence[Letter] = ()
    #: When a handler began, when everything around it had ended well, and when the message was acknowledged.
    begun: Sequence[Handling] = ()
    handled: Sequence[Handling] = ()
    acks: Sequence[Handling] = ()
    #: Which consumers get the messages of which topics.
    groups: Sequence[str] = ()
    topics: Sequence[str] = ()
    #: The whole merged history, for what is only counted.
    events: Sequence[Event] = ()
    max_attempts: int = 8
    #: After how many deliveries a consumer gives up.
    handlings: int = 8
    on_dead: str = "block"
    #: Whether the store promises that messages of a key go out in their order, and that none is added twice.
    ordered: bool = True
    dedupes: bool = True
    #: What went wrong with the processes themselves: exits, standard error, sessions left behind.
    complaints: Sequence[str] = ()
    #: How many messages were still waiting when no more progress was made.
    undrained: int = 0
    _rows: dict[str, Row] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Make rows findable by id."""
        self._rows.update({row.id: row for row in self.rows})

    def row(self, identity: str) -> Row | None:
        """Return the row of a message, if there is one."""
        return self._rows.get(identity)


def gather(
    events: Sequence[Event],
    *,
    effects: Sequence[Effect] = (),
    business: frozenset[str] = frozenset(),
    rows: Sequence[Row] = (),
    letters: Sequence[Letter] = (),
    **known: Any,  # noqa: ANN401 -- the other fields of Evidence
) -> Evidence:
    """Return the evidence in merged histories, together with what the tables say.

    The output of a handler is a message like others, and its effect the business row that goes with it.
    """
    outputs = [one.output for one in effects]
    return Evidence(
        events=events,
        effects=effects,
        rows=rows,
        letters=letters,
        business=business.union(outputs),
        sent=[*_sent(events, rows), *(Sent(id=output, topic=OUTPUTS) for output in outputs)],
        begun=_handlings(events, "effect"),
        handled=_handlings(events, "handled"),
        acks=_handlings(events, "ack"),
        received=[
            Received(t=e["t"], id=e["id"], topic=e["topic"], key=e["key"], n=e["n"], token=e["token"])
            for e in events
            if e["op"] == "deliver"
        ],
        claimed=_claims(events, "claim"),
        extended=_claims(events, "extend"),
        settled=list(_settled(events)),
        answers=[
            Answer(t=e["t"], worker=e["proc"], id=identity, token=token, word=word, destination=where, took=e["took"])
            for e in events
            if e["op"] == "publish"
            for identity, token, word, where in e["answers"]
        ],
        **known,
    )


def _sent(events: Iterable[Event], rows: Sequence[Row]) -> Iterable[Sent]:
    ends = {e["tx"]: e for e in events if e["op"] == "enqueue" and e["type"] != "invoke"}
    names = ("id", "topic", "key", "n", "kind", "dedupe", "added")
    there = {(row.topic, row.dedupe): row.id for row in rows if row.dedupe is not None}
    stored = {row.id for row in rows}
    for event in events:
        if event["op"] == "enqueue" and event["type"] == "invoke":
            # An invocation without an end is a transaction that died with its process: unknown.
            end = ends.get(event["tx"], {"type": "info"})
            answers: Sequence[str] = end.get("answers") or ["1"] * len(event["messages"])
            for message, answer in zip(event["messages"], answers, strict=True):
                one = Sent(**{name: message[name] for name in names}, end=end["type"])
                if answer != "1":
                    one = replace(one, id=str(UUID(answer)), added=False)
                elif event.get("hoped") and one.end == "info" and one.id not in stored:
                    # Nobody was told; if another one has its dedupe key, it was a repeat.
                    other = there.get((one.topic, one.dedupe or ""))
                    one = one if other is None else replace(one, id=other, added=False)
                yield one


def _claims(events: Iterable[Event], op: str) -> list[Claimed]:
    return [
        Claimed(t=event["t"], worker=event["proc"], id=identity, token=token)
        for event in events
        if event["op"] == op and event["type"] == "ok"
        for identity, token in event["claims"]
    ]


def _handlings(events: Iterable[Event], op: str) -> list[Handling]:
    return [
        Handling(t=event["t"], consumer=event["consumer"], id=event["id"], handle=event["handle"])
        for event in events
        if event["op"] == op
    ]


def _settled(events: Sequence[Event]) -> Iterable[Settled]:
    answers: dict[tuple[str, int, int], Mapping[str, Any]] = {}
    lives: dict[str, int] = {}
    for event in events:
        if event["op"] == "start":
            lives[event["proc"]] = event["life"]
        if event["op"] == "settle" and event["type"] == "ok":
            answers[event["proc"], lives.get(event["proc"], 0), event["call"]] = event
    for event in events:
        if event["op"] == "start":
            lives[event["proc"]] = event["life"]
        if event["op"] == "settle" and event["type"] == "invoke":
            answer = answers.get((event["proc"], lives.get(event["proc"], 0), event["call"]))
            lost = None if answer is None else {tuple(one) for one in answer["lost"]}
            for identity, token, outcome in event["settlements"]:
                yield Settled(
                    t=event["t"] if answer is None else answer["t"],
                    worker=event["proc"],
                    id=identity,
                    token=token,
                    outcome=outcome,
                    accepted=None if lost is None else (identity, token) not in lost,
                    asked=event["t"],
                )
