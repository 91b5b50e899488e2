"""What all measurements share: servers, processes to measure in, rounds that take turns, and a progress bar."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from rich.progress import Progress, TaskID

from postroom.testing.clients import RedisClient
from postroom.testing.servers import (
    MariaDBServer,
    PostgresServer,
    RedisServer,
    Server,
    ServerMissingError,
    SqlServer,
    ValkeyServer,
)

__all__ = ["Bench", "Entry", "Job", "Kind", "Race", "Result"]

ROOT = Path(__file__).parents[1]
#: Not what a laptop's package would set, but far from what a database server has.
_POSTGRES = {"shared_buffers": "256MB", "max_wal_size": "4GB", "fsync": "on", "synchronous_commit": "on"}
_MARIADB = {"innodb-buffer-pool-size": "256M", "innodb-flush-log-at-trx-commit": "1"}
#: The log is flushed every second, as by default; to write it anew in the midst of a measurement would disturb one.
_REDIS = {"appendfsync": "everysec", "auto-aof-rewrite-percentage": "0"}
_PATIENCE = 600
#: What part of the backlog warms up the server; everything else is new in every round anyway.
_WARM_UP = 20
#: Where peers live that cannot share our packages; each has a virtual environment of its own.
_PEERS = Path(sys.prefix) / "peers"

#: What there are databases of.
Kind: TypeAlias = Literal["postgres", "mariadb", "sqlite", "redis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the table."""

    name: str
    value: float
    goal: float
    better: Literal["higher", "lower"]
    detail: str

    @property
    def is_met(self) -> bool:
        """Whether the goal is reached."""
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal


@dataclass(frozen=True, slots=True)
class Entry:
    """Who takes part in a race, and with what options."""

    contender: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: How much of the backlog it is given; less than all only for one that would take many minutes.
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """Calls to be made one after the other in a process of their own, each with its arguments."""

    contender: str
    dsn: str
    calls: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Race:
    """What came out of a race: how long each took for a message, and what was wrong."""

    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    wrong: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    def rate(self, name: str) -> float:
        """Return the median of messages per second."""
        return 1 / statistics.median(self.seconds[name])

    def ratio(self, name: str, other: str) -> float:
        """Return how much faster one is than the other; zero if it did not do its work right."""
        return 0.0 if any(self.wrong[name].values()) else self.rate(name) / self.rate(other)

    def told(self, *names: str) -> str:
        """Return the figures of some as words."""
        return "; ".join(
            f"{name} {self.rate(name):,.0f}/s, "
            + ", ".join(f"{count} {kind}" for kind, count in self.wrong[name].items())
            for name in names
        )


