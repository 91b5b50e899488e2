"""What both stores in Redis are: messages under one hash tag, on a server that is held to its profile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from ...checks import check_duration
from ...inbox import By, Mode
from ...store import Claim, ClaimTerms, Settlement
from .client import Client
from .inbox import DAY, RedisInbox
from .profile import Profile
from .scripts import alone
from .transactions import RedisTransactions

__all__ = ["AT_ONCE", "SUSPECTS_EVERY", "TIMEOUT", "WEEK", "StoreInRedis"]

WEEK: Final = timedelta(days=7)
TIMEOUT: Final = timedelta(seconds=10)
#: How often suspects are asked for first, so that a constant load cannot starve them.
SUSPECTS_EVERY: Final = 16
#: A script holds up everybody else's commands, so none does more than this.
AT_ONCE: Final = 500


class StoreInRedis(ABC):
    """A store of which one kind says how messages are claimed and settled."""

    def __init__(  # noqa: PLR0913 -- one keyword for each choice a user has
        self,
        server: Any,  # noqa: ANN401 -- a URL, or a client whose library is an extra
        *,
        namespace: str,
        table: str,
        prefix: str,
        keep_delivered: timedelta,
        profile: Profile,
        replicas: int,
        timeout: timedelta,
    ) -> None:
        check_duration("keep_delivered", keep_delivered, zero=True)
        self.namespace = namespace
        self.keep_delivered = keep_delivered
        self._table = table
        self._prefix = prefix
        self._client = Client(server, timeout=timeout)
        self._transactions = RedisTransactions(
            self._client.foreign, tag=namespace, profile=profile, replicas=replicas, timeout=timeout
        )
        self._assurance = self._transactions.assurance
        self._is_open = False
        self._turn: int = 0

    def __repr__(self) -> str:
        """Show what is stored where, without the address, which may hold a password."""
        return f"{type(self).__name__}(namespace={self.namespace!r}, table={self._table!r})"

    async def open(self) -> bool:
        """Connect, and check that the server keeps its profile; tell whether the store was closed before.

        Raises:
            ConfigurationError: It does not; the message says which setting or profile to choose.
        """
        was_closed = not self._is_open
        await self._assurance.check()
        await self._prepare()
        self._is_open = True
        return was_closed

    async def close(self) -> None:
        """Close all connections; the store can be opened again."""
        self._is_open = False
        await self._client.close()

    def confirmed(self) -> AbstractAsyncContextManager[None]:
        """Return a block at whose end everything that was stored in it is as safe as the profile says.

        For whoever adds messages, and then tells somebody else that they are stored. Claims, acknowledgements and
        transactions wait for that by themselves.

        Raises:
            StoreUnavailableError: That is not certain.
        """
        return self._assurance.confirmed(self._prefix)

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        """Lease what is due, or one suspect.

        What is handed out is safe: no message is delivered that a crash of the server would take back.
        """
        return await self._assurance.claimed(partial(self._claim, limit, terms), self._settle, self._prefix)

    async def clock(self) -> datetime:
        """Return what the server's clock says: of the server that has the messages, in a cluster."""
        seconds, microseconds = await self._client.evaluate(alone("clock"), [self._prefix])
        return datetime.fromtimestamp(int(seconds), UTC) + timedelta(microseconds=int(microseconds))

    async def settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        """Record what became of claims, safely; return those that were lost."""
        async with self.confirmed():
            return await self._settle(settlements)

    @property
    def client(self) -> Any:  # noqa: ANN401 -- of a library that is an extra
        """The client of redis-py that this store uses, for adapters on the same server."""
        return self._client.foreign

    def transactions(self) -> RedisTransactions:
        """Return what opens transactions on the server of this store; always the same."""
        return self._transactions

    def inbox(
        self,
        consumer: str,
        *,
        mode: Mode = "pessimistic",
        by: By = "id",
        retention: timedelta = DAY,
        redelivery_horizon: timedelta | None = None,
    ) -> RedisInbox:
        """Return the inbox of a consumer, beside the messages of this store."""
        return RedisInbox(consumer, mode=mode, by=by, retention=retention, redelivery_horizon=redelivery_horizon)

    @abstractmethod
    async def _prepare(self) -> None:
        """Make what has to be there before anything is claimed."""

    @abstractmethod
    async def _claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        """Claim messages; whether they are safe is asked afterwards."""

    @abstractmethod
    async def _settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        """Settle claims; whether that is safe is asked afterwards."""
