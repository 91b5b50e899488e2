"""Trials: sample messages handled by a consumer's middlewares, with faults that can be switched on."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, Literal, Protocol, TypeAlias, cast
from uuid import UUID, uuid4

from ..brokers.memory import MemoryBroker
from ..consumer import Consumer
from ..delivery import Delivery
from ..errors import StoreUnavailableError
from ..message import Message, uuid7
from ..middleware.chain import Middleware, Next
from ..middleware.transactional import TransactionalStore
from ..router import Router
from ..store import ClaimTerms, Dead, Delivered, Outcome, Settlement, Store
from ..transaction import Transaction, entered, in_transaction
from .differences import Ids, counted, differences, known

__all__ = ["Call", "CheckedStore", "Ending", "Stage", "Trial", "TrialFailedError", "shown"]

#: Reads or changes something of the application; what it returns is awaited if it can be.
Call: TypeAlias = Callable[[], object]

#: How often a message is delivered before it counts as one that is never acknowledged.
TRIES: Final = 5

#: Whether this code runs within the handler, so that what it starts is the handler's.
_inside: ContextVar[bool] = ContextVar("postroom_trial_inside", default=False)


class CheckedStore(Store, TransactionalStore, Protocol):
    """A store whose outbox can be read, and written in the transactions of handlers."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What all trials have in common."""

    router: Router
    messages: Sequence[Message]
    middlewares: tuple[Middleware, ...]
    store: CheckedStore
    state: Call
    reset: Call
    output: Callable[[Message], Hashable]
    timeout: timedelta

    async def begin(self) -> Trial:
        """Begin a trial with a clean state, an empty outbox and messages that nobody has seen."""
        await _call(self.reset)
        await self.drain()
        return Trial(self)

    async def drain(self) -> list[Message]:
        """Take everything out of the outbox, also what dedupe keys are remembered by."""
        terms = ClaimTerms(worker=uuid4(), max_attempts=1_000)
        taken: list[Message] = []
        while claims := await self.store.claim(100, terms):
            taken += [claim.message for claim in claims]
            await self.store.settle([Settlement(claim, Delivered()) for claim in claims])
        while await self.store.purge(older_than=timedelta(0)):
            pass
        return taken


@dataclass(frozen=True, slots=True)
class Ending:
    """What a trial led to."""

    state: object
    outputs: Counter[Hashable]

    def differing(self, found: Ending) -> list[str]:
        """Say how another ending differs from this one."""
        return [*differences(self.state, found.state), *counted(self.outputs, found.outputs)]


class TrialFailedError(Exception):
    """A trial could not be brought to its end."""


