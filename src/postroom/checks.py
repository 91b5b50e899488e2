"""Checks of what constructors are given: each names the argument, what it was, and what it takes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, NoReturn

from .errors import ConfigurationError, shown

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


def check_duration(name: str, value: object, *, zero: bool = False, optional: bool = False) -> None:
    """Refuse what is no duration, or no positive one unless ``zero`` is allowed."""
    if optional and value is None:
        return
    if not isinstance(value, timedelta):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        example = f"timedelta(seconds={value})" if is_number else "timedelta(seconds=5)"
        _refuse(name, value, f"a timedelta, such as {example}{' or None' * optional}")
    if value < _ZERO or (value == _ZERO and not zero):
        rule = "must not be negative" if zero else "must be positive"
        raise ConfigurationError(f"{name}={value} {rule}{', or None for no limit' * optional}")


def check_count(name: str, value: object, *, least: int = 1, optional: bool = False) -> None:
    """Refuse what is no whole number, or one below ``least``; a bool is none."""
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _refuse(name, value, f"an int of at least {least}{' or None' * optional}")


def check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    """Refuse what is none of the values that there are."""
    if isinstance(value, str) and value not in choices:
        raise ConfigurationError(f"{name}={shown(value)} must be one of {', '.join(map(repr, choices))}")
    if not isinstance(value, str) and (value is not None or value not in choices):
        _refuse(name, value, f"one of {', '.join(map(repr, choices))}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False: a text such as ``"no"`` would be taken for true."""
    if not isinstance(value, bool):
        _refuse(name, value, "True or False")


def check_text(name: str, value: object, *, optional: bool = False) -> None:
    """Refuse what is no text; what a text may be is for others to say."""
    if not isinstance(value, str) and not (optional and value is None):
        _refuse(name, value, f"a text{' or None' * optional}")


def check_type(name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """Refuse what is no object of a class."""
    if not isinstance(value, kind) and not (optional and value is None):
        _refuse(name, value, f"a {kind.__name__}{' or None' * optional}")


def check_function(name: str, value: object, takes: str, *, optional: bool = False) -> None:
    """Refuse what cannot be called; ``takes`` says with what it is."""
    if not callable(value) and not (optional and value is None):
        _refuse(name, value, f"a function of {takes}{' or None' * optional}")


def check_methods(name: str, value: object, methods: Sequence[str], what: str, *, optional: bool = False) -> None:
    """Refuse what lacks a part of a port, and a class in place of its instance; ``what`` says what it takes."""
    if optional and value is None:
        return
    if inspect.isclass(value):
        raise ConfigurationError(f"{name} must not be the class {value.__qualname__}: pass an instance")
    if missing := [method for method in methods if not hasattr(value, method)]:
        _refuse(name, value, what, f"it has no {missing[0]}")


def _refuse(name: str, value: object, takes: str, why: str = "") -> NoReturn:
    """Raise an error; only values are shown that hold no secret."""
    kind = type(value).__qualname__
    is_shown = value is None or isinstance(value, int | float)
    given = f"{name}={value!r}" if is_shown else f"{name} of type {kind}"
    raise ConfigurationError(f"{given} must be {takes}{why and f': {why}'}")
