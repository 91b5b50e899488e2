"""`scripts/mutate`: what it changes, which tests it runs, and what it says of survivors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from scripts.mutation.__main__ import PACKAGE
from scripts.mutation.coverage_map import ROOT, CoverageMap, CoveringTest, Measuring, load
from scripts.mutation.equivalent import equivalents
from scripts.mutation.fixed import StaleError, fixed
from scripts.mutation.generator import choose, every_mutant, is_valid
from scripts.mutation.judging import Baselines, judge, judge_fixed
from scripts.mutation.lua import lua_mutants_of
from scripts.mutation.mutant import Mutant, mutant
from scripts.mutation.operators import mutants_of
from scripts.mutation.report import summary
from scripts.mutation.runner import StoppedError, copied
from scripts.mutation.selection import covering_tests, passes

PROMISES = {*(f"G{number}" for number in range(1, 14)), "use"}


def changes(source: str) -> set[tuple[str, str, str]]:
    """Return kind and changed line of every mutant of a module."""
    text = dedent(source)
    return {(one.operator, one.before, one.after) for one in mutants_of("m.py", text) if is_valid(one, text)}


# -- operators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {("comparison", "x = a < b", "x = a <= b")}),
        ("x = a is not b", {("comparison", "x = a is not b", "x = a is b")}),
        ("x = (a) in (b)", {("comparison", "x = (a) in (b)", "x = (a) not in (b)")}),
        ("x = a or b", {("connective", "x = a or b", "x = a and b")}),
        ("x = not a", {("condition", "x = not a", "x = (a)")}),
        ("x = é if a() else b", {("condition", "x = é if a() else b", "x = é if not (a()) else b")}),
        ("x = 3", {("constant", "x = 3", "x = 4")}),
        ("x = 1000", {("constant", "x = 1000", "x = 0")}),
        ("x = 0.25", {("constant", "x = 0.25", "x = 25.0")}),
        ("x = 0.0", {("constant", "x = 0.0", "x = 1.0")}),
        ("x = timedelta(0)", {("constant", "x = timedelta(0)", "x = timedelta(1)")}),
        ("x = True", {("constant", "x = True", "x = False")}),
        ("f(x)", {("statement", "f(x)", "pass")}),
        ("a.b = c", {("statement", "a.b = c", "pass")}),
        ("x = timedelta(days=7)", {("constant", "x = timedelta(days=7)", "x = timedelta(days=700)")}),
    ],
)
def test_each_operator_changes_one_thing(source: str, expected: set[tuple[str, str, str]]) -> None:
    assert changes(source) == expected


def test_statements_awaits_and_results_of_a_function_are_dropped() -> None:
    found = changes("""
        async def f(mode="fast"):
            await g()
            raise ValueError(7)
            return h()
        """)

    assert found == {
        ("default", 'async def f(mode="fast"):', "async def f(mode='fastx'):"),
        ("await", "await g()", "g()"),
        ("statement", "await g()", "pass"),
        ("statement", "raise ValueError(7)", "pass"),
        ("return", "return h()", "return None"),
    }


def test_clauses_of_sql_are_emptied() -> None:
    found = changes('''
        TEXT = """
            SELECT id FROM t
            WHERE a = :a AND b = :b
            ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
            """
        ''')

    assert {(before, after) for operator, before, after in found if operator == "sql"} == {
        ("WHERE a = :a AND b = :b", "WHERE a = :a"),
        ("ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED", "LIMIT 1 FOR UPDATE SKIP LOCKED"),
        ("ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED", "ORDER BY id LIMIT 1"),
        ("ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED", "ORDER BY id LIMIT 1 FOR UPDATE"),
    }


def test_what_no_behaviour_hangs_on_is_left_alone() -> None:
    found = changes('''
        """The module has 2 lines < 3."""
        from typing import TYPE_CHECKING, Literal, Protocol

        __all__ = ["a" "b"]
        if TYPE_CHECKING:
            x = 1


        class Port(Protocol):
            limit: int = 3


        def f(n: Literal[1]) -> Literal[2]:
            """Return 2 < 3."""
            ...


        def g():
            raise ValueError(f"must be < {3 + 4}", 5)


        class Value:
            a: int = field(repr=False)

            def __repr__(self):
                return str(1)
        ''')

    assert found == {
        ("statement", 'raise ValueError(f"must be < {3 + 4}", 5)', "pass"),
    }


def test_scripts_of_redis_are_changed_line_by_line() -> None:
    source = "local function f(id)\n  if a == b then -- x == y\n    redis.call('DEL', id)\n  end\nend\n"

    found = {(one.place, one.operator, one.before, one.after) for one in lua_mutants_of("s.lua", source)}

    assert found == {
        ("f", "comparison", "if a == b then -- x == y", "if a ~= b then -- x == y"),
        ("f", "statement", "redis.call('DEL', id)", ""),
    }


# -- generator ----------------------------------------------------------------------------------------------------


def test_the_generator_reaches_every_module_of_the_package() -> None:
    mutants = list(every_mutant(ROOT, PACKAGE))

    paths = {one.path for one in mutants}
    assert {one.operator for one in mutants} == {
        *("await", "comparison", "condition", "connective", "constant", "default", "return", "sql", "statement"),
    }
    assert {"src/postroom/dispatcher.py", "src/postroom/stores/redis/lua/claim.lua"} <= paths
    assert not [path for path in paths if path.startswith(("src/postroom/testing/", "src/postroom/cli/demo"))]


def test_a_seed_chooses_the_same_mutants_when_other_lines_have_moved(tmp_path: Path) -> None:
    source = "".join(f"a{n} = {n} < b\n" for n in range(50))
    (tmp_path / "m.py").write_text(source)

    chosen = choose(mutants_of("m.py", source), tmp_path, seed=7, count=10)
    (tmp_path / "m.py").write_text("import os\n\n" + source)
    again = choose(mutants_of("m.py", "import os\n\n" + source), tmp_path, seed=7, count=10)
    other = choose(mutants_of("m.py", source), tmp_path, seed=8, count=10)

    assert [one.identity for one in chosen] == [one.identity for one in again]
    assert [one.identity for one in chosen] != [one.identity for one in other]
    assert len(chosen) == 10


# -- which tests --------------------------------------------------------------------------------------------------

MODULE = """\
LIMIT = 5
DOUBLE = LIMIT * 2


