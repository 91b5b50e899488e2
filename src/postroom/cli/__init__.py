"""The command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import MissingExtraError

if TYPE_CHECKING:
    import click

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``postroom`` and exit."""
    try:
        app = _load()
    except MissingExtraError as error:
        sys.stderr.write(f"postroom: {error}\n")
        sys.exit(2)
    app.main(arguments, prog_name="postroom")


def _load() -> click.Command:
    try:
        from .app import app  # noqa: PLC0415 -- an extra
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in {"click", "rich"}:
            raise
        raise MissingExtraError("the command line", "cli") from error
    return app
