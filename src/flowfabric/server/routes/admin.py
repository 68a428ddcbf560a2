"""Routes for administrators: signing keys, API tokens and the spread of lanes."""

from __future__ import annotations

import asyncio

from flowfabric import errors
from flowfabric.api import admin as api
from flowfabric.engine.types import KeyIds
from flowfabric.model.scheduling.lane import LaneSpread
from flowfabric.model.security.api_token import ApiScope, ApiTokenCreated
from flowfabric.server import logging
from flowfabric.server.errors import HttpError, bad_request
from flowfabric.server.request import Request, json_response, path_uuid
from flowfabric.server.routing import PAGE_PARAMS, Response, RouteGroup, Subject

routes = RouteGroup("admin")
admin_routes = routes.with_defaults(scope=ApiScope.ADMIN)

ROTATION_TIMEOUT_S = 120.0
HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


@admin_routes.post(
    "/v1/admin/rotate-waitpoint-secret",
    {200: api.RotateWaitpointSecretResponse},
    body=api.RotateWaitpointSecretRequest,
    long=True,
)
async def rotate_waitpoint_secret(
    request: Request[api.RotateWaitpointSecretRequest],
) -> api.RotateWaitpointSecretResponse:
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
    return api.RotateWaitpointSecretResponse(len(rotations) - len(failed), failed, kid)


def _audit(request: Request[api.RotateWaitpointSecretRequest], kid: str, event: str) -> None:
    logging.log_audit(event, {"who": request.principal.name, "new_kid": kid, "request_id": request.request_id})


# ---------------------------------------------------------------------------------------------------------------
# Tokens

NO_STORE = ("cache-control", "no-store")


@routes.get("/v1/signing-keys", {200: KeyIds}, scope=ApiScope.READ, subject=Subject.CHECKED_BY_HANDLER)
async def list_signing_keys(request: Request[None]) -> KeyIds:
    """List the ids of the keys that sign waitpoint tokens and grants, and of those that still verify."""
    return await request.engine.list_waitpoint_hmac_kids()


@admin_routes.post("/v1/admin/tokens", {201: ApiTokenCreated}, body=api.CreateTokenRequest, audit=True)
async def make_api_token(request: Request[api.CreateTokenRequest]) -> Response:
    """Create an API token; its secret is returned only now."""
    created = await request.engine.make_api_token(**request.body.to_kwargs())
    return json_response(created, 201, NO_STORE)


@admin_routes.get("/v1/admin/tokens", {200: api.ListTokensResponse}, query=PAGE_PARAMS)
async def list_api_tokens(request: Request[None]) -> api.ListTokensResponse:
    """List API tokens by id, without their secrets."""
    return api.ListTokensResponse(
        await request.engine.list_api_tokens(cursor=request.cursor, limit=request.int_param("limit", 100))
    )


@admin_routes.post("/v1/admin/tokens/{id}/rotate", {200: ApiTokenCreated}, body=api.RotateTokenRequest, audit=True)
async def rotate_api_token(request: Request[api.RotateTokenRequest]) -> Response:
    """Replace the secret of a token; the previous one is valid during the grace period."""
    created = await request.engine.rotate_api_token(
        path_uuid("token_id", request.path_params[0]), grace_ms=request.body.grace_ms
    )
    request.app.authenticator.clear_cache()
    return json_response(created, 200, NO_STORE)


@admin_routes.delete("/v1/admin/tokens/{id}", {200: api.RevokeTokenResponse}, audit=True)
async def revoke_api_token(request: Request[bytes]) -> api.RevokeTokenResponse:
    """Revoke a token."""
    revoked = await request.engine.revoke_api_token(path_uuid("token_id", request.path_params[0]))
    request.app.authenticator.clear_cache()
    return api.RevokeTokenResponse(revoked)


@routes.put("/v1/lanes/{lane}", {200: LaneSpread}, body=api.SetLaneSpreadRequest, scope=ApiScope.OPERATE, audit=True)
async def set_lane_spread(request: Request[api.SetLaneSpreadRequest]) -> LaneSpread:
    """Spread the new executions of a lane over this many partitions; it takes effect some seconds later."""
    return await request.engine.set_lane_spread(request.path_params[0], request.body.spread)
