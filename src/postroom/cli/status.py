"""The command that counts the messages of a namespace."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..store import Stats
from .options import Duration, StoreOptions, as_json, echo_json, run, store_options

__all__ = ["show_age", "show_count", "stats_table", "status"]

_COUNTS = ("pending", "processing", "delivered", "dead")


@click.command()
@store_options
@click.option("--watch", is_flag=True, help="Repeat until interrupted.")
@click.option("--interval", type=Duration(), default="1s", show_default=True, help="How often to repeat, with --watch.")
@as_json
def status(store_options: StoreOptions, *, watch: bool, interval: timedelta, as_json: bool) -> None:
    """Count the messages in each state.

    Also shows how long the oldest message that can be delivered now has waited. Counting stops at 10000, which keeps it
    cheap on large tables; such a count is shown as 10000+.

    \b
    Example:
      postroom status --store sqlite:///shop.sqlite3
      postroom status --watch --interval 5s
      postroom status --json | jq .oldest_due
    """  # noqa: D301
    run(lambda: _show(store_options, interval if watch else None, as_json=as_json))


async def _show(options: StoreOptions, interval: timedelta | None, *, as_json: bool) -> None:
    console = Console()
    if as_json:
        async for stats in _readings(options, interval):
            echo_json(_as_dict(options.namespace, stats))
    elif interval is None or not console.is_terminal:
        async for stats in _readings(options, interval):
            click.echo(_as_text(stats, " " if interval else "\n"))
    else:
        with Live(console=console, auto_refresh=False, screen=False) as live:
            async for stats in _readings(options, interval):
                live.update(stats_table(stats), refresh=True)


async def _readings(options: StoreOptions, interval: timedelta | None) -> AsyncIterator[Stats]:
    """Yield the numbers once, or again and again until a signal comes."""
    stopped = asyncio.Event()
    if interval is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    store = options.make()
    try:
        await store.open()
        while True:
            yield await store.stats()
            if interval is None:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(interval.total_seconds()):
                    await stopped.wait()
                    return
    finally:
        await store.close()


def show_count(count: int, ceiling: int) -> str:
    """Return a count, with a + if counting stopped there."""
    return f"{count}+" if count >= ceiling else str(count)


def show_age(age: timedelta | None) -> str:
    """Return an age in seconds, or a dash if there is none."""
    return "-" if age is None else f"{age.total_seconds():.1f}s"


def stats_table(stats: Stats) -> Table:
    """Return the numbers as a table of two columns."""
    table = Table.grid(padding=(0, 2))
    for name, value in _cells(stats):
        table.add_row(name, value)
    return table


def _cells(stats: Stats) -> list[tuple[str, str]]:
    counts = [(name, show_count(getattr(stats, name), stats.ceiling)) for name in _COUNTS]
    return [*counts, ("oldest due", show_age(stats.oldest_due))]


def _as_text(stats: Stats, separator: str) -> str:
    if separator == "\n":
        return "\n".join(f"{name:<11} {value}" for name, value in _cells(stats))
    return separator.join(f"{name.replace(' ', '_')}={value}" for name, value in _cells(stats))


def _as_dict(namespace: str, stats: Stats) -> dict[str, Any]:
    """Return the numbers for programs; durations are seconds."""
    counts = {name: getattr(stats, name) for name in _COUNTS}
    return {
        "namespace": namespace,
        **counts,
        "oldest_due": None if stats.oldest_due is None else stats.oldest_due.total_seconds(),
        "ceiling": stats.ceiling,
        "at_ceiling": [name for name, count in counts.items() if count >= stats.ceiling],
    }
