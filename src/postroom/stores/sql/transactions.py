"""Transactions on the pools, engines and files of database libraries, and on connections of a store's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final
from weakref import WeakValueDictionary

from ...deadline import Limit, Within
from ...errors import (
    CommitUnknownError,
    StoreTimeoutError,
    StoreUnavailableError,
    TransactionAbortedError,
    TransactionClosedError,
    UnknownConnectionError,
)
from ...transaction import Opening, Transaction
from .commit_errors import explain, hide_parameters, is_aborted, translated, unreachable, was_refused
from .driver import Begun, Foreign, Steps, Wake, hint, require_open
from .drivers import key_of, source_of
from .source import Lane, Source
from .writer import inbox_dialect

__all__ = ["SQLTransactions", "UnitOfWork", "forget", "transaction", "transactions_for"]

#: How many seconds a COMMIT or ROLLBACK may take once its caller was cancelled, and a broken connection to end.
PATIENCE = 5.0
FAREWELL = 1.0
_ASYNC_POOLS: Final = (
    "asyncmy's Pool, asyncpg's Pool, SQLAlchemy's AsyncEngine or async_sessionmaker, psycopg's AsyncConnectionPool"
)

#: Those that are in use, so that a handler finds the transaction of its own pool; they keep their pools alive.
_in_use: Final[WeakValueDictionary[object, SQLTransactions]] = WeakValueDictionary()


def transactions_for(pool: object) -> SQLTransactions:
    """Return what opens transactions on a pool, an engine or a file: the same for the same one.

    Raises:
        UnknownConnectionError: No driver knows this kind of pool.
    """
    key = key_of(pool)
    known = _in_use.get(key)
    if known is None:
        known = _in_use[key] = SQLTransactions(source_of(pool))
    return known


@contextlib.asynccontextmanager
async def transaction(pool: Foreign, wake: Wake | None) -> AsyncGenerator[Foreign]:
    """Open a transaction for `Outbox.transaction`, yield its connection, commit it and call ``wake``.

    Errors stay as the library raised them.
    """
    transactions = transactions_for(pool)
    if not transactions.is_async:
        raise UnknownConnectionError(pool, _ASYNC_POOLS)
    async with UnitOfWork(transactions, translates=False) as opened:
        if wake is not None and not transactions.source.driver.has_commit_hook:
            opened.after_commit(wake)
        yield opened.connection


class SQLTransactions:
    """Opens transactions on the connections of one source."""

    def __init__(self, source: Source) -> None:
        self.source = source
        #: Whether the connections that it hands out are awaited.
        self.is_async: bool = source.driver.is_async

    def begin(self, opening: Opening | None = None) -> UnitOfWork:
        """Open a transaction; commit it when the block ends well, roll it back whatever else happens.

        Raises:
            CommitUnknownError: The connection broke during COMMIT.
            TransactionAbortedError: A statement failed, its error was caught, and so nothing can be committed.
            StoreContentionError: Other transactions stood in the way; the whole transaction may be tried again.
            StoreUnavailableError: The database cannot be reached.
        """
        return UnitOfWork(self, opening)

    def savepoint(self, transaction: Transaction) -> contextlib.AbstractAsyncContextManager[None]:
        """Make what happens in the block undone alone, if it fails."""
        if not isinstance(transaction, _Held):
            raise TransactionClosedError
        _ = transaction.connection  # which raises if it has ended
        return transaction.unit.savepoint()

    def limit_to(self, timeout: timedelta | None) -> None:
        """Take note of how long the handlers of a consumer have."""
        self.source.limit_to(timeout)


class _Held(Transaction):
    """A transaction that knows its unit of work."""

    def __init__(self, unit: UnitOfWork, opened_by: SQLTransactions, lane: Lane) -> None:
        super().__init__(unit.connection, opened_by, is_async=opened_by.is_async, call=lane.call)
        self.is_admitted = unit.is_admitted
        self.unit = unit


class UnitOfWork:
    """A transaction as a context: begun when it is entered, committed when it ends well, rolled back otherwise.

    What it holds is assigned inside the steps, which may run on a thread: who is cancelled while they do finds what to
    give back.
    """

    def __init__(self, opened_by: SQLTransactions, opening: Opening | None = None, *, translates: bool = True) -> None:
        """Set up.

        Args:
            opened_by: Whose source has the connections.
            opening: A message that may be marked along with BEGIN.
            translates: Whether an error that may pass is raised as one of postroom, or as the library raised it.
        """
        self._opened_by = opened_by
        self._source = opened_by.source
        self._driver = opened_by.source.driver
        self._opening = opening
        self._translates = translates
        self._lane: Lane | None = None
        self._begun = Begun()
        self._held: _Held | None = None
        #: The connection or session, from when it is taken until it is given back.
        self.connection: Foreign = None
        #: Whether the message of the opening was marked now, None if the inbox has to do it.
        self.is_admitted: bool | None = None
        #: Whether a savepoint could not be undone, so that nothing may be committed.
        self._is_doomed = False
        #: Whether it was left in the middle of something: what is wrong with its connection is wrong with no other.
        self._is_cut_off = False

    async def __aenter__(self) -> Transaction:
        """Begin."""
        try:
            self._lane = lane = await self._source.lane()
            await lane.run(self._beginning())
        except BaseException as error:
            # What the server itself has refused is wrong with this transaction alone.
            self._is_cut_off = not isinstance(error, Exception) or _is_cut_off(error) or was_refused(error)
            await _to_its_end(self._release(is_sound=False), self._abort, is_urgent=_is_cut_off(error))
            if self._translates:
                _raise_instead(error, unreachable(error))
            raise
        self._held = _Held(self, self._opened_by, lane)
        return self._held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the transaction."""
        held, self._held = self._held, None  # which know each other, and are not left to the garbage collector so
        if held is None:
            raise TransactionClosedError
        callbacks = held.close()
        if error is not None:
            is_lost = self._driver.is_closed(self.connection, self._begun)
            # A thread may be busy with a statement of a caller that was cancelled, and ROLLBACK waits behind it.
            await _to_its_end(self._fail(error), self._abort, is_urgent=_is_cut_off(error))
            if self._translates:
                _raise_instead(error, translated(error, is_lost=is_lost))
            return
        try:
            await _to_its_end(self._succeed(callbacks), self._abort)
        except Exception as refusal:
            if self._translates:
                _raise_instead(refusal, translated(refusal))
            raise

    # -- the steps ---------------------------------------------------------------------------------------------------

    def _beginning(self) -> Steps[None]:
        self.connection = yield from self._source.acquire()
        limit = self._source.limit
        if limit is None:
            yield from self._starting()
            return
        work = Within(limit)
        try:
            yield from self._starting()
        except BaseException as error:
            if work.end(error) is error:
                raise
            raise _no_answer(limit) from None
        work.end()

    def _starting(self) -> Steps[None]:
        driver, connection, settings = self._driver, self.connection, self._source.settings
        opening = self._opening
        if opening is None or not driver.takes_along:
            yield from driver.begin(connection, self._begun, settings=settings)
            return
        inbox = opening.inbox
        dialect = inbox_dialect(driver.dialect, inbox)
        script = dialect.admit(inbox.consumer, inbox.known(opening.message))
        try:
            answer = yield from driver.begin(connection, self._begun, settings=settings, along=next(script))
        except Exception as error:
            explain(error, dialect.identifiers["inbox"])
            raise
        if answer is not None:
            try:
                script.send(answer)
            except StopIteration as end:
                self.is_admitted = end.value

    def _committing(self) -> Steps[None]:
        driver, connection, begun = self._driver, self.connection, self._begun
        try:
            yield from driver.check(connection, begun)
        except Exception as error:
            # PostgreSQL answers the COMMIT of a failed transaction with a silent ROLLBACK.
            if is_aborted(error):
                raise TransactionAbortedError from error
            raise
        begun.is_ending = True
        try:
            yield from driver.commit(connection, begun)
        except Exception as error:
            if was_refused(error):
                raise
            raise CommitUnknownError from error

    def _releasing(self, *, is_sound: bool) -> Steps[None]:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        if not is_sound and not self._is_cut_off:
            self._source.on_loss()
        yield from self._source.release(connection, self._begun, is_sound=is_sound)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _succeed(self, callbacks: Sequence[Wake]) -> None:
        is_sound = False
        try:
            try:
                require_open(is_open=not self._is_doomed)
                await self._run(self._committing())
            except CommitUnknownError:
                raise
            except BaseException as error:
                is_sound = not _is_lost(error) and await self._has_rolled_back()
                raise
            is_sound = True
            for callback in callbacks:
                hint(callback)  # before a pool resets the connection, which is another round trip
        finally:
            # An error of the release says nothing about the transaction, which has ended by now.
            await self._release(is_sound=is_sound)

    async def _fail(self, error: BaseException) -> None:
        self._is_cut_off = _is_cut_off(error)
        await self._release(is_sound=self._is_sound_after(error) and await self._has_rolled_back())

    def _is_sound_after(self, error: BaseException) -> bool:
        """Tell whether the connection can be used after a block that ended so.

        A statement that was cancelled or timed out, or whose connection was lost, may have left half an answer on the
        wire; what goes on in any case has not.
        """
        goes_on = self._lane is not None and self._lane.goes_on
        return goes_on or not (_is_cut_off(error) or _is_lost(error))

    async def _has_rolled_back(self) -> bool:
        try:
            await self._run(self._driver.roll_back(self.connection, self._begun))
        except Exception:  # noqa: BLE001 -- whatever it is, the connection is closed, and the server rolls back
            return False
        return True

    async def _release(self, *, is_sound: bool) -> None:
        if self._lane is None:
            return
        try:
            # A pool that cannot reset a connection closes it and raises.
            with contextlib.suppress(Exception):
                await self._run(self._releasing(is_sound=is_sound))
        finally:
            self._lane.give_back()

    def _abort(self) -> None:
        if self.connection is not None and (self._begun.is_begun or not self._source.is_shared):
            self._driver.abort(self.connection, self._begun)

    async def _run(self, steps: Steps[Any]) -> Any:  # noqa: ANN401 -- whatever they return
        if self._lane is None:
            raise TransactionClosedError
        return await self._lane.run(steps)

    # -- savepoints --------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncGenerator[None]:
        """Make what happens in the block undone alone, if it fails; if that cannot be, nothing may be committed."""
        driver, connection, begun = self._driver, self.connection, self._begun
        try:
            mark = await self._run(driver.mark(connection, begun))
        except BaseException as error:
            if _is_cut_off(error):
                # A thread goes on with it, and what comes later would be part of a savepoint that nobody leaves.
                self._is_doomed = self._is_cut_off = True
            raise
        try:
            yield
        except BaseException as error:
            self._is_doomed = True
            self._is_cut_off = _is_cut_off(error)
            if self._is_sound_after(error):
                # A deadlock of MySQL's has undone the savepoint as well, and a thread may be busy for long.
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(PATIENCE):
                        await self._run(driver.undo(connection, begun, mark))
                    self._is_doomed = False
            raise
        await self._run(driver.keep(connection, begun, mark))