class Trial:
    """One trial: its messages, the faults that are switched on, and who handles."""

    def __init__(self, stage: Stage) -> None:
        self.crash: Literal["before commit", "before ack"] | None = None
        #: Which use of a transaction by the handler fails, counted from 1.
        self.refuse = 0
        self.uses: int = 0
        self.messages: list[Message] = [replace(sample, id=uuid7()) for sample in stage.messages]
        self.acked: set[UUID] = set()
        #: Tasks that the handler started and did not wait for.
        self.left: list[asyncio.Task[Any]] = []
        #: What the handler raised at last.
        self.error: Exception | None = None
        self._stage = stage
        self._ids: Ids = {new.id: sample.id for new, sample in zip(self.messages, stage.messages, strict=True)}
        self._attempts = Counter[UUID]()
        self._outputs: list[Message] = []
        self._born: list[asyncio.Task[Any]] = []
        self._consumer = Consumer(
            MemoryBroker().subscribe("nothing", group="nobody"),
            self._stage.router,
            self._outermost,
            *self._stage.middlewares,
            self._innermost,
            timeout=self._stage.timeout,
            listener=lambda _: None,
        )

    async def look(self) -> Ending:
        """Return what came of the messages so far, in the words of the samples."""
        self._outputs += await self._stage.drain()
        state = known(await _call(self._stage.state), self._ids)
        return Ending(state, Counter(_hashable(known(self._stage.output(one), self._ids)) for one in self._outputs))

    async def deliver(self, message: Message) -> None:
        """Deliver a message until it is acknowledged."""
        outcome: Outcome | None = None
        for _ in range(TRIES):
            outcome = await self.attempt(message)
            if isinstance(outcome, Delivered):
                return
            if isinstance(outcome, Dead):
                break
        why = getattr(outcome, "error", "it was released")
        raise TrialFailedError(f"{shown(message)} was never acknowledged: {why}") from self.error

    async def attempt(self, message: Message) -> Outcome | None:
        """Deliver a message once."""
        self._attempts[message.id] += 1

        async def settle(outcome: Outcome) -> None:
            await asyncio.sleep(0)  # a broker takes its time, in which much may happen
            if isinstance(outcome, Delivered):
                self.acked.add(message.id)

        delivery = Delivery(replace(message, attempt=self._attempts[message.id]), settle)
        await self._consumer.handle(delivery)
        return delivery.outcome

    async def _outermost(self, message: Message, call_next: Next) -> Sequence[Message]:
        outputs = await call_next(message)
        if self.crash == "before ack":
            raise simulated("the process died before the message was acknowledged")
        return outputs

    async def _innermost(self, message: Message, call_next: Next) -> Sequence[Message]:
        token = _inside.set(True)
        try:
            outputs = await self._in_transaction(message, call_next)
        except Exception as error:
            self.error = error
            raise
        finally:
            _inside.reset(token)
            # Who has been cancelled is on its way out, and may not be waited for.
            self.left += [task for task in self._born if not task.done() and not task.cancelling()]
            self._born.clear()
        if self.crash == "before commit":
            raise simulated("the process died before the commit")
        return outputs

    async def _in_transaction(self, message: Message, call_next: Next) -> Sequence[Message]:
        transaction = in_transaction()
        if transaction is None:
            return await call_next(message)
        with entered(_watched(transaction, self._use)):
            return await call_next(message)

    def _use(self) -> None:
        self.uses += 1
        if self.uses == self.refuse:
            raise simulated("the database refused")

    @contextmanager
    def watching_tasks(self) -> Generator[None]:
        """Notice the tasks that handlers start."""
        loop = asyncio.get_running_loop()
        usual = loop.get_task_factory()

        def start(loop: asyncio.AbstractEventLoop, work: Any, **rest: Any) -> asyncio.Future[Any]:  # noqa: ANN401
            task = asyncio.Task(work, loop=loop, **rest) if usual is None else usual(loop, work, **rest)
            if _inside.get() and isinstance(task, asyncio.Task):
                self._born.append(task)
            return task

        loop.set_task_factory(start)
        try:
            yield
        finally:
            loop.set_task_factory(usual)


class _Watched(Transaction):
    """The transaction of a handler, which asks before each use."""

    use: Callable[[], None]

    @property
    def connection(self) -> Any:  # noqa: ANN401
        """The connection or session that holds the transaction."""
        self.use()
        return super().connection


def _watched(transaction: Transaction, use: Callable[[], None]) -> Transaction:
    """Return a second handle of a transaction, of its own kind too, so that whoever opened it knows it again."""
    kind = type("Watched", (_Watched, type(transaction)), {"use": staticmethod(use)})
    watched = cast("Transaction", object.__new__(kind))  # the kind is made here, and known to nobody
    watched.__dict__ = transaction.__dict__  # one state: what ends the one ends the other
    return watched


def simulated(what: str) -> StoreUnavailableError:
    # An error of the store is no fault of the message, so no middleware puts it aside as a dead letter.
    return StoreUnavailableError(f"simulated: {what}")


async def _call(function: Call) -> object:
    answer = function()
    return await answer if inspect.isawaitable(answer) else answer


def _hashable(value: object) -> Hashable:
    """Return what can be counted of a value in which sequences are lists, as `known` makes them."""
    if isinstance(value, list):
        return tuple(_hashable(item) for item in cast("list[object]", value))
    return frozenset(cast("set[Hashable]", value)) if isinstance(value, set) else value


def shown(message: Message) -> str:
    """Name a message in a report."""
    return f"{message.type!r} with key {message.key!r}" if message.key is not None else repr(message.type)
