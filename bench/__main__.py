"""Measure everything, show it, and write it down; ``make bench`` runs this."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .compare import compare
from .measure import Bench, Result
from .report import environment, show, write_json, write_page, write_picture
from .workloads import WORKLOADS

HERE = Path(__file__).parent


def main() -> None:
    """Run the workloads that were asked for; only a comparison with another commit can end badly."""
    parser = argparse.ArgumentParser(
        prog="make bench",
        description="Measure postroom against bare commands and against its peers; speeds are ratios of one run.",
        epilog="examples: make bench · make bench QUICK=1 · make bench ONLY=postgres.add · make bench BASE=HEAD~3",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: under three minutes")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only results whose name begins like this")
    parser.add_argument("--base", metavar="COMMIT", help="compare processor time per message with this commit instead")
    options = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 160)
    if options.base:
        sys.exit(not compare(options.base, options.only, console, quick=options.quick))
    wanted = [name for name in WORKLOADS if name.startswith(options.only) or options.only.startswith(name)]
    if not wanted:
        parser.error(f"nothing begins with {options.only!r}; there are {', '.join(WORKLOADS)}")
    results, servers = measure(wanted, console, quick=options.quick)
    show(results, console)
    if not options.only:  # a part of the figures must not pass for all of them
        write(results, environment(quick=options.quick, servers=servers), quick=options.quick)


def measure(wanted: Sequence[str], console: Console, *, quick: bool) -> tuple[list[Result], dict[str, str]]:
    """Run workloads; return their results and the versions of the servers."""
    name, step = TextColumn("{task.description:<28}"), TextColumn("{task.fields[step]}")
    results: list[Result] = []
    progress = Progress(name, BarColumn(), step, TimeElapsedColumn(), console=console)
    with progress, Bench(progress, quick=quick) as bench:
        bench.expect(len(wanted))
        for prefix in wanted:
            bench.begin(prefix)
            for result in WORKLOADS[prefix](bench):
                results.append(result)
                console.print(f"{result.name} = {result.value:.3g}", style="dim")
            bench.end()
        return results, bench.versions()


def write(results: Sequence[Result], surroundings: dict[str, object], *, quick: bool) -> None:
    """Write everything down; what is published comes from whole runs alone."""
    write_json(results, surroundings, HERE / "latest.json")
    if not quick:
        docs = HERE.parent / "docs"
        write_picture(results, docs / "benchmarks.svg")
        write_page(results, surroundings, docs / "benchmarks.md")


if __name__ == "__main__":
    main()
