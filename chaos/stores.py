"""The stores that workers use, by the name of what is put to the test."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from postroom.inbox import By, Inbox, Mode
from postroom.middleware.transactional import TransactionalStore
from postroom.outbox import Outbox
from postroom.store import Store
from postroom.stores import SQLStore, store_from_url
from postroom.transaction import Transactions

if TYPE_CHECKING:
    from postroom.stores.redis import RedisStore, RedisStreamStore

__all__ = ["LEASE", "NAMES", "HandlingInRedis", "delivering_store", "handling_store"]

#: ``pgbouncer`` is PostgreSQL with a pooler between it and every worker.
NAMES: Final = ("postgres", "pgbouncer", "mariadb", "sqlite", "redis", "redis-stream")
#: How long claims hold, of dispatchers and of those inboxes that have any.
LEASE: Final = timedelta(seconds=2)
_TIMEOUT: Final = timedelta(seconds=3)


def delivering_store(name: str, url: str) -> Store:
    """Return what a dispatcher claims from, not yet opened."""
    return _stream(url) if name == "redis-stream" else _store(name, url)


def _store(name: str, url: str) -> Store:
    pooler = {"pooler": "transaction"} if name == "pgbouncer" else {}
    return store_from_url(url, timeout=_TIMEOUT, **pooler)


def handling_store(name: str, url: str) -> TransactionalStore:
    """Return where a consumer has its transactions, its inbox and its outbox, not yet opened."""
    if name.startswith("redis"):
        from postroom.stores.redis import RedisStore  # noqa: PLC0415 -- a process imports its own library alone

        in_redis = RedisStore(url, timeout=_TIMEOUT)
        return HandlingInRedis(in_redis, _stream(url) if name == "redis-stream" else in_redis)
    store = _store(name, url)
    assert isinstance(store, SQLStore)  # noqa: S101 -- the only other kind that is put to the test here
    return store


def _stream(url: str) -> RedisStreamStore:
    from postroom.stores.redis import RedisStreamStore  # noqa: PLC0415 -- as above

    # Kept as long as the other stores do, so that a run can be judged by what was delivered.
    return RedisStreamStore(url, keep_delivered=timedelta(days=7), timeout=_TIMEOUT)


class HandlingInRedis:
    """Transactions and inboxes in Redis, with claims as short as those of dispatchers, and either kind of outbox."""

    def __init__(
        self,
        store: RedisStore,
        outboxes: RedisStore | RedisStreamStore,
        *,
        lease: timedelta = LEASE,
        longest: timedelta = timedelta(minutes=10),
    ) -> None:
        self._store = store
        self._outboxes = outboxes
        self._lease = lease
        self._longest = longest

    async def open(self) -> bool:
        return await self._store.open()

    async def close(self) -> None:
        await self._store.close()

    def transactions(self) -> Transactions:
        return self._store.transactions()

    def outbox(self, *, wake: Callable[[], object] | None = None) -> Outbox:
        return self._outboxes.outbox(wake=wake)

    def inbox(
        self,
        consumer: str,
        *,
        mode: Mode,
        by: By = "id",
        retention: timedelta = timedelta(days=1),
        redelivery_horizon: timedelta | None,
    ) -> Inbox:
        from postroom.stores.redis import RedisInbox  # noqa: PLC0415 -- as above

        return RedisInbox(
            consumer,
            mode=mode,
            by=by,
            retention=retention,
            redelivery_horizon=redelivery_horizon,
            lease=self._lease,
            longest=self._longest,
        )
