"""SS-026 to SS-032: tokens are what was signed, under a key that still counts, and nothing else tells anything."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.admin import PartitionRotation
from flowfabric.model.condition import Single
from flowfabric.model.signing_key import SigningKey
from flowfabric.rules.security.keystore import (
    KeyAlreadySeeded,
    KeyIds,
    KeyRotated,
    KeySeeded,
    KeyUnchanged,
    VerifyingKid,
)
from flowfabric.rules.security.waitpoint_token import mint_token
from tests.scenarios.play import DEFAULT_PARTITION, Play
from tests.scenarios.waits import BUFFERED, SATISFIED, SUSPENDED, Waits

A = "00112233445566778899aabbccddeeff" * 2  # the secret of k1
B = "bb" * 32
C = "cc" * 32
VERBS = ("load", "commit", "scan", "due", "take", "renew", "feed", "history", "notify")


async def rotated(play: Play, kid: str, secret: str, grace: int) -> PartitionRotation:
    [entry] = await play.engine.rotate_waitpoint_hmac_secret_all(kid, secret, grace)
    assert entry.partition == 0
    return entry


@pytest.mark.spec("SS-026")
async def test_bad_tokens(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended()
    e, good = held.execution_id, p.waitpoint_token.reveal()
    flipped = good[:-1] + ("0" if good[-1] != "0" else "1")
    bad = {"": "missing_token", "k1": "invalid_token", "k1:" + "a" * 40: "invalid_token"}
    bad |= {flipped: "invalid_token", "zz:" + good[3:]: "invalid_token"}

    for token, detail in bad.items():
        play.clock.advance_ms(10)
        with pytest.raises(errors.InvalidToken) as refusal:
            await play.engine.deliver_signal(waits.signal(e, "go", p.waitpoint_id, token))
        assert refusal.value.detail == detail
        assert await waits.failed_check(e) == play.now

    record = await waits.record(e, p.waitpoint_id)
    assert (record.signal_count, record.last_signal_at) == (0, None)
    assert await waits.signals_told(e) == []


@pytest.mark.spec("SS-027")
async def test_no_existence_oracle(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    real = await play.engine.create_waitpoint(held.handle, "k", 60_000)
    other = await play.claimed()
    foreign = await play.engine.create_waitpoint(other.handle, "k", 60_000)
    await rotated(play, "k2", B, 0)
    play.clock.advance_ms(1)
    elsewhere = await play.engine.create_waitpoint(other.handle, "k", 60_000)
    targets = {"random": waits.id(), "real": real.waitpoint_id, "foreign": foreign.waitpoint_id}
    forged, late = "k2:" + "0" * 64, real.token.reveal()
    tokens = {forged: "invalid_token", elsewhere.token.reveal(): "invalid_token", late: "token_expired"}
    tokens |= {"": "missing_token", "nonsense": "invalid_token", "zz:" + "0" * 64: "invalid_token"}
    heard: dict[str, list[str]] = {}
    asked: dict[str, list[dict[str, int]]] = {}

    for name, target in targets.items():
        for token, detail in tokens.items():
            play.store.calls.clear()
            with pytest.raises(errors.InvalidToken) as refusal:
                await play.engine.deliver_signal(waits.signal(e, "go", target, token))
            assert refusal.value.detail == detail
            heard.setdefault(name, []).append(str(refusal.value))
            asked.setdefault(name, []).append({verb: play.store.calls[verb] for verb in VERBS})

    assert heard["random"] == heard["real"] == heard["foreign"]
    once = dict.fromkeys(VERBS, 0) | {"load": 1, "commit": 1}
    assert [calls for found in asked.values() for calls in found if calls != once] == []


@pytest.mark.spec("SS-028")
async def test_grace_end_and_collection(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended()
    await rotated(play, "k2", B, 1000)
    assert await play.engine.list_waitpoint_hmac_kids() == KeyIds("k2", (VerifyingKid("k1", play.now + 1000),))
    play.clock.advance_ms(1001)

    with pytest.raises(errors.InvalidToken, match="token_expired"):
        await waits.send(held.execution_id, "go", p)
    assert await play.engine.list_waitpoint_hmac_kids() == KeyIds("k2", ())

    assert (await rotated(play, "k3", C, 1000)).result == KeyRotated("k2", "k3", 1)
    with pytest.raises(errors.InvalidToken) as refusal:
        await waits.send(held.execution_id, "go", p)
    assert refusal.value.detail == "invalid_token"


async def test_a_kid_that_is_used_anew_with_another_secret_does_not_revive_old_waitpoints(
    play: Play, waits: Waits
) -> None:
    held, p = await waits.suspended()
    e = held.execution_id
    await rotated(play, "k2", B, 0)
    play.clock.advance_ms(1)
    assert (await rotated(play, "k3", C, 60_000)).result == KeyRotated("k2", "k3", 1)
    assert (await rotated(play, "k1", B, 60_000)).result == KeyRotated("k3", "k1", 0)
    made_now = mint_token(SigningKey("k1", B, current=True), e, p.waitpoint_id)

    for token in (p.waitpoint_token.reveal(), made_now):
        with pytest.raises(errors.InvalidToken) as refusal:
            await play.engine.deliver_signal(waits.signal(e, "go", p.waitpoint_id, token))
        assert refusal.value.detail == "invalid_token"
    assert await play.engine.read_waitpoint_token(DEFAULT_PARTITION, p.waitpoint_id) is None
    assert await play.vector(e) == SUSPENDED.format(reason="waiting_for_signal")


@pytest.mark.spec("SS-029")
async def test_rotation_idempotency(play: Play) -> None:
    assert (await rotated(play, "k2", B, 60_000)).result == KeyRotated("k1", "k2", 0)

    for kid, secret, result in (
        ("k2", B, KeyUnchanged("k2")),
        ("k2", C, errors.RotationConflict(kid="k2")),
        ("k1", A, KeyUnchanged("k1")),
        ("k1", C, errors.RotationConflict(kid="k1")),
    ):
        async with play.untouched():
            assert (await rotated(play, kid, secret, 60_000)).result == result
    assert (await play.engine.list_waitpoint_hmac_kids()).current_kid == "k2"


@pytest.mark.spec("SS-030")
async def test_seed(keyless: Engine) -> None:
    assert await keyless.list_waitpoint_hmac_kids() == KeyIds(None, ())

    assert await keyless.seed_waitpoint_hmac_secret("k", A) == KeySeeded("k")
    assert await keyless.seed_waitpoint_hmac_secret("k", A) == KeyAlreadySeeded("k", same_secret=True)
    assert await keyless.seed_waitpoint_hmac_secret("k", B) == KeyAlreadySeeded("k", same_secret=False)
    assert await keyless.seed_waitpoint_hmac_secret("k", A) == KeyAlreadySeeded("k", same_secret=True)
    for kid, secret in (("other", A), ("k", A[:62]), ("", A), ("a:b", A)):
        with pytest.raises(errors.InvalidInput):
            await keyless.seed_waitpoint_hmac_secret(kid, secret)


@pytest.mark.spec("SS-031")
async def test_rotation_between_create_and_activate(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "kp", 60_000)
    await rotated(play, "k2", B, 60_000)

    outcome = await waits.on_pending(held, pending, Single("kp"))

    assert outcome.details.waitpoint_token.reveal() == pending.token.reveal()
    assert await waits.effect(held.execution_id, "go", pending) == SATISFIED


@pytest.mark.spec("SS-032")
async def test_boundary_of_grace(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "kp", 60_000)
    await rotated(play, "k2", B, 1000)
    last = play.now + 1000

    play.clock.now = last
    assert await waits.effect(held.execution_id, "go", pending) == BUFFERED
    play.clock.now = last + 1
    with pytest.raises(errors.InvalidToken, match="token_expired"):
        await waits.send(held.execution_id, "go", pending)


async def test_several_kids_may_be_in_grace_at_once(play: Play, waits: Waits) -> None:
    held, first = await waits.suspended()
    await rotated(play, "k2", B, 60_000)
    other, second = await waits.suspended()
    await rotated(play, "k3", C, 60_000)

    assert await waits.effect(held.execution_id, "go", first) == SATISFIED
    assert await waits.effect(other.execution_id, "go", second) == SATISFIED


async def test_the_token_is_the_one_of_the_test_vector(play: Play, keyless: Engine) -> None:
    from flowfabric.model.signing_key import SigningKey
    from flowfabric.rules.security.waitpoint_token import mint_token

    token = mint_token(
        SigningKey("k1", A, current=True),
        "{fp:7}:11111111-1111-4111-8111-111111111111",
        "22222222-2222-4222-8222-222222222222",
    )

    assert token == "k1:d4083cf73e78f2f5fe3204b1b54f111dd945829efbaabf951e1fef13edd86ba1"
