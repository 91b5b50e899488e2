"""A process of the crash matrix: a dispatcher, a producer or a consumer in which something goes wrong at one point.

Whatever happens is appended to the journal, one line and one write each: like a broker, the journal outlives whoever
writes to it.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from postroom import Delivered, Dispatcher, Message, Outbox, Outcome, errors, events
from postroom.inbox import Mode
from postroom.stores import store_from_url
from postroom.testing import failpoints
from postroom.testing.failpoints import Action, Failpoints
from postroom.testing.faults import FaultProxy
from postroom.testing.taps import TappedOutbox, TappedPublisher, TappedStore, tapped_send
from postroom.transaction import transactions_of

__all__ = ["Arm", "Faults", "Journal", "Orders", "main", "proxied"]


@dataclass(frozen=True, slots=True)
class Arm:
    """What goes wrong where."""

    point: str
    #: The name of a method of `Faults`.
    action: str
    nth: int = 1
    #: Which error to raise, or to which request the reply is lost.
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a worker is to do."""

    name: str
    url: str
    namespace: str
    journal: str
    role: str = "dispatch"
    #: A deliberately broken variant of the library to run instead of the sound one.
    variant: str | None = None
    arms: Sequence[Arm] = field(default_factory=tuple[Arm])
    #: A stall lasts until this file is there.
    flag: str = ""
    #: Of the messages to look out for on the wire, and of those to add.
    ids: Sequence[str] = field(default_factory=tuple[str])
    #: Whether messages are published one by one rather than in batches.
    each: bool = False
    keep: bool = True
    lease: float = 2.4
    publish_timeout: float = 1.2
    sweep_interval: float = 0.1
    cleanup_interval: float = 60
    max_attempts: int = 5
    on_dead: str = "block"
    #: Whether the transaction that is hit is the first one of its process.
    is_cold: bool = False
    #: For consumers: where their broker is, which file must be there before they take anything, how their inbox works,
    #: how long a handler may take, and whether its session gives up waiting for a lock soon.
    post: str = ""
    takes_after: str = ""
    mode: Mode = "pessimistic"
    handle_timeout: float = 30
    is_impatient: bool = False

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Orders:
        options = json.loads(text)
        return cls(**{**options, "arms": [Arm(**arm) for arm in options["arms"]]})


class Journal:
    """Where messages go, and what else is worth knowing."""

    def __init__(self, orders: Orders) -> None:
        self._name = orders.name
        self._file = os.open(orders.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, **details: object) -> None:
        line = json.dumps({"who": self._name, "what": what, **details}, default=str)
        os.write(self._file, f"{line}\n".encode())

    def listen(self, event: events.Event) -> None:
        self.write(type(event).__name__, **event.as_dict())

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        for message in messages:
            await self.send(message)
        return [Delivered()] * len(messages)

    async def send(self, message: Message) -> None:
        self.write("received", id=message.id, token=message.token, attempt=message.attempt, at=time.time())


class Proxy(FaultProxy):
    """A proxy that can lose a request as well: the server never hears of it, and the connection is gone."""

    _unwanted: bytes = b""

    def drop_request(self, pattern: bytes) -> None:
        """Lose the next request that holds ``pattern``."""
        self._unwanted = pattern

    def _request(self, link: Any, data: bytes) -> bytes:  # noqa: ANN401
        if self._unwanted and self._unwanted in data:
            self._unwanted = b""
            return b""
        return super()._request(link, data)


