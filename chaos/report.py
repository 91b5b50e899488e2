"""The report of a run: its verdict in one line, what was reached, and the events behind each violation."""

from __future__ import annotations

import json
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from .checker import Violation, check, duplicates
from .consuming import OUTAGES, absorbed
from .evidence import Claimed, Evidence, Settled
from .groups import UNHANDLED
from .history import Event

__all__ = ["Verdict", "judge", "reached", "recoveries", "write"]

TimedT = TypeVar("TimedT", Claimed, Settled)

_SECOND: Final = 1e9
_MINUTE: Final = 60 * _SECOND
#: What a commit says of a statement that failed before, or of a command that would.
_SWALLOWED: Final = frozenset({"TransactionAbortedError", "CommitRefusedError"})
#: Reports of more violations than this would only repeat each other.
_MOST_REPORTS: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a run."""

    store: str
    seed: int
    seconds: float
    version: str
    faults: dict[str, int]
    messages: int
    duplicates: int
    #: How many effects handlers had, and how many duplicates had none.
    effects: int
    absorbed: int
    violations: Sequence[Violation]
    reached: dict[str, int]
    #: Seconds until work went on, after each fault of a kind.
    recovery: dict[str, list[float]]

    @property
    def line(self) -> str:
        """The verdict in one line."""
        broken = Counter(violation.check for violation in self.violations)
        named = {
            "C1": "lost",
            "C2": "phantom",
            "C4": "double claims",
            "C6": "order violations",
            "C7": "double effects",
            "C8": "early acks",
        }
        counts = [f"{broken.pop(check, 0)} {name}" for check, name in named.items()]
        counts += [f"{number} of {check}" for check, number in sorted(broken.items())]
        faults = ", ".join(f"{kind} {number}" for kind, number in sorted(self.faults.items()))
        times = [seconds for found in self.recovery.values() for seconds in found]
        return (
            f"{'FAILED' if self.violations else 'OK'} {self.store} seed {self.seed}: "
            f"{sum(self.faults.values())} faults ({faults}); {self.messages} messages, {self.duplicates} duplicates, "
            f"{self.effects} effects, {self.absorbed} duplicates absorbed, {', '.join(counts)}; "
            f"recovery p50 {_quantile(times, 0.5):.2f} s, p99 {_quantile(times, 0.99):.2f} s"
        )

    @property
    def details(self) -> str:
        """What was reached, and how long each kind of fault took to get over."""
        reached = ", ".join(f"{name} {number}" for name, number in self.reached.items())
        recovery = ", ".join(
            f"{kind} {_quantile(times, 0.5):.2f}/{_quantile(times, 0.99):.2f}"
            for kind, times in sorted(self.recovery.items())
        )
        return f"reached: {reached}\nrecovery p50/p99 in s: {recovery}"


def judge(evidence: Evidence, *, store: str, seed: int, seconds: float, version: str) -> Verdict:
    """Return the verdict on a run."""
    done = [event["kind"] for event in evidence.events if event["op"] == "fault" and event["type"] == "ok"]
    return Verdict(
        store=store,
        seed=seed,
        seconds=seconds,
        version=version,
        faults=dict(Counter(done)),
        messages=len(evidence.rows),
        duplicates=duplicates(evidence),
        effects=len(evidence.effects),
        absorbed=absorbed(evidence),
        violations=check(evidence),
        reached=reached(evidence),
        recovery=recoveries(evidence),
    )


def reached(evidence: Evidence) -> dict[str, int]:
    """Count what a run should come across now and then, so that one which exercised nothing is seen."""
    heard = {(one.id, one.token) for one in evidence.claimed}
    unknown = [one for one in evidence.sent if one.end == "info" and one.added]
    committed = sum(evidence.row(one.id) is not None for one in unknown)
    renewed = [c for c in evidence.changes if c.old_status == "processing" and c.new_token > c.old_token]
    ends = [c for c in evidence.changes if c.new_status == "delivered"]
    return {
        "fenced settlements": sum(one.accepted is False for one in evidence.settled),
        "late confirmations accepted": sum(c.at > c.old_until for c in ends if c.old_until is not None),
        "unknown commits that had happened": committed,
        "unknown commits that had not": len(unknown) - committed,
        "leases run out and claimed anew": len(renewed),
        "claims nobody heard of": sum((c.id, c.old_token) not in heard for c in renewed),
        "duplicates received": duplicates(evidence),
        "repeats refused by dedupe key": sum(not one.added for one in evidence.sent),
        "rolled back": sum(one.end == "fail" for one in evidence.sent),
        "swept": sum(event["count"] for event in evidence.events if event["op"] == "sweep"),
        "dead": sum(row.status == "dead" for row in evidence.rows),
        **_reached_by_consumers(evidence),
        "breaker opened": sum(event.get("name") == "BreakerOpened" for event in evidence.events),
    }


def _reached_by_consumers(evidence: Evidence) -> dict[str, int]:
    kinds = {one.id: one.kind for one in evidence.sent}
    done = {(one.consumer, one.id) for one in evidence.effects}
    ended = {one.handle for one in evidence.handled}
    failed = [e for e in evidence.events if e["op"] == "event" and e["name"] == "HandlingFailed"]
    unknown = [e for e in failed if e["error"] == "CommitUnknownError"]
    return {
        "duplicates absorbed": absorbed(evidence),
        "handlings that came to nothing": len({one.handle for one in evidence.begun} - ended),
        "swallowed errors told": sum(event["error"] in _SWALLOWED for event in failed),
        "unknown commits of handlers": len(unknown),
        "of them effective in the end": sum((e["consumer"], e["id"]) in done for e in unknown),
        "messages that somebody else had": sum(event["error"] == "MessageBusyError" for event in failed),
        "handlings that the store was away for": sum(event["error"] in OUTAGES for event in failed),
        "dead letters": len(evidence.letters),
        "dead letters of sound messages": sum(kinds.get(one.id) not in UNHANDLED for one in evidence.letters),
    }


def recoveries(evidence: Evidence) -> dict[str, list[float]]:
    """Return for each kind of fault how long it took until work went on.

    After a dispatcher died: until everything that it held is settled by somebody. After a fault of a consumer: from
    its end until the next message was handled. After any other fault: from its end until the next delivery.
    """
    received, handled = [one.t for one in evidence.received], [one.t for one in evidence.handled]
    accepted = sorted((one for one in evidence.settled if one.accepted), key=_time)
    found: dict[str, list[float]] = {}
    begun: dict[str, Event] = {}
    for event in evidence.events:
        if event["op"] != "fault" or "victim" not in event:
            continue
        if event["type"] == "invoke":
            begun[event["victim"]] = event
            continue
        start = begun.get(event["victim"], event)
        is_death = event["kind"] in {"kill dispatcher", "skew dispatcher"}
        seconds = _orphaned(evidence, accepted, start) if is_death else None
        times = handled if event["victim"].startswith("c") else received
        place = bisect_right(times, event["t"])
        if seconds is None and place < len(times):
            seconds = (times[place] - event["t"]) / _SECOND
        if seconds is not None:
            found.setdefault(event["kind"], []).append(round(seconds, 3))
    return found


def _orphaned(evidence: Evidence, accepted: Sequence[Settled], killed: Event) -> float | None:
    """Return how long what a dead dispatcher held had to wait, if it held anything."""
    death = killed["t"]
    # Who claimed a message last holds it, until it is settled.
    held = {one.id: one for one in _between(evidence.claimed, death - _MINUTE, death)}
    done = {(one.id, one.token) for one in _between(accepted, death - _MINUTE, death)}
    own = [one for one in held.values() if one.worker == killed["victim"]]
    orphans = {one.id for one in own if (one.id, one.token) not in done}
    ends: dict[str, int] = {}
    for one in _between(accepted, death, death + _MINUTE):
        if one.id in orphans:
            ends.setdefault(one.id, one.t)
    return (max(ends.values()) - death) / _SECOND if ends else None


def _between(ones: Sequence[TimedT], since: float, until: float) -> Sequence[TimedT]:
    """Return a part of what stands in the order of time."""
    return ones[bisect_right(ones, since, key=_time) : bisect_right(ones, until, key=_time)]


def _time(one: Claimed | Settled) -> int:
    return one.t


def write(folder: Path, verdict: Verdict, evidence: Evidence) -> None:
    """Write the verdict, and for each violation the events of its message or key alone."""
    told = {**asdict(verdict), "line": verdict.line}
    (folder / "verdict.json").write_text(json.dumps(told, indent=2) + "\n")
    for number, violation in enumerate(verdict.violations[:_MOST_REPORTS]):
        lines = [f"{violation.check}: {violation.what}", *_trail(evidence, violation)]
        path = folder / f"violation-{number:02}-{violation.check}.txt"
        path.write_text("\n".join(lines) + "\n")


def _trail(evidence: Evidence, violation: Violation) -> list[str]:
    keyed = {one.id for one in evidence.sent if violation.key and one.key == violation.key}
    ids = keyed | ({violation.id} if violation.id else set())
    events = [shown for event in evidence.events if (shown := _only(event, ids))]
    tables: list[Any] = [row for row in evidence.rows if row.id in ids]
    tables += [change for change in evidence.changes if change.id in ids]
    tables += [effect for effect in evidence.effects if effect.id in ids]
    tables += [letter for letter in evidence.letters if letter.id in ids]
    return [*(json.dumps(event) for event in events), *(str(asdict(one)) for one in tables)]


def _only(event: Event, ids: set[str]) -> Event | None:
    """Return what an event says of some messages, or nothing."""
    if event["op"] == "fault":
        return event
    if event.get("id") in ids:
        return event
    for name in ("messages", "claims", "settlements", "answers", "lost"):
        if isinstance(event.get(name), list):
            kept = [one for one in event[name] if (one["id"] if isinstance(one, dict) else one[0]) in ids]
            if kept:
                return {**event, name: kept}
    return None


def _quantile(values: Sequence[float], share: float) -> float:
    if not values:
        return 0.0
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]
