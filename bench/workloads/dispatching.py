"""Dispatchers as processes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ..measure import Bench, Job, Result

__all__ = ["memory", "two_processes"]

_TRIAL = "trials.dispatching"
#: Seconds of processor time for each message.
_COST = 200e-6


def memory(bench: Bench) -> Iterator[Result]:
    """Memory of a dispatcher that drains a long backlog."""
    count = bench.size(1_000_000, 20_000)
    dsn = bench.database("postgres")
    bench.call(_TRIAL, dsn, "prepare")
    bench.call(_TRIAL, dsn, "fill", count=count, keys=0)
    answer = bench.call(_TRIAL, dsn, "growth", count=count)
    yield Result(
        name="dispatcher.rss_growth_mb",
        value=answer["growth"],
        goal=30,
        better="lower",
        detail=f"{count:,} messages, from the first twentieth on; {answer['missing']} lost",
    )


def two_processes(bench: Bench) -> Iterator[Result]:
    """Two dispatchers over one, with a publisher that keeps a processor busy."""
    count = bench.size(30_000, 2_000)
    dsn = bench.database("postgres")
    bench.call(_TRIAL, dsn, "prepare")
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(bench.rounds):
        for processes, measured in rates.items():
            bench.call(_TRIAL, dsn, "fill", count=count, keys=0)
            running = [bench.start(Job(_TRIAL, dsn, {"work": {"cost": _COST}})) for _ in range(processes)]
            answers = [bench.answer(process) for process in running]
            delivered = sum(answer["delivered"] for answer in answers)
            if delivered != count:
                raise RuntimeError(f"{delivered} of {count} messages were delivered")
            began, ended = min(a["began"] for a in answers), max(a["ended"] for a in answers)
            measured.append(count / (ended - began))
    one, two = statistics.median(rates[1]), statistics.median(rates[2])
    yield Result(
        name="dispatcher.two_processes",
        value=two / one,
        goal=1.6,
        better="higher",
        detail=f"{count:,} messages at 200 µs of processor time: one {one:,.0f}/s, two {two:,.0f}/s",
    )
