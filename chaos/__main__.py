"""``python -m chaos``: break things for a while, and say what came of it."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from postroom.testing.servers import ServerMissingError

from .run import Options, run
from .stores import NAMES


def main() -> int:
    """Run chaos, print the verdict, and return 1 if any promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long faults go on")
    parser.add_argument("--store", choices=NAMES, default="postgres")
    parser.add_argument("--seed", type=int, help="which faults; the same seed gives the same ones")
    parser.add_argument("--folder", type=Path, help="keep all evidence here, whatever the verdict is")
    parser.add_argument("--variant", help="break the library on purpose, as chaos/variants says")
    given = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if given.seed is None else given.seed
    folder = given.folder or Path(tempfile.mkdtemp(prefix="postroom-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    options = Options(
        store=given.store, seconds=given.seconds, seed=seed, folder=str(folder.resolve()), variant=given.variant
    )
    print(f"chaos: store {options.store}, seed {seed}, {options.seconds:g} s, evidence in {folder}", file=sys.stderr)
    try:
        verdict = asyncio.run(run(options))
    except ServerMissingError as error:
        print(error, file=sys.stderr)
        return 2
    print(verdict.details, file=sys.stderr)
    for violation in verdict.violations[:20]:
        print(f"{violation.check} {violation.id or violation.key}: {violation.what}", file=sys.stderr)
    print(verdict.line)
    if given.folder is None and not verdict.violations:
        shutil.rmtree(folder)
    return 1 if verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main())
