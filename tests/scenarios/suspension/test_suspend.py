"""SS-001 to SS-011: suspend, its validation and deduplication."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.operations.suspensions import ConditionAlreadySatisfied, Suspended
from flowfabric.handles import Handle, HandleKind
from flowfabric.model.condition import AllConditions, ByName, Condition, Single, TimeoutOnly
from flowfabric.model.states import AttemptRecordState
from flowfabric.model.suspension import TimeoutBehavior
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.suspension.arguments import FreshWaitpoint, UsePendingWaitpoint, WaitpointBinding
from tests.scenarios.durable_function import DurableFunction, closed, opened
from tests.scenarios.env import ACTIVE, DEFAULT_PARTITION, EXPIRED_LEASE, LEASE_MS, Env, fence_of
from tests.scenarios.waits import ANY, APPENDED, SATISFIED, SUSPENDED, Waits, named

EMPTY_NAME = "resume_condition: empty signal name (use Wildcard instead)"


@pytest.mark.spec("SS-001")
async def test_suspend_releases_the_lease_and_opens_a_waitpoint(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed()
    p = waits.new_id()
    args = waits.args(
        named("approve", key=f"wpk:{p}"), FreshWaitpoint(p, f"wpk:{p}"), reason_code="waiting_for_approval"
    )

    outcome = await env.engine.suspend(claim.handle, args)

    assert isinstance(outcome, Suspended)
    details = outcome.details
    assert (details.suspension_id, details.waitpoint_id) == (args.suspension_id, p)
    assert (details.waitpoint_key, details.additional_waitpoints) == (f"wpk:{p}", [])
    assert re.fullmatch(r"k1:[0-9a-f]{64}", details.waitpoint_token.reveal())
    assert (outcome.handle.kind, outcome.handle.fields) == (HandleKind.SUSPENDED, claim.handle.fields)
    assert await env.vector(e) == SUSPENDED.format(reason="waiting_for_approval")
    core = await env.core(e)
    assert core["blocking_detail"] == f"suspended: waitpoint {p} awaiting waiting_for_approval"
    assert "current_lease_id" not in core
    assert core["current_lease_epoch"] == 1
    attempt = await env.attempt(e, 0)
    assert attempt.attempt_state is AttemptRecordState.SUSPENDED
    assert (attempt.suspended_at, attempt.suspension_id) == (env.now, args.suspension_id)
    revoked = [event for event in await env.lease_feed(e) if event.variant == "Revoked"]
    assert [(event.lease_id, event.revoked_by) for event in revoked] == [(claim.lease_id, "backend")]
    assert await env.completions(e) == []


@pytest.mark.spec("SS-001")
async def test_a_fresh_waitpoint_key_defaults_to_its_id(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    fresh = env.engine.fresh_waitpoint()
    assert fresh.waitpoint_key == f"wpk:{fresh.waitpoint_id}"
    assert env.engine.fresh_waitpoint("review").waitpoint_key == "review"

    details = await waits.suspend(claim, Single(fresh.waitpoint_key), fresh)

    assert (details.waitpoint_id, details.waitpoint_key) == (fresh.waitpoint_id, fresh.waitpoint_key)


@pytest.mark.spec("SS-002")
async def test_a_suspended_handle_is_refused_before_anything_else(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    args = waits.args(idempotency_key="K")
    outcome = await env.engine.suspend(claim.handle, args)
    assert isinstance(outcome, Suspended)
    dead = Handle(outcome.handle.backend, HandleKind.SUSPENDED, b"not even a handle")

    async with env.refused(errors.AlreadySuspended):
        await env.engine.suspend(outcome.handle, waits.args(idempotency_key="K"))
    for handle in (outcome.handle, dead):
        async with env.refused(errors.AlreadySuspended):
            await env.engine.suspend(handle, waits.args(waitpoints=(), idempotency_key="K"))


@pytest.mark.spec("SS-003")
@pytest.mark.parametrize(
    ("condition", "bindings", "detail"),
    [
        (ANY, (), "waitpoints_empty"),
        (Single("wpk:B"), ("wpk:A",), "waitpoint_key_mismatch"),
        (TimeoutOnly(), ("k",), "timeout_only_without_deadline"),
        (Single("k", ByName("")), ("k",), EMPTY_NAME),
        (AllConditions((Single("k", ByName("")),)), ("k",), EMPTY_NAME),
    ],
)
async def test_invalid_suspend_arguments_are_refused(
    env: Env, waits: Waits, condition: Condition, bindings: tuple[str, ...], detail: str
) -> None:
    claim = await env.create_and_claim()
    fresh = tuple(FreshWaitpoint(waits.new_id(), key) for key in bindings)

    async with env.refused(errors.InvalidInput, detail):
        await env.engine.suspend(claim.handle, waits.args(condition, waitpoints=fresh))

    assert await env.vector(claim.execution_id) == ACTIVE
    await waits.suspend(claim, TimeoutOnly(), timeout_at=env.now + 60_000)


@pytest.mark.spec("SS-004")
async def test_a_timeout_in_the_past_is_tolerated_for_ten_minutes(env: Env, waits: Waits) -> None:
    claim, other = await env.create_and_claim(), await env.create_and_claim()

    await waits.suspend(claim, timeout_at=env.now - 600_000)
    async with env.refused(errors.InvalidInput, "timeout_at_in_past"):
        await env.engine.suspend(other.handle, waits.args(timeout_at=env.now - 600_001))


@pytest.mark.spec("SS-005")
@pytest.mark.parametrize(
    ("keys", "condition", "detail"),
    [
        (("a", "b"), AllConditions((Single("a"), Single("c"))), "referenced_waitpoint_key_missing_binding: c"),
        (("a", "b"), AllConditions((Single("a"),)), "extra_binding_not_referenced_by_condition: b"),
        (("a", ""), AllConditions((Single("a"),)), "additional_waitpoint_binding_empty_key at waitpoints[1]"),
        (("a", None), AllConditions((Single("a"),)), "additional_waitpoint_binding_must_be_fresh at waitpoints[1]"),
        ((None, "b"), AllConditions((Single("b"),)), "use_pending_with_extras_unsupported"),
        (("a", "a"), AllConditions((Single("a"),)), "duplicate_waitpoint_binding: a"),
    ],
)
async def test_inconsistent_bindings_are_refused(
    env: Env, waits: Waits, keys: tuple[str | None, ...], condition: Condition, detail: str
) -> None:
    claim = await env.create_and_claim()
    bindings: list[WaitpointBinding] = [
        UsePendingWaitpoint(waits.new_id()) if key is None else FreshWaitpoint(waits.new_id(), key) for key in keys
    ]

    async with env.refused(errors.InvalidInput, detail):
        await env.engine.suspend(claim.handle, waits.args(condition, *bindings))


@pytest.mark.spec("SS-005")
async def test_two_bindings_never_share_an_id(env: Env, waits: Waits) -> None:
    claim, p = await env.create_and_claim(), waits.new_id()

    async with env.refused(errors.InvalidInput, "duplicate_waitpoint_binding: b"):
        both = AllConditions((Single("a"), Single("b")))
        await env.engine.suspend(claim.handle, waits.args(both, FreshWaitpoint(p, "a"), FreshWaitpoint(p, "b")))


@pytest.mark.spec("SS-006")
async def test_a_second_suspend_without_a_key_is_refused(env: Env, waits: Waits) -> None:
    claim, _ = await waits.create_suspended()

    async with env.refused(
        errors.ExecutionNotActive, lifecycle_phase="suspended", lease_epoch=1, attempt_id=claim.attempt_id
    ):
        await env.engine.suspend(claim.handle, waits.args())


@pytest.mark.spec("SS-007")
async def test_a_second_suspend_with_the_same_key_returns_the_first_result(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    first = await env.engine.suspend(claim.handle, waits.args(idempotency_key="K"))

    async with env.unchanged():
        other = waits.args(named("else", key="z"), FreshWaitpoint(waits.new_id(), "z"), idempotency_key="K")
        again = await env.engine.suspend(claim.handle, other)

    assert again == first
    assert isinstance(again, Suspended)
    assert isinstance(first, Suspended)
    assert again.details.waitpoint_token.reveal() == first.details.waitpoint_token.reveal()


@pytest.mark.spec("SS-007")
async def test_a_suspend_key_belongs_to_one_execution(env: Env, waits: Waits) -> None:
    claim, other = await env.create_and_claim(), await env.create_and_claim()
    first = await env.engine.suspend(claim.handle, waits.args(idempotency_key="K"))

    second = await env.engine.suspend(other.handle, waits.args(idempotency_key="K"))

    assert first.details.suspension_id != second.details.suspension_id


@pytest.mark.spec("SS-008")
async def test_a_suspend_key_survives_a_resume(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed()
    first = await env.engine.suspend(claim.handle, waits.args(idempotency_key="K"))
    assert await waits.effect(e, "go", first.details) == SATISFIED
    again = await env.grant_and_resume(e)

    async with env.unchanged():
        assert await env.engine.suspend(again.handle, waits.args(idempotency_key="K")) == first
    assert await env.vector(e) == ACTIVE

    second = await env.engine.suspend(again.handle, waits.args(idempotency_key="K2"))
    assert second.details.suspension_id != first.details.suspension_id
    assert await env.vector(e) == SUSPENDED.format(reason="waiting_for_signal")


@pytest.mark.spec("SS-009")
async def test_a_suspend_key_expires_a_minute_after_its_timeout(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed()
    t = env.now
    options: dict[str, Any] = {"timeout_behavior": TimeoutBehavior.AUTO_RESUME, "timeout_at": t + 1000}
    first = await env.engine.suspend(claim.handle, waits.args(idempotency_key="K", **options))
    await waits.time_out(t + 1000)
    again = await env.grant_and_resume(e, ttl=100_000)

    env.clock.now = t + 60_999
    assert await env.engine.suspend(again.handle, waits.args(idempotency_key="K")) == first
    env.clock.now = t + 61_001
    second = await env.engine.suspend(again.handle, waits.args(idempotency_key="K"))
    assert second.details.suspension_id != first.details.suspension_id

    lasting = await env.create_and_claim()
    kept = await env.engine.suspend(lasting.handle, waits.args(idempotency_key="K"))
    env.clock.advance_ms(6 * 24 * 3600 * 1000)
    assert await env.engine.suspend(lasting.handle, waits.args(idempotency_key="K")) == kept


@pytest.mark.spec("SS-010")
async def test_a_suspend_after_lease_expiry_is_refused_and_marks_the_lease(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed()
    await env.engine.append_frame(claim.handle, b"one")
    env.clock.advance_ms(LEASE_MS + 1)

    with pytest.raises(errors.LeaseExpired):
        await env.engine.suspend(claim.handle, waits.args())

    assert await env.vector(e) == EXPIRED_LEASE
    assert (await env.core(e))["blocking_detail"] == "lease expired, awaiting reclaim"
    assert [event.variant for event in await env.lease_feed(e)] == ["Acquired", "Expired"]
    page = await env.engine.read_stream(e, 0)
    assert (page.closed_at, page.closed_reason) == (env.now, "lease_expired")
    assert await env.engine.describe_suspension(e) is None


@pytest.mark.spec("SS-011")
async def test_a_resumed_execution_suspends_again(env: Env, waits: Waits) -> None:
    claim, first = await waits.create_suspended()
    e = claim.execution_id
    assert await waits.effect(e, "go", first) == SATISFIED
    second = await waits.suspend(await env.grant_and_resume(e))

    current = await env.suspension(e)
    assert current.suspension_id == second.suspension_id
    async with env.refused(errors.WaitpointClosed):
        await waits.send(e, "go", first)
    assert (await waits.record(e, first.waitpoint_id)).close_reason == "resumed"


async def test_a_suspension_replaces_the_previous_one_and_keeps_gates_and_messages(
    function: DurableFunction, env: Env, waits: Waits
) -> None:
    e, t = function.e, env.now
    await function.send(b"hello")
    gate = opened(await function.approval())
    first = await waits.suspend(function.claim, reason_code="waiting_for_approval", timeout_at=t + 60_000)
    assert await waits.effect(e, "go", first) == SATISFIED
    env.clock.advance_ms(7)
    await function.resume()

    second = await waits.suspend(function.claim, Single("j"), FreshWaitpoint(waits.new_id(), "j"))

    record = await env.suspension(e)
    assert (record.waitpoint_id, record.created_at, record.timeout_at) == (second.waitpoint_id, t + 7, None)
    assert (record.reason_code, record.last_signal_at, record.closer_signal_id) == ("waiting_for_signal", None, None)
    assert (record.satisfied_at, record.closed_at, record.all_satisfier_signals) == (None, None, [])
    assert await function.vote(gate, "ana") == APPENDED
    async with env.refused(errors.SignalLimitExceeded):
        await waits.send(e, "go", second, max_signals_per_execution=2)
    assert await waits.effect(e, "go", second, max_signals_per_execution=3) == SATISFIED
    await function.resume()
    assert closed(await function.receive("r0")).payload == b"hello"


async def test_a_suspension_on_a_signalled_waitpoint_shows_the_last_signal_time(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 60_000)
    await waits.effect(claim.execution_id, "early", pending)
    signalled = env.now
    env.clock.advance_ms(5)

    await waits.suspend_on_pending(claim, pending, named("go", key="kp"))

    record = await env.suspension(claim.execution_id)
    assert (record.created_at, record.last_signal_at) == (signalled + 5, signalled)


async def test_suspend_by_triple_is_fenced_like_a_handle(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed()
    fence = fence_of(claim)
    missing = env.engine.new_execution_id()

    async with env.refused(errors.NotFound, entity="execution"):
        await env.engine.suspend_by_triple(missing, fence, waits.args())
    async with env.refused(errors.InvalidInput, "fence_required"):
        await env.engine.suspend_by_triple(e, Fence(), waits.args())
    async with env.refused(errors.InvalidInput, "partial_fence_triple"):
        await env.engine.suspend_by_triple(e, Fence(lease_id=claim.lease_id), waits.args())
    async with env.refused(errors.StaleLease):
        await env.engine.suspend_by_triple(e, Fence(waits.new_id(), 1, claim.attempt_id), waits.args())
    outcome = await env.engine.suspend_by_triple(e, fence, waits.args())
    assert isinstance(outcome, Suspended)
    assert outcome.handle.fields == claim.handle.fields


async def test_an_open_waitpoint_id_cannot_be_reused(env: Env, waits: Waits) -> None:
    claim, details = await waits.create_suspended()
    other = await env.create_and_claim()
    reused = FreshWaitpoint(details.waitpoint_id, "k")

    async with env.refused(errors.WaitpointAlreadyExists):
        await env.engine.suspend(other.handle, waits.args(ANY, reused))

    assert await waits.effect(claim.execution_id, "go", details) == SATISFIED
    again = await env.grant_and_resume(claim.execution_id)
    second = await waits.suspend(again, ANY, reused)
    assert (await waits.record(claim.execution_id, second.waitpoint_id)).signal_count == 0
    assert await waits.effect(claim.execution_id, "go", second) == SATISFIED


async def test_suspending_without_a_signing_key_is_refused(keyless: Any, clock: Any) -> None:
    env = Env(keyless, clock)
    claim = await env.create_and_claim()

    async with env.refused(errors.InvalidInput, "hmac_secret_not_initialized"):
        await keyless.suspend(claim.handle, Waits(env).args())


async def test_an_already_satisfied_suspend_leaves_no_open_suspension(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed()
    t = env.now
    pending = await env.engine.create_waitpoint(claim.handle, "kp", 60_000)
    await waits.effect(e, "go", pending)
    timed: dict[str, Any] = {"timeout_at": t + 1000, "timeout_behavior": TimeoutBehavior.FAIL}

    answer = await env.engine.suspend(
        claim.handle, waits.args(Single("kp"), UsePendingWaitpoint(pending.waitpoint_id), **timed)
    )

    assert isinstance(answer, ConditionAlreadySatisfied)
    record = await env.suspension(e)
    assert (record.satisfied_at, record.closed_at, record.close_reason) == (t, t, "resumed")
    assert (await env.engine.list_suspended(DEFAULT_PARTITION)).entries == []
    env.clock.now = t + 1000
    async with env.unchanged():
        assert await env.sweep("suspension_timeout") == 0
    assert isinstance(await env.engine.suspend(claim.handle, waits.args()), Suspended)
