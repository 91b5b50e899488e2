"""What happened, as values: the one source of logs and metrics. None of them holds a payload or a header."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar, Final
from uuid import UUID

from .event import Ends, Event, Listener
from .logs import log_event
from .text import describe

__all__ = [
    "AckFailed",
    "BackoffFailed",
    "BreakerClosed",
    "BreakerOpened",
    "CallbackFailed",
    "Claimed",
    "ClockJumpedBack",
    "ConsumerFailed",
    "ConsumerStarted",
    "ConsumerStopped",
    "DeadLettered",
    "Died",
    "DispatcherFailed",
    "DueElsewhere",
    "DuplicateAdded",
    "DuplicateSkipped",
    "Event",
    "Handled",
    "HandlingFailed",
    "Ignored",
    "InboxPurged",
    "LeaseLost",
    "Listener",
    "ListenerFailed",
    "LoopStalled",
    "MessagesDelivered",
    "MessagesReleased",
    "NamingFailed",
    "PartlyApplied",
    "PublishFailed",
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

#: How many dead messages of one kind are logged one by one within a minute.
DEAD_BURST: Final = 20


@dataclass(frozen=True, slots=True)
class Started(Event):
    """A dispatcher runs."""

    level = logging.INFO
    text = "dispatcher started: namespace=%(namespace)s worker=%(worker)s"
    ends: ClassVar[Ends] = "everything"
    worker: UUID
    namespace: str


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """A dispatcher ended; ``released`` of its claims were given back."""

    level = logging.INFO
    text = "dispatcher stopped: released=%(released)s worker=%(worker)s"
    ends: ClassVar[Ends] = "everything"
    worker: UUID
    released: int


@dataclass(frozen=True, slots=True)
class DispatcherFailed(Event):
    """A dispatcher ends by an error that no retry can mend, which `Dispatcher.run` raises."""

    level = logging.ERROR
    text = "dispatcher failed: %(error)s"
    worker: UUID
    error: str
    exception: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Claimed(Event):
    """Messages were leased."""

    text = "messages claimed: %(count)s"
    count: int


@dataclass(frozen=True, slots=True)
class MessagesDelivered(Event):
    """The broker confirmed messages, and the store has recorded it."""

    text = "messages delivered: %(count)s"
    count: int


@dataclass(frozen=True, slots=True)
class MessagesReleased(Event):
    """Messages were given back without an attempt."""

    text = "messages released: %(count)s"
    count: int


@dataclass(frozen=True, slots=True)
class PublishFailed(Event):
    """A publisher raised an error, or reported that it failed; what follows from it is an event of its own.

    If a publisher of batches fails as a whole, this is reported once, for its first message.
    """

    level = logging.WARNING
    text = "delivery failed: %(subject)s: %(error)s"
    message_id: UUID
    topic: str
    key: str | None
    attempt: int
    error: str
    exception: BaseException | None = field(default=None, compare=False, repr=False)
    #: How many messages the failed call was about.
    count: int = 1
    max_attempts: int | None = None


@dataclass(frozen=True, slots=True)
class Retried(Event):
    """A delivery failed and will be retried after ``delay``."""

    text = "retrying in %(delay)s: %(subject)s: %(error)s"
    message_id: UUID
    topic: str
    attempt: int
    delay: timedelta
    error: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Died(Event):
    """A message became dead: it will not be delivered unless an operator redrives it."""

    level = logging.ERROR
    text = "%(subject)s is dead: %(error)s"
    burst: ClassVar[int | None] = DEAD_BURST
    message_id: UUID
    topic: str
    attempt: int
    error: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class LeaseLost(Event):
    """Another worker holds a claim now; what this dispatcher found out about it was not recorded."""

    level = logging.WARNING
    text = "lease lost: %(subject)s: another worker has claimed the message, so its outcome was not recorded"
    message_id: UUID
    topic: str
    token: int
    key: str | None = None


@dataclass(frozen=True, slots=True)
class BreakerOpened(Event):
    """A destination, or the part of it that the messages of one key go to, is down; its messages wait."""

    level = logging.WARNING
    text = "destination %(destination)s is down: %(error)s; its messages wait"
    destination: str
    error: str
    exception: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class BreakerClosed(Event):
    """A destination works again, or no message waits for it any more."""

    level = logging.INFO
    text = "destination %(destination)s is up again"
    ends: ClassVar[Ends] = "place"
    destination: str


@dataclass(frozen=True, slots=True)
class StoreFailed(Event):
    """A call to the store failed and will be retried after ``delay``."""

    level = logging.WARNING
    text = "store call '%(operation)s' failed (attempt %(attempt)s), retrying in %(delay)s: %(error)s"
    operation: str
    error: str
    attempt: int = 1
    delay: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True)
class StoreRecovered(Event):
    """A call to the store succeeded after it had failed."""

    level = logging.INFO
    text = "store call '%(operation)s' succeeds again"
    ends: ClassVar[Ends] = "place"
    operation: str


@dataclass(frozen=True, slots=True)
class LoopStalled(Event):
    """The event loop stood still, so leases may have run out: something blocks it."""

    level = logging.WARNING
    text = "event loop was blocked for %(duration)s, so leases may have expired; move blocking calls to a thread"
    duration: timedelta


@dataclass(frozen=True, slots=True)
class ClockJumpedBack(Event):
    """The store's clock was put back, so messages that were due, and leases, wait for as long again."""

    level = logging.WARNING
    text = "the store's clock was put back by %(by)s; messages that were due wait until it has caught up"
    by: timedelta


