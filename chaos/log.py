"""The log of a Redis server: every command that has changed something, in its order, as a restart would replay it.

With ``appendfsync always`` nothing is answered before it stands there, so it is what triggers are in other databases.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

__all__ = ["WHOLE_LOG", "Packed", "commands", "unpacked"]

#: How a server is started whose log is never written anew, which would leave out how things came about.
WHOLE_LOG: Final = {"auto-aof-rewrite-percentage": "0"}

#: What a script packs: texts, whole numbers, and arrays of those.
Packed: TypeAlias = "bytes | int | list[Packed]"

_NUMBERS: Final = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_TEXTS: Final = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}


def commands(folder: Path) -> Iterator[list[bytes]]:
    """Yield what a server has written to the files of its log.

    Raises:
        ValueError: It was written anew, and does not tell everything any more.
    """
    # While the log is written anew there is another for a moment, which is not valid yet.
    [manifest] = (path for path in folder.glob("*.manifest") if not path.name.startswith("temp"))
    parts = [line.split() for line in manifest.read_text().splitlines()]
    if any(kind == "b" and number != "1" for _, _, _, number, _, kind in parts):
        raise ValueError("the log was written anew; start the server with WHOLE_LOG")
    for _, name, _, _, _, kind in parts:
        if kind == "i":
            with (folder / name).open("rb") as file:
                yield from _read(file)


def _read(file: io.BufferedReader) -> Iterator[list[bytes]]:
    while line := file.readline():
        if line.startswith(b"*"):
            yield [file.read(int(file.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]


def unpacked(data: bytes) -> list[Packed]:
    """Return the array that a script has packed."""
    array = _unpacked(io.BytesIO(data))
    assert isinstance(array, list)  # noqa: S101 -- the scripts pack nothing else
    return array


def _unpacked(data: io.BytesIO) -> Packed:
    [kind] = data.read(1)
    if kind < 0x80:  # noqa: PLR2004 -- as the format has it, here and below
        return kind
    if kind >= 0xE0:  # noqa: PLR2004
        return kind - 0x100
    if 0x90 <= kind < 0xA0:  # noqa: PLR2004
        return [_unpacked(data) for _ in range(kind & 0x0F)]
    if 0xA0 <= kind < 0xC0:  # noqa: PLR2004
        return data.read(kind & 0x1F)
    if kind in _TEXTS:
        return data.read(_number(data, _TEXTS[kind]))
    return _number(data, _NUMBERS[kind])


def _number(data: io.BytesIO, form: str) -> int:
    [number] = struct.unpack(form, data.read(struct.calcsize(form)))
    return int(number)