class Bench:
    """Throw-away servers, and processes that measure on them."""

    def __init__(self, progress: Progress, *, quick: bool) -> None:
        self.quick = quick
        self.rounds: int = 3
        self._progress = progress
        self._task: TaskID = progress.add_task("starting", total=None, step="")
        self._stack = ExitStack()
        self._servers: dict[Kind, Server] = {}
        self._databases: Counter[Kind] = Counter()

    def __enter__(self) -> Self:
        """Make room for files; servers are started when they are first needed."""
        self._folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="postroom-bench-")))
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the servers and remove everything."""
        self._stack.close()

    def size(self, whole: int, quick: int) -> int:
        """Return how much work to do."""
        return quick if self.quick else whole

    def expect(self, workloads: int) -> None:
        """Say how many workloads there are."""
        self._progress.update(self._task, total=workloads)

    def begin(self, workload: str) -> None:
        """Say which workload comes next."""
        self._progress.update(self._task, description=workload.rstrip("."))

    def end(self) -> None:
        """Say that a workload is done."""
        self._progress.update(self._task, advance=1)

    def versions(self) -> dict[str, str]:
        """Return the versions of the servers that were used."""
        return {kind: _version(server) for kind, server in self._servers.items()}

    def database(self, kind: Kind) -> str:
        """Return the DSN of an empty database."""
        self._databases[kind] += 1
        number = self._databases[kind]
        if kind == "sqlite":
            return f"sqlite:///{self._folder / f'bench_{number}'}.sqlite3"
        server = self._server(kind)
        if isinstance(server, SqlServer):
            return server.create_database(f"bench_{number}")
        return urlsplit(server.dsn)._replace(path=f"/{number}").geturl()

    def server_pid(self, kind: Kind) -> int:
        """Return the main process of a server; SQLite has none, which is 0."""
        return 0 if kind == "sqlite" else self._server(kind).pid

    def _server(self, kind: Kind) -> Server:
        if kind not in self._servers:
            server: Server
            match kind:
                case "postgres":
                    server = PostgresServer(settings=_POSTGRES)
                case "mariadb":
                    server = MariaDBServer(settings=_MARIADB)
                case _:
                    server = _redis_kind()(settings=_REDIS)
            self._servers[kind] = self._stack.enter_context(server)
        return self._servers[kind]

    def start(self, job: Job) -> subprocess.Popen[str]:
        """Start calls in a process of their own; its answer is that of the last one."""
        home = _PEERS / job.contender.rpartition(".")[2] / "bin" / "python"
        command = [str(home) if home.exists() else sys.executable, "-m", "bench.worker", json.dumps(asdict(job))]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def answer(self, process: subprocess.Popen[str]) -> Any:  # noqa: ANN401 -- whatever the call returned
        """Return what a call returned."""
        try:
            output, errors = process.communicate(timeout=_PATIENCE)
        finally:
            process.kill()
        if process.returncode:
            raise RuntimeError(f"a measurement failed:\n{errors}")
        return json.loads(output)

    def call(self, contender: str, dsn: str, call: str, **arguments: Any) -> Any:  # noqa: ANN401 -- see answer
        """Make a call in a process of its own, and return what it returned."""
        return self.run(Job(contender, dsn, {call: arguments}))

    def run(self, job: Job) -> Any:  # noqa: ANN401 -- see answer
        """Make calls in a process of their own, and return what the last one returned."""
        self._progress.update(self._task, step=f"{job.contender.rpartition('.')[2]} {' '.join(job.calls)}")
        return self.answer(self.start(job))

    def prepare(self, jobs: Iterable[Job]) -> None:
        """Do what is not measured, as much of it at a time as there are processors."""
        self._progress.update(self._task, step="preparing")
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for _ in threads.map(lambda job: self.answer(self.start(job)), jobs):
                pass

    def medians(self, contender: str, dsn: str, other: str, count: int) -> tuple[float, float]:
        """Return what a claim takes in two databases, as the median of all rounds."""
        rounds = [self.call(contender, dsn, "medians", other=other, count=count) for _ in range(self.rounds)]
        here, there = zip(*rounds, strict=True)
        return statistics.median(here), statistics.median(there)

    def race(self, entries: Mapping[str, Entry], kind: Kind, *, count: int, keys: int = 0) -> Race:
        """Let everybody empty the same backlog, in turns, so that what disturbs one disturbs all."""
        databases = {name: self.database(kind) for name in entries}
        race = Race()
        for name in entries:
            race.seconds[name], race.wrong[name] = [], dict.fromkeys(("lost", "doubled", "reordered"), 0)
        for number in range(self.rounds + 1):
            for name, entry in entries.items():
                warming = number == 0
                share = int(count * entry.share) // (_WARM_UP if warming else 1)
                backlog = {"count": share, "keys": keys}
                calls = {**({"prepare": {}} if warming else {}), "fill": backlog, "drain": backlog}
                drained = self.run(Job(entry.contender, databases[name], calls, entry.options))
                if not warming:
                    race.seconds[name].append(drained["seconds"] / share)
                    for kind_of_wrong in race.wrong[name]:
                        race.wrong[name][kind_of_wrong] += drained[kind_of_wrong]
        return race


def _redis_kind() -> type[RedisServer]:
    """Return Redis, or what came with the Python packages if there is none."""
    try:
        RedisServer.programs.find(*RedisServer.names, folder=None)
    except ServerMissingError:
        return ValkeyServer
    return RedisServer


def _version(server: Server) -> str:
    if isinstance(server, SqlServer):
        return server.client.query("SELECT version()").strip().partition(" on ")[0]
    told = dict(re.findall(r"(valkey|redis)_version:(\S+)", str(RedisClient(server.dsn).ask("INFO", "server"))))
    name = "valkey" if "valkey" in told else "redis"
    return f"{name.title()} {told[name]}"
