"""The SQL that creates or upgrades the tables, as text for migrations of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import cleandoc
from typing import Final, Literal, TypeAlias

from ...errors import ConfigurationError
from .dialects.mysql import MySQL
from .dialects.postgres import PostgreSQL
from .dialects.sqlite import SQLite
from .names import Names
from .schema import EARLIER, Schema
from .schemas.mysql import MySQLSchema
from .schemas.postgres import PostgresSchema
from .schemas.sqlite import SQLiteSchema

__all__ = ["Database", "schema_sql", "schema_statements"]

#: The databases that have tables; ``mysql`` is MariaDB too.
Database: TypeAlias = Literal["postgresql", "mysql", "sqlite"]

_SCHEMAS: Final[Mapping[str, Callable[[Names], Schema]]] = {
    "postgresql": lambda names: PostgresSchema(PostgreSQL(names)),
    "mysql": lambda names: MySQLSchema(MySQL(names)),
    "sqlite": lambda names: SQLiteSchema(SQLite(names)),
}


def schema_sql(
    database: Database,
    *,
    table: str = "postroom_outbox",
    inbox: str = "postroom_inbox",
    schema: str | None = None,
    since: str | None = None,
) -> str:
    """Return the SQL that creates the tables of outbox, inbox and tickets, as one text.

    It is what ``postroom schema print`` prints. To run it again changes nothing.

    Args:
        database: Whose SQL: ``postgresql``, ``mysql`` (MariaDB too) or ``sqlite``.
        table: The name of the outbox table.
        inbox: The name of the inbox table.
        schema: The database schema that the tables are in; PostgreSQL only.
        since: The version of tables that are to be upgraded, such as ``"3"``; by default there are none yet.

    Raises:
        ConfigurationError: The database or the version is unknown, or a name cannot be used.

    Example:
        >>> from postroom.stores import schema_sql
        >>> print(schema_sql("sqlite", table="shop_outbox")[:42])
        CREATE TABLE IF NOT EXISTS "shop_outbox" (
    """
    return ";\n\n".join(schema_statements(database, table=table, inbox=inbox, schema=schema, since=since)) + ";"


def schema_statements(
    database: Database,
    *,
    table: str = "postroom_outbox",
    inbox: str = "postroom_inbox",
    schema: str | None = None,
    since: str | None = None,
) -> list[str]:
    """Return the statements of `schema_sql` one by one, for drivers that run one at a time, such as those of MySQL."""
    if database not in _SCHEMAS:
        raise ConfigurationError(f"there are no tables for {database!r}; use one of {', '.join(_SCHEMAS)}")
    if schema is not None and database != "postgresql":
        raise ConfigurationError(
            f"a schema is for PostgreSQL only; leave it out for {database}, where a database is a schema"
        )
    if since is not None and since not in EARLIER:
        raise ConfigurationError(f"version {since!r} cannot be upgraded; use one of {', '.join(EARLIER)}")
    tables = _SCHEMAS[database](Names(table=table, inbox=inbox, schema=schema))
    texts = tables.statements() if since is None else tables.upgrade(EARLIER[since])
    return [cleandoc(text) for text in texts]
