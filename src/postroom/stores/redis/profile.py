"""What a server is trusted to keep: checked when a store opens, and confirmed before anybody is told so."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, Self, TypeAlias, get_args

import redis.exceptions

from ...checks import check_count
from ...errors import (
    ConfigurationError,
    ReadOnlyStoreError,
    StoreAuthenticationError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
)
from ...store import Claim, Release, Settlement
from .client import Client

__all__ = ["Assurance", "Checked", "Profile", "Wait", "check_profile", "confirm"]

#: ``durable``: what was stored survives a crash of the server. ``replicated``: replicas have it as well.
#: ``volatile``: everything may be lost with the server.
Profile: TypeAlias = Literal["durable", "replicated", "volatile"]
#: What is waited for: the disk of the server, or its replicas.
Wait: TypeAlias = Literal["WAITAOF", "WAIT"]

# Clients of the library have no type that both kinds share.
Foreign = Any

#: How long disks or replicas may take; less than the library lets a connection be silent by itself.
PATIENCE: Final = timedelta(seconds=3)
_MILLISECOND: Final = timedelta(milliseconds=1)
#: How long a server may take to show that it can wait; it need not have got there.
_PROBE: Final = timedelta(milliseconds=500)
#: How long the key stays that is written in order to be waited for.
_TRACE: Final = timedelta(minutes=1)
#: Patterns, since a server of version 6 takes only one of them, or one name, in a call.
_SETTINGS: Final = ("*append*", "maxmemory*", "min-*-to-write")
_MAYBE: Final = "it may have been stored all the same, so acknowledge nothing and let it come again"
_OR_VOLATILE: Final = 'or pass profile="volatile" if messages may be lost with the server'
_logger = logging.getLogger("postroom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was found out about a server, and with it what `confirm` waits for.

    Take the newest before a commit, and hand it to `confirm` after the commit. A server that took the place of the
    other in between, or was started again, may not have what it is asked about; it is known by its ``run``.
    """

    profile: Profile
    #: The commands that wait, one after another; none if the answer to the commit itself says enough.
    waits: tuple[Wait, ...] = ()
    #: How many replicas are to have what was stored.
    replicas: int = 0
    #: Which run of which server was checked; empty if it would not say.
    run: str = ""
    #: What would have been looked at, and could not be seen.
    unseen: tuple[str, ...] = ()


class Assurance:
    """Holds a server to its profile: looks at it when somebody begins, and again after a promise was not kept.

    Whoever stores something takes what is `known` before, and has it confirmed after.
    """

    def __init__(self, client: Client, profile: Profile, *, prefix: str, replicas: int, timeout: timedelta) -> None:
        _check_arguments(profile, replicas)
        self._client = client
        self._profile: Profile = profile
        self._prefix = prefix
        self._replicas = replicas
        # A call has to wait twice at the most, and to answer before it is given up.
        self._patience = min(PATIENCE, timeout / 3)
        self._checked: Checked | None = None
        self._has_begun = False

    async def known(self) -> Checked:
        """Return what was found out about the server, which is asked unless it was before.

        Raises:
            ConfigurationError: It does not keep what the profile promises, and never did.
            StoreError: It does not do so any more, or could not be asked.
        """
        if self._checked is not None:
            return self._checked
        try:
            return await self.check()
        except ConfigurationError as error:
            if not self._has_begun:
                raise
            # A replica may come back, a setting be put right: that is worth to wait for, as for a server that is down.
            raise StoreUnavailableError(str(error)) from error

    async def check(self) -> Checked:
        """Ask the server anew whether it keeps what the profile promises.

        Raises:
            ConfigurationError: It does not; the message says why, and what to do.
            StoreError: The server could not be asked, or is a replica.
        """
        checked = await check_profile(self._client, self._profile, prefix=self._prefix, replicas=self._replicas)
        if self._profile == "volatile" and not self._has_begun:
            _logger.warning(
                "messages in %s under %s may be lost with the server, since the profile is volatile",
                self._client.place,
                self._prefix,
                extra={"postroom_place": self._client.place, "postroom_prefix": self._prefix},
            )
        self._checked, self._has_begun = checked, True
        return checked

    @asynccontextmanager
    async def confirmed(self, prefix: str) -> AsyncGenerator[None]:
        """Have what is stored in a block, under keys with a prefix, be safe at its end."""
        checked = await self.known()
        yield
        await self.confirm(checked, prefix)

    async def claimed(
        self,
        claim: Callable[[], Awaitable[list[Claim]]],
        settle: Callable[[Sequence[Settlement]], Awaitable[object]],
        prefix: str,
    ) -> list[Claim]:
        """Claim messages, and return them once it is safe that they are there; or have them given back."""
        checked = await self.known()
        claims = await claim()
        if not claims:
            return claims
        try:
            await self.confirm(checked, prefix)
        except StoreError:
            # Otherwise they would wait for the end of their leases, and have spent an attempt.
            with suppress(StoreError):
                await settle([Settlement(claim, Release()) for claim in claims])
            raise
        return claims

    async def confirm(self, checked: Checked, prefix: str) -> None:
        """Wait until everything that was answered since it was `known` is as safe as the profile says.

        Raises:
            StoreUnavailableError: That is not certain, so nothing may be acknowledged.
        """
        if not checked.waits:
            return
        try:
            await confirm(self._client, checked, prefix=prefix, patience=self._patience)
        except StoreError:
            self._checked = None  # it may be another server by now
            raise


