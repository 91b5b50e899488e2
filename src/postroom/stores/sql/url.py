"""Where a database is, from a URL; its password is kept out of everything that is shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from ...errors import UnknownURLError

__all__ = ["Place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A database server and the database on it."""

    scheme: str
    host: str
    port: int | None
    user: str | None
    password: str | None = field(repr=False)
    database: str
    dsn: str = field(repr=False)
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, url: str, *, schemes: tuple[str, ...]) -> Self:
        """Read a URL such as ``postgresql://user:password@host:5432/database``."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = None, None
        # A driver may be named as in SQLAlchemy: postgresql+psycopg://
        scheme = "" if parts is None else parts.scheme.partition("+")[0]
        if parts is None or scheme not in schemes:
            raise UnknownURLError(
                _shown(url), ", ".join(f"{scheme}://user:password@host/database" for scheme in schemes)
            )
        return cls(
            scheme=scheme,
            host=unquote(parts.hostname or ""),
            port=port,
            user=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            database=unquote(parts.path.lstrip("/")),
            dsn=parts._replace(scheme=scheme).geturl(),
            options=tuple(parse_qsl(parts.query, keep_blank_values=True)),
        )

    @property
    def secrets(self) -> tuple[str, ...]:
        """The password in every form that a library may repeat it in."""
        given = {value for name, value in self.options if name == "password"} | {self.password or ""}
        forms = {
            form for secret in given for form in (secret, quote(secret), quote(secret, safe=""), quote_plus(secret))
        }
        raw = urlsplit(self.dsn).password
        return tuple(sorted((forms | {raw or ""}) - {""}, key=len, reverse=True))

    def __str__(self) -> str:
        """Return the URL without the password."""
        user = f"{self.user}@" if self.user else ""
        port = f":{self.port}" if self.port else ""
        return f"{self.scheme}://{user}{self.host}{port}/{self.database}"


def _shown(url: str) -> str:
    """Return the scheme alone: of what cannot be read, any part may be the password."""
    return f"{url.partition(':')[0]}:…"
