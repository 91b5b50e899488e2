"""Which groups of consumers there are, and what they have in common."""

from __future__ import annotations

from typing import Final

from postroom.inbox import Mode

__all__ = ["GROUPS", "HANDLINGS", "OUTPUTS", "TOPICS", "UNHANDLED", "group_of"]

#: Each gets every message of the topics; they differ in when they mark one as handled.
GROUPS: Final[dict[str, Mode]] = {"stock": "pessimistic", "billing": "optimistic"}
TOPICS: Final = ("orders", "mail")
#: Where handlers send what they return; nobody consumes it.
OUTPUTS: Final = "effects"
#: After how many deliveries a message that fails becomes a dead letter.
HANDLINGS: Final = 8
#: Kinds of messages that no handler gets done.
UNHANDLED: Final = frozenset({"sour", "spurned", "deadly"})


def group_of(worker: str) -> str:
    """Return the group of a consumer process, by turns."""
    return list(GROUPS)[int(worker[1:]) % len(GROUPS)]
