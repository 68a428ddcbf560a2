"""Keys, grant keys and waitpoint tokens: the published digests, the life cycle of the keystore, every refusal."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.errors import (
    Corruption,
    FabricError,
    InvalidGraceMs,
    InvalidInput,
    InvalidKid,
    InvalidSecretHex,
    InvalidToken,
    RotationConflict,
    Unavailable,
)
from flowfabric.ids import ExecutionId
from flowfabric.model.execution import Grant
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.rules.security import keystore
from flowfabric.rules.security.grant_key import GrantFault, grant_id, sign_grant, verify_grant
from flowfabric.rules.security.keystore import (
    KeyAlreadySeeded,
    KeyDecision,
    KeyIds,
    KeyRotated,
    KeySeeded,
    KeyUnchanged,
    SigningKeys,
    VerifyingKid,
    list_kids,
    rotate_key,
    seed_key,
)
from flowfabric.rules.security.waitpoint_token import WaitpointToken, mint_token, verify_token

NOW = 1_700_000_000_000
A, B, C = "aa" * 32, "bb" * 32, "cc" * 32
EXECUTION = ExecutionId("{fp:7}:11111111-1111-4111-8111-111111111111")
WAITPOINT = "22222222-2222-4222-8222-222222222222"


def key(kid: str, secret: str, expires_at: int | None = None, *, current: bool | None = None) -> SigningKey:
    return SigningKey(kid, secret, current=expires_at is None if current is None else current, expires_at=expires_at)


def after(keys: SigningKeys, decision: KeyDecision[Any]) -> list[SigningKey]:
    """Return the keystore once a decision is written."""
    assert not isinstance(decision.answer, FabricError)
    rows = {row.kid: row for row in keys if row.kid not in decision.drop}
    rows.update({row.kid: row for row in decision.put})
    return list(rows.values())


# The keystore


@pytest.mark.spec("SS-030")
def test_seeding_fills_an_empty_keystore_once() -> None:
    first = seed_key([], "k", A)
    keys = after([], first)

    assert first.answer == KeySeeded("k")
    assert keys == [key("k", A)]
    assert seed_key(keys, "k", A) == KeyDecision(KeyAlreadySeeded("k", same_secret=True))
    assert seed_key(keys, "k", A.upper()) == KeyDecision(KeyAlreadySeeded("k", same_secret=True))
    assert seed_key(keys, "k", B) == KeyDecision(KeyAlreadySeeded("k", same_secret=False))


@pytest.mark.spec("SS-030")
@pytest.mark.parametrize(("kid", "secret"), [("k", A[:62]), ("k", A + "00"), ("k", "zz" * 32), ("", A), ("a:b", A)])
def test_a_seed_of_the_wrong_form_is_invalid_input(kid: str, secret: str) -> None:
    decision = seed_key([], kid, secret)

    assert isinstance(decision.answer, InvalidInput)
    assert decision.put == ()


@pytest.mark.spec("SS-030")
def test_seeding_beside_another_key_names_the_active_one() -> None:
    decision = seed_key([key("k1", A)], "k2", B)

    assert isinstance(decision.answer, InvalidInput)
    assert "k1" in decision.answer.detail
    assert decision.put == ()


def test_a_keystore_with_only_retired_keys_can_be_seeded() -> None:
    assert seed_key([key("k0", A, NOW)], "k1", B).answer == KeySeeded("k1")


def test_a_booting_server_installs_its_secret_only_into_an_empty_keystore() -> None:
    first = keystore.install_configured_key([], A.upper())

    assert first == KeyDecision(KeySeeded("k1"), put=(key("k1", A),))
    assert keystore.install_configured_key([key("k7", "ab")], "AB").answer == KeyAlreadySeeded("k7", same_secret=True)
    assert keystore.install_configured_key([key("k7", "cd")], "ab").answer == KeyAlreadySeeded("k7", same_secret=False)
    assert keystore.install_configured_key([], "abc").answer == InvalidSecretHex()
    assert type(keystore.install_configured_key([], A[:62]).answer) is InvalidSecretHex


def test_the_first_rotation_is_a_bootstrap() -> None:
    assert rotate_key([], "k1", A, 0, NOW) == KeyDecision(KeyRotated(None, "k1", 0), put=(key("k1", A),))


def test_rotation_retires_the_current_key_for_its_grace() -> None:
    decision = rotate_key([key("k1", A)], "k2", B, 1000, NOW)

    assert decision == KeyDecision(KeyRotated("k1", "k2", 0), put=(key("k1", A, NOW + 1000), key("k2", B)))


def test_any_number_of_keys_can_be_in_grace() -> None:
    keys = after([], rotate_key([], "a", A, 0, NOW))
    keys = after(keys, rotate_key(keys, "b", B, 5000, NOW))
    keys = after(keys, rotate_key(keys, "c", C, 9000, NOW + 1000))

    assert list_kids(keys, NOW + 1000) == KeyIds("c", (VerifyingKid("a", NOW + 5000), VerifyingKid("b", NOW + 10_000)))
    assert list_kids(keys, NOW + 5000).verifying[0] == VerifyingKid("a", NOW + 5000)
    assert list_kids(keys, NOW + 5001).verifying == (VerifyingKid("b", NOW + 10_000),)


@pytest.mark.spec("SS-029")
def test_rotation_idempotency() -> None:
    keys = [key("k1", A, NOW + 1000), key("k2", B)]

    assert rotate_key(keys, "k2", B, 0, NOW) == KeyDecision(KeyUnchanged("k2"))
    assert rotate_key(keys, "k2", B.upper(), 0, NOW) == KeyDecision(KeyUnchanged("k2"))
    assert rotate_key(keys, "k2", C, 0, NOW) == KeyDecision(RotationConflict(kid="k2"))
    assert rotate_key(keys, "k1", A, 0, NOW) == KeyDecision(KeyUnchanged("k1"))
    assert rotate_key(keys, "k1", C, 0, NOW) == KeyDecision(RotationConflict(kid="k1"))


def test_a_current_key_that_lost_its_secret_is_repaired() -> None:
    torn = key("k1", "", current=True)

    assert rotate_key([torn], "k1", A, 0, NOW) == KeyDecision(KeyUnchanged("k1"), put=(key("k1", A),))


@pytest.mark.spec("SS-028")
def test_a_rotation_drops_expired_keys() -> None:
    keys = [
        key("over", A, NOW - 1),
        key("last moment", A, NOW),
        key("unreadable", A, None, current=False),
        key("never", A, 0),
        key("k1", B),
    ]

    decision = rotate_key(keys, "k2", C, 0, NOW)

    assert decision.answer == KeyRotated("k1", "k2", 3)
    assert set(decision.drop) == {"over", "unreadable", "never"}


def test_a_rotation_drops_expired_keys_when_no_key_signs() -> None:
    assert rotate_key([key("over", A, NOW - 1)], "k", C, 0, NOW) == KeyDecision(
        KeyRotated(None, "k", 1), put=(key("k", C),), drop=("over",)
    )


@pytest.mark.parametrize(
    ("kid", "secret", "grace", "refused"),
    [
        ("", A, 0, InvalidKid),
        ("a:b", A, 0, InvalidKid),
        ("\ud800", A, 0, InvalidKid),
        ("k", "", 0, InvalidSecretHex),
        ("k", "abc", 0, InvalidSecretHex),
        ("k", "zz", 0, InvalidSecretHex),
        ("k", "ab\n", 0, InvalidSecretHex),
        ("k", "٣٣", 0, InvalidSecretHex),
        ("k", A[:62], 0, InvalidSecretHex),
        ("k", A, -1, InvalidGraceMs),
        ("k", A, 0.5, InvalidGraceMs),
        ("k", A, 2**53, InvalidGraceMs),
        ("k", A, float("nan"), InvalidGraceMs),
        ("k", A, float("inf"), InvalidGraceMs),
        ("k", A, True, InvalidGraceMs),
    ],
)
def test_a_rotation_with_invalid_arguments_is_refused(
    kid: str, secret: str, grace: float, refused: type[FabricError]
) -> None:
    decision = rotate_key([], kid, secret, grace, NOW)

    assert type(decision.answer) is refused
    assert (decision.put, decision.drop) == ((), ())
    assert secret == "" or secret not in str(decision.answer)


def test_the_longest_grace_and_the_shortest_secret_are_accepted() -> None:
    decision = rotate_key([key("k1", A)], "k2", "00" * 32, 2**53 - 1, NOW)

    assert decision.put[0].expires_at == NOW + 2**53 - 1 < 2**63


def test_an_empty_keystore_lists_nothing_and_signs_nothing() -> None:
    assert list_kids([], NOW) == KeyIds(None, ())
    assert keystore.waitpoint_signer([]) == InvalidInput("hmac_secret_not_initialized")
    assert isinstance(keystore.grant_signer([], "claim_for_worker"), Unavailable)


def test_a_corrupt_secret_signs_nothing() -> None:
    assert keystore.waitpoint_signer([key("k1", "xyz")]) == Corruption("invalid_secret")
    assert keystore.grant_signer([key("k1", "")], "claim") == Corruption("invalid_secret")
    assert keystore.waitpoint_signer([key("k1", A)]) == keystore.grant_signer([key("k1", A)], "claim") == key("k1", A)


def test_a_secret_is_never_printed() -> None:
    decision = rotate_key([key("k1", A)], "k2", B, 0, NOW)

    assert A not in repr(decision)
    assert B not in repr(decision)


# Grant keys

GRANT_SECRET = key("k1", "00112233445566778899aabbccddeeff")
EXPIRES = 1_700_000_005_000
CLAIM_DIGEST = "5964daa1c40218a7260f239ad263a74206d97b211bb66adf350ff6c7dac55918"
RECLAIM_DIGEST = "2634294725047613225575535d7972a7d2ae899982ba4f41d8a37b22455623cb"


def signed(signer: SigningKey = GRANT_SECRET, *, reclaim: bool = False) -> str:
    return sign_grant(
        signer,
        EXECUTION,
        worker_id="worker-a",
        worker_instance_id="inst-1",
        expires_at=EXPIRES,
        reclaim=reclaim,
    )


def stored(grant_key: str, worker_id: str = "worker-a", worker_instance_id: str = "inst-1") -> Grant:
    return Grant(
        kind="claim",
        worker_id=worker_id,
        worker_instance_id=worker_instance_id,
        lane_id="default",
        created_at=NOW,
        expires_at=EXPIRES,
        key_id=grant_id(grant_key),
    )


@pytest.mark.spec("EX-030")
def test_grant_key_vectors() -> None:
    claim, reclaim = signed(), signed(reclaim=True)

    assert claim == f"pg:{EXECUTION}:{EXPIRES}:k1:{CLAIM_DIGEST}"
    assert reclaim == f"pg:reclaim:{EXECUTION}:{EXPIRES}:k1:{RECLAIM_DIGEST}"
    assert grant_id(claim) == "62010bf463948d47c6adefe39ba2c66632e689730d17ef63191a802988c4c819"


@pytest.mark.spec("EX-030")
@pytest.mark.parametrize("reclaim", [False, True])
def test_a_genuine_key_verifies(reclaim: bool) -> None:
    grant_key = signed(reclaim=reclaim)

    assert verify_grant(grant_key, stored(grant_key), [GRANT_SECRET], NOW) is None


@pytest.mark.spec("EX-030")
@pytest.mark.parametrize(("worker", "instance"), [("worker-b", "inst-1"), ("worker-a", "inst-2")])
def test_another_worker_or_instance_invalidates_the_signature(worker: str, instance: str) -> None:
    grant_key = signed()

    fault = verify_grant(grant_key, stored(grant_key, worker, instance), [GRANT_SECRET], NOW)

    assert fault is GrantFault.SIGNATURE_MISMATCH


@pytest.mark.spec("EX-030")
@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("{fp:7}", "{fp:8}"),
        ("11111111-1111", "21111111-1111"),
        (str(EXPIRES), str(EXPIRES + 1)),
        ("pg:", "pg:reclaim:"),
        (CLAIM_DIGEST, RECLAIM_DIGEST),
    ],
)
def test_any_change_to_the_key_invalidates_the_signature(part: str, other: str) -> None:
    grant_key = signed().replace(part, other, 1)

    assert verify_grant(grant_key, stored(grant_key), [GRANT_SECRET], NOW) is GrantFault.SIGNATURE_MISMATCH


@pytest.mark.spec("EX-030")
def test_an_unknown_kid_is_reported_as_such() -> None:
    grant_key = signed()

    assert verify_grant(grant_key, stored(grant_key), [], NOW) is GrantFault.UNKNOWN_KID
    assert verify_grant(grant_key, stored(grant_key), [key("k2", A)], NOW) is GrantFault.UNKNOWN_KID


@pytest.mark.spec("EX-030")
@pytest.mark.parametrize(("now", "fault"), [(EXPIRES - 1, None), (EXPIRES, "expired"), (EXPIRES + 1, "expired")])
def test_a_key_is_valid_before_its_expiry_and_not_at_it(now: int, fault: str | None) -> None:
    grant_key = signed()

    assert verify_grant(grant_key, stored(grant_key), [GRANT_SECRET], now) == fault


@pytest.mark.spec("EX-030")
@pytest.mark.parametrize("grace_ms", [0, 1000])
def test_a_key_signed_before_a_rotation_still_verifies(grace_ms: int) -> None:
    grant_key = signed()
    keys = after([GRANT_SECRET], rotate_key([GRANT_SECRET], "k2", A, grace_ms, NOW))

    assert verify_grant(grant_key, stored(grant_key), keys, NOW + 1) is None


def test_a_deleted_or_superseded_grant_is_unknown() -> None:
    grant_key, other = signed(), signed(reclaim=True)

    assert verify_grant(grant_key, None, [GRANT_SECRET], NOW) is GrantFault.UNKNOWN_GRANT
    assert verify_grant(grant_key, stored(other), [GRANT_SECRET], NOW) is GrantFault.UNKNOWN_GRANT


@pytest.mark.parametrize(
    "grant_key",
    ["", "pg:", "k1:abc", signed() + "0", signed()[1:], signed().upper(), signed() + "\n", f"x{signed()}"],
)
def test_a_text_of_another_form_is_a_malformed_grant_key(grant_key: str) -> None:
    assert verify_grant(grant_key, stored(grant_key), [GRANT_SECRET], NOW) is GrantFault.MALFORMED


@given(st.text())
def test_no_unsigned_text_verifies(text: str) -> None:
    assert verify_grant(text, stored(text), [GRANT_SECRET], NOW) is GrantFault.MALFORMED


# Waitpoint tokens

TOKEN_SECRET = key("k1", "00112233445566778899aabbccddeeff" * 2)
TOKEN = "k1:d4083cf73e78f2f5fe3204b1b54f111dd945829efbaabf951e1fef13edd86ba1"


def verify(token: str, keys: SigningKeys = (TOKEN_SECRET,), now: int = NOW, **facts: Any) -> FabricError | None:
    known = {"execution_id": EXECUTION, "waitpoint_id": WAITPOINT, "owner": EXECUTION, "stored": TOKEN} | facts
    return verify_token(token, keys, now=now, **known)


def test_the_published_token_is_minted_and_verified() -> None:
    assert mint_token(TOKEN_SECRET, EXECUTION, WAITPOINT) == TOKEN
    assert verify(TOKEN) is None


@pytest.mark.spec("SS-026")
@pytest.mark.parametrize(
    ("token", "detail"),
    [
        ("", "missing_token"),
        ("no colon at all", "invalid_token"),
        (":" + "0" * 64, "invalid_token"),
        ("k1:" + "0" * 40, "invalid_token"),
        (TOKEN + "0", "invalid_token"),
        (TOKEN[:-1] + "2", "invalid_token"),
        (TOKEN.upper(), "invalid_token"),
        ("k1:" + TOKEN[3:].upper(), "invalid_token"),
        ("k1:" + "é" * 64, "invalid_token"),
        ("k1:" + "\ud800" * 64, "invalid_token"),
        ("zz:" + "0" * 64, "invalid_token"),
    ],
)
def test_an_invalid_token_is_refused(token: str, detail: str) -> None:
    assert verify(token) == InvalidToken(detail)


@pytest.mark.spec("SS-027")
def test_a_missing_waitpoint_is_refused_like_a_wrong_signature() -> None:
    wrong = verify("k1:" + "0" * 64)

    assert verify(TOKEN, owner=None, stored=None) == wrong
    assert verify(TOKEN, owner="{fp:7}:33333333-3333-4333-8333-333333333333") == wrong
    assert verify(TOKEN, waitpoint_id="44444444-4444-4444-8444-444444444444") == wrong
    assert verify(TOKEN, stored=None) == verify(TOKEN, stored="k1:" + "0" * 64) == wrong
    assert verify("", owner=None, stored=None) == verify("") == InvalidToken("missing_token")


@pytest.mark.spec("SS-032")
def test_boundary_of_grace() -> None:
    keys = [msgspec.structs.replace(TOKEN_SECRET, current=False, expires_at=NOW), key("k2", A)]

    assert verify(TOKEN, keys, NOW) is None
    assert verify(TOKEN, keys, NOW + 1) == InvalidToken("token_expired")


@pytest.mark.spec("SS-028")
def test_a_token_of_a_dropped_key_is_invalid() -> None:
    keys = after([TOKEN_SECRET], rotate_key([TOKEN_SECRET], "k2", A, 1000, NOW))
    assert verify(TOKEN, keys, NOW + 1001) == InvalidToken("token_expired")
    assert list_kids(keys, NOW + 1001) == KeyIds("k2", ())

    again = rotate_key(keys, "k3", B, 0, NOW + 1001)
    assert again.answer == KeyRotated("k2", "k3", 1)
    assert verify(TOKEN, after(keys, again), NOW + 1001) == InvalidToken("invalid_token")


def test_a_retired_key_without_a_readable_expiry_does_not_verify() -> None:
    keys = [msgspec.structs.replace(TOKEN_SECRET, current=False), key("k2", A)]

    assert verify(TOKEN, keys) == InvalidToken("token_expired")


def test_the_order_of_checks() -> None:
    retired = msgspec.structs.replace(TOKEN_SECRET, current=False, expires_at=NOW - 1, secret_hex="spoilt")

    assert verify("", []) == InvalidToken("missing_token")
    assert verify("k1:short", []) == InvalidToken("invalid_token")
    assert verify(TOKEN, []) == InvalidInput("hmac_secret_not_initialized")
    assert verify(TOKEN, [retired]) == InvalidInput("hmac_secret_not_initialized")
    assert verify(TOKEN, [retired, key("k2", A)]) == InvalidToken("token_expired")
    assert verify(TOKEN, [key("k1", "spoilt")], stored=None) == Corruption("invalid_secret")


@given(st.text(), st.text())
def test_no_other_text_is_ever_accepted(kid: str, digest: str) -> None:
    for token in (kid, f"{kid}:{digest}", f"k1:{digest}"):
        assert token == TOKEN or verify(token) is not None


def test_a_token_is_printed_only_on_request() -> None:
    token = WaitpointToken(TOKEN)

    assert f"{token} {token!r}" == "k1:<REDACTED:len=64> k1:<REDACTED:len=64>"
    assert str(WaitpointToken("no colon")) == str(WaitpointToken(":abc")) == "<REDACTED:malformed>"
    assert token.reveal() == TOKEN
    assert (token.kid, token.fingerprint) == ("k1", "d4083cf73e78f2f5")
    assert token == WaitpointToken(TOKEN)
    assert token != WaitpointToken("k1:x")
    assert token != TOKEN
