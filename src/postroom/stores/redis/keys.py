"""The keys of one namespace, all in one slot of a cluster."""

from __future__ import annotations

import hashlib
from typing import Final
from urllib.parse import quote

from ...errors import InvalidNameError
from ...message import Message, is_namespace

__all__ = ["Keys", "dedupe_field", "lane"]

#: In the order in which the scripts know them.
_NAMES: Final = (
    *("entries", "states", "errors", "due", "held", "leased", "dead", "done", "lanes", "tombs"),
    *("dedupes", "topics", "counters", "tried", "parked"),
)
#: What stands as it is between braces; everything else is written as `%` and two digits.
_PLAIN: Final = "!#$&'()*+,/:;=?@[]^`|~ "


class Keys:
    """What the keys of a namespace are called: ``<table>:{<namespace>}:<name>``."""

    def __init__(self, table: str, namespace: str) -> None:
        if not is_namespace(namespace):
            raise InvalidNameError("namespace", namespace, "1 to 100 printable characters")
        if not is_namespace(table) or not {"{", "}"}.isdisjoint(table):
            raise InvalidNameError("table", table, "1 to 100 printable characters without braces")
        # The braces are the hash tag: whatever is between them decides on the slot, and must not close them.
        self.prefix: str = f"{table}:{{{quote(namespace, safe=_PLAIN)}}}"
        self.all: list[str] = [f"{self.prefix}:{name}" for name in _NAMES]
        self.channel: str = f"{self.prefix}:wake"


def lane(message: Message) -> bytes:
    """Return what messages of one topic and key have in common, nothing without a key."""
    if message.key is None:
        return b""
    return hashlib.blake2b(f"{message.topic}\0{message.key}".encode(), digest_size=16).digest()


def dedupe_field(message: Message) -> bytes:
    """Return under what a message is known again, nothing if it need not be."""
    return b"" if message.dedupe_key is None else f"{message.topic}\0{message.dedupe_key}".encode()
