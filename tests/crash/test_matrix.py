"""The crash matrix: at each point of a message's life something goes wrong, and what must be seen is seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from postroom.testing.clients import SqlClient
from postroom.testing.failpoints import POINTS

from ..worlds import proof
from .cases import ALL, Case, Dispatching, why_not
from .matrix import run_case
from .sites import site_of
from .table import CASES


@pytest.fixture(scope="module")
def databases() -> Iterator[dict[str, tuple[SqlClient, str]]]:
    """A prepared database of each server that was asked for; the cases have namespaces of their own."""
    made: dict[str, tuple[SqlClient, str]] = {}
    yield made
    for server, url in made.values():
        server.drop_database(url.rpartition("/")[2])


@pytest.fixture
def url(request: pytest.FixtureRequest, databases: dict[str, tuple[SqlClient, str]], tmp_path: Path) -> str:
    """Where the store of a case is."""
    kind: str = request.param
    if kind == "sqlite":
        made = f"sqlite:///{tmp_path / 'outbox.sqlite3'}"
        site_of(made).prepare()
        return made
    if kind not in databases:
        server: SqlClient = request.getfixturevalue(f"{kind}_server")
        databases[kind] = server, server.create_database(f"matrix_{uuid4().hex}")
        site_of(databases[kind][1]).prepare()
    return databases[kind][1]


def _is_repeated(case: Case, lane: str, store: str) -> bool:
    """Return whether PostgreSQL, or messages with keys, show what the row says of all."""
    is_second = lane == "loose" and "keyed" in getattr(case, "lanes", ())
    return is_second or (store != "postgres" and "postgres" in case.stores)


def _matrix() -> Iterator[object]:
    for case in CASES:
        for store in ALL:
            if reason := why_not(case, store):
                yield pytest.param(
                    case, "both", store, marks=pytest.mark.skip(reason=reason), id=f"{store}-{case.name}"
                )
            if store not in case.stores:
                continue
            # A claim of an SQL store brings messages with keys or without, never both.
            lanes = case.lanes if isinstance(case, Dispatching) else ("both",)
            for lane in lanes:
                make = proof if _is_repeated(case, lane, store) else pytest.param
                yield make(case, lane, store, id=f"{store}-{lane}-{case.name}")


@pytest.mark.requirement(
    "G1",
    "G2",
    "G3",
    "G4",
    "G6",
    "G7",
    "G8",
    "G9",
    "G12",
    "G13",
    "F-14",
    "F-15",
    "F-16",
    "F-17",
    "F-20",
    "S1-01",
    "S1-15",
    "S1-20",
    "S1-21",
    "S1-27",
    "S2-21",
    "S2-33",
    "S2-37",
    "S2-39",
    "S2-40",
    "S2-45",
    "S2-50",
)
@pytest.mark.parametrize(("case", "lane", "url"), list(_matrix()), indirect=["url"])
def test_what_a_crash_leaves_behind_is_what_the_table_says(case: Case, lane: str, url: str, tmp_path: Path) -> None:
    """A case for each row of the table of crashes."""
    run_case(case, url, tmp_path, lane=lane)


def test_every_failpoint_is_in_the_table() -> None:
    """A point at which nothing ever goes wrong would be a promise without a test."""
    assert {arm.point for case in CASES for arm in case.arms} == POINTS
