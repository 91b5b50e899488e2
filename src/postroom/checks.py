"""Checks of constructor arguments: each raises an error that names the argument, its value and what it takes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, NoReturn

from .errors import ConfigurationError, shown
from .threads import is_async

__all__ = [
    "check_choice",
    "check_count",
    "check_duration",
    "check_flag",
    "check_function",
    "check_methods",
    "check_text",
    "check_type",
]

_ZERO: Final = timedelta(0)


def check_duration(
    name: str,
    value: object,
    *,
    zero: bool = False,
    least: timedelta | None = None,
    most: timedelta | None = None,
    optional: bool = False,
) -> None:
    """Raise unless the value is a duration within the bounds: positive, unless zero or a negative bound is allowed."""
    if optional and value is None:
        return
    if not isinstance(value, timedelta):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        example = f"timedelta(seconds={value})" if is_number else "timedelta(seconds=5)"
        _refuse(name, value, f"a timedelta, such as {example}{' or None' * optional}")
    may_be_negative = least is not None and least < _ZERO
    if not may_be_negative and (value < _ZERO or (value == _ZERO and not zero)):
        rule = "must not be negative" if zero else "must be positive"
        raise ConfigurationError(f"{name}={value} {rule}{', or None for no limit' * optional}")
    if least is not None and value < least:
        raise ConfigurationError(f"{name}={value} must be at least {least}")
    if most is not None and value > most:
        raise ConfigurationError(f"{name}={value} must be at most {most}")


def check_count(name: str, value: object, *, least: int = 1, most: int | None = None, optional: bool = False) -> None:
    """Raise unless the value is an int, not a bool, within the bounds."""
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        _refuse(name, value, f"an int {bounds}{' or None' * optional}")


def check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    """Raise unless the value is one of the choices."""
    if isinstance(value, str) and value not in choices:
        raise ConfigurationError(f"{name}={shown(value)} must be one of {', '.join(map(repr, choices))}")
    if not isinstance(value, str) and (value is not None or value not in choices):
        _refuse(name, value, f"one of {', '.join(map(repr, choices))}")


def check_flag(name: str, value: object) -> None:
    """Raise unless the value is True or False; a string such as ``"no"`` would count as true."""
    if not isinstance(value, bool):
        _refuse(name, value, "True or False")


def check_text(name: str, value: object, *, optional: bool = False) -> None:
    """Raise unless the value is a string; which strings are valid is checked where they are used."""
    if not isinstance(value, str) and not (optional and value is None):
        _refuse(name, value, f"a string{' or None' * optional}")


def check_type(name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """Raise unless the value is an instance of a class."""
    if not isinstance(value, kind) and not (optional and value is None):
        _refuse(name, value, f"a {kind.__name__}{' or None' * optional}")


def check_function(name: str, value: object, takes: str, *, optional: bool = False, may_be_async: bool = False) -> None:
    """Raise unless the value is a function, or an object that can be called; ``takes`` names its argument.

    A class is called without an error, and what it makes is no answer. So is an async function, where nothing awaits
    the coroutine that it returns.
    """
    if optional and value is None:
        return
    if inspect.isclass(value):
        _refuse_class(name, value)
    if not callable(value):
        _refuse(name, value, f"a function of {takes}{' or None' * optional}")
    if not may_be_async and is_async(value):
        raise ConfigurationError(f"{name} must be a plain function of {takes}, not an async one: nothing awaits it")


def check_methods(name: str, value: object, methods: Sequence[str], what: str, *, optional: bool = False) -> None:
    """Raise unless the value has the methods of a port; ``what`` names the port. A class is not an instance of it."""
    if optional and value is None:
        return
    if inspect.isclass(value):
        _refuse_class(name, value)
    if missing := [method for method in methods if not hasattr(value, method)]:
        _refuse(name, value, what, f"it has no {missing[0]}")


def _refuse_class(name: str, value: type) -> NoReturn:
    raise ConfigurationError(f"{name} must not be the class {value.__qualname__}: pass an instance")


def _refuse(name: str, value: object, takes: str, why: str = "") -> NoReturn:
    """Raise an error that shows the value only if it cannot hold a secret."""
    kind = type(value).__qualname__
    is_shown = value is None or isinstance(value, int | float)
    given = f"{name}={value!r}" if is_shown else f"{name} of type {kind}"
    raise ConfigurationError(f"{given} must be {takes}{why and f': {why}'}")
