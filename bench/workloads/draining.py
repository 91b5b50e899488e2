"""How fast a backlog is delivered to a publisher that does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..measure import Bench, Entry, Race, Result

__all__ = ["loose", "mariadb", "ordered", "redis", "redis_stream", "sqlite"]

_US = Entry("contenders.postroom")
_RAW = Entry("contenders.raw")


def loose(bench: Bench) -> Iterator[Result]:
    """Unordered messages in PostgreSQL: against bare SQL with the same history, and against the peers without one."""
    count = bench.size(100_000, 4_000)
    entries = {
        "postroom": _US,
        "raw": _RAW,
        "faststream_outbox": Entry("contenders.faststream_outbox"),
        "pgqueuer": Entry("contenders.pgqueuer"),
        "txoutbox": Entry("contenders.txoutbox"),
    }
    if not bench.quick:
        entries["txoutbox, two relays"] = Entry("contenders.txoutbox", {"relays": 2})
        # Two hundred messages a second: the whole backlog would take ten minutes a round.
        entries["procrastinate"] = Entry("contenders.procrastinate", share=0.01)
        entries["faststream_outbox, default"] = Entry("contenders.faststream_outbox", {"flush": 1}, share=0.1)
    race = bench.race(entries, "postgres", count=count)
    kept = bench.race(
        {"postroom": Entry("contenders.postroom", {"keep": True}), "raw": Entry("contenders.raw", {"keep": True})},
        "postgres",
        count=count,
    )
    yield _of_raw("postgres.drain.of_raw", race, 0.7, f"{count:,} messages, nothing kept")
    yield _of_raw("postgres.drain.of_raw_kept", kept, 0.7, f"{count:,} messages, delivered ones kept")
    others = [name for name in entries if name not in {"postroom", "raw"}]
    goals = {"faststream_outbox": 6.0, "pgqueuer": 4.5, "txoutbox": 1.8}
    for name in others:
        yield Result(
            name=f"postgres.drain.vs_{name.replace(',', '').replace(' ', '_')}",
            value=race.ratio("postroom", name),
            goal=goals.get(name, 1.0),
            better="higher",
            detail=f"{int(count * entries[name].share):,} messages: {race.told(name)}",
        )


def ordered(bench: Bench) -> Iterator[Result]:
    """Messages over 500 keys in PostgreSQL, in the order of each key."""
    count = bench.size(100_000, 4_000)
    entries = {"postroom": _US, "raw": _RAW, "txoutbox": Entry("contenders.txoutbox")}
    race = bench.race(entries, "postgres", count=count, keys=500)
    for name, other, goal in (("of_raw", "raw", 0.4), ("vs_txoutbox", "txoutbox", 3.0)):
        yield Result(
            name=f"postgres.drain_ordered.{name}",
            value=race.ratio("postroom", other),
            goal=goal,
            better="higher",
            detail=f"{count:,} messages over 500 keys: {race.told('postroom', other)}",
        )


def sqlite(bench: Bench) -> Iterator[Result]:
    """Unordered messages in SQLite."""
    count = bench.size(100_000, 3_000)
    race = bench.race({"postroom": _US, "raw": Entry("contenders.raw_sqlite")}, "sqlite", count=count)
    yield _of_raw("sqlite.drain.of_raw", race, 0.6, f"{count:,} messages")


def mariadb(bench: Bench) -> Iterator[Result]:
    """Unordered messages in MariaDB."""
    count = bench.size(100_000, 3_000)
    race = bench.race({"postroom": _US, "raw": Entry("contenders.raw_mariadb")}, "mariadb", count=count)
    yield _of_raw("mariadb.drain.of_raw", race, 0.5, f"{count:,} messages")


def redis(bench: Bench) -> Iterator[Result]:
    """Messages in the store of scripts: against the bare scripts, and against arq."""
    yield from _redis(bench, "redis", {}, {"of_raw": 0.5, "vs_arq": 5.0}, Entry("contenders.arq", share=0.02))


def redis_stream(bench: Bench) -> Iterator[Result]:
    """Messages in a stream: against the bare commands, and against taskiq."""
    peer = Entry("contenders.taskiq_redis", share=0.04)
    yield from _redis(bench, "redis_stream", {"stream": True}, {"of_raw": 0.6, "vs_taskiq_redis": 2.0}, peer)


def _redis(
    bench: Bench, store: str, options: Mapping[str, Any], goals: Mapping[str, float], peer: Entry
) -> Iterator[Result]:
    count = bench.size(100_000, 4_000)
    name = peer.contender.rpartition(".")[2]
    entries = {
        "postroom": Entry("contenders.postroom_redis", options),
        "raw": Entry("contenders.raw_redis", options),
        name: peer,
    }
    race = bench.race(entries, "redis", count=count)
    yield _of_raw(f"{store}.drain.of_raw", race, goals["of_raw"], f"{count:,} messages, nothing kept")
    yield Result(
        name=f"{store}.drain.vs_{name}",
        value=race.ratio("postroom", name),
        goal=goals[f"vs_{name}"],
        better="higher",
        detail=f"{int(count * peer.share):,} messages: {race.told(name)}",
    )


def _of_raw(name: str, race: Race, goal: float, words: str) -> Result:
    value = race.ratio("postroom", "raw")
    return Result(name=name, value=value, goal=goal, better="higher", detail=f"{words}: {race.told('postroom', 'raw')}")
