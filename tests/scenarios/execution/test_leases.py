"""EX-032 to EX-039: leases are renewed, lapse, are taken away; the fence and the epoch hold."""

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
from flowfabric.rules.execution.lease import Fence
from tests.scenarios.play import (
    ACTIVE,
    EXPIRED_LEASE,
    LEASE_MS,
    REVOKED_LEASE,
    WAITING,
    Play,
    fence_of,
    lease_bound,
)
from tests.scenarios.scheduling.test_grants import MISSING

OTHER = "99999999-9999-4999-8999-999999999999"


def identity(held: Claimed, worker: str = "wa") -> dict[str, Any]:
    """What the history says of whose lease it was."""
    return {
        "lease_id": held.lease_id,
        "lease_epoch": held.lease_epoch,
        "attempt_id": held.attempt_id,
        "attempt_index": held.attempt_index,
        "worker_id": worker,
        "worker_instance_id": f"{worker}-1",
    }


@pytest.mark.spec("EX-032")
async def test_renew_extends_and_may_shorten(play: Play) -> None:
    held = await play.claimed()
    e, t = held.execution_id, play.now
    before = await play.core(e)

    play.clock.now = t + 10_000
    assert await play.engine.renew(held.handle, lease_ttl_ms=30_000) == Renewed(t + 40_000, 1)

    assert await play.core(e) == before | {
        "lease_expires_at": t + 40_000,
        "lease_renewal_deadline": t + 30_000,
        "lease_last_renewed_at": t + 10_000,
        "last_mutation_at": t + 10_000,
    }
    feed = await play.lease_feed(e)
    assert [(news.variant, news.at, news.lease_id, news.worker_instance_id) for news in feed] == [
        ("Acquired", t, held.lease_id, "wa-1"),
        ("Renewed", t + 10_000, held.lease_id, "wa-1"),
    ]
    play.clock.now = t + 11_000
    assert await play.engine.renew(held.handle, lease_ttl_ms=1000) == Renewed(t + 12_000, 1)
    assert (await play.core(e))["lease_expires_at"] == t + 12_000
    assert await play.told(e) == ["acquired"], "renewals are told in the feed only"


@pytest.mark.spec("EX-032")
async def test_a_handle_renews_for_its_own_length(play: Play) -> None:
    held = await play.claimed(ttl=7000)
    play.clock.advance_ms(6999)

    assert await play.engine.renew(held.handle) == Renewed(play.now + 7000, 1)
    play.clock.advance_ms(6999)
    [renewed] = await play.engine.renew_many([held.handle])
    assert renewed == Renewed(play.now + 7000, 1)


@pytest.mark.spec("EX-032")
async def test_a_named_lease_renews_like_a_handle(play: Play) -> None:
    held = await play.claimed()
    play.clock.advance_ms(10)

    answer = await play.engine.renew(
        execution_id=held.execution_id, attempt_index=0, fence=fence_of(held), lease_ttl_ms=500
    )

    assert answer == Renewed(play.now + 500, 1)


async def test_however_often_a_lease_is_renewed_its_history_keeps_the_rest(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "MAX_HISTORY_EVENTS", 2)
    held = await play.claimed()
    for _ in range(3):
        await play.engine.renew(held.handle)

    assert await play.told(held.execution_id) == ["acquired"]
    await play.engine.complete(held.handle)
    assert await play.told(held.execution_id) == ["acquired", "released completed"]


