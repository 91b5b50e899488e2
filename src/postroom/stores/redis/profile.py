"""What a server is trusted to keep: checked when a store opens, and confirmed before anybody is told so."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, Self, TypeAlias, get_args

import redis.exceptions

from ...errors import ConfigurationError, StoreAuthenticationError, StoreError, StoreUnavailableError
from .client import Client

__all__ = ["Checked", "Profile", "check_profile", "confirm"]

#: ``durable``: what was stored survives a crash of the server. ``replicated``: replicas have it as well.
#: ``volatile``: everything may be lost with the server.
Profile: TypeAlias = Literal["durable", "replicated", "volatile"]

# Clients of the library have no type that both kinds share.
Foreign = Any

PATIENCE: Final = timedelta(seconds=5)
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
    #: The command that waits; empty if the answer to the commit itself says enough.
    wait: Literal["", "WAIT", "WAITAOF"] = ""
    #: How many replicas are to have what was stored.
    replicas: int = 0
    #: Which run of which server was checked; empty if it would not say.
    run: str = ""
    #: What would have been looked at, and could not be seen.
    unseen: tuple[str, ...] = ()

    def words(self, patience: timedelta = PATIENCE) -> Sequence[str | int]:
        """Return the command that waits, for the end of a pipeline that commits; nothing where none is needed."""
        within = max(patience // _MILLISECOND, 1)  # zero would mean without an end
        match self.wait:
            case "WAITAOF":
                return "WAITAOF", 1, 0, within
            case "WAIT":
                return "WAIT", self.replicas, within
            case _:
                return ()

    def judge(self, answer: Foreign) -> None:
        """Accept what the server answered to `words`.

        Raises:
            StoreUnavailableError: Too few have what was stored, or have not said so in time.
        """
        found, wanted, who = (answer[0], 1, "disks") if self.wait == "WAITAOF" else (answer, self.replicas, "replicas")
        if found < wanted:
            raise StoreUnavailableError(f"{found} of {wanted} {who} confirmed in time ({self.wait}); {_MAYBE}")


async def check_profile(client: Client, profile: Profile, *, prefix: str, replicas: int = 1) -> Checked:
    """Make sure that a server keeps what the profile promises, as far as it lets itself be asked.

    Args:
        client: Where to ask.
        profile: What is promised.
        prefix: What keys begin with, hash tag included; in a cluster, the server that has them is asked.
        replicas: How many replicas are to have everything, with ``replicated``.

    Raises:
        ConfigurationError: A setting does not keep the promise; the message says which, and what to do.
        StoreError: The server could not be asked.
    """
    if profile not in get_args(Profile):
        raise ConfigurationError(f"profile={profile!r} is unknown; pass one of {', '.join(get_args(Profile))}")
    if replicas < 1:
        raise ConfigurationError(f"replicas={replicas} must be positive; for none pass profile='durable'")
    facts = await _facts(await _Node.of(client, prefix), profile, replicas)
    if refusals := "; ".join(_refusals(profile, facts, replicas)):
        raise ConfigurationError(f"{client.place} does not keep the promise of profile={profile!r}: {refusals}")
    checked = _checked(profile, facts, replicas)
    if "CONFIG" not in facts:
        _logger.warning(
            "the server does not tell its settings (CONFIG GET); what INFO does not tell either is taken on trust",
            extra={"place": client.place, "profile": profile, "unseen": checked.unseen},
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
    words = checked.words(patience)
    if not words:
        return
    trace = ("SET", f"{prefix}:confirmed", "1", "PX", _TRACE // _MILLISECOND)
    try:
        node = await _Node.of(client, prefix)
        _, answer, info = await node.ask_together(trace, words, ("INFO", "server") if checked.run else ("PING",))
    except StoreError as error:
        raise StoreUnavailableError(f"{error}; {_MAYBE}") from error
    if checked.run and _text(info["run_id"]) != checked.run:
        raise StoreUnavailableError(f"{client.place} is another server now, or was started again; {_MAYBE}")
    checked.judge(answer)


class _Node:
    """The server that has the keys with a prefix, whether it stands alone or in a cluster."""

    def __init__(self, client: Client, target: Mapping[str, Foreign]) -> None:
        self._client = client
        self._target = target

    @classmethod
    async def of(cls, client: Client, prefix: str) -> Self:
        if not hasattr(client.foreign, "get_node_from_key"):
            return cls(client, {})
        try:
            await client.call(client.foreign.initialize())
            return cls(client, {"target_nodes": client.foreign.get_node_from_key(prefix)})
        except redis.exceptions.RedisClusterException as error:
            raise StoreUnavailableError(f"{client.place}: {error}; check that the cluster runs") from error

    async def ask(self, *words: str | int) -> Foreign:
        """Return an answer, or the error with which the server refused to give one."""
        try:
            return await self._client.call(self._client.foreign.execute_command(*words, **self._target))
        except StoreError as error:
            # Anything more special is about the server, such as that it is still loading; not about this command.
            is_plain = type(error) in {StoreError, StoreAuthenticationError}
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
        facts |= _waited(await node.ask("WAIT", replicas, _PROBE // _MILLISECOND), facts)
    elif profile == "durable":
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
    if facts.get("role", "master") != "master":
        yield _refusal(facts, "role", "master", "connect to the primary")
    has_room = facts.get("maxmemory") == "0"
    if not has_room and facts.get("maxmemory-policy", "noeviction") != "noeviction":
        remedy = "set it, or set maxmemory to 0: when memory is full the server would delete messages"
        yield _refusal(facts, "maxmemory-policy", "noeviction", remedy)
    if profile == "durable":
        yield from _about_disk(facts)
    elif profile == "replicated":
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
    wait: Literal["", "WAIT", "WAITAOF"] = ""
    needed = ["role", "maxmemory-policy"]
    if profile == "replicated":
        needed += ["connected replicas"]
        wait = "WAIT" if "WAIT" in facts else ""
    elif profile == "durable":
        needed += ["appendonly"]
        is_written_at_once = facts.get("appendfsync") == "always" and not _skips_fsync(facts)
        wait = "WAITAOF" if "WAITAOF" in facts and not is_written_at_once else ""
        needed += [] if wait else ["appendfsync"]
    needed += ["run"] if wait else []
    return Checked(
        profile=profile,
        wait=wait,
        replicas=replicas if profile == "replicated" else 0,
        run=facts.get("run", ""),
        unseen=tuple(name for name in needed if name not in facts),
    )


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
