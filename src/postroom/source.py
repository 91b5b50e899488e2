"""The outbox as a stream: an async iterator of deliveries, each to be acknowledged by the reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self
from uuid import UUID

from . import events
from .broker import Each
from .delivery import Delivery
from .dispatcher import Dispatcher
from .message import Message
from .retry import Delay
from .store import OnDead, Outcome, Settlement, Store

__all__ = ["Delivery", "Source", "source"]


class Source(AsyncIterator[Delivery]):
    """Deliveries of a store's messages; leases are renewed while the reader holds them."""

    def __init__(  # noqa: PLR0913 -- the choices of a dispatcher that a reader has too
        self,
        store: Store,
        *,
        batch: int = 100,
        poll_interval: timedelta = timedelta(milliseconds=500),
        lease: timedelta = timedelta(seconds=30),
        max_attempts: int = 10,
        backoff: Delay | None = None,
        on_dead: OnDead = "block",
        tenant_id: UUID | None = None,
        shutdown_grace: timedelta = timedelta(0),
        listener: events.Listener = events.log_event,
    ) -> None:
        self._ready: asyncio.Queue[Delivery] = asyncio.Queue()
        self._recorded: dict[UUID, asyncio.Future[None]] = {}
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
            shutdown_grace=shutdown_grace,
            listener=listener,
        )
        self._dispatcher.on_settled(self._settled)

    async def __aenter__(self) -> Self:
        """Begin to claim."""
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; what was not acknowledged is released."""
        await self.aclose()

    async def __anext__(self) -> Delivery:
        """Return the next delivery; ends when the source is closed, raises what ended it."""
        running = self._start()
        ready = asyncio.ensure_future(self._ready.get())
        try:
            await asyncio.wait({ready, running}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return ready.result()
        finally:
            ready.cancel()
        running.result()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop claiming, record what was acknowledged, release the rest; to call it again does nothing."""
        await self._dispatcher.stop()
        if self._running is not None:
            await asyncio.wait({self._running})
        self._let_go(list(self._recorded))

    def _start(self) -> asyncio.Task[None]:
        if self._running is None:
            self._running = asyncio.create_task(self._dispatcher.run())
        return self._running

    async def _hand_out(self, message: Message) -> Outcome:
        decided: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        async def settle(outcome: Outcome) -> None:
            recorded = self._recorded[message.id] = asyncio.get_running_loop().create_future()
            if not decided.done():
                decided.set_result(outcome)
                await recorded

        self._ready.put_nowait(Delivery(message, settle))
        return await decided

    def _settled(self, settlements: Sequence[Settlement]) -> None:
        self._let_go([settlement.claim.message.id for settlement in settlements])

    def _let_go(self, identities: Sequence[UUID]) -> None:
        for identity in identities:
            recorded = self._recorded.pop(identity, None)
            if recorded is not None and not recorded.done():
                recorded.set_result(None)


#: Reads better where it is called: ``async for delivery in source(store):``.
source = Source
