"""Publishing: takes claims to the publisher, and decides what becomes of each of them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from .breakers import Breakers
from .broker import INTERRUPTS, OUTAGES, Attempt, Each, Publisher, attempt, describe, runs
from .custody import Custody
from .errors import PublishUnknownError
from .message import Message
from .retry import Delay
from .slots import UnprovenSlots
from .store import Claim, Delivered, Outcome, Release, Retry, Settlement
from .verdict import NO_ANSWER, judge

__all__ = ["Policy", "Publishing", "Run"]

DELIVERED = Delivered()
UNREACHABLE = "the publisher answered that the destination is down"
#: How many messages travel alone at the same time, and how many are remembered that have to.
MAX_ALONE = 32
MAX_SUSPECTS = 10_000
#: How long a message waits where the store cannot park it and nothing is known of its destination.
SHORT_WAIT = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a dispatcher judges what its publisher answers."""

    backoff: Delay
    max_attempts: int
    #: How many seconds one call of a publisher of batches may take.
    timeout: float
    #: How many messages of destinations that have not answered yet are held at the same time.
    batch: int
    #: Whether the store parks messages.
    parks: bool


class Run(NamedTuple):
    """Claims that may be sent, in order."""

    claims: Sequence[Claim]
    is_probe: bool = False
    #: The destination among whose slots the run has to wait for one.
    slot_of: str | None = None


