"""How every transaction goes, whatever library holds it: begun, committed or rolled back, and its connection freed."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, ClassVar

from ....errors import (
    CommitUnknownError,
    StoreUnavailableError,
    TransactionAbortedError,
    TransactionClosedError,
)
from ....transaction import Opening, Transaction
from .outcome import hide_parameters, translated, unreachable, was_refused
from .wakeups import Wake, hint

__all__ = ["Block", "Foreign", "Link", "SQLTransactions", "require_open"]

# Connections of other libraries have no type that could be named without importing them.
Foreign = Any

#: How many seconds a COMMIT or ROLLBACK may take once nobody wants to wait any more, and a broken connection to let go.
PATIENCE = 5.0
FAREWELL = 1.0


async def _on_a_thread(function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 -- whatever it returns
    return await asyncio.to_thread(function, *arguments)


class Link(ABC):
    """One transaction's hold on a connection, from when it is taken until it is given back."""

    is_async: ClassVar[bool] = True
    #: Whether what it hands out calls the wake-up of an outbox by itself.
    is_telling: bool = False
    #: Runs a plain function on a thread that may use the connection.
    call: Callable[..., Awaitable[Any]] = staticmethod(_on_a_thread)
    #: The connection or session that is handed out.
    connection: Foreign = None
    #: A message that may be marked along with BEGIN, and what came of it: see `Transaction`.
    opening: Opening | None = None
    is_admitted: bool | None = None
    #: Whether a savepoint could not be undone, so that nothing may be committed.
    is_doomed: bool = False
    #: Whether it was left in the middle of something: what is wrong with the connection is wrong with no other then.
    is_cut_off: bool = False

    @abstractmethod
    async def begin(self) -> None:
        """Take a connection and begin a transaction."""

    @abstractmethod
    async def commit(self) -> None:
        """Commit, and make sure that it was; raises `CommitUnknownError` and `TransactionAbortedError`."""

    @abstractmethod
    async def roll_back(self) -> None:
        """Roll back everything."""

    @abstractmethod
    async def release(self, *, is_sound: bool) -> None:
        """Give the connection back, or close it for good; also after `begin` has failed."""

    def abort(self) -> None:  # noqa: B027 -- not every library can
        """Break the connection at once, failing whoever waits on it."""

    def is_lost(self) -> bool:
        """Tell whether the library knows that the connection is gone."""
        return False

    @abstractmethod
    async def mark(self) -> Foreign:
        """Make a savepoint."""

    @abstractmethod
    async def keep(self, mark: Foreign) -> None:
        """Forget a savepoint and keep what came after it."""

    @abstractmethod
    async def undo(self, mark: Foreign) -> None:
        """Undo what came after a savepoint."""

    def is_sound_after(self, error: BaseException) -> bool:
        """Tell whether the connection can be used after a block that ended so.

        Whoever was cancelled or timed out, or lost it, may have left half an answer on the wire.
        """
        return not _is_cut_off(error) and not _is_lost(error)

    async def undo_or_doom(self, mark: Foreign, error: BaseException) -> None:
        """Undo what came after a savepoint; if that cannot be, let nothing of the transaction be committed."""
        self.is_doomed = True
        self.is_cut_off = _is_cut_off(error)
        if self.is_sound_after(error):
            # A deadlock of MySQL's has undone the savepoint as well, and a thread may be busy for long.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(PATIENCE):
                    await self.undo(mark)
                self.is_doomed = False

    async def succeed(self, callbacks: Sequence[Wake]) -> None:
        """End the transaction of a block that ended well."""
        is_sound = False
        try:
            try:
                require_open(is_open=not self.is_doomed)
                await self.commit()
            except CommitUnknownError:
                raise
            except BaseException as error:
                is_sound = not _is_lost(error) and await self._has_rolled_back()
                raise
            is_sound = True
            for callback in callbacks:
                hint(callback)  # before a pool resets the connection, which is another round trip
        finally:
            # A pool that cannot reset a connection closes it and raises: how the transaction ended is known by then,
            # and an error now would tell of a commit as if it had failed.
            with contextlib.suppress(Exception):
                await self.release(is_sound=is_sound)

    async def fail(self, error: BaseException) -> None:
        """End the transaction of a block that failed; the error that comes of this is not the one to tell."""
        self.is_cut_off = _is_cut_off(error)
        is_sound = self.is_sound_after(error) and await self._has_rolled_back()
        with contextlib.suppress(Exception):
            await self.release(is_sound=is_sound)

    async def _has_rolled_back(self) -> bool:
        try:
            await self.roll_back()
        except Exception:  # noqa: BLE001 -- whatever it is, the connection is closed, and the server rolls back
            return False
        return True


class _Held(Transaction):
    """A transaction that knows its link."""

    def __init__(self, link: Link, opened_by: SQLTransactions) -> None:
        super().__init__(link.connection, opened_by, is_async=link.is_async, call=link.call)
        self.link = link


