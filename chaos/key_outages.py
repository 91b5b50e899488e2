"""Outages of some keys: the nemesis writes a file, and the publishers of all dispatchers obey it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["KEY_CLASSES", "KeyOutage", "key_class"]

#: Keys are hit in classes, so that one fault hits several keys of every producer.
KEY_CLASSES: Final = 8
_FILE: Final = "key-outage"


def key_class(key: str | None) -> int | None:
    """Return the class of a key; messages without a key have none and are never hit."""
    return None if key is None else zlib.crc32(key.encode()) % KEY_CLASSES


@dataclass(frozen=True, slots=True)
class KeyOutage:
    """A class of keys whose endpoint refuses, or never answers."""

    key_class: int
    hangs: bool = False

    def write(self, folder: Path) -> None:
        """Begin the outage; publishers read the file before each call."""
        draft = folder / f"{_FILE}.draft"
        draft.write_text(f"{self.key_class} {int(self.hangs)}")
        draft.rename(folder / _FILE)

    def end(self, folder: Path) -> None:
        """End the outage."""
        (folder / _FILE).unlink(missing_ok=True)

    def hits(self, key: str | None) -> bool:
        """Tell whether messages of a key are affected."""
        return key_class(key) == self.key_class

    @staticmethod
    def read(folder: Path) -> KeyOutage | None:
        """Return the outage that goes on now, if there is one."""
        try:
            number, hangs = (folder / _FILE).read_text().split()
        except FileNotFoundError:
            return None
        return KeyOutage(int(number), hangs=hangs == "1")