class Faults:
    """The actions of the matrix."""

    def __init__(self, orders: Orders, points: Failpoints, proxy: Proxy | None, worker: UUID) -> None:
        self._orders = orders
        self._points = points
        self._proxy = proxy
        self._worker = worker
        self._task = asyncio.current_task()
        self.dispatcher: Dispatcher | None = None

    def arm(self, journal: Journal) -> None:
        for arm in self._orders.arms:
            self._points.on(arm.point, self._told(arm, getattr(self, arm.action)(arm), journal), nth=arm.nth)

    def _told(self, arm: Arm, action: Action, journal: Journal) -> Action:
        def act() -> object:
            journal.write("fired", point=arm.point, action=arm.action)
            return action()

        return act

    def note(self, _: Arm) -> Action:
        """Do nothing: that the point was reached is worth knowing."""
        return lambda: None

    def kill(self, _: Arm) -> Action:
        return failpoints.kill

    def fail(self, arm: Arm) -> Action:
        kind = getattr(errors, arm.what, None) or getattr(builtins, arm.what)
        return failpoints.raising(kind("made to fail"))

    def block(self, _: Arm) -> Action:
        """Stand still for longer than the lease."""
        return failpoints.block(timedelta(seconds=1.4 * self._orders.lease))

    def wait(self, _: Arm) -> Action:
        """Take longer than the lease."""
        return failpoints.wait(timedelta(seconds=1.4 * self._orders.lease))

    def hold(self, _: Arm) -> Action:
        """Stand still until the flag is there."""
        return failpoints.block(Path(self._orders.flag).exists)

    def linger(self, _: Arm) -> Action:
        """Take until the flag is there."""
        return failpoints.wait(Path(self._orders.flag).exists)

    def until_renewed(self, _: Arm) -> Action:
        """Take until the lease was renewed."""
        return failpoints.wait(lambda: self._points.hits["extend.after"] > 0)

    def until_released(self, _: Arm) -> Action:
        """Take until claims were given back."""
        return failpoints.wait(lambda: self._points.hits["release.after"] > 0)

    def cancel(self, _: Arm) -> Action:
        """Cancel the whole of it, as Ctrl-C does."""
        return failpoints.cancel(self._task)

    def cancel_amid(self, arm: Arm) -> Action:
        """Cancel the whole of it, and be in the middle of this call then."""
        cancel, wait = self.cancel(arm), failpoints.wait(timedelta(seconds=30))

        def act() -> object:
            cancel()
            return wait()

        return act

    def cancel_self(self, _: Arm) -> Action:
        return failpoints.cancel()

    def stop_amid(self, _: Arm) -> Action:
        """Stop at once, in the middle of this call."""
        wait = failpoints.wait(timedelta(seconds=30))

        def act() -> object:
            assert self.dispatcher is not None
            self.dispatcher.stop_soon()
            self.dispatcher.stop_soon()
            return wait()

        return act

    def cut(self, _: Arm) -> Action:
        assert self._proxy is not None
        return failpoints.cut(self._proxy)

    def lose(self, arm: Arm) -> Action:
        """Lose the reply to the next COMMIT, or to the next statement with a certain id among its values."""
        assert self._proxy is not None
        ids = {"worker": self._worker.bytes, "message": UUID(self._orders.ids[0]).bytes}
        return failpoints.lose_reply(self._proxy, ids.get(arm.what, arm.what.encode()))

    def lose_request(self, arm: Arm) -> Action:
        """Lose the next request that holds something, before it gets to the server."""
        assert self._proxy is not None
        return partial(self._proxy.drop_request, arm.what.encode())


@asynccontextmanager
async def proxied(orders: Orders) -> AsyncGenerator[tuple[str, Proxy | None]]:
    """Yield the URL to use, which leads through a proxy if the network is to fail."""
    if not any(arm.action in {"cut", "lose", "lose_request"} for arm in orders.arms):
        yield orders.url, None
        return
    url = urlsplit(orders.url)
    async with Proxy(url.hostname or "", url.port or 0) as proxy:
        login, _, _ = url.netloc.rpartition("@")
        netloc = f"{login}@127.0.0.1:{proxy.port}" if login else f"127.0.0.1:{proxy.port}"
        yield url._replace(netloc=netloc).geturl(), proxy


async def dispatch(orders: Orders, journal: Journal, worker: UUID) -> None:
    points = Failpoints()
    async with proxied(orders) as (url, proxy):
        keep = timedelta(days=1 if orders.keep else 0)
        store = store_from_url(url, namespace=orders.namespace, keep_delivered=keep, timeout=timedelta(seconds=5))
        faults = Faults(orders, points, proxy, worker)
        dispatcher = faults.dispatcher = Dispatcher(
            TappedStore(store, points),
            tapped_send(journal.send, points) if orders.each else TappedPublisher(journal, points),
            worker=worker,
            batch=100,
            batches_in_flight=1,
            concurrency=1,
            lease=timedelta(seconds=orders.lease),
            publish_timeout=timedelta(seconds=orders.publish_timeout),
            poll_interval=timedelta(seconds=0.05),
            sweep_interval=timedelta(seconds=orders.sweep_interval),
            cleanup_interval=timedelta(seconds=orders.cleanup_interval),
            max_attempts=orders.max_attempts,
            backoff=lambda _: timedelta(seconds=0.05),
            outage_backoff=lambda _: timedelta(seconds=0.05),
            on_dead="skip" if orders.on_dead == "skip" else "block",
            listener=journal.listen,
        )
        faults.arm(journal)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, dispatcher.stop_soon)
        await dispatcher.run()


