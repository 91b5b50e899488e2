"""The transaction that a handler runs in: begun and ended around it, found by adapters, unknown to the handler."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from .errors import NoTransactionError, TransactionClosedError
from .message import Message

if TYPE_CHECKING:
    from .inbox import Inbox

__all__ = [
    "ClaimState",
    "ClaimingTransactions",
    "InboxClaim",
    "Opening",
    "Transaction",
    "Transactions",
    "current_connection",
    "current_transaction",
    "enter",
    "entered",
    "hand_over",
    "handed_over",
    "in_transaction",
    "leave",
    "required_transaction",
    "running_on",
    "take_back",
    "transactions_of",
]

C = TypeVar("C")
T = TypeVar("T")

_current: ContextVar[Transaction | None] = ContextVar("postroom_transaction", default=None)
#: What an inbox hands over to the transaction that opens inside of it, and who opens that.
_handed_over: ContextVar[tuple[Transactions, Opening] | None] = ContextVar("postroom_handed_over", default=None)


#: How far a claim is: held by its inbox, taken over by a transaction, given up when that was rolled back, done when it
#: was committed; or a duplicate, if the message was claimed again and another worker had handled it by then.
ClaimState: TypeAlias = Literal["held", "taken", "given_up", "done", "duplicate"]


class InboxClaim(Protocol):
    """A message that an inbox has claimed before its transaction begins.

    The transaction that is opened with it takes it over: a commit marks the message as handled in the same step, a
    rollback gives the claim up. Opened once more, after contention, it claims the message again.
    """

    state: ClaimState

    async def take(self) -> Transaction:
        """Return the transaction that completes the claim, which is claimed again if it was given up."""
        ...

    async def give_up(self) -> None:
        """Let the message be handled again at once, unless a transaction has taken it over."""
        ...


class Opening(NamedTuple):
    """What a transaction is opened for: a message that its inbox has to mark first, or has claimed already."""

    inbox: Inbox
    message: Message
    claim: InboxClaim | None = None


class Transaction:
    """An open transaction and what holds it; to use it after its end raises `TransactionClosedError`."""

    def __init__(
        self,
        connection: Any,  # noqa: ANN401 -- whatever the library calls a connection
        opened_by: Transactions,
        *,
        is_async: bool = True,
        call: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        self._connection = connection
        self._is_async = is_async
        self._is_open = True
        self._callbacks: list[Callable[[], object]] = []
        #: What the transaction was opened on; a nested one on the same joins it.
        self.opened_by = opened_by
        self._call = call
        #: Tells whether the transaction was committed, for a `CommitUnknownError`.
        self.witness: Callable[[], Awaitable[bool]] | None = None
        #: Whether nothing of the handler has happened yet, so that an error says nothing about its message.
        self.is_preparing: bool = False
        #: Whether its `Opening` was marked now, or False if it was before; None if nobody has looked yet.
        self.is_admitted: bool | None = None

    @property
    def connection(self) -> Any:  # noqa: ANN401
        """The connection or session that holds the transaction."""
        if not self._is_open:
            raise TransactionClosedError
        return self._connection

    def do(self, function: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:  # noqa: ANN401 -- whatever it takes
        """Call a function with the connection: awaited if the connection is async, on its thread if it is not."""
        if self._is_async:
            awaitable: Awaitable[Any] = function(self.connection, *arguments)
            return awaitable
        return self.call(function, self.connection, *arguments)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 -- whatever it returns
        """Run a plain function on a thread that may use the connection; after the end it is another transaction's."""
        if not self._is_open:
            raise TransactionClosedError
        return await self._call(function, *arguments)

    def after_commit(self, callback: Callable[[], object]) -> None:
        """Have something called once the transaction is committed; never if it is not."""
        if not self._is_open:
            raise TransactionClosedError
        self._callbacks.append(callback)

    def close(self) -> list[Callable[[], object]]:
        """Let nobody use the transaction any more; return what is to be called if it was committed."""
        self._is_open = False
        callbacks, self._callbacks = self._callbacks, []
        return callbacks