class Publishing:
    """Sends what may be sent, parks what has to wait, and hands over every outcome."""

    def __init__(
        self,
        publisher: Publisher,
        custody: Custody,
        breakers: Breakers,
        policy: Policy,
        stopping: asyncio.Event,
    ) -> None:
        """Set up; from when ``stopping`` is set, tasks are cancelled by the dispatcher and not by the publisher."""
        self._publisher = publisher
        self._custody = custody
        self._breakers = breakers
        self._policy = policy
        self._stopping = stopping
        #: What the publisher raised to end the program, and what is called then.
        self.interruption: BaseException | None = None
        self.on_interruption: Callable[[], None] = lambda: None
        #: Called with a message that was not delivered, with why, and with how many others failed for the same reason.
        self.on_failure: Callable[[Message, BaseException | str, int], None] = lambda _message, _error, _count: None
        #: Whether a message that is given back says that its destination is down; a reader may do so at any time.
        self.releases_are_outages: bool = True
        self.slots: UnprovenSlots = UnprovenSlots(
            publisher.concurrency // 2 if isinstance(publisher, Each) else 1, policy.batch
        )
        #: Destinations whose messages were parked because too many others have not answered yet.
        self.untried: OrderedDict[str, int] = OrderedDict()
        #: Parts that were in a batch to which no answer came; they travel alone until they are answered.
        self._suspects: OrderedDict[str, None] = OrderedDict()
        #: Calls with a single message, apart from the batches.
        self.alone: set[asyncio.Task[None]] = set()

    # -- admission ---------------------------------------------------------------------------------------------

    def admit(self, claims: Sequence[Claim]) -> list[Run]:
        """Return what may be sent, and park the rest."""
        if isinstance(self._publisher, Each):
            return [run for run in map(self._with_slot, self._up(claims)) if run is not None]
        if not self._breakers and not self._suspects:
            return [Run(claims)] if claims else []
        return self._up(claims)

    def _up(self, claims: Sequence[Claim]) -> list[Run]:
        """Return the runs whose destination is up, or is to be probed."""
        if not self._breakers or not self.releases_are_outages:
            return [Run(run) for run in runs_of(claims)]
        up: list[Run] = []
        for run in runs_of(claims):
            waits_for, is_probe = self._breakers.admit(run[0].message)
            if waits_for is not None:
                self._park(run, waits_for)
            elif is_probe:
                self._release(run[1:])
                up.append(Run(run[:1], is_probe=True))
            else:
                up.append(Run(run))
        return up

    def _with_slot(self, run: Run) -> Run | None:
        """Return a run, to wait for a slot if its destination has not answered yet.

        Park it instead where many of those wait, or if the destination has stopped answering and keeps others waiting.
        """
        if run.is_probe or not self.releases_are_outages:
            return run
        destination = self._breakers.naming.destination(run.claims[0].message)
        if self._breakers.is_proven(destination):
            if not self.is_hanging(destination):
                return run
        elif self.slots.join(destination):
            return Run(run.claims, slot_of=destination)
        self._park(run.claims, destination)
        self.untried.setdefault(destination, 0)
        self.untried.move_to_end(destination)  # where much comes, it is worth knowing soon
        return None

    def _park(self, run: Sequence[Claim], name: str) -> None:
        """Have the first message of a run wait for a destination; the others wait for the first."""
        self._custody.settle([Settlement(run[0], self._waiting_for(name))])
        self._release(run[1:])

    def _waiting_for(self, name: str) -> Release:
        if self._policy.parks:
            return Release(destination=name)
        return Release(self._breakers.wait(name) or SHORT_WAIT)

    def _release(self, claims: Sequence[Claim]) -> None:
        self._custody.settle([Settlement(claim, Release()) for claim in claims])

    # -- one message at a time ---------------------------------------------------------------------------------

    async def publish(self, runs: Sequence[Run]) -> None:
        """Publish what was admitted."""
        if isinstance(self._publisher, Each):
            later: list[Callable[[], object]] = []
            async with asyncio.TaskGroup() as group:
                for run in runs:
                    group.create_task(self._deliver(self._publisher, run, later))
            for conclude in later:
                conclude()
            return
        together, probes = self._without_suspects(runs)
        if together:
            await self._publish_batch(together, probes)

    async def _deliver(self, each: Each, run: Run, later: list[Callable[[], object]]) -> None:
        """Send the messages of a run one after the other, until one is not delivered."""
        claims, settled = run.claims, 0
        try:
            for claim in claims:
                began = time.monotonic()
                outcome = await self._send_in_turn(each, claim, run)
                settled += 1
                if isinstance(outcome, PublishUnknownError):
                    # Others that are under way may tell whether the destination works.
                    later.append(partial(self._conclude, [claim], [None], outcome, began))
                if not isinstance(outcome, Delivered):
                    break
            self._release(claims[settled:])
        except BaseException as error:
            if self._is_passed_on(error):
                raise
            self._fail(claims[settled:], error)
        finally:
            if run.slot_of is not None:
                self.slots.leave(run.slot_of)
            if run.is_probe:
                self._breakers.end_probe(claims[0].message)

    async def _send_in_turn(self, each: Each, claim: Claim, run: Run) -> Outcome | PublishUnknownError:
        """Send a message as soon as there is a slot, unless its destination has gone down meanwhile.

        Returns what was raised if nothing is known of the message, although it did not take long.
        """
        slot_of = None if run.slot_of is None or self._breakers.is_proven(run.slot_of) else run.slot_of
        has_slot = slot_of is not None and await self.slots.acquire(slot_of)
        try:
            sent = await self._send(each, claim, is_probe=run.is_probe)
        finally:
            if has_slot and slot_of is not None:
                self.slots.release(slot_of)
        if isinstance(sent, Release):
            self._custody.settle([Settlement(claim, sent)])
            return sent
        began, (answer, error, _) = sent
        if answer is None and isinstance(error, PublishUnknownError) and not run.is_probe:
            return error
        [outcome] = self._conclude([claim], [answer], error, began)
        return outcome

    async def _send(self, each: Each, claim: Claim, *, is_probe: bool) -> Release | tuple[float, Attempt[Outcome]]:
        """Send a message once the gate is open; return when that began and what was answered, or why it has to wait."""
        destination, called = self._breakers.naming.destination(claim.message), None
        await each.gate.enter(destination)
        try:
            blocked = None if is_probe else self._breakers.blocks(claim.message)
            if blocked is not None:
                return self._waiting_for(blocked)
            # If the lease has ended, another worker may have the message; this one has not sent it.
            if self.interruption is not None or not self._custody.is_safe(claim.message):
                return Release()
            began = time.monotonic()
            called = await each.send(claim.message, destination)
            return began, called
        finally:
            each.gate.leave(destination, is_answered=called is not None and not called.is_unknown)

    def is_hanging(self, destination: str) -> bool:
        """Tell whether calls to a destination hang that keep others waiting."""
        is_hogging = isinstance(self._publisher, Each) and self._publisher.gate.is_hogged_by(destination)
        return is_hogging or self.slots.is_stuck(destination)

    # -- batches -----------------------------------------------------------------------------------------------

    def _without_suspects(self, runs: Sequence[Run]) -> tuple[list[Claim], list[Claim]]:
        """Have suspects sent by themselves; return the other claims, and the probes among them."""
        together, probes = list[Claim](), list[Claim]()
        for run in runs:
            first = run.claims[:1]
            if not self._suspects or self._breakers.naming.part(first[0].message) not in self._suspects:
                together += run.claims
                probes += first if run.is_probe else ()
                continue
            self._release(run.claims[1:])
            self._send_alone(first, probes=first if run.is_probe else ())
        return together, probes

    def _send_alone(self, claims: Sequence[Claim], probes: Sequence[Claim]) -> None:
        """Publish a message in a call of its own, or park it if there are too many of those."""
        message = claims[0].message
        if len(self.alone) < MAX_ALONE:
            task = asyncio.create_task(self._publish_batch(claims, probes))
            self.alone.add(task)
            task.add_done_callback(self.alone.discard)
            return
        part = self._breakers.naming.part(message)
        self._breakers.find([part])
        self._park(claims, part)
        if probes:
            self._breakers.end_probe(message)

    async def _publish_batch(self, claims: Sequence[Claim], probes: Sequence[Claim] = ()) -> None:
        """Publish claims in one call, and settle them."""
        began = time.monotonic()
        try:
            answers, error = await self._answers([claim.message for claim in claims])
            self._conclude(claims, answers, error, began)
        except BaseException as error:
            if self._is_passed_on(error):
                raise
            self._fail(claims, error)
        finally:
            for claim in probes:
                self._breakers.end_probe(claim.message)

    async def _answers(self, messages: Sequence[Message]) -> tuple[Sequence[Outcome | None], BaseException | None]:
        """Return what the publisher says of each message, and what it raised."""
        called: Attempt[Sequence[Outcome | None]] = await attempt(
            self._publisher.publish_batch(messages), self._policy.timeout
        )
        error = called.error
        if called.is_unknown or isinstance(error, INTERRUPTS):
            return [None] * len(messages), error
        if error is not None:
            failed: Outcome = Release() if isinstance(error, OUTAGES) else Retry(describe(error))
            return [failed] * len(messages), error
        answers = list(called.answer or ())
        if len(answers) != len(messages):
            wrong = f"the publisher gave {len(answers)} outcomes for {len(messages)} messages"
            return [Retry(wrong)] * len(messages), None
        return answers, None

    # -- outcomes ----------------------------------------------------------------------------------------------

    def _conclude(
        self,
        claims: Sequence[Claim],
        answers: Sequence[Outcome | None],
        error: BaseException | None,
        began: float,
    ) -> Sequence[Outcome]:
        """Settle claims by what was answered, and take note of what that says about their destinations."""
        if error is None and all(type(answer) is Delivered for answer in answers):
            self._note_answers([claim.message for claim in claims])
            self._custody.settle([Settlement(claim, DELIVERED) for claim in claims])
            return [DELIVERED] * len(claims)
        self._report(claims, answers, error)
        if isinstance(error, INTERRUPTS):
            self._end_program(error)
            outcomes: list[Outcome] = [Release()] * len(claims)
        elif self._is_inconclusive(claims, answers, began):
            outcomes = [Release()] * len(claims)
        else:
            outcomes = self._judge(claims, answers, error, began)
        self._custody.settle(list(map(Settlement, claims, outcomes)))
        return outcomes

    def _report(self, claims: Sequence[Claim], answers: Sequence[Outcome | None], error: BaseException | None) -> None:
        """Report once what was raised, or what was answered of each message that failed."""
        if error is not None:
            self.on_failure(claims[0].message, error, len(claims))
            return
        for claim, answer in zip(claims, answers, strict=True):
            if answer is None or isinstance(answer, Retry):
                self.on_failure(claim.message, NO_ANSWER if answer is None else str(answer.error), 1)

    def _end_program(self, error: BaseException) -> None:
        if self.interruption is None:  # a second stop would give up what is under way
            self.interruption = error
            self.on_interruption()

    def _is_inconclusive(self, claims: Sequence[Claim], answers: Sequence[Outcome | None], began: float) -> bool:
        """Tell whether a whole batch was silent, so that any of its messages may be what it waited for."""
        if len(claims) == 1 or any(answer is not None for answer in answers):
            return False
        naming = self._breakers.naming
        parts = {naming.part(claim.message) for claim in claims}
        destinations = {naming.destination(claim.message) for claim in claims}
        if len(parts) == 1:
            return False
        self._suspects.update(dict.fromkeys(parts))
        while len(self._suspects) > MAX_SUSPECTS:
            self._suspects.popitem(last=False)
        return len(destinations) > 1 or any(self._breakers.has_answered_since(name, began) for name in destinations)

    def _judge(
        self,
        claims: Sequence[Claim],
        answers: Sequence[Outcome | None],
        error: BaseException | None,
        began: float,
    ) -> list[Outcome]:
        messages = [claim.message for claim in claims]
        destinations = self._breakers.naming.destinations(messages)
        verdict = judge(
            messages,
            answers,
            destinations=destinations,
            alive={name for name in set(destinations) if self._breakers.has_answered_since(name, began)},
            backoff=self._policy.backoff,
            max_attempts=self._policy.max_attempts,
        )
        self._note_answers([messages[index] for index in verdict.answered])
        if self.releases_are_outages:
            self._wait(messages, verdict.outcomes, verdict.down, error)
        return verdict.outcomes

    def _note_answers(self, messages: Sequence[Message]) -> None:
        """Take note of messages whose destinations have answered."""
        if self.releases_are_outages:
            self._breakers.answer(messages)
            self._clear_suspects(messages)
            if self.slots or self.untried:
                self._welcome(set(self._breakers.naming.destinations(messages)))

    def _welcome(self, destinations: Iterable[str]) -> None:
        """Let messages go on that waited for an answer of their destination, here or in the store."""
        for destination in destinations:
            self.slots.dissolve(destination)
            if self.untried.pop(destination, None) is not None:
                self._breakers.recover(destination)

    def _clear_suspects(self, messages: Sequence[Message]) -> None:
        if self._suspects:
            for message in messages:
                self._suspects.pop(self._breakers.naming.part(message), None)

    def _wait(
        self,
        messages: Sequence[Message],
        outcomes: list[Outcome],
        down: Sequence[int],
        error: BaseException | None,
    ) -> None:
        """Have messages wait for their destination, unless the publisher said for how long."""
        if not down:
            return
        why = UNREACHABLE if error is None else describe(error)
        names = self._breakers.fail([messages[index] for index in down], why)
        for name in names:
            self.slots.dissolve(name)
        for index, name in zip(down, names, strict=True):
            if outcomes[index] == Release():
                outcomes[index] = self._waiting_for(name)

    def _is_passed_on(self, error: BaseException) -> bool:
        """Tell whether an error comes of the end of this task, and not of the publisher."""
        is_end = isinstance(error, asyncio.CancelledError) and self._stopping.is_set()
        return is_end or (isinstance(error, GeneratorExit) and not _has_loop())

    def _fail(self, claims: Sequence[Claim], error: BaseException) -> None:
        """Settle claims that have no outcome yet as failed: a batch must not end without, whatever went wrong."""
        left = self._custody.without_outcome(claims)
        if isinstance(error, INTERRUPTS):
            self._end_program(error)
            self._release(left)
            return
        if left:
            self.on_failure(left[0].message, error, len(left))
        messages = [claim.message for claim in left]
        failed = [Retry(describe(error))] * len(left)
        policy = self._policy
        destinations = [message.topic for message in messages]
        verdict = judge(
            messages, failed, destinations=destinations, backoff=policy.backoff, max_attempts=policy.max_attempts
        )
        self._custody.settle(list(map(Settlement, left, verdict.outcomes)))


def runs_of(claims: Sequence[Claim]) -> list[list[Claim]]:
    """Return the claims that have to follow each other."""
    return [[claims[index] for index in run] for run in runs([claim.message for claim in claims])]


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
