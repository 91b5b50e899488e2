"""The log of messages that were not added because they were there already."""

from __future__ import annotations

from collections.abc import Sequence

from . import events
from .outbox import Addition, AddResult

__all__ = ["log_duplicates"]


def log_duplicates(additions: Sequence[Addition], results: Sequence[AddResult]) -> None:
    """Log which messages of one `Outbox.add` were duplicates, at debug level; a dedupe key may be personal data."""
    for addition, result in zip(additions, results, strict=True):
        if not result.is_new:
            events.log_event(events.DuplicateAdded(result.id or addition.message.id, addition.message.topic))
