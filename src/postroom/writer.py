"""What writes through the connections of other libraries, found by the package that their class comes from."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from .errors import UnknownConnectionError
from .message import Message

if TYPE_CHECKING:
    from .decisions import Question
    from .inbox import Inbox
    from .outbox import Addition, Answer, Outbox

__all__ = ["Writer", "writer_of"]

R = TypeVar("R")

#: How connections are written through that are not of an SQL database, by the package that their class comes from.
_WRITERS: Final[Mapping[str, str]] = {
    "redis": "postroom.stores.redis.writer",
    "postroom.stores.redis": "postroom.stores.redis.inbox",
    "postroom.stores.memory": "postroom.stores.memory",
}
_ACCEPTED: Final = (
    "asyncpg, psycopg (sync or async), sqlite3, aiosqlite, asyncmy, PyMySQL, mysqlclient, SQLAlchemy Session, "
    "AsyncSession, Connection or AsyncConnection, Django's connection, redis-py's client or pipeline"
)
_POOLS: Final = frozenset(
    {"AsyncConnectionPool", "AsyncEngine", "ConnectionPool", "Engine", "Pool", "sessionmaker", "async_sessionmaker"}
)


class Writer(Protocol):
    """Writes through one library's connections, in the caller's transaction; the answers of async ones are awaited."""

    def write(
        self,
        connection: Any,  # noqa: ANN401 -- each writer knows its own
        additions: Sequence[Addition],
        outbox: Outbox,
        answer: Answer[R],
        *,
        outside_transaction: bool,
    ) -> R | Coroutine[Any, Any, R]:
        """Add messages to the outbox; never commit. Return ``answer(results)``, which spares `add` a coroutine."""
        ...

    def admit(self, connection: Any, inbox: Inbox, message: Message) -> bool | Awaitable[bool]:  # noqa: ANN401
        """Mark a message as handled; tell whether it was not before."""
        ...

    def has(self, connection: Any, inbox: Inbox, message: Message) -> bool | Awaitable[bool]:  # noqa: ANN401
        """Tell whether a message is marked as handled."""
        ...

    def purge_inbox(self, connection: Any, inbox: Inbox, limit: int) -> int | Awaitable[int]:  # noqa: ANN401
        """Delete marks past their retention; return how many."""
        ...

    def bury(self, connection: Any, inbox: Inbox, message: Message, error: str) -> Awaitable[None] | None:  # noqa: ANN401
        """Write a dead letter, unless there is one of this consumer and message."""
        ...

    def ask(self, connection: Any, outbox: Outbox, question: Question) -> Any:  # noqa: ANN401
        """Answer a question about the tickets of an outbox, in one atomic step; `Decisions` says with what."""
        ...


def writer_of(connection: object) -> Writer:
    """Return what writes through a connection; raise `UnknownConnectionError` if nothing does."""
    writer = _finder(type(connection))(connection)  # type: ignore[arg-type]  # mypy takes a class for unhashable
    if writer is None:
        is_pool = not _POOLS.isdisjoint(base.__name__ for base in type(connection).__mro__)
        hint = ", which hands out connections but is none: acquire one and begin a transaction" if is_pool else ""
        raise UnknownConnectionError(connection, _ACCEPTED, hint)
    return writer


@lru_cache(maxsize=256)
def _finder(kind: type) -> Callable[[object], Writer | None]:
    """Return what finds the writer for a kind of connection, by the package that its class or a base comes from."""
    found = "postroom.stores.sql.writer"
    for base in kind.__mro__:
        package = base.__module__
        while package and package not in _WRITERS:
            package = package.rpartition(".")[0]
        if package:
            found = _WRITERS[package]
            break
    return cast("Callable[[object], Writer | None]", importlib.import_module(found).writer_for)
