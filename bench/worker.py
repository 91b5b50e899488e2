"""One measurement as a process of its own, so that none inherits the memory or the caches of another.

Run as ``python -m bench.worker JSON``, with ``contender``, ``dsn``, ``options`` and ``calls``, which are made one after
the other; the answer of the last one is one line of JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

from .contender import contender


async def main(text: str) -> None:
    """Make calls and print what the last one answers."""
    order = json.loads(text)
    subject = contender(order["contender"], order["dsn"], **order["options"])
    answer: object = None
    for call, arguments in order["calls"].items():
        answer = await getattr(subject, call)(**arguments)
    print(json.dumps(dataclasses.asdict(answer) if dataclasses.is_dataclass(answer) else answer))  # type: ignore[arg-type]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
