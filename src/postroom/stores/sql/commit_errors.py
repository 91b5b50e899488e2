"""What errors of database libraries mean for a transaction and for a write, and what is raised in their place."""

from __future__ import annotations

from typing import Final

from ...errors import (
    PostroomError,
    SchemaMissingError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
    TransactionAbortedError,
)
from ...text import without_rows
from .drivers import classify
from .errors import ADVICE

__all__ = ["explain", "hide_parameters", "is_aborted", "lost", "translated", "unreachable", "was_refused"]

#: What an application's own statements may run into; its library describes them best.
_OF_THE_APPLICATION: Final = frozenset({StoreError, StorePermissionError, SchemaMissingError, TransactionAbortedError})
_SHOWN: Final = 300
#: SQLAlchemy's, for whatever comes after an error that was caught; it quotes that error with all its parameters.
_PENDING: Final = "PendingRollbackError"
_ORIGINAL: Final = " Original exception was: "


def translated(error: BaseException, *, is_lost: bool = False) -> PostroomError | None:
    """Return what to raise for an error of a database library that may pass; everything else stays as it is.

    Where the connection is known to be lost, the error is an outage, unless a permission is missing.
    """
    fault = None if isinstance(error, PostroomError) else classify(error)
    if fault is None or fault.instead is not None:
        return fault and fault.instead
    kind = fault.kind
    if fault.is_lost or (is_lost and kind in _OF_THE_APPLICATION and kind is not StorePermissionError):
        kind = StoreUnavailableError
    if kind in _OF_THE_APPLICATION:
        return None
    words = " ".join(without_rows(str(fault.cause)).split())[:_SHOWN]
    return _advising(kind, f"{type(fault.cause).__name__}: {words}")


def unreachable(error: BaseException) -> PostroomError | None:
    """Return what to raise for an error of opening a connection, where also the system says that a server is down."""
    found = translated(error)
    # SQLAlchemy's pool has an error of its own for a connection that was not to be had in time.
    if found is None and (isinstance(error, OSError | EOFError) or type(error).__name__ == "TimeoutError"):
        found = _advising(StoreUnavailableError, f"{type(error).__name__}: {error}")
    return found


def lost() -> PostroomError:
    """Return what to raise if a connection was lost before COMMIT was sent, and its error was caught."""
    return _advising(StoreUnavailableError, "the connection was lost before the commit")


def _advising(kind: type[PostroomError], said: str) -> PostroomError:
    return kind(f"{said}; {ADVICE[kind]}" if kind in ADVICE else said)


def was_refused(error: BaseException) -> bool:
    """Tell whether an error of COMMIT says that nothing was committed."""
    if isinstance(error, PostroomError):
        return True
    fault = classify(error)
    # What no library raised comes from a hook of the caller's, unless it is the network's.
    return not isinstance(error, OSError | EOFError) if fault is None else fault.was_refused


def is_aborted(error: BaseException) -> bool:
    """Tell whether an error says that the transaction had failed or ended before."""
    fault = classify(error)
    return fault is not None and fault.is_aborted


def explain(error: Exception, table: str) -> None:
    """Raise our error for failures of our own statements that have a remedy; others stay as the library raised them."""
    hide_parameters(error)
    fault = classify(error)
    if fault is None:
        return
    if fault.kind is TransactionAbortedError:
        raise TransactionAbortedError from error
    if fault.kind is SchemaMissingError:
        raise SchemaMissingError(table) from error
    if fault.kind is StorePermissionError:
        words = " ".join(without_rows(str(fault.cause)).split())
        denial = StorePermissionError(f"{words}; {ADVICE[StorePermissionError]}")
        denial.table = table
        raise denial from error


def hide_parameters(error: BaseException) -> None:
    """Keep an error of SQLAlchemy's, and those it came from, from showing what was written: they end up in logs."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if hasattr(found, "hide_parameters"):
            found.hide_parameters = True  # pyright: ignore[reportAttributeAccessIssue] -- of SQLAlchemy's StatementError
        elif type(found).__name__ == _PENDING:
            found.args = tuple(str(word).partition(_ORIGINAL)[0] for word in found.args)
        left += [found.__cause__, found.__context__, *getattr(found, "exceptions", ())]
