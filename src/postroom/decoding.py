"""Making typed objects of JSON: dataclasses and what they are made of, msgspec structs, pydantic models."""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Any, Final, cast

from .errors import ConfigurationError, DecodeError
from .making import (
    VALUES,
    Make,
    Part,
    WrongPartError,
    as_it_is,
    dict_of,
    enumerated,
    exactly,
    filled,
    fixed,
    foreign,
    hints_of,
    is_required,
    list_of,
    literal,
    model_reader,
    named,
    names_of,
    quick_record,
    record,
    struct_reader,
    unlike,
    variables_of,
)

__all__ = ["decoded", "decoder", "is_plain", "plain"]


def decoder(kind: Any) -> Callable[[bytes], Any]:  # noqa: ANN401 -- a type, or what typing has beside types
    """Return what makes objects of a type of JSON; what can be found out before there is a payload is found out now.

    Raises:
        ConfigurationError: Nothing is known of such a type.
    """
    if kind is object or kind is Any:
        return plain
    # A struct or a model is read by its own library, in one go.
    read, make = struct_reader(kind) or model_reader(kind), None
    if read is None:
        read, make = plain, _maker(kind)

    name = named(kind)

    def decode(payload: bytes) -> Any:  # noqa: ANN401
        try:
            return read(payload) if make is None else make(read(payload))
        except WrongPartError as error:
            problem = str(error)
        except RecursionError:
            problem = "it is nested too deeply"
        # Raised out here, so that no library's error hangs on to it: those show values, and payloads stay out of logs.
        raise DecodeError(f"the payload is no {name}: {problem}; correct its sender, or the type it is decoded to")

    return decode


def _maker(kind: Any) -> Make:  # noqa: ANN401
    try:
        return _Makers().of(kind)
    except RecursionError:
        raise ConfigurationError(
            f"{named(kind)} has parts of ever new types, without end; let a generic type be part of itself only with "
            "the same arguments"
        ) from None


def decoded(payload: bytes, kind: Any) -> Any:  # noqa: ANN401
    """Return an object of a type, made of JSON."""
    try:
        # To typing, A | B and B | A are equal, and here they are not: the text tells them apart.
        decode = _remembered(kind, "" if isinstance(kind, type) else str(kind))
    except TypeError:  # what Annotated says of it, perhaps, has no hash
        decode = decoder(kind)
    return decode(payload)


@lru_cache(maxsize=1024)
def _remembered(kind: Any, _: str) -> Callable[[bytes], Any]:  # noqa: ANN401
    return decoder(kind)


def is_plain(kind: type) -> bool:
    """Tell whether a type is that of plain values, such as ``str``, or a container of them, such as ``dict``."""
    return kind in VALUES or kind in _LISTS or kind in _DICTS


def _refuse(constant: str) -> object:
    raise ValueError(constant)


def _finite(number: str) -> float:
    value = float(number)
    if value - value:  # only of what is infinite this is not zero
        raise ValueError(number)
    return value


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
#: What may be half of a character, which no text can be written with.
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def plain(payload: bytes) -> Any:  # noqa: ANN401 -- dicts, lists, strings and numbers
    """Return the plain value that JSON stands for."""
    try:
        text = payload.decode()
        value, end = _DECODER.raw_decode(text)
        if end == len(text) and not _SURROGATE.search(text):
            return value
    except (ValueError, RecursionError):
        pass
    # There are blanks around it, or rare characters in it, or something is wrong.
    try:
        value = _DECODER.decode(payload.decode())
        json.dumps(value, ensure_ascii=False).encode()
        return value  # noqa: TRY300 -- nothing else may fail
    except (ValueError, RecursionError) as error:
        problem = type(error).__name__
    raise DecodeError(f"the payload is not JSON ({problem}); decode it with the codec that encoded it")


#: Tried after everything else that a value may be, in this order: they take what is meant for others.
_TAKE_MUCH: Final[Sequence[Any]] = (datetime, float, str, object, Any)

_LISTS: Final[Mapping[Any, Callable[[list[Any]], Any]]] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Collection: list,
    collections.abc.Iterable: list,
    collections.abc.MutableSequence: list,
    collections.abc.Sequence: list,
    collections.abc.Set: set,
}
_DICTS: Final = frozenset({dict, collections.abc.Mapping, collections.abc.MutableMapping})
#: What says something about a type and leaves it as it is.
_MARKS: Final = frozenset({typing.Annotated, typing.Final, typing.Required, typing.NotRequired})


