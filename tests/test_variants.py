"""The instruments can fail: each deliberately broken variant is caught by the one that is meant for it.

And by nothing but the variant: the same instrument, with the same settings, passes on the sound library.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from uuid import uuid4

import pytest

from chaos.run import Options, run
from chaos.variants import VARIANTS
from postroom.testing.clients import PostgresClient

from .crash import matrix
from .crash.cases import Receiving
from .crash.sites import site_of
from .crash.table import CASES

ROOT: Final = Path(__file__).parents[1]
#: A pytest that breaks the library before it collects anything.
PYTEST: Final = """
import importlib, pytest, sys
class Breaking:
    def pytest_configure(self, config):
        if sys.argv[1]:
            importlib.import_module("chaos.variants").apply(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:], plugins=[Breaking()]))
"""
#: Both policies about dead messages are sound; this seed lets them be passed over.
SEED: Final = 2
SECONDS: Final = 3.0
#: How many seconds a pytest may take that runs many tests, on a machine that is busy with others.
PATIENCE: Final = 300


#: Which stores of the contract are on which database.
DATABASES: Final[Mapping[str, str]] = {
    "SQLiteStore": "sqlite",
    "PostgresStoreOverAsyncpg": "postgres",
    "RedisStore": "redis",
    "RedisStreamStore": "redis-stream",
}


@dataclass(frozen=True)
class Contract:
    """A test of the shipped contract suite, on a store of ours."""

    test: str
    store: str = "SQLiteStore"

    @property
    def database(self) -> str:
        return DATABASES[self.store]

    @property
    def path(self) -> str:
        return f"tests/contracts/test_stores.py::Test{self.store}::test_{self.test}"


@dataclass(frozen=True)
class Scripted:
    """A test of one thing on a real database, mostly of `tests/chaos/test_receiving.py`."""

    test: str
    database: str = "postgres"
    file: str = "tests/chaos/test_receiving.py"

    @property
    def path(self) -> str:
        return f"{self.file}::test_{self.test}"


@dataclass(frozen=True)
class Crash:
    """A case of the crash matrix on PostgreSQL."""

    case: str
    #: What it says when it fails.
    says: str
    lane: str = "loose"
    database: str = "postgres"


@dataclass(frozen=True)
class Chaos:
    """A short run of chaos on SQLite, and the check that fails."""

    check: str
    database: str = "sqlite"


Instrument: TypeAlias = Contract | Scripted | Crash | Chaos


def in_redis(test: str) -> Scripted:
    """A test of the receiving half in Redis."""
    return Scripted(test, "redis", "tests/chaos/test_receiving_in_redis.py")


def checked_in(store: str, test: str) -> Scripted:
    """A test in which the checker looks at what the log of a Redis server says."""
    return Scripted(f"{test}[{store}]", store, "tests/chaos/test_audit_in_redis.py")


CAUGHT: Final[Mapping[str, Instrument]] = {
    "no_token": Contract("a_claim_that_was_taken_over_cannot_be_settled", "PostgresStoreOverAsyncpg"),
    "worker_instead_of_token": Contract("a_claim_that_was_taken_over_cannot_be_settled"),
    "extend_without_token": Contract("a_lost_claim_cannot_be_extended"),
    "select_instead_of_claim": Contract("a_claim_counts_the_attempt_raises_the_token_and_is_durable"),
    "no_head_of_key": Chaos("C6"),
    "claim_ignores_leases": Chaos("C4"),
    "lease_never_expires": Contract("a_leased_message_is_not_claimed_until_its_lease_runs_out"),
    "missing_sweep": Contract("the_sweep_buries_a_message_whose_last_lease_ran_out"),
    "settle_before_publish": Crash("3.5 claim -> publish: kill at publish.before", "the fault left"),
    "timeout_is_success": Crash("3.5 publish sent, no confirm: wait at publish.before", "received too seldom"),
    "timeout_is_failure": Crash("3.5 publish sent, no confirm: wait at publish.before", "the final state did not"),
    "attempts_spent_in_an_outage": Crash("3.5 broker down: fail BrokerUnavailableError", "the final state did not"),
    "release_counts_as_attempt": Contract("a_released_message_gets_its_attempt_back"),
    "retry_ignores_backoff": Contract("a_failed_message_waits_for_its_delay_and_keeps_its_error"),
    "dead_on_first_failure": Contract("a_failed_message_waits_for_its_delay_and_keeps_its_error"),
    "key_dropped_by_retry": Contract("a_failing_head_holds_back_its_own_key_only"),
    "purge_deletes_undelivered": Contract("the_purge_never_deletes_what_was_not_delivered"),
    "add_outside_the_transaction": Crash(
        "3.1 c-e: fail RuntimeError at add.after 2", "business rows and messages differ", "both"
    ),
    "blind_undo": Crash("3.1 g, reply lost: lose COMMIT at commit.before", "business rows and messages differ", "both"),
    "dedupe_ignored": Contract("a_duplicate_is_told_and_named_and_not_stored"),
    "ack_before_commit": Chaos("C8"),
    "duplicate_not_recognised": Chaos("C7"),
    "plain_insert_inbox": Scripted("a_duplicate_is_acknowledged_and_has_no_effect"),
    "inbox_outside_the_transaction": Scripted("a_message_whose_handler_failed_is_handled_when_it_comes_again"),
    "mark_with_begin_not_looked_at": Scripted("a_duplicate_is_acknowledged_and_has_no_effect"),
    "swallowed_error_is_acked": Scripted("a_message_whose_handler_swallowed_an_error_is_not_acknowledged"),
    "consumer_name_shared": Scripted("two_consumers_of_a_message_each_have_its_effect", "sqlite"),
    "unknown_commit_is_acked": Scripted("a_message_whose_commit_got_no_answer_is_not_acknowledged"),
    "outage_costs_a_delivery": Scripted("a_message_that_the_database_was_away_for_has_lost_no_attempt"),
    "optimistic_without_the_final_check": Scripted(
        "two_deliveries_at_once_have_one_effect_where_a_message_is_marked_last"
    ),
    "dead_letter_acked_before_it_is_stored": Scripted(
        "a_message_that_is_put_aside_is_acknowledged_when_the_letter_is_there", "sqlite"
    ),
    "setnx_inbox": in_redis("a_message_whose_consumer_died_is_handled_when_it_comes_again"),
    "busy_is_acked": in_redis("a_message_that_somebody_else_is_handling_is_given_back"),
    "commit_ignores_the_mark": in_redis("who_was_away_for_too_long_has_no_effect"),
    "commit_forgets_the_mark": in_redis("a_duplicate_in_redis_is_acknowledged_and_has_no_effect"),
    "commit_does_not_look_first": in_redis("a_commit_that_cannot_be_applied_as_a_whole_has_no_effect"),
    "drop_takes_any_mark": in_redis("who_fails_too_late_leaves_the_mark_of_another_alone"),
    "redis_settles_without_token": Contract("a_claim_that_was_taken_over_cannot_be_settled", "RedisStore"),
    "redis_reads_instead_of_claiming": Contract(
        "a_claim_counts_the_attempt_raises_the_token_and_is_durable", "RedisStore"
    ),
    "redis_ignores_leases": checked_in("redis", "a_message_has_one_claim_at_a_time"),
    "redis_adds_outside_the_pipeline": Contract("a_rolled_back_message_leaves_nothing", "RedisStore"),
    "stream_settles_without_token": Contract("a_claim_that_was_taken_over_cannot_be_settled", "RedisStreamStore"),
    "stream_ignores_leases": checked_in("redis-stream", "a_message_has_one_claim_at_a_time"),
    "stream_acks_before_publish": checked_in("redis-stream", "what_was_only_claimed_is_not_marked_as_delivered"),
    "stream_group_at_the_end": Scripted(
        "opening_makes_the_stream_and_the_group_from_the_first_entry_on", "redis-stream", "tests/test_redis_stream.py"
    ),
}


def test_every_variant_has_an_instrument() -> None:
    """A variant that nothing is meant to catch would only look like a proof."""
    assert CAUGHT.keys() == VARIANTS.keys()
    assert len(VARIANTS) >= 20
    assert all(CAUGHT[name].database in variant.stores for name, variant in VARIANTS.items())


def names(kind: type[Instrument]) -> list[str]:
    return [name for name, instrument in CAUGHT.items() if isinstance(instrument, kind)]


# -- the contract ----------------------------------------------------------------------------------------------------


def contract(variant: str, tests: Sequence[Contract | Scripted], dsn: str) -> subprocess.CompletedProcess[str]:
    paths = sorted({test.path for test in tests})
    # Of the servers that speak like Redis one is enough.
    quick = [
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-q",
        "-k",
        "not (redis_url or cluster_url)",
    ]
    return subprocess.run(
        [sys.executable, "-c", PYTEST, variant, *quick, *paths],
        cwd=ROOT,
        env={**os.environ, "POSTROOM_TEST_POSTGRES_DSN": dsn, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


@pytest.mark.requirement("G13")
@pytest.mark.prove
@pytest.mark.timeout(PATIENCE + 20)
@pytest.mark.parametrize("kind", ["tables", "redis"])
def test_the_sound_library_keeps_the_contract(kind: str, postgres_server: PostgresClient) -> None:
    """What catches variants below passes here."""
    every = [instrument for instrument in CAUGHT.values() if isinstance(instrument, Contract | Scripted)]
    tests = [one for one in every if one.database.startswith("redis") == (kind == "redis")]
    done = contract("", tests, postgres_server.dsn)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed(, \d+ deselected)? in", done.stdout, flags=re.MULTILINE)


@pytest.mark.requirement("G13")
@pytest.mark.parametrize("name", names(Contract))
def test_the_contract_catches(name: str, postgres_server: PostgresClient) -> None:
    """A broken store fails the one test that is meant for it, by an assertion of that test."""
    instrument = CAUGHT[name]
    assert isinstance(instrument, Contract)

    done = contract(name, [instrument], postgres_server.dsn)

    assert done.returncode == 1, done.stdout
    assert f"FAILED {instrument.path}" in done.stdout
    assert re.search(r"contracts/\w+\.py:\d+: (Assertion|Value)Error", done.stdout), done.stdout
    assert " error" not in done.stdout.splitlines()[-1]


@pytest.mark.requirement("G7", "G8")
@pytest.mark.parametrize("name", names(Scripted))
def test_a_script_catches(name: str, postgres_server: PostgresClient) -> None:
    """A broken consumer fails the one test that is meant for it, by an assertion of that test."""
    instrument = CAUGHT[name]
    assert isinstance(instrument, Scripted)

    done = contract(name, [instrument], postgres_server.dsn)

    assert done.returncode == 1, done.stdout
    assert f"FAILED {instrument.path}" in done.stdout
    assert re.search(rf"{re.escape(instrument.file)}:\d+: AssertionError", done.stdout), done.stdout
    assert " error" not in done.stdout.splitlines()[-1]


# -- the crash matrix ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def database(postgres_server: PostgresClient) -> Iterator[str]:
    name = f"variants_{uuid4().hex}"
    url = postgres_server.create_database(name)
    try:
        site_of(url).prepare()
        yield url
    finally:
        postgres_server.drop_database(name)


@pytest.mark.requirement("G13")
@pytest.mark.parametrize("name", names(Crash))
def test_the_crash_matrix_catches(name: str, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case passes on the sound library, and says of the broken one what is wrong."""
    instrument = CAUGHT[name]
    assert isinstance(instrument, Crash)
    monkeypatch.setattr(matrix, "PATIENCE", 5.0)  # a variant that never comes right is waited for as long as that
    sending = [one for one in CASES if not isinstance(one, Receiving) and "one by one" not in one.name]
    [case] = [one for one in sending if one.name.startswith(instrument.case)]
    for folder in ("sound", "broken"):
        (tmp_path / folder).mkdir()

    matrix.run_case(case, database, tmp_path / "sound", lane=instrument.lane)
    with pytest.raises(AssertionError, match=instrument.says):
        matrix.run_case(case, database, tmp_path / "broken", lane=instrument.lane, variant=name)


# -- chaos -----------------------------------------------------------------------------------------------------------


async def chaos(folder: Path, variant: str | None) -> set[str]:
    """Return the checks that fail."""
    options = Options(store="sqlite", seconds=SECONDS, seed=SEED, folder=str(folder), variant=variant)
    verdict = await run(options)
    return {violation.check for violation in verdict.violations}


@pytest.mark.requirement("G13")
@pytest.mark.prove
@pytest.mark.timeout(900)
async def test_the_sound_library_survives_chaos(tmp_path: Path) -> None:
    """What catches variants below passes here."""
    assert await chaos(tmp_path, None) == set()


@pytest.mark.requirement("G13")
@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", names(Chaos))
async def test_chaos_catches(name: str, tmp_path: Path) -> None:
    """The check that is meant for it says what is wrong."""
    instrument = CAUGHT[name]
    assert isinstance(instrument, Chaos)

    assert instrument.check in await chaos(tmp_path, name)