@pytest.mark.spec("EX-033")
async def test_renew_at_the_exact_expiry_instant(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    before = await play.core(e)
    play.clock.advance_ms(LEASE_MS - 1)
    await play.engine.renew(held.handle, lease_ttl_ms=1)
    play.clock.advance_ms(1)

    with pytest.raises(errors.LeaseExpired):
        await play.engine.renew(held.handle, lease_ttl_ms=LEASE_MS)

    assert await play.vector(e) == EXPIRED_LEASE
    core = await play.core(e)
    assert core["blocking_detail"] == "lease expired, awaiting reclaim"
    assert core["lease_expired_at"] == core["last_mutation_at"] == play.now
    kept = ("current_lease_id", "current_lease_epoch", "current_worker_id", "current_worker_instance_id")
    assert [core[name] for name in kept] == [before[name] for name in kept]
    assert core["lease_expires_at"] == play.now
    entries = await play.history(e)
    assert entries[1:] == [HistoryEntry("expired", play.now, identity(held))]
    play.clock.advance_ms(5)
    async with play.refused(errors.LeaseExpired):
        await play.engine.renew(held.handle, lease_ttl_ms=LEASE_MS)


@pytest.mark.spec("EX-033")
async def test_a_clock_that_goes_back_revives_no_lease(play: Play) -> None:
    held = await play.claimed()
    play.clock.advance_ms(LEASE_MS)
    await play.engine.mark_lease_expired_if_due(held.execution_id)
    play.clock.advance_ms(-LEASE_MS // 2)

    for late in (play.engine.renew, play.engine.progress, play.engine.complete):
        async with play.refused(errors.LeaseExpired):
            await late(held.handle)


@pytest.mark.spec("EX-034")
async def test_renew_fence_requirements(play: Play) -> None:
    held = await play.claimed()
    e, fence = held.execution_id, fence_of(held)

    async def renew(fence: Fence, index: int = 0, source: str | None = None) -> Any:
        return await play.engine.renew(
            execution_id=e, attempt_index=index, fence=fence, lease_ttl_ms=LEASE_MS, source=source
        )

    for source in (None, "operator_override"):
        async with play.refused(errors.InvalidInput, "fence_required"):
            await renew(Fence(), source=source)
    for partial in ({"attempt_id": None}, {"lease_id": None}, {"lease_epoch": None}):
        async with play.refused(errors.InvalidInput, "partial_fence_triple"):
            await renew(msgspec.structs.replace(fence, **partial))
    for wrong in ({"attempt_id": OTHER}, {"lease_id": OTHER}, {"lease_epoch": 2}, {"lease_epoch": 2**63}):
        async with play.refused(errors.StaleLease):
            await renew(msgspec.structs.replace(fence, **wrong))
    async with play.refused(errors.StaleLease):
        await renew(fence, index=1)
    assert (await renew(fence)).lease_epoch == 1


@pytest.mark.spec("EX-034")
async def test_a_missing_execution_is_looked_for_before_the_fence(play: Play) -> None:
    for fence in (Fence(), Fence(lease_epoch=1), Fence(OTHER, 1, OTHER)):
        async with play.refused(errors.NotFound, entity="execution"):
            await play.engine.renew(execution_id=MISSING, attempt_index=0, fence=fence, lease_ttl_ms=LEASE_MS)
    async with play.refused(errors.InvalidInput):
        await play.engine.renew(execution_id=MISSING, attempt_index=0, fence=Fence(), lease_ttl_ms=0)


@pytest.mark.spec("EX-034")
async def test_what_is_not_active_cannot_be_renewed(play: Play) -> None:
    held = await play.claimed()
    await play.engine.complete(held.handle)
    waiting = await play.create()

    facts: dict[str, Any] = {"terminal_outcome": "success", "lease_epoch": 1, "lifecycle_phase": "terminal"}
    async with play.refused(errors.ExecutionNotActive, **facts, attempt_id=held.attempt_id):
        await play.engine.renew(held.handle)
    facts = {"terminal_outcome": "none", "lease_epoch": 0, "lifecycle_phase": "runnable"}
    async with play.refused(errors.ExecutionNotActive, **facts, attempt_id=""):
        await play.engine.renew(
            execution_id=waiting, attempt_index=0, fence=Fence(OTHER, 0, OTHER), lease_ttl_ms=LEASE_MS
        )


@pytest.mark.spec("EX-035")
async def test_mark_lease_expired_if_due_answers(play: Play) -> None:
    engine = play.engine
    waiting = await play.create()
    revoked = await play.claimed()
    await play.revoked(revoked)
    held = await play.claimed()
    e = held.execution_id
    before = await play.core(e)

    async with play.untouched():
        assert await engine.mark_lease_expired_if_due(MISSING) == NothingToDo("execution_not_found")
        assert await engine.mark_lease_expired_if_due(waiting) == NothingToDo("not_active")
        play.clock.advance_ms(LEASE_MS - 1)
        assert await engine.mark_lease_expired_if_due(e) == NothingToDo("not_yet_expired")
    play.clock.advance_ms(1)
    assert await engine.mark_lease_expired_if_due(e) == MarkedExpired(e)

    assert await play.core(e) == before | {
        "ownership_state": "lease_expired_reclaimable",
        "blocking_reason": "waiting_for_worker",
        "attempt_state": "attempt_interrupted",
        "blocking_detail": "lease expired, awaiting reclaim",
        "lease_expired_at": play.now,
        "last_mutation_at": play.now,
    }
    async with play.untouched():
        assert await engine.mark_lease_expired_if_due(e) == NothingToDo("already_expired")
        assert await engine.mark_lease_expired_if_due(revoked.execution_id) == NothingToDo("already_revoked")
        assert (await engine.sweep_once("lease_expiry")).processed == 0


@pytest.mark.spec("EX-035")
async def test_the_sweep_marks_what_lapsed_and_leaves_a_renewed_lease_alone(play: Play) -> None:
    lapsed, renewed = await play.claimed(), await play.claimed()
    play.clock.advance_ms(LEASE_MS - 1)
    assert (await play.engine.sweep_once("lease_expiry")).processed == 0
    await play.engine.renew(renewed.handle)
    play.clock.advance_ms(1)

    assert (await play.engine.sweep_once("lease_expiry")).processed == 1

    assert await play.vector(lapsed.execution_id) == EXPIRED_LEASE
    assert await play.vector(renewed.execution_id) == ACTIVE


@pytest.mark.spec("EX-037")
async def test_progress_updates(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    before, events = await play.core(e), (await play.everything())["events"]

    core: dict[str, Any] = {}
    for pct, message in ((40, "half"), (None, "later"), (90, None), (None, ""), (None, None)):
        play.clock.advance_ms(10)
        assert await play.engine.progress(held.handle, pct=pct, message=message) == ProgressNoted(e)
        core = await play.core(e)
        assert core["progress_updated_at"] == core["last_mutation_at"] == play.now

    noted = {"progress_pct": 90, "progress_message": "later"}
    times = {"progress_updated_at": play.now, "last_mutation_at": play.now}
    assert core == before | noted | times
    assert (await play.everything())["events"] == events
    for pct in (101, -1):
        async with play.refused(errors.InvalidInput):
            await play.engine.progress(held.handle, pct=pct)
    wrong = Fence(held.lease_id, 2, held.attempt_id)
    async with play.refused(errors.StaleLease):
        await play.engine.update_progress(e, fence=wrong, pct=1)
    other_attempt = Fence(held.lease_id, 1, OTHER)
    assert await play.engine.update_progress(e, fence=other_attempt, pct=91) == ProgressNoted(e)


@pytest.mark.spec("EX-037")
async def test_progress_is_refused_without_a_live_lease_and_marks_nothing(play: Play) -> None:
    held = await play.claimed()
    waiting = await play.create()
    async with play.refused(errors.ExecutionNotActive, lifecycle_phase="runnable", terminal_outcome="none"):
        await play.engine.update_progress(waiting, fence=fence_of(held), pct=1)
    async with play.refused(errors.NotFound, entity="execution"):
        await play.engine.update_progress(MISSING, fence=fence_of(held), pct=1)
    play.clock.advance_ms(LEASE_MS)

    async with play.refused(errors.LeaseExpired):
        await play.engine.progress(held.handle, pct=50)

    assert await play.vector(held.execution_id) == ACTIVE


@pytest.mark.spec("EX-038")
async def test_revoke(play: Play) -> None:
    engine = play.engine
    held = await play.claimed()
    e = held.execution_id
    before = await play.core(e)
    play.clock.advance_ms(10)

    assert await engine.revoke_lease(e, reason="bad node") == Revoked(held.lease_id, 1)

    assert await play.vector(e) == REVOKED_LEASE
    gone = {"lease_expires_at", "lease_renewal_deadline"}
    changed = {
        "ownership_state": "lease_revoked",
        "blocking_reason": "waiting_for_worker",
        "attempt_state": "attempt_interrupted",
        "blocking_detail": "lease revoked: bad node",
        "lease_revoked_at": play.now,
        "lease_revoke_reason": "bad node",
        "last_mutation_at": play.now,
    }
    assert await play.core(e) == {name: value for name, value in before.items() if name not in gone} | changed
    assert (await play.history(e))[1:] == [HistoryEntry("revoked", play.now, identity(held) | {"reason": "bad node"})]
    assert [(news.variant, news.revoked_by) for news in await play.lease_feed(e)] == [
        ("Acquired", None),
        ("Revoked", "operator"),
    ]
    for call in lease_bound(engine, held.handle, play.now).values():
        async with play.refused(errors.LeaseRevoked):
            await call()
    async with play.refused(errors.LeaseRevoked):
        await engine.cancel_execution(e, source="lease_holder", fence=fence_of(held))
    async with play.refused(errors.ExecutionNotLeaseable):
        await play.claim(e)
    play.clock.advance_ms(LEASE_MS)
    assert (await engine.list_expired_leases(as_of=play.now)).entries == []
    assert (await play.attempt(e, 0)).attempt_state == "started"


@pytest.mark.spec("EX-038")
@pytest.mark.parametrize("way", ["reclaim", "takeover", "cancel", "expire"])
async def test_the_ways_out_of_a_revoked_lease(play: Play, way: str) -> None:
    held = await play.claimed()
    e = held.execution_id
    await play.revoked(held)

    match way:
        case "reclaim":
            assert (await play.reclaimed(e)).lease_epoch == 2
        case "takeover":
            taken = await play.pull("wb")
            assert taken is not None
            assert (taken.execution_id, taken.lease_epoch, taken.handle.kind) == (e, 2, HandleKind.RECLAIMED)
        case "cancel":
            assert await play.engine.cancel_execution(e) == Cancelled(e)
        case _:
            await play.engine.expire_execution(e)
    assert not {"lease_revoked_at", "lease_revoke_reason", "blocking_detail"} & set(await play.core(e))


@pytest.mark.spec("EX-038")
async def test_revoke_answers(play: Play) -> None:
    engine = play.engine
    held = await play.claimed()
    e = held.execution_id
    waiting = await play.create()

    async with play.refused(errors.NotFound, entity="execution"):
        await engine.revoke_lease(MISSING)
    async with play.untouched():
        assert await engine.revoke_lease(waiting) == NothingToDo("no_active_lease")
        other = await engine.revoke_lease(e, worker_instance_id="wb-1", expected_lease_id=OTHER)
        assert other == NothingToDo("different_worker_instance_id")
    async with play.refused(errors.ExecutionNotActive, lifecycle_phase="runnable"):
        await engine.revoke_lease(waiting, worker_instance_id="wa-1")
    async with play.refused(errors.StaleLease):
        await engine.revoke_lease(e, worker_instance_id="wa-1", expected_lease_id=OTHER)
    answer = await engine.revoke_lease(e, worker_instance_id="wa-1", expected_lease_id=held.lease_id)
    assert answer == Revoked(held.lease_id, 1)
    async with play.untouched():
        assert await engine.revoke_lease(e) == NothingToDo("already_revoked")
    lapsed = await play.claimed()
    await play.expired(lapsed)
    async with play.untouched():
        assert await engine.revoke_lease(lapsed.execution_id) == NothingToDo("already_expired")


@pytest.mark.spec("EX-039")
async def test_epoch_through_a_long_life(play: Play) -> None:
    engine = play.engine
    e = await play.create(policy={"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}})
    epochs: list[int] = []
    acquired: list[Claimed] = []

    async def seen(claimed: Claimed | None = None) -> None:
        epochs.append((await play.core(e))["current_lease_epoch"])
        if claimed is not None:
            acquired.append(claimed)

    await play.grant(e)
    await seen(await play.claim(e))
    assert isinstance(await engine.fail(acquired[-1].handle, reason="flaky"), RetryScheduled)
    await seen()
    await play.promoted(e)
    await seen(await play.claimed_again(e))
    await play.delayed(acquired[-1])
    await seen()
    await play.promoted(e)
    await seen(await play.resumed(e))
    await play.expired(acquired[-1])
    await seen()
    await seen(await play.reclaimed(e, "wc"))
    await engine.complete(acquired[-1].handle)
    await seen()
    await engine.replay_execution(e)
    await seen()
    await seen(await play.claimed_again(e))

    assert epochs == [1, 1, 2, 2, 3, 3, 4, 4, 4, 5]
    assert [one.attempt_index for one in acquired] == [0, 1, 1, 2, 3]
    types = [AttemptType.INITIAL, AttemptType.RETRY, AttemptType.RETRY, AttemptType.RECLAIM, AttemptType.REPLAY]
    assert [one.attempt_type for one in acquired] == types
    assert [one.handle.kind for one in acquired] == ["Fresh", "Fresh", "Resumed", "Reclaimed", "Fresh"]
    assert (await play.core(e))["total_attempt_count"] == 4
    assert [attempt.attempt_type for attempt in await engine.attempt_history(e)] == [types[0], types[1], *types[3:]]


async def test_a_lease_of_a_waiting_execution_stays_untouched_by_marking(play: Play) -> None:
    e = await play.create()
    play.clock.advance_ms(LEASE_MS)

    assert (await play.engine.sweep_once("lease_expiry")).processed == 0
    assert await play.vector(e) == WAITING
