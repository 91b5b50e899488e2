"""Proving that a handler is idempotent: however often a message comes, it ends as if it had come once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, Final, NoReturn

from ..errors import ConfigurationError
from ..handler import Handler
from ..message import Message
from ..middleware.chain import Middleware, check_order, connect
from ..middleware.transactional import transactional
from ..router import Router
from ..store import Delivered
from .cancelling import Moment, cuts
from .trial import Call, CheckedStore, Ending, Stage, Trial, TrialFailedError, shown

__all__ = ["check_idempotency"]

#: How many uses of a transaction are refused at the most.
LIMIT: Final = 1000
#: How many failures of scenarios that are alike are told in full.
TOLD: Final = 3


async def check_idempotency(  # noqa: PLR0913 -- one keyword for each choice a user has
    handler: Router | Handler,
    messages: Sequence[Message],
    *,
    store: CheckedStore,
    state: Call,
    reset: Call,
    middlewares: Sequence[Middleware] | None = None,
    any_order: bool = True,
    output: Callable[[Message], Hashable] | None = None,
    timeout: timedelta = timedelta(seconds=10),  # noqa: ASYNC109 -- of each delivery, not of the whole
) -> None:
    """Handle sample messages in every way in which they may come, and fail unless all ways end alike.

    The messages are delivered once, which is the reference; then twice in a row, twice at the same time, in another
    order, with a crash before the commit and one before the acknowledgement, with every use of the transaction refused
    in turn, and cancelled at every await. After each fault they are delivered again. Each time the state has to be that
    of the reference, and the outbox has to hold the same messages once. Nothing of a failed attempt may stay.

    Messages get a new id in each scenario; where a state or an output holds one, it is recognised. The outbox is
    emptied between scenarios, so use a database that is there for the test.

    Args:
        handler: A router, or the function that handles all of the messages.
        messages: Samples, in order; few are enough, for each is handled some fifty times.
        store: Where outbox and inbox are.
        state: Returns what the handler changes, as plain values that can be compared; a function or a coroutine
            function. Where rows come in no order of their own, it sorts them.
        reset: Brings the state back to where the handler begins.
        middlewares: What is around the handler, the first of them outermost; `transactional` by default.
        any_order: Whether messages of different keys may be handled in any order.
        output: What has to be the same of an output; by default everything but its id and time.
        timeout: How long one delivery may take.

    Raises:
        AssertionError: A scenario ended in another way; it says which, and what was different.
    """
    if not messages:
        raise ConfigurationError("check_idempotency() needs messages to deliver")
    around = (transactional(store, consumer="idempotency-check"),) if middlewares is None else tuple(middlewares)
    check_order(around)
    connect(around)
    router = handler if isinstance(handler, Router) else _router(handler, messages)
    stage = Stage(router, messages, around, store, state, reset, output or _output, timeout)
    opened = await store.open()
    try:
        reference = await _reference(stage)
        await _compare_all(stage, reference, any_order=any_order)
    finally:
        if opened:
            await store.close()


def _router(handler: Handler, messages: Sequence[Message]) -> Router:
    router = Router()
    for kind in sorted({message.type for message in messages}):
        router.add(kind, handler)
    return router


def _output(message: Message) -> Hashable:
    headers = tuple(sorted(message.headers.items()))
    place = (message.topic, message.type, message.key, message.tenant_id, message.dedupe_key)
    return (*place, message.content_type, headers, message.payload)


async def _reference(stage: Stage) -> Ending:
    """Deliver each message once, and see that a second time ends alike: all else is measured by it."""
    trial = await stage.begin()
    try:
        with trial.watching_tasks():
            await _once(trial)
    except TrialFailedError as error:
        raise AssertionError(f"delivered once: {error}") from trial.error
    finally:
        await _end(trial.left)
    if trial.left:
        names = ", ".join(sorted({_named(task) for task in trial.left}))
        raise AssertionError(
            f"delivered once: the handler returned while a task that it had started was at work: {names}. What it "
            "writes is not part of the transaction, and is lost in a crash; await it before the handler returns"
        )
    reference = await trial.look()
    if differing := await _ending(stage, reference, _once):
        raise AssertionError(
            _report("delivered once, and once again after a reset", differing) + "\nSo nothing can be compared: "
            "reset= must bring back everything that state= returns, and neither it nor the outputs may depend on time "
            "or chance; output= says what has to be the same of an output"
        )
    return reference


async def _compare_all(stage: Stage, reference: Ending, *, any_order: bool) -> None:
    """Run the other scenarios, and tell of all that ended differently."""
    scenarios: dict[str, Callable[[Trial], Awaitable[None]]] = {
        "delivered twice in a row": _twice,
        "delivered twice at the same time": _at_once,
        "crashed after the handler and before the commit, then delivered again": _crash_before_commit,
        "crashed after the commit and before the acknowledgement, then delivered again": _crash_before_ack,
    }
    if any_order and len(_lanes(stage.messages)) > 1:
        scenarios["delivered in another order, each key in its own"] = _reordered
    failures: list[str] = []
    for name, scenario in scenarios.items():
        if differing := await _ending(stage, reference, scenario):
            failures.append(_report(name, differing))
    failures += _some([failure async for failure in _refused(stage, reference)])
    for moment in ("waiting", "answered"):
        failures += _some([failure async for failure in _cancelled(stage, reference, moment)])
    if failures:
        raise AssertionError("the handler is not idempotent\n" + "\n".join(failures))


async def _ending(stage: Stage, reference: Ending, scenario: Callable[[Trial], Awaitable[None]]) -> list[str]:
    """Run a scenario, and say how it ended differently."""
    trial = await stage.begin()
    try:
        await scenario(trial)
    except TrialFailedError as error:
        return [str(error)]
    return reference.differing(await trial.look())


async def _once(trial: Trial) -> None:
    for message in trial.messages:
        await trial.deliver(message)


async def _twice(trial: Trial) -> None:
    for message in trial.messages:
        await trial.deliver(message)
        await trial.deliver(message)


async def _at_once(trial: Trial) -> None:
    for message in trial.messages:
        both = await asyncio.gather(trial.deliver(message), trial.deliver(message), return_exceptions=True)
        for error in filter(None, both):  # after both have ended, so that neither reaches into what follows
            raise error


async def _reordered(trial: Trial) -> None:
    for lane in reversed(_lanes(trial.messages)):
        for message in lane:
            await trial.deliver(message)


async def _crash_before_commit(trial: Trial) -> None:
    for message in trial.messages:
        before = await trial.look()
        trial.crash = "before commit"
        outcome = await trial.attempt(message)
        trial.crash = None
        if isinstance(outcome, Delivered):
            _fail(f"{shown(message)} was acknowledged although its transaction had failed")
        if left := before.differing(await trial.look()):
            _fail("\n".join([f"the attempt that failed left something behind, of {shown(message)}:", *left]))
        await trial.deliver(message)


async def _crash_before_ack(trial: Trial) -> None:
    for message in trial.messages:
        trial.crash = "before ack"
        await trial.attempt(message)
        trial.crash = None
        await trial.deliver(message)


async def _refused(stage: Stage, reference: Ending) -> AsyncGenerator[str]:
    """Refuse the first use of the transaction by the handler, then the second, and so on."""
    for number in range(1, LIMIT):
        trial = await stage.begin()
        trial.refuse = number
        differing = await _finished(trial, reference, _once(trial))
        if trial.uses < number:
            return
        if differing:
            yield _report(f"use {number} of the transaction refused, then delivered again", differing)


async def _cancelled(stage: Stage, reference: Ending, moment: Moment) -> AsyncGenerator[str]:
    """Cancel the handling at its first await, then at the second, and so on."""
    when = "while it waited" if moment == "waiting" else "as the answer came"
    for cut in cuts(moment=moment):
        trial = await stage.begin()
        patience = stage.timeout * (1 + len(trial.messages))
        differing = await _finished(trial, reference, cut.run(_each(trial), patience=patience))
        if differing:
            yield _report(f"cancelled at await {cut.at} {when}, {cut.where}, then delivered again", differing)


async def _each(trial: Trial) -> None:
    for message in trial.messages:
        await trial.attempt(message)


async def _finished(trial: Trial, reference: Ending, disturbed: Awaitable[None]) -> list[str]:
    """Deliver what is left after a disturbance, and say how it ended differently."""
    try:
        await disturbed
        for message in trial.messages:
            if message.id not in trial.acked:
                await trial.deliver(message)
    except (TrialFailedError, AssertionError) as error:
        return [str(error)]
    return reference.differing(await trial.look())


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Let nothing of a scenario reach into the next test."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _lanes(messages: Sequence[Message]) -> list[list[Message]]:
    """Return what has to stay in order: the messages of a key, or a single one without."""
    lanes: dict[object, list[Message]] = {}
    for message in messages:
        lanes.setdefault(message.id if message.key is None else (message.topic, message.key), []).append(message)
    return list(lanes.values())


def _fail(why: str) -> NoReturn:
    raise TrialFailedError(why)


def _named(task: asyncio.Task[Any]) -> str:
    return str(getattr(task.get_coro(), "__qualname__", task.get_name()))


def _some(failures: list[str]) -> list[str]:
    left = len(failures) - TOLD
    return failures if left <= 0 else [*failures[:TOLD], f"- and {left} more of this kind"]


def _report(scenario: str, differing: Sequence[str]) -> str:
    lines = "\n".join(differing).splitlines()
    return "\n".join([f"- {scenario}:", *(f"    {line}" for line in lines)])
