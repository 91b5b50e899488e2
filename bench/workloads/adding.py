"""What messages cost their producers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ..measure import Bench, Result
from ..trials.adding import PRODUCERS

__all__ = ["added", "committed"]

_TRIAL = "trials.adding"


def added(bench: Bench) -> Iterator[Result]:
    """One message, and a hundred, in a transaction of their own."""
    dsn = bench.database("postgres")
    bench.call(_TRIAL, dsn, "prepare")
    singles, batches = bench.size(2000, 300), bench.size(400, 60)
    one = [bench.call(_TRIAL, dsn, "one", count=singles) for _ in range(bench.rounds)]
    many = [bench.call(_TRIAL, dsn, "many", count=batches) for _ in range(bench.rounds)]
    yield Result(
        name="postgres.add.vs_handwritten",
        value=statistics.median(one),
        goal=1.15,
        better="lower",
        detail=f"time of {singles:,} transactions of one message, in turns with as many by hand; "
        f"rounds {', '.join(f'{ratio:.3f}' for ratio in one)}",
    )
    yield Result(
        name="postgres.add_many.of_handwritten",
        value=1 / statistics.median(many),
        goal=0.85,
        better="higher",
        detail=f"rate of {batches:,} transactions of 100 messages, in turns with as many by hand with unnest; "
        f"rounds {', '.join(f'{1 / ratio:.3f}' for ratio in many)}",
    )


def committed(bench: Bench) -> Iterator[Result]:
    """Many producers at once, with the wake-up of every commit."""
    dsn = bench.database("postgres")
    bench.call(_TRIAL, dsn, "prepare")
    seconds = bench.size(6, 1)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(bench.rounds):
        for plain, measured in rates.items():
            measured.append(bench.call(_TRIAL, dsn, "commits", seconds=seconds, plain=plain))
    ours, plain_rate = statistics.median(rates[False]), statistics.median(rates[True])
    yield Result(
        name="postgres.commit_rate.of_plain",
        value=ours / plain_rate,
        goal=0.9,
        better="higher",
        detail=f"{PRODUCERS} producers: {ours:,.0f} commits/s, by hand and without wake-up {plain_rate:,.0f}/s",
    )
