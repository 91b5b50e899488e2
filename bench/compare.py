"""This tree against another commit of it, by processor time per message; ``make bench BASE=<commit>`` runs this."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .measure import ROOT, Bench, Kind

__all__ = ["ROUNDS", "ROWS", "Compared", "Row", "chosen", "compare", "compared", "report", "worktree", "write"]

ROUNDS = 7
#: At most this many times the base's processor time is "not slower".
LIMIT = 1.05
_METER = Path(__file__).with_name("meter.py")
_RESULTS = Path(__file__).with_name("compared.json")
_PATIENCE = 600
#: A part of the work that is enough to warm up, and less than which no workload can do.
_PART, _LEAST = 20, 20

Side: TypeAlias = Literal["base", "this"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A workload that both trees run: ``call`` of a contender, with ``count`` and other arguments."""

    name: str
    kind: Kind
    contender: str
    call: str
    count: int
    arguments: Mapping[str, int] = field(default_factory=dict[str, int])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: How many messages one of ``count`` stands for.
    messages: float = 1.0
    #: Whether the backlog is made anew before each round; a row that needs none to begin with starts from an empty one.
    filled: bool = True

    def calls(self, count: int, *, first: bool) -> dict[str, dict[str, int]]:
        """Return the calls of one round, of which the last is measured."""
        backlog = {"count": count if self.call == "drain" else 0, "keys": self.arguments.get("keys", 0)}
        return {
            **({"prepare": {}} if first else {}),
            **({"fill": backlog} if self.filled else {}),
            self.call: {"count": count, **self.arguments},
        }


def _drain(name: str, kind: Kind, contender: str, count: int, *, keys: int = 0, **options: bool) -> Row:
    arguments = {"keys": keys}
    return Row(
        name=name, kind=kind, contender=contender, call="drain", count=count, arguments=arguments, options=options
    )


def _add(name: str, kind: Kind, contender: str, count: int, *, batch: int) -> Row:
    arguments = {"batch": batch}
    return Row(name=name, kind=kind, contender=contender, call="add", count=count, arguments=arguments, messages=batch)


#: Counts are such that a round takes one or two seconds of processor time, a hundred times what is rounded off.
ROWS: tuple[Row, ...] = (
    _drain("postgres.drain", "postgres", "contenders.postroom", 30_000),
    _drain("postgres.drain_kept", "postgres", "contenders.postroom", 30_000, keep=True),
    _drain("postgres.drain_ordered", "postgres", "contenders.postroom", 20_000, keys=500),
    _drain("sqlite.drain", "sqlite", "contenders.postroom", 30_000),
    _drain("mariadb.drain", "mariadb", "contenders.postroom", 15_000),
    _drain("redis.drain", "redis", "contenders.postroom_redis", 30_000),
    _drain("redis_stream.drain", "redis", "contenders.postroom_redis", 40_000, stream=True),
    _add("postgres.add", "postgres", "meter.adding", 2_500, batch=1),
    _add("postgres.add_many", "postgres", "meter.adding", 400, batch=100),
    _add("redis.add", "redis", "meter.adding_redis", 2_500, batch=1),
    _add("redis.add_many", "redis", "meter.adding_redis", 400, batch=100),
    Row(
        name="consume.postgres",
        kind="postgres",
        contender="trials.consuming",
        call="consumer",
        count=2_000,
        messages=1.1,  # a tenth goes first, to warm up
        filled=False,
    ),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """What a message took in each round, in microseconds of processor time of client and server together."""

    name: str
    base: Sequence[float]
    this: Sequence[float]

    @property
    def ratio(self) -> float:
        """The median of this tree over that of the base."""
        return statistics.median(self.this) / statistics.median(self.base)

    @property
    def is_slower(self) -> bool:
        """Whether this tree takes more than 5 % more."""
        return self.ratio > LIMIT

    @property
    def ratios(self) -> tuple[float, float]:
        """The least and the largest ratio of a single round, whose two sides ran one after the other."""
        ratios = [this / base for base, this in zip(self.base, self.this, strict=True)]
        return min(ratios), max(ratios)


def chosen(only: str) -> list[Row]:
    """Return the rows whose names begin with one of the prefixes, which commas separate; all if there are none."""
    prefixes = tuple(prefix.strip() for prefix in only.split(",") if prefix.strip())
    return [row for row in ROWS if not prefixes or row.name.startswith(prefixes)]


def compare(base: str, only: str, console: Console, *, quick: bool) -> bool:
    """Measure both trees, show and write what came out, and tell whether this one is not slower in any row."""
    rows = chosen(only)
    if not rows:
        raise SystemExit(f"no row begins with {only!r}; there are {', '.join(row.name for row in ROWS)}")
    commit = _git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
    results: list[Compared] = []
    progress = Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.fields[step]}"),
        TimeElapsedColumn(),
        console=console,
    )
    with worktree(commit) as tree, progress, Bench(progress, quick=quick) as bench:
        bench.expect(len(rows))
        for row in rows:
            bench.begin(row.name)
            results.append(compared(bench, row, {"base": tree, "this": ROOT}))
            bench.end()
    console.print(report(results, commit))
    write(results, commit, _RESULTS, quick=quick)
    return not any(result.is_slower for result in results)


