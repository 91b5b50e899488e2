"""The benchmarks themselves: what they call wrong, what they write, and that they run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.progress import Progress

from bench.contender import PAYLOAD, Arrivals, payload
from bench.measure import Bench, Entry, Race, Result
from bench.report import environment, table, write_json, write_picture
from bench.workloads import WORKLOADS


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


def test_a_consumer_and_the_loop_by_hand_do_the_same_work_and_nothing_is_lost() -> None:
    """G7: both leave one effect and one output of each message, or the figure would compare different things."""
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

    assert times["ours"] > times["bare"] > 0


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


def test_the_published_figures_are_those_of_the_last_whole_run() -> None:
    root = Path(__file__).parents[1]
    published = json.loads((root / "bench" / "latest.json").read_text())
    results = [Result(**result) for result in published["results"]]

    if not published["environment"]["quick"]:  # a quick run of one's own publishes nothing
        assert table(results) in (root / "docs" / "benchmarks.md").read_text()
    for prefix in WORKLOADS:
        assert any(result.name.startswith(prefix) for result in results), prefix
