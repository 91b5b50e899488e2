"""Mutation testing: `scripts/mutate` runs the fixed list, `scripts/mutate --seed 7 --count 100` chosen mutants."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Final, TypeVar

from .coverage_map import ROOT, CoverageMap, Measuring, MeasuringError, load
from .equivalent import Identity, equivalents
from .fixed import StaleError, fixed
from .generator import choose, every_mutant
from .judging import Baselines, judge, judge_fixed
from .mutant import Mutant
from .report import Progress, Verdict, summary
from .runner import Copy, copied

__all__ = ["main"]

PACKAGE: Final = "src/postroom"
CACHE: Final = ROOT / ".mutation"
#: What runs the same code in many processes, starts foreign tools, or is about the tests themselves.
LEFT_OUT: Final = (
    "tests/chaos",
    "tests/crash",
    "tests/isolation",
    "tests/typing",
    "tests/test_bench.py",
    "tests/test_mutation.py",
    "tests/test_packaging.py",
    "tests/test_prove.py",
    "tests/test_servers.py",
    "tests/test_tiers.py",
    "tests/test_variants.py",
)

_T = TypeVar("_T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants that are asked for; return 1 if one of them survives."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that copies are deleted then too
    try:
        verdicts = _fixed(options) if options.seed is None else _chosen(options)
    except StaleError as error:
        print(f"scripts/mutation/fixed.toml is stale: {error}", file=sys.stderr)
        return 2
    except MeasuringError as error:
        print(f"scripts/mutate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if options.list:
        return 0
    print(summary(verdicts, {one.mutant.path: (ROOT / one.mutant.path).read_text() for one in verdicts}))
    return int(any(verdict.has_survived for verdict in verdicts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("--seed", type=int, help="choose mutants of the whole package by this number")
    parser.add_argument("--count", type=int, default=100, help="how many are chosen (100)")
    parser.add_argument("--only", default="", help="only mutants whose name, promise or path contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many run at the same time")
    parser.add_argument("--rebuild", action="store_true", help="make the coverage map anew")
    parser.add_argument("--tier", choices=("quick", "test"), default="test", help="which tests to choose from (test)")
    parser.add_argument("--map-tests", nargs="+", default=["tests"], help="files or folders of tests to choose from")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    return parser


def _fixed(options: argparse.Namespace) -> list[Verdict]:
    """Judge the fixed list."""
    entries = [one for one in fixed(ROOT) if options.only in f"{one.promise} {one.name} {one.mutant.path}"]
    if options.list:
        _print_list((f"{one.promise:4} {one.name}", one.mutant) for one in entries)
        return []
    baselines = Baselines()
    return _in_copies(entries, lambda copy, one: judge_fixed(copy, one, baselines), options.jobs)


def _chosen(options: argparse.Namespace) -> list[Verdict]:
    """Judge mutants that the seed chooses."""
    mutants = [one for one in every_mutant(ROOT, PACKAGE) if options.only in one.path]
    chosen = choose(mutants, ROOT, seed=options.seed, count=options.count)
    if options.list:
        _print_list((f"{one.operator}: {one.before} -> {one.after}", one) for one in chosen)
        return []
    parallel = ["-n", str(options.jobs), "--dist", "worksteal", "--tier", options.tier]
    measuring = Measuring(ROOT, PACKAGE, CACHE / f"{options.tier}.json", parallel, options.map_tests, LEFT_OUT)
    found = load(measuring, rebuild=options.rebuild)
    return _in_copies(chosen, partial(_judge, found, equivalents()), options.jobs)


def _judge(found: CoverageMap, known: Mapping[Identity, str], copy: Copy, one: Mutant) -> Verdict:
    return judge(copy, one, found, known)


def _in_copies(mutants: Sequence[_T], judged: Callable[[Copy, _T], Verdict], jobs: int) -> list[Verdict]:
    """Judge mutants, several at a time, each in a copy of the tree that no other uses at the same time."""
    progress = Progress(len(mutants))
    free = SimpleQueue[Copy]()

    def work(one: _T) -> Verdict:
        copy = free.get()
        try:
            verdict = judged(copy, one)
        finally:
            free.put(copy)
        progress.report(verdict)
        return verdict

    with ExitStack() as stack, ThreadPoolExecutor(jobs) as workers:
        copies = [stack.enter_context(copied(ROOT)) for _ in range(jobs)]
        for copy in copies:
            free.put(copy)
        try:
            return list(workers.map(work, mutants))
        except BaseException:
            for copy in copies:
                copy.stop()
            raise


def _print_list(mutants: Iterable[tuple[str, Mutant]]) -> None:
    for name, one in mutants:
        print(f"{one.path}:{one.line} {name}")


if __name__ == "__main__":
    sys.exit(main())
