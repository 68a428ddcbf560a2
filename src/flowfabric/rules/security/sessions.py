"""Sessions of the console: when one ends, and how its use prolongs it. A session is stored as an API token."""

from __future__ import annotations

from typing import Final

from flowfabric.model.change import Change, Delete, Guard
from flowfabric.model.security.api_token import ApiToken
from flowfabric.rules.decision import Decision
from flowfabric.rules.security.api_tokens import patch_token

SESSION_MS: Final = 12 * 60 * 60 * 1000  # a session ends this long after its last use
SESSION_MAX_MS: Final = 7 * 24 * 60 * 60 * 1000  # a session ends so long after its login in any case
SESSION_RENEW_MS: Final = 60 * 60 * 1000  # its end is moved at most once in this time


def session_end(row: ApiToken, now: int) -> int | None:
    """Return until when a session that is used now should last; None if it need not be moved yet."""
    if row.expires_at is None:
        return None
    until = min(now + SESSION_MS, row.created_at + SESSION_MAX_MS)
    return until if until - row.expires_at >= SESSION_RENEW_MS else None


def extend_session(row: ApiToken | None, now: int) -> Decision[bool]:
    """Move the end of a session that is in use; an ended session stays ended."""
    if row is None or row.revoked_at is not None or row.expires_at is None or row.expires_at <= now:
        return Decision(False)
    until = session_end(row, now)
    return Decision(False) if until is None else Decision(True, patch_token(row, {"expires_at": until}))


def delete_ended_session(row: ApiToken | None, now: int) -> Decision[bool]:
    """Delete a session that has expired or was revoked; other tokens are kept."""
    if row is None or row.parent is None or (row.revoked_at is None and (row.expires_at or 0) > now):
        return Decision(False)
    guard = Guard(ApiToken, (row.token_id,), row.revision)
    return Decision(True, Change(guards=(guard,), writes=(Delete(ApiToken, (row.token_id,)),)))
