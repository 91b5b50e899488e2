"""A consumer process: an ordinary `Consumer` whose handler writes an effect and an output, and fails by the dice."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

from postroom import Backoff, Consumer, JSONCodec, Message, Router, Transaction, transactional
from postroom.errors import RejectError, StoreError
from postroom.events import DeadLettered, DuplicateSkipped, Event, HandlingFailed
from postroom.inbox import Mode
from postroom.middleware import Next
from postroom.middleware.transactional import TransactionalStore

from .desk import EFFECTS, EFFECTS_KEY
from .dispatcher import watch_vitals
from .groups import GROUPS, HANDLINGS, OUTPUTS, TOPICS, group_of
from .history import History
from .line import Line
from .stores import handling_store
from .worker import Setting, at_work

__all__ = ["WRITERS", "Handler", "main", "recording"]

#: Of a thousand handlings how many go wrong in some way, which depends on message and hand-out alone.
_MISHAPS: Final = {"fail": 20, "fail late": 20, "stumble": 10, "dawdle": 15}
#: What a handler does with kinds of messages, always and after its effect was written.
_DOOM: Final[dict[str, Exception]] = {
    "sour": RuntimeError("chaos-sour"),
    "spurned": RejectError("chaos-spurned"),
}
_COLUMNS: Final = f"INSERT INTO {EFFECTS} (consumer, id, handle, output) VALUES"

Write = Callable[..., Any]


def _asyncpg(connection: Any, *values: object) -> Awaitable[object]:  # noqa: ANN401 -- each knows its own
    executed: Awaitable[object] = connection.execute(f"{_COLUMNS} ($1, $2, $3, $4)", *values)
    return executed


def _psycopg(connection: Any, *values: object) -> Awaitable[object]:  # noqa: ANN401
    executed: Awaitable[object] = connection.execute(f"{_COLUMNS} (%s, %s, %s, %s)", values)
    return executed


async def _asyncmy(connection: Any, *values: object) -> None:  # noqa: ANN401
    async with connection.cursor() as cursor:
        await cursor.execute(f"{_COLUMNS} (%s, %s, %s, %s)", values)


def _sqlite(connection: Any, *values: object) -> None:  # noqa: ANN401
    connection.execute(f"{_COLUMNS} (?, ?, ?, ?)", values)


async def _redis(connection: Any, consumer: str, identity: str | None, handle: int, output: str) -> None:  # noqa: ANN401
    if identity is None:
        # Of the wrong kind for its key, which nobody knows before the commit.
        await connection.hset(EFFECTS_KEY, "consumer", consumer)
        return
    effect = {"consumer": consumer, "id": identity, "handle": handle, "output": output}
    await connection.rpush(EFFECTS_KEY, json.dumps(effect))


#: Writes an effect through the connection of a transaction, by the scheme of the store's URL.
WRITERS: Final[dict[str, Write]] = {
    "postgresql": _asyncpg,
    "postgresql+psycopg": _psycopg,
    "mysql": _asyncmy,
    "sqlite": _sqlite,
    "redis": _redis,
}


class Handler:
    """Writes a row that stands for the effect, and returns a message that names it."""

    def __init__(self, setting: Setting, history: History) -> None:
        self._group = group_of(setting.name)
        self._seed = setting.seed
        self._store = setting.store
        self._write = WRITERS[setting.url.partition(":")[0]]
        self._history = history

    async def __call__(self, event: dict[str, Any], message: Message, transaction: Transaction) -> Message | None:
        """Handle a message."""
        output = Message(topic=OUTPUTS, type="chaos.effect", payload=JSONCodec().encode({"n": 0, "kind": "plain"}))
        told = {"consumer": self._group, "id": str(message.id), "handle": message.token}
        self._history.write("effect", "invoke", **told)
        mishap = self._mishap(message)
        if mishap == "fail":
            raise RuntimeError("chaos-failure")
        # Not a unique key in sight: a second effect would be seen.
        await transaction.do(self._write, self._group, str(message.id), message.token, str(output.id))
        if mishap == "dawdle":
            # Past the time for which the broker waits; on SQLite everybody else stands still meanwhile.
            await asyncio.sleep(0.7 if self._store == "sqlite" else 2.5)
        if mishap == "fail late":
            raise RuntimeError("chaos-failure")
        if event["kind"] == "deadly":
            self._history.write("fault", "ok", kind="killed by a message", victim="consumer", length=0.0)
            os.kill(os.getpid(), signal.SIGKILL)
        if event["kind"] in _DOOM:
            raise _DOOM[event["kind"]]
        if mishap == "stumble":
            with contextlib.suppress(Exception):  # as careless code does
                await transaction.do(self._write, self._group, None, None, None)
            if self._store in {"postgres", "pgbouncer"}:
                return None  # with nothing more to write, only COMMIT can tell that all of it is lost
        return output

    def _mishap(self, message: Message) -> str:
        dice = hashlib.sha256(f"{self._seed} {self._group} {message.id} {message.token}".encode()).digest()
        number = int.from_bytes(dice[:4]) % 1000
        for mishap, share in _MISHAPS.items():
            if number < share:
                return mishap
            number -= share
        return ""


def recording(group: str, history: History) -> Callable[[Message, Next], Awaitable[Sequence[Message]]]:
    """Return a middleware for the outside of all others, which writes down that they have ended well."""

    async def record(message: Message, call_next: Next) -> Sequence[Message]:
        outputs = await call_next(message)
        history.write("handled", "ok", consumer=group, id=str(message.id), handle=message.token)
        return outputs

    return record


def _hear(history: History, group: str, event: Event) -> None:
    if isinstance(event, DuplicateSkipped | DeadLettered):
        history.write("event", "ok", name=type(event).__name__, consumer=group, id=str(event.message_id))
    elif isinstance(event, HandlingFailed):
        kind = event.error.partition(":")[0]
        history.write("event", "ok", name="HandlingFailed", consumer=group, id=str(event.message_id), error=kind)


async def _opened(store: TransactionalStore) -> None:
    """Connect, as soon as there is something to connect to."""
    while True:
        with contextlib.suppress(StoreError):
            await store.open()
            return
        await asyncio.sleep(0.2)


def _consumer(setting: Setting, store: TransactionalStore, history: History) -> Consumer:
    group = group_of(setting.name)
    mode: Mode = GROUPS[group]
    router, handler, hear = Router(), Handler(setting, history), partial(_hear, history, group)
    for topic in TOPICS:
        router.add(topic, handler.__call__)
    return Consumer(
        Line(setting.port, group, history),
        router,
        recording(group, history),
        transactional(store, consumer=group, mode=mode, max_attempts=HANDLINGS, listener=hear),
        timeout=timedelta(seconds=6),
        shutdown_grace=timedelta(seconds=3),
        backoff=Backoff(base=timedelta(milliseconds=50), max=timedelta(milliseconds=400)),
        listener=hear,
    )


async def _run(setting: Setting) -> None:
    history = History(setting.place, setting.name)
    store = handling_store(setting.store, setting.url)
    consumer = _consumer(setting, store, history)
    running = asyncio.create_task(_serve(store, consumer))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    history.write("start", "ok", life=setting.life, skew=setting.skew)
    at_work()
    vitals = asyncio.create_task(watch_vitals(history))
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    consumer.stop_soon()
    await running
    vitals.cancel()
    waiting.cancel()
    await store.close()
    history.write("stop", "ok", life=setting.life)


async def _serve(store: TransactionalStore, consumer: Consumer) -> None:
    await _opened(store)
    await consumer.run()


def main(setting: Setting) -> None:
    """Consume until told to stop."""
    asyncio.run(_run(setting))
