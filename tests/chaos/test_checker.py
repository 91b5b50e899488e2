"""The checker of chaos: silent about a run in which all went well, and loud about each promise that is broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaos.audit import Change, Effect, Letter, Row
from chaos.checker import CHECKS, Violation, check, duplicates
from chaos.evidence import Answer, Claimed, Evidence, Handling, Received, Sent, Settled, gather
from chaos.history import Event, History, read
from chaos.nemesis import plan
from chaos.report import judge, reached, recoveries, write

WORKERS = ("d0", "d1", "p0", "c0")


def changed(identity: str, old: tuple[str, int, int | None], new: tuple[str, int, int | None], at: int) -> Change:
    return Change(
        id=identity,
        old_status=old[0],
        new_status=new[0],
        old_token=old[1],
        new_token=new[1],
        old_until=old[2],
        new_until=new[2],
        at=at,
    )


def row(identity: str, seq: int, status: str = "delivered", **known: Any) -> Row:  # noqa: ANN401
    fields: dict[str, Any] = {"topic": "orders", "key": None, "dedupe": None, "attempts": 1, "token": 1, **known}
    return Row(id=identity, seq=seq, status=status, **fields)


def delivered(
    identity: str, at: int, *, n: int = 0, key: str | None = "k", topic: str = "orders"
) -> dict[str, list[Any]]:
    """Return all that one smooth delivery leaves behind."""
    worker = "d0"
    return {
        "received": [Received(t=at + 1, id=identity, key=key, n=n, topic=topic)],
        "claimed": [Claimed(t=at, worker=worker, id=identity, token=1)],
        "settled": [Settled(t=at + 2, worker=worker, id=identity, token=1, outcome="delivered")],
        "answers": [Answer(t=at + 1, worker=worker, id=identity, token=1, word="delivered")],
        "changes": [
            changed(identity, ("pending", 0, None), ("processing", 1, at + 100), at),
            changed(identity, ("processing", 1, at + 100), ("delivered", 1, None), at + 2),
        ],
    }


#: Which effects there are, in order: the number of each is that of its hand-out, and part of the name of its output.
EFFECTS = [("stock", "a"), ("stock", "b"), ("billing", "a"), ("billing", "b"), ("stock", "c")]
OUTPUTS = [f"output {number}" for number in range(len(EFFECTS))]


def handled() -> dict[str, Any]:
    """Return all that five effects and a dead letter leave behind at the consumers."""
    places = [*EFFECTS, ("billing", "c")]
    moments = {
        name: [
            Handling(t=100 + 10 * handle + step, consumer=consumer, id=identity, handle=handle)
            for handle, (consumer, identity) in enumerate(places)
        ]
        for step, name in enumerate(("begun", "handled", "acks"))
    }
    return {
        **moments,
        "effects": [
            Effect(consumer=consumer, id=identity, handle=handle, output=OUTPUTS[handle])
            for handle, (consumer, identity) in enumerate(EFFECTS)
        ],
        "marks": frozenset(EFFECTS),
        "letters": [Letter(consumer="billing", id="c", attempts=8, error="it always fails")],
        "groups": ("stock", "billing"),
        "topics": ("orders",),
    }


def healthy() -> Evidence:
    """A run: two messages of a key and one without, a rollback, an unknown commit, a repeat, a death with its cause.

    Two consumers have handled what was delivered, and one of them has put a message aside.
    """
    smooth = [delivered("a", 10, n=1), delivered("b", 20, n=2), delivered("c", 30, key=None)]
    smooth += [delivered(output, 200, key=None, topic="effects") for output in OUTPUTS]
    merged: dict[str, Any] = {name: [one for story in smooth for one in story[name]] for name in smooth[0]}
    merged["changes"] += [
        changed("x", ("pending", 0, None), ("processing", 1, 140), 40),
        changed("x", ("processing", 1, 140), ("dead", 1, None), 41),
    ]
    merged["claimed"].append(Claimed(t=40, worker="d1", id="x", token=1))
    merged["settled"].append(Settled(t=41, worker="d1", id="x", token=1, outcome="dead"))
    merged["answers"].append(Answer(t=41, worker="d1", id="x", token=1, word="rejected"))
    return Evidence(
        sent=[
            Sent(id="a", key="k", n=1),
            Sent(id="b", key="k", n=2),
            Sent(id="c", dedupe="once", end="info"),
            Sent(id="c", dedupe="once", added=False),
            Sent(id="gone", key="k", n=3, end="fail"),
            Sent(id="unknown", end="info"),
            Sent(id="x", key="other", n=1, kind="reject"),
            Sent(id="y", key="other", n=2),
            *(Sent(id=output, topic="effects") for output in OUTPUTS),
        ],
        rows=[
            row("a", 1, key="k"),
            row("b", 2, key="k"),
            row("c", 3, dedupe="once"),
            row("x", 4, "dead", key="other", error="rejected"),
            row("y", 5, "pending", key="other", attempts=0, token=0),
            *(row(output, 6 + number, topic="effects") for number, output in enumerate(OUTPUTS)),
        ],
        business=frozenset({"a", "b", "c", "x", "y", *OUTPUTS}),
        **merged,
        **handled(),
    )


def without(evidence: Evidence, identity: str, *names: str) -> Evidence:
    kept: dict[str, Any] = {name: [one for one in getattr(evidence, name) if one.id != identity] for name in names}
    return replace(evidence, **kept)


def with_row(evidence: Evidence, identity: str, **changes: Any) -> Evidence:  # noqa: ANN401
    return replace(evidence, rows=[replace(one, **changes) if one.id == identity else one for one in evidence.rows])


def with_sent(evidence: Evidence, identity: str, **changes: Any) -> Evidence:  # noqa: ANN401
    return replace(evidence, sent=[replace(one, **changes) if one.id == identity else one for one in evidence.sent])


def more(evidence: Evidence, **lists: list[Any]) -> Evidence:
    longer: dict[str, Any] = {name: [*getattr(evidence, name), *extra] for name, extra in lists.items()}
    return replace(evidence, **longer)


def earlier(evidence: Evidence, name: str, place: int, *, by: int) -> Evidence:
    moved = list(getattr(evidence, name))
    moved[place] = replace(moved[place], t=moved[place].t - by)
    changes: dict[str, Any] = {name: moved}
    return replace(evidence, **changes)


def with_event(evidence: Evidence, **event: Any) -> Evidence:  # noqa: ANN401
    return replace(evidence, events=[*evidence.events, {"t": 1, "proc": "d0", "type": "ok", **event}])


SECOND_CLAIM = [
    changed("a", ("delivered", 1, None), ("processing", 2, 200), 50),
    changed("a", ("processing", 2, 200), ("delivered", 2, None), 51),
]
EARLY_CLAIM = [
    changed("z", ("pending", 0, None), ("processing", 1, 160), 60),
    changed("z", ("processing", 1, 160), ("processing", 2, 170), 159),
]
#: A second.
S = 1_000_000_000


def _silent(evidence: Evidence, answered: Answer) -> Evidence:
    """A call to a destination that was under way from the second to the third second, and cost an attempt."""
    silence = Answer(t=3 * S, took=S, worker="d1", id="y", token=1, word="unanswered", destination="down")
    spent = Settled(t=5 * S, worker="d1", id="y", token=1, outcome="retry", accepted=None, asked=4 * S)
    return more(evidence, answers=[silence, answered], settled=[spent])


BROKEN: list[tuple[str, str, Callable[[Evidence], Evidence]]] = [
    ("C1", "a committed message never arrives", lambda e: without(e, "b", "received", "rows")),
    ("C1", "a message is settled as delivered that nobody received", lambda e: without(e, "c", "received")),
    ("C2", "a message arrives that nobody sent", lambda e: more(e, received=[Received(t=9, id="ghost")])),
    ("C2", "a message arrives whose transaction failed", lambda e: with_sent(e, "a", end="fail")),
    ("C2", "a message arrives that has no row", lambda e: without(e, "c", "rows")),
    ("C2", "a row is there though its transaction failed", lambda e: with_sent(e, "y", end="fail")),
    ("C3", "a message has no business row", lambda e: replace(e, business=e.business - {"c"})),
    ("C3", "a business row has no message", lambda e: replace(e, business=e.business | {"unknown"})),
    ("C4", "a token is given to two workers", lambda e: more(e, claimed=[Claimed(t=9, worker="d9", id="a", token=1)])),
    ("C4", "a claim is made that was never stored", lambda e: without(e, "a", "changes")),
    (
        "C4",
        "a token is skipped",
        lambda e: more(e, changes=[changed("y", ("pending", 0, None), ("processing", 2, 9), 8)]),
    ),
    ("C4", "a lease is granted before the last one ended", lambda e: more(e, changes=EARLY_CLAIM)),
    ("C4", "a delivered message is claimed again", lambda e: with_row(more(e, changes=SECOND_CLAIM), "a", token=2)),
    ("C4", "a row has changed that the audit knows nothing of", lambda e: with_row(e, "a", token=5)),
    (
        "C5",
        "a settlement is accepted under an old token",
        lambda e: more(e, settled=[Settled(t=9, worker="d1", id="a", token=0, outcome="retry")]),
    ),
    ("C5", "a claim is ended by nobody", lambda e: without(e, "a", "settled")),
    (
        "C5",
        "a pending message is delivered without a claim",
        lambda e: more(e, changes=[changed("y", ("pending", 0, None), ("delivered", 0, None), 9)]),
    ),
    (
        "C5",
        "a lease is renewed under an old token",
        lambda e: more(e, extended=[Claimed(t=9, worker="d1", id="a", token=0)]),
    ),
    ("C6", "a key is out of order", lambda e: replace(e, received=list(reversed(e.received)))),
    ("C6", "a message of a key is passed", lambda e: without(e, "a", "received")),
    (
        "C6",
        "what a dead message holds back goes all the same",
        lambda e: more(e, received=[Received(t=99, id="y", key="other", n=2)]),
    ),
    ("C1", "a consumer never gets a message", lambda e: replace(without(e, "a", "effects", "acks"), marks=frozenset())),
    ("C1", "nobody hears of a message that was put aside", lambda e: without(e, "c", "letters", "acks")),
    ("C2", "an output has no effect", lambda e: without(e, OUTPUTS[0], "sent")),
    ("C3", "an effect has no output", lambda e: without(e, OUTPUTS[0], "rows")),
    ("C6", "a consumer handles a key out of order", lambda e: replace(e, effects=list(reversed(e.effects)))),
    ("C7", "an effect happens twice", lambda e: more(e, effects=[e.effects[0]])),
    (
        "C7",
        "an effect happens twice, by two consumers of a group",
        lambda e: more(e, effects=[Effect(consumer="stock", id="a", handle=99, output="another")]),
    ),
    ("C7", "a handler that fails has an effect", lambda e: with_sent(e, "a", kind="sour")),
    ("C7", "an effect is not marked in the inbox", lambda e: replace(e, marks=e.marks - {("stock", "a")})),
    ("C7", "the inbox knows a message that had no effect", lambda e: replace(e, marks=e.marks | {("billing", "c")})),
    ("C8", "a message is acknowledged that had no effect", lambda e: without(e, "a", "effects")),
    ("C8", "a message is acknowledged that is no dead letter", lambda e: without(e, "c", "letters")),
    ("C8", "a message is acknowledged before its commit", lambda e: earlier(e, "acks", 0, by=1)),
    ("C8", "a message is acknowledged that nobody handled", lambda e: replace(e, handled=e.handled[1:])),
    (
        "C8",
        "a message is acknowledged while somebody else is about to handle it",
        lambda e: more(
            e,
            handled=[Handling(t=90, consumer="stock", id="a", handle=7)],
            acks=[Handling(t=91, consumer="stock", id="a", handle=7)],
        ),
    ),
    ("C9", "a dead letter has no reason", lambda e: replace(e, letters=[replace(e.letters[0], error="")])),
    ("C9", "a message is put aside too soon", lambda e: replace(e, letters=[replace(e.letters[0], attempts=2)])),
    ("C9", "a dead letter comes from nowhere", lambda e: replace(e, letters=[replace(e.letters[0], id="y")])),
    (
        "C9",
        "an outage of the database costs a delivery",
        lambda e: with_event(e, op="nack", consumer="stock", id="a", handle=7, error="StoreUnavailableError"),
    ),
    ("C9", "a message has more attempts than allowed", lambda e: with_row(e, "c", attempts=9)),
    ("C9", "a message is dead without a reason", lambda e: with_row(e, "x", error=None)),
    ("C9", "a message is dead with attempts left", lambda e: with_sent(e, "x", kind="plain")),
    (
        "C9",
        "an outage costs an attempt",
        lambda e: more(
            e,
            answers=[Answer(t=9, worker="d1", id="y", token=1, word="outage")],
            settled=[Settled(t=9, worker="d1", id="y", token=1, outcome="retry", accepted=None)],
        ),
    ),
    (
        "C9",
        "silence costs an attempt while only other destinations answer",
        lambda e: _silent(e, answered=Answer(t=S, worker="d1", id="z", token=1, word="delivered", destination="other")),
    ),
    (
        "C9",
        "silence costs an attempt although the destination answered only before",
        lambda e: _silent(e, answered=Answer(t=1, worker="d1", id="z", token=1, word="delivered", destination="down")),
    ),
    ("C9", "a claim costs more than one attempt", lambda e: with_row(e, "c", attempts=2)),
    ("C10", "two messages have one dedupe key", lambda e: with_row(e, "a", dedupe="once")),
    ("C10", "a repeat is refused though nothing was there", lambda e: with_row(e, "c", dedupe=None)),
    ("C11", "a message is left behind", lambda e: with_row(e, "y", key=None)),
    (
        "C11",
        "a dispatcher counts otherwise than its store",
        lambda e: with_event(with_event(e, op="start", life=0), op="stop", life=0, counts={"MessagesDelivered": 7}),
    ),
    ("C12", "nothing moves any more", lambda e: replace(e, undrained=1)),
    ("C13", "a process complains", lambda e: replace(e, complaints=["d0 ended with 1"])),
    ("C13", "a process hoards files", lambda e: with_event(e, op="vitals", fds=500, threads=2, tasks=5)),
]


@pytest.mark.parametrize("at", [2 * S, 3 * S, 4 * S])
def test_a_message_may_fail_by_silence_if_its_destination_answered_meanwhile(at: int) -> None:
    """At the latest when the dispatcher asks to settle it, and also if it heard an earlier answer only then."""
    early = Answer(t=1, worker="d1", id="early", token=1, word="delivered", destination="down")
    heard_late = Settled(t=9 * S, worker="d1", id="early", token=1, outcome="delivered", asked=2 * S)
    for answered in (replace(early, id="z", t=at), early):
        evidence = more(_silent(healthy(), answered), settled=[heard_late])
        assert "C9" not in {violation.check for violation in check(evidence)}


def test_the_checker_has_nothing_to_say_about_a_run_in_which_all_went_well() -> None:
    """Faults that a promise covers are no violation: an unknown commit, a repeat, a death that holds back its key."""
    assert check(healthy()) == []


@pytest.mark.parametrize(("expected", "what", "break_it"), BROKEN, ids=[f"{name} {what}" for name, what, _ in BROKEN])
def test_the_checker_sees_every_broken_promise(
    expected: str, what: str, break_it: Callable[[Evidence], Evidence]
) -> None:
    """Each check is shown to fail, on a run that is healthy but for one thing."""
    found = {violation.check for violation in check(break_it(healthy()))}

    assert expected in found, f"{what}: only {found} was seen"


def test_every_check_is_shown_to_fail() -> None:
    """A check that no case breaks would prove nothing."""
    assert {name for name, _, _ in BROKEN} == set(CHECKS)


def test_what_a_dead_message_may_do_to_its_key_depends_on_the_policy() -> None:
    """Where the dead may be passed, the rest of the key has to arrive; where not, it has to stay."""
    passed = with_row(more(healthy(), received=[Received(t=99, id="y", key="other", n=2)]), "y", status="delivered")

    skipping = {violation.check for violation in CHECKS["C6"](replace(passed, on_dead="skip"))}
    held_back = {violation.check for violation in CHECKS["C1"](replace(healthy(), on_dead="skip"))}

    assert skipping == set()
    assert held_back == {"C1"}


def test_a_late_duplicate_is_counted_and_no_violation() -> None:
    """At least once: a message may come again, also after later ones of its key."""
    again = more(healthy(), received=[Received(t=99, id="a", key="k", n=1)])

    assert check(again) == []
    assert duplicates(again) == 1


def test_a_message_that_was_put_aside_may_be_handled_after_all() -> None:
    """At least once: while one consumer gives a message up, another may hold it and succeed. It has one effect then."""
    evidence = more(
        healthy(),
        letters=[Letter(consumer="billing", id="a", attempts=8, error="it seems to kill its worker")],
        handled=[Handling(t=105, consumer="billing", id="a", handle=7)],
        acks=[Handling(t=106, consumer="billing", id="a", handle=7)],
    )
    late = evidence.effects[2]
    others = [one for one in evidence.effects if one != late]

    assert (late.consumer, late.id) == ("billing", "a")
    assert check(replace(evidence, effects=[*others, late])) == []


def test_a_slow_worker_may_confirm_what_the_sweep_has_buried() -> None:
    """The one race that is allowed: dead becomes delivered under the token that was current."""
    late = changed("x", ("dead", 1, None), ("delivered", 1, None), 60)
    settled = Settled(t=60, worker="d1", id="x", token=1, outcome="delivered")
    evidence = more(healthy(), changes=[late], settled=[settled], received=[Received(t=59, id="x", key="other", n=1)])

    evidence = replace(evidence, groups=())  # none of them was there yet

    assert check(with_row(with_sent(evidence, "x", kind="plain"), "x", status="delivered")) == [
        Violation("C1", "committed, never received, pending", "y"),
        Violation("C11", "still pending after 0 attempts", "y"),
    ]


def written(tmp_path: Path) -> list[Event]:
    """Write the history of a transaction, a delivery and two faults as the processes do, and read it back."""
    producer, dispatcher = History(tmp_path, "p0"), History(tmp_path, "d0")
    receiver, nemesis = History(tmp_path, "receiver"), History(tmp_path, "nemesis")
    draft = {"topic": "orders", "key": None, "n": 0, "kind": "plain", "dedupe": None, "added": True}
    producer.write("enqueue", "invoke", tx="1", messages=[{**draft, "id": "a"}])
    producer.write("enqueue", "ok", tx="1")
    producer.write("enqueue", "invoke", tx="2", messages=[{**draft, "id": "b"}])  # and then it was killed
    dispatcher.write("start", "ok", life=0)
    dispatcher.write("claim", "ok", claims=[("a", 1)])
    nemesis.write("fault", "invoke", kind="kill dispatcher", victim="d0", length=0)
    nemesis.write("fault", "ok", kind="kill dispatcher", victim="d0", length=0)
    dispatcher.write("start", "ok", life=1)
    dispatcher.write("claim", "ok", claims=[("a", 2)])
    receiver.write("deliver", "ok", id="a", topic="orders", key=None, n=0, token=2)
    dispatcher.write("publish", "ok", answers=[("a", 2, "delivered", "orders")], took=1)
    dispatcher.write("settle", "invoke", call=0, settlements=[("a", 2, "delivered")])
    dispatcher.write("settle", "ok", call=0, lost=[])
    dispatcher.write("settle", "invoke", call=1, settlements=[("a", 1, "retry")])
    dispatcher.write("settle", "ok", call=1, lost=[("a", 1)])
    dispatcher.write("settle", "invoke", call=2, settlements=[("a", 2, "delivered")])
    return read(tmp_path)


def test_histories_become_evidence(tmp_path: Path) -> None:
    """An invocation without an end is unknown; an answer says which settlements were refused."""
    (tmp_path / "p1.jsonl").write_text('{"t": 1, "op": "enq')  # killed while it wrote

    evidence = gather(written(tmp_path))

    assert {one.id: one.end for one in evidence.sent} == {"a": "ok", "b": "info"}
    assert [(one.token, one.accepted) for one in evidence.settled] == [(2, True), (1, False), (2, None)]
    assert [one.token for one in evidence.claimed] == [1, 2]
    assert [one.id for one in evidence.received] == ["a"]
    assert reached(evidence)["fenced settlements"] == 1


def test_after_a_kill_recovery_is_when_what_was_held_is_settled(tmp_path: Path) -> None:
    """Other dispatchers go on at once; what counts is the work that the dead one had taken."""
    events = written(tmp_path)
    evidence = gather(events)
    kill = next(event["t"] for event in events if event["op"] == "fault")

    [seconds] = recoveries(evidence)["kill dispatcher"]

    assert seconds == pytest.approx((evidence.settled[0].t - kill) / 1e9, abs=0.001)


def test_a_violation_is_reported_with_its_own_events_alone(tmp_path: Path) -> None:
    """Who reads the report of a message need not search for it among all others."""
    evidence = replace(gather(written(tmp_path)), rows=[row("a", 1, "pending")], business=frozenset({"a", "b"}))
    verdict = judge(evidence, store="sqlite", seed=1, seconds=1, version="SQLite")

    write(tmp_path, verdict, evidence)

    [report] = list(tmp_path.glob("violation-*-C3.txt"))
    assert verdict.line.startswith("FAILED sqlite seed 1: 1 faults (kill dispatcher 1)")
    assert '"id": "b"' in report.read_text()
    assert '"id": "a"' not in report.read_text()
    assert json.loads((tmp_path / "verdict.json").read_text())["violations"][0]["check"] == verdict.violations[0].check


@pytest.mark.parametrize("store", ["postgres", "sqlite"])
def test_the_seed_decides_which_faults_there_are(store: str) -> None:
    """A run can be repeated: the plan is a function of the seed, the time, the store and the workers."""
    faults = plan(7, 60, store, WORKERS)

    assert faults == plan(7, 60, store, WORKERS)
    assert faults != plan(8, 60, store, WORKERS)
    assert {fault.victim for fault in faults} >= {*WORKERS, "receiver", "keys"}
    assert any(fault.victim == "server" for fault in faults) == (store == "postgres")
    assert len(faults) > 15
