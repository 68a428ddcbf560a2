"""waitpoint_token: split from flowfabric.rules.tokens."""

from __future__ import annotations

import hmac
from typing import Final

from flowfabric.errors import (
    Corruption,
    FabricError,
    InvalidInput,
    InvalidToken,
)
from flowfabric.model.signing_key import SigningKey
from flowfabric.rules.security.keystore import _HEX, SigningKeys, _find, _sign, current_key

# ---------------------------------------------------------------------------------------------------------------
# Waitpoint tokens

DIGEST_LENGTH: Final = 64


class WaitpointToken:
    """A bearer token that shows itself only when asked to, so that no log or traceback gives it away."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The token itself."""
        return self._text

    @property
    def kid(self) -> str:
        """The key it was signed with."""
        return token_kid(self._text)

    @property
    def fingerprint(self) -> str:
        """Enough of the digest to recognise a token, too little to use it."""
        return token_fingerprint(self._text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WaitpointToken):
            return NotImplemented
        return _same_text(self._text, other._text)

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return redact(self._text)

    __str__ = __repr__


def mint_token(key: SigningKey, execution_id: str, waitpoint_id: str) -> str:
    """The token that lets its bearer signal this waitpoint of this execution."""
    return f"{key.kid}:{_sign(key.secret_hex, key.kid, f'{execution_id}:{waitpoint_id}')}"


def matches_stored(token: str, kid: str, fingerprint: str) -> bool:
    """Whether this is what is kept of a token: its kid and the beginning of its digest."""
    return _same_text(f"{token_kid(token)}:{token_fingerprint(token)}", f"{kid}:{fingerprint}")


def remint_token(keys: SigningKeys, kid: str, execution_id: str, waitpoint_id: str) -> str:
    """The token that was given out under this kid; an empty digest, which verifies nothing, once the key is gone."""
    key = _find(keys, kid)
    return f"{kid}:" if key is None or not _HEX(key.secret_hex) else mint_token(key, execution_id, waitpoint_id)


def verify_token(
    token: str,
    keys: SigningKeys,
    *,
    execution_id: str,
    waitpoint_id: str,
    owner: str | None,
    stored: str | None,
    now: int,
) -> FabricError | None:
    """Why a token is refused, or None. `owner` and `stored` are the waitpoint's execution and token, if it exists.

    A waitpoint that does not exist, or is another execution's, is refused in the very words of a wrong signature,
    so that nobody can find out by asking which waitpoints there are.
    """
    if not token:
        return InvalidToken("missing_token")
    kid, colon, digest = token.partition(":")
    if not colon or not kid or len(digest) != DIGEST_LENGTH:
        return InvalidToken("invalid_token")
    if current_key(keys) is None:
        return InvalidInput("hmac_secret_not_initialized")
    key = _find(keys, kid)
    if key is None:
        return InvalidToken("invalid_token")
    if not key.current and (key.expires_at is None or key.expires_at < now):
        return InvalidToken("token_expired")
    if not _HEX(key.secret_hex):
        return Corruption("invalid_secret")
    # All three are looked at, whatever the first says: no answer may come sooner for a waitpoint that is not there.
    signed = _same_text(token, mint_token(key, execution_id, waitpoint_id))
    kept = _same_text(token, stored or "")
    return None if signed and kept and owner == execution_id else InvalidToken("invalid_token")


def token_kid(token: str) -> str:
    """The kid of a stored token."""
    return token.partition(":")[0]


def token_fingerprint(token: str) -> str:
    """The first 16 hex digits of a stored token's digest."""
    return token.partition(":")[2][:16]


def redact(token: str) -> str:
    """A token as it may be printed: its kid and the length of the rest."""
    kid, colon, digest = token.partition(":")
    return f"{kid}:<REDACTED:len={len(digest)}>" if colon and kid else "<REDACTED:malformed>"


def _same_text(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode("utf-8", "surrogatepass"))
