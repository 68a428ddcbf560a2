"""Tokens of the API: who may ask for what. The token itself is nowhere kept, only its digest."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ApiScope(StrEnum):
    """What a token may be good for."""

    READ = "read"
    SUBMIT = "submit"
    WORK = "work"
    OPERATE = "operate"
    ADMIN = "admin"


class ApiToken(msgspec.Struct, frozen=True):
    """One token. After a rotation the digest before is good until its own instant."""

    token_id: str
    name: str
    scopes: str  # sorted, comma-joined
    digest: str
    created_at: int
    namespaces: str | None = None  # a sorted JSON array; unset is all
    previous_digest: str | None = None
    previous_until: int | None = None
    expires_at: int | None = None
    revoked_at: int | None = None
    revision: int = 0

    def __repr__(self) -> str:
        return f"ApiToken(token_id={self.token_id!r}, name={self.name!r}, scopes={self.scopes!r}, digest=<REDACTED>)"


class TokenView(msgspec.Struct, frozen=True):
    """A token for administrators."""

    token_id: str
    name: str
    scopes: tuple[ApiScope, ...]
    namespaces: tuple[str, ...] | None
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    previous_until: int | None


class ApiTokenCreated(msgspec.Struct, frozen=True):
    """A token that was just made or renewed: the only time that it is shown."""

    token_id: str
    token: str

    def __repr__(self) -> str:
        return f"TokenMade(token_id={self.token_id!r}, token=<REDACTED>)"
