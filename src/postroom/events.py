"""What happened, as values: the one source of logs and metrics. None of them holds a payload."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import ClassVar, TypeAlias
from uuid import UUID

__all__ = [
    "AckFailed",
    "BreakerClosed",
    "BreakerOpened",
    "Claimed",
    "ClockJumpedBack",
    "ConsumerStarted",
    "ConsumerStopped",
    "DeadLettered",
    "Died",
    "DuplicateSkipped",
    "Event",
    "Handled",
    "HandlingFailed",
    "InboxPurged",
    "LeaseLost",
    "Listener",
    "LoopStalled",
    "MessagesDelivered",
    "MessagesReleased",
    "Purged",
    "Repaired",
    "Retried",
    "Started",
    "Stopped",
    "StoreFailed",
    "StoreRecovered",
    "Swept",
    "guarded",
    "log_event",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; the class says what."""

    level: ClassVar[int] = logging.DEBUG
    text: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Started(Event):
    """A dispatcher runs."""

    level = logging.INFO
    text = "dispatcher started"
    worker: UUID
    namespace: str


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """A dispatcher ended; ``released`` of its claims were given back."""

    level = logging.INFO
    text = "dispatcher stopped"
    worker: UUID
    released: int


@dataclass(frozen=True, slots=True)
class Claimed(Event):
    """Messages were leased."""

    text = "messages claimed"
    count: int


@dataclass(frozen=True, slots=True)
class MessagesDelivered(Event):
    """The broker confirmed messages, and the store knows it."""

    text = "messages delivered"
    count: int


@dataclass(frozen=True, slots=True)
class MessagesReleased(Event):
    """Messages were given back without an attempt."""

    text = "messages released"
    count: int


@dataclass(frozen=True, slots=True)
class Retried(Event):
    """A delivery failed and will be tried again."""

    level = logging.WARNING
    text = "delivery failed, will be tried again"
    message_id: UUID
    topic: str
    attempt: int
    delay: timedelta
    error: str


@dataclass(frozen=True, slots=True)
class Died(Event):
    """A message became dead: somebody must look at it."""

    level = logging.ERROR
    text = "message is dead"
    message_id: UUID
    topic: str
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class LeaseLost(Event):
    """Somebody else holds a claim now; what this dispatcher found out about it was not recorded."""

    level = logging.WARNING
    text = "lease lost"
    message_id: UUID
    topic: str
    token: int


@dataclass(frozen=True, slots=True)
class BreakerOpened(Event):
    """A destination is down; its messages wait. ``topic`` is None for the whole broker."""

    level = logging.WARNING
    text = "destination is down, waiting"
    topic: str | None
    error: str


@dataclass(frozen=True, slots=True)
class BreakerClosed(Event):
    """A destination works again."""

    level = logging.INFO
    text = "destination works again"
    topic: str | None


@dataclass(frozen=True, slots=True)
class StoreFailed(Event):
    """A call to the store failed and will be made again."""

    level = logging.WARNING
    text = "store call failed, will be tried again"
    operation: str
    error: str


@dataclass(frozen=True, slots=True)
class StoreRecovered(Event):
    """The store answers again."""

    level = logging.INFO
    text = "store answers again"
    operation: str


@dataclass(frozen=True, slots=True)
class LoopStalled(Event):
    """The event loop stood still, so leases may have run out: something blocks it."""

    level = logging.WARNING
    text = "event loop was blocked"
    duration: timedelta


@dataclass(frozen=True, slots=True)
class ClockJumpedBack(Event):
    """The store's clock was put back, so messages that were due, and leases, wait for as long again."""

    level = logging.WARNING
    text = "the store's clock was put back: keys with a pending message wait until it has caught up"
    by: timedelta


@dataclass(frozen=True, slots=True)
class Swept(Event):
    """Messages without an attempt left were made dead."""

    level = logging.ERROR
    text = "messages ran out of attempts and are dead"
    count: int


@dataclass(frozen=True, slots=True)
class Repaired(Event):
    """A store found indexes that did not agree with its messages, and mended them; that should never happen."""

    level = logging.ERROR
    text = "the store mended indexes that a failed script had left behind"
    count: int


@dataclass(frozen=True, slots=True)
class Purged(Event):
    """Delivered messages past their retention were deleted."""

    text = "delivered messages purged"
    count: int


@dataclass(frozen=True, slots=True)
class ConsumerStarted(Event):
    """A consumer runs."""

    level = logging.INFO
    text = "consumer started"
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConsumerStopped(Event):
    """A consumer ended; ``released`` of its deliveries were given back."""

    level = logging.INFO
    text = "consumer stopped"
    released: int


@dataclass(frozen=True, slots=True)
class Handled(Event):
    """A handler ended well."""

    text = "message handled"
    message_id: UUID
    type: str
    duration: timedelta


@dataclass(frozen=True, slots=True)
class HandlingFailed(Event):
    """A handler failed, and the message will come again."""

    level = logging.WARNING
    text = "handling failed, the message will come again"
    message_id: UUID
    type: str
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class DuplicateSkipped(Event):
    """A message that its consumer has handled before came again, and was acknowledged."""

    text = "duplicate skipped"
    consumer: str
    message_id: UUID
    type: str


@dataclass(frozen=True, slots=True)
class DeadLettered(Event):
    """A message was put aside for good: somebody must look at it."""

    level = logging.ERROR
    text = "message is in the dead letters"
    message_id: UUID
    type: str
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class AckFailed(Event):
    """What became of a message could not be told to the broker: it will come again."""

    level = logging.WARNING
    text = "acknowledgement failed, the message will come again"
    message_id: UUID
    type: str
    error: str


@dataclass(frozen=True, slots=True)
class InboxPurged(Event):
    """Inbox rows past their retention were deleted."""

    text = "inbox rows purged"
    consumer: str
    count: int


@dataclass(frozen=True, slots=True)
class PartlyApplied(Event):
    """A transaction was applied in part, which only a person can put right; its message is in quarantine."""

    level = logging.ERROR
    text = "a transaction was applied in part, the message is in quarantine"
    mark: str
    error: str


#: Is told every event, in the event loop: it must return quickly.
Listener: TypeAlias = Callable[[Event], None]

_logger = logging.getLogger("postroom")


def log_event(event: Event) -> None:
    """Write an event to the log ``postroom``, its fields as extra attributes."""
    if _logger.isEnabledFor(event.level):
        _logger.log(event.level, event.text, extra={f"postroom_{name}": value for name, value in asdict(event).items()})


def guarded(listener: Listener) -> Listener:
    """Return a listener that never raises: delivery must not depend on who watches it."""

    def tell(event: Event) -> None:
        try:
            listener(event)
        except Exception:
            _logger.exception("a listener failed")

    return tell
