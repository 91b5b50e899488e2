"""The ports of every broker: where messages go, and where they come from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from .errors import BrokerUnavailableError, ConfigurationError, PublishUnknownError, RejectError
from .message import Message
from .store import Dead, Delivered, Outcome, Release, Retry
from .text import MAX_ERROR, describe

if TYPE_CHECKING:
    from .delivery import Delivery

__all__ = [
    "MAX_ERROR",
    "OUTAGES",
    "Each",
    "Failed",
    "Publisher",
    "Send",
    "Subscriber",
    "describe",
    "is_asked_for",
    "is_cancelled",
    "overdue",
]

#: Delivers one message: to return is success, to raise is failure, and to return an `Outcome` is to choose.
Send: TypeAlias = Callable[[Message], Awaitable[object]]

#: Called with a message that was not delivered, and with why: an error that was raised, or a text.
Failed: TypeAlias = Callable[[Message, BaseException | str], None]

#: What says that a destination is down.
OUTAGES = (BrokerUnavailableError, ConnectionRefusedError)


class Publisher(Protocol):
    """Takes messages to a destination."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
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


class Each:
    """A publisher made of a function that delivers one message.

    At most ``concurrency`` calls run at once, each for at most ``timeout``, and those of one key follow each other.
    """

    def __init__(
        self, send: Send, *, concurrency: int = 100, timeout: timedelta | None = timedelta(seconds=10)
    ) -> None:
        if concurrency < 1:
            raise ConfigurationError(f"concurrency must be at least 1, not {concurrency}")
        self._send = send
        # One for all batches, so that several of them under way do not multiply it.
        self._gate = asyncio.Semaphore(concurrency)
        self._timeout = None if timeout is None else timeout.total_seconds()

    async def publish(
        self,
        messages: Sequence[Message],
        heard: Callable[[int, Outcome], None] = lambda _index, _outcome: None,
        failed: Failed = lambda _message, _error: None,
    ) -> Sequence[Outcome | None]:
        """Deliver a batch, keys side by side; call ``heard`` and ``failed`` as soon as an outcome is known."""
        outcomes: list[Outcome | None] = [None] * len(messages)

        async def deliver(run: list[int]) -> None:
            for index in run:
                async with self._gate:
                    outcome = outcomes[index] = await self._attempt(messages[index], failed)
                if outcome is not None:
                    heard(index, outcome)
                if not isinstance(outcome, Delivered):
                    return

        async with asyncio.TaskGroup() as group:
            for run in _runs(messages):
                group.create_task(deliver(run))
        return outcomes

    async def _attempt(self, message: Message, failed: Failed) -> Outcome | None:
        deadline = asyncio.timeout(self._timeout)
        try:
            async with deadline:
                answer = await self._send(message)
        except OUTAGES as error:
            failed(message, error)
            return Release()
        except RejectError as error:
            failed(message, error)
            return Dead(describe(error))
        except asyncio.CancelledError as error:
            # A TaskGroup of Python 3.11 whose child failed leaves a request to cancel behind, so that the time limit
            # cannot know that it was the only one.
            if is_cancelled() and not deadline.expired():
                raise
            failed(message, overdue(error, self._timeout or 0) if deadline.expired() else error)
            return None  # it took too long, or something that the sender waited for was cancelled, not the sender
        except Exception as error:  # noqa: BLE001 -- whatever a sender raises is a failed delivery
            failed(message, overdue(error, self._timeout or 0) if deadline.expired() else error)
            unknown = deadline.expired() or isinstance(error, PublishUnknownError)
            return None if unknown else Retry(describe(error))
        if isinstance(answer, Retry):
            failed(message, answer.error)
        return answer if isinstance(answer, Delivered | Retry | Dead | Release) else Delivered()


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


def _runs(messages: Sequence[Message]) -> list[list[int]]:
    runs: dict[object, list[int]] = {}
    for index, message in enumerate(messages):
        place = index if message.key is None else (message.topic, message.key)
        runs.setdefault(place, []).append(index)
    return list(runs.values())
