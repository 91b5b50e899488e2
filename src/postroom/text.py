"""Text that is safe to show: in a log, on a terminal, in a stored error."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Final, cast

__all__ = ["MAX_ERROR", "describe", "duration", "labelled", "printable", "traceback_of", "without_rows"]

#: How many characters of an error are stored and logged.
MAX_ERROR: Final = 2000

# PostgreSQL shows the row that it refuses, and SQLAlchemy all parameters: payloads are among them.
_ROWS: Final = re.compile(r"\n[\s|]*(DETAIL:|\[parameters:).*", re.DOTALL)
# MySQL quotes the value that it refuses, and then names the key or the column.
_VALUE: Final = re.compile(r"(Duplicate entry |[Ii]ncorrect [\w ]+ value: )'.*'(?= for (?:key|column) )", re.DOTALL)
_HIDDEN: Final = r"\1'***'"
# What Python itself writes on several lines; everything else is the text of an error.
_FRAME: Final = re.compile(r'[\s|+-]*(File "|The above exception was |During handling of the above )')


def printable(text: str) -> str:
    r"""Return a text with everything escaped that could move a cursor, end a line or turn the direction of writing.

    Example:
        >>> from postroom.text import printable
        >>> print(printable("orders\x1b[2J\n\u202e"))
        orders\x1b[2J\n\u202e
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def labelled(name: str, value: object) -> str:
    """Return ``name=value``, the value quoted if it could be read as more than one."""
    text = str(value)
    if not text or any(c in text for c in ' "='):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{name}={printable(text)}"


def duration(length: timedelta) -> str:
    """Return a length of time in seconds, or in minutes where that is enough.

    Example:
        >>> from datetime import timedelta
        >>> from postroom.text import duration
        >>> duration(timedelta(milliseconds=400)), duration(timedelta(minutes=10))
        ('0.4 s', '10 min')
    """
    seconds = length.total_seconds()
    if seconds >= 120:  # noqa: PLR2004
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds:.3f} s"  # noqa: PLR2004


def without_rows(text: str) -> str:
    """Return the text of a database's error without the values that it quotes."""
    return _VALUE.sub(_HIDDEN, _ROWS.sub("", text))


def describe(error: BaseException) -> str:
    """Return what may be stored of an error: its type and a bounded, printable text."""
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 -- an error without a text is described by its type
        said = ""
    text = printable(without_rows(said)[:MAX_ERROR].strip())
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, BaseExceptionGroup):
        first = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
        described += f": {describe(first)}"  # the text of a group only counts its errors
    return described[:MAX_ERROR]


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error as Python prints it, but each text and each note is one printable line.

    A text with line breaks, or a note, could otherwise pass for records of the log.
    """
    return "\n".join(_traceback_lines(error))


def _traceback_lines(error: BaseException) -> Iterator[str]:
    trace = traceback.TracebackException.from_exception(error)
    _mark_notes(trace)
    for part in trace.format():
        if _FRAME.match(part):
            yield from map(printable, part.removesuffix("\n").split("\n"))
        else:
            yield printable(without_rows(part).removesuffix("\n"))


def _mark_notes(trace: traceback.TracebackException) -> None:
    """Indent and label the notes of an error and of all that it is about: Python prints their lines as they are."""
    traces: list[traceback.TracebackException | None] = [trace]
    while traces:
        one = traces.pop()
        if one is not None:
            notes: object = getattr(one, "__notes__", None)
            one.__notes__ = None if notes is None else _marked(notes)
            traces += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]


def _marked(notes: object) -> list[str]:
    listed = cast("Sequence[object]", notes) if isinstance(notes, list | tuple) else [notes]
    return [f"    note: {_note(note)}" for note in listed]


def _note(note: object) -> str:
    try:
        said = str(note)
    except Exception:  # noqa: BLE001 -- whatever is wrong with a note, the error must be logged
        said = "<note without a text>"
    return printable(without_rows(f"\n{said}").strip())  # a row may begin the note