def _no_answer(limit: Limit) -> StoreTimeoutError:
    return StoreTimeoutError(
        f"no transaction began within {limit.seconds:g} s: the database does not answer, or another "
        "transaction has marked the same message and is still open"
    )


def _is_cut_off(error: BaseException) -> bool:
    """Tell whether something was stopped in the middle, by cancellation or by a time limit."""
    return not isinstance(error, Exception) or isinstance(error, TimeoutError)


def _is_lost(error: BaseException) -> bool:
    """Tell whether a library says that its connection is gone.

    Should it answer all the same, it may be the answer to something older.
    """
    return isinstance(translated(error), StoreUnavailableError)


def _raise_instead(error: BaseException, instead: Exception | None) -> None:
    """Raise another error in place of one, if there is one; neither shows what was written."""
    hide_parameters(error)
    if instead is not None:
        raise instead from error


async def _to_its_end(work: Coroutine[Any, Any, None], abort: Callable[[], None], *, is_urgent: bool = False) -> None:
    """Wait for work also when cancelled, and go on being cancelled then.

    Once it was cancelled, or if it is urgent, it has a while; then its connection is broken.
    """
    task = asyncio.get_running_loop().create_task(work)
    cancellation: asyncio.CancelledError | None = None
    if not is_urgent:
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancellation = error
        else:
            return
    task.add_done_callback(forget)
    cancellation = await _waited(task, PATIENCE) or cancellation
    if not task.done():
        abort()
        cancellation = await _waited(task, FAREWELL) or cancellation
    if cancellation is not None:
        raise cancellation


async def _waited(task: asyncio.Task[None], patience: float) -> asyncio.CancelledError | None:
    """Wait for a task for a while, however often this one is cancelled meanwhile; return how it was."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    cancellation: asyncio.CancelledError | None = None
    while not task.done() and (left := deadline - loop.time()) > 0:
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError as error:
            cancellation = error
    return cancellation


def forget(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a task, so that asyncio does not report it as never retrieved."""
    if not task.cancelled():
        task.exception()
