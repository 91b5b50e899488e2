"""The nemesis: which fault hits whom, when and for how long, all of it decided by the seed before the run begins."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from postroom.testing.faults import FaultProxy
from postroom.testing.servers import Server

from .crew import Crew
from .history import History
from .key_outages import KEY_CLASSES, KeyOutage

__all__ = ["DAY", "SQLITE_FILE", "Fault", "Nemesis", "plan"]

DAY: Final = 86_400.0
#: The database of a run on SQLite, in the folder of its evidence.
SQLITE_FILE: Final = "chaos.sqlite3"
_LEASE: Final = 2.0
#: How many bytes in a second pass through a narrow network, about.
_NARROW: Final = 2_000_000

#: For each kind of fault how often it is chosen, and how long it lasts.
_Menu = Mapping[str, tuple[float, float, float]]

_DISPATCHER: Final[_Menu] = {
    "kill dispatcher": (5, 0.0, 0.0),
    # Long enough for the lease to run out, and for a settlement to come too late.
    "pause dispatcher": (4, 1.0 * _LEASE, 1.5 * _LEASE),
    "skew dispatcher": (2, 0.0, 0.0),
}
_PRODUCER: Final[_Menu] = {
    "kill producer": (5, 0.0, 0.0),
    "pause producer": (2, 0.2, 2.0),
    "skew producer": (2, 0.0, 0.0),
}
_CONSUMER: Final[_Menu] = {
    "kill consumer": (5, 0.0, 0.0),
    # Long enough for the broker to hand its messages to somebody else.
    "pause consumer": (3, 1.0 * _LEASE, 1.5 * _LEASE),
    "skew consumer": (1, 0.0, 0.0),
}
_SERVER: Final[_Menu] = {"kill server": (3, 0.0, 1.0), "pause server": (2, 0.3, 2.5)}
_POOLER: Final[_Menu] = {"kill pooler": (2, 0.0, 1.0), "pause pooler": (1, 0.3, 2.5)}
_RECEIVER: Final[_Menu] = {"kill receiver": (1, 0.1, 2.0), "pause receiver": (1, 0.2, 2.0)}
_NETWORK: Final[_Menu] = {
    "cut": (2, 0.0, 0.0),
    "black hole": (1, 0.3, 4.0),
    "one-way black hole": (2, 0.3, 4.0),
    "refuse": (1, 0.2, 2.0),
    "latency": (1, 0.5, 3.0),
    "narrow": (1, 1.0, 4.0),
    "lost reply": (4, 1.0, 3.0),
}
#: The way to the broker; what is lost there is an acknowledgement, a message or a request for one.
_LINK: Final[_Menu] = {
    "cut link": (3, 0.0, 0.0),
    "black hole link": (1, 0.3, 3.0),
    "one-way black hole link": (2, 0.3, 3.0),
    "refuse link": (1, 0.2, 2.0),
    "latency link": (1, 0.5, 3.0),
}
#: What the publishers of all dispatchers meet with some keys, while the others go through.
_KEYS: Final[_Menu] = {"key outage": (3, 0.5, 4.0), "key hang": (1, 0.5, 2.0)}
_LOCK: Final[_Menu] = {"hold lock": (1, 0.2, 4.0)}


#: What hits the process itself of each kind of worker, and how much time passes between two faults.
_OWN: Final[Mapping[str, tuple[_Menu, float, float]]] = {
    "d": (_DISPATCHER, 3.0, 9.0),
    "p": (_PRODUCER, 5.0, 15.0),
    "c": (_CONSUMER, 4.0, 12.0),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong: ``luck`` decides what the kind leaves open."""

    at: float
    kind: str
    victim: str
    length: float
    luck: float
    #: How much time there is between this fault and the one of the same victim before it.
    gap: float


def plan(seed: int, seconds: float, store: str, workers: Sequence[str]) -> list[Fault]:
    """Return the faults of a run, in order; the same arguments give the same faults."""
    rng = random.Random(f"{seed} {store}")
    faults: list[Fault] = []
    for victim, menu, shortest, longest in _lanes(store, workers):
        at = gap = rng.uniform(1.0, longest)
        while at < seconds:
            kind = rng.choices(list(menu), [weight for weight, _, _ in menu.values()])[0]
            _, least, most = menu[kind]
            length, luck = rng.uniform(least, most), rng.random()
            faults.append(Fault(round(at, 3), kind, victim, round(length, 3), round(luck, 6), round(gap, 3)))
            gap = rng.uniform(shortest, longest)
            at += length + gap
    return sorted(faults, key=lambda fault: (fault.at, fault.victim))


