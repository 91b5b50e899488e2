"""Habits of the repository that no tool checks."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Put together here, so that this file does not name what it forbids.
HOSTS = [".".join(parts) for parts in [("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org")]]
OPTIONS = ["--index" + "-url", "--find" + "-links", "--trusted" + "-host"]


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def test_continuous_integration_runs_what_a_developer_runs() -> None:
    script = ROOT / ".ci" / "run"

    commands = [line for line in script.read_text().splitlines() if re.search(r"\bmake\b", line)]

    assert commands == ["exec make test"]
    assert os.access(script, os.X_OK)


def test_every_constraint_is_an_exact_version_and_nothing_else() -> None:
    """An address or a hash would tie set-up to one package index."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]

    assert len(pins) > 20
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin)] == []


def test_no_file_says_where_packages_come_from() -> None:
    """That is for the machine to decide: a mirror works as well as the public index."""
    forbidden = re.compile("|".join(map(re.escape, [*HOSTS, *OPTIONS])))

    found = [path.name for path in tracked() if forbidden.search(path.read_text(errors="replace"))]

    assert found == []
