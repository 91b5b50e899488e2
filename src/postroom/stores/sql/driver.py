"""The port of database libraries: what each says once of its connections, its transactions and its pools, as steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias, TypeVar, cast

from ...errors import TransactionAbortedError
from ...events import CallbackFailed, guarded, log_event
from ...text import describe
from .statement import ParamStyle, Result, Script, Statement

__all__ = [
    "ANCHOR",
    "PROBE",
    "RELEASE",
    "Begun",
    "Driver",
    "Foreign",
    "Steps",
    "Wake",
    "atomically",
    "finish",
    "finish_async",
    "hint",
    "require_open",
    "steps_of",
    "to_its_end",
]

T = TypeVar("T")

# Connections of other libraries have no type that could be named without importing them.
Foreign = Any
#: Yields what a library returned, which an async one wants awaited, and is sent the answer. So each operation is
#: written once for both halves of a library.
Steps: TypeAlias = Generator[Any, Any, T]
#: Called after a commit, such as the wake-up of a dispatcher.
Wake: TypeAlias = Callable[[], object]

#: Fails in a transaction of PostgreSQL's that has failed; nothing else tells before COMMIT.
PROBE: Final = "SELECT 1"
#: MySQL ends a whole transaction at a deadlock, SQLite some at a full disk, a handler by a COMMIT of its own, and what
#: follows is another one: only a savepoint that was made at the start, and is missing by then, shows it.
ANCHOR: Final = "SAVEPOINT postroom"
RELEASE: Final = "RELEASE SAVEPOINT postroom"


def finish(steps: Steps[T]) -> T:
    """Take steps to their end where the library's calls return at once."""
    try:
        answer = next(steps)
        while True:
            answer = steps.send(answer)
    except StopIteration as end:
        return cast("T", end.value)


async def finish_async(steps: Steps[T]) -> T:
    """Take steps to their end, awaiting each; an error is raised in them, so that they may clean up."""
    try:
        awaitable = next(steps)
        while True:
            try:
                answer = await awaitable
            except GeneratorExit:
                # The event loop has been closed: nothing can be awaited any more.
                with suppress(RuntimeError):
                    steps.close()
                raise
            except BaseException as error:  # noqa: BLE001 -- raised again by the steps
                awaitable = steps.throw(error)
            else:
                awaitable = steps.send(answer)
    except StopIteration as end:
        return cast("T", end.value)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Wait for work that is done on a thread, also when cancelled: the thread goes on in any case.

    A statement of SQLite's whose rows nobody fetches keeps the database locked, even when its connection is closed.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # the caller has other worries
        raise


def steps_of(script: Script[T], execute: Callable[[Statement], Steps[Result]]) -> Steps[T]:
    """Run a script to its end; an error of a statement is raised inside it, so that it may clean up."""
    try:
        statement = next(script)
        while True:
            try:
                result = yield from execute(statement)
            except BaseException as error:  # noqa: BLE001 -- raised again by the script
                statement = script.throw(error)
            else:
                statement = script.send(result)
    except StopIteration as end:
        return cast("T", end.value)


@dataclass(slots=True)
class Begun:
    """What a driver keeps of one transaction."""

    #: The library's own object for it, if it has one.
    handle: Foreign = None
    #: Whether BEGIN was answered, and when.
    is_begun: bool = False
    since: float = 0.0
    #: Whether COMMIT was sent.
    is_ending: bool = False
    savepoints: int = 0
    #: What `Driver.prepare_abort` found.
    wire: Foreign = None

    def note(self) -> None:
        """Take note that BEGIN was answered."""
        self.is_begun, self.since = True, time.monotonic()


