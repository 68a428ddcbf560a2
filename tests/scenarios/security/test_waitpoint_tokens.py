"""SS-026 to SS-032: waitpoint tokens, key rotation, and refusals that reveal nothing."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.admin import PartitionRotation
from flowfabric.model.condition import Single
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.rules.security.keystore import (
    KeyAlreadySeeded,
    KeyIds,
    KeyRotated,
    KeySeeded,
    KeyUnchanged,
    VerifyingKid,
)
from flowfabric.rules.security.waitpoint_token import mint_token
from tests.scenarios.env import DEFAULT_PARTITION, Env
from tests.scenarios.waits import BUFFERED, SATISFIED, SUSPENDED, Waits

A = "00112233445566778899aabbccddeeff" * 2  # the secret of k1
B = "bb" * 32
C = "cc" * 32
VERBS = ("load", "commit", "scan", "due", "claim_rows", "renew", "feed", "history", "notify")


async def rotate(env: Env, kid: str, secret: str, grace: int) -> PartitionRotation:
    [entry] = await env.engine.rotate_waitpoint_hmac_secret_all(kid, secret, grace)
    assert entry.partition == 0
    return entry


@pytest.mark.spec("SS-026")
async def test_bad_tokens_are_refused_and_recorded(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    e, good = claim.execution_id, p.waitpoint_token.reveal()
    flipped = good[:-1] + ("0" if good[-1] != "0" else "1")
    bad = {"": "missing_token", "k1": "invalid_token", "k1:" + "a" * 40: "invalid_token"}
    bad |= {flipped: "invalid_token", "zz:" + good[3:]: "invalid_token"}

    for token, detail in bad.items():
        env.clock.advance_ms(10)
        with pytest.raises(errors.InvalidToken) as refusal:
            await env.engine.deliver_signal(waits.signal_args(e, "go", p.waitpoint_id, token))
        assert refusal.value.detail == detail
        assert await waits.token_refused_at(e) == env.now

    record = await waits.record(e, p.waitpoint_id)
    assert (record.signal_count, record.last_signal_at) == (0, None)
    assert await waits.signal_events(e) == []


@pytest.mark.spec("SS-027")
async def test_refused_tokens_do_not_reveal_whether_a_waitpoint_exists(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    real = await env.engine.create_waitpoint(claim.handle, "k", 60_000)
    other = await env.create_and_claim()
    foreign = await env.engine.create_waitpoint(other.handle, "k", 60_000)
    await rotate(env, "k2", B, 0)
    env.clock.advance_ms(1)
    elsewhere = await env.engine.create_waitpoint(other.handle, "k", 60_000)
    targets = {"random": waits.new_id(), "real": real.waitpoint_id, "foreign": foreign.waitpoint_id}
    forged, late = "k2:" + "0" * 64, real.token.reveal()
    tokens = {forged: "invalid_token", elsewhere.token.reveal(): "invalid_token", late: "token_expired"}
    tokens |= {"": "missing_token", "nonsense": "invalid_token", "zz:" + "0" * 64: "invalid_token"}
    messages: dict[str, list[str]] = {}
    calls: dict[str, list[dict[str, int]]] = {}

    for name, target in targets.items():
        for token, detail in tokens.items():
            env.store.calls.clear()
            with pytest.raises(errors.InvalidToken) as refusal:
                await env.engine.deliver_signal(waits.signal_args(claim.execution_id, "go", target, token))
            assert refusal.value.detail == detail
            messages.setdefault(name, []).append(str(refusal.value))
            calls.setdefault(name, []).append({verb: env.store.calls[verb] for verb in VERBS})

    assert messages["random"] == messages["real"] == messages["foreign"]
    once = dict.fromkeys(VERBS, 0) | {"load": 1, "commit": 1}
    assert [one for found in calls.values() for one in found if one != once] == []


@pytest.mark.spec("SS-028")
async def test_a_retired_key_is_refused_after_its_grace_and_collected_by_the_next_rotation(
    env: Env, waits: Waits
) -> None:
    claim, p = await waits.create_suspended()
    await rotate(env, "k2", B, 1000)
    assert await env.engine.list_waitpoint_hmac_kids() == KeyIds("k2", (VerifyingKid("k1", env.now + 1000),))
    env.clock.advance_ms(1001)

    with pytest.raises(errors.InvalidToken, match="token_expired"):
        await waits.send(claim.execution_id, "go", p)
    assert await env.engine.list_waitpoint_hmac_kids() == KeyIds("k2", ())

    assert (await rotate(env, "k3", C, 1000)).result == KeyRotated("k2", "k3", 1)
    with pytest.raises(errors.InvalidToken) as refusal:
        await waits.send(claim.execution_id, "go", p)
    assert refusal.value.detail == "invalid_token"


async def test_a_reused_kid_with_another_secret_does_not_revive_old_waitpoints(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    e = claim.execution_id
    await rotate(env, "k2", B, 0)
    env.clock.advance_ms(1)
    assert (await rotate(env, "k3", C, 60_000)).result == KeyRotated("k2", "k3", 1)
    assert (await rotate(env, "k1", B, 60_000)).result == KeyRotated("k3", "k1", 0)
    made_now = mint_token(SigningKey("k1", B, current=True), e, p.waitpoint_id)

    for token in (p.waitpoint_token.reveal(), made_now):
        with pytest.raises(errors.InvalidToken) as refusal:
            await env.engine.deliver_signal(waits.signal_args(e, "go", p.waitpoint_id, token))
        assert refusal.value.detail == "invalid_token"
    assert await env.engine.read_waitpoint_token(DEFAULT_PARTITION, p.waitpoint_id) is None
    assert await env.vector(e) == SUSPENDED.format(reason="waiting_for_signal")


@pytest.mark.spec("SS-029")
async def test_a_rotation_is_idempotent(env: Env) -> None:
    assert (await rotate(env, "k2", B, 60_000)).result == KeyRotated("k1", "k2", 0)

    for kid, secret, result in (
        ("k2", B, KeyUnchanged("k2")),
        ("k2", C, errors.RotationConflict(kid="k2")),
        ("k1", A, KeyUnchanged("k1")),
        ("k1", C, errors.RotationConflict(kid="k1")),
    ):
        async with env.unchanged():
            assert (await rotate(env, kid, secret, 60_000)).result == result
    assert (await env.engine.list_waitpoint_hmac_kids()).current_kid == "k2"


@pytest.mark.spec("SS-030")
async def test_seeding_a_key_is_idempotent(keyless: Engine) -> None:
    assert await keyless.list_waitpoint_hmac_kids() == KeyIds(None, ())

    assert await keyless.seed_waitpoint_hmac_secret("k", A) == KeySeeded("k")
    assert await keyless.seed_waitpoint_hmac_secret("k", A) == KeyAlreadySeeded("k", same_secret=True)
    assert await keyless.seed_waitpoint_hmac_secret("k", B) == KeyAlreadySeeded("k", same_secret=False)
    assert await keyless.seed_waitpoint_hmac_secret("k", A) == KeyAlreadySeeded("k", same_secret=True)
    for kid, secret in (("other", A), ("k", A[:62]), ("", A), ("a:b", A)):
        with pytest.raises(errors.InvalidInput):
            await keyless.seed_waitpoint_hmac_secret(kid, secret)


@pytest.mark.spec("SS-031")
async def test_a_waitpoint_survives_a_rotation_before_its_activation(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 60_000)
    await rotate(env, "k2", B, 60_000)

    outcome = await waits.suspend_on_pending(claim, pending, Single("kp"))

    assert outcome.details.waitpoint_token.reveal() == pending.token.reveal()
    assert await waits.effect(claim.execution_id, "go", pending) == SATISFIED


@pytest.mark.spec("SS-032")
async def test_a_retired_key_is_valid_until_the_last_instant_of_its_grace(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 60_000)
    await rotate(env, "k2", B, 1000)
    last = env.now + 1000

    env.clock.now = last
    assert await waits.effect(claim.execution_id, "go", pending) == BUFFERED
    env.clock.now = last + 1
    with pytest.raises(errors.InvalidToken, match="token_expired"):
        await waits.send(claim.execution_id, "go", pending)


async def test_several_keys_may_be_in_grace_at_once(env: Env, waits: Waits) -> None:
    claim, first = await waits.create_suspended()
    await rotate(env, "k2", B, 60_000)
    other, second = await waits.create_suspended()
    await rotate(env, "k3", C, 60_000)

    assert await waits.effect(claim.execution_id, "go", first) == SATISFIED
    assert await waits.effect(other.execution_id, "go", second) == SATISFIED


async def test_a_token_equals_the_test_vector_of_the_specification(env: Env, keyless: Engine) -> None:
    from flowfabric.model.security.signing_key import SigningKey
    from flowfabric.rules.security.waitpoint_token import mint_token

    token = mint_token(
        SigningKey("k1", A, current=True),
        "{fp:7}:11111111-1111-4111-8111-111111111111",
        "22222222-2222-4222-8222-222222222222",
    )

    assert token == "k1:d4083cf73e78f2f5fe3204b1b54f111dd945829efbaabf951e1fef13edd86ba1"
