"""Whether a claim takes the same time however the table looks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from ..measure import Bench, Job, Result
from ..trials.snapshot import KEYED_RATE, KEYS

__all__ = ["flat", "held_snapshot", "held_snapshot_keyed"]

_TRIAL = "trials.claiming"


@dataclass(frozen=True, slots=True)
class _Shape:
    """A table: so many due messages of a kind, and so many rows besides."""

    due: str
    count: int
    besides: str
    more: int


_FEW = _Shape("loose", 1000, "", 0)
_FEW_KEYED = _Shape("keyed", 1000, "", 0)
#: The result, the shape, what it is compared with, the goal.
_SHAPES = (
    ("flat_1m", _Shape("loose", 0, "pending", 1_000_000), _FEW, 1.5),
    ("flat_backed_off", _Shape("loose", 1000, "backed_off", 500_000), _FEW, 1.5),
    ("flat_history", _Shape("loose", 1000, "history", 2_000_000), _FEW, 1.5),
    ("flat_hot_key", _Shape("keyed", 0, "hot_key", 200_000), _Shape("keyed", 0, "hot_key", 1000), 2.0),
    ("flat_blocked_key", _Shape("keyed", 1000, "blocked_key", 200_000), _FEW_KEYED, 2.0),
    ("flat_many_keys", _Shape("keyed", 0, "many_keys", 200_000), _Shape("keyed", 0, "many_keys", 1000), 2.0),
)


def flat(bench: Bench) -> Iterator[Result]:
    """Claims of 100 in large tables over those in small ones; all tables are there, and the two of a row take turns."""
    scale = 20 if bench.quick else 1
    claims = bench.size(60, 10)
    shapes = [replace(shape, more=shape.more // scale) for _, shape, _, _ in _SHAPES]
    databases = {shape: bench.database("postgres") for shape in [*shapes, *(other for _, _, other, _ in _SHAPES)]}
    # The largest come first, so that no processor is left with one of them at the end.
    ordered = sorted(databases, key=lambda shape: -shape.more)
    bench.prepare(Job(_TRIAL, databases[shape], {"prepare": {}, "shape": asdict(shape)}) for shape in ordered)
    for shape, (name, _, other, goal) in zip(shapes, _SHAPES, strict=True):
        large, small = bench.medians(_TRIAL, databases[shape], databases[other], claims)
        yield Result(
            name=f"postgres.claim.{name}",
            value=large / small,
            goal=goal,
            better="lower",
            detail=f"claim of 100: {large * 1e3:.2f} ms beside {shape.more:,} rows, "
            f"{small * 1e3:.2f} ms in a small table",
        )


def held_snapshot(bench: Bench) -> Iterator[Result]:
    """Claims at 500 messages a second before, while and after a transaction is left open."""
    dsn = bench.database("postgres")
    bench.call("trials.snapshot", dsn, "prepare")
    held = bench.size(60, 3)
    around = bench.size(15, 2)
    p99 = bench.call("trials.snapshot", dsn, "percentiles", before=around, held=held, after=around)
    told = (
        f"p99 of a claim: {p99['before'] * 1e3:.2f} ms before, {p99['held'] * 1e3:.2f} ms while open for {held} s, "
        f"{p99['after'] * 1e3:.2f} ms after; {p99['claims']:,.0f} claims"
    )
    for name, goal, phase in (("p99_growth", 10.0, "held"), ("p99_after", 1.5, "after")):
        yield Result(
            name=f"postgres.held_snapshot.{name}",
            value=p99[phase] / p99["before"],
            goal=goal,
            better="lower",
            detail=told,
        )


def held_snapshot_keyed(bench: Bench) -> Iterator[Result]:
    """Latency of messages with keys, soon after a transaction was left open, and much later."""
    dsn = bench.database("postgres")
    bench.call("trials.snapshot", dsn, "prepare")
    spans = ((1, 2), (3, 4), (5, 6)) if bench.quick else ((5, 15), (110, 120), (290, 300))
    answer = bench.call("trials.snapshot", dsn, "latencies_of_keys", spans=spans, rate=KEYED_RATE, hold=True)
    soon, later, latest = answer["medians"]
    medians = "; ".join(
        f"p50 {median * 1e3:.1f} ms from {start} s to {end} s"
        for (start, end), median in zip(spans, answer["medians"], strict=True)
    )
    for name, goal, value in (("p50_growth", 5.0, later / soon), ("p50_later", 1.5, latest / later)):
        yield Result(
            name=f"postgres.held_snapshot_keyed.{name}",
            value=value,
            goal=goal,
            better="lower",
            detail=f"{KEYED_RATE:,} messages/s over {KEYS:,} keys, {answer['rate']:,.0f}/s delivered: {medians}",
        )
