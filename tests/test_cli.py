"""The command line: help, options, tables, numbers, and errors that say what to do."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import psycopg
import pymysql
import pytest
from click.testing import CliRunner, Result

import postroom
from postroom import Dispatcher, Message, Outbox
from postroom.cli import main
from postroom.cli.app import App, app
from postroom.cli.options import Duration, show_duration, without_password
from postroom.cli.status import show_count
from postroom.errors import StoreUnavailableError
from postroom.stores import SQLiteStore
from postroom.testing.pgbouncer import PgBouncer
from tests.rooms import SQLiteRoom, earlier

from .worlds import DATABASES, SQL_SERVERS

DOCS = Path(__file__).parent.parent / "docs" / "cli.md"
#: What a database without tables lacks.
TABLES = "postroom_outbox, postroom_inbox, postroom_inbox_dead, postroom_outbox_tickets, postroom_outbox_version"


def call(*arguments: str, env: dict[str, str] | None = None) -> Result:
    clean = {name: None for name in os.environ if name.startswith("POSTROOM_")}
    return CliRunner().invoke(app, list(arguments), env={**clean, **(env or {})}, prog_name="postroom")


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database of each kind."""
    match request.param:
        case "sqlite":
            return f"sqlite:///{request.getfixturevalue('sqlite_path')}"
        case "postgres":
            return str(request.getfixturevalue("postgres_dsn"))
        case _:
            return str(request.getfixturevalue("mariadb_dsn"))


def commands(group: click.Group = app, path: str = "postroom") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


COMMANDS = dict(commands())
LEAVES = {path: command for path, command in COMMANDS.items() if not isinstance(command, click.Group)}