@dataclass(frozen=True, slots=True)
class DueElsewhere(Event):
    """A dispatcher found nothing in its namespace, while messages are due in others that no worker serves."""

    level = logging.WARNING
    text = (
        "no messages in namespace '%(namespace)s', but messages are due in others of its store: %(found)s; if this "
        "dispatcher should deliver them, add messages with store.outbox(), which has the namespace of its store"
    )
    namespace: str
    #: Each of them, with how many messages are due in it.
    found: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Swept(Event):
    """Messages without an attempt left were made dead."""

    level = logging.ERROR
    text = "messages dead because their last attempt ended without an outcome: %(count)s"
    count: int


@dataclass(frozen=True, slots=True)
class Repaired(Event):
    """A store found indexes that did not agree with its messages, and mended them; that should never happen."""

    level = logging.ERROR
    text = "index entries repaired that did not match their messages: %(count)s; check the log of the server"
    count: int


@dataclass(frozen=True, slots=True)
class Purged(Event):
    """Delivered messages past their retention were deleted."""

    text = "delivered messages purged: %(count)s"
    count: int


@dataclass(frozen=True, slots=True)
class ConsumerStarted(Event):
    """A consumer runs."""

    level = logging.INFO
    text = "consumer started: types=%(types)s"
    ends: ClassVar[Ends] = "everything"
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConsumerStopped(Event):
    """A consumer ended; ``released`` of its deliveries were given back."""

    level = logging.INFO
    text = "consumer stopped: released=%(released)s"
    ends: ClassVar[Ends] = "everything"
    released: int


@dataclass(frozen=True, slots=True)
class ConsumerFailed(Event):
    """A consumer ends by an error that is not one of a message, which `Consumer.run` raises."""

    level = logging.ERROR
    text = "consumer failed: %(error)s"
    error: str
    exception: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Handled(Event):
    """A handler returned without an error."""

    text = "handled in %(duration)s: %(subject)s"
    message_id: UUID
    type: str
    duration: timedelta
    topic: str = ""
    key: str | None = None


@dataclass(frozen=True, slots=True)
class HandlingFailed(Event):
    """A handler failed, and the message will be redelivered."""

    level = logging.WARNING
    text = "handling failed: %(subject)s: %(error)s"
    message_id: UUID
    type: str
    attempt: int
    error: str
    topic: str = ""
    key: str | None = None
    exception: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class DuplicateAdded(Event):
    """`Outbox.add` was called with a message whose id or dedupe key was there already, and stored nothing."""

    text = "duplicate not added: %(subject)s"
    #: The message that is stored; the id of the one that was not, if this transaction cannot see the other.
    message_id: UUID
    topic: str


@dataclass(frozen=True, slots=True)
class DuplicateSkipped(Event):
    """A message that its consumer has handled before was delivered again, and was acknowledged."""

    text = "duplicate skipped by consumer %(consumer)s: %(subject)s"
    consumer: str
    message_id: UUID
    type: str
    topic: str = ""
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Ignored(Event):
    """A message that no handler takes was acknowledged, as ``Router(unhandled="ignore")`` asks for."""

    text = "ignored, since no handler takes it: %(subject)s"
    message_id: UUID
    type: str
    topic: str = ""
    key: str | None = None


@dataclass(frozen=True, slots=True)
class DeadLettered(Event):
    """A consumer gave a message up: it will not be handled unless an operator redrives it."""

    level = logging.ERROR
    text = "%(subject)s was dead-lettered: %(error)s"
    burst: ClassVar[int | None] = DEAD_BURST
    message_id: UUID
    type: str
    attempt: int
    error: str
    topic: str = ""
    key: str | None = None
    exception: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class AckFailed(Event):
    """The broker did not record the outcome of a message, so it will be redelivered."""

    level = logging.WARNING
    text = "acknowledgement failed, the message will be redelivered: %(subject)s: %(error)s"
    message_id: UUID
    type: str
    error: str
    topic: str = ""
    key: str | None = None
    exception: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class InboxPurged(Event):
    """Inbox rows past their retention were deleted."""

    text = "inbox rows purged: %(count)s of consumer %(consumer)s"
    consumer: str
    count: int


@dataclass(frozen=True, slots=True)
class PartlyApplied(Event):
    """A transaction was applied in part, which only a person can put right; its message is in quarantine."""

    level = logging.ERROR
    text = "transaction %(mark)s was applied in part and its message is in quarantine: %(error)s"
    mark: str
    error: str


@dataclass(frozen=True, slots=True)
class NamingFailed(Event):
    """The function that names destinations raised an error, so the message counts to the destination of its topic."""

    level = logging.WARNING
    text = "naming the destination failed, so the topic is used: %(subject)s: %(error)s"
    message_id: UUID
    topic: str
    error: str
    key: str | None = None
    exception: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class BackoffFailed(Event):
    """A backoff function raised an error, so the default backoff decides when to retry."""

    level = logging.WARNING
    text = "the backoff function failed, so the default backoff is used: %(error)s"
    error: str
    exception: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CallbackFailed(Event):
    """A callback after a commit raised an error, such as a wake-up; it is logged, since a producer has no listener."""

    level = logging.WARNING
    text = "a callback after a commit failed; the commit stands, and polling finds its messages: %(error)s"
    error: str
    exception: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ListenerFailed(Event):
    """A listener raised an error; it is logged, whatever the listener is."""

    level = logging.WARNING
    text = "a listener failed on %(about)s: %(error)s"
    #: The name of the event that the listener was called with.
    about: str
    error: str
    exception: BaseException | None = field(default=None, compare=False, repr=False)


def guarded(listener: Listener) -> Listener:
    """Return a listener that never raises: delivery must not depend on who watches it."""

    def tell(event: Event) -> None:
        try:
            listener(event)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 -- whatever a listener raises is logged
            with suppress(Exception):  # a filter of the log may be what failed
                log_event(ListenerFailed(type(event).__name__, describe(error), error))

    return tell
