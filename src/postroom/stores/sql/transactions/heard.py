"""What asyncpg keeps to itself about BEGIN and COMMIT; it is not imported here."""

from __future__ import annotations

from typing import ClassVar, Self

from .block import Foreign

__all__ = ["Heard"]


class Heard:
    """Stands between a transaction of asyncpg and its connection: what BEGIN takes along, what COMMIT is answered.

    asyncpg keeps that to itself; a statement of its own, or to ask before every COMMIT whether the transaction has
    failed, would each cost a round trip. Should another version of it not go through here, no answer is heard, nothing
    was taken along, and asking goes on.
    """

    #: Whether the answer to a COMMIT was ever heard.
    is_understood: ClassVar[bool] = False

    #: What it has of its own; everything else is the connection's.
    _connection: Foreign
    _along: str
    answer: str

    def __init__(self, connection: Foreign, along: str) -> None:
        self.__dict__.update(_connection=connection, _along=along, answer="")

    @classmethod
    def listen(cls, begun: Foreign, along: str = "") -> Self:
        """Hear what is answered to the next statement, and have another one follow it at once."""
        heard = cls(getattr(begun, "_connection", None), along)
        try:  # noqa: SIM105 -- `suppress` takes longer than everything else here, twice for every message
            begun._connection = heard  # noqa: SLF001
        except AttributeError:  # it may be called otherwise one day
            pass
        return heard

    def leave(self, begun: Foreign) -> None:
        """Listen no more."""
        begun._connection = self._connection  # noqa: SLF001

    async def execute(self, query: str) -> str:
        """Run a statement with what goes along with it, and keep the answer."""
        answer: str = await self._connection.execute(query + self._along)
        self.__dict__["answer"] = answer
        if not self._along:
            Heard.is_understood = answer == "COMMIT"
        return answer

    def __getattr__(self, name: str) -> Foreign:
        """Return what the connection has."""
        return getattr(self._connection, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set it on the connection."""
        setattr(self._connection, name, value)
