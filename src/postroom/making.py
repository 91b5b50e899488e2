"""What makes objects of the plain values of JSON: one small function for each kind of type."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

from .errors import ConfigurationError

__all__ = [
    "VALUES",
    "Make",
    "Part",
    "WrongPartError",
    "as_it_is",
    "dict_of",
    "enumerated",
    "exactly",
    "filled",
    "fixed",
    "foreign",
    "hints_of",
    "is_required",
    "list_of",
    "literal",
    "model_reader",
    "named",
    "names_of",
    "quick_record",
    "record",
    "struct_reader",
    "unlike",
    "variables_of",
]

#: Makes an object of a plain value; raises only `WrongPartError`.
Make: TypeAlias = Callable[[Any], Any]


class WrongPartError(Exception):
    """Says which part of an object is wrong, and what it should be, without its value."""

    def __init__(self, problem: str) -> None:
        self.path = ""
        self.problem = problem

    def __str__(self) -> str:
        """Say where, and what."""
        return f"{self.path.removeprefix('.')}: {self.problem}" if self.path else self.problem


def unlike(value: object, name: str) -> WrongPartError:
    """Return the error of a value that is not what it should be."""
    return WrongPartError(f"{type(value).__name__} is no {name}")


def named(kind: Any) -> str:  # noqa: ANN401
    """Return what a type is called in an error."""
    return kind.__qualname__ if isinstance(kind, type) else str(kind).replace("typing.", "")


# -- values that JSON has a form for ---------------------------------------------------------------------------------


def as_it_is(value: Any) -> Any:  # noqa: ANN401
    """Return a value of which nothing is asked."""
    return value


def exactly(kind: type) -> Make:
    """Take values of one plain type."""

    def make(value: Any) -> Any:  # noqa: ANN401
        # True is an int for Python, and an order of True pieces is none.
        if type(value) is not kind:
            raise unlike(value, kind.__name__)
        return value

    return make


def _converted(kind: Any, convert: Callable[[Any], Any], *takes: type) -> Make:  # noqa: ANN401
    def make(value: Any) -> Any:  # noqa: ANN401
        if type(value) in takes:
            try:
                return convert(value)
            except Exception:  # noqa: BLE001, S110 -- whatever an enumeration of the application raises
                pass
        raise unlike(value, named(kind))

    return make


def enumerated(kind: type[Enum]) -> Make:
    """Make a member of its value."""
    takes: set[type] = {type(member.value) for member in kind}
    if not takes <= {str, int, float, bool, types.NoneType}:
        raise ConfigurationError(f"the values of {named(kind)} have no form in JSON; use text or numbers")
    return _converted(kind, kind, *takes)


def literal(allowed: tuple[Any, ...]) -> Make:
    """Take some values only."""

    def make(value: Any) -> Any:  # noqa: ANN401
        for each in allowed:
            plainly = each.value if isinstance(each, Enum) else each
            if type(plainly) is type(value) and plainly == value:
                return each
        raise WrongPartError(f"{type(value).__name__} is none of the values that are allowed")

    return make


VALUES: Final[Mapping[Any, Make]] = {
    object: as_it_is,
    Any: as_it_is,
    None: exactly(types.NoneType),
    **{kind: exactly(kind) for kind in (str, int, bool, types.NoneType)},
    float: _converted(float, float, float, int),
    UUID: _converted(UUID, UUID, str),
    Decimal: _converted(Decimal, Decimal, str, int),
    datetime: _converted(datetime, datetime.fromisoformat, str),
    date: _converted(date, date.fromisoformat, str),
    time: _converted(time, time.fromisoformat, str),
}
#: What takes plain values of one type only, and which.
_EXACT: Final[Mapping[Make, type]] = {VALUES[kind]: kind for kind in (str, int, bool, float)}
_VARIADIC: Final = frozenset({inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})


class Part(NamedTuple):
    """A field of a record."""

    name: str
    make: Make
    is_required: bool


def record(kind: Any, parts: list[Part], construct: Callable[..., Any]) -> Make:  # noqa: ANN401
    """Make an object of a dict, by the names of its parts; what it has no part for is left out."""

    def make(value: Any) -> Any:  # noqa: ANN401
        given: dict[str, Any] = value
        if type(value) is not dict:
            raise unlike(value, named(kind))
        arguments: dict[str, Any] = {}
        name = ""
        try:
            for name, make_part, is_required in parts:
                if name in given:
                    arguments[name] = make_part(given[name])
                elif is_required:
                    raise WrongPartError("it is missing")  # noqa: TRY301 -- with the path of all others
        except WrongPartError as error:
            error.path = f".{name}{error.path}"
            raise
        try:
            return construct(**arguments)
        except Exception as error:  # noqa: BLE001 -- whatever the application's __post_init__ raises
            problem = type(error).__name__
        raise WrongPartError(f"{named(kind)} refuses it with a {problem}")

    return make


def quick_record(kind: Any, parts: list[Part], careful: Make) -> Make:  # noqa: ANN401
    """Return what makes a dataclass; one whose values are all plain and there is made at a third of the cost.

    Raises:
        ConfigurationError: It cannot be made of its fields.
    """
    names, makers = [part.name for part in parts], [part.make for part in parts]
    parameters = [each for each in inspect.signature(kind).parameters.values() if each.kind not in _VARIADIC]
    missing = [each.name for each in parameters if each.default is each.empty and each.name not in names]
    if missing:
        raise ConfigurationError(
            f"{named(kind)} needs {', '.join(missing)}, which is no field of it; give it a default"
        )
    is_positional = all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    # Of one name, itemgetter makes no tuple.
    if len(names) == 1 or names != [each.name for each in parameters] or not is_positional:
        return careful
    kinds = tuple(_EXACT.get(make) for make in makers)
    if None in kinds or not names:
        return careful
    pick = itemgetter(*names)

    def make(value: Any) -> Any:  # noqa: ANN401
        try:
            values = pick(value)
            if tuple(map(type, values)) == kinds:
                return kind(*values)
        except Exception:  # noqa: BLE001, S110 -- it will happen again, and be told then
            pass
        return careful(value)

    return make


def list_of(item: Make, construct: Callable[[list[Any]], Any]) -> Make:
    """Make a list, or what a list can become, whose items are alike."""

    def make(value: Any) -> Any:  # noqa: ANN401
        items: list[Any] = value
        if type(value) is not list:
            raise unlike(value, "list")
        return _made(zip(itertools.repeat(item), items, strict=False), construct)

    return make


def fixed(makers: list[Make], construct: Callable[[list[Any]], Any]) -> Make:
    """Make a tuple of so many items, each of a type of its own."""

    def make(value: Any) -> Any:  # noqa: ANN401
        items: list[Any] = value
        if type(value) is not list or len(items) != len(makers):
            raise unlike(items, f"list of {len(makers)}")
        return _made(zip(makers, items, strict=True), construct)

    return make


def _made(pairs: Iterable[tuple[Make, Any]], construct: Callable[[list[Any]], Any]) -> Any:  # noqa: ANN401
    made: list[Any] = []
    try:
        for make, each in pairs:
            made.append(make(each))
    except WrongPartError as error:
        error.path = f"[{len(made)}]{error.path}"
        raise
    try:
        return construct(made)
    except Exception as error:  # noqa: BLE001 -- a set of what has no hash
        problem = type(error).__name__
    raise WrongPartError(f"it cannot be built, with a {problem}")


def dict_of(key: Make, item: Make) -> Make:
    """Make a dict whose keys are alike, and whose values are."""

    def make(value: Any) -> Any:  # noqa: ANN401
        given: dict[str, Any] = value
        if type(value) is not dict:
            raise unlike(value, "dict")
        try:
            return {key(name): item(each) for name, each in given.items()}
        except WrongPartError as error:
            error.path = f"[…]{error.path}"  # its key is a value of the payload
            raise

    return make


# -- structs and models ----------------------------------------------------------------------------------------------


def struct_reader(kind: Any) -> Callable[[bytes], Any] | None:  # noqa: ANN401
    """Return what reads a struct of msgspec; if it is one, msgspec is loaded, which the kernel does not import."""
    if not hasattr(typing.get_origin(kind) or kind, "__struct_fields__"):
        return None
    try:
        return _guarded(sys.modules["msgspec"].json.Decoder(kind).decode, _where_in_struct)
    except TypeError as error:
        raise ConfigurationError(f"msgspec cannot make a {named(kind)}: {error}; change its fields") from error


def model_reader(kind: Any) -> Callable[[bytes], Any] | None:  # noqa: ANN401
    """Return what reads a model of pydantic."""
    if not hasattr(kind, "model_validate_json"):
        return None
    names = {*kind.model_fields, *(field.validation_alias for field in kind.model_fields.values())}
    return _guarded(kind.model_validate_json, lambda error: _where_in_model(error, names))


def foreign(kind: Any) -> Make | None:  # noqa: ANN401
    """Return what makes a struct or a model that is part of something else; its library takes JSON at its word."""
    read = struct_reader(kind) or model_reader(kind)
    return None if read is None else lambda value: read(json.dumps(value).encode())


def _guarded(read: Callable[[bytes], Any], where: Callable[[Exception], str]) -> Callable[[bytes], Any]:
    def guarded(payload: bytes) -> Any:  # noqa: ANN401
        try:
            return read(payload)
        except Exception as error:  # noqa: BLE001 -- whatever the library or a validator of the application raises
            wrong = WrongPartError(f"refused with a {type(error).__name__}")
            wrong.path = where(error)
        raise wrong

    return guarded


#: Names of fields stand at these places of a text of msgspec; elsewhere in it stand values.
_STRUCT_PATH: Final = re.compile(r" - at `(?:key` in `)?\$([^`]*)`\Z")
_STRUCT_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")


def _where_in_struct(error: Exception) -> str:
    text = str(error)
    path, missing = _STRUCT_PATH.search(text), _STRUCT_MISSING.match(text)
    return (path[1] if path else "") + (f".{missing[1]}" if missing else "")


def _where_in_model(error: Exception, names: set[Any]) -> str:
    """Return the first field that is wrong; deeper in, and for an unknown field, a place is named by the payload."""
    tell: Any = getattr(error, "errors", None)
    try:
        place = tell()[0]["loc"][0]
        is_known = place in names
    except Exception:  # noqa: BLE001 -- it may be any error, with anything of that name, or none
        return ""
    return f".{place}" if is_known else ""


# -- what classes say of themselves ----------------------------------------------------------------------------------


def hints_of(kind: Any, *, include_extras: bool = False) -> dict[str, Any]:  # noqa: ANN401
    """Return the types of the parts of a class."""
    try:
        return typing.get_type_hints(kind, include_extras=include_extras)
    except NameError as error:
        raise ConfigurationError(
            f"the annotations of {named(kind)} cannot be read: {error}; define or import what they name at the level "
            "of the module"
        ) from error


def variables_of(kind: Any, plain_kind: Any) -> dict[Any, Any]:  # noqa: ANN401
    """Return what the type variables of a dataclass stand for, as it or a class below it says."""
    found: dict[Any, Any] = {}
    aliases: list[Any] = [kind]
    for each in plain_kind.__mro__:
        aliases += each.__dict__.get("__orig_bases__", ())
    for alias in aliases:
        origin = typing.get_origin(alias)
        if origin is not None and origin is not typing.Generic:
            for variable, argument in zip(origin.__parameters__, typing.get_args(alias), strict=False):
                found.setdefault(variable, filled(argument, found))
    return found


def filled(hint: Any, variables: Mapping[Any, Any]) -> Any:  # noqa: ANN401
    """Put types in the places of type variables."""
    if isinstance(hint, typing.TypeVar):
        return variables.get(hint, hint)
    # A class may have them too, and stands for itself with any.
    parameters: tuple[Any, ...] = getattr(hint, "__parameters__", ()) if typing.get_origin(hint) else ()
    return hint[tuple(variables.get(each, each) for each in parameters)] if parameters and variables else hint


def names_of(kind: Any) -> frozenset[str] | None:  # noqa: ANN401
    """Return the keys that a record knows; None for what is no record."""
    while typing.get_origin(kind) is typing.Annotated or isinstance(kind, typing.NewType):
        kind = kind.__supertype__ if isinstance(kind, typing.NewType) else typing.get_args(kind)[0]
    plain_kind: Any = typing.get_origin(kind) or kind
    if dataclasses.is_dataclass(plain_kind):
        parts: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(plain_kind)
        return frozenset(part.name for part in parts if part.init)
    if typing.is_typeddict(plain_kind):
        return frozenset(plain_kind.__annotations__)
    fields: Any = getattr(plain_kind, "__struct_encode_fields__", None)
    if fields is None and hasattr(plain_kind, "model_validate_json"):
        models: Mapping[str, Any] = getattr(plain_kind, "model_fields", {})
        fields = [*models, *(field.validation_alias for field in models.values())]
    return None if fields is None else frozenset(name for name in fields if isinstance(name, str))


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Tell whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
