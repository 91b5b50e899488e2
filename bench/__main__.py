"""Measure everything, show it, and write it down; ``make bench`` runs this."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .measure import Bench, Result
from .report import environment, show, write_json, write_page, write_picture
from .workloads import WORKLOADS

HERE = Path(__file__).parent


def main() -> None:
    """Run the workloads that were asked for; whatever they show, this ends well."""
    parser = argparse.ArgumentParser(
        prog="make bench",
        description="Measure postroom against bare SQL and against its peers; speeds are ratios of one run.",
        epilog="examples: make bench · make bench QUICK=1 · make bench ONLY=postgres.add",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: under three minutes")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only results whose name begins like this")
    options = parser.parse_args()
    wanted = {
        prefix: workload
        for prefix, workload in WORKLOADS.items()
        if prefix.startswith(options.only) or options.only.startswith(prefix)
    }
    if not wanted:
        parser.error(f"nothing begins with {options.only!r}; there are {', '.join(WORKLOADS)}")
    console = Console(width=None if Console().is_terminal else 160)
    texts = (TextColumn("{task.description:<28}"), TextColumn("{task.fields[step]}"))
    columns = (texts[0], BarColumn(), texts[1], TimeElapsedColumn())
    results: list[Result] = []
    with Progress(*columns, console=console) as progress, Bench(progress, quick=options.quick) as bench:
        bench.expect(len(wanted))
        for prefix, workload in wanted.items():
            bench.begin(prefix)
            for result in workload(bench):
                results.append(result)
                progress.console.print(f"{result.name} = {result.value:.3g}", style="dim")
            bench.end()
        servers = bench.versions()
    show(results, console)
    if options.only:
        return  # a part of the figures must not pass for all of them
    surroundings = environment(quick=options.quick, servers=servers)
    write_json(results, surroundings, HERE / "latest.json")
    if not options.quick:
        docs = HERE.parent / "docs"
        write_picture(results, docs / "benchmarks.svg")
        write_page(results, surroundings, docs / "benchmarks.md")


if __name__ == "__main__":
    main()
