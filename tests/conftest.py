"""What every test run needs, whichever of its tests are run."""

from __future__ import annotations

import coverage
import pytest


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Write down what was covered, before xdist waits for this worker to end.

    It waits for ten seconds and kills. A worker that has thousands of tests to clear up after may need longer,
    and without this its whole share of the coverage is gone.
    """
    if (running := coverage.Coverage.current()) is not None:
        running.save()
