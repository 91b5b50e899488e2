"""The ports of every broker: where messages go, and where they come from."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar, cast

from .call_gate import CallGate
from .checks import check_count, check_duration, check_function
from .errors import BrokerUnavailableError, PublishUnknownError, RejectError
from .message import Message
from .store import Dead, Delivered, Outcome, Release, Retry
from .text import MAX_ERROR, describe
from .threads import Threads, is_async

if TYPE_CHECKING:
    from .delivery import Delivery

__all__ = [
    "INTERRUPTS",
    "MAX_ERROR",
    "OUTAGES",
    "Attempt",
    "Each",
    "Publisher",
    "Send",
    "Subscriber",
    "attempt",
    "attempts_of",
    "describe",
    "is_asked_for",
    "is_cancelled",
    "overdue",
    "runs",
    "why_not",
]

T = TypeVar("T")

#: Delivers one message, async or plain: to return is success, to raise is failure, to return an `Outcome` is to choose.
Send: TypeAlias = Callable[[Message], object]

#: What says that a destination is down.
OUTAGES = (BrokerUnavailableError, ConnectionRefusedError)
#: What ends a dispatcher if a publisher raises it.
INTERRUPTS = (KeyboardInterrupt, SystemExit)
LINGERING = "earlier calls have not returned yet; set a timeout in the plain publisher"


class Publisher(Protocol):
    """Takes batches of messages to a destination."""

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        """Deliver a batch and say of each message, in the same order, what became of it.

        `Delivered` means that the destination confirmed it in the strongest way it can. `Release` means that the
        destination is down. None means that nothing is known: the message was not sent, or no answer came.
        Messages of one key stand in order: once one fails, later ones of its key must not be sent.
        Raise `BrokerUnavailableError` when the destination as a whole is down; any other exception fails all.
        """
        ...


class Subscriber(Protocol):
    """Hands out messages: entered, read with ``async for``, and left.

    Who reads it asks for the next delivery only when there is room for it. A delivery that is not settled, because its
    reader died, comes again; so does one that was nacked, with a higher ``message.attempt``.
    Messages of one key are handed out in order. To leave it gives back what was handed out and not settled.
    """

    #: How long after its first delivery a message may come again; None if nobody knows.
    redelivery_horizon: timedelta | None

    async def __aenter__(self) -> Self:
        """Connect."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hand out no more, and disconnect."""
        ...

    def __aiter__(self) -> AsyncIterator[Delivery]:
        """Return what yields deliveries; it ends when the subscriber is closed."""
        ...


class Attempt(NamedTuple, Generic[T]):
    """What became of one call of a publisher."""

    answer: T | None = None
    #: What it raised.
    error: BaseException | None = None
    #: Whether the messages may have been delivered although no answer came.
    is_unknown: bool = False


async def attempt(call: Awaitable[T], seconds: float | None) -> Attempt[T]:
    """Await a call of a publisher; whatever it raises is returned, but for the cancellation of this task."""
    task = asyncio.current_task()
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return Attempt(await call)
    except asyncio.CancelledError as error:
        # A TaskGroup of Python 3.11 whose child failed leaves a request to cancel behind, so that the time limit
        # cannot know that it was the only one.
        if is_cancelled() and not deadline.expired():
            raise
        # Something that the publisher waited for was cancelled, not this task.
        return Attempt(error=_late(error, deadline, seconds), is_unknown=True)
    except GeneratorExit as error:
        if not _is_current(task):
            raise  # the coroutine is being closed
        return Attempt(error=error)
    except BaseException as error:  # noqa: BLE001 -- whatever a publisher raises is a failed delivery
        is_unknown = deadline.expired() or isinstance(error, PublishUnknownError)
        return Attempt(error=_late(error, deadline, seconds), is_unknown=is_unknown)


def _late(error: BaseException, deadline: asyncio.Timeout, seconds: float | None) -> BaseException:
    """Return the error of a call, which is `TimeoutError` if it took too long."""
    return overdue(error, seconds or 0.0) if deadline.expired() else error


