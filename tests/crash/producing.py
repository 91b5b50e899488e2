"""The rows of the crash matrix about producers: reliability section 3.1, without its consumers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .cases import POSTGRES, WIRED, Producing, fails
from .worker import Arm

__all__ = ["PRODUCING"]

PRODUCING: Final[Sequence[Producing]] = (
    *[
        Producing(row=row, arms=[Arm(point, "kill", nth)], stored=False, heard=None)
        for row, point, nth in (
            ("a-b", "tx.begin", 1),
            ("c-e", "add.before", 1),
            ("c-e", "add.before", 2),
            ("c-e", "add.after", 2),
            ("f, not applied", "commit.before", 1),
        )
    ],
    *[
        Producing(row="c-e", arms=[fails(point, nth, "RuntimeError")], stored=False, heard="RuntimeError")
        for point, nth in (("tx.begin", 1), ("add.before", 2), ("add.after", 2), ("commit.before", 1))
    ],
    *[
        Producing(
            row="cancel / timeout in c-g", arms=[Arm(point, "cancel_self", nth)], stored=False, heard="CancelledError"
        )
        for point, nth in (("add.before", 1), ("add.before", 2))
    ],
    *[
        # What has begun to end is ended, though the caller does not hear of it.
        Producing(
            row="cancel / timeout in c-g", arms=[Arm(point, "cancel_self", nth)], stored=True, heard="CancelledError"
        )
        for point, nth in (("add.after", 2), ("commit.before", 1))
    ],
    Producing(row="c-e", arms=[Arm("add.before", "cut", 2)], stores=WIRED, stored=False, heard="something"),
    *[
        # COMMIT is all that is left to send, and whether it arrived is not known where the connection is lost, also in
        # the first transaction of a process.
        Producing(
            row="f, not applied, which the caller cannot know",
            arms=[Arm(point, "cut", nth)],
            stores=POSTGRES,
            stored=True,  # by the second try
            heard="CommitUnknownError",
            found=False,
            is_cold=is_cold,
        )
        for point, nth in (("add.after", 2), ("commit.before", 1))
        for is_cold in (False, True)
    ],
    # MariaDB is told to release a savepoint before COMMIT, which finds the loss as well.
    Producing(
        row="f, not applied", arms=[Arm("commit.before", "cut")], stores=("mariadb",), stored=False, heard="something"
    ),
    Producing(
        row="f, not applied, which the caller cannot know",
        arms=[Arm("commit.before", "lose_request", 1, "COMMIT")],
        stores=WIRED,
        stored=True,  # by the second try, for which the first had to be known to be void
        heard="CommitUnknownError",
        found=False,
    ),
    Producing(
        row="g, reply lost",
        arms=[Arm("commit.before", "lose", 1, "COMMIT")],
        stores=WIRED,
        stored=True,
        heard="CommitUnknownError",
        found=True,
    ),
    Producing(row="h-i", arms=[Arm("commit.after", "kill")], stored=True, heard=None),
    Producing(row="h-i", arms=[fails("commit.after", 1, "RuntimeError")], stored=True, heard="RuntimeError"),
    Producing(row="h-i", arms=[Arm("commit.after", "cut")], stores=WIRED, stored=True, heard="nothing"),
)
