"""API tokens: create, rotate, revoke, and check what a token permits."""

from __future__ import annotations

import hmac

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Guard, Insert, Patch
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.security.api_token import ApiScope, ApiToken, TokenView
from flowfabric.model.view import view_of
from flowfabric.rules.decision import Decision, refuse


def create(
    row: ApiToken | None,
    *,
    token_id: str,
    name: str,
    scopes: frozenset[ApiScope],
    namespaces: frozenset[str] | None,
    digest: str,
    expires_in_ms: int | None,
    parent: str | None = None,
) -> Decision[None]:
    """Create a token. If the id exists, an earlier try created it and its reply was lost."""
    if row is not None:
        return Decision(None)
    token = ApiToken(
        token_id=token_id,
        name=name,
        scopes=",".join(sorted(scopes)),
        digest=digest,
        created_at=NOW,
        namespaces=None if namespaces is None else msgspec.json.encode(sorted(namespaces)).decode(),
        expires_at=None if expires_in_ms is None else FromNow(expires_in_ms),
        parent=parent,
    )
    return Decision(None, Change(guards=(Guard(ApiToken, (token_id,), None),), writes=(Insert(token),)))


def rotate(row: ApiToken | None, digest: str, grace_ms: int) -> Decision[None]:
    """Replace the secret of a token; the previous secret stays valid for `grace_ms`."""
    if row is None or row.revoked_at is not None:
        return refuse(errors.NotFound("api_token"))
    if row.digest == digest:
        return Decision(None)
    fields = {"digest": digest, "previous_digest": row.digest, "previous_until": FromNow(grace_ms)}
    return Decision(None, patch_token(row, fields))


def revoke(row: ApiToken | None) -> Decision[bool]:
    """Revoke a token; repeating it changes nothing."""
    if row is None:
        return refuse(errors.NotFound("api_token"))
    if row.revoked_at is not None:
        return Decision(False)
    return Decision(True, patch_token(row, {"revoked_at": NOW}))


def patch_token(row: ApiToken, fields: dict[str, object]) -> Change:
    """Return the change of some columns of a token."""
    return Change(
        guards=(Guard(ApiToken, (row.token_id,), row.revision),), writes=(Patch(ApiToken, (row.token_id,), fields),)
    )


def is_valid(row: ApiToken, digest: str, now: int) -> bool:
    """True if this secret is valid for the token now. Both digests are always compared, so timing reveals nothing."""
    current = hmac.compare_digest(row.digest, digest)
    previous = hmac.compare_digest(row.previous_digest or "", digest)
    return is_active(row, now) and (
        current or (previous and row.previous_until is not None and row.previous_until > now)
    )


def is_active(row: ApiToken, now: int) -> bool:
    """True if the token is neither revoked nor expired."""
    return row.revoked_at is None and (row.expires_at is None or row.expires_at > now)


def scopes_of(row: ApiToken) -> frozenset[ApiScope]:
    """Return the scopes of a token."""
    return frozenset(ApiScope(name) for name in row.scopes.split(","))


def namespaces_of(row: ApiToken) -> frozenset[str] | None:
    """Return the namespaces of a token; None means all."""
    return None if row.namespaces is None else frozenset(msgspec.json.decode(row.namespaces, type=list[str]))


def view(row: ApiToken) -> TokenView:
    """Return the token as administrators see it."""
    namespaces = namespaces_of(row)
    return view_of(
        TokenView,
        row,
        scopes=tuple(sorted(scopes_of(row))),
        namespaces=None if namespaces is None else tuple(sorted(namespaces)),
    )