def add(a, b=1):
    if a > DOUBLE:
        return 0
    return a + b


def unused():
    return None
"""


def at(line: int) -> Mutant:
    start = sum(map(len, MODULE.splitlines(keepends=True)[: line - 1]))
    return mutant("src/m.py", "", "constant", MODULE, (start, start, ""))


def covering(name: str, *lines: int, seconds: float = 1.0, is_quick: bool = True) -> CoveringTest:
    return CoveringTest(f"tests/test_{name}.py::test_{name}", seconds, is_quick, {"src/m.py": list(lines)})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (7, {"large"}),
        (8, {"small"}),
        (6, {"large", "small"}),
        pytest.param(5, {"large", "small"}, id="a default is that of its function"),
        pytest.param(1, {"large", "small"}, id="a constant is that of the functions that use it"),
    ],
)
def test_tests_that_run_a_line_are_chosen(tmp_path: Path, line: int, expected: set[str]) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/m.py").write_text(MODULE)
    tests = covering("large", 6, 7), covering("small", 6, 8), covering("other", 12)
    found = CoverageMap({test.id: test for test in tests}, {"src/m.py": MODULE})

    chosen = covering_tests(found, at(line), tmp_path)

    assert {test.id.partition("::test_")[2] for test in chosen} == expected


def test_fast_tests_run_first_and_snapshots_last(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/m.py").write_text(MODULE)
    tests = [
        covering("sql_snapshots", 8, seconds=0.1),
        covering("slow", 8, seconds=20),
        covering("server", 8, seconds=0.5, is_quick=False),
        covering("m", 8, seconds=5),
        covering("fast", 8, seconds=0.5),
        covering("slower", 8, seconds=29),
        covering("slowest", 8, seconds=1000),
    ]
    found = CoverageMap({test.id: test for test in tests}, {"src/m.py": MODULE})

    in_turn = [
        (part.name, [test.id.partition("::test_")[2] for test in part.tests]) for part in passes(found, at(8), tmp_path)
    ]

    assert in_turn == [
        ("fastest", ["m", "fast", "slow"]),
        ("others", ["slower", "server"]),
        ("snapshots", ["sql_snapshots"]),
    ]


def test_lines_are_found_again_in_sources_that_have_changed() -> None:
    test = covering("small", 6, 8)
    found = CoverageMap({test.id: test}, {"src/m.py": MODULE})

    found.move_to({"src/m.py": "import os\n\n" + MODULE})

    assert found.tests[test.id].lines == {"src/m.py": [8, 10]}


# -- a project of its own -----------------------------------------------------------------------------------------

PROJECT: Mapping[str, str] = {
    "pyproject.toml": '[tool.pytest.ini_options]\ntestpaths = ["tests"]\n',
    "src/shop/__init__.py": "",
    "src/shop/prices.py": """\
        RATE = 2


        def price(count):
            if count > 100:
                return count
            return count * RATE


        def wait(flag):
            while not flag:
                pass
        """,
    "tests/test_prices.py": """\
        from shop.prices import price, wait


        def test_price():
            assert price(3) == 6


        def test_wait():
            wait(True)
        """,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(dedent(text))
    return root


def of_project(root: Path, operator: str, before: str) -> Mutant:
    mutants = every_mutant(root, "src/shop")
    [found] = [one for one in mutants if (one.operator, one.before) == (operator, before)]
    return found


def test_a_map_is_made_by_running_the_tests_and_kept(project: Path, tmp_path: Path) -> None:
    measuring = Measuring(project, "src/shop", tmp_path / "map.json")

    made = load(measuring)
    with (project / "tests/test_prices.py").open("a") as file:
        file.write("\n\ndef test_more():\n    assert price(200) == 200\n")
    (project / "src/shop/prices.py").write_text("# moved\n" + (project / "src/shop/prices.py").read_text())
    again = load(measuring)

    assert lines_by_test(made) == {"test_price": [5, 7], "test_wait": [11]}
    assert lines_by_test(again) == {"test_price": [6, 8], "test_wait": [12], "test_more": [6, 7]}
    assert load(measuring) == again


def lines_by_test(found: CoverageMap) -> dict[str, list[int]]:
    return {name.partition("::")[2]: test.lines["src/shop/prices.py"] for name, test in found.tests.items()}


def test_a_mutant_that_a_test_notices_is_killed_and_another_is_shown_with_its_diff(project: Path) -> None:
    found = CoverageMap(sources={"src/shop/prices.py": (project / "src/shop/prices.py").read_text()})
    for name, lines in (("price", [5, 7]), ("wait", [11])):
        test = CoveringTest(
            f"tests/test_prices.py::test_{name}", 0.1, is_quick=True, lines={"src/shop/prices.py": lines}
        )
        found.tests[test.id] = test
    noticed = of_project(project, "return", "return count * RATE")
    survivor = of_project(project, "comparison", "if count > 100:")
    untested = of_project(project, "return", "return count")

    with copied(project) as copy:
        verdicts = [judge(copy, one, found, {}) for one in (noticed, survivor, untested)]
        listed = judge(copy, survivor, found, {survivor.identity: "nobody buys so many"})

    # Where no test runs a line, those of its function are tried.
    assert [verdict.fate for verdict in verdicts] == ["killed", "survived", "survived"]
    assert (listed.fate, listed.note) == ("equivalent", "nobody buys so many")
    said = summary(verdicts, found.sources)
    assert "-    if count > 100:\n+    if count >= 100:" in said
    assert "tests that ran:\n  tests/test_prices.py::test_price" in said
    assert "3 mutants: 1 killed (0 by snapshots alone), 0 equivalent, 2 survived" in said
    assert (project / "src/shop/prices.py").read_text() == dedent(PROJECT["src/shop/prices.py"])


def test_a_mutant_that_hangs_is_ended_and_killed(project: Path) -> None:
    endless = of_project(project, "condition", "while not flag:")

    with copied(project) as copy, copy.changed(endless):
        ran = copy.run(["tests/test_prices.py::test_wait"], timeout=10)

    assert ran.result == "timed out"


def test_a_test_that_is_no_longer_there_has_noticed_nothing(project: Path) -> None:
    survivor = of_project(project, "comparison", "if count > 100:")
    lines = {"src/shop/prices.py": [5]}
    names = "tests/test_prices.py::test_gone", "tests/test_prices.py::test_price"
    found = CoverageMap({name: CoveringTest(name, 0.1, is_quick=True, lines=lines) for name in names})

    with copied(project) as copy:
        verdict = judge(copy, survivor, found, {})

    assert verdict.fate == "survived"


def test_a_copy_that_was_stopped_runs_nothing_more(project: Path) -> None:
    with copied(project) as copy:
        copy.stop()
        with pytest.raises(StoppedError):
            copy.run(["tests/test_prices.py"], timeout=10)

    assert not copy.root.exists()


# -- the lists ----------------------------------------------------------------------------------------------------

ENTRY = """
    [[mutant]]
    name = "prices are halved"
    promise = "G1"
    path = "src/shop/prices.py"
    old = "RATE = 2"
    new = "RATE = 1"
    tests = [{tests}]
    """


@pytest.mark.parametrize(
    ("tests", "fate"),
    [
        ("tests/test_prices.py::test_price", "killed"),
        ("tests/test_prices.py::test_wait", "survived"),
        pytest.param("tests/test_prices.py::test_none", "unproven", id="a test that is missing proves nothing"),
    ],
)
def test_an_entry_of_the_fixed_list_runs_the_tests_that_it_names(
    project: Path, tmp_path: Path, tests: str, fate: str
) -> None:
    (tmp_path / "fixed.toml").write_text(dedent(ENTRY).format(tests=f'"{tests}"'))

    [entry] = fixed(project, tmp_path / "fixed.toml")
    with copied(project) as copy:
        verdict = judge_fixed(copy, entry, Baselines())

    assert verdict.fate == fate
    assert verdict.has_survived == (fate != "killed")


def test_an_entry_that_does_not_fit_the_sources_is_reported(project: Path, tmp_path: Path) -> None:
    (tmp_path / "fixed.toml").write_text(dedent(ENTRY).replace("RATE = 2", "RATE = 3").format(tests=""))

    with pytest.raises(StaleError, match=r"prices are halved: src/shop/prices\.py holds this text 0 times"):
        fixed(project, tmp_path / "fixed.toml")


def test_the_fixed_list_fits_the_sources_and_breaks_every_promise() -> None:
    entries = fixed(ROOT)

    assert len(entries) >= 60
    assert {entry.promise for entry in entries} == PROMISES
    assert len({entry.name for entry in entries}) == len(entries)
    assert [entry.name for entry in entries if not is_valid(entry.mutant, (ROOT / entry.mutant.path).read_text())] == []


def test_what_is_listed_as_equivalent_is_still_a_mutant_and_has_a_reason() -> None:
    known = equivalents()

    paths = {identity[0] for identity in known}
    assert known.keys() <= {one.identity for one in every_mutant(ROOT, PACKAGE) if one.path in paths}


def test_an_equivalent_without_a_reason_is_refused(tmp_path: Path) -> None:
    entry = """
        [[mutant]]
        path = "m.py"
        place = ""
        operator = "constant"
        before = "x = 1"
        after = "x = 2"
        reason = " "
        """
    (tmp_path / "equivalent.toml").write_text(dedent(entry))

    with pytest.raises(ValueError, match=r"no reason is given for m\.py: x = 1"):
        equivalents(tmp_path / "equivalent.toml")
