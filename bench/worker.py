"""One measurement as a process of its own, so that none inherits the memory or the caches of another.

Run as ``python -m bench.worker JSON``, with ``contender``, ``dsn``, ``options``, ``call`` and ``arguments``; the
answer is one line of JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

from .contender import contender


async def main(text: str) -> None:
    """Make one call and print what it answers."""
    order = json.loads(text)
    subject = contender(order["contender"], order["dsn"], **order["options"])
    answer = await getattr(subject, order["call"])(**order["arguments"])
    print(json.dumps(dataclasses.asdict(answer) if dataclasses.is_dataclass(answer) else answer))  # type: ignore[arg-type]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