def _lanes(store: str, workers: Sequence[str]) -> list[tuple[str, _Menu, float, float]]:
    """Return who can be hit by what, and how much time passes between two faults."""
    lanes: list[tuple[str, _Menu, float, float]] = [
        ("receiver", _RECEIVER, 5.0, 14.0),
        ("keys", _KEYS, 1.0, 5.0),
    ]
    for worker in workers:
        lanes.append((worker, *_OWN[worker[0]]))
        if store != "sqlite":
            # A consumer has two ways that may fail, and needs both.
            shortest, longest = (4.0, 10.0) if worker.startswith("c") else (2.0, 6.0)
            lanes.append((f"{worker} network", _NETWORK, shortest, longest))
        if worker.startswith("c"):
            lanes.append((f"{worker} link", _LINK, 4.0, 12.0))
    if store == "pgbouncer":
        lanes.append(("pooler", _POOLER, 6.0, 15.0))
    lanes.append(("database", _LOCK, 3.0, 8.0) if store == "sqlite" else ("server", _SERVER, 8.0, 18.0))
    return lanes


class Nemesis:
    """Carries out a plan: the faults of one victim one after the other, those of different victims at once."""

    def __init__(
        self,
        faults: Sequence[Fault],
        crew: Crew,
        history: History,
        *,
        folder: Path,
        proxies: Mapping[str, FaultProxy],
        servers: Mapping[str, Server],
    ) -> None:
        """Set up a nemesis; ``servers`` are known by what faults call them."""
        self._faults = faults
        self._crew = crew
        self._history = history
        self._folder = folder
        self._proxies = proxies
        self._servers = servers
        self._deadline = 0.0

    async def rage(self, seconds: float) -> None:
        """Cause faults for so long; when this returns, each of them has ended."""
        self._deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for victim in dict.fromkeys(fault.victim for fault in self._faults):
                group.create_task(self._haunt([fault for fault in self._faults if fault.victim == victim]))

    async def _haunt(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            # Where the machine is slow, the plan is late as a whole: a victim must have time to do its work.
            await asyncio.sleep(fault.gap)
            if time.monotonic() > self._deadline:
                return
            self._history.write("fault", "invoke", **asdict(fault))
            await self._cause(fault)
            self._history.write("fault", "ok", **asdict(fault))

    def _cause(self, fault: Fault) -> Awaitable[None]:
        verb, _, _ = fault.kind.partition(" ")
        if fault.victim.endswith((" network", " link")):
            return self._disturb(self._proxies[fault.victim], fault)
        if fault.victim == "keys":
            return self._shut_out(fault)
        if fault.victim == "database":
            return asyncio.to_thread(self._hold_lock, fault.length)
        if fault.victim in self._servers:
            return self._hit_server(self._servers[fault.victim], verb, fault.length)
        by_verb: dict[str, Callable[[Fault], Awaitable[None]]] = {
            "kill": lambda one: self._crew.kill(one.victim, down=one.length),
            "pause": lambda one: self._crew.pause(one.victim, one.length),
            "skew": lambda one: self._crew.kill(one.victim, skew=(one.luck * 2 - 1) * DAY),
        }
        return by_verb[verb](fault)

    async def _shut_out(self, fault: Fault) -> None:
        """Have publishers fail with some of the keys."""
        outage = KeyOutage(int(fault.luck * KEY_CLASSES), hangs=fault.kind == "key hang")
        outage.write(self._folder)
        await asyncio.sleep(fault.length)
        outage.end(self._folder)

    @staticmethod
    async def _hit_server(server: Server, verb: str, length: float) -> None:
        await asyncio.to_thread(server.kill9 if verb == "kill" else server.pause)
        await asyncio.sleep(length)
        await asyncio.to_thread(server.start if verb == "kill" else server.resume)

    def _hold_lock(self, length: float) -> None:
        with contextlib.closing(sqlite3.connect(self._folder / SQLITE_FILE, timeout=10)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(length)
            connection.rollback()

    async def _disturb(self, proxy: FaultProxy, fault: Fault) -> None:
        match fault.kind.removesuffix(" link"):
            case "cut":
                proxy.cut()
            case "black hole":
                proxy.black_hole()
            case "one-way black hole":
                proxy.black_hole("replies" if fault.luck < 0.5 else "requests")  # noqa: PLR2004 -- heads or tails
            case "refuse":
                await proxy.refuse()
                proxy.cut()
            case "latency":
                proxy.latency = timedelta(milliseconds=5 + 100 * fault.luck)
            case "narrow":
                proxy.bandwidth = int(_NARROW * (0.5 + fault.luck))
            case _:
                self._lose_reply(proxy, fault)
        await asyncio.sleep(fault.length)
        proxy.heal()
        await proxy.accept()

    def _lose_reply(self, proxy: FaultProxy, fault: Fault) -> None:
        """Withhold the reply to a COMMIT, a claim or a settlement, or to whatever comes next."""
        patterns = self._crew.telltales(fault.victim.partition(" ")[0])
        pattern = patterns[int(fault.luck * len(patterns))]
        if pattern:
            proxy.drop_reply(pattern, nth=1 + int(fault.luck * 100) % 3)
        else:
            proxy.truncate(after=0)
