"""The generator: every mutant of the package, and a seeded choice of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from .lua import lua_mutants_of
from .mutant import Mutant
from .operators import mutants_of

__all__ = ["choose", "every_mutant", "is_valid"]

#: What is not mutated: contracts, fixtures and servers are tests themselves, and demos show something to a person.
LEFT_OUT: Final = ("testing/", "cli/demo.py", "cli/shop.py", "__main__.py")


def every_mutant(root: Path, package: str) -> Iterator[Mutant]:
    """Yield every mutant of a package, a folder below the root."""
    for path in sorted([*(root / package).rglob("*.py"), *(root / package).rglob("*.lua")]):
        inside = path.relative_to(root / package).as_posix()
        if not inside.startswith(LEFT_OUT) and path.name != "__main__.py":
            mutate = mutants_of if path.suffix == ".py" else lua_mutants_of
            yield from mutate(path.relative_to(root).as_posix(), path.read_text())


def choose(mutants: Iterable[Mutant], root: Path, *, seed: int, count: int) -> Sequence[Mutant]:
    """Return as many mutants as asked for, the same ones for the same seed.

    Each mutant has a number of its own, made from the seed and what it is, so that a change of one module changes only
    few of the mutants that a seed chooses.
    """
    different = {one.identity: one for one in mutants}.values()
    in_turn = sorted(different, key=lambda one: _number(seed, one))
    return list(islice((one for one in in_turn if is_valid(one, (root / one.path).read_text())), count))


def is_valid(one: Mutant, source: str) -> bool:
    """Return whether a mutant can be compiled; of Lua, Redis says it."""
    if not one.path.endswith(".py"):
        return True
    try:
        compile(one.apply(source), one.path, "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _number(seed: int, one: Mutant) -> bytes:
    return hashlib.blake2b("\0".join((str(seed), *one.identity)).encode(), digest_size=16).digest()
