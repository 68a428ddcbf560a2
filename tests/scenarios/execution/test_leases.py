"""EX-032 to EX-039: leases are renewed, expire and are revoked; fence and epoch."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.engine.operations import reads
from flowfabric.engine.operations.pages import HistoryEntry
from flowfabric.handles import HandleKind
from flowfabric.model.answers.execution import (
    Cancelled,
    Claimed,
    MarkedExpired,
    NothingToDo,
    ProgressNoted,
    Renewed,
    RetryScheduled,
    Revoked,
)
from flowfabric.model.states import AttemptType
from flowfabric.rules.execution.fences import Fence
from tests.scenarios.env import (
    ACTIVE,
    EXPIRED_LEASE,
    LEASE_MS,
    REVOKED_LEASE,
    WAITING,
    Env,
    fence_of,
    lease_fields,
    lease_operations,
)
from tests.scenarios.scheduling.test_grants import MISSING

OTHER = "99999999-9999-4999-8999-999999999999"


@pytest.mark.spec("EX-032")
async def test_a_renewal_extends_or_shortens_the_lease(env: Env) -> None:
    claim, e = await env.create_claimed()
    t = env.now
    before = await env.core(e)

    env.clock.now = t + 10_000
    assert await env.engine.renew(claim.handle, lease_ttl_ms=30_000) == Renewed(t + 40_000, 1)

    assert await env.core(e) == before | {
        "lease_expires_at": t + 40_000,
        "lease_renewal_deadline": t + 30_000,
        "lease_last_renewed_at": t + 10_000,
        "last_mutation_at": t + 10_000,
    }
    feed = await env.lease_feed(e)
    assert [(event.variant, event.at, event.lease_id, event.worker_instance_id) for event in feed] == [
        ("Acquired", t, claim.lease_id, "wa-1"),
        ("Renewed", t + 10_000, claim.lease_id, "wa-1"),
    ]
    env.clock.now = t + 11_000
    assert await env.engine.renew(claim.handle, lease_ttl_ms=1000) == Renewed(t + 12_000, 1)
    assert (await env.core(e))["lease_expires_at"] == t + 12_000
    assert await env.lease_events(e) == ["acquired"], "renewals are on the feed only"


@pytest.mark.spec("EX-032")
async def test_a_renewal_by_handle_uses_the_ttl_of_the_claim(env: Env) -> None:
    claim = await env.create_and_claim(ttl=7000)
    env.clock.advance_ms(6999)

    assert await env.engine.renew(claim.handle) == Renewed(env.now + 7000, 1)
    env.clock.advance_ms(6999)
    [renewed] = await env.engine.renew_many([claim.handle])
    assert renewed == Renewed(env.now + 7000, 1)


@pytest.mark.spec("EX-032")
async def test_a_lease_is_renewed_by_its_fence(env: Env) -> None:
    claim = await env.create_and_claim()
    env.clock.advance_ms(10)

    answer = await env.engine.renew(
        execution_id=claim.execution_id, attempt_index=0, fence=fence_of(claim), lease_ttl_ms=500
    )

    assert answer == Renewed(env.now + 500, 1)


async def test_renewals_do_not_displace_other_lease_history_entries(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "MAX_HISTORY_EVENTS", 2)
    claim = await env.create_and_claim()
    for _ in range(3):
        await env.engine.renew(claim.handle)

    assert await env.lease_events(claim.execution_id) == ["acquired"]
    await env.engine.complete(claim.handle)
    assert await env.lease_events(claim.execution_id) == ["acquired", "released completed"]


@pytest.mark.spec("EX-033")
async def test_a_renewal_at_the_expiry_instant_is_refused_and_marks_the_lease_expired(env: Env) -> None:
    claim, e = await env.create_claimed()
    before = await env.core(e)
    env.clock.advance_ms(LEASE_MS - 1)
    await env.engine.renew(claim.handle, lease_ttl_ms=1)
    env.clock.advance_ms(1)

    with pytest.raises(errors.LeaseExpired):
        await env.engine.renew(claim.handle, lease_ttl_ms=LEASE_MS)

    assert await env.vector(e) == EXPIRED_LEASE
    core = await env.core(e)
    assert core["blocking_detail"] == "lease expired, awaiting reclaim"
    assert core["lease_expired_at"] == core["last_mutation_at"] == env.now
    kept = ("current_lease_id", "current_lease_epoch", "current_worker_id", "current_worker_instance_id")
    assert [core[name] for name in kept] == [before[name] for name in kept]
    assert core["lease_expires_at"] == env.now
    entries = await env.lease_history(e)
    assert entries[1:] == [HistoryEntry("expired", env.now, lease_fields(claim))]
    env.clock.advance_ms(5)
    async with env.refused(errors.LeaseExpired):
        await env.engine.renew(claim.handle, lease_ttl_ms=LEASE_MS)


@pytest.mark.spec("EX-033")
async def test_a_clock_that_goes_back_does_not_revive_an_expired_lease(env: Env) -> None:
    claim = await env.create_and_claim()
    env.clock.advance_ms(LEASE_MS)
    await env.engine.mark_lease_expired_if_due(claim.execution_id)
    env.clock.advance_ms(-LEASE_MS // 2)

    for late in (env.engine.renew, env.engine.progress, env.engine.complete):
        async with env.refused(errors.LeaseExpired):
            await late(claim.handle)


@pytest.mark.spec("EX-034")
async def test_a_renewal_requires_the_complete_and_current_fence(env: Env) -> None:
    claim, e = await env.create_claimed()
    fence = fence_of(claim)

    async def renew(fence: Fence, index: int = 0, source: str | None = None) -> Any:
        return await env.engine.renew(
            execution_id=e, attempt_index=index, fence=fence, lease_ttl_ms=LEASE_MS, source=source
        )

    for source in (None, "operator_override"):
        async with env.refused(errors.InvalidInput, "fence_required"):
            await renew(Fence(), source=source)
    for partial in ({"attempt_id": None}, {"lease_id": None}, {"lease_epoch": None}):
        async with env.refused(errors.InvalidInput, "partial_fence_triple"):
            await renew(msgspec.structs.replace(fence, **partial))
    for wrong in ({"attempt_id": OTHER}, {"lease_id": OTHER}, {"lease_epoch": 2}, {"lease_epoch": 2**63}):
        async with env.refused(errors.StaleLease):
            await renew(msgspec.structs.replace(fence, **wrong))
    async with env.refused(errors.StaleLease):
        await renew(fence, index=1)
    assert (await renew(fence)).lease_epoch == 1


@pytest.mark.spec("EX-034")
async def test_a_renewal_reports_a_missing_execution_before_it_checks_the_fence(env: Env) -> None:
    for fence in (Fence(), Fence(lease_epoch=1), Fence(OTHER, 1, OTHER)):
        async with env.refused(errors.NotFound, entity="execution"):
            await env.engine.renew(execution_id=MISSING, attempt_index=0, fence=fence, lease_ttl_ms=LEASE_MS)
    async with env.refused(errors.InvalidInput):
        await env.engine.renew(execution_id=MISSING, attempt_index=0, fence=Fence(), lease_ttl_ms=0)


@pytest.mark.spec("EX-034")
async def test_a_lease_of_an_inactive_execution_cannot_be_renewed(env: Env) -> None:
    claim = await env.create_and_claim()
    await env.engine.complete(claim.handle)
    waiting = await env.create()

    facts: dict[str, Any] = {"terminal_outcome": "success", "lease_epoch": 1, "lifecycle_phase": "terminal"}
    async with env.refused(errors.ExecutionNotActive, **facts, attempt_id=claim.attempt_id):
        await env.engine.renew(claim.handle)
    facts = {"terminal_outcome": "none", "lease_epoch": 0, "lifecycle_phase": "runnable"}
    async with env.refused(errors.ExecutionNotActive, **facts, attempt_id=""):
        await env.engine.renew(
            execution_id=waiting, attempt_index=0, fence=Fence(OTHER, 0, OTHER), lease_ttl_ms=LEASE_MS
        )


@pytest.mark.spec("EX-035")
async def test_mark_lease_expired_if_due_reports_what_it_did(env: Env) -> None:
    engine = env.engine
    waiting = await env.create()
    revoked = await env.create_and_claim()
    await env.revoke_lease(revoked)
    _, e = await env.create_claimed()
    before = await env.core(e)

    async with env.unchanged():
        assert await engine.mark_lease_expired_if_due(MISSING) == NothingToDo("execution_not_found")
        assert await engine.mark_lease_expired_if_due(waiting) == NothingToDo("not_active")
        env.clock.advance_ms(LEASE_MS - 1)
        assert await engine.mark_lease_expired_if_due(e) == NothingToDo("not_yet_expired")
    env.clock.advance_ms(1)
    assert await engine.mark_lease_expired_if_due(e) == MarkedExpired(e)

    assert await env.core(e) == before | {
        "ownership_state": "lease_expired_reclaimable",
        "blocking_reason": "waiting_for_worker",
        "attempt_state": "attempt_interrupted",
        "blocking_detail": "lease expired, awaiting reclaim",
        "lease_expired_at": env.now,
        "last_mutation_at": env.now,
    }
    async with env.unchanged():
        assert await engine.mark_lease_expired_if_due(e) == NothingToDo("already_expired")
        assert await engine.mark_lease_expired_if_due(revoked.execution_id) == NothingToDo("already_revoked")
        assert (await engine.sweep_once("lease_expiry")).processed == 0


@pytest.mark.spec("EX-035")
async def test_the_lease_expiry_sweep_marks_expired_leases_only(env: Env) -> None:
    expired, renewed = await env.create_and_claim(), await env.create_and_claim()
    assert await env.sweep("lease_expiry", after_ms=LEASE_MS - 1) == 0
    await env.engine.renew(renewed.handle)
    env.clock.advance_ms(1)

    assert await env.sweep("lease_expiry") == 1

    assert await env.vector(expired.execution_id) == EXPIRED_LEASE
    assert await env.vector(renewed.execution_id) == ACTIVE


@pytest.mark.spec("EX-037")
async def test_progress_updates_change_only_the_progress_fields(env: Env) -> None:
    claim, e = await env.create_claimed()
    before, events = await env.core(e), (await env.dump())["events"]

    core: dict[str, Any] = {}
    for pct, message in ((40, "half"), (None, "later"), (90, None), (None, ""), (None, None)):
        env.clock.advance_ms(10)
        assert await env.engine.progress(claim.handle, pct=pct, message=message) == ProgressNoted(e)
        core = await env.core(e)
        assert core["progress_updated_at"] == core["last_mutation_at"] == env.now

    noted = {"progress_pct": 90, "progress_message": "later"}
    times = {"progress_updated_at": env.now, "last_mutation_at": env.now}
    assert core == before | noted | times
    assert (await env.dump())["events"] == events
    for pct in (101, -1):
        async with env.refused(errors.InvalidInput):
            await env.engine.progress(claim.handle, pct=pct)
    wrong = Fence(claim.lease_id, 2, claim.attempt_id)
    async with env.refused(errors.StaleLease):
        await env.engine.update_progress(e, fence=wrong, pct=1)
    other_attempt = Fence(claim.lease_id, 1, OTHER)
    assert await env.engine.update_progress(e, fence=other_attempt, pct=91) == ProgressNoted(e)


@pytest.mark.spec("EX-037")
async def test_progress_without_a_live_lease_is_refused_and_writes_nothing(env: Env) -> None:
    claim = await env.create_and_claim()
    waiting = await env.create()
    async with env.refused(errors.ExecutionNotActive, lifecycle_phase="runnable", terminal_outcome="none"):
        await env.engine.update_progress(waiting, fence=fence_of(claim), pct=1)
    async with env.refused(errors.NotFound, entity="execution"):
        await env.engine.update_progress(MISSING, fence=fence_of(claim), pct=1)
    env.clock.advance_ms(LEASE_MS)

    async with env.refused(errors.LeaseExpired):
        await env.engine.progress(claim.handle, pct=50)

    assert await env.vector(claim.execution_id) == ACTIVE


@pytest.mark.spec("EX-038")
async def test_a_revoked_lease_refuses_its_holder(env: Env) -> None:
    engine = env.engine
    claim, e = await env.create_claimed()
    before = await env.core(e)
    env.clock.advance_ms(10)

    assert await engine.revoke_lease(e, reason="bad node") == Revoked(claim.lease_id, 1)

    assert await env.vector(e) == REVOKED_LEASE
    removed = {"lease_expires_at", "lease_renewal_deadline"}
    changed = {
        "ownership_state": "lease_revoked",
        "blocking_reason": "waiting_for_worker",
        "attempt_state": "attempt_interrupted",
        "blocking_detail": "lease revoked: bad node",
        "lease_revoked_at": env.now,
        "lease_revoke_reason": "bad node",
        "last_mutation_at": env.now,
    }
    assert await env.core(e) == {name: value for name, value in before.items() if name not in removed} | changed
    assert (await env.lease_history(e))[1:] == [
        HistoryEntry("revoked", env.now, lease_fields(claim) | {"reason": "bad node"})
    ]
    assert [(event.variant, event.revoked_by) for event in await env.lease_feed(e)] == [
        ("Acquired", None),
        ("Revoked", "operator"),
    ]
    for call in lease_operations(engine, claim.handle, env.now).values():
        async with env.refused(errors.LeaseRevoked):
            await call()
    async with env.refused(errors.LeaseRevoked):
        await engine.cancel_execution(e, source="lease_holder", fence=fence_of(claim))
    async with env.refused(errors.ExecutionNotLeaseable):
        await env.claim(e)
    env.clock.advance_ms(LEASE_MS)
    assert (await engine.list_expired_leases(as_of=env.now)).entries == []
    assert (await env.attempt(e, 0)).attempt_state == "started"


@pytest.mark.spec("EX-038")
@pytest.mark.parametrize("action", ["reclaim", "takeover", "cancel", "expire"])
async def test_a_revoked_execution_can_be_reclaimed_cancelled_or_expired(env: Env, action: str) -> None:
    claim, e = await env.create_claimed()
    await env.revoke_lease(claim)

    match action:
        case "reclaim":
            assert (await env.grant_and_reclaim(e)).lease_epoch == 2
        case "takeover":
            takeover = await env.claim_existing("wb")
            assert (takeover.execution_id, takeover.lease_epoch, takeover.handle.kind) == (e, 2, HandleKind.RECLAIMED)
        case "cancel":
            assert await env.engine.cancel_execution(e) == Cancelled(e)
        case _:
            await env.engine.expire_execution(e)
    assert not {"lease_revoked_at", "lease_revoke_reason", "blocking_detail"} & set(await env.core(e))


@pytest.mark.spec("EX-038")
async def test_revoke_lease_reports_what_it_did(env: Env) -> None:
    engine = env.engine
    claim, e = await env.create_claimed()
    waiting = await env.create()

    async with env.refused(errors.NotFound, entity="execution"):
        await engine.revoke_lease(MISSING)
    async with env.unchanged():
        assert await engine.revoke_lease(waiting) == NothingToDo("no_active_lease")
        other = await engine.revoke_lease(e, worker_instance_id="wb-1", expected_lease_id=OTHER)
        assert other == NothingToDo("different_worker_instance_id")
    async with env.refused(errors.ExecutionNotActive, lifecycle_phase="runnable"):
        await engine.revoke_lease(waiting, worker_instance_id="wa-1")
    async with env.refused(errors.StaleLease):
        await engine.revoke_lease(e, worker_instance_id="wa-1", expected_lease_id=OTHER)
    answer = await engine.revoke_lease(e, worker_instance_id="wa-1", expected_lease_id=claim.lease_id)
    assert answer == Revoked(claim.lease_id, 1)
    async with env.unchanged():
        assert await engine.revoke_lease(e) == NothingToDo("already_revoked")
    expired = await env.create_and_claim()
    await env.expire_lease(expired)
    async with env.unchanged():
        assert await engine.revoke_lease(expired.execution_id) == NothingToDo("already_expired")


@pytest.mark.spec("EX-039")
async def test_the_lease_epoch_grows_by_one_with_every_claim(env: Env) -> None:
    engine = env.engine
    e = await env.create(policy={"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}})
    epochs: list[int] = []
    acquired: list[Claimed] = []

    async def seen(claimed: Claimed | None = None) -> None:
        epochs.append((await env.core(e))["current_lease_epoch"])
        if claimed is not None:
            acquired.append(claimed)

    await env.grant(e)
    await seen(await env.claim(e))
    assert isinstance(await engine.fail(acquired[-1].handle, reason="flaky"), RetryScheduled)
    await seen()
    await env.promote(e)
    await seen(await env.grant_and_claim(e))
    await env.delay(acquired[-1])
    await seen()
    await env.promote(e)
    await seen(await env.grant_and_resume(e))
    await env.expire_lease(acquired[-1])
    await seen()
    await seen(await env.grant_and_reclaim(e, "wc"))
    await engine.complete(acquired[-1].handle)
    await seen()
    await engine.replay_execution(e)
    await seen()
    await seen(await env.grant_and_claim(e))

    assert epochs == [1, 1, 2, 2, 3, 3, 4, 4, 4, 5]
    assert [one.attempt_index for one in acquired] == [0, 1, 1, 2, 3]
    types = [AttemptType.INITIAL, AttemptType.RETRY, AttemptType.RETRY, AttemptType.RECLAIM, AttemptType.REPLAY]
    assert [one.attempt_type for one in acquired] == types
    assert [one.handle.kind for one in acquired] == ["Fresh", "Fresh", "Resumed", "Reclaimed", "Fresh"]
    assert (await env.core(e))["total_attempt_count"] == 4
    assert [attempt.attempt_type for attempt in await engine.attempt_history(e)] == [types[0], types[1], *types[3:]]


async def test_the_lease_expiry_sweep_ignores_waiting_executions(env: Env) -> None:
    e = await env.create()
    env.clock.advance_ms(LEASE_MS)

    assert await env.sweep("lease_expiry") == 0
    assert await env.vector(e) == WAITING
