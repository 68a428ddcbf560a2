"""Signed handles: which key signs, which keys verify, and that no other signature of the keystore is accepted."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from flowfabric.handles import BackendTag, Handle, HandleFields, HandleKind
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.rules.security.grant_key import sign_grant
from flowfabric.rules.security.signed_handle import PURPOSE, handle_keys, is_signed_handle, sign_handle
from flowfabric.rules.security.waitpoint_token import mint_token

NOW = 1_700_000_000_000
UUID = "11111111-1111-4111-8111-111111111111"
EXECUTION = "{fp:7}:" + UUID
FIELDS = HandleFields(EXECUTION, 0, UUID, UUID, 1, 30_000, "default", "w-1")  # type: ignore[arg-type]
HANDLE = Handle.mint(BackendTag.POSTGRES, HandleKind.FRESH, FIELDS)
A, B = SigningKey("k1", "aa" * 32, current=True), SigningKey("k2", "bb" * 32, current=True)


def signed(key: SigningKey, handle: Handle = HANDLE) -> Handle:
    secret = handle_keys([key]).signing
    assert secret is not None
    return Handle(handle.backend, handle.kind, handle.opaque, sign_handle(secret, handle))


def retired(key: SigningKey, until: int | None) -> SigningKey:
    return SigningKey(key.kid, key.secret_hex, current=False, expires_at=until)


def test_a_signature_is_the_hmac_of_kind_and_bytes_under_a_derived_key() -> None:
    own = hmac.digest(b"\xaa" * 32, PURPOSE, hashlib.sha256)

    assert signed(A).signature == hmac.digest(own, b"Fresh\0" + HANDLE.opaque, hashlib.sha256)


def test_the_current_key_signs_and_every_key_in_its_grace_verifies() -> None:
    keys = handle_keys([retired(A, NOW), B])

    assert is_signed_handle(keys, signed(B), NOW)
    assert is_signed_handle(keys, signed(A), NOW)
    assert not is_signed_handle(keys, signed(A), NOW + 1)
    assert not is_signed_handle(handle_keys([retired(A, None), B]), signed(A), NOW)
    assert not is_signed_handle(handle_keys([B]), signed(A), NOW)


@pytest.mark.parametrize("kind", [kind for kind in HandleKind if kind is not HandleKind.FRESH])
def test_a_signature_is_valid_for_one_kind_only(kind: HandleKind) -> None:
    other = Handle(HANDLE.backend, kind, HANDLE.opaque, signed(A).signature)

    assert not is_signed_handle(handle_keys([A]), other, NOW)


def test_a_short_key_of_an_old_deployment_signs_and_verifies() -> None:
    short = SigningKey("k1", "ab", current=True)

    assert is_signed_handle(handle_keys([short]), signed(short), NOW)


@pytest.mark.parametrize("secret", ["", "<sealed>", "abc"])
def test_an_unreadable_secret_signs_and_verifies_nothing(secret: str) -> None:
    keys = handle_keys([SigningKey("k1", secret, current=True)])

    assert (keys.signing, keys.verifying) == (None, ())
    assert not is_signed_handle(keys, signed(A), NOW)


def test_tokens_and_grant_keys_are_not_accepted_as_handle_signatures() -> None:
    """This holds even if the text that they sign is the message of a handle."""
    token = mint_token(A, "Fresh", HANDLE.opaque.decode("latin-1")).partition(":")[2]
    grant = sign_grant(A, EXECUTION, worker_id="w", worker_instance_id="i", expires_at=NOW)  # type: ignore[arg-type]
    raw = hmac.digest(b"\xaa" * 32, b"Fresh\0" + HANDLE.opaque, hashlib.sha256)
    for forged in (bytes.fromhex(token), bytes.fromhex(grant.rpartition(":")[2]), raw, b"", b"\0" * 32):
        shown = Handle(HANDLE.backend, HANDLE.kind, HANDLE.opaque, forged)
        assert not is_signed_handle(handle_keys([A]), shown, NOW)


def test_keys_do_not_print_their_secrets() -> None:
    keys = handle_keys([A])

    assert keys.signing is not None
    assert repr(keys) == "HandleKeys(1 keys)"
