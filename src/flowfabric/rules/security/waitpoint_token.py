"""Waitpoint tokens: bearer tokens that permit signalling one waitpoint of one execution.

Only the key id and a prefix of the digest are stored; a token can be minted again from the key.
"""

from __future__ import annotations

import hmac
from typing import Final

from flowfabric.errors import Corruption, FabricError, InvalidInput, InvalidToken
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.rules.security.keystore import SigningKeys, current_key, find_key, is_hex, sign_message

DIGEST_LENGTH: Final = 64


class WaitpointToken:
    """A bearer token that is redacted when printed, so that no log or traceback reveals it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the token itself."""
        return self._text

    @property
    def kid(self) -> str:
        """The id of the key that signed it."""
        return token_kid(self._text)

    @property
    def fingerprint(self) -> str:
        """A prefix of the digest: enough to recognise the token, too little to use it."""
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


class UnknownWaitpoint(InvalidToken):
    """The waitpoint has no token: it is missing, closed, or of another execution."""


class TokenMismatch(InvalidToken):
    """The presented token is not the waitpoint's."""


def check_presented(issued: WaitpointToken | None, presented: WaitpointToken) -> InvalidToken | None:
    """Return why a presented token does not equal the one that was issued for the waitpoint, or None."""
    if issued is None:
        return UnknownWaitpoint()
    return None if issued == presented else TokenMismatch()


def mint_token(key: SigningKey, execution_id: str, waitpoint_id: str) -> str:
    """Return the token that lets its bearer signal this waitpoint of this execution."""
    return f"{key.kid}:{sign_message(key.secret_hex, key.kid, f'{execution_id}:{waitpoint_id}')}"


def matches_stored(token: str, kid: str, fingerprint: str) -> bool:
    """True if the token has the stored key id and digest prefix."""
    return _same_text(f"{token_kid(token)}:{token_fingerprint(token)}", f"{kid}:{fingerprint}")


def remint_token(keys: SigningKeys, kid: str, execution_id: str, waitpoint_id: str) -> str:
    """Return the token that was issued with this key id; if the key is gone, one with an empty digest that never
    verifies."""
    key = find_key(keys, kid)
    return f"{kid}:" if key is None or not is_hex(key.secret_hex) else mint_token(key, execution_id, waitpoint_id)


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
    """Return why a token is refused, or None. `owner` and `stored` are the waitpoint's execution and token, if any.

    A missing waitpoint, or one of another execution, is refused with the same error as a wrong signature, so that
    nobody can probe which waitpoints exist.
    """
    if not token:
        return InvalidToken("missing_token")
    kid, colon, digest = token.partition(":")
    if not colon or not kid or len(digest) != DIGEST_LENGTH:
        return InvalidToken("invalid_token")
    if current_key(keys) is None:
        return InvalidInput("hmac_secret_not_initialized")
    key = find_key(keys, kid)
    if key is None:
        return InvalidToken("invalid_token")
    if not key.current and (key.expires_at is None or key.expires_at < now):
        return InvalidToken("token_expired")
    if not is_hex(key.secret_hex):
        return Corruption("invalid_secret")
    # Evaluate all three checks: timing must not reveal whether the waitpoint exists.
    is_signed = _same_text(token, mint_token(key, execution_id, waitpoint_id))
    is_stored = _same_text(token, stored or "")
    return None if is_signed and is_stored and owner == execution_id else InvalidToken("invalid_token")


def token_kid(token: str) -> str:
    """Return the key id of a token."""
    return token.partition(":")[0]


def token_fingerprint(token: str) -> str:
    """Return the first 16 hex digits of a token's digest."""
    return token.partition(":")[2][:16]


def redact(token: str) -> str:
    """Return a token as it may be printed: its key id and the length of the rest."""
    kid, colon, digest = token.partition(":")
    return f"{kid}:<REDACTED:len={len(digest)}>" if colon and kid else "<REDACTED:malformed>"


def _same_text(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode("utf-8", "surrogatepass"))
