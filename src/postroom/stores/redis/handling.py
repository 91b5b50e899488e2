"""What stores in Redis have for those who handle messages, whichever way they keep theirs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from ...inbox import Mode
from .inbox import RedisInbox
from .transactions import RedisTransactions

__all__ = ["HandlesInRedis"]

WEEK: Final = timedelta(days=7)


class HandlesInRedis:
    """A store whose outbox and inbox are written in the transactions of handlers, on its own server."""

    def __init__(self, transactions: RedisTransactions) -> None:
        self._transactions = transactions

    @property
    def client(self) -> Any:  # noqa: ANN401 -- of a library that is an extra
        """The client of redis-py that this store uses, for adapters on the same server."""
        return self._transactions.client.foreign

    def transactions(self) -> RedisTransactions:
        """Return what opens transactions on the server of this store; always the same."""
        return self._transactions

    def inbox(
        self,
        consumer: str,
        *,
        mode: Mode = "pessimistic",
        retention: timedelta = WEEK,
        redelivery_horizon: timedelta | None = None,
    ) -> RedisInbox:
        """Return the inbox of a consumer, beside the messages of this store."""
        return RedisInbox(consumer, mode=mode, retention=retention, redelivery_horizon=redelivery_horizon)
