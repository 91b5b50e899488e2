"""Which tests run in which tier: `tests/worlds.py` decides, `--tier` chooses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .worlds import PROOFS

# Each of them collects tests several times, in processes of their own.
pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent
SAMPLE = ("tests/contracts/test_stores.py", "tests/crash/test_matrix.py", "tests/redis60/test_contract.py")
#: What is marked as a proof where it is written, and has parameters.
MARKED = (
    "tests/contracts/test_bounds.py::",
    "tests/contracts/test_stores.py::TestPostgresStoreBehindPgBouncerOverPsycopg::",
    "tests/isolation/test_scenario.py::test_healthy_messages_pass_what_is_down",
    "tests/test_bench.py::test_a_tree_is_compared_with_a_worktree_of_a_commit",
    "tests/test_releases.py::test_workers_of_earlier_commits_run_and_restart_beside_new_ones",
    "tests/test_variants.py::test_chaos_catches",
    "tests/test_variants.py::test_the_sound_library_keeps_the_contract",
)
PROOF = "tests/redis60/test_contract.py::TestRedisStore"


def collected(*arguments: str) -> set[str]:
    """Return the ids of the tests that a run would run."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:randomly", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return {line for line in listed.stdout.splitlines() if "::" in line}


def test_each_tier_holds_more_than_the_one_before() -> None:
    quick, default, test, prove = (
        collected(*options, *SAMPLE) for options in (["--tier=quick"], [], ["--tier=test"], ["--tier=prove"])
    )

    assert quick < test < prove
    assert default == test
    assert collected("-m", "prove", *SAMPLE) == prove - test


def test_a_test_that_is_named_runs_in_every_tier() -> None:
    assert collected(PROOF) == collected("--tier=prove", PROOF) != set()
    assert collected(PROOF.partition("::")[0]) == set()


def test_the_quick_tier_has_every_store_that_needs_no_server_and_the_contract_on_asyncpg() -> None:
    found = {name.split("::")[1] for name in collected("--tier=quick", SAMPLE[0])}

    assert found == {"TestMemoryStore", "TestSQLiteStore", "TestPostgresStoreOverAsyncpg"}


def test_what_is_left_to_the_slowest_tier_by_a_parameter_is_tested_with_another_one() -> None:
    """A promise that no test of `make test` holds needs a mark at its test, which a review sees."""
    test, prove = (collected(f"--tier={tier}", "tests") for tier in ("test", "prove"))
    left = {name.partition("[")[0] for name in prove - test if "[" in name and not name.startswith(PROOFS)}

    alone = left - {name.partition("[")[0] for name in test}

    assert {name for name in alone if not name.startswith(MARKED)} == set()
    assert [place for place in MARKED if not any(name.startswith(place) for name in alone)] == []
