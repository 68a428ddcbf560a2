"""Tokens of the API: made, renewed, revoked, looked up.

A token reads `ff_<id>_<secret>`: the id finds the row, the secret's digest is compared. The secret has 256 bits of
chance, so a plain digest is as good as a slow one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.operations.base import Operations
from flowfabric.engine.runtime.after_commit import first
from flowfabric.engine.validation import execution as validate
from flowfabric.model.api_token import ApiScope, ApiToken, ApiTokenCreated, TokenView
from flowfabric.rules import validation
from flowfabric.rules.security import api_tokens
from flowfabric.stores.queries import Read, Scan

MAX_LISTED = 1000
_FORM = re.compile(r"ff_([0-9a-f]{32})_([A-Za-z0-9_-]{43})").fullmatch


class VerifiedToken(msgspec.Struct, frozen=True):
    """Somebody with a good token."""

    token_id: str
    name: str
    scopes: frozenset[ApiScope]
    namespaces: frozenset[str] | None


class ApiTokenOperations(Operations):
    """What can be done with tokens of the API."""

    async def make_api_token(
        self,
        name: str,
        scopes: Iterable[str],
        *,
        namespaces: Iterable[str] | None = None,
        expires_in_ms: int | None = None,
    ) -> ApiTokenCreated:
        """A new token, shown once; without namespaces it is good in all of them."""
        label = validation.text("name", name, limit=validation.MAX_NAME_BYTES)
        wanted = frozenset(_scope(one) for one in validate.validate_iterable("scopes", scopes))
        if not wanted:
            raise errors.InvalidInput("scopes: empty")
        named = None if namespaces is None else validate.validate_iterable("namespaces", namespaces)
        where = None if named is None else frozenset(_namespace(one) for one in named)
        lasts = None if expires_in_ms is None else validation.duration_ms("expires_in_ms", expires_in_ms)
        token_id, secret = self.runtime.minter.uuid(), secrets.token_urlsafe(32)
        await self.runtime.decide_and_commit(
            _wants(token_id),
            lambda rows, _: api_tokens.create(
                first(rows[0]),
                token_id=token_id,
                name=label,
                scopes=wanted,
                namespaces=where,
                digest=_digest(secret),
                expires_in_ms=lasts,
            ),
        )
        return _made(token_id, secret)

    async def rotate_api_token(self, token_id: str, *, grace_ms: int = 0) -> ApiTokenCreated:
        """Another secret for a token, shown once; the one before is good for `grace_ms` more."""
        known, secret = ids.parse_uuid(validation.text("token_id", token_id), "token_id"), secrets.token_urlsafe(32)
        grace = validation.duration_ms("grace_ms", grace_ms, least=0)
        await self.runtime.decide_and_commit(
            _wants(known), lambda rows, _: api_tokens.rotate(first(rows[0]), _digest(secret), grace)
        )
        return _made(known, secret)

    async def revoke_api_token(self, token_id: str) -> bool:
        """Make a token good for nothing; True when it was good for something."""
        known = ids.parse_uuid(validation.text("token_id", token_id), "token_id")
        return await self.runtime.decide_and_commit(_wants(known), lambda rows, _: api_tokens.revoke(first(rows[0])))

    async def list_api_tokens(self, *, cursor: str | None = None, limit: int = 100) -> list[TokenView]:
        """Tokens by id, without what they are known by."""
        after = None if cursor is None else (ids.parse_uuid(validation.text("cursor", cursor), "cursor"),)
        wanted = min(validation.integer("limit", limit, least=1), MAX_LISTED)
        rows: list[ApiToken] = await self.runtime.scan(Scan(ApiToken, (), ("token_id",), after, wanted))
        return [api_tokens.view(row) for row in rows]

    async def authenticate_token(self, token: str) -> VerifiedToken | None:
        """Who shows this token; None when it is not good."""
        found = _FORM(token)
        if found is None:
            return None
        loaded = await self.runtime.load(_wants(ids.parse_uuid(found[1])))
        row: ApiToken | None = first(loaded.rows[0])
        if row is None or not api_tokens.is_valid(row, _digest(found[2]), loaded.now):
            return None
        return VerifiedToken(row.token_id, row.name, api_tokens.scopes_of(row), api_tokens.namespaces_of(row))


def _wants(token_id: str) -> tuple[Read, ...]:
    return (Read(ApiToken, (token_id,)),)


def _made(token_id: str, secret: str) -> ApiTokenCreated:
    return ApiTokenCreated(token_id, f"ff_{token_id.replace('-', '')}_{secret}")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _scope(value: object) -> ApiScope:
    try:
        return ApiScope(validation.text("scopes", value))
    except ValueError:
        raise errors.InvalidInput(f"scopes: {validation.preview(value)} is none of {', '.join(ApiScope)}") from None


def _namespace(value: object) -> str:
    return validation.text("namespaces", value, limit=validation.MAX_NAME_BYTES)
