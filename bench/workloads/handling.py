"""What it takes to handle messages that were received."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ..measure import Bench, Race, Result
from ..trials.consuming import CONCURRENCY

__all__ = ["consumed", "dispatched"]

_CONSUMING = "trials.consuming"
_ROUTING = "trials.routing"


def consumed(bench: Bench) -> Iterator[Result]:
    """Inbox, effect and outbox in one transaction, with a consumer and by hand."""
    count = bench.size(10_000, 300)
    dsn = bench.database("postgres")
    bench.call(_CONSUMING, dsn, "prepare")
    race = Race()
    for name in ("consumer", "by_hand"):
        race.seconds[name], race.wrong[name] = [], {"lost": 0, "doubled": 0}
    for _ in range(bench.rounds):
        for name, wrong in race.wrong.items():
            drained = bench.call(_CONSUMING, dsn, name, count=count)
            race.seconds[name].append(drained["seconds"] / count)
            for kind in wrong:
                wrong[kind] += drained[kind]
    yield Result(
        name="consume.postgres.of_raw",
        value=race.ratio("consumer", "by_hand"),
        goal=0.7,
        better="higher",
        detail=f"{count:,} messages, {CONCURRENCY} at a time: {race.told('consumer', 'by_hand')}",
    )


def dispatched(bench: Bench) -> Iterator[Result]:
    """Router, acking and five empty middlewares around a handler that does nothing."""
    count = bench.size(100_000, 5_000)
    rounds = [bench.call(_ROUTING, "", "ratio", count=count) for _ in range(bench.rounds)]
    ours, bare = (statistics.median(times[kind] for times in rounds) for kind in ("ours", "bare"))
    yield Result(
        name="router.dispatch.vs_bare",
        value=statistics.median(times["ours"] / times["bare"] for times in rounds),
        goal=2.5,
        better="lower",
        detail=f"time of {count:,} messages, in turns with as many by hand: {ours * 1e6:.1f} µs each, "
        f"by hand {bare * 1e6:.1f} µs",
    )
