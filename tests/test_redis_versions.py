"""Redis 6.0 is enough: what the scripts call is known to it, and the proxy that stands for it tells the truth.

The suites that run through the proxy are in tests/redis60.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any, cast
from uuid import uuid4

import pytest
import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from postroom.errors import CommandRefusedError
from postroom.store import ClaimTerms
from postroom.stores.redis import RedisStore, RedisStreamStore
from postroom.stores.redis.commands import understood
from postroom.testing.clients import RedisClient, Reply
from postroom.testing.commands60 import COMMANDS, SUBCOMMANDS, refusal
from postroom.testing.redis60 import Redis60
from postroom.testing.servers import ValkeyServer
from postroom.testing.waiting import until

from .worlds import REDIS_SERVERS

# The library's own types name neither all commands nor what they answer.
Foreign = Any

SCRIPTS = sorted(
    (one for one in (files("postroom.stores.redis") / "lua").iterdir() if one.name.endswith(".lua")),
    key=lambda one: one.name,
)
#: What a call in a script begins with; `later` hands on to `redis.call`.
CALL = re.compile(r"\b(redis\.p?call|later)\(")
#: What a value stands for in a call whose words are not all written down.
VALUE = b"\0value"


# -- scripts -------------------------------------------------------------------------------------------------------


def calls(text: str) -> Iterator[list[bytes]]:
    """Yield the words of every call: those that are written in quotes as they are, others as a value."""
    code = re.sub(r"--[^\n]*", "", text)
    for call in CALL.finditer(code):
        if not code[: call.start()].endswith("local function "):
            yield [word(argument) for argument in arguments(code[call.end() :])]


def arguments(code: str) -> list[str]:
    """Return what stands between commas, until the parenthesis that was open is closed."""
    found, depth, quote = [""], 0, ""
    for letter in code:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}" and depth:
            depth -= 1
        elif letter == ")":
            break
        elif letter == "," and not depth:
            found.append("")
            continue
        found[-1] += letter
    return [one.strip() for one in found]


def word(argument: str) -> bytes:
    quoted = re.fullmatch(r"'([^']*)'", argument)
    return quoted.group(1).encode() if quoted else VALUE


@pytest.mark.requirement("S0-04")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda one: one.name)
def test_a_script_calls_nothing_that_redis_6_does_not_know(script: Any) -> None:  # noqa: ANN401 -- no name for it
    """Which never passes the proxy, so it is read."""
    found = [words for words in calls(script.read_text()) if words[0] != VALUE]

    assert [(words, said) for words in found if (said := refusal(words))] == []


@pytest.mark.requirement("S0-04")
def test_only_commands_that_are_known_are_called_by_a_name_that_is_not_written_there() -> None:
    """What `later` was told, which is read above, and what a transaction holds, which has rules."""
    unknown = [(one.name, words) for one in SCRIPTS for words in calls(one.read_text()) if words[0] == VALUE]

    assert unknown == [("commit.lua", [VALUE]), ("common.lua", [VALUE, VALUE, VALUE])]


@pytest.mark.requirement("S0-04")
def test_scripts_ask_for_no_function_of_the_server_that_6_does_not_have() -> None:
    """But for one that they can do without."""
    used = {name for one in SCRIPTS for name in re.findall(r"\bredis\.(\w+)", one.read_text())}

    assert used <= {"acl_check_cmd", "call", "error_reply", "pcall"}
    assert [one.name for one in SCRIPTS if "redis.acl_check_cmd" in one.read_text()] == ["commit.lua"]
    assert "redis.acl_check_cmd or function" in next(one.read_text() for one in SCRIPTS if one.name == "commit.lua")


def test_scripts_are_really_read() -> None:
    text = """
    -- redis.call('COPY', a, b)
    local function later(command, key) end
    redis.call('ZADD', key, 'GT', f(a, b), id) later('LMPOP', { 1, 2 }, 'it''s')
    redis.pcall(unpack(words))
    """

    found = list(calls(text))

    assert found == [[b"ZADD", VALUE, b"GT", VALUE, VALUE], [b"LMPOP", VALUE, VALUE], [VALUE]]
    assert [refusal(words) is None for words in found[:2]] == [False, False]


@pytest.mark.requirement("S0-04")
@pytest.mark.parametrize(
    "command",
    [
        "SET k v GET",
        "SET k v EXAT 1",
        "ZADD k GT 1 a",
        "ZADD k LT 1 a",
        "XADD k NOMKSTREAM * f v",
        "XADD k MINID 1 * f v",
        "EXPIRE k 1 NX",
        "GETDEL k",
        "COPY k l",
        "LMOVE k l LEFT LEFT",
    ],
)
def test_a_transaction_takes_nothing_that_redis_6_does_not_know(command: str) -> None:
    """Its commands are called by a script, and refused before they are sent."""
    words = tuple(command.encode().split())

    with pytest.raises(CommandRefusedError):
        understood(words)

    assert refusal(words)


# -- what 6.0 knows ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-04")
@pytest.mark.parametrize("fixture", REDIS_SERVERS)
def test_servers_agree_on_what_was_there_in_6(request: pytest.FixtureRequest, fixture: str) -> None:
    """The list is not from memory."""
    told = pairs(cast("RedisClient", request.getfixturevalue(fixture)).ask("COMMAND", "DOCS"))
    old = {name.upper(): pairs(about) for name, about in told.items() if is_old(pairs(about))}
    subcommands = {
        name: {
            sub.upper().partition("|")[2]
            for sub, about in pairs(facts.get("subcommands", [])).items()
            if is_old(pairs(about))
        }
        for name, facts in old.items()
    }

    assert set(old) == COMMANDS
    assert {name: found for name, found in subcommands.items() if found} == SUBCOMMANDS


@pytest.mark.requirement("S0-04")
def test_options_that_came_later_are_refused(redis_server: RedisClient) -> None:
    """All of which the server says when they came."""
    told = pairs(redis_server.ask("COMMAND", "DOCS"))
    later = [
        (command.upper().split("|"), token)
        for name in COMMANDS
        for command, about in [
            (name, told[name.lower()]),
            *pairs(pairs(told[name.lower()]).get("subcommands", [])).items(),
        ]
        if is_old(pairs(about))
        for token in tokens(pairs(about).get("arguments", []))
    ]

    # Where in a command an option stands is not told.
    places = [[VALUE] * count for count in range(7)]
    taken = [
        (name, token)
        for name, token in later
        if not any(refusal([part.encode() for part in name] + before + [token.encode()]) for before in places)
    ]

    assert len(later) > 30
    # A list of clients by their numbers and a range for Geo commands; nobody has asked for them.
    assert {(" ".join(name), token) for name, token in taken} <= {("CLIENT LIST", "ID"), ("GEORADIUS_RO", "ANY")}


def pairs(told: Reply) -> dict[str, Any]:
    listed = cast("list[Any]", told)
    return dict(zip(listed[::2], listed[1::2], strict=True))


def is_old(about: dict[str, Any]) -> bool:
    return [int(part) for part in about.get("since", "1.0").split(".")][:2] <= [6, 0]


def tokens(told: Sequence[Reply], *, is_new: bool = False) -> Iterator[str]:
    """Yield what options are called that are newer than 6.0."""
    for about in map(pairs, told):
        is_newer = is_new or not is_old(about)
        if is_newer and about.get("token"):
            yield about["token"]
        yield from tokens(about.get("arguments", []), is_new=is_newer)


@pytest.mark.parametrize(
    "command",
    [
        "HELLO 3",
        "SET k v PX 1000 NX",
        "SET k GET KEEPTTL",
        "SET GET GET",
        "ZADD k NX CH 1 GT",
        "ZADD GT 1 LT",
        "XADD k MAXLEN ~ 10 * MINID 1",
        "XADD LIMIT * LIMIT LIMIT",
        "XPENDING IDLE IDLE - + 10 IDLE",
        "XGROUP CREATE k g 0 MKSTREAM",
        "ZRANGE BYSCORE 0 -1 WITHSCORES",
        "ZRANGEBYSCORE k -inf +inf LIMIT 0 1",
        "CONFIG GET maxmemory*",
        "INFO server",
        "LPOP k",
        "PEXPIRE NX 5",
        "xreadgroup group g c streams k >",
    ],
)
def test_what_redis_6_knows_is_not_refused(command: str) -> None:
    assert refusal(command.encode().split()) is None


# -- the proxy -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=REDIS_SERVERS)
def old(request: pytest.FixtureRequest) -> Iterator[Redis60]:
    server = cast("RedisClient", request.getfixturevalue(request.param))
    with Redis60(server.dsn) as old:
        yield old


@pytest.mark.requirement("S0-04")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("XAUTOCLAIM", "k", "g", "c", 0, "0"), "ERR unknown command `XAUTOCLAIM`"),
        (("getdel", "k"), "ERR unknown command `GETDEL`"),
        (("FUNCTION", "LIST"), "ERR unknown command `FUNCTION`"),
        (("EVAL_RO", "return 1", 0), "ERR unknown command `EVAL_RO`"),
        (("WAITAOF", 1, 0, 1), "ERR unknown command `WAITAOF`"),
        (("CLIENT", "SETINFO", "LIB-NAME", "x"), "ERR Unknown subcommand or wrong number of arguments for 'SETINFO'"),
        (("XGROUP", "CREATECONSUMER", "k", "g", "c"), "ERR Unknown subcommand"),
        (("SET", "k", "v", "GET"), "ERR syntax error"),
        (("XPENDING", "k", "g", "IDLE", 5, "-", "+", 1), "ERR syntax error"),
        (("LPOP", "k", 2), "ERR wrong number of arguments for 'lpop' command"),
    ],
)
def test_the_proxy_refuses_as_redis_6_does(old: Redis60, words: Sequence[str | int], said: str) -> None:
    """Commands and options."""
    with pytest.raises(Exception, match=re.escape(said)):
        RedisClient(old.dsn).ask(*words)

    assert [str(word).encode() for word in words] in old.refused


@pytest.mark.parametrize("protocol", [2, 3])
async def test_the_proxy_answers_in_turn_and_says_that_it_is_old(old: Redis60, protocol: int) -> None:
    key = f"test-{uuid4().hex}"
    library: Foreign = redis.asyncio.Redis
    async with library.from_url(old.dsn, protocol=protocol) as client:
        pipeline = client.pipeline(transaction=False)
        pipeline.set(key, "v").execute_command("GETDEL", key).get(key).set(key, "w", get=True).info("server").delete(
            key
        )
        stored, refused, found, misread, info, deleted = await pipeline.execute(raise_on_error=False)
        greeting = await client.execute_command("HELLO", protocol)

    assert (stored, found, deleted) == (True, b"v", 1)
    assert "unknown command `GETDEL`" in str(refused)
    assert "syntax error" in str(misread)
    assert info["redis_version"] == "6.0.16"
    assert "valkey_version" not in info
    assert b"6.0.16" in (greeting.values() if isinstance(greeting, dict) else greeting)


async def test_a_transaction_with_an_unknown_command_is_given_up(old: Redis60) -> None:
    key = f"test-{uuid4().hex}"
    async with redis.asyncio.Redis.from_url(old.dsn) as client:
        pipeline: Foreign = client.pipeline(transaction=True)
        pipeline.set(key, "v").execute_command("GETDEL", key)
        with pytest.raises(redis.exceptions.ResponseError, match="GETDEL"):
            await pipeline.execute()

        assert not await client.exists(key)


async def test_what_scripts_call_is_seen(old: Redis60) -> None:
    key = f"test-{uuid4().hex}"
    async with redis.asyncio.Redis.from_url(old.dsn) as client:
        await client.eval("return redis.call('ZRANGE', KEYS[1], 0, 1, 'REV')", 1, key)

    # The scripts of everybody are seen.
    await until(lambda: [b"ZRANGE", key.encode(), b"0", b"1", b"REV"] in old.slips, "what the script has called")


@pytest.mark.requirement("S0-04")
async def test_stores_ask_an_old_server_for_nothing_that_it_does_not_know(private_valkey: ValkeyServer) -> None:
    """What is refused is the library's own greeting, and the one question whether it can wait for its disk."""
    with Redis60(private_valkey.dsn) as old:
        async with redis.asyncio.Redis.from_url(old.dsn, retry=Retry(NoBackoff(), 0)) as client:
            for kind in (RedisStore, RedisStreamStore):
                store = kind(client, table=f"test-{uuid4().hex}")
                await store.open()
                await store.outbox().add(client, {"order": 1}, topic="orders")
                claims = await store.claim(10, ClaimTerms(worker=uuid4()))
                assert len(claims) == 1

    assert {words[0].upper() for words in old.refused} <= {b"CLIENT", b"WAITAOF"}
    assert old.slips == []