class _Makers:
    """Finds out how objects of types are made, for one decoder."""

    def __init__(self) -> None:
        self._begun: dict[Any, list[Make]] = {}

    def of(self, kind: Any) -> Make:  # noqa: ANN401
        """Return what makes objects of a type of plain values."""
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin in _MARKS:
            return self.of(arguments[0])
        special = self._special(kind, origin, arguments)
        if special is not None:
            return special
        if _hashable(kind) in VALUES:
            return VALUES[kind]
        make = self._container(origin or kind, arguments)
        make = make or self._object(kind, origin or kind) or foreign(kind)
        if make is None:
            raise ConfigurationError(
                f"nothing is known of {named(kind)}, so no payload can become one; annotate with a dataclass, a "
                "msgspec.Struct, a pydantic model, a dict, or a type of the standard library that JSON has a form for"
            )
        return make

    def _special(self, kind: Any, origin: Any, arguments: tuple[Any, ...]) -> Make | None:  # noqa: ANN401
        """Return what makes objects of a type that only typing knows."""
        if origin is typing.Literal:
            return literal(arguments)
        if origin in {typing.Union, types.UnionType}:
            return self._union(arguments)
        if isinstance(kind, typing.NewType):
            return self.of(kind.__supertype__)
        if isinstance(kind, typing.TypeVar):
            return self._union(kind.__constraints__) if kind.__constraints__ else self.of(kind.__bound__ or Any)
        return None

    def _container(self, kind: Any, arguments: tuple[Any, ...]) -> Make | None:  # noqa: ANN401
        if kind in _DICTS:
            return dict_of(self._key(arguments[0]), self.of(arguments[1])) if arguments else exactly(dict)
        if kind is tuple and arguments and arguments[-1] is not ...:
            return fixed([self.of(each) for each in arguments], tuple)
        if kind in _LISTS:
            return list_of(self.of(arguments[0]) if arguments else as_it_is, _LISTS[kind])
        return None

    def _object(self, kind: Any, plain_kind: Any) -> Make | None:  # noqa: ANN401
        bases: tuple[Any, ...] = getattr(plain_kind, "__mro__", ())
        if Enum in bases:
            return enumerated(plain_kind)
        if bases and dataclasses.is_dataclass(plain_kind):
            return self._begin(kind, lambda: self._dataclass(kind, plain_kind))
        if typing.is_typeddict(plain_kind):
            return self._begin(kind, lambda: record(plain_kind, self._keys(plain_kind), dict))
        if tuple in bases and hasattr(plain_kind, "_fields"):
            return self._begin(kind, lambda: self._named_tuple(plain_kind))
        return None

    def _begin(self, kind: Any, find_out: Callable[[], Make]) -> Make:  # noqa: ANN401
        """Find out how a type is made that may be part of itself."""
        key = _hashable(kind)
        if key in self._begun:  # it will be known when there is a payload
            made = self._begun[key]
            return lambda value: made[0](value)  # noqa: PLW0108 -- there is none yet
        made = self._begun[key] = []
        made.append(find_out())
        return made[0]

    def _named_tuple(self, kind: Any) -> Make:  # noqa: ANN401
        return fixed([self.of(each) for each in hints_of(kind).values()], lambda items: kind(*items))

    def _union(self, kinds: tuple[Any, ...]) -> Make:
        """Try what a value may be in the order in which it is written, but first what takes little.

        Among records the one that knows most of the keys is tried first: one that knows few may fit, and lose the rest.
        """
        if len(kinds) == 2 and types.NoneType in kinds:  # noqa: PLR2004 -- X | None
            make = self.of(kinds[0] if kinds[1] is types.NoneType else kinds[1])
            return lambda value: None if value is None else make(value)
        greedy = [kind for kind in _TAKE_MUCH if kind in kinds]
        ordered = [*(kind for kind in kinds if kind not in greedy), *greedy]
        makers = [self.of(kind) for kind in ordered]
        names = ", ".join(map(named, kinds))
        known = [names_of(kind) for kind in ordered]
        has_records = sum(each is not None for each in known) > 1

        def choose(value: Any) -> Any:  # noqa: ANN401
            for make in _best_first(value, makers, known) if has_records else makers:
                try:
                    return make(value)
                except WrongPartError:
                    continue
            raise WrongPartError(f"{type(value).__name__} is none of {names}")

        return choose

    def _key(self, kind: Any) -> Make:  # noqa: ANN401
        """Return what makes the keys of a dict, which are text in JSON: what is none was written as JSON into it."""
        make = self.of(kind)
        if kind is str:
            return as_it_is

        def key(text: str) -> Any:  # noqa: ANN401
            try:
                return make(text)
            except WrongPartError:
                try:
                    return make(plain(text.encode()))
                except DecodeError:
                    raise unlike(text, named(kind)) from None

        return key

    def _keys(self, kind: Any) -> list[Part]:  # noqa: ANN401
        """Return the keys of a TypedDict; whether one is required is not known to the class if annotations are text."""
        parts: list[Part] = []
        for name, hint in hints_of(kind, include_extras=True).items():
            mark = typing.get_origin(hint)
            is_needed = mark is typing.Required or (name in kind.__required_keys__ and mark is not typing.NotRequired)
            parts.append(Part(name, self.of(hint), is_needed))
        return parts

    def _dataclass(self, kind: Any, plain_kind: Any) -> Make:  # noqa: ANN401
        """Return what makes a dataclass of a dict; what it does not know is left out, as a newer sender may add it."""
        hints, variables = hints_of(plain_kind), variables_of(kind, plain_kind)
        parts = [
            Part(field.name, self.of(filled(hints[field.name], variables)), is_required(field))
            for field in dataclasses.fields(plain_kind)
            if field.init
        ]
        return quick_record(plain_kind, parts, record(plain_kind, parts, plain_kind))


def _best_first(value: Any, makers: list[Make], known: list[frozenset[str] | None]) -> list[Make]:  # noqa: ANN401
    """Return makers in the order to be tried: records change places among themselves, everything else stays."""
    if type(value) is not dict:
        return makers
    keys = set(cast("dict[str, Any]", value))
    pairs = list(zip(makers, known, strict=True))
    records = [(len(keys - names), make) for make, names in pairs if names is not None]
    best = iter(sorted(records, key=lambda each: each[0]))
    return [make if names is None else next(best)[1] for make, names in pairs]


def _hashable(kind: Any) -> Any:  # noqa: ANN401
    """Return what stands for a type in a dict: what Annotated or Literal say of it may have no hash."""
    try:
        hash(kind)
    except TypeError:
        return repr(kind)
    return kind
