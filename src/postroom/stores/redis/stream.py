"""The store in a stream of Redis: messages are its entries, claims those of a consumer group."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Unpack
from uuid import uuid4

from ...checks import check_count, check_duration
from ...errors import DecodeError, InvalidNameError, StoreError, StoreTimeoutError
from ...message import DEFAULT_NAMESPACE, Message, is_namespace
from ...outbox import MessageSettings, check_settings
from ...store import Claim, ClaimTerms, Dead, Delivered, Features, Outcome, Peeked, Release, Retry, Settlement, Stats
from .base import AT_ONCE, SUSPECTS_EVERY, TIMEOUT, StoreInRedis
from .profile import Profile
from .record import clipped
from .stream_keys import StreamKeys
from .stream_outbox import SMALL, StreamOutbox
from .stream_record import Fields, Marshal, Unmarshal, arrival, moment, salvaged, unmarshalled

__all__ = ["RedisStreamStore", "StreamClaim"]

#: For how long the name of a consumer is known that has nothing in its hands.
FORGET_NAMES: Final = timedelta(hours=1)
#: How many new entries a claim that is bounded by bytes reads before it knows their size.
FEW: Final = 8
#: How long one call waits for new entries.
BLOCK: Final = timedelta(seconds=1)
#: How long a listener rests after new entries have come, so that a load does not hold it up.
REST: Final = 0.02
_MICROSECOND: Final = timedelta(microseconds=1)
_MILLISECOND: Final = timedelta(milliseconds=1)
#: When a message was added that was not due then; its entry is younger.
_TIME: Final = b"postroom:time"
#: What a message consists of in the answer of the script `peek`.
_PARTS: Final = 5
_OUTCOMES: Final[Mapping[type[Outcome], str]] = {Retry: "r", Dead: "x", Release: "e"}


@dataclass(frozen=True, slots=True)
class StreamClaim(Claim):
    """A claim that knows its entry of the stream."""

    entry: str = ""


class RedisStreamStore(StoreInRedis):
    """The messages of one namespace in a stream of Redis, or of a server that speaks like it.

    The quick store: a message is one entry, and one that goes out at the first try is written nowhere else. What it
    does not do is said by its features: messages of one key may overtake each other, and nothing is known of
    duplicates. Where that matters use a `RedisStore`. One group reads the stream, since what it delivered is deleted.

    Example:
        >>> from postroom.stores.redis.stream import RedisStreamStore
        >>> RedisStreamStore("redis://localhost:6379", namespace="shop")
        RedisStreamStore(namespace='shop', table='postroom_stream')
    """

    def __init__(  # noqa: PLR0913, PLR0915 -- one keyword for each choice a user has
        self,
        server: Any,  # noqa: ANN401 -- a URL, or a client whose library is an extra
        *,
        namespace: str = DEFAULT_NAMESPACE,
        table: str = "postroom_stream",
        stream: str | None = None,
        group: str = "outbox-publisher",
        consumer: str | None = None,
        batch: int = AT_ONCE,
        block: timedelta | None = None,
        claim_interval: timedelta = timedelta(0),
        min_idle: timedelta | None = None,
        keep_delivered: timedelta = timedelta(0),
        marshal: Marshal | None = None,
        unmarshal: Unmarshal | None = None,
        profile: Profile = "durable",
        replicas: int = 1,
        timeout: timedelta = TIMEOUT,
        **outbox: Unpack[MessageSettings],
    ) -> None:
        """Set up a store; no connection is made.

        Args:
            server: A URL or a client, as for `RedisStore`.
            namespace: Whose messages these are; all of them are in one slot of a cluster.
            table: What the key of the stream begins with: ``<table>:{<namespace>}:stream``.
            stream: The key of the stream, if it is to have a name of its own. In a cluster it needs the braces of the
                namespace, ``{<namespace>}:events``, to be written in the transactions of handlers.
            group: The consumer group; made when it is not there, from the first entry on.
            consumer: Who reads, by default this host, process and object. A name that outlives the process takes over
                at once what that held; two that run at the same time under one name do so from each other.
            batch: How many entries one claim takes at the most, 1 to 500, however many a dispatcher asks for.
            block: How long one XREAD waits for new entries to come; by default a second, or ``timeout`` if that is
                shorter.
            claim_interval: How often entries are looked for that another worker has read and did not settle in time;
                zero looks at every claim, which costs next to nothing.
            min_idle: How long an entry that another worker has read must be idle before it is taken over. By default
                that is as long as the worker's lease, and a minute if the worker is not one of postroom's. It may
                lengthen a lease, and never shortens one. All stores of a stream need the same.
            keep_delivered: How long it is known which messages were delivered; what they said is deleted at once.
            marshal: Turns a message into the fields of an entry, for `outbox`.
            unmarshal: Turns the fields of an entry into a message; the same fields must always bring the same id.
            profile: What the server has to promise, and is asked for when the store opens: see `RedisStore`.
            replicas: How many replicas are to have everything, with ``replicated``.
            timeout: How long one call to the server may take.
            outbox: Settings of the store's `outbox`: ``codec``, ``limits``, ``opaque_dedupe_keys``.

        Raises:
            InvalidNameError: There can be no stream, group or consumer of that name.
            ConfigurationError: The client repeats commands by itself, or turns bytes into texts; there is no such
                profile; or a number or duration is out of range.
        """
        check_settings(type(self).__name__, outbox, MessageSettings)
        check_count("batch", batch, most=AT_ONCE)
        check_duration("timeout", timeout)
        check_duration("block", block, least=_MILLISECOND, most=timeout, optional=True)
        check_duration("claim_interval", claim_interval, zero=True)
        check_duration("min_idle", min_idle, least=_MILLISECOND, optional=True)
        for kind, name in (("group", group), ("consumer", consumer)):
            if name is not None and (not is_namespace(name) or "|" in name):
                raise InvalidNameError(kind, name, "1 to 100 printable characters without a |")
        self._keys = StreamKeys(table, namespace, stream)
        super().__init__(
            server,
            namespace=namespace,
            table=table,
            prefix=self._keys.stream,
            keep_delivered=keep_delivered,
            profile=profile,
            replicas=replicas,
            timeout=timeout,
        )
        self.features: Features = Features(
            wakeups=True, requires_transaction=False, ordered=False, dedupes=False, parks=False, sees_namespaces=False
        )
        self.consumer: str = consumer or f"{socket.gethostname()[:50]}-{os.getpid()}-{uuid4().hex}"
        self._group = group
        self._stream = stream
        self._batch = batch
        self._block = min(BLOCK, timeout) if block is None else block
        self._claim_interval = claim_interval.total_seconds()
        self._min_idle: int | str = "" if min_idle is None else min_idle // _MILLISECOND
        #: When the next claim looks for entries that other workers have left.
        self._next_look = 0.0
        self._marshal = marshal
        self._outbox_settings = outbox
        self._unmarshal = unmarshal
        #: Tells this object from an earlier one of the same name, whose claims are to be taken over.
        self._incarnation = uuid4().hex[:8]
        self._has_claimed = False
        #: How many new entries the next claim may expect to fit into its bytes, by what fitted into the last.
        self._expected = FEW
        #: Whether entries were read that are large and were not announced, of which the next claim is informed.
        self._has_read_large = False

    def outbox(self, *, wake: Callable[[], object] | None = None) -> StreamOutbox:
        """Return what adds messages to this store, with its settings; ``wake`` is called when it has stored some."""
        return StreamOutbox(
            namespace=self.namespace,
            table=self._table,
            stream=self._stream,
            marshal=self._marshal,
            wake=wake,
            **self._outbox_settings,
        )

    async def _prepare(self) -> None:
        """Make the group if it is not there."""
        await self._run("open")

    # -- claim -------------------------------------------------------------------------------------------------

    async def _claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        """Claim expired leases first, then what waits for another try, then new entries.

        What is not for these terms can only be told once it is read: it is put aside, and no attempt is spent on it.
        """
        self._turn += 1
        since = b""
        while True:
            since, claims = await self._look(limit, terms, since)
            others = [claim for claim in claims if not _is_for(claim.message, terms)] if terms.tenant_id else []
            if others:
                await self._settle([Settlement(claim, Release()) for claim in others])
                claims = [claim for claim in claims if _is_for(claim.message, terms)]
            if claims or not (others or since):
                return claims

    async def _look(self, limit: int, terms: ClaimTerms, since: bytes) -> tuple[bytes, list[Claim]]:
        """Lease what was read before, then what is new; return where to look on if there was too much, and claims."""
        size, lease = min(limit, self._batch), max(terms.lease // _MILLISECOND, 1)
        name = f"{self.consumer}|{self._incarnation}|{terms.worker.hex}|{lease}"
        tenant = b"" if terms.tenant_id is None else terms.tenant_id.bytes
        before, turn = "" if self._has_claimed else f"{self.consumer}|", int(self._turn % SUSPECTS_EVERY == 0)
        wishes = size, lease, terms.max_attempts, terms.suspect_after, name, before, turn, tenant
        bounds = "" if terms.max_bytes is None else terms.max_bytes, self._expected, SMALL, int(self._has_read_large)
        claims: list[Claim] = []
        try:
            answer = await self._run("claim", *wishes, since, *bounds, self._is_time_to_look(), self._min_idle)
            since, base, suspect, entries, deliveries, fresh, wanted = answer
            self._has_claimed, self._has_read_large = True, False
            claims += self._taken(entries, deliveries, base=int(base), is_suspect=bool(suspect))
            claims += [self._one(entry, _fields(words), 1, int(base) + 1) for entry, words in fresh]
            if wanted:
                claims += await self._fresh(wanted, name, int(base) + 1)
            else:
                self._expected = len(fresh) + FEW
        except StoreError as error:
            if claims:
                return since, claims  # whatever it was, it will come up again when these are under way
            if not str(error.__cause__).startswith("NOGROUP"):
                raise
            await self._run("open")
            return await self._look(limit, terms, since)
        return since, claims

    def _is_time_to_look(self) -> int:
        """Tell whether a claim looks for entries that other workers have left, as a script wants it."""
        now = asyncio.get_running_loop().time()
        if now < self._next_look:
            return 0
        self._next_look = now + self._claim_interval
        return 1

    def _taken(self, entries: list[Any], deliveries: list[int], *, base: int, is_suspect: bool) -> list[Claim]:
        claims: list[Claim] = []
        for (entry, words), count, attempt in zip(entries, deliveries[::2], deliveries[1::2], strict=True):
            claims.append(self._one(entry, _fields(words), attempt, base + count, is_suspect=is_suspect))
        return claims

    async def _fresh(self, limit: int, name: str, token: int) -> list[Claim]:
        """Read new entries without a script, which are ours for as long as the name says."""
        words = "XREADGROUP", "GROUP", self._group, name, "COUNT", limit, "STREAMS", self._keys.stream, ">"
        answer = await self._client.ask(self._keys.stream, *words)
        claims: list[Claim] = [self._one(entry, fields, 1, token) for entry, fields in _entries(answer)]
        self._has_read_large = max([len(claim.message.payload) for claim in claims], default=0) > SMALL
        return claims

    def _one(
        self, entry: bytes, fields: dict[bytes, bytes], attempt: int, token: int, *, is_suspect: bool = False
    ) -> StreamClaim:
        name, added = entry.decode(), fields.pop(_TIME) if _TIME in fields else None
        try:
            time = arrival(name) if added is None else moment(added)
            if self._unmarshal is None:
                message = unmarshalled(fields, self.namespace, attempt, token, time)
            else:
                message = self._made(self._unmarshal, fields, attempt, token, time)
        except DecodeError as error:
            broken = salvaged(fields, name, namespace=self.namespace, attempt=attempt, token=token)
            return StreamClaim(broken, is_suspect, str(error), name)
        return StreamClaim(message, is_suspect, None, name)

    def _made(self, unmarshal: Unmarshal, fields: Fields, attempt: int, token: int, time: datetime) -> Message:
        try:
            return replace(unmarshal(fields), namespace=self.namespace, attempt=attempt, token=token, time=time)
        except Exception as error:  # noqa: BLE001 -- one entry that it cannot read must not hold up all the others
            raise DecodeError(f"the entry cannot be read ({type(error).__name__})") from None

    async def peek(self, limit: int, *, topic: str | None = None) -> list[Peeked]:
        """Return up to ``limit`` messages that claims would bring next; change nothing."""
        limit = max(limit, 0)
        # The topic is known once an entry is read.
        base, *parts = await self._run("peek", min(limit, AT_ONCE) if topic is None else AT_ONCE, self._min_idle)
        found = [self._peeked(int(base), *parts[first : first + _PARTS]) for first in range(0, len(parts), _PARTS)]
        return [peeked for peeked in found if topic in {None, peeked.message.topic}][:limit]

    def _peeked(self, base: int, entry: bytes, words: list[bytes], count: int, attempts: int, due_for: bytes) -> Peeked:
        claim = self._one(entry or b"0-0", _fields(words), attempts, base + count)
        return Peeked(claim.message, int(due_for) * _MICROSECOND, claim.broken)

    # -- settle ------------------------------------------------------------------------------------------------

    async def _settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        lost: list[Claim] = []
        for first in range(0, len(settlements), AT_ONCE):
            lost += await self._settled(settlements[first : first + AT_ONCE])
        return lost

    async def _settled(self, settlements: Sequence[Settlement]) -> list[Claim]:
        delivered: list[StreamClaim] = []
        others: list[Claim] = []
        lost: list[Claim] = []
        words: list[Any] = []
        for settlement in settlements:
            claim, outcome = settlement.claim, settlement.outcome
            if not isinstance(claim, StreamClaim):
                # Of a stranger nothing is stored, and only delivered messages are ever deleted.
                lost += [] if isinstance(outcome, Delivered) else [claim]
            elif isinstance(outcome, Delivered):
                delivered.append(claim)
            else:
                others.append(claim)
                words += _words(claim, outcome)
        if delivered or others:
            numbers = await self._run("settle", int(bool(self.keep_delivered)), self._told(delivered), *words)
            asked = [*delivered, *others] if numbers else []
            lost += [asked[number - 1] for number in numbers]
        return lost

    def _told(self, claims: Sequence[StreamClaim]) -> str:
        """Return what is told of delivered claims; in one word, since each word takes its time."""
        if not self.keep_delivered:
            return " ".join([f"{claim.entry} {claim.message.token}" for claim in claims])
        told = [(claim.entry, claim.message) for claim in claims]
        return " ".join([f"{entry} {message.token} {message.attempt} {message.id.hex}" for entry, message in told])

    async def extend(self, claims: Sequence[Claim], lease: timedelta) -> list[Claim]:
        """Lease claims anew from now on; return those that were lost."""
        known = [claim for claim in claims if isinstance(claim, StreamClaim)]
        lost = [claim for claim in claims if not isinstance(claim, StreamClaim)]
        for first in range(0, len(known), AT_ONCE):
            chunk = known[first : first + AT_ONCE]
            blob = " ".join([f"{claim.entry} {claim.message.token}" for claim in chunk])
            numbers = await self._run("extend", max(lease // _MILLISECOND, 1), blob)
            lost += [chunk[number - 1] for number in numbers]
        return lost

    # -- upkeep ------------------------------------------------------------------------------------------------

    async def parked(self, *, after: str = "", limit: int = 100) -> list[str]:
        """Return nothing: an entry of a stream cannot be parked."""
        return []

    async def unpark(self, destination: str, limit: int) -> int:
        """Do nothing: an entry of a stream cannot be parked."""
        return 0

    async def sweep(self, terms: ClaimTerms) -> int:
        """Make messages dead that have no attempt left; return how many."""
        count: int = await self._run("sweep", terms.max_attempts, FORGET_NAMES // _MILLISECOND, self._min_idle)
        return count

    async def purge(self, *, older_than: timedelta, limit: int = 1000) -> int:
        """Forget up to ``limit`` messages delivered longer ago; return how many."""
        return await self._repeated("purge", limit, older_than // _MICROSECOND)

    async def redrive(self, *, limit: int = AT_ONCE) -> int:
        """Have up to ``limit`` dead messages tried again, the oldest first, as new entries; return how many."""
        return await self._repeated("redrive", limit, SMALL)

    async def _repeated(self, name: str, limit: int, *arguments: Any) -> int:  # noqa: ANN401 -- whatever it takes
        """Run a script that takes some at a time, until there are no more; return of how many it was true."""
        total = 0
        while total < limit:
            wanted = min(limit - total, AT_ONCE)
            count, seen = await self._run(name, *arguments, wanted)
            total += count
            if seen < wanted:
                break
        return total

    async def stats(self) -> Stats:
        """Tell how many messages are in each state; counting costs next to nothing here."""
        pending, processing, delivered, dead, oldest = await self._run("stats")
        return Stats(
            pending=pending,
            processing=processing,
            delivered=delivered,
            dead=dead,
            oldest_due=int(oldest) * _MICROSECOND if oldest else None,
        )

    async def due_elsewhere(self) -> dict[str, int]:
        """Return nothing: namespaces are parts of keys, which only a scan of the whole server would find."""
        return {}

    async def listen(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when entries were added, by whomever, until cancelled."""
        last = await self._newest(b"0-0")
        wake()  # what came before is not told again
        while True:
            if await self._has_more(last):
                last = await self._newest(last)
                wake()
                await asyncio.sleep(REST)

    async def _newest(self, otherwise: bytes) -> bytes:
        found: list[Any] = await self._client.call(self._client.foreign.xrevrange(self._keys.stream, count=1))
        return found[0][0] if found else otherwise

    async def _has_more(self, last: bytes) -> bool:
        """Wait for an entry after the last one; tell whether it came."""
        words = "XREAD", "COUNT", 1, "BLOCK", self._block // _MILLISECOND, "STREAMS", self._keys.stream, last
        try:
            return bool(await self._client.ask(self._keys.stream, *words))
        except StoreTimeoutError:
            return False  # the user's client waits for less

    async def _run(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 -- whatever the script answers
        return await self._client.run(f"stream_{name}", self._keys.all, self._group, *arguments)


def _entries(answer: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:  # noqa: ANN401 -- three kinds of answer
    """Return the entries of an answer to XREADGROUP, whose shape depends on protocol and settings of the client."""
    found: list[Any] = [*answer.values()] if hasattr(answer, "values") else [entries for _, entries in answer]
    if not found:
        return []
    return found[0][0] if isinstance(found[0][0], list) else found[0]


def _fields(words: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(words[::2], words[1::2], strict=True))


def _is_for(message: Message, terms: ClaimTerms) -> bool:
    return terms.tenant_id in {None, message.tenant_id}


def _words(claim: StreamClaim, outcome: Retry | Dead | Release) -> tuple[Any, ...]:
    message, tenant = claim.message, claim.message.tenant_id
    delay = timedelta(0) if isinstance(outcome, Dead) else outcome.delay or timedelta(0)
    error = b"" if isinstance(outcome, Release) else clipped(outcome.error)
    return (
        claim.entry,
        message.token,
        _OUTCOMES[type(outcome)],
        delay // _MICROSECOND,
        error,
        message.topic,
        b"" if tenant is None else tenant.bytes,
    )