class Driver:
    """One library: how to run statements on its connections, how to use its pools, how its transactions begin and end.

    A driver keeps nothing. The defaults are those of a library of the DB-API, whose transactions begin and end by
    statements and calls of the connection.
    """

    dialect: ClassVar[str]
    style: ClassVar[ParamStyle] = "format"
    #: Whether a list is passed as one parameter, an array.
    arrays: ClassVar[bool] = False
    #: Whether its calls are awaited.
    is_async: bool = True
    #: Whether `after_commit` is called by the library, and so also where the application commits.
    has_commit_hook: bool = False
    #: Whether `begin` can run the statement that marks a message along with BEGIN.
    takes_along: bool = False
    #: Statements of BEGIN.
    begins_with: ClassVar[str] = "BEGIN"

    # -- statements on any connection --------------------------------------------------------------------------------

    def dialect_of(self, connection: Foreign) -> str:
        """Return the name of the dialect that a connection speaks."""
        return self.dialect

    def require_transaction(self, connection: Foreign) -> Steps[None]:
        """Raise `NotInTransactionError` unless a write would be part of a transaction."""
        raise NotImplementedError

    def cursor(self, connection: Foreign) -> Foreign:
        """Return a cursor that answers with tuples, whatever the caller has set."""
        return connection.cursor()

    def execute(self, connection: Foreign, statement: Statement) -> Steps[Result]:
        """Run one statement."""
        sql, params = statement.bind(self.style, arrays=self.arrays)
        cursor = self.cursor(connection)
        try:
            yield cursor.execute(sql, params or None)
            rows = (yield cursor.fetchall()) if statement.returns else ()
            return Result(rows, cursor.rowcount)
        finally:
            yield cursor.close()

    def command(self, connection: Foreign, sql: str) -> Steps[None]:
        """Run a statement that has neither parameters nor rows."""
        yield from self.execute(connection, Statement(sql, {}))

    def run(self, connection: Foreign, script: Script[T]) -> Steps[T]:
        """Run a script; an error of a statement is raised inside it."""
        return steps_of(script, partial(self.execute, connection))

    def in_one_hop(self, connection: Foreign, work: Callable[[Foreign], Steps[T]]) -> Steps[T]:
        """Take several steps on a connection, in one go where each would cost a change of thread or greenlet."""
        return work(connection)

    def after_commit(self, connection: Foreign, wake: Wake) -> None:
        """Call ``wake`` after the commit, if the library tells of it."""

    # -- an application's pool ---------------------------------------------------------------------------------------

    def acquire(self, pool: Foreign) -> Steps[Foreign]:
        """Take a connection that no other transaction uses."""
        raise NotImplementedError

    def release(self, pool: Foreign, connection: Foreign, begun: Begun, *, is_sound: bool) -> Steps[None]:
        """Give a connection back; one that is not sound is closed."""
        raise NotImplementedError

    # -- a transaction -----------------------------------------------------------------------------------------------

    def begin(
        self, connection: Foreign, begun: Begun, *, settings: str = "", along: Statement | None = None
    ) -> Steps[Result | None]:
        """Begin a transaction and set it.

        Return what the statement ``along`` was answered, None if it was not run.
        """
        yield from self.command(connection, self.begins_with)
        begun.note()
        yield from self.command(connection, ANCHOR)
        return None

    def check(self, connection: Foreign, begun: Begun) -> Steps[None]:
        """Raise if the transaction has failed or ended, so that a COMMIT would not commit what was written."""
        yield from self.command(connection, RELEASE)

    def commit(self, connection: Foreign, begun: Begun) -> Steps[None]:
        """Commit; raise `TransactionAbortedError` or `CommitUnknownError` for an answer that means so."""
        yield connection.commit()

    def roll_back(self, connection: Foreign, begun: Begun) -> Steps[None]:
        """Roll back everything."""
        yield connection.rollback()

    def mark(self, connection: Foreign, begun: Begun) -> Steps[Foreign]:
        """Make a savepoint."""
        begun.savepoints += 1
        name = f"postroom_nested_{begun.savepoints}"
        yield from self.command(connection, f"SAVEPOINT {name}")
        return name

    def keep(self, connection: Foreign, begun: Begun, mark: Foreign) -> Steps[None]:
        """Forget a savepoint and keep what came after it."""
        yield from self.command(connection, f"RELEASE SAVEPOINT {mark}")

    def undo(self, connection: Foreign, begun: Begun, mark: Foreign) -> Steps[None]:
        """Undo what came after a savepoint."""
        yield from self.command(connection, f"ROLLBACK TO SAVEPOINT {mark}")
        yield from self.command(connection, f"RELEASE SAVEPOINT {mark}")

    def is_closed(self, connection: Foreign, begun: Begun) -> bool:
        """Tell whether the library knows that the connection is closed."""
        raise NotImplementedError

    def prepare_abort(self, connection: Foreign, begun: Begun) -> None:
        """Look up, at BEGIN, what `abort` needs and other threads cannot ask a connection that is busy."""

    def abort(self, connection: Foreign, begun: Begun) -> None:
        """Break a connection at once, from any thread, failing whatever waits on it."""
        raise NotImplementedError

    def free(self, connection: Foreign) -> None:
        """Give back what is left of a broken connection, once nothing waits on it."""


def require_open(*, is_open: bool) -> None:
    """Raise if the transaction that was begun has ended: what came after its end was not part of it."""
    if not is_open:
        raise TransactionAbortedError(
            "the transaction was no longer open when it was to be committed: a statement has failed and its error was "
            "caught, or a COMMIT or ROLLBACK was sent in it; a handler must do neither"
        )


#: Raises nothing, even if a filter of the log does: the commit has succeeded.
_report: Final = guarded(log_event)


def hint(wake: Wake) -> None:
    """Call ``wake``; a hint that fails costs latency, and must not look like a commit that failed."""
    try:
        wake()
    except Exception as error:  # noqa: BLE001 -- whatever a function of the user raises is reported
        _report(CallbackFailed(describe(error), error))


def atomically(driver: Driver, connection: Foreign, script: Script[T], begin: str) -> Steps[T]:
    """Run a script as one transaction of the store's own."""
    yield from driver.command(connection, begin)
    try:
        result = yield from driver.run(connection, script)
        yield from driver.command(connection, "COMMIT")
    except Exception:
        with suppress(Exception):  # the first error says more, and some end the transaction by themselves
            yield from driver.command(connection, "ROLLBACK")
        raise
    return result
