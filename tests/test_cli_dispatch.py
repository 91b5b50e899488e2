"""``postroom dispatch`` as a real process: signals, crashes, environment, output."""

from __future__ import annotations

import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from postroom import Outbox
from postroom.stores import SQLiteStore

PATIENCE = 30.0
#: More than a pipe holds, so that who writes it waits for a reader.
LARGE = "x" * 200_000

Process = subprocess.Popen[bytes]


def environment(**variables: str) -> Mapping[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("POSTROOM_")}
    return inherited | variables


@contextmanager
def dispatching(*options: str, **variables: str) -> Generator[Process]:
    """Start a dispatcher with pipes for stdout and stderr, and never leave it behind."""
    process = subprocess.Popen(
        [sys.executable, "-m", "postroom.cli", "dispatch", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**variables),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def finished(process: Process) -> tuple[int, bytes, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err.decode()


def wait_until(condition: Callable[[], bool], process: Process | None = None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        assert process is None or process.poll() is None, "the dispatcher ended"
        time.sleep(0.02)


def read_line(process: Process, text: str) -> str:
    """Read the log up to the line that holds a text."""
    assert process.stderr is not None
    for line in iter(process.stderr.readline, b""):
        if text in line.decode():
            return line.decode()
    raise AssertionError(f"{text!r} was never logged")


def wait_for_output(process: Process) -> None:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], PATIENCE)[0], "nothing was written"


@pytest.fixture
def url(sqlite_path: Path) -> str:
    with closing(sqlite3.connect(sqlite_path)) as connection:
        SQLiteStore.create_tables(connection)
    return f"sqlite:///{sqlite_path}"


def add(path: Path, events: list[dict[str, Any]], *, namespace: str = "default", key: str | None = None) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        Outbox(namespace=namespace).add(connection, events, topic="orders", key=key)


def numbers(text: bytes) -> list[int]:
    """Return the numbers of all whole lines."""
    return [json.loads(line)["data"]["number"] for line in text.splitlines(keepends=True) if line.endswith(b"\n")]


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


BY_STATUS = "SELECT status, count(*) FROM postroom_outbox GROUP BY status"


# -- one run -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("G6", "S2-36", "S2-37")
def test_once_delivers_what_is_due_in_order_and_exits_with_0(url: str, sqlite_path: Path) -> None:
    """A whole run of the command, from the table to the lines."""
    add(sqlite_path, [{"number": number} for number in range(50)], key="42")

    with dispatching("--store", url, "--broker", "stdout:", "--once", "--batch", "7") as process:
        code, out, err = finished(process)

    assert (code, numbers(out)) == (0, list(range(50)))
    assert "dispatcher stopped" in err
    assert err.count("marked as delivered; `postroom peek` shows messages") == 1
    assert rows(sqlite_path, BY_STATUS) == [("delivered", 50)]


def test_every_setting_can_come_from_the_environment(url: str, sqlite_path: Path, tmp_path: Path) -> None:
    """An argument is visible to everybody on the machine, an environment variable is not."""
    add(sqlite_path, [{"number": 1}], namespace="shop")
    add(sqlite_path, [{"number": 2}], namespace="other")
    target = tmp_path / "messages.jsonl"

    with dispatching(
        "--once",
        POSTROOM_STORE=url,
        POSTROOM_NAMESPACE="shop",
        POSTROOM_BROKER=f"file:{target}",
        POSTROOM_LEASE="3m",
        POSTROOM_POLL_INTERVAL="20ms",
        POSTROOM_KEEP_DELIVERED="0s",
    ) as process:
        code, _, err = finished(process)

    assert (code, numbers(target.read_bytes())) == (0, [1]), err
    assert rows(sqlite_path, "SELECT namespace FROM postroom_outbox") == [("other",)]


def test_a_bad_value_in_the_environment_is_named(url: str) -> None:
    with dispatching("--store", url, "--broker", "stdout:", POSTROOM_LEASE="30") as process:
        code, _, err = finished(process)

    assert code == 2
    assert "--lease" in err
    assert "'30' is not a duration" in err
    assert "Traceback" not in err


@pytest.mark.requirement("S2-35")
def test_settings_that_contradict_each_other_are_refused_before_anything_runs(url: str) -> None:
    """The poll interval is held against the lease."""
    with dispatching("--store", url, "--broker", "stdout:", "--lease", "3s", "--poll-interval", "2s") as process:
        code, _, err = finished(process)

    assert code == 2
    assert err.startswith("postroom: ")
    assert "a third of lease" in err
    assert err.count("\n") == 1


def test_json_events_are_lines_that_parse(url: str, sqlite_path: Path, tmp_path: Path) -> None:
    add(sqlite_path, [{"number": 1}])

    with dispatching("--store", url, "--broker", f"file:{tmp_path / 'x'}", "--once", "--json", "--verbose") as process:
        code, out, err = finished(process)

    events = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [event["event"] for event in events] == ["Started", "Claimed", "MessagesDelivered", "Stopped"]
    assert events[0]["namespace"] == "default"
    assert events[2]["count"] == 1
    assert {event["level"] for event in events} == {"info", "debug"}


def test_a_stdout_broker_has_stdout_for_itself(url: str, sqlite_path: Path) -> None:
    add(sqlite_path, [{"number": 1}])

    with dispatching("--store", url, "--broker", "stdout:", "--once", "--json") as process:
        code, out, err = finished(process)

    assert (code, numbers(out)) == (0, [1])
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["PrintsMessages", "Started", "Stopped"]


@pytest.mark.requirement("G13", "S4-20")
def test_once_exits_with_1_if_the_broker_was_down_and_spends_no_attempt(
    url: str, sqlite_path: Path, tmp_path: Path
) -> None:
    """An outage costs no attempts and makes no dead letters."""
    add(sqlite_path, [{"number": 1}])

    with dispatching("--store", url, "--broker", f"file:{tmp_path}/missing/x", "--once") as process:
        code, _, err = finished(process)

    assert code == 1
    assert " is down: BrokerUnavailableError: cannot write: " in err
    assert rows(sqlite_path, "SELECT status, attempts FROM postroom_outbox") == [("pending", 0)]


@pytest.mark.requirement("G2")
def test_a_reader_that_goes_away_ends_the_dispatcher_and_loses_nothing(url: str, sqlite_path: Path) -> None:
    """As in `postroom dispatch --broker stdout: | head`."""
    add(sqlite_path, [{"number": 1}])

    with dispatching("--store", url, "--broker", "stdout:") as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read().decode()
        code = process.wait(PATIENCE)

    assert code == 1
    assert "the reader of stdout has gone" in err
    assert rows(sqlite_path, "SELECT status, attempts FROM postroom_outbox") == [("pending", 0)]


# -- signals and crashes -----------------------------------------------------------------------------------------


@pytest.mark.requirement("S2-34", "S4-12")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_lets_a_delivery_under_way_finish(url: str, sqlite_path: Path, number: signal.Signals) -> None:
    """The reader holds the delivery up until after the signal."""
    add(sqlite_path, [{"number": 1, "text": LARGE}])

    with dispatching("--store", url, "--broker", "stdout:") as process:
        wait_for_output(process)
        process.send_signal(number)
        logged = read_line(process, "stopping")
        held_up = process.poll() is None
        code, out, _ = finished(process)

    assert number.name in logged
    assert held_up
    assert (code, numbers(out)) == (0, [1])
    assert rows(sqlite_path, BY_STATUS) == [("delivered", 1)]


@pytest.mark.requirement("S4-12")
def test_what_cannot_finish_within_the_grace_is_given_back(url: str, sqlite_path: Path) -> None:
    """A stop is bounded, and the message is due for others at once."""
    add(sqlite_path, [{"number": 1, "text": LARGE}])

    with dispatching("--store", url, "--broker", "stdout:", "--shutdown-grace", "100ms") as process:
        wait_for_output(process)
        process.terminate()
        code = process.wait(PATIENCE)

    assert code == 0
    assert rows(sqlite_path, "SELECT status, attempts FROM postroom_outbox") == [("pending", 0)]


@pytest.mark.requirement("G2", "S4-12")
def test_a_second_signal_ends_at_once_and_the_message_comes_again(url: str, sqlite_path: Path) -> None:
    """Nobody reads, so only the second signal can end it before the grace is over."""
    add(sqlite_path, [{"number": 1, "text": LARGE}])

    with dispatching("--store", url, "--broker", "stdout:") as process:
        wait_for_output(process)
        process.terminate()
        read_line(process, "stopping")
        began = time.monotonic()
        process.terminate()
        code = process.wait(PATIENCE)
        took = time.monotonic() - began
    status = rows(sqlite_path, "SELECT status, attempts FROM postroom_outbox")
    with dispatching("--store", url, "--broker", "stdout:", "--once") as process:
        _, out, _ = finished(process)

    assert code == 128 + signal.SIGTERM
    assert took < 10  # the grace is 30 s, and so is the lease
    assert status == [("pending", 0)]
    assert numbers(out) == [1]


@pytest.mark.requirement("S4-12")
def test_a_second_signal_ends_at_once_although_the_database_stands_still(url: str, sqlite_path: Path) -> None:
    """Giving back is a courtesy, which the lease makes good if it cannot be had."""
    add(sqlite_path, [{"number": 1, "text": LARGE}])

    with dispatching("--store", url, "--broker", "stdout:") as process, closing(sqlite3.connect(sqlite_path)) as lock:
        wait_for_output(process)
        lock.execute("BEGIN IMMEDIATE")
        process.terminate()
        read_line(process, "stopping")
        began = time.monotonic()
        process.terminate()
        code = process.wait(PATIENCE)
        took = time.monotonic() - began
        lock.rollback()

    assert code == 128 + signal.SIGTERM
    assert took < 4  # a call to the store alone would wait for 5 s
    assert rows(sqlite_path, BY_STATUS) == [("processing", 1)]


@pytest.mark.requirement("G2", "S2-03", "S2-33", "S2-50", "S4-20")
def test_what_kill_9_interrupted_is_delivered_after_the_next_start(url: str, sqlite_path: Path, tmp_path: Path) -> None:
    """Nothing is lost, and nobody has to repair anything."""
    count = 1500
    add(sqlite_path, [{"number": number} for number in range(count)])
    target = tmp_path / "messages.jsonl"
    options = ["--store", url, "--broker", f"file:{target}", "--batch", "5"]
    options += ["--lease", "2s", "--publish-timeout", "1s", "--poll-interval", "100ms"]

    with dispatching(*options) as process:
        wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") > 20, process)
        process.kill()
        process.wait(PATIENCE)
    before = numbers(target.read_bytes())
    in_flight = dict(rows(sqlite_path, BY_STATUS)).get("processing", 0)
    with dispatching(*options) as process:
        wait_until(lambda: dict(rows(sqlite_path, BY_STATUS)) == {"delivered": count}, process)
        process.terminate()
        code, _, _ = finished(process)

    assert len(before) < count
    assert in_flight > 0
    assert code == 0
    assert set(numbers(target.read_bytes())) == set(range(count))


@pytest.mark.requirement("S4-13")
def test_a_dispatcher_whose_database_is_away_waits_for_it_and_can_be_stopped() -> None:
    """The loop continues; and a stop does not wait for a database that may never come."""
    with dispatching("--store", "postgresql://app:hunter2@127.0.0.1:1/shop", "--broker", "stdout:") as process:
        line = read_line(process, "store call 'open' failed")
        process.terminate()
        code, _, err = finished(process)

    assert code == 0
    assert "127.0.0.1:1" in line
    assert "hunter2" not in line + err


def test_wrong_credentials_end_the_dispatcher_in_one_line_without_the_password(postgres_dsn: str) -> None:
    parts = urlsplit(postgres_dsn)
    wrong = parts._replace(netloc=f"nobody:hunter2@{parts.hostname}:{parts.port}").geturl()

    with dispatching("--broker", "stdout:", POSTROOM_STORE=wrong) as process:
        code, _, err = finished(process)

    last = err.splitlines()[-1]
    assert code == 1
    assert last.startswith("postroom: ")
    assert "nobody" in last
    assert "Traceback" not in err
    assert "hunter2" not in err


@pytest.mark.requirement("S1-04")
def test_a_missing_schema_ends_the_dispatcher_with_what_to_do(postgres_dsn: str) -> None:
    """Nothing creates the tables but `postroom schema apply`."""
    with dispatching("--store", postgres_dsn, "--broker", "stdout:") as process:
        code, _, err = finished(process)

    assert code == 1
    assert "postroom schema apply" in err.splitlines()[-1]
    assert "Traceback" not in err
