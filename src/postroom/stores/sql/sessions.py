"""What sessions and transactions on PostgreSQL begin with, as texts that need no prepared statement."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Final, Literal, TypeAlias
from uuid import UUID

from .statement import Statement

__all__ = ["Pooler", "begin_call", "call_settings", "handler_settings", "name_session", "set_session", "spelled"]

#: What stands between a store and its server, and hands a server session to another client after each transaction.
Pooler: TypeAlias = Literal["transaction"]

#: How sessions of a store are found in `pg_stat_activity`. Not said at connect: older poolers pass it on to others.
_NAME: Final = {"application_name": "postroom"}
#: Means the same between quotes whatever the server is set to.
_WORD: Final = re.compile(r"[A-Za-z0-9_.:-]+")
#: The longest time in milliseconds that a setting can hold.
_LONGEST: Final = 2**31 - 1
_DURABLE: Final = {"synchronous_commit": "on"}
#: What the store's own statements need.
_CALLS: Final = {
    # The flush of a claim also flushes the producers' earlier commits, so nothing can be published and then vanish.
    **_DURABLE,
    "idle_in_transaction_session_timeout": "60000",
    # A table that was nearly empty when it was last analysed looks cheap to read as a whole.
    "enable_seqscan": "off",
    # A plan that is kept knows neither the LIMIT nor that the table was empty when it was made.
    "plan_cache_mode": "force_custom_plan",
}
#: The limit of a handler's transaction never becomes shorter than this.
_SHORTEST_LIMIT: Final = timedelta(minutes=1)


def call_settings(timeout: timedelta | None) -> dict[str, str]:
    """Return what the store's own statements run with, for calls that wait for an answer until ``timeout``."""
    if timeout is None:
        return dict(_CALLS)
    # A server that waits for a lock does not notice that its client is gone, and would keep the session for as long.
    # It gives up later than the client, so that an answer that is in time is never missed.
    return {**_CALLS, "statement_timeout": _milliseconds(2 * timeout)}


def set_session(settings: Mapping[str, str]) -> str:
    """Return what names and sets a session: a SELECT that may be given a condition, with one row for each setting."""
    # In a stricter isolation claims at the same time would fail instead of passing over each other's rows.
    return _set_config({**_NAME, **settings, "default_transaction_isolation": "read committed"})


def name_session() -> str:
    """Return what names a session, like `set_session`, and sets nothing that a handler could notice."""
    return _set_config(_NAME)


def _set_config(settings: Mapping[str, str]) -> str:
    rows = ", ".join(f"('{name}', '{value}')" for name, value in settings.items())
    return f"SELECT set_config(name, value, false) FROM (VALUES {rows}) AS setting(name, value)"


def begin_call(settings: Mapping[str, str]) -> str:
    """Return what begins a transaction of the store's own and sets it: one message, and nothing outlives it."""
    return f"BEGIN ISOLATION LEVEL READ COMMITTED;{_set_local(settings)}"


def handler_settings(timeout: timedelta | None) -> str:
    """Return what follows BEGIN in a handler's transaction, for a consumer that gives its handlers ``timeout``.

    The consumer ends a handler that takes too long, and the driver cancels its statement. Only a transaction whose
    process hangs is left to the server, which must not keep its locks for ever.
    """
    # The message is acknowledged after the commit, which therefore has to survive a crash of the server.
    settings = dict(_DURABLE)
    if timeout is not None:
        settings["idle_in_transaction_session_timeout"] = _milliseconds(max(2 * timeout, _SHORTEST_LIMIT))
    return _set_local(settings)


def _set_local(settings: Mapping[str, str]) -> str:
    return "".join(f" SET LOCAL {name} TO '{value}';" for name, value in settings.items())


def _milliseconds(duration: timedelta) -> str:
    return str(min(max(duration // timedelta(milliseconds=1), 1), _LONGEST))


def spelled(statement: Statement) -> str:
    """Return a statement with its values in it: only a text can follow another in one message."""
    return statement.spelled(_literal)


def _literal(value: object) -> str:
    """Write a value so that whatever is in it stays a value: in hexadecimal digits, unless it is a plain word."""
    if isinstance(value, UUID) or _WORD.fullmatch(str(value)):
        return f"'{value}'"
    return f"convert_from(decode('{str(value).encode().hex()}', 'hex'), 'UTF8')"
