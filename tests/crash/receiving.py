"""The rows of the crash matrix about consumers: reliability section 3.1, from the delivery to its acknowledgement.

The steps of that section, and the points between which they lie: (a) deliver, ``deliver.after``, ``tx.begin``; (b)
BEGIN, ``tx.begun``; (c) inbox, ``handle.before``; (d) handler, ``handle.after``; (e) outbox, ``commit.before``; (f) to
(h) COMMIT, ``commit.after``, ``ack.before``; (i) acknowledgement, ``ack.after``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .cases import POSTGRES, WIRED, Receiving, fails
from .worker import Arm

__all__ = ["RECEIVING"]

ROWS: Final[Mapping[str, str]] = {
    "deliver.after": "a-b",
    "tx.begin": "a-b",
    "tx.begun": "c-e",
    "handle.before": "c-e",
    "handle.after": "c-e",
    "commit.before": "f, not applied",
    "commit.after": "h-i",
    "ack.before": "h-i",
    "ack.after": "after i",
}
#: Where the handler has run, where its transaction is stored, and where the broker knows it.
RUN: Final = ("handle.after", "commit.before", "commit.after", "ack.before", "ack.after")
STORED: Final = ("commit.after", "ack.before", "ack.after")
ACKED: Final = "ack.after"
#: Where a transaction is open.
INSIDE: Final = ("tx.begun", "handle.before", "handle.after", "commit.before")
#: A database that is away is no fault of the message, which spends no attempt.
AWAY: Final = ("Release", "Delivered")
CANCELLED: Final = "cancel / timeout in c-g"
SERIAL: Final = "SQLite's one writer lets nobody else begin"
NO_CODE: Final = "SQLite has one writer and so no deadlocks"
NO_SQL: Final = "SQLite has no statement that fails like this"


def _at(point: str, arm: Arm, **more: Any) -> Receiving:  # noqa: ANN401
    """A case whose message comes again unless it was acknowledged, and is known then if it was stored."""
    seen: dict[str, Any] = {
        "row": ROWS[point],
        "arms": (arm,),
        "stored": point in STORED,
        "runs": (point in RUN) + (point not in STORED),
        "duplicates": int(point in STORED and point != ACKED),
    }
    return Receiving(**(seen | more))


def _raised(point: str) -> Receiving:
    arm = fails(point, what="RuntimeError")
    match point:
        case "deliver.after":  # the subscriber itself failed, which ends the consumer
            return _at(point, arm, sequel="ended")
        case "ack.before":
            return _at(point, arm, sequel="alone", unheard=True, ack_fails=True)
        case "ack.after":
            return _at(point, arm, sequel="alone", ack_fails=True)
        case _:
            return _at(point, arm, sequel="alone", told=("Retry", "Delivered"), errors=("RuntimeError",))


def _cancelled(point: str) -> Receiving:
    """The whole consumer is cancelled in the middle of a call."""
    told = ("Delivered",) if point in {"deliver.after", "ack.before", "ack.after"} else ("Release", "Delivered")
    row = CANCELLED if point in INSIDE else ROWS[point]
    return _at(point, Arm(point, "cancel_amid"), row=row, sequel="ended", told=told)


def _interrupted(point: str) -> Receiving:
    """The task of one message is cancelled by somebody else, which is a failure, and the consumer goes on."""
    is_told = not point.startswith("ack")
    return _at(
        point,
        Arm(point, "cancel_here"),
        row=CANCELLED if point in INSIDE else ROWS[point],
        sequel="alone",
        told=("Retry", "Delivered") if is_told else ("Delivered",),
        errors=("CancelledError",) if is_told else (),
        unheard=point == "ack.before",
        ack_fails=not is_told,
        new_session=point in INSIDE,
    )


def _late(point: str) -> Receiving:
    """A handler takes longer than it may."""
    return _at(
        point,
        Arm(point, "linger"),
        row=CANCELLED,
        sequel="alone",
        told=("Retry", "Delivered"),
        errors=("TimeoutError",),
        new_session=True,
        handle_timeout=1,
    )


def _patient(point: str) -> Receiving:
    """A message waits for its transaction, or for COMMIT, longer than a handler may take: that is no failure."""
    return Receiving(
        row=CANCELLED if point in INSIDE else ROWS[point],
        arms=(Arm(point, "wait"),),
        sequel="alone",
        stored=True,
        runs=1,
        handle_timeout=1,
    )


def _stalled(point: str, **more: Any) -> Receiving:  # noqa: ANN401
    """The broker takes a consumer for gone that only stands still; whoever comes second finds the mark."""
    options: dict[str, Any] = {"sequel": "stalled", "runs": 1, "duplicates": 1, "ack_fails": True}
    return _at(point, Arm(point, "hold"), **(options | more))


def _shot(point: str) -> Receiving:
    """A second consumer waits in c when the first dies, and then gets the row."""
    return _at(point, Arm(point, "hold"), sequel="shot", waits=True)


def _in_the_way(code: str, times: int, stores: Sequence[str], **more: Any) -> Receiving:  # noqa: ANN401
    return Receiving(
        row="40001 / 40P01 / 1213 / 1205 in c-f",
        arms=[Arm("handle.after", "conflict", nth, code) for nth in range(1, times + 1)],
        sequel="alone",
        stores=stores,
        why_not=NO_CODE,
        runs=times + 1,
        **more,
    )


def _last(case: Receiving) -> Receiving:
    """The same in an inbox that marks a message after its handler."""
    parts: dict[str, Any] = {name: getattr(case, name) for name in Receiving.__dataclass_fields__}
    return Receiving(**(parts | {"mode": "optimistic"}))


def _poison(*arms: Arm, **more: Any) -> Receiving:  # noqa: ANN401
    return Receiving(row="dead letter, then ack", arms=arms, is_poison=True, **({"runs": 2} | more))


RECEIVING: Final[Sequence[Receiving]] = (
    *[_at(point, Arm(point, "kill"), sequel="dead") for point in ROWS],
    *[_raised(point) for point in ROWS],
    *[_cancelled(point) for point in ROWS],
    *[_interrupted(point) for point in ROWS if point != "deliver.after"],
    *[_late(point) for point in ("handle.before", "handle.after")],
    *[_patient(point) for point in ("tx.begin", "tx.begun", "commit.before", "commit.after")],
    # -- stalls past the redelivery
    _stalled("deliver.after"),
    _stalled("tx.begin"),
    _stalled("tx.begun", stores=("mariadb",)),
    # The mark travels with BEGIN on PostgreSQL, and SQLite has one writer.
    _stalled("tx.begun", stores=("postgres", "sqlite"), waits=True),
    *[_stalled(point, waits=True) for point in ("handle.before", "handle.after", "commit.before")],
    *[_stalled(point) for point in ("commit.after", "ack.before")],
    *[_shot(point) for point in ("handle.before", "handle.after", "commit.before")],
    _stalled(
        "handle.after",
        row="c waits > lock_timeout",
        waits=True,
        is_impatient=True,
        told=AWAY,
    ),
    # -- the network
    *[_at(point, Arm(point, "cut"), sequel="alone", stores=WIRED, told=AWAY, errors=None) for point in INSIDE],
    *[
        _at(point, Arm(point, "cut"), sequel="alone", stores=WIRED, runs=1, duplicates=0)
        for point in ("commit.after", "ack.before")
    ],
    *[
        _at(point, Arm(point, "lose", 1, table), row="c-e", sequel="alone", stores=WIRED, told=AWAY, errors=None)
        for point, table in (("tx.begin", "postroom_inbox"), ("handle.after", "postroom_outbox"))
    ],
    _at(
        "commit.before",
        Arm("commit.before", "lose_request", 1, "COMMIT"),
        sequel="alone",
        stores=WIRED,
        told=AWAY,
        errors=("CommitUnknownError",),
    ),
    *[
        Receiving(
            row="g, reply lost",
            arms=[Arm("commit.before", "lose", 1, "COMMIT"), *more],
            sequel="dead" if more else "alone",
            stores=WIRED,
            stored=True,
            told=("Delivered",) if more else AWAY,
            duplicates=1,
            errors=("CommitUnknownError",),
        )
        for more in ((), (Arm("nack.before", "kill"),))
    ],
    # -- what the database says
    Receiving(
        row="c returns 0 rows",
        arms=[Arm("handle.before", "note")],
        sequel="alone",
        entries=2,
        told=("Delivered", "Delivered"),
        duplicates=1,
    ),
    *[_in_the_way(code, 3, POSTGRES) for code in ("40001", "40P01")],
    *[_in_the_way(code, 3, ("mariadb",)) for code in ("1213", "1205")],
    *[
        _in_the_way(code, 4, stores, told=("Retry", "Delivered"), errors=("StoreContentionError",))
        for code, stores in (("40001", POSTGRES), ("1213", ("mariadb",)))
    ],
    *[
        Receiving(
            row="handler swallows a DB error (PG)",
            arms=[Arm("handle.after", "swallow")],
            sequel="alone",
            stores=POSTGRES,
            told=("Retry", "Delivered"),
            runs=2,
            errors=("TransactionAbortedError",),
            is_quiet=is_quiet,
            is_cold=is_cold,
        )
        for is_quiet, is_cold in ((False, False), (True, False), (True, True))
    ],
    Receiving(
        row="handler swallows a DB error, which elsewhere fails alone",
        arms=[Arm("handle.after", "swallow")],
        sequel="alone",
        stores=("mariadb", "sqlite"),
    ),
    Receiving(
        row="handler returns, deferred constraint fails at COMMIT",
        arms=[Arm("handle.after", "defer")],
        sequel="alone",
        stores=POSTGRES,
        why_not=NO_SQL,
        told=("Retry", "Delivered"),
        runs=2,
        errors=("UniqueViolationError",),
    ),
    # -- the message that failed is given back
    *[
        Receiving(row="c-e", arms=[fails("handle.after", what="RuntimeError"), arm], runs=2, **more)
        for arm, more in (
            (Arm("nack.before", "kill"), {"sequel": "dead", "errors": ("RuntimeError",)}),
            (
                Arm("nack.after", "kill"),
                {"sequel": "dead", "told": ("Retry", "Delivered"), "errors": ("RuntimeError",)},
            ),
            (
                fails("nack.before", what="RuntimeError"),
                {"sequel": "alone", "unheard": True, "ack_fails": True, "errors": ("RuntimeError",)},
            ),
        )
    ],
    # -- the inbox that marks last
    *[_last(_at(point, Arm(point, "kill"), sequel="dead")) for point in (*INSIDE, "commit.after")],
    _last(_stalled("commit.before", waits=True, runs=2, stores=WIRED)),
    _last(_stalled("commit.before", waits=True, stores=("sqlite",))),
    _last(_stalled("handle.after", runs=2, stores=WIRED, why_not=SERIAL)),
    # -- dead letters
    _poison(Arm("bury.before", "kill"), sequel="dead"),
    _poison(Arm("bury.after", "kill"), sequel="dead"),
    _poison(fails("bury.before"), sequel="alone", told=AWAY, errors=("StoreUnavailableError",)),
    _poison(fails("bury.after"), sequel="alone", told=AWAY, errors=("StoreUnavailableError",)),
)
