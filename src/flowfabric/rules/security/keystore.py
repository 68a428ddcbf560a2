"""Keys and what they sign: the keystore's life, grant keys, waitpoint tokens.

There is one keystore for a deployment: one current key that signs, and retired ones that verify until their own end.
Functions here look at its rows and answer in plain data: what is so now, which rows to write, which kids to drop.

A grant key and a waitpoint token are both `<kid>:<hex>` at heart, with HMAC-SHA-256 over `<kid>:` and a message. Who
can show one has been given it; what it may do is still decided by the state of the thing it names.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from typing import Final, TypeAlias

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
from flowfabric.model.signing_key import SigningKey
from flowfabric.rules import validation

SigningKeys: TypeAlias = Sequence[SigningKey]

MAX_GRACE_MS: Final = 2**53 - 1
FIRST_KID: Final = "k1"

_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+").fullmatch
_SEED_HEX = re.compile(r"[0-9a-fA-F]{64}").fullmatch
_LEAST_DIGITS: Final = 64  # 32 bytes, the size of the digest: a shorter secret is weaker than what it signs


# ---------------------------------------------------------------------------------------------------------------
# The keystore


class KeySeeded(msgspec.Struct, frozen=True):
    """The keystore was empty and now has this key."""

    kid: str


class KeyAlreadySeeded(msgspec.Struct, frozen=True):
    """The key was there before and stays as it was."""

    kid: str
    same_secret: bool


class KeyRotated(msgspec.Struct, frozen=True):
    """Another key signs now; the one before verifies a while longer."""

    previous_kid: str | None
    new_kid: str
    gc_count: int


class KeyUnchanged(msgspec.Struct, frozen=True):
    """The key is known with this very secret; nothing changed."""

    kid: str


class KeyDecision(msgspec.Struct, frozen=True):
    """An answer (or a refusal) about the keystore, the rows that will be, and the kids that will be gone."""

    answer: KeySeeded | KeyAlreadySeeded | KeyRotated | KeyUnchanged | FabricError
    put: tuple[SigningKey, ...] = ()
    drop: tuple[str, ...] = ()


class VerifyingKid(msgspec.Struct, frozen=True):
    """A retired key that still verifies, and until when."""

    kid: str
    expires_at_ms: int


class KeyIds(msgspec.Struct, frozen=True):
    """Which keys are in use."""

    current_kid: str | None
    verifying: tuple[VerifyingKid, ...]


def seed_key(keys: SigningKeys, kid: str, secret_hex: str) -> KeyDecision:
    """Put the first key into an empty keystore; safe to call on every boot, since it never overwrites one."""
    if not _is_kid(kid):
        return KeyDecision(InvalidInput("kid: empty or contains a colon"))
    if not _SEED_HEX(secret_hex):
        return KeyDecision(InvalidInput("secret_hex: exactly 64 hexadecimal digits expected"))
    if known := _find(keys, kid):
        return KeyDecision(KeyAlreadySeeded(kid, _same_secret(known, secret_hex)))
    if current := current_key(keys):
        return KeyDecision(InvalidInput(f"kid {current.kid} is active; rotate to change keys", active_kid=current.kid))
    return KeyDecision(KeySeeded(kid), put=(SigningKey(kid, secret_hex.lower(), current=True),))


def install_configured_key(keys: SigningKeys, secret_hex: object) -> KeyDecision:
    """What a booting server does with its configured secret: the first key, or nothing when there is one already."""
    if not isinstance(secret_hex, str) or not _HEX(secret_hex):
        return KeyDecision(InvalidSecretHex())
    if known := current_key(keys) or _find(keys, FIRST_KID):
        return KeyDecision(KeyAlreadySeeded(known.kid, _same_secret(known, secret_hex)))
    if len(secret_hex) < _LEAST_DIGITS:  # one that is stored already holds, so that old deployments start
        return KeyDecision(_too_short(secret_hex))
    return KeyDecision(KeySeeded(FIRST_KID), put=(SigningKey(FIRST_KID, secret_hex.lower(), current=True),))


def check_rotation(kid: str, secret_hex: str, grace_ms: object) -> FabricError | None:
    """What is wrong with the arguments of a rotation; such a fault fails the whole call."""
    if not _is_kid(kid):
        return InvalidKid(kid)
    if not _HEX(secret_hex):
        return InvalidSecretHex()
    if len(secret_hex) < _LEAST_DIGITS:
        return _too_short(secret_hex)
    if isinstance(grace_ms, bool) or not isinstance(grace_ms, int | float):
        return InvalidGraceMs(validation.preview(grace_ms))
    # Compared before it is taken as a whole number, so that NaN and the infinities are refused like the rest.
    if not 0 <= grace_ms <= MAX_GRACE_MS or grace_ms != int(grace_ms):
        return InvalidGraceMs(validation.preview(grace_ms))
    return None


def rotate_key(keys: SigningKeys, kid: str, secret_hex: str, grace_ms: float, now: int) -> KeyDecision:
    """Let a new key sign. The one before verifies for `grace_ms` more; keys past their time are dropped.

    A key that is known with the same secret changes nothing, one known with another secret is a `RotationConflict`.
    """
    if refused := check_rotation(kid, secret_hex, grace_ms):
        return KeyDecision(refused)
    if known := _find(keys, kid):
        if known.current and not known.secret_hex:
            return KeyDecision(KeyUnchanged(kid), put=(msgspec.structs.replace(known, secret_hex=secret_hex.lower()),))
        return KeyDecision(KeyUnchanged(kid) if _same_secret(known, secret_hex) else RotationConflict(kid=kid))
    current = current_key(keys)
    gone = tuple(key.kid for key in keys if not key.current and _is_past(key, now))
    fresh = SigningKey(kid, secret_hex.lower(), current=True)
    if current is None:
        return KeyDecision(KeyRotated(None, kid, len(gone)), put=(fresh,), drop=gone)
    retired = msgspec.structs.replace(current, current=False, expires_at=now + int(grace_ms))
    return KeyDecision(KeyRotated(current.kid, kid, len(gone)), put=(retired, fresh), drop=gone)


def list_kids(keys: SigningKeys, now: int) -> KeyIds:
    """The current kid and the retired ones that still verify, sorted."""
    current = current_key(keys)
    verifying = sorted(
        (key.kid, key.expires_at)
        for key in keys
        if not key.current and key.expires_at is not None and key.expires_at >= now
    )
    return KeyIds(current.kid if current else None, tuple(VerifyingKid(kid, end) for kid, end in verifying))


def current_key(keys: SigningKeys) -> SigningKey | None:
    """The key that signs."""
    return next((key for key in keys if key.current), None)


def waitpoint_signer(keys: SigningKeys) -> SigningKey | FabricError:
    """The key for a new waitpoint token, or why none can be minted."""
    current = current_key(keys)
    if current is None:
        return InvalidInput("hmac_secret_not_initialized")
    return current if _HEX(current.secret_hex) else Corruption("invalid_secret")


def grant_signer(keys: SigningKeys, op: str) -> SigningKey | FabricError:
    """The key for a new grant, or why nothing can be granted: without one every grant is refused."""
    current = current_key(keys)
    if current is None:
        return Unavailable(op, "hmac_secret_not_initialized")
    return current if _HEX(current.secret_hex) else Corruption("invalid_secret")


def is_readable(key: SigningKey) -> bool:
    """True if the key's secret can sign; one that is sealed with another key cannot."""
    return _HEX(key.secret_hex) is not None


def _too_short(secret_hex: str) -> FabricError:
    return InvalidSecretHex(f"{len(secret_hex) // 2} bytes; a signing secret has at least {_LEAST_DIGITS // 2}")


def _is_kid(kid: str) -> bool:
    return bool(kid) and ":" not in kid and not any("\ud800" <= character <= "\udfff" for character in kid)


def _is_past(key: SigningKey, now: int) -> bool:
    return key.expires_at is None or key.expires_at <= 0 or key.expires_at < now


def _find(keys: SigningKeys, kid: str) -> SigningKey | None:
    return next((key for key in keys if key.kid == kid), None)


def _same_secret(key: SigningKey, secret_hex: str) -> bool:
    return hmac.compare_digest(key.secret_hex.lower().encode(), secret_hex.lower().encode())


def _sign(secret_hex: str, kid: str, message: str) -> str:
    return hmac.digest(bytes.fromhex(secret_hex), f"{kid}:{message}".encode("utf-8", "surrogatepass"), "sha256").hex()
