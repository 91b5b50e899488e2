"""The store in Redis: entries and sorted sets under one hash tag, every change one script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Unpack
from uuid import UUID

from ...message import DEFAULT_NAMESPACE
from ...outbox import Outbox, OutboxSettings, check_settings
from ...store import (
    PARKED_FOR,
    Claim,
    ClaimTerms,
    Dead,
    Delivered,
    Features,
    Peeked,
    Release,
    Retry,
    Settlement,
    Stats,
    destination_name,
)
from .base import AT_ONCE, SUSPECTS_EVERY, TIMEOUT, WEEK, StoreInRedis
from .decisions import ticket_keys, ticket_script
from .hints import listen
from .keys import Keys
from .profile import Profile
from .record import clipped, identity_of, unpacked
from .scripts import Script, script

__all__ = ["Counters", "RedisStore"]

#: How many seconds repair leaves the server to others after each look.
_PAUSE: Final = 0.005
_MICROSECOND: Final = timedelta(microseconds=1)
_OUTCOMES: Final = {Delivered: "d", Retry: "r", Dead: "x", Release: "e"}
_PARKED: Final = "k"
#: How many bytes of a token are told.
_TOKEN: Final = 8
#: What a message consists of in the answers of the scripts `claim` and `peek`.
_PARTS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """How often things have happened in a namespace."""

    #: Messages that were stored.
    added: int
    #: Messages that were there already when they were added.
    duplicates: int
    #: How often a message was made dead.
    died: int
    #: What `RedisStore.repair` has mended, and what claims found that belongs to no message: both should be zero.
    mended: int
    orphans: int


class RedisStore(StoreInRedis):
    """The messages of one namespace in Redis, or in a server that speaks like it.

    Example:
        >>> from postroom.stores.redis import RedisStore
        >>> RedisStore("redis://localhost:6379", namespace="shop")
        RedisStore(namespace='shop', table='postroom_outbox')
    """

    def __init__(  # noqa: PLR0913 -- one keyword for each choice a user has
        self,
        server: Any,  # noqa: ANN401 -- a URL, or a client whose library is an extra
        *,
        namespace: str = DEFAULT_NAMESPACE,
        table: str = "postroom_outbox",
        keep_delivered: timedelta = WEEK,
        profile: Profile = "durable",
        replicas: int = 1,
        timeout: timedelta = TIMEOUT,
        **outbox: Unpack[OutboxSettings],
    ) -> None:
        """Set up a store; no connection is made.

        Args:
            server: A URL that begins with ``redis://``, ``redis+cluster://``, ``redis+sentinel://``, the same with
                ``rediss``, or ``unix://``; or an async client of redis-py's that repeats nothing by itself and answers
                with bytes.
            namespace: Whose messages these are; all of them are in one slot of a cluster.
            table: What all keys begin with.
            keep_delivered: How long delivered messages stay; zero deletes them at once.
            profile: What the server has to promise, and is asked for when the store opens. ``durable``: what was
                stored survives a crash of the server. ``replicated``: and replicas have it as well. ``volatile``:
                everything may be lost with the server.
            replicas: How many replicas are to have everything, with ``replicated``.
            timeout: How long one call to the server may take.
            outbox: Settings of the store's `outbox`: ``codec``, ``limits``, ``strict_order``, ``opaque_dedupe_keys``.

        Raises:
            ConfigurationError: The client repeats commands by itself, or turns bytes into texts; or there is no such
                profile.
        """
        check_settings(type(self).__name__, outbox, OutboxSettings)
        self.features: Features = Features(wakeups=True, requires_transaction=False, sees_namespaces=False)
        self._outbox_settings = outbox
        self._keys = Keys(table, namespace)
        super().__init__(
            server,
            namespace=namespace,
            table=table,
            prefix=self._keys.prefix,
            keep_delivered=keep_delivered,
            profile=profile,
            replicas=replicas,
            timeout=timeout,
        )

    async def _prepare(self) -> None:
        """Do nothing: scripts make what they need."""

    async def _claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        """Claim expired leases first, each key from its head on."""
        self._turn += 1
        since = b""
        while True:
            since, *parts = await self._run(
                "claim",
                min(limit, AT_ONCE),
                terms.lease // _MICROSECOND,
                terms.max_attempts,
                terms.suspect_after,
                int(terms.on_dead == "skip"),
                b"" if terms.tenant_id is None else terms.tenant_id.bytes,
                terms.worker.bytes,
                int(self._turn % SUSPECTS_EVERY == 0),
                since,
                "" if terms.max_bytes is None else terms.max_bytes,
                int(terms.newest_first),
            )
            if parts or not since:
                return [self._claimed(*parts[first : first + _PARTS]) for first in range(0, len(parts), _PARTS)]

    def _claimed(self, identity: bytes, body: bytes, attempt: int, token: int, seq: bytes, suspect: int) -> Claim:
        message, broken = unpacked(
            identity_of(int.from_bytes(identity)),
            body,
            namespace=self.namespace,
            attempt=attempt,
            token=token,
            arrived=int(seq),
        )
        return Claim(message, bool(suspect), broken)

    async def peek(self, limit: int, *, topic: str | None = None) -> list[Peeked]:
        """Return up to ``limit`` messages that claims would bring next; change nothing."""
        now, *parts = await self._run("peek", min(max(limit, 0), AT_ONCE), topic or "")
        peeked: list[Peeked] = []
        for first in range(0, len(parts), _PARTS):
            identity, body, attempt, token, seq, due = parts[first : first + _PARTS]
            claim = self._claimed(identity, body, attempt, token, seq, 0)
            peeked.append(Peeked(claim.message, (int(now) - int(due)) * _MICROSECOND, claim.broken))
        return [one for one in peeked if topic in {None, one.message.topic}]

    async def _settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        lost: list[Claim] = []
        for chunk in _chunks(settlements):
            is_usual = all(isinstance(settlement.outcome, Delivered) for settlement in chunk)
            told = [_told(chunk)] if is_usual else [b"", *(word for settlement in chunk for word in _words(settlement))]
            numbers = await self._run("settle", int(bool(self.keep_delivered)), *told)
            lost += [chunk[number - 1].claim for number in numbers]
        return lost

    async def extend(self, claims: Sequence[Claim], lease: timedelta) -> list[Claim]:
        """Lease claims anew from now on; return those that were lost."""
        lost: list[Claim] = []
        for chunk in _chunks(claims):
            words = [word for claim in chunk for word in (claim.message.id.bytes, claim.message.token)]
            numbers = await self._run("extend", lease // _MICROSECOND, *words)
            lost += [chunk[number - 1] for number in numbers]
        return lost

    async def sweep(self, terms: ClaimTerms) -> int:
        """Make messages dead that have no attempt left; return how many."""
        total = 0
        while count := await self._run("sweep", terms.max_attempts):
            total += count
        return total

    async def parked(self, *, after: str = "", limit: int = 100) -> list[str]:
        """Return destinations that have parked messages, in the order of their UTF-8 bytes."""
        found: list[str] = []
        has_more = True
        while has_more and len(found) < limit:
            has_more, *names = await self._run("parked", found[-1] if found else after, limit - len(found))
            found += [name.decode() for name in names]
        return found

    async def unpark(self, destination: str, limit: int) -> int:
        """Make messages due that are parked for a destination; return how many."""
        total = 0
        while total < limit:
            wanted = min(limit - total, AT_ONCE)
            seen, count = await self._run("unpark", destination_name(destination), wanted)
            total += count
            if seen < wanted:
                break
        return min(total, limit)

    async def purge(self, *, older_than: timedelta, limit: int = 1000) -> int:
        """Delete up to ``limit`` messages delivered longer ago; return how many."""
        total = 0
        while total < limit:
            wanted = min(limit - total, AT_ONCE)
            count = await self._run("purge", older_than // _MICROSECOND, wanted)
            total += count
            if count < wanted:
                break
        return total

    async def stats(self) -> Stats:
        """Tell how many messages are in each state; counting costs nothing here."""
        *counts, oldest = await self._run("stats")
        pending, processing, delivered, dead = counts
        return Stats(
            pending=pending,
            processing=processing,
            delivered=delivered,
            dead=dead,
            oldest_due=int(oldest) * _MICROSECOND if oldest else None,
        )

    async def counters(self) -> Counters:
        """Tell how often things have happened since the namespace is there, for metrics; they only grow."""
        names = ("offered", "duplicates", "died", "mended", "orphans")
        found = await self._client.call(self._client.foreign.hmget(f"{self._keys.prefix}:counters", *names))
        offered, duplicates, died, mended, orphans = (int(count or 0) for count in found)
        added = offered - duplicates
        return Counters(added=added, duplicates=duplicates, died=died, mended=mended, orphans=orphans)

    async def redrive(self, *identities: UUID) -> int:
        """Have dead messages tried again from their first attempt on; return how many were dead.

        Raises:
            TypeError: Something is not the `UUID` of a message.
        """
        for identity in identities:
            if not isinstance(identity, UUID):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers without types
                raise TypeError(f"redrive() takes the ids of messages as UUID objects, not {type(identity).__name__}")
        count = 0
        for chunk in _chunks(identities):
            count += await self._run("redrive", *(identity.bytes for identity in chunk))
        return count

    async def repair(self, *, at_once: int = 100) -> int:
        """Look through all messages and tickets, a few at a time, and mend what indexes do not agree with.

        Returns how many were mended: other than zero says that a script failed half way, and is worth a look at the
        server's log.
        """
        mended = await self._mended(script("repair"), self._keys.all, at_once)
        for which in ("tickets", "expiries"):
            keys = [*self._keys.all, *ticket_keys(self._keys)]
            mended += await self._mended(ticket_script("repair_tickets"), keys, at_once, which)
        return mended

    async def _mended(self, repair: Script, keys: Sequence[str], at_once: int, *which: str) -> int:
        mended, cursor = 0, b""
        while cursor != b"0":
            cursor, count = await self._client.evaluate(repair, keys, *which, cursor or 0, at_once)
            mended += int(count)
            await asyncio.sleep(_PAUSE)
        return mended

    async def due_elsewhere(self) -> dict[str, int]:
        """Return nothing: namespaces are parts of keys, which only a scan of the whole server would find."""
        return {}

    async def listen(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` at every hint of another process until cancelled."""
        await listen(self._client, self._keys.channel, wake)

    def outbox(self, *, wake: Callable[[], object] | None = None) -> Outbox:
        """Return what adds messages to this store, with its settings; ``wake`` is called when it has stored some."""
        return Outbox(namespace=self.namespace, table=self._table, wake=wake, **self._outbox_settings)

    async def _run(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 -- whatever the script answers
        return await self._client.run(name, self._keys.all, *arguments)


def _chunks(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[first : first + AT_ONCE] for first in range(0, len(items), AT_ONCE)]


def _told(settlements: Sequence[Settlement]) -> bytes:
    """Return what is told of claims that were all delivered; in one word, since each word takes its time."""
    messages = [settlement.claim.message for settlement in settlements]
    return b"".join([message.id.bytes + message.token.to_bytes(_TOKEN) for message in messages])


def _words(settlement: Settlement) -> tuple[Any, ...]:
    message, outcome = settlement.claim.message, settlement.outcome
    if isinstance(outcome, Release) and outcome.destination:
        name = destination_name(outcome.destination)
        return message.id.bytes, message.token, _PARKED, PARKED_FOR // _MICROSECOND, name
    delay = outcome.delay or timedelta(0) if isinstance(outcome, Retry | Release) else timedelta(0)
    error = clipped(outcome.error) if isinstance(outcome, Retry | Dead) else b""
    return message.id.bytes, message.token, _OUTCOMES[type(outcome)], delay // _MICROSECOND, error
