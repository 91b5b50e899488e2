"""How soon an idle dispatcher notices one message."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ..measure import Bench, Result

__all__ = ["noticed"]

_ENTRIES = ("postroom", "faststream_outbox", "pgqueuer", "txoutbox", "procrastinate")


def noticed(bench: Bench) -> Iterator[Result]:
    """From the commit of a single message to the start of its publish, against the best of the peers."""
    count = bench.size(500, 60) // bench.rounds
    databases = {name: bench.database("postgres") for name in _ENTRIES}
    latencies: dict[str, list[float]] = {name: [] for name in _ENTRIES}
    for name in _ENTRIES:
        bench.call(f"contenders.{name}", databases[name], "prepare")
    for _ in range(bench.rounds):
        for name in _ENTRIES:
            latencies[name] += bench.call(f"contenders.{name}", databases[name], "latencies", count=count)
    told = "; ".join(
        f"{name} p50 {_percentile(of, 50) * 1e3:.1f} ms, p99 {_percentile(of, 99) * 1e3:.1f} ms"
        for name, of in latencies.items()
    )
    for percent in (50, 99):
        best = min(_percentile(latencies[name], percent) for name in _ENTRIES[1:])
        yield Result(
            name=f"postgres.latency.p{percent}_vs_best_peer",
            value=_percentile(latencies["postroom"], percent) / best,
            goal=0.75,
            better="lower",
            detail=f"{count * bench.rounds} single messages each: {told}",
        )


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]
