"""The table of the crash matrix: every row of reliability section 3.5, and what must be seen after it.

Those of section 3.1 are in `tests.crash.producing` and `tests.crash.receiving`. A case names the row that it
asserts in the row's own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .cases import ALL, POSTGRES, TRANSACTIONS, WIRED, Case, Dispatching, Sequel, State, fails
from .producing import PRODUCING
from .receiving import RECEIVING
from .worker import Arm

__all__ = ["CASES"]

ONE_WRITER: Final = "a transaction that stands still holds SQLite's one writer, so nobody can claim"

WAITING: Final = State("pending", 0, 0)
LEASED: Final = State("processing", 1, 1)
RELEASED: Final = State("pending", 1, 0)
DEAD: Final = State("dead", 1, 1)
#: Delivered by the first claim, by the second, and by a second after the first gave its attempt back.
FIRST: Final = State("delivered", 1, 1)
SECOND: Final = State("delivered", 2, 2)
AGAIN: Final = State("delivered", 2, 1)
#: Delivered in the end, however often it was claimed, with one attempt or two.
ONE: Final = State("delivered", None, 1)
TWO: Final = State("delivered", None, 2)


#: For a dispatcher that is gone before its lease ends, which the case ends then.
_PATIENT: Final = {"lease": 60, "publish_timeout": 30}


def _killed(
    row: str, point: str, nth: int = 1, *, then: State = SECOND, crash: State | None = LEASED, **more: object
) -> Case:
    options = {**_PATIENT, **more}
    return Dispatching(row=row, arms=(Arm(point, "kill", nth),), sequel="dead", crash=crash, final=then, **options)  # type: ignore[arg-type]


def _alone(row: str, *arms: Arm, then: State = FIRST, **more: object) -> Case:
    options = {"lanes": ("keyed",), **more}
    return Dispatching(row=row, arms=arms, sequel="alone", final=then, **options)  # type: ignore[arg-type]


def _kept(row: str, *arms: Arm, **more: object) -> Case:
    """A dispatcher that keeps what it holds, however long it takes until the database hears of it."""
    return _alone(row, *arms, lease=10, publish_timeout=8, **more)  # type: ignore[arg-type]


def _late(arm: Arm, **more: object) -> Case:
    """A pause past the lease, in which the dispatcher does not take its own messages again either."""
    return _alone("pause past lease, nobody reclaimed", arm, Arm("claim.before", "linger", 2), **more)  # type: ignore[arg-type]


def _stalled(row: str, *arms: Arm, then: State = SECOND, crash: State = LEASED, **more: object) -> Case:
    options = {"received": (2,), "lost": "all", **more}
    return Dispatching(row=row, arms=arms, sequel="stalled", crash=crash, final=then, **options)  # type: ignore[arg-type]


def _fenced(
    *arms: Arm,
    row: str = "pause past lease, reclaimed",
    after: str = "settle",
    received: Sequence[int] = (2,),
    **more: object,
) -> Case:
    """A stall that ends while another dispatcher has the messages in its hands."""
    arms = (*arms, Arm(f"{after}.after", "note"))
    return _stalled(row, *arms, received=received, meanwhile=State("processing", 2, 2), in_flight=True, **more)  # type: ignore[arg-type]


def _ended(row: str, *arms: Arm, then: State = AGAIN, crash: State = RELEASED, **more: object) -> Case:
    options = {"lanes": ("keyed",), **_PATIENT, **more}
    return Dispatching(row=row, arms=arms, sequel="ended", crash=crash, final=then, **options)  # type: ignore[arg-type]


def _renewing(*arms: Arm, stores: Sequence[str] = ALL) -> Case:
    """A publish that takes until the lease was renewed."""
    slow = Arm("publish.sent", "until_renewed")
    return _alone("lease renewed", slow, *arms, publish_timeout=5, lease=9, stores=stores)


def _killed_renewing(point: str) -> Case:
    return Dispatching(
        row="publish sent, no confirm",
        arms=[Arm("publish.sent", "until_renewed"), Arm(point, "kill")],
        sequel="dead",
        crash=LEASED,
        final=SECOND,
        received=[2],
        publish_timeout=5,
        lease=9,
    )


def _killed_stopping(point: str, *, crash: State = LEASED, then: State = SECOND) -> Case:
    arms = [Arm("publish.before", "stop_amid"), Arm(point, "kill")]
    return Dispatching(row="graceful stop", arms=arms, sequel="dead", crash=crash, final=then, **_PATIENT)  # type: ignore[arg-type]


_PURGES: Final[Sequence[tuple[Arm, Sequel, State | None]]] = (
    (Arm("purge.before", "kill"), "dead", FIRST),
    (Arm("purge.statement", "kill"), "dead", FIRST),
    (Arm("purge.applied", "kill"), "dead", None),
    (Arm("purge.after", "kill"), "dead", None),
    (fails("purge.after"), "alone", None),
)
DISPATCHING: Final[Sequence[Case]] = (
    # -- claim
    _killed("claim not applied", "claim.before", crash=WAITING, then=FIRST),
    _killed("claim not applied", "claim.statement", crash=WAITING, then=FIRST),
    _killed("claim not applied", "claim.statement", 2, crash=WAITING, then=FIRST, stores=TRANSACTIONS),
    _killed("claim not applied", "claim.applied", crash=WAITING, then=FIRST, stores=TRANSACTIONS),
    _alone("claim not applied", fails("claim.before"), tells=["StoreFailed", "StoreRecovered"]),
    _alone("claim not applied", fails("claim.statement"), tells=["StoreFailed"]),
    _alone("claim not applied", fails("claim.applied"), tells=["StoreFailed"], stores=TRANSACTIONS),
    _alone("claim not applied", Arm("claim.before", "cut"), tells=["StoreFailed"], stores=WIRED),
    _alone("claim not applied", Arm("claim.statement", "cut"), tells=["StoreFailed"], stores=WIRED),
    _alone("claim not applied", Arm("claim.applied", "cut"), tells=["StoreFailed"], stores=("mariadb",)),
    _stalled("claim not applied", Arm("claim.before", "hold"), crash=WAITING, then=FIRST, received=[1], lost="none"),
    _killed("claim applied, reply lost", "claim.applied", stores=POSTGRES),
    _alone("claim applied, reply lost", fails("claim.applied"), then=SECOND, stores=POSTGRES),
    _alone("claim applied, reply lost", fails("claim.after"), then=SECOND, tells=["StoreFailed"]),
    # Messages without a key are asked for first.
    _alone(
        "claim applied, reply lost",
        Arm("claim.statement", "lose", 1, "worker"),
        then=SECOND,
        stores=POSTGRES,
        lanes=["loose"],
    ),
    _alone(
        "claim applied, reply lost",
        Arm("claim.statement", "lose", 2, "worker"),
        then=SECOND,
        stores=POSTGRES,
        lanes=["keyed"],
    ),
    _alone("claim applied, reply lost", Arm("claim.applied", "lose", 1, "COMMIT"), then=SECOND, stores=("mariadb",)),
    _killed("claim → publish", "claim.after"),
    _killed("claim → publish", "publish.before"),
    # -- publish
    _killed("publish sent, no confirm", "publish.sent", received=[2]),
    _alone("publish sent, no confirm", fails("publish.sent", 1, "PublishUnknownError"), then=ONE, received=[2]),
    _alone("publish sent, no confirm", Arm("publish.sent", "wait"), then=ONE, received=[2], tells=["BreakerOpened"]),
    _alone("publish sent, no confirm", Arm("publish.before", "wait"), then=ONE, tells=["BreakerOpened"]),
    _alone(
        "publish sent, no confirm",
        fails("publish.sent", 1, "PublishUnknownError"),
        each=True,
        then=TWO,
        received=[2],
        others=ONE,
        tells=["Retried"],
    ),
    _alone(
        "publish fails", fails("publish.before", 1, "RuntimeError"), then=SECOND, followers=AGAIN, tells=["Retried"]
    ),
    _alone("publish fails", fails("publish.before", 1, "RuntimeError"), each=True, then=SECOND, others=ONE),
    _alone(
        "publish fails",
        fails("publish.confirmed", 1, "RuntimeError"),
        then=SECOND,
        followers=AGAIN,
        received=[2],
    ),
    _alone(
        "broker down",
        *[fails("publish.before", nth, "BrokerUnavailableError") for nth in (1, 2, 3)],
        then=ONE,
        tells=["BreakerOpened", "BreakerClosed"],
    ),
    _alone(
        "permanent error",
        fails("publish.before", 1, "RejectError"),
        each=True,
        on_dead="skip",
        then=DEAD,
        received=[0],
        others=ONE,
        tells=["Died"],
    ),
    _alone(
        "permanent error",
        fails("publish.before", 1, "RuntimeError"),
        each=True,
        max_attempts=1,
        on_dead="skip",
        then=DEAD,
        received=[0],
        others=ONE,
        tells=["Died"],
    ),
    # -- settle
    _killed("confirm → ack sent", "publish.confirmed", received=[2]),
    _killed("confirm → ack sent", "settle.before", received=[2]),
    _killed("confirm → ack sent", "settle.statement", received=[2]),
    _killed("confirm → ack sent", "settle.applied", received=[2], stores=TRANSACTIONS),
    _killed("ack applied, reply lost", "settle.applied", crash=FIRST, then=FIRST, stores=POSTGRES),
    _killed("ack applied, reply lost", "settle.after", crash=FIRST, then=FIRST),
    _kept("ack applied, reply lost", fails("settle.after"), tells=["StoreFailed", "MessagesDelivered"]),
    _kept("ack applied, reply lost", fails("settle.applied"), tells=["StoreFailed"]),
    _kept("ack applied, reply lost", Arm("settle.statement", "lose", 1, "message"), stores=POSTGRES),
    _kept("ack applied, reply lost", Arm("settle.applied", "lose", 1, "COMMIT"), stores=("mariadb",)),
    Dispatching(
        row="ack applied, reply lost, nothing kept",
        arms=[fails("settle.after")],
        sequel="alone",
        final=None,
        keep=False,
    ),
    _alone(
        "nack applied, reply lost",
        fails("publish.before", 1, "RuntimeError"),
        fails("settle.after"),
        then=SECOND,
        followers=AGAIN,
        lost="any",
    ),
    _kept("DB down between publish and ack", *[fails("settle.before", nth) for nth in (1, 2, 3)]),
    _kept("DB down between publish and ack", fails("settle.statement"), tells=["StoreFailed"]),
    _kept("DB down between publish and ack", Arm("publish.confirmed", "cut"), tells=["StoreFailed"], stores=WIRED),
    _kept("DB down between publish and ack", Arm("settle.statement", "cut"), tells=["StoreFailed"], stores=WIRED),
    _kept("DB down between publish and ack", Arm("settle.applied", "cut"), stores=("mariadb",)),
    # -- pauses
    _late(Arm("publish.before", "block"), tells=["LoopStalled"]),
    _late(Arm("publish.confirmed", "block"), tells=["LoopStalled"]),
    _late(Arm("settle.before", "block")),
    _late(Arm("settle.before", "wait")),
    _late(Arm("settle.statement", "block")),
    _alone(
        "pause past lease, nobody reclaimed",
        Arm("claim.after", "block"),
        Arm("claim.before", "until_released", 2),
        then=AGAIN,
    ),
    # It takes what it sees, and it cannot see that its own confirm is on its way.
    _alone("pause past lease, reclaimed", Arm("settle.before", "wait"), then=SECOND, received=[2], lost="all"),
    _fenced(Arm("claim.after", "hold"), after="release", received=[1]),
    _fenced(Arm("claim.after", "linger"), after="release", received=[1]),
    _fenced(Arm("publish.before", "hold")),
    _fenced(Arm("publish.sent", "hold")),
    _fenced(Arm("publish.confirmed", "hold")),
    _fenced(Arm("settle.before", "hold")),
    _fenced(Arm("settle.before", "linger"), Arm("claim.before", "linger", 2)),
    _fenced(Arm("settle.statement", "hold"), stores=WIRED, why_not=ONE_WRITER),
    _fenced(
        Arm("publish.before", "hold"),
        Arm("publish.sent", "until_renewed"),
        Arm("extend.after", "note"),
        row="stale renewal",
        after="release",
    ),
    _fenced(Arm("publish.before", "hold"), fails("publish.sent", 1, "RuntimeError"), row="stale nack"),
    _fenced(
        Arm("publish.before", "hold"),
        fails("publish.sent", 1, "BrokerUnavailableError"),
        row="stale nack",
        after="release",
    ),
    _stalled("pause past lease, reclaimed", Arm("settle.before", "hold")),
    _stalled(
        "pause past lease, reclaimed", Arm("publish.before", "hold"), each=True, others=SECOND, others_received=[1]
    ),
    _stalled("ack applied", Arm("settle.after", "hold"), crash=FIRST, then=FIRST, received=[1], lost="none"),
    # -- the last attempt
    _killed("last attempt crashed", "publish.before", max_attempts=1, then=DEAD, received=[0]),
    _killed("last attempt crashed", "publish.sent", max_attempts=1, then=DEAD),
    _stalled(
        "last attempt crashed, late ack",
        Arm("publish.confirmed", "hold"),
        max_attempts=1,
        meanwhile=DEAD,
        then=FIRST,
        received=[1],
        lost="none",
    ),
    _stalled(
        "last attempt crashed, stale nack",
        Arm("publish.before", "hold"),
        fails("publish.sent", 1, "RuntimeError"),
        max_attempts=1,
        then=DEAD,
        received=[1],
        lost="any",
    ),
    _killed("last attempt crashed", "sweep.before", before="spent", max_attempts=1, then=DEAD, received=[0]),
    _killed("last attempt crashed", "sweep.statement", before="spent", max_attempts=1, then=DEAD, received=[0]),
    _killed(
        "last attempt crashed",
        "sweep.applied",
        before="spent",
        max_attempts=1,
        then=DEAD,
        received=[0],
        stores=TRANSACTIONS,
    ),
    _killed("last attempt crashed", "sweep.after", before="spent", max_attempts=1, crash=None, then=DEAD, received=[0]),
    _alone("last attempt crashed", fails("sweep.before"), before="spent", max_attempts=1, then=DEAD, received=[0]),
    _alone("last attempt crashed", fails("sweep.after"), before="spent", max_attempts=1, then=DEAD, received=[0]),
    _alone(
        "last attempt crashed",
        Arm("sweep.statement", "cut"),
        before="spent",
        max_attempts=1,
        then=DEAD,
        received=[0],
        stores=WIRED,
    ),
    # -- renewal
    _killed_renewing("extend.before"),
    _killed_renewing("extend.after"),
    _renewing(fails("extend.before")),
    _renewing(fails("extend.after")),
    _renewing(Arm("extend.before", "cut"), stores=WIRED),
    _renewing(Arm("extend.statement", "lose", 1, "message"), stores=POSTGRES),
    _renewing(Arm("extend.applied", "lose", 1, "COMMIT"), stores=("mariadb",)),
    # -- stop
    _killed_stopping("release.before"),
    _killed_stopping("release.statement"),
    _killed_stopping("release.after", crash=RELEASED, then=AGAIN),
    _ended("graceful stop", Arm("publish.before", "stop_amid")),
    _ended("graceful stop", Arm("publish.sent", "stop_amid"), received=[2]),
    _ended("graceful stop", Arm("publish.before", "stop_amid"), fails("release.before")),
    _ended("graceful stop", Arm("publish.before", "stop_amid"), fails("release.after")),
    _ended("graceful stop", Arm("publish.before", "stop_amid"), Arm("release.before", "cut"), stores=WIRED),
    _ended(
        "graceful stop",
        Arm("publish.before", "stop_amid"),
        Arm("release.statement", "lose", 1, "message"),
        stores=POSTGRES,
    ),
    _ended(
        "graceful stop",
        Arm("publish.before", "stop_amid"),
        Arm("release.applied", "lose", 1, "COMMIT"),
        stores=("mariadb",),
    ),
    _ended("graceful stop", Arm("claim.before", "cancel")),
    _ended("graceful stop", Arm("claim.after", "cancel")),
    _ended("graceful stop", Arm("publish.before", "cancel_amid")),
    _ended("graceful stop", Arm("publish.sent", "cancel_amid"), received=[2]),
    _ended("graceful stop", Arm("publish.confirmed", "cancel"), crash=FIRST, then=FIRST),
    _ended("graceful stop", Arm("settle.before", "cancel"), crash=FIRST, then=FIRST),
    _ended("graceful stop", Arm("settle.statement", "cancel"), crash=FIRST, then=FIRST),
    # -- cleanup
    *[
        Dispatching(
            row="cleanup deletes what was delivered, and nothing else",
            arms=[arm],
            sequel=sequel,
            before="delivered",
            crash=crash,
            final=None,
            received=[0],
            keep=False,
            cleanup_interval=0.05,
        )
        for arm, sequel, crash in _PURGES
    ],
)

CASES: Final[Sequence[Case]] = (*PRODUCING, *DISPATCHING, *RECEIVING)
