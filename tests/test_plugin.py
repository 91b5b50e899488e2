"""The pytest plugin for tests of applications."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from postroom.testing.published import SQLiteOutbox
from postroom.testing.waiting import until

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
OPTED_IN = 'pytest_plugins = ["postroom.testing.plugin"]'

USER_SUITE = """
import asyncio
from datetime import timedelta
from postroom import Outbox
from postroom.stores import MemoryStore
from postroom.testing.published import Published

def place_order(connection, outbox, order_id):
    connection.execute("INSERT INTO orders VALUES (?)", (order_id,))
    outbox.add(connection, {"order_id": order_id}, topic="orders", key=str(order_id))

def test_an_order_is_announced(postroom_outbox, postroom_published):
    postroom_outbox.connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    with postroom_outbox.connection as connection:
        place_order(connection, postroom_outbox, 42)
    assert [message.key for message in asyncio.run(postroom_published.drain())] == ["42"]
    assert asyncio.run(postroom_published.drain()) == []
    with postroom_outbox.connection as connection:
        place_order(connection, postroom_outbox, 43)
    assert [message.key for message in asyncio.run(postroom_published.drain())] == ["43"]
    assert [message.key for message in postroom_published.received] == ["42", "43"]

def test_what_is_rolled_back_is_not_announced(postroom_outbox, postroom_published):
    try:
        with postroom_outbox.connection as connection:
            postroom_outbox.add(connection, {"order_id": 42}, topic="orders")
            raise ValueError
    except ValueError:
        pass
    assert asyncio.run(postroom_published.drain()) == []

def test_the_store_can_be_asked(postroom_outbox):
    with postroom_outbox.connection as connection:
        postroom_outbox.add(connection, {"order_id": 42}, topic="orders")
    assert asyncio.run(postroom_outbox.store.stats()).pending == 1
    assert postroom_outbox.path.exists()

def test_a_reminder_comes_after_an_hour(postroom_clock):
    store = MemoryStore(clock=postroom_clock)
    published = Published(store)
    with store.transaction() as transaction:
        Outbox().add(transaction, {}, topic="reminders", delay=timedelta(hours=1))
    assert asyncio.run(published.drain()) == []
    postroom_clock.advance(timedelta(hours=1))
    assert len(asyncio.run(published.drain())) == 1
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A run of pytest in an empty project, with no plugin that the project has not asked for."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return pytester


class TestFixturesForApplications:
    @pytest.mark.requirement("S2-01", "S2-21")
    def test_serve_a_small_suite(self, run: pytest.Pytester) -> None:
        """What is committed is delivered, what is rolled back is not; each test has its own."""
        run.makeconftest(OPTED_IN)
        run.makepyfile(USER_SUITE)

        run.runpytest_subprocess("-W", "error").assert_outcomes(passed=4)

    @pytest.mark.requirement("S4-18")
    def test_do_what_the_page_for_users_says(self, tmp_path: Path) -> None:
        """The blocks of docs/testing.md, copied into an empty folder, are a project whose tests pass."""
        for name, text in blocks_by_file(ROOT / "docs" / "testing.md").items():
            (tmp_path / name).write_text(text)
        # Of what is installed here, only pytest-asyncio is what the page says to install.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        command = [sys.executable, "-m", "pytest", "-p", "pytest_asyncio.plugin", "-W", "error"]

        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

        assert re.search(r"\b5 passed in", done.stdout), done.stdout + done.stderr

    def test_are_listed_with_what_they_are_for(self, run: pytest.Pytester) -> None:
        """All that the plugin brings begins with the name of the library, so that it hides nothing of a user's."""
        run.makeconftest("")
        before = set(listed_fixtures(run))
        run.makeconftest(OPTED_IN)

        added = {name: text for name, text in listed_fixtures(run).items() if name not in before}

        assert sorted(added) == ["postroom_clock", "postroom_outbox", "postroom_published"]
        assert all(added.values())

    def test_are_not_there_unless_a_project_asks_for_them(self) -> None:
        """An entry point would add fixtures to every pytest run of everybody who has postroom installed."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

        assert "pytest11" not in project.get("entry-points", {})


def listed_fixtures(run: pytest.Pytester) -> Mapping[str, str]:
    lines = run.runpytest_subprocess("--fixtures").outlines
    found = (re.match(r"(\w+)(?: \[\w+ scope\])? -- ", line) for line in lines)
    return {match[1]: lines[lines.index(match.string) + 1].strip() for match in found if match}


def blocks_by_file(page: Path) -> Mapping[str, str]:
    """Return the files of a page: each block of Python or TOML begins with the name of its file."""
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", page.read_text(), flags=re.DOTALL)
    files = defaultdict[str, str](str)
    for block in blocks:
        header = re.match(r"# (\w+\.\w+)\n", block)
        assert header, f"this block does not name its file:\n{block}"
        files[header[1]] += block
    return files


async def test_an_outbox_that_is_closed_leaves_no_connection_of_its_store_open(tmp_path: Path) -> None:
    """Also where the test did not close the store; Python 3.13 warns of a connection that is left to the collector."""
    before = set(threading.enumerate())
    outbox = SQLiteOutbox(tmp_path / "shop.sqlite3")
    await outbox.store.stats()

    outbox.close()

    await until(lambda: set(threading.enumerate()) <= before, "the end of the thread that has the connection")
