"""What messages in Redis cost their producers and the server, and whether many of them slow down a claim."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ..measure import Bench, Job, Result
from ..trials.redis import BATCH

__all__ = ["added", "flat", "stored"]

_TRIAL = "trials.redis"
_FEW = 1000


def added(bench: Bench) -> Iterator[Result]:
    """A hundred messages in a MULTI of their own, and one."""
    dsn = bench.database("redis")
    batches, singles = bench.size(300, 30), bench.size(1500, 60)
    rounds = [bench.call(_TRIAL, dsn, "add", batches=batches, singles=singles) for _ in range(bench.rounds)]
    many, one = zip(*rounds, strict=True)
    yield Result(
        name="redis.add.of_raw",
        value=1 / statistics.median(many),
        goal=0.8,
        better="higher",
        detail=f"rate of {batches:,} pipelines of {BATCH} messages, in turns with as many of HSET and ZADD in MULTI; "
        f"rounds {', '.join(f'{1 / ratio:.3f}' for ratio in many)}; "
        f"of {singles:,} pipelines of a single message {1 / statistics.median(one):.3f}",
    )


def flat(bench: Bench) -> Iterator[Result]:
    """Claims of 100 beside a million messages, over those beside a thousand."""
    count, claims = bench.size(1_000_000, 20_000), bench.size(200, 20)
    large, small = bench.database("redis"), bench.database("redis")
    sizes = {large: count, small: _FEW}
    bench.prepare(Job(_TRIAL, dsn, {"fill": {"count": size, "keys": 0}}) for dsn, size in sizes.items())
    beside_many, beside_few = bench.medians(_TRIAL, large, small, claims)
    yield Result(
        name="redis.claim.flat_1m",
        value=beside_many / beside_few,
        goal=1.5,
        better="lower",
        detail=f"claim of 100: {beside_many * 1e3:.2f} ms beside {count:,} messages, "
        f"{beside_few * 1e3:.2f} ms beside {_FEW:,}",
    )


def stored(bench: Bench) -> Iterator[Result]:
    """The memory of the server that messages take."""
    count = bench.size(100_000, 20_000)
    room = bench.call(_TRIAL, bench.database("redis"), "room", count=count)
    yield Result(
        name="redis.bytes_per_message",
        value=room,
        goal=400,
        better="lower",
        detail=f"memory of the server for each of {count:,} messages that wait, without the payload",
    )
