"""Signed handles: a server appends an HMAC to each handle that it issues, and checks it when the handle comes back.

Every part of a handle can be read through the API, so its bytes prove nothing about the caller. The HMAC does:

    key       = HMAC-SHA-256(secret of a signing key, PURPOSE)
    signature = HMAC-SHA-256(key, kind · 0x00 · bytes of the handle)

The derived key separates purposes: waitpoint tokens and grant keys are HMACs of texts that begin with `<kid>:`, and
none of these texts is `PURPOSE`. The signature does not name its key; only a few keys verify at any time, and all are
tried. A retired key verifies for its grace period, as it does for tokens.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Final

import msgspec

from flowfabric.handles import SIGNATURE_BYTES, Handle
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.rules.security import keystore

PURPOSE: Final = b"flowfabric http handle v1"


class HandleKeys(msgspec.Struct, frozen=True):
    """The keystore as handles need it: derived keys, never the secrets."""

    signing: bytes | None  # None if there is no current key or its secret cannot be decrypted
    verifying: tuple[tuple[bytes, int | None], ...]  # each with the last instant at which it verifies

    def __repr__(self) -> str:
        return f"HandleKeys({len(self.verifying)} keys)"


def handle_keys(keys: Sequence[SigningKey]) -> HandleKeys:
    """Return the derived keys; a secret that cannot be decrypted neither signs nor verifies."""
    current = keystore.current_key(keys)
    verifying = [
        (_derive_key(key), None if key.current else key.expires_at)
        for key in keys
        if keystore.is_readable(key) and (key.current or key.expires_at is not None)
    ]
    signing = _derive_key(current) if current is not None and keystore.is_readable(current) else None
    return HandleKeys(signing, tuple(verifying))


def sign_handle(key: bytes, handle: Handle) -> bytes:
    """Return the signature of a handle."""
    return hmac.digest(key, _message(handle), "sha256")


def is_signed_handle(keys: HandleKeys, handle: Handle, now: int) -> bool:
    """True if a key that verifies now signed this handle."""
    if len(handle.signature) != SIGNATURE_BYTES:
        return False
    message = _message(handle)
    matches = [
        hmac.compare_digest(hmac.digest(key, message, "sha256"), handle.signature)
        for key, expires_at in keys.verifying
        if expires_at is None or expires_at >= now
    ]
    return any(matches)


def _derive_key(key: SigningKey) -> bytes:
    return hmac.digest(bytes.fromhex(key.secret_hex), PURPOSE, "sha256")


def _message(handle: Handle) -> bytes:
    return handle.kind.value.encode() + b"\0" + handle.opaque