def compared(bench: Bench, row: Row, trees: Mapping[Side, Path], *, rounds: int = ROUNDS) -> Compared:
    """Let two trees do the same work in turns, on the same server, after a small round that warms both up."""
    count = _part(row.count) if bench.quick else row.count
    databases = {side: bench.database(row.kind) for side in trees}
    taken: dict[Side, list[float]] = {side: [] for side in trees}
    for number in range(rounds + 1):
        # The order alternates, so that neither side always runs after a checkpoint of the other.
        for side in sorted(trees, reverse=bool(number % 2)):
            work = count if number else _part(count)
            order = {
                "tree": str(trees[side]),
                "contender": row.contender,
                "dsn": databases[side],
                "options": dict(row.options),
                "calls": row.calls(work, first=number == 0),
                "server": bench.server_pid(row.kind),
            }
            seconds = _run(order)
            if number:
                taken[side].append(sum(seconds.values()) / (work * row.messages) * 1e6)
    return Compared(row.name, taken["base"], taken["this"])


def _part(count: int) -> int:
    return max(count // _PART, _LEAST)


def _run(order: Mapping[str, Any]) -> dict[str, float]:
    tree = Path(order["tree"])
    path = os.pathsep.join((str(tree), str(tree / "src")))
    # Measured for coverage it would be slower, and the report would look for the source of a commit that is gone.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    process = subprocess.run(
        [sys.executable, "-P", _METER, json.dumps(order)],
        env={**kept, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"{order['contender']} of {tree} failed:\n{process.stderr}")
    answer: dict[str, float] = json.loads(process.stdout)
    return answer


@contextmanager
def worktree(commit: str) -> Generator[Path]:
    """Give a worktree of a commit, which is removed afterwards."""
    with TemporaryDirectory(prefix="postroom-base-") as folder:
        tree = Path(folder, "base")
        _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {process.stderr.strip() or 'there is no such commit'}")
    return process.stdout.strip()


def report(results: Sequence[Compared], commit: str) -> Table:
    """Return a row for each result."""
    base, this = f"{commit[:10]}, µs/message", "this tree, µs/message"
    rows = Table("", "name", base, this, "ratio", "ratios of the rounds", "verdict")
    for result in results:
        least, largest = result.ratios
        rows.add_row(
            "[red]✗[/]" if result.is_slower else "[green]✓[/]",
            result.name,
            _spread(result.base),
            _spread(result.this),
            f"{result.ratio:.3f}",
            f"{least:.3f} to {largest:.3f}",
            "slower" if result.is_slower else "not slower",
        )
    return rows


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def write(results: Sequence[Compared], commit: str, path: Path, *, quick: bool) -> None:
    """Write everything to a file, for machines."""
    rows = [
        {
            "name": result.name,
            "ratio": result.ratio,
            "is_slower": result.is_slower,
            "base_us": list(result.base),
            "this_us": list(result.this),
        }
        for result in results
    ]
    path.write_text(json.dumps({"base": commit, "quick": quick, "limit": LIMIT, "rows": rows}, indent=2) + "\n")
