"""The commands about tables: create them, compare them, print them."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import click

from ..errors import version_text
from ..stores.sql.ddl import Database, schema_statements
from ..stores.sql.schema import EARLIER, STEP, VERSION
from ..text import printable
from .options import StoreOptions, as_json, echo_json, run, store_options, table_options

__all__ = ["schema"]

#: What a difference says to run; here it is completed with the options that were given.
_APPLY: Final = "postroom schema apply"
_NEEDED: Final = version_text((VERSION, STEP))


@click.group()
def schema() -> None:
    """Create, check or print the tables; no other command creates them.

    \b
    Example:
      postroom schema apply --store sqlite:///shop.sqlite3
    """  # noqa: D301


@schema.command()
@store_options
@as_json
def apply(store_options: StoreOptions, *, as_json: bool) -> None:
    """Create the tables, or add what they lack.

    It is safe to run again, and to run several times at once. Workers can keep running, also those of an older release.
    A table, column or index that exists but differs is never changed: the command names it and exits with 1.

    \b
    Example:
      postroom schema apply --store postgresql://app@db/shop
    """  # noqa: D301
    mended = run(lambda: _apply(store_options))
    if as_json:
        echo_json({"table": store_options.table, "version": VERSION, "step": STEP, "mended": mended})
    else:
        click.echo("\n".join(map(printable, _report(store_options.table, mended))))


async def _apply(options: StoreOptions) -> list[str]:
    store = options.make_tables(may_create=True)
    try:
        differences = await store.check_schema()
        await store.apply_schema()
    finally:
        await store.close()
    return [difference.removesuffix(f"; run `{_APPLY}`") for difference in differences]


def _report(table: str, mended: list[str]) -> list[str]:
    if not mended:
        return [f"nothing to do: {table} has version {_NEEDED}"]
    if mended[0].startswith("tables "):
        return [f"created {table} and the tables beside it, version {_NEEDED}"]
    if mended[0].startswith("version is "):
        version = mended[0].removeprefix("version is ").partition(",")[0]
        return [f"upgraded {table} from version {version} to {_NEEDED}: {len(mended)} parts"]
    return [f"mended: {difference}" for difference in mended]


@schema.command()
@store_options
@as_json
def check(store_options: StoreOptions, *, as_json: bool) -> None:
    """Compare the tables with what this release needs.

    Prints every difference, and exits with 1 if there is one.

    If all tables are missing, or are of another version, one line says so, and what to run.

    \b
    Example:
      postroom schema check --store mysql://app@db/shop --json
    """  # noqa: D301
    differences = run(lambda: _check(store_options))
    if as_json:
        echo_json({"table": store_options.table, "version": VERSION, "step": STEP, "differences": differences})
    else:
        lines = [text.replace(_APPLY, store_options.apply_command) for text in _shown(differences)]
        click.echo("\n".join(map(printable, lines)) or f"{store_options.table} is as version {_NEEDED} needs it")
    sys.exit(1 if differences else 0)


def _shown(differences: list[str]) -> list[str]:
    """Leave out what follows from the version being another one, whose line says what to do."""
    has_other_version = bool(differences) and re.match(r"version is \d", differences[0])
    return differences[:1] if has_other_version else differences


async def _check(options: StoreOptions) -> list[str]:
    store = options.make_tables()
    try:
        return await store.check_schema()
    finally:
        await store.close()


@schema.command("print")
@click.option("--dialect", type=click.Choice(["postgresql", "mysql", "sqlite"]), required=True, help="The database.")
@click.option("--from", "since", type=click.Choice(EARLIER), help="Print what upgrades tables of this version.")
@table_options
@as_json
def print_(dialect: Database, since: str | None, *, as_json: bool, **names: Any) -> None:  # noqa: ANN401 -- of the tables
    """Print the SQL that creates or upgrades the tables.

    For your own migrations. It needs no connection and no driver.

    \b
    Example:
      postroom schema print --dialect postgresql --schema shop > 0042_outbox.sql
      postroom schema print --dialect postgresql --schema shop --from 3 > 0043_outbox.sql
    """  # noqa: D301
    statements = schema_statements(dialect, since=since, **names)
    if as_json:
        echo_json({"dialect": dialect, "version": VERSION, "step": STEP, "statements": statements})
    else:
        click.echo(";\n\n".join(statements) + ";")
