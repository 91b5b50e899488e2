"""What is done after a commit: the wake-up of a dispatcher, and whatever else was asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from ....events import CallbackFailed, guarded, log_event
from ....text import describe

__all__ = ["Wake", "hint", "hint_after_commit"]

# Sessions of other libraries have no type that could be named without importing them.
Foreign = Any
Wake: TypeAlias = Callable[[], object]

_WAITING: Final = "postroom_wake"
#: Raises nothing, even if a filter of the log does: the commit has succeeded.
_tell: Final = guarded(log_event)


def hint(wake: Wake) -> None:
    """Call ``wake``; a hint that fails costs latency, and must not look like a commit that failed."""
    try:
        wake()
    except Exception as error:  # noqa: BLE001 -- whatever a function of the user raises is reported
        _tell(CallbackFailed(describe(error), error))


def hint_after_commit(session: Foreign, wake: Wake) -> None:
    """Call ``wake`` once after the commit of the transaction that a SQLAlchemy session is in, if it comes."""
    event = sys.modules["sqlalchemy.event"]
    # One pair of listeners for the life of the session: those that remove themselves outlive a rollback.
    if not event.contains(session, "after_commit", _after_commit):
        event.listen(session, "after_commit", _after_commit)
        event.listen(session, "after_transaction_end", _after_transaction_end)
    waiting: list[Wake] = session.info.setdefault(_WAITING, [])
    if wake not in waiting:
        waiting.append(wake)


def _after_commit(session: Foreign) -> None:
    if not session.in_nested_transaction():  # the release of a savepoint is told as a commit
        for wake in session.info.pop(_WAITING, []):
            hint(wake)


def _after_transaction_end(session: Foreign, ended: Foreign) -> None:
    if ended.parent is None:
        session.info.pop(_WAITING, None)
