"""The SQL of the tables as text that can be imported."""

from __future__ import annotations

from contextlib import closing
from typing import Any, cast
from uuid import uuid4

import pytest

from postroom import ClaimTerms, Message
from postroom.errors import ConfigurationError, InvalidNameError
from postroom.stores import SQLStore, schema_sql, schema_statements, store_from_url
from postroom.stores.sql.ddl import Database
from postroom.stores.sql.schema import EARLIER

from .crash.sites import site_of
from .worlds import DATABASES

NAMES: dict[str, Database] = {"postgres": "postgresql", "mariadb": "mysql", "sqlite": "sqlite"}


@pytest.fixture(params=DATABASES)
def place(request: pytest.FixtureRequest) -> tuple[str, Database]:
    """The URL of an empty database, and whose SQL it takes."""
    if request.param == "sqlite":
        return f"sqlite:///{request.getfixturevalue('sqlite_path')}", "sqlite"
    return request.getfixturevalue(f"{request.param}_dsn"), NAMES[request.param]


def execute(connection: Any, database: Database, **names: str) -> None:  # noqa: ANN401 -- of three libraries
    """Run the text with nothing but the driver."""
    match database:
        case "postgresql":
            connection.execute(schema_sql(database, **names))
        case "sqlite":
            connection.executescript(schema_sql(database, **names))
        case "mysql":
            for statement in schema_statements(database, **names):
                connection.cursor().execute(statement)
    connection.commit()


@pytest.mark.requirement("S1-09", "S1-10", "S1-11")
async def test_the_text_makes_tables_that_a_store_works_with(place: tuple[str, Database]) -> None:
    """Executed with a bare driver, twice, under names of one's own."""
    url, database = place
    site, message = site_of(url), Message(topic="orders", payload=b"{}")
    with closing(site.connect()) as connection:
        execute(connection, database, table="mail", inbox="seen")
        execute(connection, database, table="mail", inbox="seen")
    store = store_from_url(url, table="mail", inbox="seen")
    assert isinstance(store, SQLStore)

    try:
        with site.connection() as connection:
            store.outbox().add(connection, message)
        async with store.transactions().begin() as transaction:
            is_new = await store.inbox("stock").admit(transaction, message)
        [claim] = await store.claim(10, ClaimTerms(worker=uuid4()))
        differences = await store.check_schema()
    finally:
        await store.close()

    assert is_new
    assert claim.message.id == message.id
    assert differences == []


@pytest.mark.requirement("S1-09")
def test_the_text_is_the_statements_one_after_the_other() -> None:
    """For drivers that run several at once, and for those that do not."""
    for database in NAMES.values():
        assert schema_sql(database) == ";\n\n".join(schema_statements(database)) + ";"
        assert [text for text in schema_statements(database) if text.rstrip().endswith(";")] == []


@pytest.mark.requirement("S1-09")
def test_the_text_can_upgrade_tables() -> None:
    """An upgrade is less than everything, and each version that can be upgraded has one."""
    for database in NAMES.values():
        for version in EARLIER:
            assert len(schema_statements(database, since=version)) > 0
        assert schema_statements(database, since="3") != schema_statements(database)


@pytest.mark.requirement("S1-11")
def test_what_has_no_tables_is_refused() -> None:
    """The error names what there is."""
    with pytest.raises(ConfigurationError, match="no tables for 'oracle'; use one of postgresql, mysql, sqlite"):
        schema_sql(cast("Database", "oracle"))
    with pytest.raises(ConfigurationError, match="a schema is for PostgreSQL only; leave it out for mysql"):
        schema_sql("mysql", schema="shop")
    with pytest.raises(ConfigurationError, match="version '99' cannot be upgraded; use one of 1, 2, 3"):
        schema_sql("sqlite", since="99")
    with pytest.raises(InvalidNameError, match="cannot name a table"):
        schema_sql("sqlite", table="x; DROP TABLE y")
    assert '"shop"."postroom_outbox"' in schema_sql("postgresql", schema="shop")
