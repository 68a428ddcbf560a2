"""Routes for administrators: signing keys and API tokens."""

from __future__ import annotations

import asyncio

from flowfabric import errors
from flowfabric.api.admin import (
    CreateTokenRequest,
    ListTokensResponse,
    RevokeTokenResponse,
    RotateTokenRequest,
    RotateWaitpointSecretRequest,
    RotateWaitpointSecretResponse,
)
from flowfabric.engine.types import KeyIds
from flowfabric.model.api_token import ApiScope, ApiTokenCreated
from flowfabric.server import logging
from flowfabric.server.errors import HttpError, bad_request
from flowfabric.server.request import Request, json_response, path_uuid
from flowfabric.server.routing import CURSOR_PARAM, LIMIT_PARAM, Response, RouteGroup, Subject

routes = RouteGroup("admin")

ROTATION_TIMEOUT_S = 120.0
HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


@routes.post(
    "/v1/admin/rotate-waitpoint-secret",
    {200: RotateWaitpointSecretResponse},
    body=RotateWaitpointSecretRequest,
    scope=ApiScope.ADMIN,
    long=True,
)
async def rotate_waitpoint_secret(request: Request[RotateWaitpointSecretRequest]) -> Response:
    """Rotate the key that signs waitpoint tokens; the previous key verifies during the configured grace period."""
    kid, secret = request.body.new_kid, request.body.new_secret_hex
    if not kid or ":" in kid:
        raise bad_request("new_kid must be non-empty and must not contain ':'")
    if not secret or len(secret) % 2 or not HEX_DIGITS.issuperset(secret):
        raise bad_request("new_secret_hex must be a non-empty even-length hex string")
    if request.app.rotation_lock.locked():
        raise HttpError(
            429, "too many concurrent admin_rotate calls (server max: 1); retry with backoff", retryable=True
        )
    async with request.app.rotation_lock:
        try:
            async with asyncio.timeout(ROTATION_TIMEOUT_S):
                rotations = await request.engine.rotate_waitpoint_hmac_secret_all(
                    kid, secret, request.app.settings.waitpoint_grace_ms
                )
        except TimeoutError:
            _audit(request, kid, "waitpoint_hmac_rotation_timeout_http_504")
            raise errors.OperationTimeout("rotate_waitpoint_secret", int(ROTATION_TIMEOUT_S * 1000)) from None
        except errors.FabricError:
            _audit(request, kid, "waitpoint_hmac_rotation_failed")
            raise
    request.app.handle_signer.clear_cache()
    failed = [rotation.partition for rotation in rotations if isinstance(rotation.result, errors.FabricError)]
    if len(failed) == len(rotations):
        _audit(request, kid, "waitpoint_hmac_rotation_failed")
        raise bad_request(f"rotation failed on all partitions: {kid} is known with another secret")
    _audit(request, kid, "waitpoint_hmac_rotation_complete")
    return json_response(RotateWaitpointSecretResponse(len(rotations) - len(failed), failed, kid))


def _audit(request: Request[RotateWaitpointSecretRequest], kid: str, event: str) -> None:
    logging.log_audit(event, {"who": request.principal.name, "new_kid": kid, "request_id": request.request_id})


# ---------------------------------------------------------------------------------------------------------------
# Tokens

NO_STORE = ("cache-control", "no-store")


@routes.get("/v1/signing-keys", {200: KeyIds}, scope=ApiScope.READ, subject=Subject.CHECKED_BY_HANDLER)
async def list_signing_keys(request: Request[None]) -> Response:
    """List the ids of the keys that sign waitpoint tokens and grants, and of those that still verify."""
    return json_response(await request.engine.list_waitpoint_hmac_kids())


@routes.post("/v1/admin/tokens", {201: ApiTokenCreated}, body=CreateTokenRequest, scope=ApiScope.ADMIN, audit=True)
async def make_api_token(request: Request[CreateTokenRequest]) -> Response:
    """Create an API token; its secret is returned only now."""
    body = request.body
    created = await request.engine.make_api_token(
        body.name, body.scopes, namespaces=body.namespaces, expires_in_ms=body.expires_in_ms
    )
    return json_response(created, 201, NO_STORE)


@routes.get("/v1/admin/tokens", {200: ListTokensResponse}, scope=ApiScope.ADMIN, query=(CURSOR_PARAM, LIMIT_PARAM))
async def list_api_tokens(request: Request[None]) -> Response:
    """List API tokens by id, without their secrets."""
    return json_response(
        ListTokensResponse(
            await request.engine.list_api_tokens(
                cursor=request.query_param("cursor") or None, limit=request.int_param("limit", 100)
            )
        )
    )


@routes.post(
    "/v1/admin/tokens/{id}/rotate", {200: ApiTokenCreated}, body=RotateTokenRequest, scope=ApiScope.ADMIN, audit=True
)
async def rotate_api_token(request: Request[RotateTokenRequest]) -> Response:
    """Replace the secret of a token; the previous one is valid during the grace period."""
    created = await request.engine.rotate_api_token(
        path_uuid("token_id", request.path_params[0]), grace_ms=request.body.grace_ms
    )
    request.app.authenticator.clear_cache()
    return json_response(created, 200, NO_STORE)


@routes.delete("/v1/admin/tokens/{id}", {200: RevokeTokenResponse}, scope=ApiScope.ADMIN, audit=True)
async def revoke_api_token(request: Request[bytes]) -> Response:
    """Revoke a token."""
    revoked = await request.engine.revoke_api_token(path_uuid("token_id", request.path_params[0]))
    request.app.authenticator.clear_cache()
    return json_response(RevokeTokenResponse(revoked))
