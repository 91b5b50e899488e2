"""The SQL that databases are sent, kept under tests/sql so that a review shows it; `make sql` writes it anew."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from postroom.decisions import Cancel, Decide, FindDue, Forget, Renew, Schedule
from postroom.message import Message
from postroom.outbox import Addition
from postroom.store import Claim, ClaimTerms, Dead, Delivered, Outcome, Release, Retry, Settlement
from postroom.stores.sql.claiming import Walk
from postroom.stores.sql.dialect import Dialect
from postroom.stores.sql.dialects.mysql import MySQL
from postroom.stores.sql.dialects.postgres import PostgreSQL
from postroom.stores.sql.dialects.sqlite import SQLite
from postroom.stores.sql.names import Names
from postroom.stores.sql.schema import Schema
from postroom.stores.sql.schemas.mysql import MySQLSchema
from postroom.stores.sql.schemas.postgres import PostgresSchema
from postroom.stores.sql.schemas.sqlite import SQLiteSchema
from postroom.stores.sql.statement import Result, Script, Statement

FOLDER = Path(__file__).parent / "sql"
SCHEMAS: dict[str, Schema] = {
    "postgresql": PostgresSchema(PostgreSQL(Names())),
    "mysql": MySQLSchema(MySQL(Names())),
    "sqlite": SQLiteSchema(SQLite(Names())),
}
ID = UUID(int=1)
MESSAGE = Message(id=ID, topic="orders", key="42", payload=b"{}", dedupe_key="once", token=1, attempt=1)
CLAIM = Claim(MESSAGE)
TERMS = ClaimTerms(worker=UUID(int=2))
WIDTH = 130


def told(script: Script[Any], *answers: Sequence[Any]) -> Iterator[Statement]:
    """Yield what a script asks when it is given these answers, and then no more."""
    rows = iter(answers)
    answer: Result | None = None
    try:
        while True:
            statement = next(script) if answer is None else script.send(answer)
            yield statement
            found = next(rows, ())
            answer = Result(found, len(found))
    except StopIteration:
        return


def claimed(dialect: Dialect) -> tuple[object, ...]:
    identity, moment = dialect.uuid(ID), dialect.time(datetime(2026, 1, 1, tzinfo=UTC))
    return (identity, "orders", "orders", "42", b"", "application/json", "{}", None, None, moment, 1, 1, 1)


def operations(dialect: Dialect) -> dict[str, list[Statement]]:
    """Return every statement that a dialect can make, by what it is for."""
    row = claimed(dialect)
    one, two = Addition(MESSAGE), Addition(Message(id=UUID(int=3), topic="orders", payload=b"{}"))
    alike = Addition(Message(id=UUID(int=4), topic="orders", payload=b"[]"))
    key = ("orders", "42")
    stepwise = dialect.atomic
    found = (row[0], 100, *row[1:])
    large = (row[0], 100, *[None] * 12)
    keyed = ([], [key] * 4, [(row[0], True)], [found]) if stepwise else ([(*row, True)],)
    nobody: tuple[object, ...] = (*[None] * 13, True)
    blocked = ([], [key] * 4, [(row[0], False)], [("orders", "43")]) if stepwise else ([nobody], [(*row, *key)])
    outcomes: list[Outcome] = [Delivered(), Retry("no", timedelta(seconds=1)), Dead("never"), Release()]
    outcomes.append(Release(destination="east"))
    newest = ClaimTerms(worker=UUID(int=2), newest_first=True)
    states = [(row[0], MESSAGE.token, "processing")] if stepwise else []

    def settled(*, keep: bool) -> Iterator[Statement]:
        for outcome in outcomes:
            yield from told(dialect.settle([Settlement(CLAIM, outcome)], keep_delivered=keep), states)

    return {
        "add one message": list(told(dialect.add([one], strict_order=True))),
        "add a message that has nothing special": list(told(dialect.add([two], strict_order=False))),
        "add several messages": list(told(dialect.add([one, two], strict_order=True))),
        "add several messages that differ in their payload": list(told(dialect.add([two, alike], strict_order=False))),
        "claim messages without a key": list(told(dialect.claim_loose("shop", 1, TERMS), [], [found, large])),
        "claim messages without a key, the newest first": list(
            told(dialect.claim_loose("shop", 1, newest), [], [found])
        ),
        "claim messages with a key": list(told(dialect.claim_keyed("shop", 1, TERMS, Walk()), *keyed)),
        "claim messages with a key, the newest first": list(
            told(dialect.claim_keyed("shop", 1, newest, Walk()), *keyed)
        ),
        "claim behind keys that wait": list(told(dialect.claim_keyed("shop", 1, TERMS, Walk()), *blocked)),
        "claim a suspect": list(told(dialect.claim_suspect("shop", TERMS), [found])),
        "peek": list(told(dialect.peek("shop", 10, None), [(row[0], "orders", "42", 1, 1, row[9], 1.0)], [])),
        "settle, keeping what was delivered": list(settled(keep=True)),
        "settle, deleting what was delivered": list(settled(keep=False)),
        "extend leases": list(told(dialect.extend([CLAIM], timedelta(seconds=30)), states)),
        "list destinations with parked messages": list(told(dialect.parked("shop", "", 100))),
        "unpark": list(told(dialect.unpark("shop", "east", 10), [found], [found])),
        "sweep": list(told(dialect.sweep("shop", TERMS), [row])),
        "purge": [dialect.purge("shop", timedelta(days=7), 1000)],
        "stats": list(told(dialect.stats("shop"), [(1,) * 5], [(1.0,)], [(1000, None)], [])),
        "look for messages of other namespaces": list(told(dialect.due_elsewhere("shop"), [("mail",)], [(0, 1, 0)])),
        "mark a message as handled": list(told(dialect.admit("stock", MESSAGE))),
        "look for the mark of a message": list(told(dialect.has("stock", MESSAGE))),
        "purge the inbox": list(told(dialect.purge_inbox("stock", timedelta(days=7), 1000), [(row[0], row[0])])),
        "keep a dead letter": list(told(dialect.bury_letter("stock", MESSAGE, "never"))),
        **ticket_operations(dialect, one),
        "look at the server": [next(dialect.probe())],
    }


def ticket_operations(dialect: Dialect, event: Addition) -> dict[str, list[Statement]]:
    ticket, moment = "ticket-7", datetime(2026, 1, 1, tzinfo=UTC)
    found = [("scheduled", 1_767_225_600_000, True)]
    held = (found,) if dialect.name != "sqlite" else ((), found)
    decide, cancel = Decide(ticket, moment, event, is_revoked=False), Cancel(ticket, event)
    return {
        "schedule a ticket": list(told(dialect.schedule_ticket("shop", Schedule(ticket, moment)), (), *held)),
        "renew a ticket": list(told(dialect.renew_ticket("shop", Renew(ticket, moment)), *held)),
        "find tickets that are due": list(told(dialect.find_due("shop", FindDue(100)))),
        "find tickets that are due at a moment": list(told(dialect.find_due("shop", FindDue(100, moment)))),
        "decide": list(told(dialect.decide("shop", decide, strict_order=False), *held)),
        "cancel": list(told(dialect.cancel("shop", cancel, strict_order=False), *held)),
        "forget tickets": list(told(dialect.forget_tickets("shop", Forget(timedelta(days=7), 1000)))),
    }


def laid_out(text: str) -> str:
    """Indent by brackets: pieces of statements come from places that are indented in their own way."""
    lines: list[str] = []
    depth = 0
    for line in filter(None, map(str.strip, text.splitlines())):
        code = re.sub(r"'[^']*'|--.*", "", line)
        closing = len(code) - len(code.lstrip(")"))
        lines += wrapped(line, "    " * (depth - closing), "    " * depth + "  ")
        depth += code.count("(") - code.count(")")
    return "\n".join(lines)


def wrapped(line: str, first: str, next_: str) -> list[str]:
    """Break a long line before AND, OR and FROM, and after commas."""
    fixed = re.sub("\x00(?=(AND|OR|FROM|ON|WHERE)\x00)|(?<=,)\x00", " ", line.replace(" ", "\x00"))
    wrap = textwrap.TextWrapper(WIDTH, first, next_, break_long_words=False, break_on_hyphens=False)
    return [part.replace("\x00", " ") for part in wrap.wrap(fixed)]


def rendered(schema: Schema) -> str:
    parts = ["-- Made by `make sql`; the schema comes first, then what is asked of it."]
    parts += [f"{laid_out(text)};" for text in schema.statements()]
    seen: set[str] = set()
    for name, statements in operations(schema.dialect).items():
        texts = [text for text in dict.fromkeys(s.text for s in statements) if text not in seen]
        seen.update(texts)
        parts += [f"-- {name}\n{laid_out(text)};" for text in texts]
    return "\n\n".join(parts) + "\n"


@pytest.mark.requirement("S1-09")
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_sql_is_what_was_reviewed(name: str) -> None:
    """Schema and statements are there to be read, and to be pasted."""
    path = FOLDER / f"{name}.sql"
    now = rendered(SCHEMAS[name])
    if os.environ.get("UPDATE_SQL"):
        path.write_text(now)

    reviewed = path.read_text()

    assert now == reviewed, "the SQL has changed: run `make sql` and look at the difference"


@pytest.mark.requirement("S1-11")
@pytest.mark.parametrize("name", SCHEMAS)
def test_no_value_is_ever_part_of_the_sql(name: str) -> None:
    """Only checked identifiers are rendered, so nothing in a message can become SQL."""
    canary = "canary'); DROP TABLE"
    message = Message(
        id=ID, topic=canary, type=canary, key=canary, payload=canary.encode(), dedupe_key=canary, headers={"a": canary}
    )
    dialect = SCHEMAS[name].dialect
    claim, state = Claim(message), [(dialect.uuid(ID), 0, "processing")]
    nobody = (*[None] * 13, True, True)

    statements = [
        *told(dialect.add([Addition(message)], strict_order=True)),
        *told(dialect.claim_keyed(canary, 5, TERMS, Walk(canary, canary)), [nobody], [nobody]),
        *told(dialect.settle([Settlement(claim, Retry(canary))], keep_delivered=True), state),
        *told(dialect.settle([Settlement(claim, Dead(canary))], keep_delivered=True), state),
        *told(dialect.settle([Settlement(claim, Release(destination=canary))], keep_delivered=True), state),
        *told(dialect.parked(canary, canary, 10)),
        *told(dialect.due_elsewhere("shop"), [(canary,)], [(0, 1, 0)]),
        *told(dialect.unpark(canary, canary, 10), [(b"canary",)]),
        *told(dialect.admit(canary, message)),
        *told(dialect.has(canary, message)),
        *told(dialect.purge_inbox(canary, timedelta(days=7), 1000), [(b"canary", b"canary")]),
        *told(dialect.bury_letter(canary, message, canary)),
    ]

    assert len(statements) >= 8
    assert [s.text for s in statements if "canary" in s.text] == []
    assert "canary" in str([s.params for s in statements])


def test_mysql_is_not_asked_for_functions_that_its_newest_release_dropped() -> None:
    """MySQL 9.7 has no MD5 any more."""
    schema = SCHEMAS["mysql"]
    locks = [statement.text for statement in (*told(schema.lock(), [(1,)]), *told(schema.unlock()))]
    texts = [*schema.statements(), *schema.upgrade((1, 0)), *locks, (FOLDER / "mysql.sql").read_text()]

    assert any("GET_LOCK(" in text for text in texts)
    assert [text for text in texts if re.search(r"\b(MD5|SHA1?)\(", text, re.IGNORECASE)] == []