# -- producer ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def pool_on(url: str) -> AsyncGenerator[Any]:
    """Open the pool that a program would use: asyncpg's own, or SQLAlchemy's for the others."""
    if url.startswith("postgres"):
        import asyncpg  # noqa: PLC0415 -- most workers need none of these

        async with asyncpg.create_pool(url, min_size=0, max_size=2) as pool:
            yield pool
        return
    from sqlalchemy import make_url  # noqa: PLC0415
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415

    driver = "sqlite+aiosqlite" if url.startswith("sqlite") else "mysql+asyncmy"
    engine = create_async_engine(make_url(url).set(drivername=driver))
    try:
        yield engine
    finally:
        await engine.dispose()


async def insert(connection: Any, namespace: str, identity: UUID) -> None:  # noqa: ANN401
    sql = f"INSERT INTO crash_business (namespace, id) VALUES ('{namespace}', '{identity}')"
    await (connection.exec_driver_sql(sql) if hasattr(connection, "exec_driver_sql") else connection.execute(sql))


async def is_stored(pool: Any, identity: UUID) -> bool:  # noqa: ANN401
    """Look for the witness of a transaction: its message."""
    outbox = Outbox(namespace="nobody")
    async with outbox.transaction(pool) as connection:
        text = "SELECT count(*) FROM postroom_outbox WHERE id = "
        if hasattr(connection, "exec_driver_sql"):
            value = f"x'{identity.hex}'" if connection.dialect.name == "mysql" else f"'{identity}'"
            answer = await connection.exec_driver_sql(text + value)
            return bool(answer.scalar())
        return bool(await connection.fetchval(f"{text}'{identity}'"))


async def commit_once(pool: Any) -> None:  # noqa: ANN401
    """Commit a transaction: the first one of a process may go another way than all that follow."""
    async with transactions_of(pool).begin():
        pass


async def produce(orders: Orders, journal: Journal, worker: UUID) -> None:
    """Store two messages with their business rows; after an unknown COMMIT look before doing it again."""
    points = Failpoints()
    async with proxied(orders) as (url, proxy), pool_on(url) as pool:
        if not orders.is_cold:
            await commit_once(pool)
        Faults(orders, points, proxy, worker).arm(journal)
        outbox = TappedOutbox(Outbox(namespace=orders.namespace), points)
        try:
            await store_both(outbox, pool, orders)
        except errors.CommitUnknownError:
            there = await is_stored(pool, UUID(orders.ids[0]))
            journal.write("heard", error="CommitUnknownError", stored=there)
            if not there:
                await store_both(outbox, pool, orders)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- whatever the caller hears is told
            journal.write("heard", error=type(error).__name__)
        else:
            journal.write("heard", error="nothing")


async def store_both(outbox: TappedOutbox, pool: Any, orders: Orders) -> None:  # noqa: ANN401
    async with outbox.transaction(pool) as connection:
        for identity, key in zip(map(UUID, orders.ids), ("a", None), strict=True):
            await insert(connection, orders.namespace, identity)
            await outbox.add(connection, Message(id=identity, topic="t", payload=b"{}", key=key))


async def main(orders: Orders) -> None:
    """Do what a worker is to do."""
    if orders.variant is not None:
        importlib.import_module("chaos.variants").apply(orders.variant)
    journal, worker = Journal(orders), UUID(bytes=os.urandom(16))
    from .receiver import consume  # noqa: PLC0415 -- which works with what is here

    work = {"produce": produce, "dispatch": dispatch, "consume": consume}[orders.role]
    try:
        await work(orders, journal, worker)
    except asyncio.CancelledError:
        journal.write("cancelled")
