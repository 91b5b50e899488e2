"""The consumer: receives messages, has them handled, and acknowledges them when their effect is durable."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias, get_args

from . import events
from .broker import Each, Subscriber, describe, is_asked_for
from .checks import check_choice, check_count, check_duration, check_function, check_methods
from .crew import Crew
from .deadline import Limit, Within, clock, late
from .delivery import Delivery, current
from .errors import (
    AlreadyStartedError,
    ConfigurationError,
    MessageBusyError,
    StorePermissionError,
    is_outage,
    is_rejection,
)
from .message import Message
from .middleware.chain import Middleware, chained, check_order, connect, limit_transactions
from .outputs import OutputError, send_outputs
from .patience import call_in
from .publisher import AnyPublisher, as_publisher
from .retry import Backoff, Delay, guarded
from .router import Router
from .store import Dead, Delivered, Outcome, Release, Retry

__all__ = ["Acking", "Consumer", "OutputError"]

#: When a message is acknowledged: after its handler, by its handler, or when everything it led to is delivered.
Acking: TypeAlias = Literal["on_success", "manual", "forward"]

_Lane: TypeAlias = tuple[str, str]
_Serve: TypeAlias = Callable[[events.Listener], Coroutine[Any, Any, None]]

#: How long a broker has to take note of an outcome, and a cancelled handler to end.
PATIENCE: Final = timedelta(seconds=10)

_DELIVERED: Final = Delivered()


class Consumer:
    """Takes messages from a subscriber through middlewares to a router.

    Acknowledging is the outermost layer: a message is acknowledged after everything else has ended well, its
    transaction among it, and comes again otherwise. Messages of one key are handled one after the other.

    Example:
        >>> import asyncio
        >>> from postroom import Consumer, Message, Router
        >>> from postroom.brokers import MemoryBroker
        >>> router = Router()
        >>> @router.on("order.placed")
        ... async def reserve(order: dict[str, int]) -> None:
        ...     print("reserve", order["order_id"])
        ...     consumer.stop_soon()
        >>> broker = MemoryBroker()
        >>> consumer = Consumer(broker.subscribe("orders", group="stock"), router)
        >>> async def main() -> None:
        ...     await broker.publish_batch([Message(topic="orders", type="order.placed", payload=b'{"order_id": 42}')])
        ...     await consumer.run()
        >>> asyncio.run(main())
        reserve 42
    """

    def __init__(  # noqa: PLR0913, PLR0915 -- one keyword for each choice a user has
        self,
        subscriber: Subscriber,
        router: Router,
        *middlewares: Middleware,
        acking: Acking = "on_success",
        publisher: AnyPublisher | None = None,
        concurrency: int = 5,
        buffer: int | None = None,
        timeout: timedelta | None = timedelta(seconds=30),
        shutdown_grace: timedelta = timedelta(seconds=30),
        backoff: Delay | None = None,
        listener: events.Listener = events.log_event,
    ) -> None:
        """Set up a consumer; it connects when it runs.

        Args:
            subscriber: Where messages come from.
            router: Knows the handler of each type of message.
            middlewares: What is done around handlers, the first of them outermost.
            acking: ``on_success`` acknowledges what was handled without an error; ``manual`` leaves it to the handler,
                which asks for the `Delivery`, and nacks only what raises an error; ``forward`` acknowledges when the
                ``publisher``, which it needs, has delivered everything that came out of the middlewares.
            publisher: Takes what handlers return, unless a middleware has taken it; what it does not deliver makes the
                message come again. It takes what the one of a `Dispatcher` does.
            concurrency: How many messages are handled at a time.
            buffer: How many more may wait for their turn; as many as are handled by default.
            timeout: How long a handler may take, with the middlewares around it. Waiting for a connection or a lock
                before it, and COMMIT after it, do not count.
            shutdown_grace: How long handlers may go on after `stop`.
            backoff: How long a message that failed waits, by its number of deliveries.
            listener: Called with every event, those of middlewares among them; by default they are logged.
        """
        subscribers = "a Subscriber, such as OutboxSubscriber(store) or broker.subscribe(…)"
        check_methods("subscriber", subscriber, ("__aenter__", "__aiter__"), subscribers)
        check_methods("router", router, ("types", "start"), "a Router; add a handler to one with router.on(…)")
        for middleware in middlewares:
            check_function("middleware", middleware, "a message and what handles it next", may_be_async=True)
        check_count("concurrency", concurrency)
        check_count("buffer", buffer, least=0, optional=True)
        check_duration("timeout", timeout, optional=True)
        check_duration("shutdown_grace", shutdown_grace, zero=True)
        check_function("backoff", backoff, "the number of deliveries", optional=True)
        check_function("listener", listener, "an event")
        _check_acking(acking, publisher)
        self._subscriber = subscriber
        self._router = router
        self._middlewares = middlewares
        self._acking: Acking = acking
        self._publisher = None if publisher is None else as_publisher(publisher)
        self._limit = Limit(timeout)
        self._patience = Limit(PATIENCE)
        self._grace = shutdown_grace
        self._listener = listener
        self._tell = events.guarded(listener)
        self._backoff: Delay = guarded(backoff or Backoff(), self._tell)
        self._chain = chained(middlewares, router)
        self._gate = asyncio.Semaphore(concurrency)
        self._room = asyncio.Semaphore(concurrency + (concurrency if buffer is None else buffer))
        self._lanes: dict[_Lane, deque[Delivery]] = {}
        self._crew = Crew()
        self._reading: asyncio.Task[None] | None = None
        self._crash: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._released = 0

    # -- life --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Handle messages until `stop` is called, the subscriber ends or the task is cancelled.

        When the subscriber or a middleware's service fails, or the store refuses a permission, handlers may end as
        after `stop`, and then that is raised.

        Raises:
            AlreadyStartedError: It was run before.
            MiddlewareOrderError: Middlewares stand in an order in which they cannot keep their promises.
            ConfigurationError: The inbox forgets messages before the broker does.
            StorePermissionError: The user of the store may not do what handling needs; its message was given back.
        """
        if self._loop is not None:
            raise AlreadyStartedError("a consumer runs once: run() was called")
        self._loop = asyncio.get_running_loop()
        try:
            self._prepare()
            async with self._subscriber as subscriber:
                self._tell(events.ConsumerStarted(self._router.types))
                try:
                    await self._consume(subscriber)
                finally:
                    self._tell(events.ConsumerStopped(self._released))
        except BaseException as error:
            if not is_asked_for(error):
                self._tell(events.ConsumerFailed(describe(error), error))
            raise
        finally:
            if isinstance(self._publisher, Each):
                self._publisher.close()
            self._stopped.set()

    def _prepare(self) -> None:
        """Refuse middlewares that cannot work together, and tell them what they need to know."""
        check_order(self._middlewares, is_manual=self._acking == "manual")
        connect(self._middlewares)
        for middleware in self._middlewares:
            check: Callable[[timedelta | None], None] | None = getattr(middleware, "check_horizon", None)
            if check is not None:
                check(self._subscriber.redelivery_horizon)
        limit_transactions(self._middlewares, self._limit.duration)
        self._router.start()

    def stop_soon(self) -> None:
        """Begin to stop: take no more messages, let handlers end; a second call cancels them.

        It may be called from any thread, such as by a plain handler.
        """
        if self._loop is None:
            self._begin_to_stop()
        else:
            call_in(self._loop, self._begin_to_stop)

    def _begin_to_stop(self) -> None:
        if self._stopping.is_set():
            self._crew.cancel()
        self._stop_reading()

    async def stop(self) -> None:
        """Stop and wait until every handler has ended; to call it again changes nothing.

        A handler that wants to stop its consumer calls `stop_soon`, since here it would wait for itself.
        """
        self._stop_reading()
        if self._loop is not None:
            await self._stopped.wait()

    def _stop_reading(self) -> None:
        # At once: what is released from now on must not be read again.
        if self._reading is not None and not self._stopping.is_set():
            self._reading.cancel()
        self._stopping.set()

    async def _consume(self, subscriber: Subscriber) -> None:
        self._crew.open()
        services = [
            asyncio.create_task(self._serve(serve))
            for middleware in self._middlewares
            if (serve := getattr(middleware, "serve", None)) is not None
        ]
        reading = self._reading = asyncio.create_task(self._read(subscriber))
        if self._stopping.is_set():
            reading.cancel()
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({reading, stopping, *services}, return_when=asyncio.FIRST_COMPLETED)
            self._stop_reading()
            await asyncio.wait({reading})  # it may have taken one more
            await self._crew.wait(self._grace)
        finally:
            self._stopping.set()
            results = await self._end([reading, stopping, *services])
        for result in (self._crash, *results):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result

    async def _serve(self, serve: _Serve) -> None:
        """Run what a middleware does beside handling; one that has nothing more to do stops nobody."""
        await serve(self._tell)
        await self._stopping.wait()

    async def _end(self, tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
        """Cancel everything that is left, handlers first: they may need what the others do."""
        try:
            tasks[0].cancel()
            await asyncio.wait(tasks[:1])
            self._crew.cancel()
            await self._crew.wait(PATIENCE)
        finally:
            self._crew.give_up()
            for task in tasks:
                task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    # -- receive -----------------------------------------------------------------------------------------------

    async def _read(self, subscriber: Subscriber) -> None:
        """Take deliveries while there is room for them."""
        await self._room.acquire()
        async for delivery in subscriber:
            self._accept(delivery)
            await self._room.acquire()

    def _accept(self, delivery: Delivery) -> None:
        message, waiting, lane = delivery.message, deque([delivery]), None
        if message.key is not None:
            lane = (message.topic, message.key)
            if self._lanes.setdefault(lane, waiting) is not waiting:
                self._lanes[lane].append(delivery)
                return
        self._crew.start(self._work_off(waiting, lane), self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # Not an error of a message, those are settled: somebody wants the process to end.
            self._crash = self._crash or error
            self._stop_reading()

    async def _work_off(self, waiting: deque[Delivery], lane: _Lane | None) -> None:
        """Handle the first message of a key, then start the next; once one fails, the others come again after it.

        Each has a task and a context of its own: what a handler leaves there is none of the next one's.
        """
        self._crew.begin()
        try:
            may_go_on = await self._take(waiting[0]) and not self._stopping.is_set()
            self._drop_first(waiting)
            while waiting and not may_go_on:
                await self._release(waiting[0])
                self._drop_first(waiting)
        except BaseException:
            self._leave(lane)
            for delivery in waiting:  # cancelled: what has not begun, or is held by its handler, comes again
                self._room.release()
                await self._release(delivery)
            raise
        if waiting:
            self._crew.start(self._work_off(waiting, lane), self._ended)
        else:
            self._leave(lane)

    def _drop_first(self, waiting: deque[Delivery]) -> None:
        waiting.popleft()
        self._room.release()

    def _leave(self, lane: _Lane | None) -> None:
        if lane is not None:
            del self._lanes[lane]

    async def _take(self, delivery: Delivery) -> bool:
        """Handle a delivery; tell whether the next one of its key may be."""
        async with self._gate:
            if self._stopping.is_set():
                await self._release(delivery)
                return False
            is_recorded = await self.handle(delivery)
        if delivery.outcome is None:
            await delivery.settled()  # whoever holds it may be anywhere by now
            is_recorded = await self._settle(delivery, _DELIVERED)
        return is_recorded and isinstance(delivery.outcome, Delivered)

    async def _release(self, delivery: Delivery) -> None:
        if delivery.outcome is None:
            self._released += 1
            await self._settle(delivery, Release())

    # -- handle ------------------------------------------------------------------------------------------------

    async def handle(self, delivery: Delivery) -> bool:
        """Handle one delivery and settle it; tell whether its broker took note, or nobody told it yet.

        It raises only if this task is cancelled or the process is to end.
        """
        delivery.is_handled = True
        delivery.listener, delivery.tell = self._listener, self._tell
        began = time.monotonic()
        token = current.set(delivery)
        work = Within(self._limit)
        timing = clock.set(work)
        try:
            outputs = await self._chain(delivery.message)
            if outputs:
                await send_outputs(self._publisher, delivery.message, outputs)
        except BaseException as error:  # noqa: BLE001 -- it is raised again unless it is the message's
            return await self._fail(delivery, work, error)
        finally:
            clock.reset(timing)
            current.reset(token)
        if not delivery.is_reported:
            self._tell(_handled(delivery.message, time.monotonic() - began))
        # What a middleware or the router has decided about reaches no handler that could acknowledge it.
        if self._acking == "manual" and delivery.outcome is None and not delivery.is_reported:
            work.end()
            return True
        # As `_settle` does, at half the cost: this is what every message takes.
        work.move(self._patience)
        try:
            await delivery.record(_DELIVERED)
        except BaseException as error:  # noqa: BLE001 -- as above
            return self._not_recorded(delivery.message, work, error)
        work.end()
        return True

    async def _fail(self, delivery: Delivery, work: Within, error: BaseException) -> bool:
        """Settle a delivery that was not handled, and raise the error if it is meant for more than the message."""
        failure = work.end(error) or error
        is_ending = self._crew.is_ending(failure)
        if work.is_expired and not is_ending and isinstance(failure, asyncio.CancelledError):
            failure = TimeoutError()  # something left a request to cancel behind, so the limit was not sure
        if work.is_expired and isinstance(failure, TimeoutError):
            failure = late(work.phase, self._limit)
        if isinstance(failure, StorePermissionError) and not failure.is_of_handler:
            # It fails every message until it is granted, so that the consumer ends as it does for a wrong password.
            self._crash = self._crash or failure
            self._stop_reading()
        is_recorded = await self._settle(delivery, self._verdict(delivery.message, failure, is_ending=is_ending))
        if isinstance(failure, Exception) or (isinstance(failure, asyncio.CancelledError) and not is_ending):
            return is_recorded
        raise error

    def _verdict(self, message: Message, error: BaseException, *, is_ending: bool) -> Outcome:
        """Say what becomes of a message that was not handled."""
        if is_ending:
            self._released += 1
            return Release()  # the end of the consumer says nothing about the message, nor does what came of it
        said, at = describe(error), (message.id, message.type, message.attempt)
        answer = error.outcome if isinstance(error, OutputError) else None
        if is_rejection(error) or isinstance(answer, Dead):
            self._tell(events.DeadLettered(*at, said, message.topic, message.key, error))
            return Dead(said)
        self._tell(events.HandlingFailed(*at, said, message.topic, message.key, error))
        # Whoever handles it elsewhere has a lease, which says when to look again.
        delay = error.delay if isinstance(error, MessageBusyError) else self._backoff(max(message.attempt, 1))
        # A destination or a database that is down is no fault of the message, so it costs no attempt.
        return Release(delay) if isinstance(answer, Release) or is_outage(error) else Retry(said, delay)

    async def _settle(self, delivery: Delivery, outcome: Outcome) -> bool:
        """Tell the broker; what it does not hear is not undone, since the message comes again and is known then."""
        work = Within(self._patience)
        try:
            await delivery.record(outcome)
        except BaseException as error:  # noqa: BLE001 -- it is raised again unless it is the broker's
            return self._not_recorded(delivery.message, work, error)
        work.end()
        return True

    def _not_recorded(self, message: Message, work: Within, error: BaseException) -> bool:
        failure = work.end(error) or error
        if isinstance(failure, asyncio.CancelledError):
            is_raised = self._crew.is_ending(failure)
        else:
            is_raised = not isinstance(failure, Exception)
        if is_raised:
            raise error
        said = describe(failure)
        self._tell(events.AckFailed(message.id, message.type, said, message.topic, message.key, failure))
        return False


def _check_acking(acking: Acking, publisher: AnyPublisher | None) -> None:
    check_choice("acking", acking, get_args(Acking))
    if acking == "forward" and publisher is None:
        raise ConfigurationError("acking='forward' needs publisher=, which delivers what handlers return")


def _handled(message: Message, seconds: float) -> events.Handled:
    return events.Handled(message.id, message.type, timedelta(seconds=seconds), message.topic, message.key)
