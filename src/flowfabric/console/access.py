"""Access: API tokens, sessions of the console, and signing keys. Only administrators see it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import ClassVar

from flowfabric import errors
from flowfabric.console.pages import Ui, View, action, page, parse_integer
from flowfabric.model.security.api_token import ApiScope, TokenView
from flowfabric.server.errors import bad_request
from flowfabric.server.request import path_uuid

GRACE_MS = 60 * 60 * 1000
DAY_MS = 24 * 60 * 60 * 1000


class AccessPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "tokens.html"
    tokens: list[TokenView]
    sessions: list[TokenView]
    key_id: str | None
    old_keys: list[str]
    scopes: tuple[str, ...] = tuple(ApiScope)
    secret: str = ""  # secret of a token that was just made or rotated; it is shown once


@page("/tokens", scope=ApiScope.ADMIN)
async def show_access(ui: Ui) -> AccessPage:
    """List tokens, sessions and keys."""
    return await _access(ui)


async def _access(ui: Ui, secret: str = "") -> AccessPage:
    ui.require_all_namespaces()
    tokens, sessions, keys = await asyncio.gather(
        ui.engine.list_api_tokens(limit=200),
        ui.engine.list_api_tokens(limit=200, sessions=True),
        ui.engine.list_waitpoint_hmac_kids(),
    )
    return AccessPage(
        title="Access",
        tokens=tokens,
        sessions=sessions,
        key_id=keys.current_kid,
        old_keys=[key.kid for key in keys.verifying],
        secret=secret,
    )


@action("/tokens", scope=ApiScope.ADMIN)
async def make_token(ui: Ui, fields: Mapping[str, str]) -> AccessPage:
    """Make a token and show its secret, once."""
    ui.require_all_namespaces()
    namespaces = [name.strip() for name in fields.get("namespaces", "").split(",") if name.strip()]
    days = fields.get("days", "").strip()
    made = await ui.engine.make_api_token(
        fields.get("name", "").strip(),
        [scope.value for scope in ApiScope if fields.get(f"scope.{scope.value}")],
        namespaces=namespaces or None,
        expires_in_ms=parse_integer("days", days) * DAY_MS if days else None,
    )
    return await _access(ui, made.token)


@action("/tokens/{id}", scope=ApiScope.ADMIN)
async def change_token(ui: Ui, fields: Mapping[str, str]) -> str | AccessPage:
    """Rotate or revoke a token, or end a session."""
    ui.require_all_namespaces()
    token_id = path_uuid("token_id", ui.request.path_params[0])
    match fields.get("verb"):
        case "revoke":
            await ui.engine.revoke_api_token(token_id)
            ui.request.app.authenticator.clear_cache()
            return ui.url("/tokens", done="token-revoked")
        case "rotate":
            made = await ui.engine.rotate_api_token(token_id, grace_ms=GRACE_MS)
            ui.request.app.authenticator.clear_cache()
            return await _access(ui, made.token)
        case _:
            raise bad_request("verb: neither rotate nor revoke")


@action("/tokens/keys/rotate", scope=ApiScope.ADMIN)
async def rotate_signing_key(ui: Ui, fields: Mapping[str, str]) -> str:
    """Sign with a new random key; the one before verifies during the grace period."""
    ui.require_all_namespaces()
    kid = fields.get("kid", "").strip()
    if not kid or ":" in kid:
        raise bad_request("kid: must not be empty and must not contain ':'")
    grace_ms = ui.request.app.settings.waitpoint_grace_ms
    for rotation in await ui.engine.rotate_waitpoint_hmac_secret_all(kid, secrets.token_hex(32), grace_ms):
        if isinstance(rotation.result, errors.FabricError):
            raise rotation.result
    ui.request.app.handle_signer.clear_cache()
    return ui.url("/tokens", done="rotated")
