"""The places of middlewares that depend on their place, from the outermost to the innermost."""

from __future__ import annotations

from typing import Final

__all__ = ["CLAIM", "DEAD_LETTERS", "INBOX", "OUTBOX", "RETRY", "TRANSACTION"]

DEAD_LETTERS: Final = 10
RETRY: Final = 20
#: Of an inbox that claims a message before its transaction begins, which completes the claim.
CLAIM: Final = 25
TRANSACTION: Final = 30
INBOX: Final = 40
OUTBOX: Final = 50
