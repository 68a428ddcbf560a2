"""Guarantees of the specification without a numbered scenario: suspend and its arguments."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.engine.operations.suspensions import ConditionAlreadySatisfied, Suspended
from flowfabric.handles import Handle
from flowfabric.model.condition import (
    AllConditions,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
)
from flowfabric.model.suspension import Requester, TimeoutBehavior
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.suspension.arguments import FreshWaitpoint, ResumePolicy, SuspendArgs, UsePendingWaitpoint
from flowfabric.rules.suspension.signals import Accepted
from tests.scenarios.env import ACTIVE, Env, fence_of
from tests.scenarios.waits import ANY, APPENDED, BUFFERED, REPEATED, SATISFIED, SUSPENDED, Waits, count, named

UUID = "11111111-1111-4111-8111-111111111111"
OTHER = "22222222-2222-4222-8222-222222222222"
EMPTY_NAME = "resume_condition: empty signal name (use Wildcard instead)"
DAY = 86_400_000


@pytest.mark.parametrize(
    ("reason", "blocking"),
    [
        ("waiting_for_signal", "waiting_for_signal"),
        ("waiting_for_approval", "waiting_for_approval"),
        ("waiting_for_callback", "waiting_for_callback"),
        ("waiting_for_tool_result", "waiting_for_tool_result"),
        ("waiting_for_operator_review", "paused_by_operator"),
        ("paused_by_policy", "paused_by_policy"),
        ("paused_by_budget", "waiting_for_budget"),
        ("step_boundary", "waiting_for_signal"),
        ("manual_pause", "paused_by_operator"),
        ("something of tomorrow", "waiting_for_signal"),
    ],
)
async def test_a_suspension_reason_maps_to_a_blocking_reason(
    env: Env, waits: Waits, reason: str, blocking: str
) -> None:
    claim, p = await waits.create_suspended(
        reason_code=reason, requested_by=Requester.POLICY, continuation_metadata_pointer="s3"
    )
    e = claim.execution_id

    assert await env.vector(e) == SUSPENDED.format(reason=blocking)
    detail = (await env.core(e))["blocking_detail"]
    assert detail == f"suspended: waitpoint {p.waitpoint_id} awaiting {reason}"
    kept = await env.suspension(e)
    assert (kept.reason_code, kept.requested_by, kept.continuation_metadata_pointer) == (reason, "policy", "s3")
    [entry] = (await env.engine.list_suspended(86)).entries
    assert entry.reason == reason


async def test_describe_suspension_shows_the_request_and_the_outcome(env: Env, waits: Waits) -> None:
    condition = AllConditions((Single("a", ByName("go")), Single("b")))
    policy = ResumePolicy(resume_delay_ms=7, consume_matched_signals=False)
    claim, e = await env.create_claimed()
    t = env.now
    assert await env.engine.describe_suspension(e) is None
    await env.engine.create_waitpoint(claim.handle, "early", DAY)
    assert await env.engine.describe_suspension(e) is None
    args = waits.args(
        condition,
        FreshWaitpoint(UUID, "a"),
        FreshWaitpoint(OTHER, "b"),
        resume_policy=policy,
        requested_by=Requester.OPERATOR,
        timeout_at=t + DAY,
        timeout_behavior=TimeoutBehavior.CANCEL,
    )
    outcome = await env.engine.suspend(claim.handle, args)

    requested = await env.engine.describe_suspension(e)

    assert requested is not None
    assert (requested.suspension_id, requested.execution_id, requested.attempt_index) == (args.suspension_id, e, 0)
    assert (requested.waitpoint_id, requested.waitpoint_key) == (UUID, "a")
    assert [(one.waitpoint_id, one.waitpoint_key) for one in requested.additional_waitpoints] == [(OTHER, "b")]
    assert (requested.resume_condition, requested.resume_policy, requested.gates) == (condition, policy, [])
    assert (requested.created_at, requested.timeout_at, requested.timeout_behavior) == (
        t,
        t + DAY,
        TimeoutBehavior.CANCEL,
    )
    assert (requested.requested_by, requested.continuation_metadata_pointer) == (Requester.OPERATOR, None)
    assert (requested.last_signal_at, requested.satisfied_at, requested.closed_at, requested.close_reason) == (
        None,
        None,
        None,
        None,
    )
    assert (await waits.record(e, UUID)).required_signal_names == ["go"]
    assert (await waits.record(e, OTHER)).required_signal_names == []

    env.clock.advance_ms(5)
    other = await waits.send(e, "x", outcome.details.additional_waitpoints[0])
    await waits.send(e, "noise", outcome.details)
    half = await env.suspension(e)
    assert (half.last_signal_at, half.closer_signal_id, half.all_satisfier_signals) == (t + 5, None, [])
    env.clock.advance_ms(5)
    last = await waits.send(e, "go", outcome.details)
    assert isinstance(other, Accepted)
    assert isinstance(last, Accepted)

    ended = await env.engine.describe_suspension(e)

    assert ended is not None
    assert (ended.satisfied_at, ended.closed_at, ended.close_reason) == (t + 10, t + 10, "resumed")
    assert (ended.closer_signal_id, ended.last_signal_at) == (last.signal_id, t + 10)
    assert ended.all_satisfier_signals == [other.signal_id, last.signal_id]


def nested(levels: int, leaf: Condition = ANY) -> Condition:
    condition = leaf
    for _ in range(levels):
        condition = AllConditions((condition,))
    return condition


@pytest.mark.parametrize(
    ("condition", "detail"),
    [
        (nested(5), "depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]"),
        (nested(4, count(0)), "depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]"),
        (AllConditions(()), "allof_empty_members at path <root>"),
        (AllConditions((ANY, AllConditions(()))), "allof_empty_members at path members[1]"),
        (AllConditions((AllConditions((count(0),)), AllConditions(()))), "count_n_zero at path members[0].members[0]"),
        (Count(0, CountKind.DISTINCT_SIGNALS, (), ByName("")), "count_n_zero at path <root>"),
        (Count(1, CountKind.DISTINCT_WAITPOINTS, (), ByName("")), "count_waitpoints_empty at path <root>"),
        (Count(2, CountKind.DISTINCT_WAITPOINTS, ("k",), ByName("")), "count_exceeds_waitpoint_set at path <root>"),
        (Count(1, CountKind.DISTINCT_SIGNALS, ("k",), ByName("")), EMPTY_NAME),
        (AllConditions((Single("k", ByName("")),)), EMPTY_NAME),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
async def test_the_first_fault_of_a_condition_is_reported_with_its_path(
    env: Env, waits: Waits, condition: Condition, detail: str
) -> None:
    claim = await env.create_and_claim()
    async with env.unchanged():
        with pytest.raises(errors.InvalidInput) as refusal:
            await env.engine.suspend(claim.handle, waits.args(condition))
    assert refusal.value.detail == detail


# Each entry has its own fault and passes the check of the entry before.
ORDER: list[tuple[str, dict[str, Any]]] = [
    ("waitpoints_empty", {"waitpoints": ()}),
    (
        "waitpoint_key_mismatch",
        {"waitpoints": (FreshWaitpoint(UUID, "a"), UsePendingWaitpoint(OTHER)), "resume_condition": Single("b")},
    ),
    (
        "additional_waitpoint_binding_must_be_fresh at waitpoints[1]",
        {
            "waitpoints": (FreshWaitpoint(UUID, "k"), UsePendingWaitpoint(OTHER), FreshWaitpoint(OTHER, "")),
            "resume_condition": TimeoutOnly(),
        },
    ),
    (
        "use_pending_with_extras_unsupported",
        {"waitpoints": (UsePendingWaitpoint(OTHER), FreshWaitpoint(UUID, "")), "resume_condition": TimeoutOnly()},
    ),
    (
        "additional_waitpoint_binding_empty_key at waitpoints[1]",
        {
            "waitpoints": (FreshWaitpoint(UUID, "k"), FreshWaitpoint(OTHER, "")),
            "resume_condition": AllConditions((Single("k"), Single("z"))),
        },
    ),
    (
        "referenced_waitpoint_key_missing_binding: z",
        {
            "waitpoints": (FreshWaitpoint(UUID, "k"), FreshWaitpoint(UUID, "b")),
            "resume_condition": AllConditions((Single("k"), Single("z"))),
        },
    ),
    (
        "extra_binding_not_referenced_by_condition: b",
        {
            "waitpoints": (FreshWaitpoint(UUID, "k"), FreshWaitpoint(UUID, "b")),
            "resume_condition": Single("k", ByName("")),
        },
    ),
    (
        "duplicate_waitpoint_binding: b",
        {
            "waitpoints": (FreshWaitpoint(UUID, "k"), FreshWaitpoint(UUID, "b")),
            "resume_condition": AllConditions((Single("k"), Single("b", ByName("")))),
        },
    ),
    (
        "duplicate_waitpoint_binding: k",
        {
            "waitpoints": (FreshWaitpoint(UUID, "k"), FreshWaitpoint(OTHER, "k")),
            "resume_condition": Single("k", ByName("")),
        },
    ),
    (
        "depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]",
        {
            "waitpoints": (FreshWaitpoint(UUID, "k"), FreshWaitpoint(OTHER, "b")),
            "resume_condition": nested(5, AllConditions((ANY, Single("b")))),
        },
    ),
    ("timeout_only_without_deadline", {"resume_condition": TimeoutOnly()}),
    (EMPTY_NAME, {"resume_condition": Single("k", ByName("")), "timeout_at": 0}),
    ("timeout_at_in_past", {"resume_condition": AllConditions(()), "timeout_at": 0}),
    ("allof_empty_members at path <root>", {"resume_condition": AllConditions(())}),
]


@pytest.mark.parametrize(("detail", "options"), ORDER, ids=[detail for detail, _ in ORDER])
async def test_suspend_arguments_are_validated_in_order_before_the_handle_and_the_key(
    env: Env, waits: Waits, detail: str, options: dict[str, Any]
) -> None:
    claim = await env.create_and_claim()
    await env.engine.suspend(claim.handle, waits.args(idempotency_key="known"))
    foreign = Handle(claim.handle.backend, claim.handle.kind, b"\x02nonsense")
    args = msgspec.structs.replace(waits.args(idempotency_key="known"), **options)

    async with env.unchanged():
        for handle in (claim.handle, foreign):
            with pytest.raises(errors.InvalidInput) as refusal:
                await env.engine.suspend(handle, args)
            assert refusal.value.detail == detail
        with pytest.raises(errors.InvalidInput) as refusal:
            await env.engine.suspend_by_triple(env.engine.new_execution_id(), Fence(), args)
        assert refusal.value.detail == detail


async def test_a_single_binding_need_not_be_referenced_by_the_condition(env: Env, waits: Waits) -> None:
    for condition in (
        count(1, CountKind.DISTINCT_SIGNALS, "elsewhere"),
        AllConditions((Single("elsewhere"),)),
        OperatorOnly(),
    ):
        claim, p = await waits.create_suspended(condition)
        effect = await waits.effect(claim.execution_id, "go", p)
        assert effect == ("no_op" if condition == OperatorOnly() else "signal_ignored_not_in_condition")


async def test_a_timeout_only_member_needs_no_deadline(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(AllConditions((Single("k", ByName("go")), TimeoutOnly())))

    [listed] = (await env.engine.list_pending_waitpoints(claim.execution_id)).entries
    assert listed.required_signal_names == ["go", "__timeout_only__"]
    assert await waits.effect(claim.execution_id, "go", p) == APPENDED


async def test_the_fence_is_checked_after_the_key_and_the_execution(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed()
    whole = fence_of(claim)
    missing = env.engine.new_execution_id()
    suspend = env.engine.suspend_by_triple
    async with env.unchanged():
        for fence, kind, detail in (
            (Fence(), errors.InvalidInput, "fence_required"),
            (Fence("", None, ""), errors.InvalidInput, "fence_required"),
            (Fence(whole.lease_id), errors.InvalidInput, "partial_fence_triple"),
            (Fence(None, whole.lease_epoch, whole.attempt_id), errors.InvalidInput, "partial_fence_triple"),
        ):
            with pytest.raises(kind) as refusal:
                await suspend(e, fence, waits.args())
            assert refusal.value.detail == detail
            with pytest.raises(errors.NotFound):
                await suspend(missing, fence, waits.args())
        for fence in (
            msgspec.structs.replace(whole, lease_id=UUID),
            msgspec.structs.replace(whole, lease_epoch=7),
            msgspec.structs.replace(whole, attempt_id=UUID),
        ):
            with pytest.raises(errors.StaleLease):
                await suspend(e, fence, waits.args())
    first = await suspend(e, whole, waits.args(idempotency_key="once"))
    async with env.unchanged():
        assert await suspend(e, Fence(), waits.args(idempotency_key="once")) == first


async def test_revocation_is_reported_before_expiry_and_expiry_before_staleness(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    await env.revoke_lease(claim)
    env.clock.advance_ms(DAY)
    async with env.refused(errors.LeaseRevoked):
        await env.engine.suspend(claim.handle, waits.args())
    other = await env.create_and_claim()
    env.clock.advance_ms(DAY)
    with pytest.raises(errors.LeaseExpired):
        await env.engine.suspend_by_triple(other.execution_id, Fence(UUID, 9, UUID), waits.args())
    async with env.unchanged():
        with pytest.raises(errors.LeaseExpired):
            await env.engine.suspend(other.handle, waits.args())


async def test_a_suspend_key_remembers_both_outcomes_and_no_failure(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", DAY)
    lost = waits.args(Single("kp"), UsePendingWaitpoint(waits.new_id()), idempotency_key="once")
    async with env.refused(errors.WaitpointNotFound):
        await env.engine.suspend(claim.handle, lost)
    await waits.effect(claim.execution_id, "go", pending)

    args = waits.args(Single("kp"), UsePendingWaitpoint(pending.waitpoint_id), idempotency_key="once")
    first = await env.engine.suspend(claim.handle, args)
    assert isinstance(first, ConditionAlreadySatisfied)
    assert await env.vector(claim.execution_id) == ACTIVE
    async with env.unchanged():
        assert await env.engine.suspend(claim.handle, waits.args(idempotency_key="once")) == first
    await env.engine.complete(claim.handle)
    async with env.unchanged():
        assert await env.engine.suspend(claim.handle, waits.args(idempotency_key="once")) == first
    env.clock.advance_ms(7 * DAY)
    async with env.refused(errors.ExecutionNotActive):
        await env.engine.suspend(claim.handle, waits.args(idempotency_key="once"))


@pytest.mark.parametrize(
    ("ahead", "remembered"),
    [(1000, 61_000), (0, 60_000), (-600_000, 60_000), (30 * DAY, 7 * DAY), (7 * DAY - 60_000, 7 * DAY)],
)
async def test_a_suspend_key_is_remembered_according_to_its_timeout(
    env: Env, waits: Waits, ahead: int, remembered: int
) -> None:
    claim = await env.create_and_claim()
    options: dict[str, Any] = {
        "timeout_at": env.now + ahead,
        "timeout_behavior": TimeoutBehavior.ESCALATE,
        "idempotency_key": "once",
    }
    first = await env.engine.suspend(claim.handle, waits.args(**options))
    assert isinstance(first, Suspended)

    env.clock.advance_ms(remembered - 1)
    assert await env.engine.suspend(claim.handle, waits.args(idempotency_key="once")) == first
    env.clock.advance_ms(1)
    async with env.refused(errors.ExecutionNotActive):
        await env.engine.suspend(claim.handle, waits.args(idempotency_key="once"))


async def test_an_empty_suspend_key_counts_as_missing(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    await env.engine.suspend(claim.handle, waits.args(idempotency_key=""))
    async with env.refused(errors.ExecutionNotActive):
        await env.engine.suspend(claim.handle, waits.args(idempotency_key=""))


async def test_faults_of_a_pending_waitpoint_are_reported_in_order(env: Env, waits: Waits) -> None:
    claim, other = await env.create_and_claim(), await env.create_and_claim()
    mine = await env.engine.create_waitpoint(claim.handle, "k", 1000)
    theirs = await env.engine.create_waitpoint(other.handle, "k", 1000)
    closed = await env.engine.create_waitpoint(claim.handle, "k", DAY)
    closed_theirs = await env.engine.create_waitpoint(other.handle, "k", DAY)
    for one in (closed, closed_theirs):
        assert await env.engine.close_waitpoint(one.waitpoint_id, "changed my mind")

    async def refused(waitpoint_id: str, kind: type[errors.FabricError], condition: Condition = ANY) -> None:
        async with env.refused(kind):
            await env.engine.suspend(claim.handle, waits.args(condition, UsePendingWaitpoint(waitpoint_id)))

    await refused(waits.new_id(), errors.WaitpointNotFound)
    await refused(closed.waitpoint_id, errors.WaitpointNotPending)
    await refused(closed_theirs.waitpoint_id, errors.WaitpointNotPending)
    await refused(theirs.waitpoint_id, errors.InvalidWaitpointForExecution, Single("other"))
    await refused(mine.waitpoint_id, errors.InvalidInput, Single("other"))
    env.clock.advance_ms(1000)
    await refused(theirs.waitpoint_id, errors.PendingWaitpointExpired)
    await refused(mine.waitpoint_id, errors.PendingWaitpointExpired, Single("other"))


async def test_the_id_of_an_expired_pending_waitpoint_starts_without_signals(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("k", 1000)
    for name in ("a", "b"):
        assert await waits.effect(claim.execution_id, name, pending, idempotency_key=name) == BUFFERED
    env.clock.advance_ms(1000)

    p = await waits.suspend(claim, count(2, CountKind.DISTINCT_SIGNALS), FreshWaitpoint(pending.waitpoint_id, "k"))

    assert (await waits.record(claim.execution_id, p.waitpoint_id)).signal_count == 0
    assert await waits.effect(claim.execution_id, "a", p, idempotency_key="a") == APPENDED
    assert await waits.effect(claim.execution_id, "b", p, idempotency_key="b") == SATISFIED
    signals = await env.engine.observe_signals((await env.grant_and_resume(claim.execution_id)).handle)
    assert [one.signal_name for one in signals] == ["a", "b"]


async def test_buffered_signals_are_evaluated_when_the_waitpoint_is_activated(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("k", DAY)
    for name, source in (("noise", "ana"), ("go", "ana"), ("go", "ana")):
        await waits.effect(claim.execution_id, name, pending, source)
    condition = AllConditions((Count(2, CountKind.DISTINCT_SOURCES, ("k",), ByName("go")), Single("k", ByName("ok"))))

    p = (await waits.suspend_on_pending(claim, pending, condition)).details

    assert p.waitpoint_token == pending.token
    assert await waits.effect(claim.execution_id, "go", p, "ana") == REPEATED
    assert await waits.effect(claim.execution_id, "ok", p, "cy") == APPENDED
    assert await waits.effect(claim.execution_id, "go", p, "bo") == SATISFIED
    signals = await env.engine.observe_signals((await env.grant_and_resume(claim.execution_id)).handle)
    assert [(one.signal_name, one.source_identity) for one in signals] == [("go", "ana"), ("ok", "cy"), ("go", "bo")]
    record = await waits.record(claim.execution_id, p.waitpoint_id)
    assert (record.signal_count, record.matched_signal_count) == (6, 6)


async def test_a_resume_policy_applies_to_its_own_suspension(env: Env, waits: Waits) -> None:
    policy = ResumePolicy(consume_matched_signals=False, close_waitpoint_on_resume=False, resume_delay_ms=5000)
    claim, p = await waits.create_suspended(named("go"), resume_policy=policy)
    e = claim.execution_id
    kept = await env.suspension(e)
    assert kept.resume_policy == policy

    assert await waits.effect(e, "go", p) == SATISFIED

    core = await env.core(e)
    assert (core["blocking_detail"], core["delay_until"]) == ("resume delay 5000ms after signal go", env.now + 5000)
    assert (await waits.record(e, p.waitpoint_id)).state == "closed"
    await env.promote(e)
    again = await waits.suspend(await env.grant_and_resume(e), named("go"))
    assert (await waits.record(e, again.waitpoint_id)).signal_count == 0


def test_suspend_args_have_the_defaults_of_the_specification() -> None:
    args = SuspendArgs(suspension_id=UUID, waitpoints=(), resume_condition=ANY, reason_code="x", now=0)
    assert (args.requested_by, args.timeout_behavior, args.timeout_at) == (Requester.WORKER, TimeoutBehavior.FAIL, None)
    assert args.resume_policy == ResumePolicy("runnable", True, False, None, True)
