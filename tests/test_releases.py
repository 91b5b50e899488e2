"""Workers of earlier commits keep running, and can be restarted, while and after the schema is upgraded."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from postroom.stores import SQLStore, store_from_url
from postroom.testing.waiting import until
from tests.releases import Release, checked_out, previous, previous_schema, this

pytestmark = pytest.mark.timeout(600)  # processes take their time to start on a busy machine
PRODUCER = Path(__file__).with_name("release_producer.py")
PATIENCE = timedelta(minutes=2)
COMMITS = {"previous schema": previous_schema, "previous commit": previous}
STORES = {"sqlite": "sqlite_path", "postgres": "postgres_dsn", "mariadb": "mariadb_dsn", "redis": "redis_url"}


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Release]]:
    """The commits that have been checked out, each once."""
    with ExitStack() as stack:
        yield _Releases(stack, tmp_path_factory)


class _Releases(dict[str, Release]):
    def __init__(self, stack: ExitStack, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._stack = stack
        self._folders = folders

    def __missing__(self, commit: str) -> Release:
        folder = self._folders.mktemp("release") / commit[:12]
        self[commit] = self._stack.enter_context(checked_out(commit, folder))
        return self[commit]


class Program:
    """A process that is to run until it is stopped, and the file that it writes to."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, log: Path) -> None:
        self.output = output
        self._process = process
        self._log = log

    def watch(self) -> None:
        """Fail with what the process printed if it has ended by itself."""
        assert self._process.poll() is None, self._log.read_text()

    def stop(self) -> None:
        """End the process in good order."""
        self.watch()
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(timeout=PATIENCE.total_seconds()) == 0, self._log.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Site:
    """A store, and what the programs that use it wrote."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder
        self._programs: list[Program] = []

    def produce(self, release: Release) -> Program:
        return self._start(release, "added", lambda path: (str(PRODUCER), self.url, str(path)))

    def dispatch(self, release: Release) -> Program:
        options = ("--store", self.url, "--namespace", "shop", "--poll-interval", "100ms", "--batch", "10")
        command = ("-m", "postroom.cli", "dispatch", *options)
        return self._start(release, "delivered", lambda path: (*command, "--broker", f"file:{path}"))

    def _start(self, release: Release, kind: str, command: Callable[[Path], Sequence[str]]) -> Program:
        output, log = (self._folder / f"{len(self._programs)}.{suffix}" for suffix in (kind, "log"))
        program = Program(release.start(*command(output), log=log), output, log)
        self._programs.append(program)
        return program

    def kill(self) -> None:
        for program in self._programs:
            program.kill()

    def added(self) -> set[str]:
        return {line for path in self._folder.glob("*.added") for line in path.read_text().split()}

    def delivered(self) -> set[str]:
        return {identity for path in self._folder.glob("*.delivered") for identity in ids(path)}

    async def wait_for_more(self, *programs: Program) -> None:
        """Wait until each program has written more."""
        before = [size(program.output) for program in programs]

        def has_grown() -> bool:
            for program in programs:
                program.watch()
            return all(size(program.output) > then for program, then in zip(programs, before, strict=True))

        await until(has_grown, f"more of {', '.join(p.output.name for p in programs)}", within=PATIENCE)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def ids(path: Path) -> list[str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["id"] for line in lines]


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    where = str(request.getfixturevalue(STORES[request.param]))
    folder = tmp_path / "site"
    folder.mkdir()
    site = Site(f"sqlite:///{where}" if request.param == "sqlite" else where, folder)
    try:
        yield site
    finally:
        site.kill()


async def upgraded(url: str) -> None:
    """Bring the tables up to date, if the store has any."""
    store = store_from_url(url, namespace="shop")
    try:
        if isinstance(store, SQLStore):
            await store.apply_schema()
            assert await store.check_schema() == []
    finally:
        await store.close()


async def survives(site: Site, old: Release) -> None:
    """Upgrade while an old worker and an old producer are busy, then restart both, beside new ones."""
    has_tables = not site.url.startswith("redis")
    if has_tables:
        assert old.run("schema", "apply", "--store", site.url).returncode == 0
    first = (site.produce(old), site.dispatch(old))
    await site.wait_for_more(*first)

    await upgraded(site.url)
    await site.wait_for_more(*first)
    for program in first:
        program.stop()

    producers = [site.produce(release) for release in (old, this())]
    workers = [site.dispatch(release) for release in (old, this())]
    await site.wait_for_more(*producers, *workers)
    for program in producers:
        program.stop()
    await until(lambda: site.added() <= site.delivered(), "the delivery of everything", within=PATIENCE)
    for program in workers:
        program.stop()

    assert site.delivered() == site.added()
    if has_tables:
        applied = old.run("schema", "apply", "--store", site.url)
        checked = old.run("schema", "check", "--store", site.url)
        assert (applied.returncode, checked.returncode) == (0, 0), applied.stderr + checked.stdout
        await upgraded(site.url)


@pytest.mark.parametrize("site", ["postgres"], indirect=True)
async def test_workers_of_the_previous_schema_run_and_restart_beside_new_ones(
    site: Site, releases: dict[str, Release]
) -> None:
    """Nothing is lost, and the old commands still work."""
    await survives(site, releases[previous_schema()])


@pytest.mark.prove
@pytest.mark.parametrize("site", STORES, indirect=True)
@pytest.mark.parametrize("commit", COMMITS)
async def test_workers_of_earlier_commits_run_and_restart_beside_new_ones(
    site: Site, commit: str, releases: dict[str, Release]
) -> None:
    """On every store; Redis has no schema, but scripts that old and new workers share the data of."""
    await survives(site, releases[COMMITS[commit]()])
