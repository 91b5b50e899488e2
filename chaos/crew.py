"""The crew: the worker processes of a run, started again whenever they die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from uuid import uuid4

from .history import History
from .worker import Setting

__all__ = ["Crew"]

_ROOT: Final = Path(__file__).parents[1]
_ROLES: Final = {"c": "consumer", "d": "dispatcher", "p": "producer", "r": "receiver"}
_PIPE: Final = asyncio.subprocess.PIPE
#: How long a worker may take to end after it was asked to.
_FAREWELL: Final = 30.0
#: What asyncpg leaves behind when it is told to give up in the moment in which a connection stands: nobody's future.
_NOISE: Final = """\
Future exception was never retrieved
future: <Future finished exception=ConnectionError('unexpected connection_lost() call')>
ConnectionError: unexpected connection_lost() call
"""


@dataclass(slots=True)
class _Member:
    setting: Setting
    process: asyncio.subprocess.Process | None = None
    keeper: asyncio.Task[None] | None = None
    #: For how long it is to stay down after a kill.
    down: float = 0.0
    up: asyncio.Event = field(default_factory=asyncio.Event)


def _telltales_in_redis(role: str, store: str) -> Sequence[bytes]:
    """Return the same where scripts go over the wire by their digest."""
    if role == "p":
        return [b"\r\nEXEC\r\n"]
    from postroom.stores.redis import scripts  # noqa: PLC0415 -- an extra

    if role == "c":
        commit = scripts.calling("commit", "enqueue").digest.encode()
        return [commit, commit, scripts.alone("admit").digest.encode(), b""]
    prefix = "stream_" if store == "redis-stream" else ""
    digests = [scripts.script(f"{prefix}{name}").digest.encode() for name in ("claim", "settle", "extend")]
    return [*digests, b"XREADGROUP", b"chaos-refusal", b""]


class Crew:
    """Starts workers, keeps them alive, and does to them what the nemesis asks for."""

    def __init__(self, folder: Path, history: History, variant: str | None) -> None:
        self._folder = folder
        self._history = history
        self._variant = variant
        self._members: dict[str, _Member] = {}
        self._leaving: set[str] = set()
        #: Workers that ended by themselves and otherwise than by a kill.
        self.failures: list[str] = []

    def hire(self, setting: Setting) -> None:
        """Start a worker, and start it again each time it dies."""
        member = _Member(replace(setting, worker=str(uuid4())))
        self._members[setting.name] = member
        member.keeper = asyncio.create_task(self._keep(member))

    async def _keep(self, member: _Member) -> None:
        while member.setting.name not in self._leaving:
            process = await self._start(member.setting)
            member.process = process
            has_started = bool(process.stdout and await process.stdout.readline())  # it says so when it is at work
            if has_started:
                member.up.set()
            if member.setting.name in self._leaving:  # asked to go while it was being started
                self._signal(member, signal.SIGTERM)
            code = await process.wait()
            if not has_started and code > 0:
                raise ChildProcessError(f"{member.setting.name} cannot start; see {self._errors_of(member.setting)}")
            member.up.clear()
            self._judge(member.setting, code)
            await asyncio.sleep(member.down)
            member.down = 0.0
            member.setting = replace(member.setting, life=member.setting.life + 1)

    def _judge(self, setting: Setting, code: int) -> None:
        is_leaving = setting.name in self._leaving
        self._history.write("exit", "ok", name=setting.name, life=setting.life, code=code, leaving=is_leaving)
        # One that was started a moment ago may not have set up its signal handler yet.
        allowed = {0, -signal.SIGTERM} if is_leaving else {-signal.SIGKILL}
        if code not in allowed and not (is_leaving and setting.name == "receiver"):
            self.failures.append(f"{setting.name}, life {setting.life}, ended with {code}")

    async def _start(self, setting: Setting) -> asyncio.subprocess.Process:
        variant = ["--variant", self._variant] if self._variant else []
        command = ["-m", "chaos.worker", _ROLES[setting.name[0]], setting.dump(), *variant]
        with self._errors_of(setting).open("ab") as errors:
            return await asyncio.create_subprocess_exec(
                sys.executable, *command, stdin=_PIPE, stdout=_PIPE, stderr=errors, cwd=_ROOT
            )

    def telltales(self, name: str) -> Sequence[bytes]:
        """Return what marks the requests of a worker that are worth losing a reply of; nothing means any."""
        setting = self._members[name].setting
        if setting.store.startswith("redis"):
            return _telltales_in_redis(name[0], setting.store)
        if name.startswith("p"):
            return [b"COMMIT"]
        if name.startswith("c"):
            return [b"COMMIT", b"COMMIT", b""]
        if setting.store == "mariadb":
            return [b"COMMIT", b"SET status = 'processing'", b"SET status = 'delivered'", b""]
        # Statements are prepared, so that only their values are on the wire: a claim has the worker's id.
        return [bytes.fromhex(setting.worker.replace("-", "")), b"chaos-refusal", b""]

    def _errors_of(self, setting: Setting) -> Path:
        return self._folder / f"{setting.name}.stderr"

    async def assemble(self) -> None:
        """Wait until everybody is at work; raise if somebody cannot even start."""
        for member in self._members.values():
            await self._at_work(member)

    @staticmethod
    async def _at_work(member: _Member) -> None:
        """Wait until a worker is at work; raise if nobody will start it any more."""
        up = asyncio.create_task(member.up.wait())
        try:
            await asyncio.wait({up, member.keeper} if member.keeper else {up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if member.keeper is not None and member.keeper.done():
            member.keeper.result()

    async def kill(self, name: str, *, down: float = 0.0, skew: float | None = None) -> None:
        """Kill a worker, and return when it is up again; perhaps with a wrong clock."""
        member = self._members[name]
        await self._at_work(member)
        member.down = down
        if skew is not None:
            member.setting = replace(member.setting, skew=skew)
        member.up.clear()
        self._signal(member, signal.SIGKILL)
        await self._at_work(member)

    async def pause(self, name: str, length: float) -> None:
        """Hold a worker still for a while."""
        member = self._members[name]
        await self._at_work(member)
        self._signal(member, signal.SIGSTOP)
        await asyncio.sleep(length)
        self._signal(member, signal.SIGCONT)

    async def dismiss(self, prefix: str) -> None:
        """Ask workers to end, and wait until they have; those that do not are a failure."""
        names = [name for name in self._members if name.startswith(prefix)]
        self._leaving.update(names)
        for name in names:
            self._signal(self._members[name], signal.SIGTERM)
        keepers = [keeper for name in names if (keeper := self._members[name].keeper)]
        _, stuck = await asyncio.wait(keepers, timeout=_FAREWELL)
        for name in names:
            if self._members[name].keeper in stuck:
                self.failures.append(f"{name} did not end within {_FAREWELL:.0f} s of SIGTERM")
                self._signal(self._members[name], signal.SIGKILL)
        if stuck:
            await asyncio.wait(stuck)

    async def abandon(self) -> None:
        """Kill everybody who is left, whatever happened before."""
        self._leaving.update(self._members)
        for member in self._members.values():
            self._signal(member, signal.SIGKILL)
        keepers = [member.keeper for member in self._members.values() if member.keeper]
        await asyncio.gather(*keepers, return_exceptions=True)

    def errors(self, is_bad: Callable[[str], bool]) -> list[str]:
        """Return the bad lines of what dispatchers and consumers wrote to their standard error."""
        found: list[str] = []
        for path in sorted(self._folder.glob("[cd]*.stderr")):
            lines = path.read_text(errors="replace").replace(_NOISE, "").splitlines()
            found += [f"{path.stem}: {line}" for line in lines if is_bad(line)]
        return found

    @staticmethod
    def _signal(member: _Member, number: signal.Signals) -> None:
        if member.process is not None and member.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Its own method would first ask whether it is dead; then nobody else could ask how it died.
                os.kill(member.process.pid, number)
