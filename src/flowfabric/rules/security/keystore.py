"""Keystore: the signing keys of a deployment, and their rotation.

One current key signs; retired keys verify until they expire. The functions here take the rows and return plain data:
the answer, the rows to write, the key ids to delete.

Grant keys and waitpoint tokens contain `<kid>:<hex>`, an HMAC-SHA-256 over `<kid>:` and a message. Presenting one
proves that it was issued to the caller; what it permits still depends on the state of its target.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from flowfabric.errors import (
    Corruption,
    FabricError,
    InvalidGraceMs,
    InvalidInput,
    InvalidKid,
    InvalidSecretHex,
    RotationConflict,
    Unavailable,
)
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.rules import validation

SigningKeys: TypeAlias = Sequence[SigningKey]
A = TypeVar("A")

MAX_GRACE_MS: Final = 2**53 - 1
FIRST_KID: Final = "k1"

is_hex = re.compile(r"(?:[0-9a-fA-F]{2})+").fullmatch
_SEED_HEX = re.compile(r"[0-9a-fA-F]{64}").fullmatch
_MIN_HEX_DIGITS: Final = 64  # 32 bytes, the size of the digest; a shorter secret would weaken it


# ---------------------------------------------------------------------------------------------------------------
# Answers


class KeySeeded(msgspec.Struct, frozen=True):
    """The keystore was empty and now has this key."""

    kid: str


class KeyAlreadySeeded(msgspec.Struct, frozen=True):
    """The key existed before and stays as it was."""

    kid: str
    same_secret: bool


class KeyRotated(msgspec.Struct, frozen=True):
    """A new key signs; the previous one still verifies for its grace period."""

    previous_kid: str | None
    new_kid: str
    gc_count: int


class KeyUnchanged(msgspec.Struct, frozen=True):
    """The key exists with the same secret; nothing changed."""

    kid: str


class KeyDecision(msgspec.Struct, Generic[A], frozen=True):
    """An answer or refusal, the rows to write, and the key ids to delete."""

    answer: A | FabricError
    put: tuple[SigningKey, ...] = ()
    drop: tuple[str, ...] = ()


class VerifyingKid(msgspec.Struct, frozen=True):
    """A retired key that still verifies, and until when."""

    kid: str
    expires_at_ms: int


class KeyIds(msgspec.Struct, frozen=True):
    """The ids of the keys in use."""

    current_kid: str | None
    verifying: tuple[VerifyingKid, ...]


def seed_key(keys: SigningKeys, kid: str, secret_hex: str) -> KeyDecision[KeySeeded | KeyAlreadySeeded]:
    """Insert the first key into an empty keystore. It never overwrites a key, so every boot may call it."""
    if not _is_kid(kid):
        return KeyDecision(InvalidInput("kid: empty or contains a colon"))
    if not _SEED_HEX(secret_hex):
        return KeyDecision(InvalidInput("secret_hex: exactly 64 hexadecimal digits expected"))
    if known := find_key(keys, kid):
        return KeyDecision(KeyAlreadySeeded(kid, _same_secret(known, secret_hex)))
    if current := current_key(keys):
        return KeyDecision(InvalidInput(f"kid {current.kid} is active; rotate to change keys", active_kid=current.kid))
    return KeyDecision(KeySeeded(kid), put=(SigningKey(kid, secret_hex.lower(), current=True),))


def install_configured_key(keys: SigningKeys, secret_hex: object) -> KeyDecision[KeySeeded | KeyAlreadySeeded]:
    """Install the configured secret of a booting server as the first key, unless there is one already."""
    if not isinstance(secret_hex, str) or not is_hex(secret_hex):
        return KeyDecision(InvalidSecretHex())
    if known := current_key(keys) or find_key(keys, FIRST_KID):
        return KeyDecision(KeyAlreadySeeded(known.kid, _same_secret(known, secret_hex)))
    if len(secret_hex) < _MIN_HEX_DIGITS:  # a stored short secret is accepted, so that old deployments start
        return KeyDecision(_short_secret_error(secret_hex))
    return KeyDecision(KeySeeded(FIRST_KID), put=(SigningKey(FIRST_KID, secret_hex.lower(), current=True),))


def check_rotation(kid: str, secret_hex: str, grace_ms: object) -> FabricError | None:
    """Return what is wrong with the arguments of a rotation; such an error fails the whole call."""
    if not _is_kid(kid):
        return InvalidKid(kid)
    if not is_hex(secret_hex):
        return InvalidSecretHex()
    if len(secret_hex) < _MIN_HEX_DIGITS:
        return _short_secret_error(secret_hex)
    if isinstance(grace_ms, bool) or not isinstance(grace_ms, int | float):
        return InvalidGraceMs(validation.preview(grace_ms))
    # Compared before the conversion to int, so that NaN and infinities are refused.
    if not 0 <= grace_ms <= MAX_GRACE_MS or grace_ms != int(grace_ms):
        return InvalidGraceMs(validation.preview(grace_ms))
    return None


def rotate_key(
    keys: SigningKeys, kid: str, secret_hex: str, grace_ms: float, now: int
) -> KeyDecision[KeyRotated | KeyUnchanged]:
    """Make a new key sign. The previous one verifies for `grace_ms` more; expired keys are deleted.

    A known key with the same secret changes nothing; with another secret it is a `RotationConflict`.
    """
    if refused := check_rotation(kid, secret_hex, grace_ms):
        return KeyDecision(refused)
    if known := find_key(keys, kid):
        if known.current and not known.secret_hex:
            return KeyDecision(KeyUnchanged(kid), put=(msgspec.structs.replace(known, secret_hex=secret_hex.lower()),))
        return KeyDecision(KeyUnchanged(kid) if _same_secret(known, secret_hex) else RotationConflict(kid=kid))
    current = current_key(keys)
    expired = tuple(key.kid for key in keys if not key.current and _is_expired(key, now))
    new_key = SigningKey(kid, secret_hex.lower(), current=True)
    if current is None:
        return KeyDecision(KeyRotated(None, kid, len(expired)), put=(new_key,), drop=expired)
    retired = msgspec.structs.replace(current, current=False, expires_at=now + int(grace_ms))
    return KeyDecision(KeyRotated(current.kid, kid, len(expired)), put=(retired, new_key), drop=expired)


def list_kids(keys: SigningKeys, now: int) -> KeyIds:
    """Return the current key id and the retired ones that still verify, sorted."""
    current = current_key(keys)
    verifying = sorted(
        (key.kid, key.expires_at)
        for key in keys
        if not key.current and key.expires_at is not None and key.expires_at >= now
    )
    return KeyIds(current.kid if current else None, tuple(VerifyingKid(kid, end) for kid, end in verifying))


def current_key(keys: SigningKeys) -> SigningKey | None:
    """Return the key that signs."""
    return next((key for key in keys if key.current), None)


def waitpoint_signer(keys: SigningKeys) -> SigningKey | FabricError:
    """Return the key for a new waitpoint token, or why none can be minted."""
    current = current_key(keys)
    if current is None:
        return InvalidInput("hmac_secret_not_initialized")
    return current if is_hex(current.secret_hex) else Corruption("invalid_secret")


def grant_signer(keys: SigningKeys, op: str) -> SigningKey | FabricError:
    """Return the key for a new grant, or the refusal; without a key no grant is issued."""
    current = current_key(keys)
    if current is None:
        return Unavailable(op, "hmac_secret_not_initialized")
    return current if is_hex(current.secret_hex) else Corruption("invalid_secret")


def is_readable(key: SigningKey) -> bool:
    """True if the secret can sign; a secret encrypted with another key cannot."""
    return is_hex(key.secret_hex) is not None


def _short_secret_error(secret_hex: str) -> FabricError:
    return InvalidSecretHex(f"{len(secret_hex) // 2} bytes; a signing secret has at least {_MIN_HEX_DIGITS // 2}")


def _is_kid(kid: str) -> bool:
    return bool(kid) and ":" not in kid and not any("\ud800" <= character <= "\udfff" for character in kid)


def _is_expired(key: SigningKey, now: int) -> bool:
    return key.expires_at is None or key.expires_at <= 0 or key.expires_at < now


def find_key(keys: SigningKeys, kid: str) -> SigningKey | None:
    """Return the key with this id, None if there is none."""
    return next((key for key in keys if key.kid == kid), None)


def _same_secret(key: SigningKey, secret_hex: str) -> bool:
    return hmac.compare_digest(key.secret_hex.lower().encode(), secret_hex.lower().encode())


def sign_message(secret_hex: str, kid: str, message: str) -> str:
    """Return the HMAC of a message in hex."""
    return hmac.digest(bytes.fromhex(secret_hex), f"{kid}:{message}".encode("utf-8", "surrogatepass"), "sha256").hex()
