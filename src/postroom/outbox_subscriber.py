"""The outbox as a subscriber: an async iterator of deliveries, each to be acknowledged by the reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeAlias
from uuid import UUID

from . import events
from .broker import Each
from .checks import check_count, check_duration
from .delivery import Delivery
from .dispatcher import Dispatcher
from .errors import StoreUnavailableError
from .message import Message
from .retry import Delay
from .store import OnDead, Outcome, Release, Settlement, Store

__all__ = ["OutboxSubscriber"]

_Key: TypeAlias = tuple[UUID, int]

NOT_RECORDED = "the subscriber was closed before this was recorded; the message will come again"


class OutboxSubscriber(AsyncIterator[Delivery]):
    """Reads the messages of a store without a broker in between: a `Subscriber` for a `Consumer` or a loop of yours.

    **Readers of one outbox compete.** Each message goes to one of them, whichever claims it first, and a `Dispatcher`
    on the same namespace is one more reader; so several processes share the work, and two services that both need
    every message must not both read it. For those, have one dispatcher publish the outbox to a broker, and give each
    service a subscription of its own there: ``MemoryBroker.subscribe(…, group="billing")`` within a process.

    A message that is held is leased to its reader, and the lease is renewed until it is settled. What is nacked comes
    again after the backoff, and is dead after ``max_attempts``.

    Example:
        >>> import asyncio
        >>> from postroom import Outbox, OutboxSubscriber
        >>> from postroom.stores import MemoryStore
        >>> store = MemoryStore()
        >>> with store.transaction() as transaction:
        ...     added = Outbox().add(transaction, {"order_id": 42}, topic="orders")
        >>> async def main() -> None:
        ...     async with OutboxSubscriber(store) as deliveries:
        ...         delivery = await anext(deliveries)
        ...         print(delivery.message.topic)
        ...         await delivery.ack()
        >>> asyncio.run(main())
        orders
    """

    #: A message that is dead may be redriven at any time.
    redelivery_horizon: timedelta | None = None

    def __init__(  # noqa: PLR0913 -- the choices of a dispatcher that a reader has too
        self,
        store: Store | str,
        *,
        batch: int = 100,
        poll_interval: timedelta = timedelta(milliseconds=500),
        lease: timedelta = timedelta(seconds=30),
        max_attempts: int = 10,
        backoff: Delay | None = None,
        on_dead: OnDead = "block",
        tenant_id: UUID | None = None,
        cleanup_interval: timedelta = timedelta(minutes=1),
        listener: events.Listener = events.log_event,
    ) -> None:
        """Set up a subscriber; it begins to claim messages when it is entered or first read.

        Args:
            store: The store whose outbox is read, in its namespace, or its URL.
            batch: How many deliveries may be open at a time.
            poll_interval: The longest wait before the store is asked for messages again.
            lease: How long a claim holds; it is renewed while the delivery is open.
            max_attempts: After how many deliveries a nacked message is dead.
            backoff: How long a nacked message waits, by its number of attempts.
            on_dead: Whether a dead message holds back the later ones of its key.
            tenant_id: Read only the messages of this tenant.
            cleanup_interval: How often delivered messages past the store's ``keep_delivered`` are deleted.
            listener: Called with every event; by default events are logged.
        """
        check_count("batch", batch)
        check_duration("lease", lease)
        self._ready: asyncio.Queue[Delivery] = asyncio.Queue()
        #: Several for one key: a store that knows no duplicates may hand out one message twice at the same time.
        self._recorded: dict[_Key, list[asyncio.Future[None]]] = {}
        self._running: asyncio.Task[None] | None = None
        self._dispatcher = Dispatcher(
            store,
            Each(self._hand_out, concurrency=batch, timeout=None),
            batch=batch,
            batches_in_flight=2,
            poll_interval=poll_interval,
            lease=lease,
            publish_timeout=lease / 3,
            max_attempts=max_attempts,
            backoff=backoff,
            on_dead=on_dead,
            tenant_id=tenant_id,
            cleanup_interval=cleanup_interval,
            shutdown_grace=timedelta(0),
            listener=listener,
        )
        self._dispatcher.take_releases_as_requeues()
        self._dispatcher.on_settled(self._settled)

    async def __aenter__(self) -> Self:
        """Begin to claim messages."""
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; deliveries that are still open are released."""
        await self.aclose()

    async def __anext__(self) -> Delivery:
        """Return the next delivery; end when the subscriber is closed, or raise the error that ended it."""
        running = self._start()
        if not running.done() and not self._ready.empty():
            return self._ready.get_nowait()  # without the two tasks that waiting takes
        ready = asyncio.ensure_future(self._ready.get())
        try:
            await asyncio.wait({ready, running}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if ready.done():
                self._ready.put_nowait(ready.result())  # it was ours for a moment; the next reader gets it
            raise
        finally:
            ready.cancel()
        if running.done():
            running.result()
            raise StopAsyncIteration  # what is still in the queue was given back to the store
        return ready.result()

    async def aclose(self) -> None:
        """Stop claiming, record what was acknowledged and release the rest; a second call does nothing."""
        await self._dispatcher.stop()
        if self._running is not None:
            await asyncio.wait({self._running})

    def _start(self) -> asyncio.Task[None]:
        if self._running is None:
            self._running = asyncio.create_task(self._dispatcher.run())
            self._running.add_done_callback(self._ended)
        return self._running

    def _ended(self, running: asyncio.Task[None]) -> None:
        """Fail the acknowledgements that were not recorded."""
        for waiting in [future for futures in self._recorded.values() for future in futures]:
            waiting.set_exception(StoreUnavailableError(NOT_RECORDED))
            waiting.exception()  # the reader may have stopped waiting
        self._recorded.clear()

    async def _hand_out(self, message: Message) -> Outcome:
        loop = asyncio.get_running_loop()
        decided: asyncio.Future[Outcome] = loop.create_future()

        async def settle(outcome: Outcome) -> None:
            if decided.done():
                raise StoreUnavailableError(NOT_RECORDED)
            if isinstance(outcome, Release):
                # When a release is recorded does not matter to the reader.
                decided.set_result(outcome)
                return
            recorded: asyncio.Future[None] = loop.create_future()
            self._recorded.setdefault((message.id, message.token), []).append(recorded)
            decided.set_result(outcome)
            # The reader may stop waiting; the outcome is recorded all the same.
            await asyncio.shield(recorded)

        self._ready.put_nowait(Delivery(message, settle))
        return await decided

    def _settled(self, settlements: Sequence[Settlement]) -> None:
        for settlement in settlements:
            message = settlement.claim.message
            futures = self._recorded.get((message.id, message.token), [])
            if futures:
                futures.pop(0).set_result(None)
            if not futures:
                self._recorded.pop((message.id, message.token), None)
