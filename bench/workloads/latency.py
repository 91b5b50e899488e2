"""How soon an idle dispatcher notices one message."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ..measure import Bench, Entry, Job, Result

__all__ = ["noticed"]

_PEERS = ("faststream_outbox", "pgqueuer", "txoutbox", "procrastinate")
_ENTRIES = {
    "postroom": Entry("contenders.postroom", {"near": True}),
    "postroom over NOTIFY": Entry("contenders.postroom"),
    **{name: Entry(f"contenders.{name}") for name in _PEERS},
}


def noticed(bench: Bench) -> Iterator[Result]:
    """From the commit of a single message to the start of its publish, against the best of the peers."""
    count = bench.size(500, 30) // bench.rounds
    databases = {name: bench.database("postgres") for name in _ENTRIES}
    latencies: dict[str, list[float]] = {name: [] for name in _ENTRIES}
    bench.prepare(Job(entry.contender, databases[name], {"prepare": {}}) for name, entry in _ENTRIES.items())
    for _ in range(bench.rounds):
        for name, entry in _ENTRIES.items():
            job = Job(entry.contender, databases[name], {"latencies": {"count": count}}, entry.options)
            latencies[name] += bench.run(job)
    told = "; ".join(
        f"{name} p50 {_percentile(of, 50) * 1e3:.1f} ms, p99 {_percentile(of, 99) * 1e3:.1f} ms"
        for name, of in latencies.items()
    )
    for ours, ending in (("postroom", ""), ("postroom over NOTIFY", "_over_notify")):
        for percent in (50, 99):
            best = min(_percentile(latencies[name], percent) for name in _PEERS)
            yield Result(
                name=f"postgres.latency.p{percent}_vs_best_peer{ending}",
                value=_percentile(latencies[ours], percent) / best,
                goal=0.75,
                better="lower",
                detail=f"{count * bench.rounds} single messages each: {told}",
            )


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]
