"""What the metadata of the package promises to those who install it."""

from __future__ import annotations

from importlib.metadata import metadata, requires

from packaging.requirements import Requirement

from scripts.prove import PYTHONS


def required_by(extra: str) -> list[Requirement]:
    wanted = [Requirement(line) for line in requires("postroom") or ()]
    return [one for one in wanted if one.marker is not None and one.marker.evaluate({"extra": extra})]


def test_the_extra_of_sqlalchemy_brings_what_its_async_sessions_need() -> None:
    """SQLAlchemy 2.1 installs greenlet only where ``asyncio`` is asked for."""
    [sqlalchemy] = [one for one in required_by("sqlalchemy") if one.name.lower() == "sqlalchemy"]

    assert sqlalchemy.extras == {"asyncio"}


def test_every_python_that_is_promised_is_tested() -> None:
    """The oldest by `make test`, the others by `make prove`."""
    prefix = "Programming Language :: Python :: 3."
    promised = [line for line in metadata("postroom").get_all("Classifier") or () if line.startswith(prefix)]

    assert [line.rpartition(" ")[2] for line in promised] == ["3.11", *PYTHONS]
