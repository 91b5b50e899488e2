"""A producer process: writes its business rows and its messages in one transaction, and sometimes rolls back."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final
from uuid import UUID

from postroom.errors import CommitUnknownError

from .desk import Desk, Rollback, desk_for
from .groups import TOPICS, UNHANDLED
from .history import History, Stage
from .worker import Setting, at_work

__all__ = ["LARGE", "Draft", "Producer", "main"]

#: How many bytes a large message has, just below what a message may have.
LARGE: Final = 255 * 1024
_KEYS: Final = 6
#: What transactions add, by how often.
_MIX: Final = {
    "poison": 10,
    "reject": 10,
    "killer": 0.2,
    "deduped": 100,
    "delayed": 80,
    "batch": 800,
    "large": 12,
    # What a dispatcher delivers and no consumer gets done.
    "sour": 8,
    "spurned": 8,
    "deadly": 0.1,
}
#: What is sure to come early in every run, since it takes long and nothing else leads through all of its attempts.
_FATED: Final = {20: "killer", 150: "deadly"}
#: What each life of a producer adds before anything else, until it is known to be committed. So a run in which any
#: message was stored has a message that no consumer gets done, and ends with its dead letters on any machine.
_FIRST: Final = "sour"
_ROLLED_BACK: Final = 0.15
#: How long a transaction may take, faults included.
_PATIENCE: Final = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A message before it is added."""

    topic: str
    key: str | None
    n: int
    kind: str = "plain"
    dedupe: str | None = None
    delay: float = 0.0

    @property
    def event(self) -> dict[str, object]:
        """What the message says."""
        said: dict[str, object] = {"n": self.n, "kind": self.kind}
        return {**said, "padding": "x" * LARGE} if self.kind == "large" else said


