"""Settings that belong together, beside the defaults: spread them into the constructors that they are for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypedDict

from .retry import Backoff

__all__ = ["MODERATE", "DispatcherSettings", "Preset", "StoreSettings"]


class DispatcherSettings(TypedDict):
    """Keywords of a `Dispatcher`."""

    batch: int
    poll_interval: timedelta
    max_attempts: int
    backoff: Backoff
    cleanup_interval: timedelta


class StoreSettings(TypedDict):
    """Keywords of a store."""

    keep_delivered: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """How a store is read and cleaned; `dataclasses.replace` changes a part of it.

    Example:
        >>> from postroom import Dispatcher, presets
        >>> from postroom.stores import PostgresStore
        >>> store = PostgresStore("postgresql://localhost/shop", **presets.MODERATE.store)
        >>> dispatcher = Dispatcher(store, print, **presets.MODERATE.dispatcher)
    """

    #: How long to wait at the most before looking for work.
    poll_interval: timedelta
    #: How many messages are claimed at once.
    batch: int
    #: After how many deliveries a failing message is dead.
    max_attempts: int
    #: How long a failed message waits, by its number of attempts.
    backoff: Backoff
    #: How often delivered messages past their retention are deleted.
    cleanup_interval: timedelta
    #: How long delivered messages stay.
    keep_delivered: timedelta

    @property
    def dispatcher(self) -> DispatcherSettings:
        """What a `Dispatcher` is given: ``Dispatcher(store, publisher, **preset.dispatcher)``."""
        return {
            "batch": self.batch,
            "poll_interval": self.poll_interval,
            "max_attempts": self.max_attempts,
            "backoff": self.backoff,
            "cleanup_interval": self.cleanup_interval,
        }

    @property
    def store(self) -> StoreSettings:
        """What a store is given: ``PostgresStore(dsn, **preset.store)``."""
        return {"keep_delivered": self.keep_delivered}


#: A look every second, small batches, and a history of one day: for a database that has other things to do.
MODERATE: Final = Preset(
    poll_interval=timedelta(seconds=1),
    batch=100,
    max_attempts=10,
    backoff=Backoff(base=timedelta(seconds=1), max=timedelta(minutes=1)),
    cleanup_interval=timedelta(hours=1),
    keep_delivered=timedelta(hours=24),
)
