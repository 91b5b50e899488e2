"""Options that several commands have, and those that are read off the signature they are passed to."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import click
from click.core import ParameterSource

from ..errors import ConfigurationError, StoreFileMissingError
from ..message import DEFAULT_NAMESPACE
from ..store import Store
from ..stores import MemoryStore, SQLStore, store_from_url

__all__ = [
    "Duration",
    "StoreOptions",
    "as_json",
    "derived_options",
    "echo_json",
    "new_event_loop",
    "option",
    "run",
    "show_duration",
    "store_options",
    "table_options",
    "without_password",
]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


# Generic for type checkers only: older releases cannot be subscripted.
if TYPE_CHECKING:
    DurationType = click.ParamType[timedelta]
    AnyType = click.ParamType[Any]
else:
    DurationType = AnyType = click.ParamType


class Duration(DurationType):
    """A length of time, such as 500ms, 30s, 5m, 2h or 7d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:  # noqa: ANN401
        """Read a length of time."""
        if isinstance(value, timedelta):
            return value
        read = _DURATION.fullmatch(str(value).strip())
        with suppress(OverflowError):
            if read:
                return timedelta(seconds=float(read[1]) * _UNITS[read[2]])
        return self.fail(f"{value!r} is not a duration; write a number and a unit: 500ms, 30s, 5m, 2h, 7d", param, ctx)


def show_duration(duration: timedelta) -> str:
    """Return a length of time as an option takes it, in the largest unit that keeps it whole."""
    seconds = duration.total_seconds()
    unit = next((unit for unit in ("d", "h", "m", "s") if seconds and seconds % _UNITS[unit] == 0), None)
    return f"{seconds / _UNITS[unit]:g}{unit}" if unit else f"{seconds * 1000:g}ms"


def option(name: str, /, **settings: Any) -> Callable[[F], F]:  # noqa: ANN401 -- those of click.option
    """Declare an option that can also be set in the environment, as POSTROOM_ and its name."""
    variable = "POSTROOM_" + name.removeprefix("--").upper().replace("-", "_")
    settings = {"envvar": variable, "show_envvar": True, "show_default": True, **settings}
    return click.option(name, **settings)


def as_json(command: F) -> F:
    """Give a command the option ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Which store a command works on."""

    url: str
    namespace: str
    table: str
    inbox: str
    schema: str | None
    profile: str | None
    pooler: str | None = None
    #: The options of these that stood on the command line, as they were written there, but without passwords.
    given: tuple[str, ...] = ()

    @property
    def apply_command(self) -> str:
        """The command that creates the tables of this store."""
        return shlex.join(["postroom", "schema", "apply", *self.given])

    def make(self, *, may_create: bool = False, **settings: timedelta) -> Store:
        """Return the store, not yet opened."""
        if self.url.startswith("sqlite:///"):
            _look_for(Path(self.url.removeprefix("sqlite:///")), may_create=may_create)
        names = {"namespace": self.namespace, "table": self.table, "inbox": self.inbox, "schema": self.schema}
        said = {"profile": self.profile, "pooler": self.pooler}
        store = store_from_url(self.url, **names, **{name: value for name, value in said.items() if value}, **settings)
        if isinstance(store, MemoryStore):
            raise ConfigurationError(
                "a memory: store exists only inside one process; pass the URL of a database to --store"
            )
        return store

    def make_tables(self, *, may_create: bool = False) -> SQLStore:
        """Return the store, which has tables, not yet opened."""
        store = self.make(may_create=may_create)
        if not isinstance(store, SQLStore):
            raise ConfigurationError(f"{type(store).__name__} has no tables, so there is nothing to apply or check")
        return store


def _look_for(path: Path, *, may_create: bool) -> None:
    """Refuse a SQLite file that is missing before anything is started, or create an empty one."""
    if may_create:
        with suppress(OSError):  # which the store reports
            path.touch()
    elif not path.exists():
        raise StoreFileMissingError(path)


def table_options(command: F) -> F:
    """Add the options that say what the tables are called."""
    command = option("--schema", help="The database schema that the tables are in (PostgreSQL only).")(command)
    command = option("--inbox", default="postroom_inbox", help="The name of the inbox table.")(command)
    return option("--table", default="postroom_outbox", help="The name of the outbox table.")(command)


def store_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the options that say where the store is, and pass them on as ``store_options``."""

    @functools.wraps(command)
    def with_store(*args: Any, store: str, **rest: Any) -> R:  # noqa: ANN401 -- whatever else the command takes
        chosen = {name: rest.pop(name) for name in ("namespace", "table", "inbox", "schema", "profile", "pooler")}
        given = _given({"store": without_password(store), **chosen})
        return command(*args, store_options=StoreOptions(url=store, **chosen, given=given), **rest)

    with_pooler = option(
        "--pooler",
        type=click.Choice(["transaction"]),
        help="Connect through PgBouncer or another pooler in transaction mode (PostgreSQL only).",
    )(with_store)
    with_profile = option(
        "--profile", metavar="NAME", help="How safe Redis must keep data: durable (the default), replicated, volatile."
    )(with_pooler)
    with_table = table_options(with_profile)
    with_namespace = option("--namespace", default=DEFAULT_NAMESPACE, help="The namespace to work on.")(with_table)
    return option(
        "--store",
        required=True,
        metavar="URL",
        help="The database: postgresql://…, mysql://…, sqlite:///file, redis://…. Put a password into the environment.",
    )(with_namespace)


def _given(values: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return those of the values that come from the command line, as options; the environment holds the others."""
    context = click.get_current_context()
    names = [name for name in values if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    return tuple(word for name in names for word in (f"--{name}", str(values[name])))


def without_password(url: str) -> str:
    """Return a URL with stars in place of its password, and without its parameters, which may hold another one."""
    return re.sub(r"(?<=://)([^:@/]*):.*@", r"\1:***@", url).partition("?")[0]


def derived_options(function: Callable[..., object], *, leave_out: Sequence[str]) -> Callable[[F], F]:
    """Add one option for each keyword of a function, with its type, its default and its words."""
    hints, texts = get_type_hints(function), _documented(function)
    keywords = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in leave_out
    ]

    def decorate(command: F) -> F:
        for keyword in reversed(keywords):
            name = f"--{keyword.name.replace('_', '-')}"
            is_duration = isinstance(keyword.default, timedelta)
            default = show_duration(keyword.default) if is_duration else keyword.default
            command = option(name, type=_type(hints[keyword.name]), default=default, help=texts[keyword.name])(command)
        return command

    return decorate


def _documented(function: Callable[..., object]) -> dict[str, str]:
    """Return what the docstring says of each argument."""
    _, _, arguments = (inspect.getdoc(function) or "").partition("Args:\n")
    return {name: text for name, text in re.findall(r"^ {4}(\w+): (.+)$", arguments, re.MULTILINE)}  # noqa: C416


def _type(hint: Any) -> AnyType:  # noqa: ANN401 -- a type as it was written
    if get_origin(hint) in {UnionType, Union}:
        hint = next(choice for choice in get_args(hint) if choice is not type(None))
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    return {int: click.INT, timedelta: Duration(), UUID: click.UUID}[hint]


def echo_json(value: object) -> None:
    """Print a value as one line of JSON."""
    click.echo(json.dumps(value))


def run(coroutine: Callable[[], Awaitable[R]]) -> R:
    """Run a coroutine to its end on the fastest event loop there is."""

    async def start() -> R:
        return await coroutine()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(start())


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop of uvloop if that is installed."""
    try:
        import uvloop  # noqa: PLC0415 -- an extra
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
