"""What administrators do: signing keys and tokens."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric import errors
from flowfabric.api.encoding import CURSOR, LIMIT, Body, Natural, Unsaid
from flowfabric.engine.types import Kids
from flowfabric.model.api_token import Scope, TokenMade, TokenView
from flowfabric.server import logging
from flowfabric.server.errors import Refused, bad_request
from flowfabric.server.request import Ask, json, uuid_in
from flowfabric.server.routing import Reply, Routes, Subject

routes = Routes("admin")

ROTATION_S = 120.0
HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


class RotateBody(Unsaid, Body, frozen=True):
    new_kid: str
    new_secret_hex: str


class Rotated(msgspec.Struct, frozen=True):
    rotated: int
    failed: list[int]
    new_kid: str


@routes.post(
    "/v1/admin/rotate-waitpoint-secret",
    {200: Rotated},
    body=RotateBody,
    scope=Scope.ADMIN,
    long=True,
)
async def rotate_waitpoint_secret(ask: Ask[RotateBody]) -> Reply:
    """Let another key sign waitpoint tokens; the one before verifies for the grace that is configured."""
    kid, secret = ask.body.new_kid, ask.body.new_secret_hex
    if not kid or ":" in kid:
        raise bad_request("new_kid must be non-empty and must not contain ':'")
    if not secret or len(secret) % 2 or not HEX_DIGITS.issuperset(secret):
        raise bad_request("new_secret_hex must be a non-empty even-length hex string")
    if ask.app.rotating.locked():
        raise Refused(429, "too many concurrent admin_rotate calls (server max: 1); retry with backoff", retryable=True)
    async with ask.app.rotating:
        try:
            async with asyncio.timeout(ROTATION_S):
                done = await ask.engine.rotate_waitpoint_hmac_secret_all(
                    kid, secret, ask.app.settings.waitpoint_grace_ms
                )
        except TimeoutError:
            _noted(ask, kid, "waitpoint_hmac_rotation_timeout_http_504")
            raise errors.OperationTimeout("rotate_waitpoint_secret", int(ROTATION_S * 1000)) from None
        except errors.FabricError:
            _noted(ask, kid, "waitpoint_hmac_rotation_failed")
            raise
    ask.app.handles.forget()
    failed = [one.partition for one in done if isinstance(one.result, errors.FabricError)]
    if len(failed) == len(done):
        _noted(ask, kid, "waitpoint_hmac_rotation_failed")
        raise bad_request(f"rotation failed on all partitions: {kid} is known with another secret")
    _noted(ask, kid, "waitpoint_hmac_rotation_complete")
    return json(Rotated(len(done) - len(failed), failed, kid))


def _noted(ask: Ask[RotateBody], kid: str, event: str) -> None:
    logging.note_audit(event, {"who": ask.principal.name, "new_kid": kid, "request_id": ask.request_id})


# ---------------------------------------------------------------------------------------------------------------
# Tokens

NO_STORE = ("cache-control", "no-store")


@routes.get("/v1/signing-keys", {200: Kids}, scope=Scope.READ, subject=Subject.OWN)
async def list_signing_keys(ask: Ask[None]) -> Reply:
    """Which keys sign waitpoint tokens and grants, and which still verify; by name."""
    return json(await ask.engine.list_waitpoint_hmac_kids())


class TokenBody(Body, frozen=True):
    """A token to be made; without namespaces it is good in all of them."""

    name: str
    scopes: list[Scope]
    namespaces: list[str] | None = None
    expires_in_ms: Natural | None = None


@routes.post("/v1/admin/tokens", {201: TokenMade}, body=TokenBody, scope=Scope.ADMIN, audit=True)
async def make_api_token(ask: Ask[TokenBody]) -> Reply:
    """A new token; it is shown now and never again."""
    body = ask.body
    made = await ask.engine.make_api_token(
        body.name, body.scopes, namespaces=body.namespaces, expires_in_ms=body.expires_in_ms
    )
    return json(made, 201, NO_STORE)


class Tokens(msgspec.Struct, frozen=True):
    tokens: list[TokenView]


@routes.get("/v1/admin/tokens", {200: Tokens}, scope=Scope.ADMIN, query=(CURSOR, LIMIT))
async def list_api_tokens(ask: Ask[None]) -> Reply:
    """Tokens by id: what they are good for, not what they are."""
    return json(
        Tokens(await ask.engine.list_api_tokens(cursor=ask.query("cursor") or None, limit=ask.number("limit", 100)))
    )


class RotateTokenBody(Body, frozen=True):
    grace_ms: Natural = 0


@routes.post("/v1/admin/tokens/{id}/rotate", {200: TokenMade}, body=RotateTokenBody, scope=Scope.ADMIN, audit=True)
async def rotate_api_token(ask: Ask[RotateTokenBody]) -> Reply:
    """Another secret for a token; the one before is good for the grace."""
    made = await ask.engine.rotate_api_token(uuid_in("token_id", ask.params[0]), grace_ms=ask.body.grace_ms)
    ask.app.guard.forget()
    return json(made, 200, NO_STORE)


class TokenRevoked(msgspec.Struct, frozen=True):
    revoked: bool


@routes.delete("/v1/admin/tokens/{id}", {200: TokenRevoked}, scope=Scope.ADMIN, audit=True)
async def revoke_api_token(ask: Ask[bytes]) -> Reply:
    """Make a token good for nothing."""
    revoked = await ask.engine.revoke_api_token(uuid_in("token_id", ask.params[0]))
    ask.app.guard.forget()
    return json(TokenRevoked(revoked))
