"""Pipelines of redis-py, which is not imported here, and when they hold nothing back."""

from __future__ import annotations

from typing import Any

from ...errors import CommandRefusedError

__all__ = ["refuse_unless_it_queues"]


def refuse_unless_it_queues(pipeline: Any, what: str) -> None:  # noqa: ANN401 -- of a library that is not imported
    """Refuse to do something with a pipeline that would send it at once.

    From ``watch()`` on, the library sends every command by itself until ``multi()``, so that what is watched can be
    read. A message would be stored then whatever becomes of the transaction.

    Raises:
        CommandRefusedError: It watches, and ``multi()`` was not called.
    """
    # That of a cluster leaves the work to another object, which calls the same by other names.
    works = getattr(pipeline, "_execution_strategy", pipeline)
    is_watching = getattr(works, "watching", False) or getattr(works, "_watching", False)
    has_begun = getattr(works, "explicit_transaction", False) or getattr(works, "_explicit_transaction", False)
    if is_watching and not has_begun:
        raise CommandRefusedError(what, "its pipeline watches keys, and sends everything at once; call multi() first")
