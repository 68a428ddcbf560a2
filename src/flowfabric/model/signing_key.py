"""The signing keystore: one logical store of keys per deployment."""

from __future__ import annotations

import msgspec


class Keystore(msgspec.Struct, frozen=True):
    """The root of all signing keys: whoever changes a key changes this row, so two bootstraps cannot both win."""

    keystore_id: int
    current_kid: str
    revision: int = 0


class SigningKey(msgspec.Struct, frozen=True):
    """One key. The current one has no expiry; a retired one verifies until its own."""

    kid: str
    secret_hex: str
    current: bool
    expires_at: int | None = None
    keystore_id: int = 0

    def __repr__(self) -> str:
        return f"SigningKey(kid={self.kid!r}, current={self.current}, expires_at={self.expires_at}, secret=<REDACTED>)"