async def check_profile(client: Client, profile: Profile, *, prefix: str, replicas: int = 1) -> Checked:
    """Make sure that a server keeps what the profile promises, as far as it lets itself be asked.

    Args:
        client: Where to ask.
        profile: What is promised.
        prefix: What keys begin with, hash tag included; in a cluster, the server that has them is asked.
        replicas: How many replicas are to have everything, with ``replicated``.

    Raises:
        ConfigurationError: A setting does not keep the promise; the message says which, and what to do.
        StoreError: The server could not be asked, or is a replica.
    """
    _check_arguments(profile, replicas)
    facts = await _facts(await _Node.of(client, prefix), profile, replicas)
    if facts.get("role", "master") != "master":
        raise ReadOnlyStoreError(f"{client.place} is a replica; connect to the primary")
    if refusals := "; ".join(_refusals(profile, facts, replicas)):
        raise ConfigurationError(f"{client.place} does not keep the promise of profile={profile!r}: {refusals}")
    checked = _checked(profile, facts, replicas)
    if "CONFIG" not in facts:
        _logger.warning(
            "%s does not show its settings (CONFIG GET), so profile %s could not be checked in full; unchecked: %s",
            client.place,
            profile,
            ", ".join(checked.unseen),
            extra={
                "postroom_place": client.place,
                "postroom_profile": profile,
                "postroom_unseen": checked.unseen,
            },
        )
    return checked


