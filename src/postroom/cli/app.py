"""The command ``postroom``: its sub-commands, and how their errors are told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import version
from typing import IO, Any

import click

from ..errors import ConfigurationError, PostroomError
from ..text import printable
from .demo import demo
from .dispatch import dispatch
from .peek import peek
from .schema import schema
from .status import status

__all__ = ["app"]


class Failure(click.ClickException):
    """An error of postroom, printed in one line with what to do about it."""

    exit_code = 1

    def __init__(self, error: PostroomError) -> None:
        super().__init__(printable(" ".join(str(error).split())) or type(error).__name__)

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        click.echo(f"postroom: {self.message}", file=file, err=file is None)


class Misuse(Failure):
    """An error that only other settings can fix."""

    exit_code = 2


class App(click.Group):
    """A group of commands whose errors have no traceback when they say what to do."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 -- as in click
        """Run a command."""
        # It repeats each remark of the server, such as that a table is there already.
        logging.getLogger("asyncmy").setLevel(logging.ERROR)
        try:
            return super().invoke(ctx)
        except PostroomError as error:
            raise _failure(error) from error
        except BaseExceptionGroup as group:
            # Task groups wrap what their tasks raise, even if it is one error.
            told = next((leaf for leaf in _leaves(group) if isinstance(leaf, PostroomError)), None)
            if told is None:
                raise
            raise _failure(told) from group


def _failure(error: PostroomError) -> Failure:
    return Misuse(error) if isinstance(error, ConfigurationError) else Failure(error)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)  # pyright: ignore[reportUnknownArgumentType] -- what a group holds is not typed
        else:
            yield error


@click.group(cls=App, epilog="Exit codes: 0 success, 1 failure or a problem found, 2 wrong usage or settings.")
@click.version_option(version("postroom"), prog_name="postroom")
def app() -> None:
    """Commit your data and your messages together; postroom delivers them.

    Most options can also be set by the environment variable that their help names. Use it for URLs with a password:
    other users of the machine can see the arguments of a command.

    \b
    Example:
      export POSTROOM_STORE=postgresql://app:secret@db/shop
      postroom schema apply
      postroom peek
      postroom dispatch --broker file:messages.jsonl
    """  # noqa: D301 -- \b keeps click from joining the lines


for _command in (schema, dispatch, peek, status, demo):
    app.add_command(_command)