def a_line(result: Result, code: int) -> str:
    """Return the one line of an error, which holds no traceback."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert result.stderr.startswith("postroom: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


# -- help and documentation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_help_with_an_example(path: str) -> None:
    result = call(*path.split()[1:], "--help")

    assert result.exit_code == 0
    assert re.search(rf"Example:\n(.*\n)*?.*{path}", result.stdout)


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_can_answer_in_json_and_explains_each_option(path: str) -> None:
    options = [parameter for parameter in LEAVES[path].params if isinstance(parameter, click.Option)]

    assert "--json" in [name for parameter in options for name in parameter.opts]
    assert [parameter.name for parameter in options if not parameter.help] == []


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_and_option_is_described_in_the_documentation(path: str) -> None:
    text = DOCS.read_text()

    _, heading, after = text.partition(f"\n## `{path}`\n")
    section = after.partition("\n## ")[0]
    options = [parameter for parameter in LEAVES[path].params if isinstance(parameter, click.Option)]
    assert heading, f"docs/cli.md has no section for {path}"
    assert [name for option in options for name in option.opts if f"`{name}" not in section] == []


def test_every_environment_variable_is_named_in_the_documentation() -> None:
    text = DOCS.read_text()
    variables = {
        str(option.envvar)
        for command in LEAVES.values()
        for option in command.params
        if isinstance(option, click.Option) and option.envvar
    }

    assert len(variables) > 10
    assert {variable for variable in variables if f"`{variable}`" not in text} == set()


def test_each_keyword_of_the_dispatcher_is_an_option_with_its_default() -> None:
    """Style: an option is declared once, in the signature that it is passed to."""
    keywords = inspect.signature(Dispatcher.__init__).parameters
    options = {parameter.name: parameter for parameter in COMMANDS["postroom dispatch"].params}

    derived = {name for name in keywords if name in options and name != "store"}
    assert set(keywords) - derived == {
        *("self", "store", "publisher"),
        *("concurrency", "backoff", "outage_backoff", "destination", "worker", "listener"),  # of use in Python only
    }
    for name in derived:
        default = keywords[name].default
        assert options[name].default == (show_duration(default) if isinstance(default, timedelta) else default)


def test_the_version_is_told() -> None:
    result = call("--version")

    assert result.exit_code == 0
    assert re.fullmatch(r"postroom, version \d+\.\d+\.\d+\S*\n", result.stdout)


# -- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("30s", timedelta(seconds=30)),
        ("1.5s", timedelta(seconds=1.5)),
        ("5m", timedelta(minutes=5)),
        ("2h", timedelta(hours=2)),
        ("7d", timedelta(days=7)),
        ("0s", timedelta(0)),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, duration: timedelta) -> None:
    assert Duration().convert(text, None, None) == duration
    assert Duration().convert(show_duration(duration), None, None) == duration


@pytest.mark.parametrize("text", ["30", "", "s", "-1s", "1 day", "1e3s", "nan", "999999999999d"])
def test_a_duration_without_a_unit_or_beyond_reason_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="500ms, 30s, 5m"):
        Duration().convert(text, None, None)


def test_a_default_is_shown_as_it_would_be_written() -> None:
    assert [show_duration(timedelta(seconds=s)) for s in (0.5, 30, 90, 300, 7 * 86400)] == [
        "500ms",
        "30s",
        "90s",
        "5m",
        "7d",
    ]


# -- schema ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S1-04", "S1-10", "S1-12")
def test_apply_creates_the_tables_and_says_so_and_check_agrees(url: str) -> None:
    """Explicit, and to run it again changes nothing."""
    if url.startswith("sqlite"):
        sqlite3.connect(url.removeprefix("sqlite:///")).close()  # check does not make a file, so there must be one

    before = call("schema", "check", "--store", url)
    first = call("schema", "apply", "--store", url)
    second = call("schema", "apply", "--store", url)
    after = call("schema", "check", "--store", url)

    assert before.exit_code == 1
    assert before.stdout == f"tables {TABLES} are missing; run `postroom schema apply --store {url}`\n"
    assert (first.exit_code, second.exit_code, after.exit_code) == (0, 0, 0)
    assert first.stdout == "created postroom_outbox and the tables beside it, version 3.1\n"
    assert second.stdout == "nothing to do: postroom_outbox has version 3.1\n"
    assert after.stdout == "postroom_outbox is as version 3.1 needs it\n"


def test_check_of_an_empty_database_says_what_to_run_with_the_options_that_were_given(postgres_dsn: str) -> None:
    """What is in the environment needs no repeating, and a password is never shown."""
    secret = postgres_dsn.replace("@", ":hunter2@")
    stars = postgres_dsn.replace("@", ":***@").partition("?")[0]

    given = call("schema", "check", "--store", secret, "--table", "mail", env={"POSTROOM_INBOX": "received"})
    environment = call("schema", "check", "--json", env={"POSTROOM_STORE": secret})

    tables = TABLES.replace("postroom_outbox", "mail").replace("postroom_inbox", "received")
    line = f"tables {tables} are missing; run `postroom schema apply --store {shlex.quote(stars)} --table mail`\n"
    assert (given.exit_code, given.stdout) == (1, line)
    assert environment.exit_code == 1
    assert json.loads(environment.stdout)["differences"] == [
        f"tables {TABLES} are missing; run `postroom schema apply`"
    ]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://app:secret@db/shop", "postgresql://app:***@db/shop"),
        ("postgresql://app:s:e@c/r?e@t@db:5432/shop?password=secret", "postgresql://app:***@db:5432/shop"),
        ("mysql://app@db/shop", "mysql://app@db/shop"),
        ("sqlite:////data/shop.sqlite3", "sqlite:////data/shop.sqlite3"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_check_of_tables_that_are_there_in_part_names_what_is_missing(sqlite_path: Path) -> None:
    call("schema", "apply", "--store", f"sqlite:///{sqlite_path}")
    with closing(sqlite3.connect(sqlite_path)) as connection:
        connection.execute("DROP TABLE postroom_outbox_version")
        connection.execute("DROP INDEX postroom_outbox_ready")

    result = call("schema", "check", env={"POSTROOM_STORE": f"sqlite:///{sqlite_path}"})

    assert (result.exit_code, result.stdout.splitlines()) == (
        1,
        [
            "version is missing, should be 3.1; run `postroom schema apply`",
            "index postroom_outbox_ready is missing",
            *(f"column postroom_outbox_version.{name} is missing" for name in ("version", "applied_at", "step")),
        ],
    )


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_check_names_every_difference_and_apply_mends_what_it_can(url: str) -> None:
    call("schema", "apply", "--store", url)
    drop_index(url)

    check = call("schema", "check", "--store", url, "--json")
    mend = call("schema", "apply", "--store", url)
    again = call("schema", "check", "--store", url, "--json")

    assert check.exit_code == 1
    assert [re.sub(r"^(index \S+).*", r"\1", text) for text in json.loads(check.stdout)["differences"]] == [
        "index postroom_outbox_delivered"
    ]
    assert mend.exit_code == 0
    assert mend.stdout.startswith("mended: index postroom_outbox_delivered")
    assert (again.exit_code, json.loads(again.stdout)["differences"]) == (0, [])


def drop_index(url: str) -> None:
    index = "postroom_outbox_delivered"
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            connection.execute(f"DROP INDEX {index}")
    else:
        with psycopg.connect(url) as postgres:
            postgres.execute(f"DROP INDEX {index}".encode())


def test_a_library_that_is_chatty_does_not_spoil_the_answer(mariadb_dsn: str) -> None:
    """MariaDB remarks on every table that is there already, and its driver would print that."""
    environment = {**os.environ, "POSTROOM_STORE": mariadb_dsn}
    command = [sys.executable, "-m", "postroom.cli", "schema", "apply", "--table"]
    subprocess.run([*command, "mail"], env=environment, timeout=60, check=True, capture_output=True)
    with pymysql.connect(**mariadb_place(mariadb_dsn)) as connection:
        connection.cursor().execute("DROP INDEX mail_delivered ON mail")

    done = subprocess.run([*command, "mail"], env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("postroom: ")
    assert "mail_delivered" in done.stderr
    assert done.stderr.count("\n") == 1


def mariadb_place(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {"host": parts.hostname, "port": parts.port, "user": parts.username, "database": parts.path[1:]}


def test_what_apply_cannot_mend_is_named_and_fails(sqlite_path: Path) -> None:
    url = f"sqlite:///{sqlite_path}"
    call("schema", "apply", "--store", url)
    drop_index(url)
    with closing(sqlite3.connect(sqlite_path)) as connection:
        connection.execute("CREATE INDEX postroom_outbox_delivered ON postroom_outbox (topic)")

    result = call("schema", "apply", "--store", url)
    again = call("schema", "check", "--store", url)

    assert "index postroom_outbox_delivered is " in a_line(result, 1)
    assert again.exit_code == 1
    assert again.stdout.startswith("index postroom_outbox_delivered is ")


def test_tables_of_an_older_version_are_one_line_until_they_are_upgraded(sqlite_path: Path) -> None:
    """What to run is the one thing that an operator has to know."""
    url = f"sqlite:///{sqlite_path}"
    earlier(SQLiteRoom(str(sqlite_path)), "3")

    before = call("schema", "check", "--store", url)
    listed = call("schema", "check", "--store", url, "--json")
    refused = call("status", "--store", url)
    upgrade = call("schema", "apply", "--store", url)
    after = call("schema", "check", "--store", url)

    line = f"version is 3, should be 3.1; run `postroom schema apply --store {url}`\n"
    assert (before.exit_code, before.stdout) == (1, line)
    assert "column destination is missing" in json.loads(listed.stdout)["differences"]
    assert "version 3.1 is needed; run `postroom schema apply`" in a_line(refused, 1)
    assert upgrade.stdout.startswith("upgraded postroom_outbox from version 3 to 3.1: ")
    assert (after.exit_code, after.stdout) == (0, "postroom_outbox is as version 3.1 needs it\n")


@pytest.mark.requirement("S1-09")
def test_an_upgrade_is_printed_from_the_version_that_is_there(sqlite_path: Path) -> None:
    """A migration that was made of an earlier print needs the rest, and nothing else."""
    earlier(SQLiteRoom(str(sqlite_path)), "2")

    printed = call("schema", "print", "--dialect", "sqlite", "--from", "2")
    shorter = call("schema", "print", "--dialect", "postgresql", "--table", "mail", "--from", "3", "--json")
    unknown = call("schema", "print", "--dialect", "sqlite", "--from", "3.1")

    with closing(sqlite3.connect(sqlite_path)) as connection:
        connection.executescript(printed.stdout)
    assert call("schema", "check", "--store", f"sqlite:///{sqlite_path}").exit_code == 0
    assert [text for text in json.loads(shorter.stdout)["statements"] if text.startswith("CREATE TABLE")] == []
    assert unknown.exit_code == 2


def test_apply_in_json_says_what_it_did(sqlite_path: Path) -> None:
    result = call("schema", "apply", "--store", f"sqlite:///{sqlite_path}", "--table", "mail", "--json")

    answer = json.loads(result.stdout)
    assert (answer["table"], answer["version"], answer["step"]) == ("mail", 3, 1)
    assert answer["mended"] == [f"tables {TABLES.replace('postroom_outbox', 'mail')} are missing"]


@pytest.mark.requirement("S1-09")
@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "sqlite"])
def test_the_sql_is_printed_offline_and_in_json(dialect: str) -> None:
    """For migrations of one's own."""
    text = call("schema", "print", "--dialect", dialect, "--table", "mail")
    answer = call("schema", "print", "--dialect", dialect, "--table", "mail", "--json")

    statements = json.loads(answer.stdout)["statements"]
    assert (text.exit_code, answer.exit_code) == (0, 0)
    assert text.stdout == ";\n\n".join(statements) + ";\n"
    assert re.search(r"CREATE TABLE IF NOT EXISTS .?mail.? \(", text.stdout)
    assert "postroom_outbox" not in text.stdout


