"""How two states differ, in words that lead to the place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeAlias, cast
from uuid import UUID

__all__ = ["Ids", "counted", "differences", "known"]

#: Which id stands for which other one.
Ids: TypeAlias = Mapping[UUID, UUID]

_SHOWN: Final = 200
_LINES: Final = 10


def known(value: object, ids: Ids) -> object:  # noqa: PLR0911 -- one line for each kind of value
    """Return a copy of a value with ids replaced; rows of databases become dicts, sequences lists."""
    if isinstance(value, UUID):
        return ids.get(value, value)
    if isinstance(value, str):
        return _replaced(value, {form(old): form(new) for old, new in ids.items() for form in (str, _hex)})
    if isinstance(value, bytes):
        return _replaced(value, {form(old): form(new) for old, new in ids.items() for form in _BYTES})
    if hasattr(value, "keys") and hasattr(value, "__getitem__"):
        row = cast("Mapping[object, object]", value)
        return {known(key, ids): known(row[key], ids) for key in row.keys()}  # noqa: SIM118 -- rows have no more
    if isinstance(value, list | tuple):
        return [known(item, ids) for item in cast("Sequence[object]", value)]
    if isinstance(value, AbstractSet):
        return {known(item, ids) for item in cast("AbstractSet[object]", value)}
    return value


def _hex(identity: UUID) -> str:
    return identity.hex


_BYTES: Final[tuple[Callable[[UUID], bytes], ...]] = (
    lambda identity: str(identity).encode(),
    lambda identity: identity.hex.encode(),
    lambda identity: identity.bytes,
)


def _replaced(text: Any, forms: Mapping[Any, Any]) -> Any:  # noqa: ANN401 -- text or bytes
    for old, new in forms.items():
        text = text.replace(old, new)
    return text


def differences(expected: object, found: object, place: str = "state") -> list[str]:
    """Say where two values differ, a line for each place, but not too many."""
    lines = list(_differences(expected, found, place))
    return lines if len(lines) <= _LINES else [*lines[:_LINES], f"and {len(lines) - _LINES} more differences"]


def _differences(expected: object, found: object, place: str) -> Iterator[str]:
    if expected == found:
        return
    told = f"{place}: expected {_shown(expected)}, found {_shown(found)}"
    if isinstance(expected, dict) and isinstance(found, dict):
        was, now = cast("dict[object, object]", expected), cast("dict[object, object]", found)
        for key in {**was, **now}:
            yield from _differences(was.get(key, _NOTHING), now.get(key, _NOTHING), f"{place}[{key!r}]")
        return
    if isinstance(expected, list) and isinstance(found, list):
        before, after = cast("list[object]", expected), cast("list[object]", found)
        if len(before) == len(after):
            for index, (one, other) in enumerate(zip(before, after, strict=True)):
                yield from _differences(one, other, f"{place}[{index}]")
            return
    yield told


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING: Final = _Nothing()


def counted(expected: Counter[Hashable], found: Counter[Hashable]) -> list[str]:
    """Say which outputs are missing or there too often."""
    lines = [f"outbox: missing {_times(number)}{_shown(one)}" for one, number in (expected - found).items()]
    return lines + [f"outbox: too many, {_times(number)}{_shown(one)}" for one, number in (found - expected).items()]


def _times(number: int) -> str:
    return "" if number == 1 else f"{number} times "


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
