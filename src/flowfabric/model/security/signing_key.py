"""Rows of the keystore: the signing keys of a deployment."""

from __future__ import annotations

import msgspec


class Keystore(msgspec.Struct, frozen=True):
    """The aggregate root of all signing keys: every change of a key writes it, so two bootstraps cannot both win."""

    keystore_id: int
    current_kid: str
    revision: int = 0


class SigningKey(msgspec.Struct, frozen=True):
    """One key. The current one has no expiry; a retired one verifies until it expires."""

    kid: str
    secret_hex: str
    current: bool
    expires_at: int | None = None
    keystore_id: int = 0

    def __repr__(self) -> str:
        return f"SigningKey(kid={self.kid!r}, current={self.current}, expires_at={self.expires_at}, secret=<REDACTED>)"