class Each:
    """A publisher made of a function that delivers one message.

    At most ``concurrency`` calls run at once, each for at most ``timeout``, and those of one key follow each other.
    A plain function runs on threads of the publisher's own, which nothing can stop: a call that takes longer than
    ``timeout`` is given up and keeps its thread until it returns. At most twice ``concurrency`` threads run.
    """

    def __init__(
        self, send: Send, *, concurrency: int = 100, timeout: timedelta | None = timedelta(seconds=10)
    ) -> None:
        check_function("send", send, "a message", may_be_async=True)
        check_count("concurrency", concurrency)
        check_duration("timeout", timeout, optional=True)
        self._send = send
        self.concurrency = concurrency
        self._threads = None if is_async(send) else Threads(2 * concurrency, name="postroom-publisher")
        #: One for all batches, so that several of them under way do not multiply it.
        self.gate: CallGate = CallGate(concurrency) if is_async(send) else CallGate(concurrency, hanging=concurrency)
        self._timeout = None if timeout is None else timeout.total_seconds()

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        """Deliver a batch, keys side by side."""
        return [called.answer for called in await self.attempts(messages)]

    async def attempts(self, messages: Sequence[Message]) -> Sequence[Attempt[Outcome]]:
        """Deliver a batch as `publish_batch` does; return also what was raised."""
        attempts: list[Attempt[Outcome]] = [Attempt()] * len(messages)

        async def deliver(run: list[int]) -> None:
            for index in run:
                message, is_answered = messages[index], False
                await self.gate.enter(message.topic)
                try:
                    called = await self.send(message, message.topic)
                    is_answered = not called.is_unknown
                finally:
                    self.gate.leave(message.topic, is_answered=is_answered)
                attempts[index] = called
                if not isinstance(called.answer, Delivered):
                    return

        async with asyncio.TaskGroup() as group:
            for run in runs(messages):
                group.create_task(deliver(run))
        return attempts

    async def send(self, message: Message, destination: str) -> Attempt[Outcome]:
        """Deliver one message; return what became of it, None if that is not known, and what was raised."""
        if self.gate.is_clogged(destination):
            return Attempt(Release(), BrokerUnavailableError(LINGERING), is_unknown=True)
        if self._threads is None:
            call = cast("Awaitable[object]", self._send(message))
        else:
            call = self._on_thread(self._threads, message, destination)
        answer, error, is_unknown = await attempt(call, self._timeout)
        if error is None:
            return Attempt(answer if isinstance(answer, Delivered | Retry | Dead | Release) else Delivered())
        if is_unknown or isinstance(error, INTERRUPTS):
            return Attempt(None, error, is_unknown=True)
        if isinstance(error, OUTAGES):
            return Attempt(Release(), error)
        return Attempt(Dead(describe(error)) if isinstance(error, RejectError) else Retry(describe(error)), error)

    async def _on_thread(self, threads: Threads, message: Message, destination: str) -> object:
        """Return what a plain function returns, or what that leads to if it is awaitable."""
        call = threads.call(partial(self._send, message), "the publisher")
        try:
            returned = await call.result()
        finally:
            if call.is_running:
                self.gate.linger(destination)
                call.on_return(partial(self.gate.end_lingering, destination))
        return await returned if inspect.isawaitable(returned) else returned

    def close(self) -> None:
        """End the threads of a plain function, each as soon as it has returned; a later message starts new ones."""
        if self._threads is not None:
            self._threads.close()


async def attempts_of(publisher: Publisher, messages: Sequence[Message]) -> Sequence[Attempt[Outcome]]:
    """Publish a batch; return what became of each message, with what was raised where that is known."""
    if isinstance(publisher, Each):
        return await publisher.attempts(messages)
    return [Attempt(answer) for answer in await publisher.publish_batch(messages)]


def why_not(called: Attempt[Outcome]) -> str:
    """Return why a message was not delivered."""
    if isinstance(called.answer, Retry | Dead):
        return called.answer.error
    why = "it is not known whether it was" if called.answer is None else "its destination is down"
    return why if called.error is None else f"{why}: {describe(called.error)}"


def _is_current(task: asyncio.Task[object] | None) -> bool:
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no loop runs any more
        return False


def overdue(error: BaseException, limit: float) -> TimeoutError:
    """Return the error of a publish that took longer than ``limit`` seconds, caused by what shows where it was."""
    late = TimeoutError(f"no answer within {limit:g} s")
    late.__cause__ = error.__cause__ or error
    return late


def is_asked_for(error: BaseException) -> bool:
    """Return whether an error that ends a run is the caller's wish, and no failure."""
    return isinstance(error, asyncio.CancelledError | KeyboardInterrupt)


def is_cancelled() -> bool:
    """Tell whether it is this task that somebody cancelled, rather than something it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def runs(messages: Sequence[Message]) -> list[list[int]]:
    """Return the places of messages that have to follow each other: those of one key, or a single one without."""
    found: dict[object, list[int]] = {}
    for index, message in enumerate(messages):
        place = index if message.key is None else (message.topic, message.key)
        found.setdefault(place, []).append(index)
    return list(found.values())
