"""SS-001 to SS-011: how a holder puts its work away, once, and what is refused on the way."""

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
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.suspension.arguments import FreshWaitpoint, UsePendingWaitpoint, WaitpointBinding
from tests.scenarios.functions import Function, closed, opened
from tests.scenarios.play import ACTIVE, DEFAULT_PARTITION, EXPIRED_LEASE, LEASE_MS, Play, fence_of
from tests.scenarios.waits import ANY, APPENDED, SATISFIED, SUSPENDED, Waits, named

EMPTY_NAME = "resume_condition: empty signal name (use Wildcard instead)"


@pytest.mark.spec("SS-001")
async def test_fresh_suspend_happy_path(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e, p = held.execution_id, waits.id()
    args = waits.args(
        named("approve", key=f"wpk:{p}"), FreshWaitpoint(p, f"wpk:{p}"), reason_code="waiting_for_approval"
    )

    outcome = await play.engine.suspend(held.handle, args)

    assert isinstance(outcome, Suspended)
    details = outcome.details
    assert (details.suspension_id, details.waitpoint_id) == (args.suspension_id, p)
    assert (details.waitpoint_key, details.additional_waitpoints) == (f"wpk:{p}", [])
    assert re.fullmatch(r"k1:[0-9a-f]{64}", details.waitpoint_token.reveal())
    assert (outcome.handle.kind, outcome.handle.fields) == (HandleKind.SUSPENDED, held.handle.fields)
    assert await play.vector(e) == SUSPENDED.format(reason="waiting_for_approval")
    core = await play.core(e)
    assert core["blocking_detail"] == f"suspended: waitpoint {p} awaiting waiting_for_approval"
    assert "current_lease_id" not in core
    assert core["current_lease_epoch"] == 1
    attempt = await play.attempt(e, 0)
    assert attempt.attempt_state is AttemptRecordState.SUSPENDED
    assert (attempt.suspended_at, attempt.suspension_id) == (play.now, args.suspension_id)
    revoked = [news for news in await play.lease_feed(e) if news.variant == "Revoked"]
    assert [(news.lease_id, news.revoked_by) for news in revoked] == [(held.lease_id, "backend")]
    assert await play.completions(e) == []


@pytest.mark.spec("SS-001")
async def test_a_fresh_waitpoint_is_called_after_its_id_unless_it_has_a_key(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    fresh = play.engine.fresh_waitpoint()
    assert fresh.waitpoint_key == f"wpk:{fresh.waitpoint_id}"
    assert play.engine.fresh_waitpoint("review").waitpoint_key == "review"

    details = await waits.suspend(held, Single(fresh.waitpoint_key), fresh)

    assert (details.waitpoint_id, details.waitpoint_key) == (fresh.waitpoint_id, fresh.waitpoint_key)


@pytest.mark.spec("SS-002")
async def test_suspended_kind_handle_is_refused_first(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    args = waits.args(idempotency_key="K")
    outcome = await play.engine.suspend(held.handle, args)
    assert isinstance(outcome, Suspended)
    dead = Handle(outcome.handle.backend, HandleKind.SUSPENDED, b"not even a handle")

    async with play.refused(errors.AlreadySuspended):
        await play.engine.suspend(outcome.handle, waits.args(idempotency_key="K"))
    for handle in (outcome.handle, dead):
        async with play.refused(errors.AlreadySuspended):
            await play.engine.suspend(handle, waits.args(waitpoints=(), idempotency_key="K"))


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
async def test_argument_validation(
    play: Play, waits: Waits, condition: Condition, bindings: tuple[str, ...], detail: str
) -> None:
    held = await play.claimed()
    fresh = tuple(FreshWaitpoint(waits.id(), key) for key in bindings)

    async with play.refused(errors.InvalidInput, detail):
        await play.engine.suspend(held.handle, waits.args(condition, waitpoints=fresh))

    assert await play.vector(held.execution_id) == ACTIVE
    await waits.suspend(held, TimeoutOnly(), timeout_at=play.now + 60_000)


@pytest.mark.spec("SS-004")
async def test_past_deadline_tolerance(play: Play, waits: Waits) -> None:
    held, other = await play.claimed(), await play.claimed()

    await waits.suspend(held, timeout_at=play.now - 600_000)
    async with play.refused(errors.InvalidInput, "timeout_at_in_past"):
        await play.engine.suspend(other.handle, waits.args(timeout_at=play.now - 600_001))


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
async def test_multi_binding_cross_checks(
    play: Play, waits: Waits, keys: tuple[str | None, ...], condition: Condition, detail: str
) -> None:
    held = await play.claimed()
    bindings: list[WaitpointBinding] = [
        UsePendingWaitpoint(waits.id()) if key is None else FreshWaitpoint(waits.id(), key) for key in keys
    ]

    async with play.refused(errors.InvalidInput, detail):
        await play.engine.suspend(held.handle, waits.args(condition, *bindings))


@pytest.mark.spec("SS-005")
async def test_two_bindings_never_share_an_id(play: Play, waits: Waits) -> None:
    held, p = await play.claimed(), waits.id()

    async with play.refused(errors.InvalidInput, "duplicate_waitpoint_binding: b"):
        both = AllConditions((Single("a"), Single("b")))
        await play.engine.suspend(held.handle, waits.args(both, FreshWaitpoint(p, "a"), FreshWaitpoint(p, "b")))


@pytest.mark.spec("SS-006")
async def test_second_suspend_without_key(play: Play, waits: Waits) -> None:
    held, _ = await waits.suspended()

    async with play.refused(
        errors.ExecutionNotActive, lifecycle_phase="suspended", lease_epoch=1, attempt_id=held.attempt_id
    ):
        await play.engine.suspend(held.handle, waits.args())


@pytest.mark.spec("SS-007")
async def test_dedup_replay(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    first = await play.engine.suspend(held.handle, waits.args(idempotency_key="K"))

    async with play.untouched():
        other = waits.args(named("else", key="z"), FreshWaitpoint(waits.id(), "z"), idempotency_key="K")
        again = await play.engine.suspend(held.handle, other)

    assert again == first
    assert isinstance(again, Suspended)
    assert isinstance(first, Suspended)
    assert again.details.waitpoint_token.reveal() == first.details.waitpoint_token.reveal()


@pytest.mark.spec("SS-007")
async def test_a_key_belongs_to_one_execution(play: Play, waits: Waits) -> None:
    held, other = await play.claimed(), await play.claimed()
    first = await play.engine.suspend(held.handle, waits.args(idempotency_key="K"))

    second = await play.engine.suspend(other.handle, waits.args(idempotency_key="K"))

    assert first.details.suspension_id != second.details.suspension_id


@pytest.mark.spec("SS-008")
async def test_dedup_survives_resume(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    first = await play.engine.suspend(held.handle, waits.args(idempotency_key="K"))
    assert await waits.effect(e, "go", first.details) == SATISFIED
    again = await play.resumed(e)

    async with play.untouched():
        assert await play.engine.suspend(again.handle, waits.args(idempotency_key="K")) == first
    assert await play.vector(e) == ACTIVE

    second = await play.engine.suspend(again.handle, waits.args(idempotency_key="K2"))
    assert second.details.suspension_id != first.details.suspension_id
    assert await play.vector(e) == SUSPENDED.format(reason="waiting_for_signal")


@pytest.mark.spec("SS-009")
async def test_dedup_ttl(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e, t = held.execution_id, play.now
    given: dict[str, Any] = {"timeout_behavior": TimeoutBehavior.AUTO_RESUME, "timeout_at": t + 1000}
    first = await play.engine.suspend(held.handle, waits.args(idempotency_key="K", **given))
    await waits.time_out(t + 1000)
    again = await play.resumed(e, ttl=100_000)

    play.clock.now = t + 60_999
    assert await play.engine.suspend(again.handle, waits.args(idempotency_key="K")) == first
    play.clock.now = t + 61_001
    second = await play.engine.suspend(again.handle, waits.args(idempotency_key="K"))
    assert second.details.suspension_id != first.details.suspension_id

    lasting = await play.claimed()
    kept = await play.engine.suspend(lasting.handle, waits.args(idempotency_key="K"))
    play.clock.advance_ms(6 * 24 * 3600 * 1000)
    assert await play.engine.suspend(lasting.handle, waits.args(idempotency_key="K")) == kept


@pytest.mark.spec("SS-010")
async def test_expired_lease_is_marked(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    await play.engine.append_frame(held.handle, b"one")
    play.clock.advance_ms(LEASE_MS + 1)

    with pytest.raises(errors.LeaseExpired):
        await play.engine.suspend(held.handle, waits.args())

    assert await play.vector(e) == EXPIRED_LEASE
    assert (await play.core(e))["blocking_detail"] == "lease expired, awaiting reclaim"
    assert [news.variant for news in await play.lease_feed(e)] == ["Acquired", "Expired"]
    page = await play.engine.read_stream(e, 0)
    assert (page.closed_at, page.closed_reason) == (play.now, "lease_expired")
    assert await play.engine.describe_suspension(e) is None


@pytest.mark.spec("SS-011")
async def test_re_suspend_after_resume(play: Play, waits: Waits) -> None:
    held, first = await waits.suspended()
    e = held.execution_id
    assert await waits.effect(e, "go", first) == SATISFIED
    second = await waits.suspend(await play.resumed(e))

    current = await play.engine.describe_suspension(e)
    assert current is not None
    assert current.suspension_id == second.suspension_id
    async with play.refused(errors.WaitpointClosed):
        await waits.send(e, "go", first)
    assert (await waits.record(e, first.waitpoint_id)).close_reason == "resumed"


async def test_a_suspension_takes_the_place_of_the_one_before_and_leaves_what_is_the_execution_s(
    function: Function, play: Play, waits: Waits
) -> None:
    e, t = function.e, play.now
    await function.send(b"hello")
    gate = opened(await function.approval())
    first = await waits.suspend(function.held, reason_code="waiting_for_approval", timeout_at=t + 60_000)
    assert await waits.effect(e, "go", first) == SATISFIED
    play.clock.advance_ms(7)
    await function.go_on()

    second = await waits.suspend(function.held, Single("j"), FreshWaitpoint(waits.id(), "j"))

    record = await play.engine.describe_suspension(e)
    assert record is not None
    assert (record.waitpoint_id, record.created_at, record.timeout_at) == (second.waitpoint_id, t + 7, None)
    assert (record.reason_code, record.last_signal_at, record.closer_signal_id) == ("waiting_for_signal", None, None)
    assert (record.satisfied_at, record.closed_at, record.all_satisfier_signals) == (None, None, [])
    assert await function.vote(gate, "ana") == APPENDED
    async with play.refused(errors.SignalLimitExceeded):
        await waits.send(e, "go", second, max_signals_per_execution=2)
    assert await waits.effect(e, "go", second, max_signals_per_execution=3) == SATISFIED
    await function.go_on()
    assert closed(await function.receive("r0")).payload == b"hello"


async def test_a_wait_on_a_waitpoint_that_was_signalled_before_knows_when(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "kp", 60_000)
    await waits.effect(held.execution_id, "early", pending)
    signalled = play.now
    play.clock.advance_ms(5)

    await waits.on_pending(held, pending, named("go", key="kp"))

    record = await play.engine.describe_suspension(held.execution_id)
    assert record is not None
    assert (record.created_at, record.last_signal_at) == (signalled + 5, signalled)


async def test_suspend_by_triple_is_fenced_like_a_handle(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e, fence = held.execution_id, fence_of(held)
    missing = play.engine.new_execution_id()

    async with play.refused(errors.NotFound, entity="execution"):
        await play.engine.suspend_by_triple(missing, fence, waits.args())
    async with play.refused(errors.InvalidInput, "fence_required"):
        await play.engine.suspend_by_triple(e, Fence(), waits.args())
    async with play.refused(errors.InvalidInput, "partial_fence_triple"):
        await play.engine.suspend_by_triple(e, Fence(lease_id=held.lease_id), waits.args())
    async with play.refused(errors.StaleLease):
        await play.engine.suspend_by_triple(e, Fence(waits.id(), 1, held.attempt_id), waits.args())
    outcome = await play.engine.suspend_by_triple(e, fence, waits.args())
    assert isinstance(outcome, Suspended)
    assert outcome.handle.fields == held.handle.fields


async def test_a_waitpoint_id_that_is_open_cannot_be_used_again(play: Play, waits: Waits) -> None:
    held, details = await waits.suspended()
    other = await play.claimed()
    taken = FreshWaitpoint(details.waitpoint_id, "k")

    async with play.refused(errors.WaitpointAlreadyExists):
        await play.engine.suspend(other.handle, waits.args(ANY, taken))

    assert await waits.effect(held.execution_id, "go", details) == SATISFIED
    again = await play.resumed(held.execution_id)
    anew = await waits.suspend(again, ANY, taken)
    assert (await waits.record(held.execution_id, anew.waitpoint_id)).signal_count == 0
    assert await waits.effect(held.execution_id, "go", anew) == SATISFIED


async def test_suspending_without_a_signing_key_is_refused(keyless: Any, clock: Any) -> None:
    play = Play(keyless, clock)
    held = await play.claimed()

    async with play.refused(errors.InvalidInput, "hmac_secret_not_initialized"):
        await keyless.suspend(held.handle, Waits(play).args())


async def test_a_suspend_that_was_satisfied_before_it_began_leaves_no_wait_behind(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e, t = held.execution_id, play.now
    pending = await play.engine.create_waitpoint(held.handle, "kp", 60_000)
    await waits.effect(e, "go", pending)
    timed: dict[str, Any] = {"timeout_at": t + 1000, "timeout_behavior": TimeoutBehavior.FAIL}

    answer = await play.engine.suspend(
        held.handle, waits.args(Single("kp"), UsePendingWaitpoint(pending.waitpoint_id), **timed)
    )

    assert isinstance(answer, ConditionAlreadySatisfied)
    record = await play.engine.describe_suspension(e)
    assert record is not None
    assert (record.satisfied_at, record.closed_at, record.close_reason) == (t, t, "resumed")
    assert (await play.engine.list_suspended(DEFAULT_PARTITION)).entries == []
    play.clock.now = t + 1000
    async with play.untouched():
        assert (await play.engine.sweep_once("suspension_timeout")).processed == 0
    assert isinstance(await play.engine.suspend(held.handle, waits.args()), Suspended)
