"""What the errors of Redis mean, by the word that they begin with, and what to do about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...errors import (
    ReadOnlyStoreError,
    StoreAuthenticationError,
    StoreError,
    StorePermissionError,
    StoreTimeoutError,
    StoreUnavailableError,
)

__all__ = ["is_of_lost_transport", "translated"]

#: What the server answers with when it cannot do anything now, or will not let us.
_KINDS: Final[Mapping[str, type[StoreError]]] = {
    "LOADING": StoreUnavailableError,
    "BUSY": StoreUnavailableError,
    "MASTERDOWN": StoreUnavailableError,
    "CLUSTERDOWN": StoreUnavailableError,
    "TRYAGAIN": StoreUnavailableError,
    "MOVED": StoreUnavailableError,
    "ASK": StoreUnavailableError,
    "UNBLOCKED": StoreUnavailableError,
    "NOREPLICAS": StoreUnavailableError,
    "MISCONF": StoreUnavailableError,
    "OOM": StoreUnavailableError,
    "READONLY": ReadOnlyStoreError,
    "NOAUTH": StoreAuthenticationError,
    "WRONGPASS": StoreAuthenticationError,
    "NOPERM": StorePermissionError,
}
#: What tells that there is no connection; by name, since Python's and the library's are called alike.
_LOST: Final = frozenset({"ConnectionError", "OSError", "EOFError", "RedisClusterException", "ClusterError"})
_ADVICE: Final[Mapping[str, str]] = {
    "LOADING": "the server is reading its data; it will answer soon",
    "BUSY": "a script of somebody's runs for too long; see SCRIPT KILL",
    "MISCONF": "the server cannot write to its disk; look at its log",
    "OOM": "the server has no memory left; raise maxmemory, and deliver or purge what is stored",
    "CLUSTERDOWN": "some slots have no server; it will answer once replicas have taken over, or see CLUSTER NODES",
    "TRYAGAIN": "the slot is on its way to another server; it will answer soon",
    "MOVED": "another server of the cluster has the slot; use redis+cluster://… or a RedisCluster client",
    "ASK": "the slot is on its way to another server; use redis+cluster://… or a RedisCluster client",
    "UNBLOCKED": "the server has become a replica; it will be another one soon",
    "READONLY": "connect to the primary",
    "NOPERM": "let the user run EVALSHA, EVAL and the commands of the scripts on the keys of the namespace",
    "WRONGTYPE": "something else has written to that key; use another table= or namespace=",
    "CROSSSLOT": "all keys of a namespace must be in one slot",
}


#: What the library calls some of them, leaving out the word.
_WORDS: Final[Mapping[str, str]] = {
    "BusyLoadingError": "LOADING",
    "AskError": "ASK",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "MovedError": "MOVED",
    "NoPermissionError": "NOPERM",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "TryAgainError": "TRYAGAIN",
}


#: What servers answer when a script calls a command that its user may not run; they leave out the word.
_REFUSED_IN_SCRIPT: Final = ("ACL failure in script", "user executing the script can't run this command")


#: What is looked for at a transport, stream or event loop of a connection that is gone: asyncio of Python 3.12 writes
#: to a transport that has lost its connection, and redis-py to one that another task of its own has just closed.
_OF_CONNECTIONS: Final = frozenset({"_add_writer", "_buffer", "close", "drain", "wait_closed", "write", "writelines"})


def is_of_lost_transport(error: AttributeError) -> bool:
    """Tell whether a library failed because the connection that it was about to use had been lost or closed."""
    return error.obj is None and error.name in _OF_CONNECTIONS


def translated(error: BaseException, place: str) -> StoreError:
    """Return our error for one of the library's."""
    words = " ".join(str(error).split())
    word = _WORDS.get(type(error).__name__) or words.partition(" ")[0].rstrip(":,")
    if any(text in words for text in _REFUSED_IN_SCRIPT):
        word = "NOPERM"
    kind = _kind(error, word)
    advice = _ADVICE.get(word, "")
    if not advice and kind is StoreUnavailableError:
        advice = "check that the server runs, and its host and port"
    said = f"{place}: {type(error).__name__}: {words}"
    return kind(f"{said}; {advice}" if advice else said)


def _kind(error: BaseException, word: str) -> type[StoreError]:
    if word in _KINDS:
        return _KINDS[word]
    names = {base.__name__ for base in type(error).__mro__}
    if "TimeoutError" in names:
        return StoreTimeoutError
    if not names.isdisjoint({"AuthenticationError", "AuthorizationError"}):
        return StoreAuthenticationError
    return StoreError if names.isdisjoint(_LOST) else StoreUnavailableError
