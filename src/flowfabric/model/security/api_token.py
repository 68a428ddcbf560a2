"""API tokens: who may call which operations. Only the digest of a token is stored, never the token."""

from __future__ import annotations

from enum import StrEnum
from typing import Generic

import msgspec

from flowfabric.model.instant import Instant


class ApiScope(StrEnum):
    """What a token may permit."""

    READ = "read"
    SUBMIT = "submit"
    WORK = "work"
    OPERATE = "operate"
    ADMIN = "admin"


class ApiToken(msgspec.Struct, Generic[Instant], frozen=True):
    """One token. After a rotation the previous digest is valid until `previous_until`."""

    token_id: str
    name: str
    scopes: str  # sorted, comma-joined
    digest: str
    created_at: Instant
    namespaces: str | None = None  # a sorted JSON array; unset is all
    previous_digest: str | None = None
    previous_until: Instant | None = None
    expires_at: Instant | None = None
    revoked_at: Instant | None = None
    parent: str | None = None  # what opened a console session: a token, or `root:` and a fingerprint
    revision: int = 0

    def __repr__(self) -> str:
        return f"ApiToken(token_id={self.token_id!r}, name={self.name!r}, scopes={self.scopes!r}, digest=<REDACTED>)"


class TokenView(msgspec.Struct, frozen=True):
    """A token as administrators see it."""

    token_id: str
    name: str
    scopes: tuple[ApiScope, ...]
    namespaces: tuple[str, ...] | None
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    previous_until: int | None
    parent: str | None = None  # the token that opened this session of the console


class ApiTokenCreated(msgspec.Struct, frozen=True):
    """A token that was just created or rotated: the only time that it is shown."""

    token_id: str
    token: str

    def __repr__(self) -> str:
        return f"ApiTokenCreated(token_id={self.token_id!r}, token=<REDACTED>)"
