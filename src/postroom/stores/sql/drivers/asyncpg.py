"""PostgreSQL through asyncpg."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from ....errors import CommitUnknownError, MissingExtraError, NotInTransactionError, TransactionAbortedError
from ..commit_errors import lost
from ..driver import PROBE, Begun, Driver, Foreign, Steps, require_open
from ..errors import fault_of as classify
from ..sessions import spelled
from ..source import Source
from ..statement import ParamStyle, Result, Statement
from .postgres import PostgresConnector

try:
    import asyncpg
except ImportError as _error:
    raise MissingExtraError("asyncpg", "postgres") from _error

__all__ = ["CONNECTIONS", "POOLS", "AsyncpgConnector", "AsyncpgDriver", "classify"]


class AsyncpgDriver(Driver):
    """asyncpg's connections, pooled or not."""

    dialect = "postgresql"
    style: ClassVar[ParamStyle] = "numeric"
    arrays = True
    takes_along = True

    def require_transaction(self, connection: Foreign) -> Steps[None]:
        if not connection.is_in_transaction():
            raise NotInTransactionError("open one with `async with connection.transaction():`")
        yield from ()

    def execute(self, connection: Foreign, statement: Statement) -> Steps[Result]:
        sql, params = statement.bind(self.style, arrays=True)
        if statement.returns:
            rows = yield connection.fetch(sql, *params)
            return Result(rows, len(rows))
        tag: str = yield connection.execute(sql, *params)
        count = tag.rpartition(" ")[2]
        return Result((), int(count) if count.isdecimal() else 0)

    def acquire(self, pool: Foreign) -> Steps[Foreign]:
        return (yield pool.acquire())

    def release(self, pool: Foreign, connection: Foreign, begun: Begun, *, is_sound: bool) -> Steps[None]:
        if not is_sound:
            connection.terminate()
        yield pool.release(connection)  # it replaces a connection that is closed

    def begin(
        self, connection: Foreign, begun: Begun, *, settings: str = "", along: Statement | None = None
    ) -> Steps[Result | None]:
        begun.handle = transaction = connection.transaction()
        _listen(transaction, settings + (spelled(along) if along else ""))
        yield transaction.start()
        begun.note()
        answer = _answer_of(begun)
        if settings and not answer:
            yield connection.execute(settings)
        return Result((), int(answer.rpartition(" ")[2])) if along and answer else None

    def check(self, connection: Foreign, begun: Begun) -> Steps[None]:
        if self.is_closed(connection, begun):
            raise lost()
        if not _answer_of(begun):
            yield connection.execute(PROBE)  # what was not heard at BEGIN will not be at COMMIT
        require_open(is_open=connection.is_in_transaction())

    def commit(self, connection: Foreign, begun: Begun) -> Steps[None]:
        is_heard = bool(_answer_of(begun))
        yield begun.handle.commit()
        answer = _answer_of(begun)
        if answer == "ROLLBACK":
            raise TransactionAbortedError
        if is_heard and answer != "COMMIT":
            raise CommitUnknownError

    def roll_back(self, connection: Foreign, begun: Begun) -> Steps[None]:
        # A handler that has sent COMMIT has ended it for the server, and not for asyncpg, which would only make
        # savepoints on this connection from then on. After its own commit() asyncpg takes it for ended.
        if connection.is_in_transaction() or not begun.is_ending:
            yield begun.handle.rollback()

    def mark(self, connection: Foreign, begun: Begun) -> Steps[Foreign]:
        savepoint = connection.transaction()
        yield savepoint.start()
        return savepoint

    def keep(self, connection: Foreign, begun: Begun, mark: Foreign) -> Steps[None]:
        yield mark.commit()

    def undo(self, connection: Foreign, begun: Begun, mark: Foreign) -> Steps[None]:
        yield mark.rollback()

    def is_closed(self, connection: Foreign, begun: Begun) -> bool:
        try:
            return bool(connection.is_closed())
        except asyncpg.InterfaceError:
            return True  # its pool takes a lost connection away from whoever has it

    def abort(self, connection: Foreign, begun: Begun) -> None:
        connection.terminate()


class _Heard:
    """Stands between a transaction of asyncpg and its connection: what follows BEGIN, what BEGIN and COMMIT answer.

    asyncpg keeps that to itself; a statement of its own, or to ask before every COMMIT whether the transaction has
    failed, would each cost a round trip. Should another version not go through here, no answer is heard, nothing was
    taken along, and the question is asked.
    """

    #: What it has of its own; everything else is the connection's.
    _connection: Foreign
    _along: str
    answer: str

    def __init__(self, connection: Foreign, along: str) -> None:
        self.__dict__.update(_connection=connection, _along=along, answer="")

    async def execute(self, query: str) -> str:
        """Run a statement, the first with what goes along with it, and keep the answer."""
        own, along = self.__dict__, self._along
        own["answer"] = own["_along"] = ""
        answer = await self._connection.execute(f"{query}{along}")
        own["answer"] = answer = answer if isinstance(answer, str) else ""
        return answer

    def __getattr__(self, name: str) -> Foreign:
        return getattr(self._connection, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._connection, name, value)


def _listen(transaction: Foreign, along: str) -> None:
    if hasattr(transaction, "_connection"):  # it may have another name in another version
        transaction._connection = _Heard(transaction._connection, along)  # noqa: SLF001


def _answer_of(begun: Begun) -> str:
    """Return what the last statement of a transaction's own was answered, nothing if it was not heard."""
    heard = getattr(begun.handle, "_connection", None)
    return heard.answer if isinstance(heard, _Heard) else ""


class AsyncpgConnector(PostgresConnector):
    """Opens connections of asyncpg for a store."""

    driver: Driver = AsyncpgDriver()
    lost: tuple[type[Exception], ...] = (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError)

    async def dial(self, *, prepares: bool) -> Foreign:
        return await asyncpg.connect(self._place.dsn, statement_cache_size=100 if prepares else 0)

    def backend_pid(self, connection: Foreign) -> int:
        pid: int = connection.get_server_pid()
        return pid

    async def listen(self, connection: Foreign, channel: str, wake: Callable[[], None]) -> None:
        closed = asyncio.Event()

        def notified(*_: object) -> None:
            wake()

        def terminated(*_: object) -> None:
            closed.set()

        connection.add_termination_listener(terminated)
        await connection.add_listener(channel, notified)
        wake()  # what was notified before is not notified again
        await closed.wait()


CONNECTIONS: Final[Mapping[str, Driver]] = dict.fromkeys(
    ("asyncpg.Connection", "asyncpg.PoolConnectionProxy"), AsyncpgConnector.driver
)
POOLS: Final[Mapping[str, Callable[[Foreign], Source]]] = {
    "asyncpg.Pool": lambda pool: Source(AsyncpgConnector.driver, pool, is_limited=True)
}
