"""What marks a message along with BEGIN: one text with its values in it, since only a text can follow another."""

from __future__ import annotations

import re
from typing import Final
from uuid import UUID

from ...transaction import Opening
from .dialect import Dialect
from .writer import explain, inbox_dialect

__all__ = ["admission", "explain_admission"]

#: Means the same between quotes whatever the server is set to.
_WORD: Final = re.compile(r"[A-Za-z0-9_.:-]+")


def admission(opening: Opening) -> str:
    """Return what marks a message in PostgreSQL; its answer tells whether it was not marked before."""
    inbox = opening.inbox
    return next(_dialect(opening).admit(inbox.consumer, inbox.known(opening.message))).spelled(_spelled)


def explain_admission(error: Exception, opening: Opening) -> None:
    """Raise our error for a missing table, as the inbox does."""
    explain(error, _dialect(opening).identifiers["inbox"])


def _dialect(opening: Opening) -> Dialect:
    return inbox_dialect("postgresql", opening.inbox)


def _spelled(value: object) -> str:
    """Write a value so that whatever is in it stays a value: in hexadecimal digits, unless it is a plain word."""
    if isinstance(value, UUID) or _WORD.fullmatch(str(value)):
        return f"'{value}'"
    return f"convert_from(decode('{str(value).encode().hex()}', 'hex'), 'UTF8')"
