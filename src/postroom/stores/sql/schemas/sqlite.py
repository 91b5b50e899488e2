"""The tables of SQLite."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from ..schema import Change, Group, Schema
from ..statement import Script

__all__ = ["SQLiteSchema"]

_CREATED = re.compile(r'CREATE (?:UNIQUE )?(TABLE|INDEX|VIEW) (?:IF NOT EXISTS )?"(\w+)"')
_PIECE = re.compile(r"""'[^']*'|"[^"]*"|[(),]|[^'"(),]+""")
_PARKED: Final = """
        CREATE INDEX IF NOT EXISTS {parked} ON {outbox} (namespace, destination, next_attempt_at, seq)
        WHERE status = 'pending' AND parked = token
        """


class SQLiteSchema(Schema):
    """Tables of SQLite; the text that made them is what is compared."""

    version: ClassVar[str] = """
        CREATE TABLE IF NOT EXISTS {version} (
            version INTEGER PRIMARY KEY,
            applied_at INTEGER NOT NULL DEFAULT ({now}),
            step INTEGER
        )
        """
    exists = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = :table"

    outbox: ClassVar[Sequence[str]] = (
        """
        CREATE TABLE IF NOT EXISTS {outbox} (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            namespace TEXT NOT NULL,
            topic TEXT NOT NULL,
            type TEXT NOT NULL,
            {key} TEXT,
            tenant_id TEXT,
            dedupe_key TEXT,
            payload BLOB NOT NULL,
            content_type TEXT NOT NULL,
            headers TEXT NOT NULL DEFAULT '{}',
            status TEXT NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'processing', 'delivered', 'dead')),
            attempts INTEGER NOT NULL DEFAULT 0,
            token INTEGER NOT NULL DEFAULT 0,
            next_attempt_at INTEGER NOT NULL DEFAULT ({now}),
            locked_by TEXT,
            locked_until INTEGER,
            last_error TEXT,
            created_at INTEGER NOT NULL DEFAULT ({now}),
            updated_at INTEGER NOT NULL DEFAULT ({now}),
            delivered_at INTEGER,
            destination TEXT,
            parked INTEGER,
            CHECK ((status = 'processing') = (locked_by IS NOT NULL)),
            CHECK ((locked_by IS NULL) = (locked_until IS NULL))
        )
        """,
        """
        CREATE UNIQUE INDEX IF NOT EXISTS {dedupe} ON {outbox} (namespace, topic, dedupe_key)
        WHERE dedupe_key IS NOT NULL
        """,
        """
        CREATE INDEX IF NOT EXISTS {ready} ON {outbox} (namespace, next_attempt_at, seq)
        WHERE status = 'pending' AND {key} IS NULL
        """,
        """
        CREATE INDEX IF NOT EXISTS {ready_keyed} ON {outbox} (namespace, next_attempt_at, seq)
        WHERE status = 'pending' AND {key} IS NOT NULL
        """,
        """
        CREATE INDEX IF NOT EXISTS {leased} ON {outbox} (namespace, locked_until, seq)
        WHERE status = 'processing'
        """,
        """
        CREATE INDEX IF NOT EXISTS {keyed} ON {outbox} (namespace, topic, {key}, seq)
        WHERE {key} IS NOT NULL AND status IN ('pending', 'processing')
        """,
        """
        CREATE INDEX IF NOT EXISTS {dead} ON {outbox} (namespace, topic, {key}, seq)
        WHERE status = 'dead'
        """,
        """
        CREATE INDEX IF NOT EXISTS {delivered} ON {outbox} (namespace, delivered_at)
        WHERE status = 'delivered'
        """,
        _PARKED,
        """
        CREATE VIEW IF NOT EXISTS {published} AS
        SELECT seq AS id, strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch') AS created_at, topic,
               type AS event_type,
               CASE WHEN content_type = 'application/json' THEN CAST(payload AS TEXT) END AS data,
               headers AS attributes, status = 'delivered' AS published
        FROM {outbox}
        """,
        """
        CREATE VIEW IF NOT EXISTS {messages} AS
        SELECT id, payload, headers AS properties,
               strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch') AS created_at,
               strftime('%Y-%m-%dT%H:%M:%fZ', delivered_at / 1000.0, 'unixepoch') AS published_at,
               attempts, last_error,
               strftime('%Y-%m-%dT%H:%M:%fZ', updated_at / 1000.0, 'unixepoch') AS updated_at
        FROM {outbox}
        """,
    )

    inbox: ClassVar[Sequence[str]] = (
        """
        CREATE TABLE IF NOT EXISTS {inbox} (
            consumer TEXT NOT NULL,
            tenant_id TEXT NOT NULL,
            message_id TEXT NOT NULL,
            created_at INTEGER NOT NULL DEFAULT ({now}),
            PRIMARY KEY (consumer, tenant_id, message_id)
        )
        """,
        "CREATE INDEX IF NOT EXISTS {inbox_old} ON {inbox} (consumer, created_at)",
        """
        CREATE TABLE IF NOT EXISTS {inbox_dead} (
            consumer TEXT NOT NULL,
            tenant_id TEXT NOT NULL,
            message_id TEXT NOT NULL,
            topic TEXT NOT NULL,
            type TEXT NOT NULL,
            {key} TEXT,
            namespace TEXT NOT NULL,
            payload BLOB NOT NULL,
            content_type TEXT NOT NULL,
            headers TEXT NOT NULL DEFAULT '{}',
            attempts INTEGER NOT NULL,
            error TEXT NOT NULL,
            died_at INTEGER NOT NULL DEFAULT ({now}),
            PRIMARY KEY (consumer, tenant_id, message_id)
        )
        """,
        """
        CREATE VIEW IF NOT EXISTS {inbox_processed} AS
        SELECT consumer AS subscriber, message_id,
               strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch') AS created_at
        FROM {inbox}
        """,
    )

    tickets: ClassVar[Sequence[str]] = (
        """
        CREATE TABLE IF NOT EXISTS {tickets} (
            namespace TEXT NOT NULL,
            ticket TEXT NOT NULL,
            expires_at INTEGER NOT NULL,
            status TEXT NOT NULL CHECK (status IN ('scheduled', 'expired', 'revoked')),
            ended_at INTEGER,
            PRIMARY KEY (namespace, ticket),
            CHECK ((status = 'scheduled') = (ended_at IS NULL))
        )
        """,
        """
        CREATE INDEX IF NOT EXISTS {tickets_due} ON {tickets} (namespace, expires_at, ticket)
        WHERE status = 'scheduled'
        """,
        """
        CREATE INDEX IF NOT EXISTS {tickets_ended} ON {tickets} (namespace, ended_at)
        WHERE ended_at IS NOT NULL
        """,
    )
    ddl: ClassVar[Mapping[Group, Sequence[str]]] = {
        "outbox": outbox,
        "inbox": inbox,
        "tickets": tickets,
        "version": (version,),
    }
    steps: ClassVar[Sequence[Sequence[Change]]] = (
        (
            Change(
                group="version", part="column {table}_version.step", texts=("ALTER TABLE {version} ADD step INTEGER",)
            ),
            Change(part="column destination", texts=("ALTER TABLE {outbox} ADD destination TEXT",)),
            Change(part="column parked", texts=("ALTER TABLE {outbox} ADD parked INTEGER",)),
            Change(part="index {table}_parked", texts=(_PARKED,)),
        ),
    )

    def describe(self, group: Group) -> Script[dict[str, str]]:
        tables = self.tables(group)
        found = yield self.dialect.query(
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND (tbl_name IN :tables OR type = 'view')",
            tables=list(tables),
        )
        return _parts([row[0] for row in found.rows], tables)

    def wanted(self, group: Group) -> Script[dict[str, str]]:
        yield from ()
        return _parts([self.dialect.sql(text).text for text in self.ddl[group]], self.tables(group))


def _parts(texts: Sequence[str], tables: Mapping[str, str]) -> dict[str, str]:
    """Return columns, constraints, indexes and views by name, as SQLite keeps them: as text."""
    parts: dict[str, str] = {}
    for text in texts:
        created = _CREATED.match(text)
        if created is None:
            continue
        if created[1] != "TABLE":
            parts[f"{created[1].lower()} {created[2]}"] = " ".join(text[created.end() :].split())
            continue
        prefix = tables[created[2]]
        for item in _items(text[created.end() :]):
            name, _, definition = item.partition(" ")
            if name in {"CHECK", "PRIMARY"}:
                parts[f"constraint {item} of {created[2]}" if prefix else f"check {definition}"] = definition
            else:
                parts[f"column {prefix}{name.strip(chr(34))}"] = definition
    return parts


def _items(text: str) -> list[str]:
    """Return what stands between the outer brackets, item by item; columns that were added share a line."""
    items, depth = [""], 0
    for piece in _PIECE.findall(text[text.index("(") + 1 : text.rindex(")")]):
        depth += (piece == "(") - (piece == ")")
        if piece == "," and not depth:
            items.append("")
        else:
            items[-1] += piece
    return [" ".join(item.split()) for item in items]
