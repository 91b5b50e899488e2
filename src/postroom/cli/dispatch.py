"""The command that delivers: a dispatcher as a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TextIO
from uuid import UUID

import click

from .. import brokers, events
from ..brokers import LinesBroker, MemoryBroker
from ..collapse import Repeats
from ..dispatcher import Dispatcher
from ..errors import BrokerError, ConfigurationError
from ..logs import Collapsed, summed_up
from ..retry import Backoff
from ..store import Store
from ..stores.sql.store import WEEK
from .options import Duration, StoreOptions, derived_options, option, run, show_duration, store_options

__all__ = ["EventLog", "dispatch"]

#: How many seconds a second signal leaves for giving back what is held.
LAST_SECOND = 1.0


@click.command()
@store_options
@option(
    "--broker",
    required=True,
    metavar="URL",
    help="Where messages go: stdout: or file:path, as lines of JSON, one CloudEvent each.",
)
@derived_options(
    Dispatcher.__init__,
    leave_out=("concurrency", "backoff", "outage_backoff", "destination", "worker", "listener"),
)
@option(
    "--backoff-base",
    type=Duration(),
    default=show_duration(Backoff().base),
    help="How long to wait after the first failure; doubles.",
)
@option(
    "--backoff-max",
    type=Duration(),
    default=show_duration(Backoff().max),
    help="The longest wait between two attempts.",
)
@option(
    "--keep-delivered",
    type=Duration(),
    default=show_duration(WEEK),
    help="How long to keep delivered messages; 0s: not at all.",
)
@click.option("--once", is_flag=True, help="Deliver what is due, then exit: with 0 if all was delivered, else with 1.")
@click.option("--verbose", "-v", is_flag=True, help="Log every event, not only those that operators need.")
@click.option(
    "--json", "as_json", is_flag=True, help="Log events as lines of JSON, on stdout unless the broker uses it."
)
def dispatch(  # noqa: PLR0913 -- one for each option
    store_options: StoreOptions,
    *,
    broker: str,
    keep_delivered: timedelta,
    backoff_base: timedelta,
    backoff_max: timedelta,
    once: bool,
    verbose: bool,
    as_json: bool,
    **settings: Any,  # noqa: ANN401 -- those of the Dispatcher, each with an option of the same name
) -> None:
    """Deliver messages to a broker until SIGTERM or SIGINT.

    After one signal, running deliveries may finish within --shutdown-grace; a second signal ends the process at once.
    Neither loses a message, nor does kill -9: what was not confirmed is delivered after the next start. Any number of
    dispatchers may run.

    With --broker stdout:, stdout holds nothing but messages, and every message that is printed is marked as delivered.
    To look at messages without delivering them, use postroom peek.

    \b
    Exit codes:
      0    stopped by a signal; with --once, everything that was due was delivered
      1    the database cannot be used, the reader of stdout went away, or --once left messages undelivered
      2    wrong usage or settings
      130  ended at once by a second SIGINT (143: SIGTERM)

    \b
    Example:
      postroom dispatch --store sqlite:///shop.sqlite3 --namespace shop --broker file:messages.jsonl
      POSTROOM_STORE=postgresql://app:secret@db/shop POSTROOM_LEASE=1m postroom dispatch --broker stdout:
    """  # noqa: D301
    publisher = brokers.open_url(broker)
    if isinstance(publisher, MemoryBroker):
        raise ConfigurationError("a memory: broker would forget what it confirmed; use stdout: or file:path")
    owns_stdout = isinstance(publisher, LinesBroker)
    log = EventLog(
        sys.stdout if as_json and not owns_stdout else sys.stderr,
        as_json=as_json,
        level=logging.DEBUG if verbose else logging.INFO,
    )
    session = _Session(store_options.make(keep_delivered=keep_delivered), publisher, log)
    dispatcher = Dispatcher(
        session.store,
        publisher,
        backoff=Backoff(base=backoff_base, max=backoff_max),
        listener=session.listen,
        **settings,
    )
    sys.exit(run(lambda: session.run(dispatcher, once=once)))


@dataclass(frozen=True, slots=True)
class _Signalled(events.Event):
    """The process was sent a signal to end."""

    level = logging.INFO
    text = "stopping on %(signal)s; a second signal ends the process at once"
    signal: str


@dataclass(frozen=True, slots=True)
class _PrintsMessages(events.Event):
    """The dispatcher prints messages, which looks like a way to read them."""

    level = logging.WARNING
    text = "messages printed on stdout are marked as delivered; `postroom peek` shows messages and changes nothing"


class EventLog:
    """Writes events as lines of text or JSON; unless each is wanted, repeated failures of one kind as one a minute."""

    def __init__(self, stream: TextIO, *, as_json: bool, level: int) -> None:
        self._stream = stream
        self._as_json = as_json
        self._level = level
        self._listen = self._write if level <= logging.DEBUG else Collapsed(self._write)

    def __call__(self, event: events.Event) -> None:
        """Write one line, or count a repeat."""
        if event.level >= self._level:
            self._listen(event)

    def _write(self, event: events.Event, repeats: Repeats[events.Event] | None = None) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        level = logging.getLevelName(event.level).lower()
        text = str(event) if repeats is None else summed_up(str(event), repeats)
        line = f"{now} {level} {text}"
        if self._as_json:
            fields = {name: _plain(value) for name, value in event.as_dict().items()}
            repeated = {} if repeats is None else {"repeats": repeats.count}
            line = json.dumps(
                {"time": now, "level": level, "event": type(event).__name__.removeprefix("_"), "text": text}
                | fields
                | repeated
            )
        with suppress(BrokenPipeError):  # the reader of the log has gone; delivery goes on
            self._stream.write(f"{line}\n")
            self._stream.flush()


def _plain(value: object) -> object:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, UUID) else value


class _Session:
    """One run of a dispatcher: signals come in, events go out, an exit code remains."""

    def __init__(self, store: Store, publisher: object, log: EventLog) -> None:
        self.store = store
        self._publisher = publisher
        self._log = log
        self._dispatcher: Dispatcher | None = None
        self._signals: list[int] = []
        self._undelivered = False
        self._down: set[str | None] = set()

    async def run(self, dispatcher: Dispatcher, *, once: bool) -> int:
        """Deliver until stopped; return the exit code."""
        self._dispatcher = dispatcher
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            if once:
                await self.store.open()  # a dispatcher would wait for a store that is away
            await dispatcher.run(until_idle=once)
        finally:
            await self.store.close()
        if isinstance(self._publisher, LinesBroker) and self._publisher.is_gone:
            raise BrokerError("the reader of stdout has gone; what it did not take is delivered after the next start")
        if len(self._signals) > 1:
            return 128 + self._signals[-1]
        return 1 if once and (self._undelivered or self._down) else 0

    def listen(self, event: events.Event) -> None:
        """Take note of what decides the exit code, and log."""
        match event:
            case events.Started() if isinstance(self._publisher, LinesBroker):
                self._log(_PrintsMessages())
            case events.BreakerOpened(destination):
                self._down.add(destination)
                if isinstance(self._publisher, LinesBroker) and self._publisher.is_gone and self._dispatcher:
                    self._dispatcher.stop_soon()
            case events.BreakerClosed(destination):
                self._down.discard(destination)
            case events.Retried() | events.Died() | events.Swept():
                self._undelivered = True
            case _:
                pass
        self._log(event)

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        self._log(_Signalled(signal.Signals(number).name))
        if self._dispatcher is not None:
            self._dispatcher.stop_soon()
        if len(self._signals) > 1:
            # Dying is safe at any moment; giving the claims back first only saves others the wait for the leases.
            delay = LAST_SECOND if len(self._signals) == 2 else 0  # noqa: PLR2004
            asyncio.get_running_loop().call_later(delay, os._exit, 128 + number)
