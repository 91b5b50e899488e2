"""What all measurements share: servers, processes to measure in, rounds that take turns, and a progress bar."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self

from rich.progress import Progress, TaskID

from postroom.testing.servers import MariaDBServer, PostgresServer, SqlServer

__all__ = ["Bench", "Entry", "Race", "Result"]

ROOT = Path(__file__).parents[1]
#: Not what a laptop's package would set, but far from what a database server has.
_POSTGRES = {"shared_buffers": "256MB", "max_wal_size": "4GB", "fsync": "on", "synchronous_commit": "on"}
_MARIADB = {"innodb-buffer-pool-size": "256M", "innodb-flush-log-at-trx-commit": "1"}
_PATIENCE = 600


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
        self._servers: dict[str, SqlServer] = {}
        self._databases = 0

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
        return {
            name: server.client.query("SELECT version()").strip().partition(" on ")[0]
            for name, server in self._servers.items()
        }

    def database(self, kind: Literal["postgres", "mariadb", "sqlite"]) -> str:
        """Return the DSN of an empty database."""
        self._databases += 1
        name = f"bench_{self._databases}"
        if kind == "sqlite":
            return f"sqlite:///{self._folder / name}.sqlite3"
        return self._server(kind).create_database(name)

    def _server(self, kind: str) -> SqlServer:
        if kind not in self._servers:
            server = PostgresServer(settings=_POSTGRES) if kind == "postgres" else MariaDBServer(settings=_MARIADB)
            self._servers[kind] = self._stack.enter_context(server)
        return self._servers[kind]

    def start(self, contender: str, dsn: str, call: str, **arguments: Any) -> subprocess.Popen[str]:  # noqa: ANN401
        """Start a call in a process of its own; ``options`` among the arguments are the contender's."""
        options = arguments.pop("options", {})
        order = {"contender": contender, "dsn": dsn, "options": options, "call": call, "arguments": arguments}
        command = [sys.executable, "-m", "bench.worker", json.dumps(order)]
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
        self._progress.update(self._task, step=f"{contender.rpartition('.')[2]} {call}")
        return self.answer(self.start(contender, dsn, call, **arguments))

    def race(
        self, entries: Mapping[str, Entry], kind: Literal["postgres", "mariadb", "sqlite"], *, count: int, keys: int = 0
    ) -> Race:
        """Let everybody empty the same backlog, in turns, so that what disturbs one disturbs all."""
        databases = {name: self.database(kind) for name in entries}
        race = Race()
        for name, entry in entries.items():
            self.call(entry.contender, databases[name], "prepare", options=entry.options)
            race.seconds[name], race.wrong[name] = [], dict.fromkeys(("lost", "doubled", "reordered"), 0)
        for number in range(self.rounds + 1):
            for name, entry in entries.items():
                warming = number == 0
                share = int(count * entry.share) // (10 if warming else 1)
                backlog = {"options": entry.options, "count": share, "keys": keys}
                self.call(entry.contender, databases[name], "fill", **backlog)
                drained = self.call(entry.contender, databases[name], "drain", **backlog)
                if not warming:
                    race.seconds[name].append(drained["seconds"] / share)
                    for kind_of_wrong in race.wrong[name]:
                        race.wrong[name][kind_of_wrong] += drained[kind_of_wrong]
        return race
