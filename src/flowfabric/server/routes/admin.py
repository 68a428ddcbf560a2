"""What administrators do: signing keys."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric import errors
from flowfabric.server import logs
from flowfabric.server.ask import Ask, json
from flowfabric.server.problems import Refused, bad_request
from flowfabric.server.table import Reply, Routes, Scope
from flowfabric.server.wire import Body

routes = Routes("admin")

ROTATION_S = 120.0
HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


class RotateBody(Body, frozen=True):
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
    failed = [one.partition for one in done if isinstance(one.result, errors.FabricError)]
    if len(failed) == len(done):
        _noted(ask, kid, "waitpoint_hmac_rotation_failed")
        raise bad_request(f"rotation failed on all partitions: {kid} is known with another secret")
    _noted(ask, kid, "waitpoint_hmac_rotation_complete")
    return json(Rotated(len(done) - len(failed), failed, kid))


def _noted(ask: Ask[RotateBody], kid: str, event: str) -> None:
    logs.note_audit(event, {"who": ask.principal.name, "new_kid": kid, "request_id": ask.request_id})
