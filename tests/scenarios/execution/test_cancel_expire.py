"""EX-053 to EX-060: executions ended from outside, and by time."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.model.answers.execution import (
    AlreadyTerminal,
    Cancelled,
    Claimed,
    Completed,
    Expired,
    NotDue,
    Promotion,
)
from flowfabric.model.states import AttemptRecordState
from flowfabric.model.suspension import TimeoutBehavior
from flowfabric.rules.execution.lease import Fence
from tests.scenarios.execution.test_finish import retries
from tests.scenarios.functions import Function
from tests.scenarios.play import ACTIVE, LEASE_MS, Play, fence_of, lease_bound, terminal
from tests.scenarios.scheduling.test_grants import MISSING, requires
from tests.scenarios.waits import Waits


async def waiting(play: Play) -> str:
    return await play.create()


async def delayed(play: Play) -> str:
    return await play.create(delay_until=play.now + 5000)


async def blocked(play: Play) -> str:
    e = await play.create()
    await play.engine.block_execution_for_admission(e, reason="waiting_for_quota", detail="full")
    return e


async def route_blocked(play: Play) -> str:
    e = await play.create(policy=requires("gpu"))
    await play.engine.block_route(e)
    return e


async def granted(play: Play) -> str:
    e = await play.create()
    await play.grant(e)
    return e


NEVER_CLAIMED = [waiting, delayed, blocked, route_blocked, granted]


@pytest.mark.spec("EX-053")
@pytest.mark.parametrize("state", NEVER_CLAIMED)
async def test_cancel_a_never_claimed_execution(play: Play, state: Any) -> None:
    e = await state(play)
    play.clock.advance_ms(10)

    assert await play.engine.cancel_execution(e, reason="no longer needed") == Cancelled(e)

    assert await play.vector(e) == terminal("cancelled", "pending_first_attempt")
    core = await play.core(e)
    assert (core["cancellation_reason"], core["cancelled_by"]) == ("no longer needed", "operator_override")
    assert core["completed_at"] == play.now
    assert not {"blocking_detail", "delay_until", "failure_reason"} & set(core)
    assert await play.engine.attempt_history(e) == []
    assert await play.history(e) == []
    assert await play.outcomes() == ["cancelled"]
    assert await play.eligible() == []
    play.clock.advance_ms(5000)
    async with play.untouched():
        assert await play.pull(can={"gpu"}) is None
        assert (await play.engine.sweep_once("delayed_promoter")).processed == 0


@pytest.mark.spec("EX-053")
async def test_no_fence_is_needed_whatever_the_source(play: Play) -> None:
    for source, by in (("worker", "worker"), ("flow_cascade", "flow_cascade"), ("cron 7", "cron 7"), ("", None)):
        e = await play.create()
        assert await play.engine.cancel_execution(e, source=source) == Cancelled(e)
        assert (await play.core(e))["cancelled_by"] == (by or e)
    async with play.refused(errors.NotFound, entity="execution"):
        await play.engine.cancel_execution(MISSING)


@pytest.mark.spec("EX-054")
async def test_operator_cancels_an_active_execution(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    play.clock.advance_ms(10)

    assert await play.engine.cancel_execution(e, reason="stop") == Cancelled(e)

    assert await play.vector(e) == terminal("cancelled")
    attempt = await play.attempt(e, 0)
    assert attempt.attempt_state is AttemptRecordState.ENDED_CANCELLED
    assert (attempt.failure_reason, attempt.ended_at) == ("cancelled: stop", play.now)
    assert await play.told(e) == ["acquired", "released cancelled"]
    assert [(news.variant, news.revoked_by) for news in await play.lease_feed(e)][1:] == [("Revoked", "operator")]
    assert await play.outcomes() == ["cancelled"]
    facts: dict[str, Any] = {"terminal_outcome": "cancelled", "lease_epoch": 1, "lifecycle_phase": "terminal"}
    for name, call in lease_bound(play.engine, held.handle, play.now).items():
        if name != "cancel":
            async with play.refused(errors.ExecutionNotActive, **facts, attempt_id=held.attempt_id):
                await call()


@pytest.mark.spec("EX-054")
async def test_whoever_is_not_the_system_needs_the_fence(play: Play) -> None:
    engine = play.engine
    held = await play.claimed()
    e, other = held.execution_id, "99999999-9999-4999-8999-999999999999"

    for fence in (Fence(), Fence(lease_id=held.lease_id), Fence(lease_epoch=1, attempt_id=held.attempt_id)):
        async with play.refused(errors.InvalidInput, "fence_required"):
            await engine.cancel_execution(e, source="lease_holder", fence=fence)
    for fence in (Fence(other, 1), Fence(held.lease_id, 2), Fence(held.lease_id, 1, other)):
        async with play.refused(errors.StaleLease):
            await engine.cancel_execution(e, source="lease_holder", fence=fence)
    play.clock.advance_ms(LEASE_MS)
    await engine.mark_lease_expired_if_due(e)
    fence = Fence(held.lease_id, 1)
    assert await engine.cancel_execution(e, source="lease_holder", fence=fence) == Cancelled(e)
    assert (await play.core(e))["cancelled_by"] == "lease_holder"
    assert [(news.variant, news.revoked_by) for news in await play.lease_feed(e)][-1] == ("Revoked", "backend")


async def test_a_lease_that_a_timeout_of_the_system_cancels_is_the_reconciler_s_doing(play: Play) -> None:
    held = await play.claimed()

    await play.engine.cancel_execution(held.execution_id, reason="too late", source="system_timeout")

    told = [(news.variant, news.revoked_by) for news in await play.lease_feed(held.execution_id)]
    assert told[1:] == [("Revoked", "reconciler")]
    assert (await play.core(held.execution_id))["cancelled_by"] == "system_timeout"


@pytest.mark.spec("EX-055")
async def test_cancel_after_terminal(play: Play) -> None:
    engine = play.engine
    e = await play.create()
    await engine.cancel_execution(e, reason="a")
    play.clock.advance_ms(10)
    async with play.untouched():
        assert await engine.cancel_execution(e, reason="b") == Cancelled(e)
        assert await engine.cancel_execution(e, reason="b", source="worker") == Cancelled(e)
    assert (await play.core(e))["cancellation_reason"] == "a"

    held = await play.claimed()
    await engine.complete(held.handle)
    facts: dict[str, Any] = {"terminal_outcome": "success", "lease_epoch": 1, "lifecycle_phase": "terminal"}
    async with play.refused(errors.ExecutionNotActive, **facts, attempt_id=held.attempt_id):
        await engine.cancel_execution(held.execution_id)


@pytest.mark.spec("EX-056")
async def test_cancel_while_waiting_for_retry(play: Play) -> None:
    held = await play.claimed(policy=retries(1))
    e = held.execution_id
    await play.engine.fail(held.handle, reason="flaky")

    await play.engine.cancel_execution(e)

    assert await play.vector(e) == terminal("cancelled")
    [attempt] = await play.engine.attempt_history(e)
    assert (attempt.attempt_state, attempt.failure_reason) == (AttemptRecordState.ENDED_FAILURE, "flaky")
    assert await play.told(e) == ["acquired", "released failed_retry_scheduled"]
    play.clock.advance_ms(500)
    async with play.untouched():
        assert await play.engine.promote_delayed(e) is Promotion.NOT_RUNNABLE
        assert await play.engine.promote_delayed(MISSING) is Promotion.NOT_FOUND


@pytest.mark.spec("EX-056")
@pytest.mark.parametrize("end", ["cancel", "expire"])
async def test_an_interrupted_attempt_ends_with_its_execution(play: Play, end: str) -> None:
    held = await play.claimed()
    e = held.execution_id
    await play.delayed(held)
    play.clock.advance_ms(10)

    if end == "cancel":
        await play.engine.cancel_execution(e, reason="stop")
    else:
        await play.engine.expire_execution(e, "execution_deadline")

    assert await play.vector(e) == terminal("cancelled" if end == "cancel" else "expired")
    [attempt] = await play.engine.attempt_history(e)
    ended = AttemptRecordState.ENDED_CANCELLED if end == "cancel" else AttemptRecordState.ENDED_FAILURE
    reason = "cancelled: stop" if end == "cancel" else "execution_deadline"
    assert (attempt.attempt_state, attempt.failure_reason, attempt.ended_at) == (ended, reason, play.now)
    assert await play.told(e) == ["acquired", "released worker_delay"]


@pytest.mark.spec("EX-057")
async def test_handle_cancel_replay(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    assert await play.engine.cancel(held.handle, reason="mine") == Cancelled(e)
    assert (await play.core(e))["cancelled_by"] == "worker"
    async with play.untouched():
        assert await play.engine.cancel(held.handle, reason="again") == Cancelled(e)

    old = await play.claimed()
    await play.expired(old)
    new = await play.reclaimed(old.execution_id)
    async with play.refused(errors.StaleLease):
        await play.engine.cancel(old.handle)
    await play.engine.complete(new.handle)
    async with play.refused(errors.ExecutionNotActive, terminal_outcome="success", lease_epoch=2):
        await play.engine.cancel(old.handle)


@pytest.mark.spec("EX-057")
async def test_an_old_handle_cancels_what_is_cancelled_already(play: Play) -> None:
    old = await play.claimed()
    await play.expired(old)
    new = await play.reclaimed(old.execution_id)
    await play.engine.cancel(new.handle, reason="theirs")

    async with play.untouched():
        assert await play.engine.cancel(old.handle, reason="mine") == Cancelled(old.execution_id)


@pytest.mark.spec("EX-058")
@pytest.mark.parametrize("lease", ["live", "expired", "revoked"])
async def test_expire_an_active_execution(play: Play, lease: str) -> None:
    held = await play.claimed(policy=retries(3))
    e = held.execution_id
    if lease == "expired":
        await play.expired(held)
    elif lease == "revoked":
        await play.revoked(held)
    before = await play.told(e)
    play.clock.advance_ms(10)

    assert await play.engine.expire_execution(e) == Expired(e)

    assert await play.vector(e) == terminal("expired")
    core = await play.core(e)
    assert (core["failure_reason"], core["completed_at"], core["retry_count"]) == ("attempt_timeout", play.now, 0)
    assert not {"lease_expired_at", "lease_revoked_at", "lease_revoke_reason", "lease_expires_at"} & set(core)
    attempt = await play.attempt(e, 0)
    assert attempt.attempt_state is AttemptRecordState.ENDED_FAILURE
    assert (attempt.failure_reason, attempt.ended_at) == ("attempt_timeout", play.now)
    assert await play.told(e) == [*before, "released expired:attempt_timeout"]
    assert (await play.lease_feed(e))[-1].variant == "Expired"
    assert await play.outcomes() == ["expired"]
    async with play.refused(errors.ExecutionNotActive, terminal_outcome="expired", lease_epoch=1):
        await play.engine.complete(held.handle)
    async with play.untouched():
        assert await play.engine.expire_execution(e) == AlreadyTerminal(e)
        assert await play.engine.expire_execution(MISSING) == AlreadyTerminal(MISSING)


@pytest.mark.spec("EX-059")
@pytest.mark.parametrize("state", NEVER_CLAIMED)
@pytest.mark.parametrize("named", ["argument", "policy"])
async def test_expire_a_waiting_execution(play: Play, state: Any, named: str) -> None:
    t = play.now + 10_000
    create = play.create

    async def with_deadline(**given: Any) -> Any:
        if named == "argument":
            return await create(execution_deadline_at=t, **given)
        policy = {"timeout_policy": {"execution_deadline_ms": 10_000}} | given.pop("policy", {})
        return await create(policy=policy, **given)

    play.create = with_deadline  # type: ignore[method-assign]
    e = await state(play)
    assert (await play.core(e))["execution_deadline_at"] == t
    play.clock.now = t - 1
    assert (await play.engine.sweep_once("execution_deadline")).processed == 0
    play.clock.now = t

    assert (await play.engine.sweep_once("execution_deadline")).processed == 1

    assert await play.vector(e) == terminal("expired", "pending_first_attempt")
    core = await play.core(e)
    assert (core["failure_reason"], core["completed_at"]) == ("execution_deadline", t)
    assert await play.history(e) == []
    assert await play.outcomes() == ["expired"]


@pytest.mark.spec("EX-059")
async def test_a_deadline_covers_retries_and_delays(play: Play) -> None:
    t = play.now + 10_000
    held = await play.claimed(policy=retries(3, type="fixed", delay_ms=60_000), execution_deadline_at=t)
    await play.engine.fail(held.handle, reason="flaky")
    parked = await play.claimed(execution_deadline_at=t)
    await play.delayed(parked, 60_000)
    named = await play.claimed(claim={"execution_deadline_at": t})
    play.clock.now = t

    assert (await play.engine.sweep_once("execution_deadline")).processed == 3

    for one in (held, parked, named):
        assert await play.vector(one.execution_id) == terminal("expired")
    assert (await play.told(named.execution_id))[-1] == "released expired:execution_deadline"


async def timed(play: Play, where: str = "claim", timeout: int = 1000, **policy: Any) -> Claimed:
    """A claimed execution with an attempt timeout."""
    if where == "claim":
        return await play.claimed(policy=policy or None, claim={"attempt_timeout_ms": timeout})
    return await play.claimed(policy=policy | {"timeout_policy": {"attempt_timeout_ms": timeout}})


async def times_out_at(play: Play, e: str, instant: int) -> None:
    """The sweep finds nothing a millisecond before the instant, and ends the execution at it."""
    assert (await play.core(e))["attempt_timeout_at"] == instant
    play.clock.now = instant - 1
    assert (await play.engine.sweep_once("attempt_timeout")).processed == 0
    play.clock.now = instant
    assert (await play.engine.sweep_once("attempt_timeout")).processed == 1
    assert await play.vector(e) == terminal("expired")
    assert (await play.core(e))["failure_reason"] == "attempt_timeout"


@pytest.mark.spec("EX-060")
@pytest.mark.parametrize("where", ["claim", "policy"])
async def test_attempt_timeout_arming(play: Play, where: str) -> None:
    held = await timed(play, where, **retries(3))

    await times_out_at(play, held.execution_id, play.now + 1000)


@pytest.mark.spec("EX-060")
async def test_a_retry_disarms_the_timer(play: Play) -> None:
    t = play.now
    held = await timed(play, "policy", **retries(3, type="fixed", delay_ms=60_000))
    play.clock.now = t + 500
    await play.engine.fail(held.handle, reason="flaky")
    play.clock.now = t + 1000
    async with play.untouched():
        assert (await play.engine.sweep_once("attempt_timeout")).processed == 0
    await play.promoted(held.execution_id)
    await play.claimed_again(held.execution_id)

    await times_out_at(play, held.execution_id, play.now + 1000)


@pytest.mark.spec("EX-060")
@pytest.mark.parametrize("road", ["named", "stored", "pull", "operator", "longer"])
async def test_a_resumed_attempt_has_the_time_it_had_left(play: Play, road: str) -> None:
    t = play.now
    held = await timed(play)
    e = held.execution_id
    play.clock.now = t + 400
    await play.delayed(held, 5000)
    assert "attempt_timeout_at" not in await play.core(e)
    play.clock.now = t + 1000
    assert (await play.engine.sweep_once("attempt_timeout")).processed == 0
    await play.promoted(e)
    play.clock.advance_ms(77)
    u = play.now

    match road:
        case "named":
            await play.resumed(e, remaining_attempt_timeout_ms=600)
        case "stored":
            await play.resumed(e)
        case "pull":
            assert await play.pull("wb") is not None
        case "operator":
            await play.engine.issue_grant_and_claim(e, lane_id="default", lease_duration_ms=30_000)
        case _:
            await play.resumed(e, remaining_attempt_timeout_ms=2000)

    await times_out_at(play, e, u + (2000 if road == "longer" else 600))


@pytest.mark.spec("EX-060")
@pytest.mark.parametrize("wait", ["suspend", "park"])
async def test_an_attempt_that_waited_has_the_time_it_had_left(play: Play, waits: Waits, wait: str) -> None:
    t = play.now
    held = await timed(play)
    e = held.execution_id
    play.clock.now = t + 400
    if wait == "suspend":
        await waits.suspend(held, timeout_at=t + 5000, timeout_behavior=TimeoutBehavior.AUTO_RESUME)
    else:
        await Function(play, waits, e, held).timer("nap", 4600)
        await play.engine.park(held.handle, ("nap",))
    await waits.time_out(t + 5000)

    await play.resumed(e)

    await times_out_at(play, e, t + 5000 + 600)


@pytest.mark.parametrize("reason", ["sibling_quorum_satisfied", "sibling_quorum_impossible"])
@pytest.mark.parametrize("source", ["flow_cascade", "system_timeout", "somebody"])
async def test_who_cancelled_is_kept_though_the_reason_is_one_of_the_engine_s_own(
    play: Play, reason: str, source: str
) -> None:
    e = await play.create()

    await play.engine.cancel_execution(e, reason=reason, source=source)

    core = await play.core(e)
    assert (core["cancelled_by"], core["cancellation_reason"]) == (source, reason)


@pytest.mark.spec("EX-060")
@pytest.mark.parametrize("late_ms", [0, 250])
async def test_time_that_has_run_out_is_not_forgotten_when_the_work_is_put_away(play: Play, late_ms: int) -> None:
    held = await timed(play)
    e = held.execution_id
    play.clock.advance_ms(1000 + late_ms)
    await play.delayed(held, 5000)
    await play.promoted(e)

    await play.resumed(e)

    await times_out_at(play, e, play.now + 1)


@pytest.mark.spec("EX-060")
async def test_a_block_does_not_forget_the_time_that_was_left(play: Play) -> None:
    t = play.now
    held = await timed(play)
    e = held.execution_id
    play.clock.now = t + 400
    await play.engine.wait_children(held.handle)
    await play.engine.block_execution_for_admission(e, reason="waiting_for_quota")
    await play.engine.unblock_execution(e)

    await play.resumed(e)

    await times_out_at(play, e, t + 400 + 600)


@pytest.mark.spec("EX-060")
@pytest.mark.parametrize("where", ["policy", "claim"])
async def test_a_takeover_has_the_whole_time_again(play: Play, where: str) -> None:
    held = await timed(play, where, timeout=40_000)
    await play.expired(held)

    again = await play.reclaimed(held.execution_id)

    assert again.lease_expires_at == play.now + LEASE_MS
    await times_out_at(play, held.execution_id, play.now + 40_000)


@pytest.mark.spec("EX-060")
@pytest.mark.parametrize("meanwhile", ["complete", "retry"])
async def test_a_timer_that_was_listed_but_is_gone_does_nothing(play: Play, meanwhile: str) -> None:
    held = await timed(play, "policy", **retries(3))
    e = held.execution_id
    play.clock.advance_ms(1000)

    async def finish() -> None:
        if meanwhile == "complete":
            await play.engine.complete(held.handle)
        else:
            await play.engine.fail(held.handle, reason="flaky")

    play.store.after_due = finish
    done = await play.engine.sweep_once("attempt_timeout")

    assert (done.processed, done.errors) == (0, 0)
    assert (await play.vector(e)).startswith("terminal/" if meanwhile == "complete" else "runnable/")
    async with play.untouched():
        late = await play.engine.expire_if_due(e, "attempt_timeout")
        assert late == (AlreadyTerminal(e) if meanwhile == "complete" else NotDue(e))


@pytest.mark.spec("EX-060")
async def test_no_time_arms_nothing(play: Play) -> None:
    for held in (await timed(play, timeout=0), await timed(play, "policy", timeout=0), await play.claimed()):
        assert "attempt_timeout_at" not in await play.core(held.execution_id)
    play.clock.advance_ms(10)
    assert (await play.engine.sweep_once("attempt_timeout")).processed == 0


async def test_an_attempt_in_time_ends_as_its_holder_says(play: Play) -> None:
    held = await timed(play)
    assert await play.vector(held.execution_id) == ACTIVE
    play.clock.advance_ms(999)

    assert await play.engine.complete(execution_id=held.execution_id, fence=fence_of(held)) == Completed(
        held.execution_id
    )
