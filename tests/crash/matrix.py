"""One case of the crash matrix, from the fault to what must be seen after it."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

from postroom import uuid7

from .cases import Case, Dispatching, Producing, Receiving, State
from .nursery import Worker, start, whole_lines
from .reception import receive
from .sites import Row, Site, site_of
from .table import CASES
from .worker import Arm, Orders

__all__ = ["find_case", "run_case"]

PATIENCE: Final = 60.0
KEYED: Final[Sequence[str | None]] = ("a", "a", "a", "b")
LOOSE: Final[Sequence[str | None]] = (None, None, None)
LANES: Final[Mapping[str, Sequence[str | None]]] = {"keyed": KEYED, "loose": LOOSE, "both": (*KEYED, *LOOSE)}
#: By how much two readings of the same clock may differ, in seconds.
ROUNDING: Final = 0.002


def find_case(name: str) -> Case:
    """Return the case of a name, as the tests print it."""
    [case] = [case for case in CASES if case.name == name]
    return case


def run_case(case: Case, url: str, folder: Path, *, lane: str = "both", variant: str | None = None) -> None:
    """Run a case against a database; raise AssertionError if anything is not as its row says.

    Everything that works on the outbox does so in processes of its own (`tests.crash.worker`), so nothing
    of this process is changed.

    Args:
        case: A row of `tests.crash.table.CASES`; see also `find_case`.
        url: Where the store is. Its tables must be there: ``site_of(url).prepare()`` makes them.
        folder: An empty folder for the journal.
        lane: Which messages there are: "keyed", "loose" (without a key) or "both".
        variant: The name of a broken variant that every worker applies: ``chaos.variants.apply(variant)``.
    """
    if isinstance(case, Receiving):
        receive(case, url, folder, variant)
        return
    run = _Run(case, site_of(url), folder, LANES[lane], variant)
    if isinstance(case, Producing):
        _produce(run, case)
    else:
        _dispatch(run, case)


class _Run:
    """What a case works with."""

    def __init__(self, case: Case, site: Site, folder: Path, keys: Sequence[str | None], variant: str | None) -> None:
        self.site = site
        self.keys = keys
        self.namespace = uuid4().hex
        self._case = case
        self._variant = variant
        self._journal = folder / "journal"
        self._folder = folder
        self._journal.touch()

    def raise_flag(self, whose: str) -> None:
        """Let a worker go on that stalls."""
        (self._folder / whose).touch()

    @contextmanager
    def worker(self, name: str, ids: Sequence[UUID], arms: Sequence[Arm]) -> Iterator[Worker]:
        case, more = self._case, dict[str, Any]()
        if isinstance(case, Producing):
            more = {"is_cold": case.is_cold}
        if isinstance(case, Dispatching):
            names = ("each", "keep", "lease", "publish_timeout", "cleanup_interval", "max_attempts", "on_dead")
            more = {name: getattr(case, name) for name in names}
            # Where nothing is to be swept, no other COMMIT should come between a fault and what it is meant for.
            more["sweep_interval"] = 0.1 if case.max_attempts == 1 else 60
        if name == "rescuer":
            more |= {"lease": 10, "publish_timeout": 8}  # nothing goes wrong in it, however slow it is
        orders = Orders(
            name=name,
            url=self.site.url,
            namespace=self.namespace,
            journal=str(self._journal),
            role="produce" if name == "producer" else "dispatch",
            variant=self._variant,
            arms=arms,
            flag=str(self._folder / name),
            ids=[str(identity) for identity in ids],
            **more,
        )
        worker = start(orders)
        try:
            yield worker
        finally:
            worker.end()

    @contextmanager
    def rescuer(self, arms: Sequence[Arm] = ()) -> Iterator[Worker]:
        """Run a dispatcher in which nothing goes wrong, for as long as it takes, but not before it has looked once."""
        with self.worker("rescuer", (), [Arm("claim.after", "note"), *arms]) as rescuer:
            yield rescuer
            self.until(lambda: bool(self.lines("fired", "rescuer")), "the rescuer looking for work")
            stop(rescuer)

    def lines(self, what: str, who: str | None = None) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in whole_lines(self._journal)]
        return [line for line in found if line["what"] == what and who in {None, line["who"]}]

    def journal(self) -> str:
        return self._journal.read_text()

    def rows(self) -> list[Row]:
        return self.site.rows(self.namespace)

    def end_leases(self, rows: Sequence[Row]) -> list[Row]:
        """End the leases of a worker that is gone, instead of waiting for that; return the rows with their new ends."""
        now = time.time()
        self.site.end_leases(self.namespace)
        return [row if row.locked_until is None else replace(row, locked_until=now) for row in rows]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not happen: {self.rows()}\n{self.journal()}")
            time.sleep(0.01)

    def until_fired(self, who: str, arms: Sequence[Arm]) -> None:
        """Wait for every point at which something was to go wrong; a case that never got there shows nothing."""

        def fired() -> bool:
            points = Counter(line["point"] for line in self.lines("fired", who))
            return all(points[arm.point] for arm in arms)

        self.until(fired, f"reaching {[arm.point for arm in arms]}")


def stop(worker: Worker) -> None:
    assert worker.stop(PATIENCE) == 0, "a dispatcher that was asked to stop failed"


# -- producer ------------------------------------------------------------------------------------------------------


def _produce(run: _Run, case: Producing) -> None:
    earlier = run.site.seed(run.namespace, ["a"])
    added = [uuid7(), uuid7()]
    with run.worker("producer", added, case.arms) as producer:
        assert producer.wait(PATIENCE) == (-signal.SIGKILL if case.heard is None else 0)
    run.until_fired("producer", case.arms)

    stored = [row.id for row in run.rows()]
    assert sorted(run.site.business(run.namespace)) == sorted(stored), "business rows and messages differ"
    is_stored = added[0] in stored if case.stored is None else case.stored
    assert stored == [*earlier, *(added if is_stored else ())]
    assert [_heard(line) for line in run.lines("heard")] == _expected(case)

    with run.rescuer():
        run.until(lambda: all(row.status == "delivered" for row in run.rows()), "the delivery of what is stored")
    _check_receptions(run, stored, ["a", "a", None][: len(stored)], lambda _: (1,))


def _heard(line: Mapping[str, Any]) -> tuple[str, bool | None]:
    known = {"nothing", "CommitUnknownError", "CancelledError", "RuntimeError"}
    return line["error"] if line["error"] in known else "something", line.get("stored")


def _expected(case: Producing) -> list[tuple[str, bool | None]]:
    return [] if case.heard is None else [(case.heard, case.found)]


# -- dispatcher ----------------------------------------------------------------------------------------------------


def _dispatch(run: _Run, case: Dispatching) -> None:
    ids = run.site.seed(run.namespace, run.keys)
    if case.before != "waiting":
        run.site.spend(run.namespace, case.max_attempts, delivered=case.before == "delivered")
    with run.worker("victim", ids, case.arms) as victim:
        leases = _go_on(run, case, victim)
    run.until_fired("victim", case.arms)

    assert _differ(run, case) == [], "what the rows are in the end"
    expected = dict.fromkeys(ids, case.others_received) if case.others else dict.fromkeys(ids, case.received)
    _check_receptions(run, ids, run.keys, lambda one: case.received if one == ids[0] else expected[one])
    _check_leases(run, leases)
    _check_events(run, case, ids)


def _go_on(run: _Run, case: Dispatching, victim: Worker) -> Sequence[Row]:
    """See to it that the messages get to where they should; return what they were right after the fault."""
    if case.sequel == "alone":
        run.until(lambda: not _differ(run, case), "the final state")
        run.until_fired("victim", case.arms)
        run.raise_flag("victim")
        stop(victim)
        return ()
    if case.sequel == "stalled":
        run.until_fired("victim", case.arms[:1])
    else:
        assert victim.wait(PATIENCE) == (-signal.SIGKILL if case.sequel == "dead" else 0)
    left = run.rows()
    if case.crash is not None:
        wrong = [row for row in left if not _is(row, case.crash)]
        assert wrong == [], f"the fault left {wrong}\n{run.journal()}"
    if case.sequel != "stalled":
        left = run.end_leases(left)
    if case.in_flight:
        # Leases of one claim may end a moment apart; the rescuer is to have all messages in its hands at once.
        run.until(lambda: time.time() > max(row.locked_until or 0 for row in left), "the end of the leases")
    with run.rescuer([Arm("publish.before", "linger")] if case.in_flight else ()):
        run.until(lambda: not _differ(run, case, meanwhile=True), "the rescue")
        ends = [row.locked_until or 0 for row in run.rows()]
        run.raise_flag("victim")
        if case.in_flight:
            run.until_fired("victim", case.arms)
            assert _differ(run, case, meanwhile=True) == [], "a settlement that came too late was recorded"
            assert [row for row, end in zip(run.rows(), ends, strict=True) if (row.locked_until or 0) < end] == []
            run.raise_flag("rescuer")
        run.until(lambda: not _differ(run, case), "the final state")
        if case.sequel == "stalled":
            stop(victim)
    return left


def _differ(run: _Run, case: Dispatching, *, meanwhile: bool = False) -> list[Row]:
    """Return the rows that are not as they should be in the end, or before a stall ends."""
    rows = run.rows()
    wanted = case.meanwhile if meanwhile and case.meanwhile else case.final
    if wanted is None:
        return rows
    assert len(rows) == len(run.keys), "messages are gone"
    if wanted is not case.final:
        return [row for row in rows if not _is(row, wanted)]
    states = [_state(case, wanted, run.keys[:place], run.keys[place]) for place in range(len(rows))]
    return [row for row, state in zip(rows, states, strict=True) if not _is(row, state)]


def _state(case: Dispatching, wanted: State, before: Sequence[str | None], key: str | None) -> State:
    if case.followers and key is not None and key in before:
        return case.followers
    return case.others if case.others and before else wanted


def _is(row: Row, state: State) -> bool:
    return (row.status, row.attempts) == (state.status, state.attempts) and state.token in {None, row.token}


def _check_receptions(
    run: _Run, ids: Sequence[UUID], keys: Sequence[str | None], allowed: Callable[[UUID], Sequence[int]]
) -> None:
    received = [UUID(line["id"]) for line in run.lines("received")]
    counts = Counter(received)
    assert counts.keys() <= set(ids), "phantoms were delivered"
    assert {one: counts[one] for one in ids if counts[one] not in allowed(one)} == {}, (
        "received too seldom or too often"
    )
    for key in {key for key in keys if key is not None}:
        wanted = [one for one, its_key in zip(ids, keys, strict=True) if its_key == key and counts[one]]
        assert list(dict.fromkeys(one for one in received if one in wanted)) == wanted, f"key {key} is out of order"


def _check_leases(run: _Run, left: Sequence[Row]) -> None:
    """See that nobody took what was leased before the lease ended, by the clock that granted it."""
    ends = {str(row.id): row.locked_until for row in left if row.locked_until is not None}
    for line in run.lines("received", "rescuer"):
        assert line["at"] > ends.get(line["id"], 0) - ROUNDING, "taken before the lease ended"


def _check_events(run: _Run, case: Dispatching, ids: Sequence[UUID]) -> None:
    lost = {line["message_id"] for line in run.lines("LeaseLost", "victim")}
    if case.lost != "any":
        assert lost == {str(one) for one in ids if case.lost == "all"}, "claims that were told as lost"
    assert run.lines("LeaseLost", "rescuer") == []
    assert [event for event in case.tells if not run.lines(event, "victim")] == [], "events that were not told"
