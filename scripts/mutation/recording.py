"""A pytest plugin that records which lines each test covers, how long it takes and whether it passes.

`coverage_map` loads it into the runs that make the map, where coverage.py has been started by the environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import coverage
import pytest

__all__ = ["CONTEXT", "RECORD", "pytest_runtest_makereport", "pytest_runtest_protocol"]

#: Environment variable that names the test to the processes that it starts.
CONTEXT = "MUTATION_CONTEXT"
#: Environment variable that names the file which gets a line for each test.
RECORD = "MUTATION_RECORD"
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record one test, its fixtures included."""
    running = coverage.Coverage.current()
    os.environ[CONTEXT] = item.nodeid
    if running is not None:
        running.switch_context(item.nodeid)
    began = time.monotonic()
    try:
        return (yield)
    finally:
        if running is not None:
            running.switch_context("")
        os.environ[CONTEXT] = ""
        _write(item, time.monotonic() - began)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Take note of a failure, and of a test that was skipped, which proves nothing."""
    report = yield
    if report.outcome != "passed":
        item.stash[_FAILED] = True
    return report


def _write(item: pytest.Item, seconds: float) -> None:
    # Where the project has tiers, quick tests are tried first.
    is_quick: Callable[[Any], bool] = getattr(sys.modules.get("tests.worlds"), "is_quick", lambda _: True)
    line = {
        "id": item.nodeid,
        "seconds": round(seconds, 3),
        "is_quick": is_quick(item),
        "has_passed": not item.stash.get(_FAILED, False),
    }
    with Path(os.environ[RECORD]).open("a") as record:  # short lines, appended by several processes
        record.write(json.dumps(line) + "\n")
