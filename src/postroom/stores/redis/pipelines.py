"""What is asked of clients and pipelines of redis-py, which is not imported here."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakSet

from ...errors import CommandRefusedError, ConfigurationError

__all__ = ["refuse_if_it_repeats", "refuse_unless_it_queues"]

# Clients and pipelines of a library that is not imported.
Foreign = Any

_ONCE: Final = "pass retry=Retry(NoBackoff(), 0): the library would write again what may have been written already"
#: Pools and clients of clusters that repeat nothing: to find out takes longer than to add a message.
_SOUND: Final[WeakSet[Foreign]] = WeakSet()


def refuse_if_it_repeats(client: Foreign) -> None:
    """Refuse a client, or a pipeline of it, that sends commands again when their answer is lost.

    Raises:
        ConfigurationError: It does, and what it writes could be written twice.
    """
    # The pipeline of a cluster names its client in one of two ways, as the release has it.
    owner: Foreign = getattr(client, "cluster_client", getattr(client, "_client", client))
    # A cluster's client repeats by itself, others have their connections do it.
    maker: Foreign = owner if hasattr(owner, "retry") else owner.connection_pool
    if maker in _SOUND:
        return
    retry = maker.retry if maker is owner else maker.connection_class(**maker.connection_kwargs).retry
    if retry is not None and retry.get_retries():
        raise ConfigurationError(f"the client repeats commands by itself; {_ONCE}")
    _SOUND.add(maker)


def refuse_unless_it_queues(pipeline: Foreign, what: str) -> None:
    """Refuse to do something with a pipeline that would send it at once.

    From ``watch()`` on, the library sends every command by itself until ``multi()``, so that what is watched can be
    read. A message would be stored then whatever becomes of the transaction.

    Raises:
        CommandRefusedError: It watches, and ``multi()`` was not called.
    """
    # That of a cluster leaves the work to another object, which calls the same by other names.
    works = getattr(pipeline, "_execution_strategy", pipeline)
    is_watching = getattr(works, "watching", False) or getattr(works, "_watching", False)
    has_begun = getattr(works, "explicit_transaction", False) or getattr(works, "_explicit_transaction", False)
    if is_watching and not has_begun:
        raise CommandRefusedError(what, "its pipeline watches keys, and sends everything at once; call multi() first")