class Transactions(Protocol):
    """Opens transactions on a pool, an engine, a file: one class for each library."""

    def begin(self, opening: Opening | None = None) -> contextlib.AbstractAsyncContextManager[Transaction]:
        """Open a transaction; commit it when the block ends well, roll it back whatever else happens.

        What can mark a message on the way, where that saves a round trip, says so in the transaction; whatever cannot
        leaves it to the inbox.

        Raises:
            CommitUnknownError: The connection broke during COMMIT.
            TransactionAbortedError: A statement failed, its error was caught, and so nothing can be committed.
            StoreContentionError: Other transactions stood in the way; the whole transaction may be tried again.
        """
        ...

    def savepoint(self, transaction: Transaction) -> contextlib.AbstractAsyncContextManager[None]:
        """Make what happens in the block undone alone, if it fails."""
        ...


@runtime_checkable
class ClaimingTransactions(Transactions, Protocol):
    """Transactions that complete what an inbox has claimed before they begin: those of Redis."""

    async def claim(self, inbox: Inbox, message: Message) -> InboxClaim | None:
        """Claim a message; return None if it was handled before.

        Raises:
            MessageBusyError: Another worker handles it.
            StoreError: The server refused, or no answer came.
        """
        ...


def hand_over(transactions: Transactions, opening: Opening) -> Token[tuple[Transactions, Opening] | None]:
    """Have the next of these transactions opened with a claim, until `take_back`."""
    return _handed_over.set((transactions, opening))


def handed_over(transactions: Transactions) -> Opening | None:
    """Return what these transactions have to be opened with; None if there is no claim that one could take over."""
    handed = _handed_over.get()
    if handed is None or handed[0] is not transactions:
        return None
    claim = handed[1].claim
    return handed[1] if claim is not None and claim.state in {"held", "given_up"} else None


def take_back(token: Token[tuple[Transactions, Opening] | None]) -> None:
    """Hand nothing over any more."""
    _handed_over.reset(token)


def current_transaction() -> Transaction:
    """Return the transaction that this code runs in; raise `NoTransactionError` if there is none."""
    return required_transaction("current_transaction()")


def required_transaction(who: str) -> Transaction:
    """Return the transaction that this code runs in, for ``who``, which cannot do without one."""
    transaction = _current.get()
    if transaction is None:
        raise NoTransactionError(who)
    return transaction


def in_transaction() -> Transaction | None:
    """Return the transaction that this code runs in, None if there is none."""
    return _current.get()


def current_connection(fallback: C) -> C:
    """Return what holds the current transaction, or ``fallback`` where there is none.

    An adapter calls it with its own pool or connection, and works inside a handler's transaction and outside alike.
    In a transaction that has ended it raises `TransactionClosedError`: what comes late must not be written alone.
    """
    transaction = _current.get()
    return fallback if transaction is None else transaction.connection


def transactions_of(pool: object) -> Transactions:
    """Return what opens transactions on a pool, an engine, a file or a store.

    Raises:
        UnknownConnectionError: Nothing is known of this kind of pool.
    """
    opener = getattr(pool, "transactions", None)
    if opener is not None:
        return cast("Transactions", opener())
    packages = {base.__module__.partition(".")[0] for base in type(pool).__mro__}
    kind = "redis" if "redis" in packages else "sql"
    return cast("Transactions", importlib.import_module(f"postroom.stores.{kind}.transactions").transactions_for(pool))


def running_on() -> Callable[..., Awaitable[Any]]:
    """Return what runs plain functions on a thread that may use the current transaction, if there is one."""
    transaction = _current.get()
    return asyncio.to_thread if transaction is None else transaction.call


@contextlib.contextmanager
def entered(transaction: Transaction) -> Generator[None]:
    """Make a transaction the current one."""
    token = enter(transaction)
    try:
        yield
    finally:
        leave(token)


def enter(transaction: Transaction) -> Token[Transaction | None]:
    """Make a transaction the current one until `leave`; where every microsecond counts, instead of `entered`."""
    return _current.set(transaction)


def leave(token: Token[Transaction | None]) -> None:
    """Make the transaction before it the current one again."""
    _current.reset(token)
