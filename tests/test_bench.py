"""The benchmarks themselves: what they call wrong, what they write, and that they run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from rich.console import Console
from rich.progress import Progress

from bench.compare import ROWS, Compared, Row, chosen, compared, report, worktree, write
from bench.contender import PAYLOAD, Arrivals, payload
from bench.contenders.postroom_redis import PostroomRedis
from bench.measure import ROOT, Bench, Entry, Race, Result
from bench.meter import processor_time
from bench.redis_backlog import connect
from bench.report import environment, table, write_json, write_picture
from bench.trials.redis import Trial
from bench.workloads import WORKLOADS
from postroom import Message
from postroom.store import Claim, ClaimTerms
from postroom.testing.servers import ValkeyServer

TERMS = ClaimTerms(worker=uuid4())


@pytest.fixture
def valkey_dsn(private_valkey: ValkeyServer) -> str:
    """The address of a server that may be emptied."""
    return private_valkey.dsn


@pytest.mark.parametrize(
    ("numbers", "lost", "doubled", "reordered"),
    [
        ([1, 2, 3, 4], 0, 0, 0),
        ([2, 1, 3, 4], 0, 0, 0),  # of different keys
        ([1, 2, 4], 1, 0, 0),
        ([1, 2, 2, 3, 4], 0, 1, 0),
        ([3, 1, 2, 4], 0, 0, 1),
    ],
)
def test_a_drain_is_judged_by_what_arrived(numbers: list[int], lost: int, doubled: int, reordered: int) -> None:
    arrivals = Arrivals(4, keys=2, payloads=[payload(number) for number in numbers])

    judged = arrivals.judged(1.0)

    assert (judged.lost, judged.doubled, judged.reordered) == (lost, doubled, reordered)


def test_a_payload_is_as_long_as_is_said() -> None:
    assert {len(payload(number)) for number in (1, 99_999, 1_000_000)} == {PAYLOAD}


def test_a_race_that_went_wrong_is_worth_nothing() -> None:
    race = Race(
        seconds={"us": [1.0, 2.0, 4.0], "raw": [2.0, 1.0, 1.0]},
        wrong={"us": {"lost": 0, "doubled": 0}, "raw": {"lost": 0, "doubled": 0}},
    )

    assert race.ratio("us", "raw") == 0.5

    race.wrong["us"]["doubled"] = 1

    assert race.ratio("us", "raw") == 0


def test_every_contender_of_a_store_empties_its_backlog_and_nothing_is_lost() -> None:
    """The smallest race there is, in processes of its own as every measurement."""
    with Progress(disable=True) as progress, Bench(progress, quick=True) as bench:
        bench.rounds = 1
        entries = {"us": Entry("contenders.postroom"), "raw": Entry("contenders.raw_sqlite")}

        race = bench.race(entries, "sqlite", count=200)

    assert race.wrong == {name: {"lost": 0, "doubled": 0, "reordered": 0} for name in entries}
    assert race.ratio("us", "raw") > 0


@pytest.mark.parametrize("stream", [False, True])
def test_both_contenders_of_a_store_in_redis_empty_its_backlog_and_nothing_is_lost(stream: bool) -> None:  # noqa: FBT001
    with Progress(disable=True) as progress, Bench(progress, quick=True) as bench:
        bench.rounds = 1
        options = {"stream": stream}
        entries = {"us": Entry("contenders.postroom_redis", options), "raw": Entry("contenders.raw_redis", options)}

        race = bench.race(entries, "redis", count=700)
        versions = bench.versions()

    assert race.wrong == {name: {"lost": 0, "doubled": 0, "reordered": 0} for name in entries}
    assert race.ratio("us", "raw") > 0
    assert versions["redis"].split()[0] in {"Redis", "Valkey"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_backlog_that_redis_makes_is_the_one_that_would_be_added(stream: bool, valkey_dsn: str) -> None:  # noqa: FBT001
    """Otherwise the figures would be those of other messages."""
    subject = PostroomRedis(valkey_dsn, stream=stream)
    await subject.fill(3, 0)
    store = subject.store()
    made = await store.claim(10, TERMS)

    await subject.fill(0, 0)
    async with connect(valkey_dsn) as client:
        for number in (1, 2, 3):
            await store.outbox().add(client, Message(topic="orders", payload=payload(number)))
    added = await store.claim(10, TERMS)
    await store.close()

    assert [claim.message.payload for claim in made] == [payload(number) for number in (1, 2, 3)]
    assert [_without_id(claim) for claim in made] == [_without_id(claim) for claim in added]
    assert len({claim.message.id for claim in made}) == 3


def _without_id(claim: Claim) -> tuple[object, ...]:
    return replace(claim.message, id=UUID(int=0)), claim.suspect, claim.broken


async def test_what_is_measured_in_redis_can_be_measured(valkey_dsn: str) -> None:
    trial = Trial(valkey_dsn)

    assert all(ratio > 0 for ratio in await trial.add(batches=3, singles=3))
    assert await trial.room(2000) > 0
    assert all(median > 0 for median in await trial.medians(valkey_dsn, count=3))


@pytest.mark.requirement("G7")
def test_a_consumer_and_the_loop_by_hand_do_the_same_work_and_nothing_is_lost() -> None:
    """Both leave one effect and one output of each message, or the figure would compare different things."""
    with Progress(disable=True) as progress, Bench(progress, quick=True) as bench:
        dsn = bench.database("postgres")
        bench.call("trials.consuming", dsn, "prepare")

        drained = {name: bench.call("trials.consuming", dsn, name, count=50) for name in ("consumer", "by_hand")}

    assert {name: (one["lost"], one["doubled"]) for name, one in drained.items()} == {
        "consumer": (0, 0),
        "by_hand": (0, 0),
    }


def test_routing_is_measured_against_the_least_that_can_be_done() -> None:
    with Progress(disable=True) as progress, Bench(progress, quick=True) as bench:
        times = bench.call("trials.routing", "", "ratio", count=1000)

    assert times["ours"] > 0
    assert times["bare"] > 0


def test_results_are_written_for_machines_and_for_the_eye(tmp_path: Path) -> None:
    results = [
        Result(name="a.b", value=0.8, goal=0.7, better="higher", detail="x < y & z"),
        Result(name="c", value=2.0, goal=1.5, better="lower", detail=""),
    ]

    write_json(results, environment(quick=True, servers={"postgres": "18"}), tmp_path / "latest.json")
    write_picture(results, tmp_path / "picture.svg")

    written = json.loads((tmp_path / "latest.json").read_text())
    assert written["results"][0] == {
        "name": "a.b",
        "value": 0.8,
        "goal": 0.7,
        "better": "higher",
        "detail": "x < y & z",
    }
    assert written["environment"]["servers"] == {"postgres": "18"}
    assert [result.is_met for result in results] == [True, False]
    assert (tmp_path / "picture.svg").read_text().count("<rect") == 3


@pytest.mark.parametrize(
    ("this", "ratio", "is_slower"),
    [
        ([10.0, 10.0, 99.0], 1.0, False),  # one disturbed round changes nothing
        ([10.5, 10.5, 10.5], 1.05, False),
        ([10.6, 10.6, 10.6], 1.06, True),
    ],
)
def test_a_tree_is_slower_if_its_median_is_more_than_a_twentieth_above_that_of_the_base(
    this: list[float],
    ratio: float,
    is_slower: bool,  # noqa: FBT001
) -> None:
    result = Compared("postgres.drain", [9.0, 10.0, 30.0], this)

    assert result.ratio == pytest.approx(ratio)
    assert result.is_slower is is_slower


def test_a_comparison_is_shown_with_its_spread_and_written_for_machines(tmp_path: Path) -> None:
    results = [
        Compared("postgres.drain", [40.0, 50.0, 60.0], [44.0, 45.0, 72.0]),
        Compared("redis.add", [10.0, 10.0, 10.0], [12.0, 12.0, 12.0]),
    ]
    console = Console(width=200, record=True, file=StringIO())

    console.print(report(results, "0123456789abcdef"))
    write(results, "0123456789abcdef", tmp_path / "compared.json", quick=False)

    shown, written = console.export_text(), json.loads((tmp_path / "compared.json").read_text())
    drain, add = (line for line in shown.splitlines() if "to" in line and "µs" not in line)
    assert "50.0 (40.0 to 60.0)" in drain
    assert "0.900 to 1.200" in drain
    assert "not slower" in drain
    assert " slower" in add
    assert "not slower" not in add
    assert written["base"] == "0123456789abcdef"
    assert [(row["name"], row["is_slower"]) for row in written["rows"]] == [
        ("postgres.drain", False),
        ("redis.add", True),
    ]


def test_rows_are_chosen_by_the_beginnings_of_their_names() -> None:
    assert chosen("") == list(ROWS)
    assert {row.name for row in chosen("postgres.drain, redis.add")} == {
        "postgres.drain",
        "postgres.drain_kept",
        "postgres.drain_ordered",
        "redis.add",
        "redis.add_many",
    }
    assert chosen("nothing") == []


def test_only_the_last_call_of_a_round_is_measured() -> None:
    (drain,), (consume,) = chosen("postgres.drain_ordered"), chosen("consume")

    assert list(drain.calls(40, first=True).items()) == [
        ("prepare", {}),
        ("fill", {"count": 40, "keys": 500}),
        ("drain", {"count": 40, "keys": 500}),
    ]
    assert list(consume.calls(40, first=False).items()) == [("consumer", {"count": 40})]


def test_the_processor_time_of_a_process_includes_its_descendants_and_those_that_have_ended() -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass\n"
    program = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {busy!r}])
child = subprocess.Popen([sys.executable, "-c", {busy!r} + "print('done', flush=True); input()"], stdin=subprocess.PIPE)
input()
child.communicate(b"\\n")
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "done\n"
        time = processor_time(process.pid)
        process.stdin.write("\n")

    assert time >= 0.95  # the kernel counts in hundredths of a second
    assert processor_time(0) == 0


@pytest.mark.prove
@pytest.mark.parametrize("name", ["sqlite.drain", "postgres.add", "redis.add", "consume.postgres"])
def test_a_tree_is_compared_with_a_worktree_of_a_commit(name: str) -> None:
    (row,) = (replace(row, count=40) for row in ROWS if row.name == name)
    with (
        worktree("HEAD") as tree,
        Progress(disable=True) as progress,
        Bench(progress, quick=False) as bench,
    ):
        assert (tree / "src" / "postroom").is_dir()
        result = compared(bench, row, {"base": tree, "this": ROOT}, rounds=2)

    assert result.name == name
    assert len(result.base) == len(result.this) == 2
    assert all(value > 0 for value in (*result.base, *result.this))
    assert not tree.exists()


@pytest.mark.prove
def test_a_side_that_would_measure_another_tree_is_refused(tmp_path: Path) -> None:
    """A base without a package of that name would otherwise be this tree, and never slower."""
    row = Row(name="sqlite.drain", kind="sqlite", contender="contenders.postroom", call="drain", count=20)
    with Progress(disable=True) as progress, Bench(progress, quick=False) as bench, worktree("HEAD") as tree:
        (tree / "src" / "postroom").rename(tmp_path / "postroom")

        with pytest.raises(RuntimeError, match="which is not in"):
            compared(bench, row, {"base": tree, "this": ROOT}, rounds=1)


def test_the_published_figures_are_those_of_the_last_whole_run() -> None:
    root = Path(__file__).parents[1]
    published = json.loads((root / "bench" / "latest.json").read_text())
    results = [Result(**result) for result in published["results"]]

    if not published["environment"]["quick"]:  # a quick run of one's own publishes nothing
        assert table(results) in (root / "docs" / "benchmarks.md").read_text()
    for prefix in WORKLOADS:
        assert any(result.name.startswith(prefix) for result in results), prefix
