"""Guarantees of the specification without a numbered scenario: signals, tokens and resumes."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import ExecutionId, partition_of
from flowfabric.model.change import Change, Guard, Upsert
from flowfabric.model.condition import AllConditions, ByName, Count, CountKind, OperatorOnly, Single, TimeoutOnly
from flowfabric.model.security.signing_key import Keystore, SigningKey
from flowfabric.model.suspension import TimeoutBehavior, WaitpointState
from flowfabric.rules.suspension.arguments import FreshWaitpoint
from flowfabric.rules.suspension.resume import SuspensionExpiry
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery, SignalArgs
from flowfabric.stores.queries import Read
from tests.scenarios.env import RESUMABLE, Env
from tests.scenarios.waits import APPENDED, BUFFERED, NO_OP, REPEATED, SATISFIED, SUSPENDED, Waits, count, named

DAY = 86_400_000
WAITS = SUSPENDED.format(reason="waiting_for_signal")


async def test_a_signal_is_validated_in_the_specified_order(env: Env, waits: Waits) -> None:
    """Each call also has every later fault."""
    claim, p = await waits.create_suspended(named("go"))
    e, token = claim.execution_id, p.waitpoint_token
    await waits.effect(e, "other", p, idempotency_key="first")

    async def refused(kind: type[errors.FabricError], *, stamped: bool = False, **options: Any) -> None:
        args: dict[str, Any] = {
            "execution_id": e,
            "payload": b"x",
            "idempotency_key": "new",
            "max_signals_per_execution": 1,
        } | options
        signal = waits.signal_args(e, "go", p.waitpoint_id, args.pop("waitpoint_token", token))
        before = await env.dump()
        with pytest.raises(kind):
            await env.engine.deliver_signal(
                SignalArgs(**({n: getattr(signal, n) for n in signal.__struct_fields__} | args))
            )
        after = await env.dump()
        changed = {name for name in before if before[name] != after[name]}
        assert changed == ({"ff_exec_core"} if stamped else set())

    missing = env.engine.new_execution_id()
    await refused(errors.PayloadTooLarge, payload=b"x" * 65_537, execution_id=missing, waitpoint_token="")
    await refused(errors.NotFound, execution_id=missing, waitpoint_token="")
    await refused(errors.InvalidToken, waitpoint_token="", idempotency_key="first", stamped=True)
    env.clock.advance_ms(1)
    await refused(errors.SignalLimitExceeded)
    again = await waits.send(e, "go", p, idempotency_key="first", max_signals_per_execution=1)
    assert isinstance(again, DuplicateDelivery)
    await env.engine.cancel_execution(e, reason="over")
    await env.wait_until_idle()
    await refused(errors.TargetNotSignalable)
    assert isinstance(await waits.send(e, "go", p, idempotency_key="first"), DuplicateDelivery)
    await refused(errors.InvalidToken, waitpoint_token="k1:" + "0" * 64, stamped=True)


async def test_a_closed_waitpoint_is_reported_as_closed_while_its_execution_is_suspended(
    env: Env, waits: Waits
) -> None:
    claim, pending = await waits.create_pending("k", DAY)
    e = claim.execution_id
    assert await env.engine.close_waitpoint(pending.waitpoint_id) is True
    async with env.unchanged():
        assert await env.engine.close_waitpoint(pending.waitpoint_id, "again") is False
    record = await waits.record(e, pending.waitpoint_id)
    assert (record.state, record.close_reason, record.satisfied_at) == ("closed", "proactive_close", None)

    async with env.refused(errors.TargetNotSignalable):
        await waits.send(e, "go", pending)
    p = await waits.suspend(claim)
    async with env.refused(errors.WaitpointClosed):
        await waits.send(e, "go", pending)
    assert await waits.effect(e, "go", p) == SATISFIED
    async with env.refused(errors.TargetNotSignalable):
        await waits.send(e, "go", p)
    async with env.refused(errors.WaitpointNotFound):
        await env.engine.close_waitpoint(waits.new_id())


async def test_a_closed_waitpoint_keeps_its_reason_after_its_expiry(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("k", 1000)
    await env.engine.close_waitpoint(pending.waitpoint_id, "changed my mind")
    env.clock.advance_ms(1000)

    async with env.unchanged():
        assert await env.sweep("pending_wp_expiry") == 0

    assert (await waits.record(claim.execution_id, pending.waitpoint_id)).close_reason == "changed my mind"


async def test_signal_counts_depend_on_the_effect(env: Env, waits: Waits) -> None:
    condition = AllConditions(
        (Single("a", ByName("go")), Count(2, CountKind.DISTINCT_WAITPOINTS, ("a", "b"), ByName("ok")))
    )
    claim, a = await waits.create_suspended(
        condition, FreshWaitpoint(waits.new_id(), "a"), FreshWaitpoint(waits.new_id(), "b")
    )
    e, [b] = claim.execution_id, a.additional_waitpoints
    sent = (
        (a, "noise", "signal_ignored_matcher_failed", (1, 0)),
        (a, "go", APPENDED, (2, 1)),
        (a, "go", REPEATED, (3, 2)),
        (a, "ok", APPENDED, (4, 3)),
        (b, "go", "signal_ignored_matcher_failed", (1, 0)),
        (b, "ok", SATISFIED, (2, 1)),
    )
    for waitpoint, name, effect, counted in sent:
        env.clock.advance_ms(1)
        assert await waits.effect(e, name, waitpoint) == effect
        record = await waits.record(e, waitpoint.waitpoint_id)
        assert (record.signal_count, record.matched_signal_count, record.last_signal_at) == (*counted, env.now)
        root = await env.suspension(e)
        assert root.last_signal_at == env.now
    effects = [event.effect for event in await waits.signal_events(e)]
    assert effects == [f"Other({effect})" for _, _, effect, _ in sent[:-1]] + ["Satisfied"]


async def test_a_signal_to_a_waitpoint_outside_the_condition_is_ignored(env: Env, waits: Waits) -> None:
    for condition in (
        count(1, CountKind.DISTINCT_SIGNALS, "x"),
        AllConditions((OperatorOnly(), Single("x"), TimeoutOnly())),
    ):
        claim, p = await waits.create_suspended(condition, timeout_at=env.now + DAY)
        assert await waits.effect(claim.execution_id, "go", p) == "signal_ignored_not_in_condition"
        assert (await waits.record(claim.execution_id, p.waitpoint_id)).matched_signal_count == 0


async def test_a_satisfied_count_keeps_counting(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(AllConditions((count(1), Single("k", ByName("go")))))
    e = claim.execution_id

    assert [await waits.effect(e, "x", p, source) for source in ("ana", "bo", "bo")] == [APPENDED, APPENDED, REPEATED]
    assert await waits.effect(e, "go", p, "bo") == SATISFIED
    seen = await env.engine.observe_signals((await env.grant_and_resume(e)).handle)
    assert [one.source_identity for one in seen] == ["ana", "bo", "bo"]


async def test_signal_names_are_compared_exactly(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(named("Zo\u00eb go"))
    for name in ("zo\u00eb go", "Zoe\u0308 go", "Zo\u00eb go ", "", "Zo\u00eb"):
        assert await waits.effect(claim.execution_id, name, p) == NO_OP
    assert await waits.effect(claim.execution_id, "Zo\u00eb go", p) == SATISFIED


async def test_distinct_signals_are_distinguished_by_id(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(count(2, CountKind.DISTINCT_SIGNALS))
    e, one = claim.execution_id, waits.new_id()

    assert await waits.effect(e, "go", p, signal_id=one) == APPENDED
    assert await waits.effect(e, "go", p, "bo", signal_id=one) == REPEATED
    assert await waits.effect(e, "go", p) == SATISFIED


async def test_repeated_approvals_count_as_one_source(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(count(2))

    async def approve(suffix: str, ttl: int = DAY) -> Accepted | DuplicateDelivery:
        return await env.engine.deliver_approval_signal(
            claim.execution_id,
            lane_id="default",
            waitpoint_id=p.waitpoint_id,
            signal_name="approved",
            idempotency_suffix=suffix,
            signal_dedup_ttl_ms=ttl,
        )

    first = await approve("a")
    assert isinstance(first, Accepted)
    assert first.effect == APPENDED
    assert await approve("a") == DuplicateDelivery(first.signal_id)
    for suffix, ttl in (("b", DAY), ("a", 0)):
        again = await approve(suffix, ttl)
        assert isinstance(again, Accepted)
        assert again.effect == REPEATED
    kept = (await env.dump())["ff_signal"][0]
    assert (kept.signal_category, kept.source_type, kept.source_identity) == ("approval", "operator", "")
    assert (kept.target_scope, kept.payload, kept.idempotency_key) == ("execution", None, "approval:approved:a")
    assert await waits.effect(claim.execution_id, "approved", p, "ana") == SATISFIED


async def test_a_signal_is_stored_as_it_was_sent(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    options: dict[str, Any] = {
        "payload": b"\x00\xff",
        "payload_encoding": "cbor",
        "correlation_id": "c",
        "created_at": 5,
        "target_scope": "execution",
        "idempotency_key": "i",
        "signal_name": "Ein Wort \n mehr",
        "source_type": "",
    }
    await waits.send(claim.execution_id, "go", p, **options)

    [kept] = (await env.dump())["ff_signal"]
    assert {name: getattr(kept, name) for name in options} == options
    assert (kept.accepted_at, kept.observed_effect) == (env.now, SATISFIED)


async def overwrite_keystore(engine: Engine, keys: list[SigningKey]) -> None:
    """Overwrite the rows of the keystore."""
    [[root]] = (await engine.store.load([Read(Keystore, (0,))])).rows
    change = Change(
        guards=(Guard(Keystore, (0,), root.revision),),
        writes=(Upsert(Keystore(0, root.current_kid)), *(Upsert(key) for key in keys)),
        id=engine.minter.change_id(),
    )
    assert await engine.store.commit([change]) != [None]


@pytest.mark.parametrize(
    ("keys", "kind", "detail"),
    [
        ([SigningKey("k1", "00" * 32, current=False)], errors.InvalidInput, "hmac_secret_not_initialized"),
        ([SigningKey("k1", "nonsense", current=True)], errors.Corruption, "invalid_secret"),
        ([SigningKey("k1", "", current=True)], errors.Corruption, "invalid_secret"),
        (
            [SigningKey("k1", "00" * 32, current=False), SigningKey("k2", "22" * 32, current=True)],
            errors.InvalidToken,
            "token_expired",
        ),
        (
            [SigningKey("k1", "nonsense", current=False, expires_at=-1), SigningKey("k2", "22" * 32, current=True)],
            errors.InvalidToken,
            "token_expired",
        ),
    ],
    ids=("no current key", "spoilt", "torn", "retired without an end", "retired long ago, and spoilt"),
)
async def test_an_unusable_keystore_refuses_signals_and_records_the_failure(
    env: Env, waits: Waits, keys: list[SigningKey], kind: type[errors.FabricError], detail: str
) -> None:
    claim, p = await waits.create_suspended()
    await overwrite_keystore(env.engine, keys)
    env.clock.advance_ms(1)

    for token in (p.waitpoint_token.reveal(), "k1:" + "0" * 64):
        with pytest.raises(kind) as refusal:
            await env.engine.deliver_signal(waits.signal_args(claim.execution_id, "go", p.waitpoint_id, token))
        assert refusal.value.detail == detail
    assert await waits.token_refused_at(claim.execution_id) == env.now
    with pytest.raises(errors.InvalidToken, match="missing_token"):
        await env.engine.deliver_signal(waits.signal_args(claim.execution_id, "go", p.waitpoint_id, ""))
    with pytest.raises(errors.InvalidToken, match="invalid_token"):
        await env.engine.deliver_signal(waits.signal_args(claim.execution_id, "go", p.waitpoint_id, "k1:short"))
    assert await env.vector(claim.execution_id) == WAITS


async def test_a_suspension_times_out_at_its_instant_and_not_before(env: Env, waits: Waits) -> None:
    a, b = FreshWaitpoint(waits.new_id(), "a"), FreshWaitpoint(waits.new_id(), "b")
    claim, p = await waits.create_suspended(AllConditions((Single("a"), Single("b"))), a, b, timeout_at=env.now + 100)
    e = claim.execution_id
    env.clock.advance_ms(99)
    async with env.unchanged():
        assert await env.engine.expire_suspension(e) is SuspensionExpiry.NOT_DUE
        assert await env.sweep("suspension_timeout") == 0
    assert await waits.effect(e, "go", p) == APPENDED
    env.clock.advance_ms(1)

    assert await env.engine.expire_suspension(e) is SuspensionExpiry.FAILED

    for one in (a, b):
        record = await waits.record(e, one.waitpoint_id)
        assert (record.state, record.close_reason, record.satisfied_at) == ("closed", "timed_out_fail", None)
    core = await env.core(e)
    assert (core["failure_reason"], core["completed_at"]) == ("suspension_timeout:fail", env.now)
    row = await env.row(e)
    assert (row.current_suspension_id, row.current_waitpoint_id) == (None, None)
    async with env.unchanged():
        assert await env.engine.expire_suspension(e) is SuspensionExpiry.NOT_SUSPENDED
        assert await env.engine.expire_suspension(env.engine.new_execution_id()) is SuspensionExpiry.NOT_SUSPENDED
    assert await waits.engine.observe_signals(claim.handle) == []


async def test_an_escalated_suspension_does_not_time_out_again(env: Env, waits: Waits) -> None:
    claim, _ = await waits.create_suspended(timeout_at=env.now, timeout_behavior=TimeoutBehavior.ESCALATE)
    e = claim.execution_id
    assert await env.engine.expire_suspension(e) is SuspensionExpiry.ESCALATED
    async with env.unchanged():
        assert await env.engine.expire_suspension(e) is SuspensionExpiry.NOT_DUE
    root = await env.suspension(e)
    assert (root.timeout_at, root.timeout_behavior, root.closed_at) == (None, None, None)
    await env.engine.resume_execution(e)
    assert await env.vector(e) == RESUMABLE


async def test_a_token_is_found_by_partition_and_waitpoint_only(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    here = partition_of(ExecutionId(claim.execution_id))
    read = env.engine.read_waitpoint_token

    assert await read(here, p.waitpoint_id) == p.waitpoint_token
    assert await read(f"{{fp:{here}}}", p.waitpoint_id) == p.waitpoint_token
    assert await read(here + 1, p.waitpoint_id) is None
    assert await read(here, waits.new_id()) is None
    pending = await env.engine.create_waitpoint((await env.create_and_claim()).handle, "k", 10)
    assert await read(here, pending.waitpoint_id) == pending.token
    env.clock.advance_ms(10)
    assert await read(here, pending.waitpoint_id) is None
    for bad in ("{b:1}", "nonsense", -1, 70_000, None):
        with pytest.raises(errors.InvalidInput):
            await read(bad, p.waitpoint_id)  # type: ignore[arg-type]


async def test_created_waitpoints_are_pending_and_distinct(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    one, two = [await env.engine.create_waitpoint(claim.handle, "same", 1000) for _ in range(2)]

    assert one.waitpoint_id != two.waitpoint_id
    listed = (await env.engine.list_pending_waitpoints(claim.execution_id)).entries
    assert [entry.waitpoint_id for entry in listed] == sorted((one.waitpoint_id, two.waitpoint_id))
    for entry in listed:
        assert (entry.state, entry.required_signal_names, entry.activated_at) == (WaitpointState.PENDING, [], None)
        assert (entry.waitpoint_key, entry.created_at, entry.expires_at) == ("same", env.now, env.now + 1000)
    assert await waits.effect(claim.execution_id, "go", one, idempotency_key="i") == BUFFERED
    assert await waits.effect(claim.execution_id, "go", two, idempotency_key="i") == BUFFERED
    env.clock.advance_ms(1000)
    assert (await env.engine.list_pending_waitpoints(claim.execution_id)).entries == []
    assert await env.sweep("pending_wp_expiry") == 2
    record = await waits.record(claim.execution_id, one.waitpoint_id)
    assert (record.state, record.close_reason, record.signal_count) == ("closed", "never_committed", 1)