@pytest.mark.requirement("S1-09")
def test_the_printed_sql_makes_tables_that_check_accepts(sqlite_path: Path) -> None:
    """What is printed is what `apply` would run."""
    printed = call("schema", "print", "--dialect", "sqlite")
    with closing(sqlite3.connect(sqlite_path)) as connection:
        connection.executescript(printed.stdout)

    check = call("schema", "check", "--store", f"sqlite:///{sqlite_path}")

    assert (check.exit_code, check.stdout) == (0, "postroom_outbox is as version 3.1 needs it\n")


@pytest.mark.requirement("S1-11")
def test_the_printed_sql_can_name_a_schema_of_postgresql_only() -> None:
    """Names are configurable, and checked."""
    named = call("schema", "print", "--dialect", "postgresql", "--schema", "shop")
    elsewhere = call("schema", "print", "--dialect", "sqlite", "--schema", "shop")
    hostile = call("schema", "print", "--dialect", "sqlite", "--table", "x; DROP TABLE y")

    assert '"shop"."postroom_outbox"' in named.stdout
    assert "a schema is for PostgreSQL only" in a_line(elsewhere, 2)
    assert "cannot name a table" in a_line(hostile, 2)


# -- status ------------------------------------------------------------------------------------------------------


def add_orders(path: Path, count: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        SQLiteStore.create_tables(connection)
        with connection:
            Outbox().add(connection, [{"number": number} for number in range(count)], topic="orders")


@pytest.mark.requirement("S2-04")
def test_status_tells_how_many_messages_are_in_each_state(sqlite_path: Path) -> None:
    """Dead messages are visible to monitoring."""
    add_orders(sqlite_path, 4)
    with closing(sqlite3.connect(sqlite_path)) as connection, connection:
        connection.execute("UPDATE postroom_outbox SET next_attempt_at = next_attempt_at - 90000")
        connection.execute("UPDATE postroom_outbox SET status = 'dead' WHERE seq = 1")

    text = call("status", "--store", f"sqlite:///{sqlite_path}")
    answer = json.loads(call("status", "--store", f"sqlite:///{sqlite_path}", "--json").stdout)

    cells = dict(line.rsplit(maxsplit=1) for line in text.stdout.splitlines())
    counts = {"pending": 3, "processing": 0, "delivered": 0, "dead": 1}
    assert 90 <= float(cells.pop("oldest due").removesuffix("s")) < 200
    assert {name: int(count) for name, count in cells.items()} == counts
    assert 90 <= answer.pop("oldest_due") < 200
    assert answer == {"namespace": "default", "ceiling": 10_000, "at_ceiling": [], **counts}


def test_an_empty_outbox_has_no_oldest_message(url: str) -> None:
    call("schema", "apply", "--store", url)

    text = call("status", "--store", url)
    answer = call("status", "--store", url, "--json")

    assert text.stdout.splitlines()[-1].split() == ["oldest", "due", "-"]
    assert json.loads(answer.stdout)["oldest_due"] is None


@pytest.mark.requirement("G11")
def test_a_count_that_reached_the_ceiling_is_shown_as_at_least_that(sqlite_path: Path) -> None:
    """Counting is bounded, and says so."""
    add_orders(sqlite_path, 10_001)

    text = call("status", "--store", f"sqlite:///{sqlite_path}")
    answer = json.loads(call("status", "--store", f"sqlite:///{sqlite_path}", "--json").stdout)

    assert text.stdout.splitlines()[0].split() == ["pending", "10000+"]
    assert (answer["pending"], answer["at_ceiling"]) == (10_000, ["pending"])
    assert show_count(9_999, 10_000) == "9999"


@pytest.mark.parametrize("options", [["--json"], []])
def test_watch_goes_on_until_it_is_interrupted(sqlite_path: Path, options: list[str]) -> None:
    add_orders(sqlite_path, 2)
    arguments = ["status", "--store", f"sqlite:///{sqlite_path}", "--watch", "--interval", "50ms", *options]

    with subprocess.Popen(
        [sys.executable, "-m", "postroom.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()

    assert (process.returncode, err) == (0, "")
    if options:
        assert [json.loads(line)["pending"] for line in lines] == [2, 2, 2]
    else:
        assert [line.split()[0] for line in lines] == ["pending=2"] * 3


# -- errors ------------------------------------------------------------------------------------------------------

# -- peek --------------------------------------------------------------------------------------------------------


def test_a_peek_shows_the_next_messages_and_changes_nothing(url: str) -> None:
    """Looking twice shows the same, and everything is still delivered afterwards."""
    call("schema", "apply", "--store", url)
    add_two(url)

    first, second = (call("peek", "--store", url) for _ in range(2))
    counts = json.loads(call("status", "--store", url, "--json").stdout)

    heading, order, bill = first.stdout.splitlines()
    assert (first.exit_code, first.stderr) == (0, "")
    assert heading.split() == ["id", "topic", "type", "key", "attempts", "due", "for", "bytes"]
    assert order.split()[1:5] == ["orders", "order.placed", "42", "0"]
    assert bill.split()[1:5] == ["bills", "bill.sent", "-", "0"]
    assert "Jane" not in first.stdout
    assert re.findall(r"^\S+", second.stdout, re.MULTILINE) == re.findall(r"^\S+", first.stdout, re.MULTILINE)
    assert [counts[name] for name in ("pending", "processing", "delivered", "dead")] == [2, 0, 0, 0]


def add_two(url: str) -> None:
    order = Message(topic="orders", type="order.placed", key="42", payload=b'{"name":"Jane"}')
    messages = [order, Message(topic="bills", type="bill.sent", payload=b"{}")]
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
            Outbox().add(connection, messages)
    elif url.startswith("postgres"):
        with psycopg.connect(url) as postgres:
            Outbox().add(postgres, messages)
    else:
        with pymysql.connect(**mariadb_place(url)) as mariadb:
            mariadb.begin()
            Outbox().add(mariadb, messages)
            mariadb.commit()


def test_a_peek_shows_payloads_when_it_is_asked_to_and_escapes_them(sqlite_path: Path) -> None:
    """A payload must not move the cursor of a terminal."""
    add(sqlite_path, Message(topic="orders", payload=b"\x1b[2Jcleared\n\xff"))

    shown = call("peek", "--store", f"sqlite:///{sqlite_path}", "--payload")

    assert shown.stdout.splitlines()[2] == r"    \x1b[2Jcleared\n\xff"


def test_a_peek_in_json_is_a_line_for_each_message(sqlite_path: Path) -> None:
    text, binary = Message(topic="orders", key="42", payload=b'{"n":1}'), Message(topic="scans", payload=b"\xff")
    add(sqlite_path, text, binary)
    command = ["peek", "--store", f"sqlite:///{sqlite_path}", "--json"]

    without, with_payload, one = (call(*command, *more) for more in ([], ["--payload"], ["--topic", "scans"]))

    lines = [json.loads(line) for line in without.stdout.splitlines()]
    assert [line["id"] for line in lines] == [str(text.id), str(binary.id)]
    assert {name: lines[0][name] for name in ("topic", "key", "attempts", "bytes", "broken")} == {
        "topic": "orders",
        "key": "42",
        "attempts": 0,
        "bytes": 7,
        "broken": None,
    }
    assert lines[0]["due_for"] >= 0
    assert [{"payload", "payload_base64"} & set(line) for line in lines] == [set(), set()]
    payloads = [json.loads(line) for line in with_payload.stdout.splitlines()]
    assert (payloads[0]["payload"], payloads[1]["payload_base64"]) == ('{"n":1}', "/w==")
    assert [json.loads(line)["id"] for line in one.stdout.splitlines()] == [str(binary.id)]


def test_a_peek_at_nothing_says_so(sqlite_path: Path) -> None:
    call("schema", "apply", "--store", f"sqlite:///{sqlite_path}")

    nothing = call("peek", "--store", f"sqlite:///{sqlite_path}", "--namespace", "shop", "--topic", "orders")
    no_lines = call("peek", "--store", f"sqlite:///{sqlite_path}", "--json")

    assert (nothing.exit_code, nothing.stdout) == (0, "no message is due in namespace shop, topic orders\n")
    assert (no_lines.exit_code, no_lines.stdout) == (0, "")


def test_a_peek_shows_at_most_its_limit(sqlite_path: Path) -> None:
    add_orders(sqlite_path, 3)

    two = call("peek", "--store", f"sqlite:///{sqlite_path}", "--limit", "2")
    many = call("peek", "--store", f"sqlite:///{sqlite_path}", "--limit", "101")

    assert len(two.stdout.splitlines()) == 1 + 2
    assert many.exit_code == 2


def add(path: Path, *messages: Message) -> None:
    with closing(sqlite3.connect(path)) as connection:
        SQLiteStore.create_tables(connection)
        with connection:
            Outbox().add(connection, messages)


STORE_COMMANDS = [["status"], ["peek"], ["schema", "check"], ["schema", "apply"]]


@pytest.mark.parametrize("command", STORE_COMMANDS)
@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg", "mysql"])
def test_an_unreachable_database_is_one_line_without_the_password(command: list[str], scheme: str) -> None:
    result = call(*command, env={"POSTROOM_STORE": f"{scheme}://app:hunter2@127.0.0.1:1/shop"})

    line = a_line(result, 1)
    assert "127.0.0.1:1" in line
    assert "hunter2" not in line


@pytest.mark.parametrize("command", STORE_COMMANDS)
@pytest.mark.parametrize("database", SQL_SERVERS)
def test_wrong_credentials_are_one_line_without_the_password(
    command: list[str], database: str, request: pytest.FixtureRequest
) -> None:
    parts = urlsplit(request.getfixturevalue(f"{database}_dsn"))
    wrong = parts._replace(netloc=f"nobody:hunter2@{parts.hostname}:{parts.port}").geturl()

    line = a_line(call(*command, "--store", wrong), 1)

    assert "nobody" in line
    assert "hunter2" not in line


@pytest.mark.requirement("S1-04")
def test_a_missing_schema_is_one_line_that_says_what_to_run(url: str, sqlite_path: Path) -> None:
    """Nothing creates tables by itself."""
    sqlite3.connect(sqlite_path).close()

    assert "run `postroom schema apply`" in a_line(call("status", "--store", url), 1)


@pytest.mark.parametrize("command", [["status"], ["peek"], ["schema", "check"], ["dispatch", "--broker", "stdout:"]])
def test_a_mistyped_file_is_told_of_and_not_created(command: list[str], tmp_path: Path) -> None:
    missing = tmp_path / "shpo.sqlite3"

    line = a_line(call(*command, "--store", f"sqlite:///{missing}"), 1)

    assert "does not exist" in line
    assert not missing.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--store", "oracle://app:hunter2@host/shop"],
        ["status", "--store", "memory:"],
        ["status", "--store", "postgresql://app:hunter2@host:port/shop"],
        ["dispatch", "--store", "memory:", "--broker", "stdout:"],
        ["dispatch", "--store", "postgresql://app:hunter2@host/shop", "--broker", "kafka://app:hunter2@host"],
        ["dispatch", "--store", "postgresql://app:hunter2@host/shop", "--broker", "memory:"],
        ["dispatch", "--store", "postgresql://app:hunter2@host/shop", "--broker", "stdout:", "--batch", "0"],
    ],
)
def test_what_cannot_work_is_refused_in_one_line_with_what_would(arguments: list[str]) -> None:
    assert "hunter2" not in a_line(call(*arguments), 2)


@pytest.mark.parametrize(
    "arguments", [["status"], ["dispatch", "--store", "sqlite:///x"], ["nonsense"], ["demo", "-x"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = call(*arguments)

    assert result.exit_code == 2
    assert "Usage: postroom" in result.stderr


def raising(error: BaseException) -> Result:
    def fail() -> None:
        raise error

    return CliRunner().invoke(App(commands={"fail": click.Command("fail", callback=fail)}), ["fail"])


def test_an_error_that_a_task_group_wrapped_is_still_one_line() -> None:
    nested = ExceptionGroup("tasks", [ExceptionGroup("tasks", [StoreUnavailableError("db:5432\nis away")])])

    assert a_line(raising(nested), 1) == "postroom: db:5432 is away\n"


def test_an_error_that_nobody_foresaw_keeps_its_traceback() -> None:
    unforeseen = ExceptionGroup("tasks", [KeyError("bug")])

    assert raising(unforeseen).exception is unforeseen


def test_without_its_extra_the_command_line_says_what_to_install() -> None:
    """The standard library alone: -S leaves all installed packages out."""
    source = Path(postroom.__file__).parent.parent
    program = f"import sys; sys.path.insert(0, {str(source)!r}); from postroom.cli import main; main(['--help'])"

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 2
    assert done.stderr == "postroom: the command line is not installed; run: pip install 'postroom[cli]'\n"


def test_main_takes_arguments_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])

    assert ended.value.code == 0
    assert "Usage: postroom" in capsys.readouterr().out


# -- poolers ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S2-49")
def test_a_pooler_is_named_on_the_command_line_or_in_the_environment(
    private_pgbouncer: PgBouncer, postgres_dsn: str
) -> None:
    """Without it, one line says which option is missing."""
    url = private_pgbouncer.through(postgres_dsn)
    refused = call("schema", "apply", "--store", url)
    applied = call("schema", "apply", "--store", url, "--pooler", "transaction")
    status = call("status", "--store", url, env={"POSTROOM_POOLER": "transaction"})
    elsewhere = call("status", "--store", "mysql://localhost/shop", "--pooler", "transaction")

    assert (refused.exit_code, applied.exit_code, status.exit_code, elsewhere.exit_code) == (2, 0, 0, 2)
    assert "PostgreSQL only" in elsewhere.stderr
    assert "--pooler transaction" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