class Block:
    """A transaction as a context: begun when it is entered, committed when it ends well, rolled back otherwise."""

    def __init__(self, opened_by: SQLTransactions, opening: Opening | None = None, *, translates: bool = True) -> None:
        """Set up.

        Args:
            opened_by: Makes the link.
            opening: A message that may be marked on the way.
            translates: Whether an error that may pass is told as ours, or as the library tells it.
        """
        self._opened_by = opened_by
        self._opening = opening
        self._translates = translates
        self._held: _Held | None = None

    async def __aenter__(self) -> Transaction:
        """Begin."""
        link = self._opened_by.link()
        link.opening = self._opening
        try:
            await link.begin()
        except BaseException as error:
            # What the server itself has refused is wrong with this transaction alone.
            link.is_cut_off = not isinstance(error, Exception) or _is_cut_off(error) or was_refused(error)
            await _to_its_end(_released(link), link.abort, is_urgent=_is_cut_off(error))
            if self._translates:
                _tell(error, unreachable(error))
            raise
        self._held = _Held(link, self._opened_by)
        self._held.is_admitted = link.is_admitted
        return self._held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the transaction."""
        held = self._held
        if held is None:
            raise TransactionClosedError
        callbacks = held.close()
        if error is not None:
            is_lost = held.link.is_lost()
            # A thread may be busy with a statement that nobody wants any more, and ROLLBACK waits behind it.
            await _to_its_end(held.link.fail(error), held.link.abort, is_urgent=_is_cut_off(error))
            if self._translates:
                _tell(error, translated(error, is_lost=is_lost))
            return
        try:
            await _to_its_end(held.link.succeed(callbacks), held.link.abort)
        except Exception as refusal:
            if self._translates:
                _tell(refusal, translated(refusal))
            raise

    @property
    def is_telling(self) -> bool:
        """Whether what it hands out calls the wake-up of an outbox by itself."""
        return self._held is not None and self._held.link.is_telling


class SQLTransactions:
    """Opens transactions with links of one kind."""

    def __init__(self, link: Callable[[], Link], *, is_async: bool = True) -> None:
        """Set up; ``link`` makes a link that holds nothing yet, and what it hands out may be awaited or not."""
        self.link = link
        self.is_async = is_async

    def begin(self, opening: Opening | None = None) -> Block:
        """Open a transaction; commit it when the block ends well, roll it back whatever else happens.

        Raises:
            CommitUnknownError: The connection broke during COMMIT.
            TransactionAbortedError: A statement failed, its error was caught, and so nothing can be committed.
            StoreContentionError: Other transactions stood in the way; the whole transaction may be tried again.
            StoreUnavailableError: The database cannot be reached.
        """
        return Block(self, opening)

    @contextlib.asynccontextmanager
    async def savepoint(self, transaction: Transaction) -> AsyncGenerator[None]:
        """Make what happens in the block undone alone, if it fails."""
        if not isinstance(transaction, _Held):
            raise TransactionClosedError
        _ = transaction.connection  # which tells of one that has ended
        link = transaction.link
        mark = await link.mark()
        try:
            yield
        except BaseException as error:
            await link.undo_or_doom(mark, error)
            raise
        await link.keep(mark)


def require_open(*, is_open: bool) -> None:
    """Raise if somebody else has ended the transaction: what came after it was not part of it."""
    if not is_open:
        raise TransactionAbortedError(
            "the transaction was no longer open when it was to be committed: a statement has failed and its error was "
            "caught, or a COMMIT or ROLLBACK was sent in it; a handler must do neither"
        )


async def _released(link: Link) -> None:
    with contextlib.suppress(Exception):
        await link.release(is_sound=False)


def _is_cut_off(error: BaseException) -> bool:
    """Tell whether somebody was stopped in the middle of something, by cancellation or by a time limit."""
    return not isinstance(error, Exception) or isinstance(error, TimeoutError)


def _is_lost(error: BaseException) -> bool:
    """Tell whether a library says that its connection is gone.

    Should it answer all the same, it may be the answer to something older.
    """
    return isinstance(translated(error), StoreUnavailableError)


def _tell(error: BaseException, told: Exception | None) -> None:
    """Raise what is told in place of an error, if anything is; neither shows what was written."""
    hide_parameters(error)
    if told is not None:
        raise told from error


async def _to_its_end(work: Coroutine[Any, Any, None], abort: Callable[[], None], *, is_urgent: bool = False) -> None:
    """Wait for work also when cancelled, and go on being cancelled then.

    Once it was cancelled, or if it is urgent, it has a while; then its connection is broken.
    """
    task = asyncio.get_running_loop().create_task(work)
    cancellation: asyncio.CancelledError | None = None
    if not is_urgent:
        try:
            await _ended(task)
        except asyncio.CancelledError as error:
            cancellation = error
        else:
            task.result()
            return
    task.add_done_callback(_forget)
    cancellation = await _waited(task, PATIENCE) or cancellation
    if not task.done():
        abort()
        cancellation = await _waited(task, FAREWELL) or cancellation
    if cancellation is not None:
        raise cancellation


def _ended(task: asyncio.Task[None]) -> asyncio.Future[None]:
    """Return what is done when a task is, and can be cancelled without it: for every message, so not ``shield``."""
    ended = task.get_loop().create_future()

    def tell(_: asyncio.Task[None]) -> None:
        if not ended.done():
            ended.set_result(None)

    task.add_done_callback(tell)
    return ended


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


def _forget(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