class Producer:
    """Owns some keys, and numbers the messages of each."""

    def __init__(self, setting: Setting, desk: Desk, history: History) -> None:
        index = int(setting.name[1:])
        self._name = f"{setting.name}.{setting.life}"
        self._rng = random.Random(f"{setting.seed} {self._name}")
        self._desk = desk
        self._history = history
        # The key of a transaction whose outcome is unknown goes on only where the order is the store's concern, and not
        # in Redis, where nothing holds a key for a transaction that is still on its way.
        self._is_strict = index % 2 == 0 and not setting.store.startswith("redis")
        self._outbox = desk.outbox(strict_order=self._is_strict)
        self._numbers: dict[str, int] = defaultdict(int)
        self._keys = [f"{self._name}/{number}" for number in range(_KEYS)]
        self._made = _KEYS
        self._transactions = 0
        self._dedupes: list[str] = []
        self._has_committed = False

    async def work(self) -> None:
        """Make one transaction and write down how it ended."""
        self._transactions += 1
        name = f"{self._name}-{self._transactions}"
        fate = self._fate()
        # What is fated is not rolled back by the dice, or it would not be sure to come.
        drafts, is_kept, is_done = self._drafts(fate), fate is not None or not self._chance(_ROLLED_BACK), False
        try:
            async with asyncio.timeout(_PATIENCE), self._desk.transaction(self._outbox) as connection:
                await self._add(name, connection, drafts)
                self._decide(is_kept=is_kept)
                is_done = True
        except Rollback:
            self._end(name, "fail")
        except (CommitUnknownError, TimeoutError) as error:
            # Before the end of the block nothing was asked to commit.
            self._end(name, "info" if is_done else "fail", error)
            self._forget(drafts)
        except Exception as error:  # noqa: BLE001 -- whatever a library raises, it says that nothing was committed
            self._end(name, "fail", error)
        else:
            self._end(name, "ok", answers=self._desk.answers)
            self._keep(drafts)
            self._has_committed = True

    def _fate(self) -> str | None:
        """Return what a transaction has to add, if that is not left to the dice."""
        if not self._has_committed:
            return _FIRST
        return _FATED.get(self._transactions) if self._name == "p0.0" else None

    async def _add(self, name: str, connection: object, drafts: Sequence[Draft]) -> None:
        added: list[tuple[Draft, UUID | None, bool]] = []
        for together in _batches(drafts):
            first = together[0]
            results = await self._desk.add(
                self._outbox,
                connection,
                [draft.event for draft in together],
                topic=first.topic,
                key=first.key,
                dedupe_key=first.dedupe,
                delay=timedelta(seconds=first.delay),
            )
            added += [(draft, one.id, one.is_new) for draft, one in zip(together, results, strict=True)]
        await self._desk.note(connection, [identity for _, identity, is_new in added if identity and is_new])
        messages = [{**asdict(draft), "id": str(identity), "added": new} for draft, identity, new in added]
        self._history.write("enqueue", "invoke", tx=name, messages=messages, hoped=self._desk.only_hopes)

    @staticmethod
    def _decide(*, is_kept: bool) -> None:
        if not is_kept:
            raise Rollback

    def _end(self, name: str, stage: Stage, error: BaseException | None = None, *, answers: Sequence[str] = ()) -> None:
        told = {} if error is None else {"error": f"{type(error).__name__}: {error}"[:200]}
        self._history.write("enqueue", stage, tx=name, answers=answers, **told)

    def _keep(self, drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            if draft.key is not None:
                self._numbers[draft.key] = draft.n
            if draft.dedupe is not None:
                self._dedupes.append(draft.dedupe)

    def _forget(self, drafts: Sequence[Draft]) -> None:
        """Go on after an unknown outcome: with the next number where order is strict, else with another key."""
        if self._is_strict:
            self._keep(drafts)
            return
        for key in {draft.key for draft in drafts} & set(self._keys):
            self._keys[self._keys.index(str(key))] = f"{self._name}/{self._made}"
            self._made += 1

    def _drafts(self, fate: str | None) -> list[Draft]:
        """Return what one transaction adds: a batch of one key, or single messages of several kinds."""
        kind = fate or self._rng.choices(list(_MIX), list(_MIX.values()))[0]
        if kind == "deduped":
            return [self._deduped()]
        if kind in UNHANDLED:
            # Without a key, what is fated waits behind no other message.
            keys = [None] if fate or kind == "deadly" else [None, *self._keys]
            return [self._draft(self._rng.choice(keys), ahead=1, kind=kind)]
        if kind not in {"batch", "delayed", "large"}:
            return self._doomed(kind)
        key = None if self._chance(0.25) else self._rng.choice(self._keys)
        if kind == "delayed":
            return [self._draft(key, ahead=1, delay=self._rng.uniform(0.05, 1.0))]
        if kind == "large":
            return [self._draft(key, ahead=number + 1, kind=kind) for number in range(self._rng.choice((1, 2, 4)))]
        return [self._draft(key, ahead=number + 1) for number in range(self._rng.choice((1, 1, 2, 5, 12)))]

    def _doomed(self, kind: str) -> list[Draft]:
        """Return a message that will be dead, alone or between others of a key that then is done with."""
        if kind == "killer" or self._chance(0.5):
            return [self._draft(None, ahead=1, kind=kind)]
        key = self._retire()
        return [self._draft(key, ahead=1), self._draft(key, ahead=2, kind=kind), self._draft(key, ahead=3)]

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _retire(self) -> str:
        place = self._rng.randrange(len(self._keys))
        key, self._keys[place] = self._keys[place], f"{self._name}/{self._made}"
        self._made += 1
        return key

    def _draft(self, key: str | None, *, ahead: int, kind: str = "plain", delay: float = 0.0) -> Draft:
        # A key belongs to one topic; without a key anything goes.
        topic = self._rng.choice(TOPICS) if key is None else TOPICS[int(key.rpartition("/")[2]) % 2]
        number = 0 if key is None else self._numbers[key] + ahead
        return Draft(topic=topic, key=key, n=number, kind=kind, delay=delay)

    def _deduped(self) -> Draft:
        is_repeat = bool(self._dedupes) and self._chance(0.4)
        dedupe = self._rng.choice(self._dedupes) if is_repeat else f"{self._name}:{self._transactions}"
        return Draft(topic="mail", key=None, n=0, dedupe=dedupe)


def _batches(drafts: Sequence[Draft]) -> list[list[Draft]]:
    """Part drafts into those that one call of `add` can take: same topic and key, one after the other."""
    batches: list[list[Draft]] = []
    for draft in drafts:
        if batches and (batches[-1][0].topic, batches[-1][0].key) == (draft.topic, draft.key):
            batches[-1].append(draft)
        else:
            batches.append([draft])
    return batches


async def _run(setting: Setting) -> None:
    history = History(setting.place, setting.name)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    history.write("start", "ok", life=setting.life, skew=setting.skew)
    at_work()
    pause = random.Random(setting.seed)
    async with desk_for(setting.store, setting.url) as desk:
        producer = Producer(setting, desk, history)
        while not stopping.is_set():
            await producer.work()
            await asyncio.sleep(pause.uniform(0.0, 0.05))
    history.write("stop", "ok", life=setting.life)


def main(setting: Setting) -> None:
    """Produce until told to stop."""
    asyncio.run(_run(setting))
