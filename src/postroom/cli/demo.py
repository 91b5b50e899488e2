"""The command that shows postroom at work, and proves that nothing was lost."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..errors import StoreError
from ..store import Stats
from .options import as_json, echo_json, run
from .shop import Shop
from .status import show_age, show_count
from .verdict import Verdict

__all__ = ["conclude", "demo", "play"]

#: How many seconds lie between two looks, on a terminal and elsewhere.
ON_TERMINAL = 0.25
ELSEWHERE = 1.0


@click.command()
@click.option(
    "--seconds", type=click.FloatRange(1, 600), default=20, show_default=True, help="How long customers place orders."
)
@as_json
def demo(*, seconds: float, as_json: bool) -> None:
    """Run a small shop through a broker outage, and check every order.

    Orders are written to a SQLite file together with their messages; one in ten is rolled back. A dispatcher delivers
    to a broker in memory, which fails now and then, delivers every twentieth message twice, and is down in the middle
    third. One service reserves the stock for each order, another ships it; their handlers sometimes fail after they
    have written.

    At the end the tables are compared with each other and with what the broker received. The exit code is 0 only if
    every committed order was delivered and none that was rolled back, each was reserved once and shipped once, every
    duplicate was recognised, each customer's orders were handled in order, and no message is dead.

    \b
    Example:
      postroom demo --seconds 10
      postroom demo --seconds 5 --json
    """  # noqa: D301
    console = Console(quiet=as_json)
    with tempfile.TemporaryDirectory(prefix="postroom-demo-") as folder:
        shop = Shop(Path(folder), seconds=seconds)
        verdict = run(lambda: play(shop, console))
    sys.exit(conclude(verdict, as_json=as_json))


def conclude(verdict: Verdict, *, as_json: bool) -> int:
    """Print the verdict and return the exit code."""
    if as_json:
        echo_json(verdict.as_dict())
    else:
        click.echo(str(verdict))
    return 0 if verdict.ok else 1


async def play(shop: Shop, console: Console) -> Verdict:
    """Run the shop and show how it is doing until it ends."""
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not console.quiet else None
    with live or nullcontext():
        show: Callable[[_Reading], None] = _printer(console) if live is None else _updater(live)
        watching = asyncio.create_task(_watch(shop, ON_TERMINAL if live else ELSEWHERE, show))
        try:
            return await shop.run()
        finally:
            watching.cancel()
            await asyncio.wait({watching})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """One look at the shop."""

    shop: Shop
    stats: Stats
    placed_rate: float
    delivered_rate: float

    def cells(self) -> dict[str, str]:
        shop, counter = self.shop, self.shop.counter
        backlog = min(self.stats.pending + self.stats.processing, self.stats.ceiling)
        return {
            "time": f"{shop.elapsed:.0f}s",
            "placed": f"{shop.placed:,} ({self.placed_rate:.0f}/s)",
            "delivered": f"{counter.delivered:,} ({self.delivered_rate:.0f}/s)",
            "rolled back": f"{len(shop.rolled_back):,}",
            "handled": f"{counter.handled:,}",
            "duplicates": f"{counter.absorbed:,}",
            "backlog": show_count(backlog, self.stats.ceiling),
            "oldest": show_age(self.stats.oldest_due),
            "retries": str(counter.retries),
            "dead": str(counter.dead + counter.buried),
            "broker": "DOWN, waiting" if counter.down else "up",
        }


async def _watch(shop: Shop, interval: float, show: Callable[[_Reading], None]) -> None:
    before = (0.0, 0, 0)
    while True:
        await asyncio.sleep(interval)
        try:
            stats = await shop.stats()
        except StoreError:
            continue  # the shop is not open yet, or the store is busy; it will be seen next time
        now = (shop.elapsed, shop.placed, shop.counter.delivered)
        passed = max(now[0] - before[0], 0.001)
        show(
            _Reading(
                shop=shop,
                stats=stats,
                placed_rate=(now[1] - before[1]) / passed,
                delivered_rate=(now[2] - before[2]) / passed,
            )
        )
        before = now


def _printer(console: Console) -> Callable[[_Reading], None]:
    def show(reading: _Reading) -> None:
        if not console.quiet:
            click.echo("  ".join(f"{name} {value}" for name, value in reading.cells().items()))

    return show


def _updater(live: Live) -> Callable[[_Reading], None]:
    def show(reading: _Reading) -> None:
        table = Table.grid(padding=(0, 2))
        for name, value in reading.cells().items():
            alarm = reading.shop.counter.down and name == "broker"
            table.add_row(f"[dim]{name}[/dim]", f"[bold red]{value}[/bold red]" if alarm else value)
        live.update(table, refresh=True)

    return show
