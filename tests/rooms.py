"""One database of each kind, with a plain connection beside the store, and the schemas of earlier versions."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import psycopg
import pymysql

from postroom.stores import MySQLStore, PostgresStore, SQLiteStore
from postroom.stores.sql.dialects.mysql import MySQL
from postroom.stores.sql.dialects.postgres import PostgreSQL
from postroom.stores.sql.dialects.sqlite import SQLite
from postroom.stores.sql.names import Names
from postroom.stores.sql.schemas.mysql import MySQLSchema
from postroom.stores.sql.schemas.postgres import PostgresSchema
from postroom.stores.sql.schemas.sqlite import SQLiteSchema
from postroom.stores.sql.store import SQLStore

__all__ = [
    "EARLIER",
    "ROOMS",
    "Connection",
    "MariaDBRoom",
    "PostgresRoom",
    "Room",
    "SQLiteRoom",
    "applied",
    "differences",
    "earlier",
]

#: The DDL of versions that this release upgrades from.
SCHEMAS = Path(__file__).parent / "schemas"
EARLIER = tuple(sorted(folder.name for folder in SCHEMAS.iterdir()))
TABLE = "postroom_outbox"
INBOX = "postroom_inbox"
Connection: TypeAlias = Any  # three libraries, one PEP


class Room(ABC):
    """One database, with a plain connection beside the store."""

    quote = '"'

    def __init__(self, where: str) -> None:
        self.where = where

    @abstractmethod
    def store(self, *, table: str = TABLE, schema: str | None = None, inbox: str = INBOX) -> SQLStore: ...

    @abstractmethod
    def connect(self) -> Connection:
        """Return a connection of another library, on which every statement commits."""

    @abstractmethod
    def statements(self, names: Names) -> list[str]: ...

    #: Lists everything that the database holds, with its definition.
    catalog: str

    def run(self, *texts: str) -> list[Any]:
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            for text in texts:
                cursor.execute(text)
            rows = list(cursor.fetchall()) if cursor.description else []
            cursor.close()
            return rows

    def everything(self) -> list[Any]:
        return self.run(self.catalog)


class SQLiteRoom(Room):
    catalog = "SELECT type, name, sql FROM sqlite_master ORDER BY name"

    def store(self, *, table: str = TABLE, schema: str | None = None, inbox: str = INBOX) -> SQLiteStore:
        return SQLiteStore(self.where, table=table, inbox=inbox)

    def connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.where, isolation_level=None)
        # SQLite itself stores any bytes as text; it is Python that refuses to read them.
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        return connection

    def statements(self, names: Names) -> list[str]:
        return SQLiteSchema(SQLite(names)).statements()


class PostgresRoom(Room):
    catalog = (
        "SELECT nspname, relname, relkind::text, relfilenode FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace "
        "WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema' ORDER BY 1, 2"
    )

    def store(self, *, table: str = TABLE, schema: str | None = None, inbox: str = INBOX) -> PostgresStore:
        return PostgresStore(self.where, table=table, schema=schema, inbox=inbox)

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.where, autocommit=True)

    def statements(self, names: Names) -> list[str]:
        return PostgresSchema(PostgreSQL(names)).statements()


class MariaDBRoom(Room):
    quote = "`"
    catalog = (
        "SELECT table_name, table_type, create_time FROM information_schema.tables "
        "WHERE table_schema = DATABASE() ORDER BY table_name"
    )

    def store(self, *, table: str = TABLE, schema: str | None = None, inbox: str = INBOX) -> MySQLStore:
        return MySQLStore(self.where, table=table, inbox=inbox)

    def connect(self) -> pymysql.Connection[Any]:
        url = urlsplit(self.where)
        return pymysql.connect(
            host=url.hostname or "", port=url.port or 0, user="root", database=url.path[1:], autocommit=True
        )

    def statements(self, names: Names) -> list[str]:
        return MySQLSchema(MySQL(names)).statements()


ROOMS: dict[str, tuple[type[Room], str]] = {
    "sqlite": (SQLiteRoom, "sqlite_path"),
    "postgres": (PostgresRoom, "postgres_dsn"),
    "mariadb": (MariaDBRoom, "mariadb_dsn"),
}


def earlier(room: Room, version: str) -> None:
    """Create the schema of an earlier version."""
    kind = next(name for name, (room_kind, _) in ROOMS.items() if isinstance(room, room_kind))
    room.run(*(SCHEMAS / version / f"{kind}.sql").read_text().split(";\n")[:-1])


async def applied(room: Room, *, table: str = TABLE, schema: str | None = None) -> bool:
    store = room.store(table=table, schema=schema)
    try:
        return await store.apply_schema()
    finally:
        await store.close()


async def differences(room: Room, *, table: str = TABLE, schema: str | None = None) -> list[str]:
    store = room.store(table=table, schema=schema)
    try:
        return await store.check_schema()
    finally:
        await store.close()
