"""What an event is: a value with a level and a sentence."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal, TypeAlias, cast

from .collapse import Kind
from .text import MAX_ERROR, duration, labelled, printable

__all__ = ["Ends", "Event", "Listener"]

#: What is over with an event: repeats about its place, or all of them.
Ends: TypeAlias = Literal["nothing", "place", "everything"]

#: What differs between two errors of one kind: ids, addresses and numbers.
_VARIABLE: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|0x[0-9a-fA-F]+|\d+")
#: How much of an error tells its kind.
_TELLING: Final = 200


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; the class says what."""

    level: ClassVar[int] = logging.DEBUG
    #: A template for ``%`` with the fields, and with ``subject``: the message and everything that identifies it.
    text: ClassVar[str] = ""
    #: How many of one kind are logged one by one within a minute, before the rest is summed up. By default a warning is
    #: logged once, and everything else always.
    burst: ClassVar[int | None] = None
    #: What is over with this event, so that held back repeats are written before it.
    ends: ClassVar[Ends] = "nothing"

    def __str__(self) -> str:
        """Return what happened, in one printable line."""
        return self.text % self.shown()

    @property
    def place(self) -> str:
        """What the event is about, apart from single messages."""
        names = ("destination", "topic", "type", "operation")
        return "/".join(str(getattr(self, name)) for name in names if hasattr(self, name))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, but not the exception, whose traceback leads to everything its functions worked on."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "exception"}

    def shown(self) -> dict[str, str]:
        """Return everything that ``text`` may name, each printable."""
        values = self.as_dict()
        return {name: _shown(value) for name, value in values.items()} | {"subject": _subject(values)}

    def kind(self) -> Kind:
        """Return what makes another event a repeat of this one."""
        error = str(getattr(self, "error", ""))[:_TELLING]
        return Kind(type(self).__name__, self.place, _VARIABLE.sub("#", error))


#: Called with every event, in the event loop: it must return quickly.
Listener: TypeAlias = Callable[[Event], None]


def _subject(values: dict[str, Any]) -> str:
    others = values.get("count", 1) - 1
    parts = [f"message {values.get('message_id')}" + (f" and {others} more of its batch" if others else "")]
    parts += [labelled(name, values[name]) for name in ("topic", "type", "key") if values.get(name) not in {None, ""}]
    if "attempt" in values:
        limit = values.get("max_attempts")
        parts.append(f"attempt={values['attempt']}" + (f"/{limit}" if limit else ""))
    return " ".join(parts)


def _shown(value: object) -> str:
    match value:
        case timedelta():
            return duration(value)
        case tuple():
            return ", ".join(printable(str(part)) for part in cast("tuple[object, ...]", value))
        case None:
            return "-"
        case _:
            return printable(str(value)[:MAX_ERROR])