async def confirm(client: Client, checked: Checked, *, prefix: str, patience: timedelta = PATIENCE) -> None:
    """Wait until everything that was answered before is as safe as the profile says; call it before an ack.

    A server counts only what the same connection has written, and answers that all is well to a connection that wrote
    nothing. So this writes a small key of its own, whose turn comes after everything that was answered before. Once
    is enough for any number of commits.

    Args:
        client: Where the commit was made.
        checked: What `check_profile` said before the commit.
        prefix: What keys begin with, hash tag included.
        patience: How long disks or replicas may take; keep it below the deadline of the client.

    Raises:
        StoreUnavailableError: It is not certain that what was stored is safe. Check the profile again before the next.
    """
    if not checked.waits:
        return
    within = max(patience // _MILLISECOND, 1)  # zero would mean without an end
    words = {"WAITAOF": ("WAITAOF", 1, 0, within), "WAIT": ("WAIT", checked.replicas, within)}
    trace = ("SET", f"{prefix}:confirmed", "1", "PX", _TRACE // _MILLISECOND)
    try:
        node = await _Node.of(client, prefix)
        who = ("INFO", "server") if checked.run else ("PING",)
        _, *answers, info = await node.ask_together(trace, *(words[wait] for wait in checked.waits), who)
    except StoreError as error:
        raise StoreUnavailableError(f"{error}; {_MAYBE}") from error
    if checked.run and _text(info["run_id"]) != checked.run:
        raise StoreUnavailableError(f"{client.place} is another server now, or was started again; {_MAYBE}")
    for wait, answer in zip(checked.waits, answers, strict=True):
        found, wanted, who_has_it = (
            (answer[0], 1, "disks") if wait == "WAITAOF" else (answer, checked.replicas, "replicas")
        )
        if found < wanted:
            raise StoreUnavailableError(f"{found} of {wanted} {who_has_it} confirmed in time ({wait}); {_MAYBE}")


def _check_arguments(profile: Profile, replicas: int) -> None:
    if profile not in get_args(Profile):
        raise ConfigurationError(f"profile={profile!r} is unknown; pass one of {', '.join(get_args(Profile))}")
    check_count("replicas", replicas)


class _Node:
    """The server that has the keys with a prefix, whether it stands alone or in a cluster."""

    def __init__(self, client: Client, target: Mapping[str, Foreign]) -> None:
        self._client = client
        self._target = target

    @classmethod
    async def of(cls, client: Client, prefix: str) -> Self:
        node = await client.node_of(prefix)
        return cls(client, {} if node is None else {"target_nodes": node})

    async def ask(self, *words: str | int) -> Foreign:
        """Return an answer, or the error with which the server refused to give one."""
        try:
            return await self._client.call(self._client.foreign.execute_command(*words, **self._target))
        except StoreError as error:
            # Anything more special is about the server, such as that it is still loading; not about this command.
            is_plain = type(error) in {StoreError, StoreAuthenticationError, StorePermissionError}
            if is_plain and isinstance(error.__cause__, redis.exceptions.ResponseError):
                return error.__cause__
            raise

    async def ask_together(self, *commands: Sequence[str | int]) -> list[Foreign]:
        """Return the answers to commands that are sent one after another over one connection."""
        pipeline = self._client.foreign.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words, **self._target)
        # A command that is sent to another server alone would be waited for at the wrong one.
        options = {"allow_redirections": False} if self._target else {}
        answers: list[Foreign] = await self._client.call(pipeline.execute(raise_on_error=False, **options))
        for answer in answers:
            if isinstance(answer, Exception):
                raise self._client.told(answer) from answer
        return answers


async def _facts(node: _Node, profile: Profile, replicas: int) -> dict[str, str]:
    """Return what a server says of itself, by the names of settings; what it will not say is missing."""
    facts: dict[str, str] = {}
    info = await node.ask("INFO")
    if not isinstance(info, Exception):
        facts |= _told(info)
    for pattern in _SETTINGS:
        settings = await node.ask("CONFIG GET", pattern)
        if settings and not isinstance(settings, Exception):
            facts |= {"CONFIG": "yes"} | {_text(name): _text(value) for name, value in settings.items()}
    if profile == "replicated":
        # Where nothing else tells how many there are, those that are slow are to be counted as well.
        patience = _PROBE if "connected replicas" in facts else PATIENCE
        facts |= _waited(await node.ask("WAIT", replicas, patience // _MILLISECOND), facts)
    if profile != "volatile":
        facts |= _waited_for_disk(await node.ask("WAITAOF", 1, 0, _PROBE // _MILLISECOND))
    return facts


def _told(info: Mapping[str, Foreign]) -> dict[str, str]:
    """Return what INFO says, by the names of settings."""
    names = {"role": "role", "run_id": "run", "maxmemory": "maxmemory", "maxmemory_policy": "maxmemory-policy"}
    told = {setting: _text(info[name]) for name, setting in names.items() if name in info}
    if "aof_enabled" in info:
        told["appendonly"] = "yes" if int(info["aof_enabled"]) else "no"
    if "role" in info:
        following = [value for name, value in info.items() if re.fullmatch(r"slave\d+", name)]
        told["connected replicas"] = str(sum(one.get("state") == "online" for one in following))
    return told


def _waited(answer: Foreign, facts: Mapping[str, str]) -> dict[str, str]:
    if isinstance(answer, Exception):
        return {}
    # It counts those that follow closely; so it can say what INFO was not allowed to.
    return {"WAIT": "yes", "connected replicas": facts.get("connected replicas", str(answer))}


def _waited_for_disk(answer: Foreign) -> dict[str, str]:
    if not isinstance(answer, Exception):
        return {"WAITAOF": "yes", "appendonly": "yes"}
    return {"appendonly": "no"} if "appendonly" in str(answer) else {}


def _refusals(profile: Profile, facts: Mapping[str, str], replicas: int) -> Iterator[str]:
    has_room = facts.get("maxmemory") == "0"
    if not has_room and facts.get("maxmemory-policy", "noeviction") != "noeviction":
        remedy = "set it, or set maxmemory to 0: when memory is full the server would delete messages"
        yield _refusal(facts, "maxmemory-policy", "noeviction", remedy)
    if profile != "volatile":
        # Also with replicas: a server that is started again without its data has them forget theirs.
        yield from _about_disk(facts)
    if profile == "replicated":
        yield from _about_replicas(facts, replicas)


def _about_disk(facts: Mapping[str, str]) -> Iterator[str]:
    if facts.get("appendonly") == "no":
        yield _refusal(facts, "appendonly", "yes", f"set it, {_OR_VOLATILE}")
        return
    fsync, can_wait = facts.get("appendfsync", "always"), "WAITAOF" in facts
    if fsync == "no" or (fsync != "always" and not can_wait):
        either = "always" if can_wait else "always, or everysec on a server that has WAITAOF (Redis 7.2 or Valkey)"
        yield _refusal(facts, "appendfsync", either, f"set it, {_OR_VOLATILE}")
    if _skips_fsync(facts) and not can_wait:
        remedy = f"set it, or use a server that has WAITAOF (Redis 7.2 or Valkey), {_OR_VOLATILE}"
        yield _refusal(facts, "no-appendfsync-on-rewrite", "no", remedy)


def _about_replicas(facts: Mapping[str, str], replicas: int) -> Iterator[str]:
    if int(facts.get("connected replicas", replicas)) < replicas:
        remedy = f'connect one to it, or pass profile="durable", {_OR_VOLATILE}'
        yield _refusal(facts, "connected replicas", f"at least {replicas}", remedy)
    if "WAIT" not in facts and int(facts.get("min-replicas-to-write", "0")) < replicas:
        remedy = f"set it, or let the user run WAIT, {_OR_VOLATILE}"
        yield _refusal(facts, "min-replicas-to-write", f"at least {replicas}", remedy)


def _refusal(facts: Mapping[str, str], setting: str, wanted: str, remedy: str) -> str:
    return f"{setting} is {facts.get(setting, 'not known')} and must be {wanted} ({remedy})"


def _skips_fsync(facts: Mapping[str, str]) -> bool:
    return facts.get("no-appendfsync-on-rewrite") == "yes"


def _checked(profile: Profile, facts: Mapping[str, str], replicas: int) -> Checked:
    waits: list[Wait] = []
    needed = ["role", "maxmemory-policy"]
    if profile != "volatile":
        needed += ["appendonly"]
        is_written_at_once = facts.get("appendfsync") == "always" and not _skips_fsync(facts)
        if "WAITAOF" in facts and not is_written_at_once:
            waits.append("WAITAOF")
        else:
            needed += ["appendfsync"]
    if profile == "replicated":
        needed += ["connected replicas"]
        if "WAIT" in facts:
            waits.append("WAIT")
    needed += ["run"] if waits else []
    return Checked(
        profile=profile,
        waits=tuple(waits),
        replicas=replicas if profile == "replicated" else 0,
        run=facts.get("run", ""),
        unseen=tuple(name for name in needed if name not in facts),
    )


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
