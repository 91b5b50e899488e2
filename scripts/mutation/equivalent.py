"""Mutants that change nothing which a test could see, listed with the reason."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

__all__ = ["LIST", "Identity", "equivalents"]

LIST: Final = Path(__file__).with_name("equivalent.toml")
#: See `Mutant.identity`.
Identity: TypeAlias = tuple[str, str, str, str, str]


def equivalents(path: Path = LIST) -> Mapping[Identity, str]:
    """Return the reasons of the listed mutants, by what identifies those."""
    entries = tomllib.loads(path.read_text()).get("mutant", [])
    found = dict[Identity, str]()
    for entry in entries:
        if not entry["reason"].strip():
            raise ValueError(f"{path}: no reason is given for {entry['path']}: {entry['before']}")
        identity = (entry["path"], entry["place"], entry["operator"], entry["before"], entry["after"])
        found[identity] = entry["reason"]
    return found
