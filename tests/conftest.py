"""What every test run needs, whichever of its tests are run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import coverage
import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from postroom.events import log_event
from postroom.testing.clients import ValkeyClient

from .worlds import TIERS, is_proof, is_quick

pytest_plugins = ["tests.support.server_fixtures"]

_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run choose its tier."""
    parser.addoption(
        "--tier",
        choices=TIERS,
        default="test",
        help="how much to run: `quick`, `test` (the default) or `prove`, which is everything",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make prove` alone runs, and leave out what is not of this tier.

    A test that is named by its id is run in every tier, and ``-m prove`` finds every test with that mark.
    """
    for item in items:
        if is_proof(item):
            item.add_marker(pytest.mark.prove)
    tier = config.getoption("--tier")
    if tier == "prove" or "prove" in config.getoption("markexpr"):
        return
    named = tuple(argument for argument in config.args if "::" in argument)
    chosen, rest = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        is_chosen = is_quick(item) if tier == "quick" else not is_proof(item)
        (chosen if is_chosen or item.nodeid.startswith(named) else rest).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=rest)
    config.stash[_LEFT_OUT] = len(rest)


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    """Say how many tests the tier leaves out, so that a folder of proofs does not look empty."""
    count = config.stash.get(_LEFT_OUT, 0)
    tier = config.getoption("--tier")
    return f"tier {tier}: {count} tests left out; --tier prove runs all" if count else None


@pytest.fixture(autouse=True)
def _fresh_log() -> None:
    """Let no test see what the log has held back of the tests before it."""
    log_event.flush()


@pytest.fixture
async def client(valkey_server: ValkeyClient) -> AsyncIterator[Any]:
    """A client of Valkey's that sends no command twice, as a store asks for."""
    async with redis.asyncio.Redis.from_url(valkey_server.dsn, retry=Retry(NoBackoff(), 0)) as client:
        yield client


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Write down what was covered, before xdist waits for this worker to end.

    It waits for ten seconds and kills. A worker that has thousands of tests to clear up after may need longer,
    and without this its whole share of the coverage is gone.
    """
    if (running := coverage.Coverage.current()) is not None:
        running.save()
