"""Chaos for a minute: real processes die, stop and lose their network, and every promise is kept."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.run import server_of
from postroom.testing.programs import MARIADB, PGBOUNCER, POSTGRES
from postroom.testing.servers import ServerMissingError
from tests.support.server_fixtures import skip_or_fail
from tests.worlds import CHAOS_STORES

#: How long faults go on in each tier; a minute is what the promises are tested with.
SECONDS = {"test": "15", "prove": "60"}
#: From how many seconds on a run must have reached what only chance leads to.
LONG = 60
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=CHAOS_STORES)
def store(request: pytest.FixtureRequest) -> str:
    """A store whose server can be had."""
    name: str = request.param
    try:
        if name in {"postgres", "pgbouncer"}:
            POSTGRES.find("postgres")
        if name == "pgbouncer":
            PGBOUNCER.find("pgbouncer")
        elif name == "mariadb":
            MARIADB.find("mariadbd", "mysqld")
        elif name.startswith("redis"):
            server_of(name)
    except ServerMissingError as error:
        skip_or_fail(error)
    return name


@pytest.fixture
def seconds(pytestconfig: pytest.Config) -> float:
    """How long faults go on; ``POSTROOM_CHAOS_SECONDS`` says otherwise."""
    tier = SECONDS.get(pytestconfig.getoption("--tier"), SECONDS["test"])
    return float(os.environ.get("POSTROOM_CHAOS_SECONDS", tier))


async def unleash(store: str, seconds: float, folder: Path) -> tuple[int, str, dict[str, Any]]:
    """Run chaos as ``make chaos`` does; return its exit code, what it said and its verdict."""
    seed = os.environ.get("POSTROOM_CHAOS_SEED") or str(secrets.randbelow(1_000_000))
    options = ["--store", store, "--seconds", str(seconds), "--seed", seed, "--folder", str(folder)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "chaos", *options, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return await process.wait(), out.decode(), json.loads((folder / "verdict.json").read_text())


@pytest.mark.requirement(
    "G1", "G2", "G3", "G4", "G6", "G7", "G8", "G9", "G10", "G12", "G13", "S2-32", "S2-47", "S2-49", "S2-50", "S4-20"
)
@pytest.mark.timeout(3600)
async def test_nothing_is_lost_doubled_or_reordered_while_everything_fails(
    store: str, seconds: float, tmp_path: Path
) -> None:
    """Faults under load, then the checker."""
    code, line, verdict = await unleash(store, seconds, tmp_path)
    print(line)  # noqa: T201 -- the figures, and the seed to repeat them with

    assert verdict["violations"] == [], line
    assert code == 0
    assert line.startswith(f"OK {store} seed")
    # Low, so that a busy machine reaches them too; a run that exercised nothing proves nothing.
    assert sum(verdict["faults"].values()) >= seconds / 4
    assert verdict["messages"] >= 3 * seconds
    assert verdict["effects"] >= 3 * seconds
    # Every producer begins with a message that no consumer gets done, and the run waits for the end of each message:
    # these two are reached on any machine, however short the run is.
    assert verdict["reached"]["dead letters"] > 0
    assert verdict["reached"]["handlings that came to nothing"] > 0
    if seconds >= LONG:
        # Left to the dice and the faults. A machine with two cores reaches each some hundreds of times within 15 s, so
        # that one which is five times slower reaches them too; a short run on a machine that stood still may not.
        assert verdict["reached"]["rolled back"] > 0
        assert verdict["reached"]["leases run out and claimed anew"] > 0
        assert verdict["absorbed"] > 0
