"""User code as the type checkers see it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
CHECKERS = {
    # With the cache of `make check`, which has looked at the same packages.
    "mypy": ["-m", "mypy", "--strict", "--no-error-summary"],
    "pyright": ["-m", "pyright", "--pythonpath", sys.executable],
}


#: Without any setting of this project.
DEFAULTS = {
    "mypy": ["-m", "mypy", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache' / 'defaults'}"],
    "pyright": CHECKERS["pyright"],
}
FORGOTTEN = """
from __future__ import annotations

import aiosqlite
import asyncpg
import psycopg
import redis.asyncio
from asyncpg.pool import PoolConnectionProxy
from redis.asyncio.client import Pipeline
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

from postroom import Outbox


async def place(connection: {kind}, outbox: Outbox) -> None:
    outbox.add(connection, {{"order_id": 42}}, topic="orders")
    outbox.add(connection, [{{"order_id": 42}}], topic="orders")
"""
ASYNC_KINDS = (
    "asyncpg.Connection",
    "PoolConnectionProxy",
    "psycopg.AsyncConnection",
    "aiosqlite.Connection",
    "AsyncConnection",
    "AsyncSession",
    "async_scoped_session[AsyncSession]",
    "redis.asyncio.Redis",
    "Pipeline",
)


def check(
    checker: str, *paths: Path, flags: Mapping[str, list[str]] = CHECKERS, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags[checker], *map(str, paths)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=500)


@pytest.mark.requirement("S2-17", "S4-03")
@pytest.mark.parametrize("checker", CHECKERS)
def test_user_code_is_understood_and_its_mistakes_are_found(checker: str) -> None:
    """Sync gives the answer, async an awaitable, a list a list; a wrong option or connection is told."""
    pytest.importorskip(checker)

    done = check(checker, FOLDER / "user_code.py")

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.requirement("S2-17")
@pytest.mark.parametrize("checker", CHECKERS)
def test_the_checkers_do_look_at_user_code(checker: str, tmp_path: Path) -> None:
    """A checker that finds nothing wrong with anything would prove nothing."""
    pytest.importorskip(checker)
    wrong = tmp_path / "user_code_with_an_error.py"
    text = (FOLDER / "user_code.py").read_text()
    wrong.write_text(
        text.replace(
            "assert_type(outbox.add(session, message), AddResult)", "assert_type(outbox.add(session, message), int)"
        )
    )

    done = check(checker, wrong)

    assert done.returncode == 1
    assert done.stdout.count("error") >= 1
    assert "AddResult" in done.stdout


@pytest.mark.requirement("S2-17")
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_forgotten_await_is_reported_without_any_setting(checker: str, tmp_path: Path) -> None:
    """The order would be committed without its message."""
    pytest.importorskip(checker)
    paths = [tmp_path / f"forgotten_{number}.py" for number in range(len(ASYNC_KINDS))]
    for path, kind in zip(paths, ASYNC_KINDS, strict=True):
        path.write_text(FORGOTTEN.format(kind=kind))

    done = check(checker, *paths, flags=DEFAULTS, folder=tmp_path)

    rule = {"mypy": "unused-coroutine", "pyright": "reportUnusedCoroutine"}[checker]
    lines = [line for line in done.stdout.splitlines() if rule in line]
    assert {path.name: sum(path.name in line for line in lines) for path in paths} == {path.name: 2 for path in paths}
