"""One case of the crash matrix about a consumer, from the fault to what must be seen after it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from postroom import uuid7

from .cases import Receiving
from .nursery import Worker, start, whole_lines
from .post import Post
from .receiver import POISON, QUIET
from .sites import site_of
from .worker import Arm, Orders

__all__ = ["receive"]

PATIENCE: Final = 15.0
#: How many messages the handler returns.
OUTPUTS: Final = 2


def receive(case: Receiving, url: str, folder: Path, variant: str | None) -> None:
    """Run a case; raise AssertionError if store or broker are not as its row says."""
    with closing(Post.create(folder / "post.sqlite3")) as post:
        run = _Run(case, url, folder, post, variant)
        for _ in range(case.entries):
            post.put(run.message, POISON if case.is_poison else QUIET if case.is_quiet else b"{}")
        run.go()
        run.check()


class _Run:
    """What a case works with."""

    def __init__(self, case: Receiving, url: str, folder: Path, post: Post, variant: str | None) -> None:
        self.message = uuid7()
        self._case = case
        self._site = site_of(url)
        self._post = post
        self._variant = variant
        self._folder = folder
        self._consumer = uuid4().hex
        self._journal = folder / "journal"
        self._journal.touch()

    @contextmanager
    def worker(self, name: str, arms: Sequence[Arm]) -> Iterator[Worker]:
        orders = Orders(
            name=name,
            url=self._site.url,
            namespace=self._consumer,
            journal=str(self._journal),
            role="consume",
            variant=self._variant,
            arms=arms,
            flag=str(self._folder / name),
            ids=[str(self.message)],
            post=str(self._folder / "post.sqlite3"),
            takes_after=str(self._folder / "rescue") if name == "rescuer" else "",
            mode=self._case.mode,
            handle_timeout=self._case.handle_timeout if name == "victim" else 30,
            is_impatient=self._case.is_impatient and name == "rescuer",
            is_cold=self._case.is_cold,
        )
        worker = start(orders)
        try:
            yield worker
        finally:
            worker.end()

    def go(self) -> None:
        """Let the fault happen, and see to it that the message gets to where it should."""
        case = self._case
        with ExitStack() as stack:
            # Who is to wait for the first one's locks is there before: it would wait for them to open its store.
            rescuer = self._rescuer(stack) if case.waits else None
            victim = stack.enter_context(self.worker("victim", case.arms))
            if case.sequel == "alone":
                self._go_alone(victim)
                return
            if case.sequel in {"stalled", "shot"}:
                self._until_fired()
            else:
                assert victim.wait(PATIENCE) == (-signal.SIGKILL if case.sequel == "dead" else 0)
            self._check_crash()
            self._post.give_back("victim")
            rescuer = rescuer or self._rescuer(stack)
            self._rescue(victim)
            if case.sequel == "stalled":
                self._until(lambda: bool(self._lines("AckFailed", "victim")), "the acknowledgement that comes too late")
                _stop(victim)
            _stop(rescuer)

    def _go_alone(self, victim: Worker) -> None:
        self._until_fired()
        if self._case.unheard:
            self._post.give_back("victim")
        self._until_acked()
        _stop(victim)

    def _rescuer(self, stack: ExitStack) -> Worker:
        """Start a consumer in which nothing goes wrong; it takes nothing before it is told to."""
        rescuer = stack.enter_context(self.worker("rescuer", [Arm("tx.begin", "note")]))
        self._until(lambda: bool(self._lines("ConsumerStarted", "rescuer")), "the start of the second consumer")
        return rescuer

    def _rescue(self, victim: Worker) -> None:
        """Have the second consumer take the message, and let the first go on, or die, while that is under way."""
        (self._folder / "rescue").touch()
        if self._case.waits:
            self._until_waiting()
        else:
            self._until_acked()
        if self._case.sequel == "shot":
            os.kill(victim.pid, signal.SIGKILL)
        (self._folder / "victim").touch()
        self._until_acked()

    # -- wait ------------------------------------------------------------------------------------------------------

    def _until_fired(self) -> None:
        """Wait for every fault; a case that never got there shows nothing."""
        arms = self._case.arms
        self._until(lambda: len(self._lines("fired", "victim")) == len(arms), f"reaching {arms}")

    def _until_waiting(self) -> None:
        """Wait until the second consumer waits for the first, or has given that up; it must not acknowledge."""
        self._until(lambda: bool(self._lines("fired", "rescuer")), "the beginning of the second transaction")
        if self._case.is_impatient:
            self._until(lambda: bool(self._post.told()), "the second consumer giving up")
            failures = [line["error"].partition(":")[0] for line in self._lines("HandlingFailed", "rescuer")]
            assert set(failures) == {"StoreContentionError"}
        else:
            self._until(self._site.has_waiting, "the second consumer waiting")
        assert not self._is_done(), "acknowledged while somebody else was at it"

    def _until_acked(self) -> None:
        self._until(self._is_done, "the acknowledgement")

    def _is_done(self) -> bool:
        return set(self._post.states()) == {"acked"}

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not happen: {self._post.told()}\n{self._journal.read_text()}")
            time.sleep(0.01)

    def _lines(self, what: str, who: str | None = None) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in whole_lines(self._journal)]
        return [line for line in found if line["what"] == what and who in {None, line["who"]}]

    # -- look ------------------------------------------------------------------------------------------------------

    def _check_crash(self) -> None:
        """See that store and broker are as the row says, right after the fault."""
        case = self._case
        is_buried = case.is_poison and case.arms[-1].point == "bury.after"
        self._check_store(int(case.stored), letters=int(is_buried))
        is_acked = case.stored and case.arms[-1].point == "ack.after"
        assert self._post.states() == ["acked" if is_acked else "waiting"]

    def check(self) -> None:
        """See that the effect is there once, and that everybody said what they should."""
        case, journal = self._case, self._journal.read_text()
        self._check_store(int(not case.is_poison), letters=int(case.is_poison))
        told = self._post.told()
        outcomes = [one.outcome for one in told]
        if case.is_impatient:
            outcomes = list(dict.fromkeys(outcomes))  # how often it gives up is a matter of time
        assert outcomes == list(case.told), f"{outcomes}\n{journal}"
        is_rescued = case.sequel != "alone" and case.arms[-1].point != "ack.after"
        # Who has given up may be overtaken by the first one, once that goes on.
        assert told[-1].who in {"rescuer" if is_rescued else "victim", "victim" if case.is_impatient else ""}
        runs = self._lines("handled")
        assert (len(runs), len(self._lines("DuplicateSkipped"))) == (case.runs, case.duplicates), journal
        failures = [line["error"].partition(":")[0] for line in self._lines("HandlingFailed", "victim")]
        assert failures == list(case.errors) if case.errors is not None else len(failures) == 1, failures
        assert bool(self._lines("AckFailed", "victim")) == case.ack_fails, journal
        if case.new_session and len(runs) > 1 and not self._site.url.startswith("sqlite"):
            assert runs[0]["session"] != runs[1]["session"], "a connection in an unknown state was used again"

    def _check_store(self, effects: int, *, letters: int) -> None:
        site, consumer = self._site, self._consumer
        assert site.business(consumer) == [self.message] * effects, "effects"
        assert site.marks(consumer) == effects, "inbox rows"
        outputs = 0 if self._case.is_quiet else OUTPUTS * effects
        assert [row.status for row in site.rows(consumer)] == ["pending"] * outputs, "outbox rows"
        assert site.letters(consumer) == letters, "dead letters"


def _stop(worker: Worker) -> None:
    assert worker.stop(PATIENCE) == 0, "a consumer that was asked to stop failed"
