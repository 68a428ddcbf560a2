"""EX-017 to EX-025: grants, and the claims that redeem them."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.operations.pages import HistoryEntry
from flowfabric.handles import HandleKind
from flowfabric.model.answers.execution import Claimed, ClaimGrant
from flowfabric.model.execution import Grant
from flowfabric.model.states import AttemptRecordState, AttemptType
from tests.scenarios.play import ACTIVE, RESUMABLE, WAITING, Play

L = "33333333-3333-4333-8333-333333333333"
A = "22222222-2222-4222-8222-222222222222"
MISSING = "{fp:86}:11111111-1111-4111-8111-111111111111"


def requires(*capabilities: str) -> dict[str, Any]:
    """A policy that asks for these."""
    return {"routing_requirements": {"required_capabilities": list(capabilities)}}


async def resumable(play: Play) -> Claimed:
    """An execution whose worker delayed it and whose delay is over; the claim it was delayed from."""
    held = await play.claimed()
    await play.delayed(held)
    await play.promoted(held.execution_id)
    return held


@pytest.mark.spec("EX-017")
async def test_grant_life_cycle_basics(play: Play) -> None:
    e = await play.create()
    before = await play.core(e)

    await play.grant(e, "wa", ttl=5000)

    assert await play.vector(e) == WAITING
    assert await play.core(e) == before
    assert await play.eligible() == [e]
    grant = await play.live_grant(e)
    assert grant is not None
    assert (grant.worker_id, grant.worker_instance_id, grant.lane_id) == ("wa", "wa-1", "default")
    assert (grant.created_at, grant.expires_at) == (play.now, play.now + 5000)
    play.clock.advance_ms(4999)
    for worker in ("wa", "wb"):
        async with play.refused(errors.GrantAlreadyExists):
            await play.grant(e, worker)
    play.clock.advance_ms(1)
    await play.grant(e, "wb")


@pytest.mark.spec("EX-017")
@pytest.mark.parametrize("kind", ["claim", "reclaim"])
async def test_a_grant_keeps_what_was_said_with_it(play: Play, kind: str) -> None:
    e = await play.create()
    offer: Any = play.engine.issue_claim_grant
    if kind == "reclaim":
        await play.grant(e)
        await play.expired(await play.claim(e))
        offer = play.engine.issue_reclaim_grant
    notes: dict[str, Any] = {
        "capability_hash": "h1",
        "route_snapshot_json": '{"zone":"b"}',
        "admission_summary": "two of three",
    }
    who = {"lane_id": "default", "worker_id": "wb", "worker_instance_id": "wb-1"}

    await offer(e, **who, worker_capabilities=(), grant_ttl_ms=5000, **notes)

    grant = await play.live_grant(e)
    assert grant is not None
    t = play.now
    assert grant == Grant(kind, "wb", "wb-1", "default", t, t + 5000, key_id=grant.key_id, **notes)


@pytest.mark.spec("EX-017")
async def test_what_cannot_be_granted(play: Play) -> None:
    delayed = await play.create(delay_until=play.now + 1000)
    active = (await play.claimed()).execution_id
    terminal = await play.create()
    await play.engine.cancel_execution(terminal)
    waiting = await play.create()

    async with play.refused(errors.NotFound, entity="execution"):
        await play.grant(MISSING)
    for e in (delayed, active, terminal):
        async with play.refused(errors.ExecutionNotEligible):
            await play.grant(e)
    async with play.refused(errors.ExecutionNotInEligibleSet):
        await play.grant(waiting, lane="main")


@pytest.mark.spec("EX-018")
async def test_capability_matching_at_grant(play: Play) -> None:
    for offer in ({"gpu", "cuda"}, {"cuda", "gpu", "x"}):
        await play.grant(await play.create(policy=requires("gpu", "cuda")), can=offer)
    await play.grant(await play.create(), can=())

    e = await play.create(policy=requires("gpu", "cuda"))
    for offer, missing in (({"GPU", "cuda"}, "gpu"), (set(), "cuda,gpu")):
        play.clock.advance_ms(10)
        before = await play.core(e)
        with pytest.raises(errors.CapabilityMismatch) as caught:
            await play.grant(e, can=offer)
        assert caught.value.detail == missing
        stamped = {"last_capability_mismatch_at": play.now, "last_mutation_at": play.now}
        assert await play.core(e) == before | stamped
        assert await play.vector(e) == WAITING
        assert await play.live_grant(e) is None
    assert e in await play.eligible()


@pytest.mark.spec("EX-018")
async def test_a_list_that_is_presented_may_be_joined_by_commas(play: Play) -> None:
    e = await play.create(policy={"routing_requirements": {"required_capabilities": ["gpu", "cuda"]}})

    await play.grant(e, can={"gpu,,cuda", " ", ""})

    assert await play.live_grant(e) is not None


@pytest.mark.spec("EX-018")
@pytest.mark.parametrize(
    ("can", "detail"),
    [
        ([f"{number:03}" for number in range(257)], "worker:too_many_tokens"),
        (["x" * 4097], "worker:too_many_bytes"),
        (["x" * 100_000], "worker:too_many_bytes"),
        (["x" * 2048, "y" * 2048], "worker:too_many_bytes"),
    ],
)
async def test_a_list_that_is_too_long_is_refused_after_the_state_is_looked_at(
    play: Play, can: list[str], detail: str
) -> None:
    e = await play.create()
    async with play.refused(errors.NotFound):
        await play.grant(MISSING, can=can)
    async with play.refused(errors.ExecutionNotInEligibleSet):
        await play.grant(e, can=can, lane="other")
    async with play.refused(errors.InvalidCapabilities, detail=detail):
        await play.grant(e, can=can)


@pytest.mark.spec("EX-018")
async def test_the_longest_lists_are_accepted(play: Play) -> None:
    for can in ([f"{number:03}" for number in range(256)], ["x" * 4096], ["x" * 2048, "y" * 2047]):
        e = await play.create()
        await play.grant(e, can=can)
        assert await play.live_grant(e) is not None


@pytest.mark.spec("EX-019")
async def test_fresh_claim(play: Play) -> None:
    e = await play.create()
    await play.grant(e)
    play.clock.advance_ms(100)
    t = play.now

    claimed = await play.claim(e, lease_id=L, attempt_id=A)

    fields = claimed.handle.fields
    assert claimed == Claimed(e, L, 1, 0, A, AttemptType.INITIAL, t + 30_000, claimed.handle)
    assert claimed.handle.kind is HandleKind.FRESH
    assert (fields.execution_id, fields.lease_id, fields.attempt_id) == (e, L, A)
    assert (fields.lease_epoch, fields.attempt_index, fields.lease_ttl_ms) == (1, 0, 30_000)
    assert (fields.lane_id, fields.worker_instance_id) == ("default", "wa-1")
    assert await play.vector(e) == ACTIVE
    core = await play.core(e)
    expected = {
        "started_at": t,
        "total_attempt_count": 1,
        "current_attempt_index": 0,
        "current_attempt_id": A,
        "current_lease_id": L,
        "current_lease_epoch": 1,
        "current_worker_id": "wa",
        "current_worker_instance_id": "wa-1",
        "current_lane": "default",
        "lease_acquired_at": t,
        "lease_last_renewed_at": t,
        "lease_expires_at": t + 30_000,
        "lease_renewal_deadline": t + 20_000,
        "last_transition_at": t,
        "last_mutation_at": t,
    }
    assert {name: core.get(name) for name in expected} == expected
    assert (await play.sheet(e)).grant is None
    assert await play.eligible() == []
    identity = {"lease_id": L, "lease_epoch": 1, "attempt_id": A, "attempt_index": 0, "worker_id": "wa"}
    assert await play.history(e) == [HistoryEntry("acquired", t, identity | {"worker_instance_id": "wa-1"})]
    [attempt] = await play.engine.attempt_history(e)
    assert (attempt.attempt_id, attempt.attempt_state) == (A, AttemptRecordState.STARTED)
    assert (attempt.started_at, attempt.lease_id, attempt.lease_epoch) == (t, L, 1)
    assert (attempt.worker_id, attempt.worker_instance_id, attempt.ended_at) == ("wa", "wa-1", None)


@pytest.mark.spec("EX-019")
async def test_a_claim_may_name_another_time_and_another_deadline_and_zero_names_none(play: Play) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 700}}
    t = play.now

    async def times(**named: Any) -> tuple[Any, Any]:
        held = await play.claimed(policy=policy, execution_deadline_at=t + 9000, claim=named)
        core = await play.core(held.execution_id)
        return core.get("attempt_timeout_at"), core.get("execution_deadline_at")

    assert await times() == (t + 700, t + 9000)
    assert await times(attempt_timeout_ms=50, execution_deadline_at=t + 60) == (t + 50, t + 60)
    assert await times(attempt_timeout_ms=0, execution_deadline_at=0) == (None, t + 9000)


@pytest.mark.spec("EX-020")
async def test_grant_ownership_on_claim(play: Play) -> None:
    e = await play.create()
    async with play.refused(errors.InvalidClaimGrant):
        await play.claim(e, "wa")
    await play.grant(e, "wa")
    async with play.refused(errors.InvalidClaimGrant):
        await play.claim(e, "wb")

    claimed = await play.claim(e, "wa", instance="wa-2")

    assert claimed.handle.fields.worker_instance_id == "wa-2"
    assert (await play.core(e))["current_worker_instance_id"] == "wa-2"


@pytest.mark.spec("EX-021")
async def test_expired_claim_grant(play: Play) -> None:
    e = await play.create()
    await play.grant(e, "wa", ttl=200)
    play.clock.advance_ms(200)

    async with play.refused(errors.ClaimGrantExpired):
        await play.claim(e, "wa")

    assert await play.vector(e) == WAITING
    assert await play.eligible() == [e]
    await play.grant(e, "wb")
    claimed = await play.claim(e, "wb")
    assert (claimed.lease_epoch, claimed.attempt_index) == (1, 0)


@pytest.mark.spec("EX-021")
async def test_a_grant_is_good_to_its_last_millisecond(play: Play) -> None:
    e = await play.create()
    await play.grant(e, "wa", ttl=200)
    play.clock.advance_ms(199)

    assert (await play.claim(e, "wa")).lease_epoch == 1


@pytest.mark.spec("EX-021")
async def test_a_grant_that_ends_on_the_way_to_the_store_redeems_nothing(play: Play) -> None:
    fresh, interrupted = await play.create(), (await resumable(play)).execution_id
    await play.grant(fresh, ttl=200)
    await play.grant(interrupted, ttl=500)

    with pytest.raises(errors.ClaimGrantExpired):
        await play.late(play.claim(fresh), 200)
    with pytest.raises(errors.ClaimGrantExpired):
        await play.late(play.resume(interrupted), 300)

    assert [await play.vector(e) for e in (fresh, interrupted)] == [WAITING, RESUMABLE]
    await play.grant(fresh, ttl=200)
    assert (await play.late(play.claim(fresh), 199)).lease_epoch == 1


@pytest.mark.spec("EX-022")
async def test_state_changes_between_grant_and_claim(play: Play) -> None:
    engine = play.engine
    cancelled = await play.create()
    await play.grant(cancelled)
    await engine.cancel_execution(cancelled)
    async with play.refused(errors.ExecutionNotLeaseable):
        await play.claim(cancelled)
    assert await engine.read_execution_state(cancelled) == "cancelled"
    assert await play.live_grant(cancelled) is None

    blocked = await play.create()
    await play.grant(blocked)
    grant = await play.live_grant(blocked)
    await engine.block_execution_for_admission(blocked, reason="waiting_for_budget")
    async with play.refused(errors.ExecutionNotLeaseable):
        await play.claim(blocked)
    assert await play.live_grant(blocked) == grant
    play.clock.advance_ms(4999)
    await engine.unblock_execution(blocked, expected_reason="waiting_for_budget")
    assert (await play.claim(blocked)).lease_epoch == 1


@pytest.mark.spec("EX-023")
async def test_claiming_an_active_execution(play: Play) -> None:
    e = (await play.claimed("wa")).execution_id

    async with play.refused(errors.ExecutionNotLeaseable):
        await play.claim(e, "wb")
    async with play.refused(errors.ExecutionNotEligible):
        await play.grant(e, "wb")


@pytest.mark.spec("EX-024")
async def test_fresh_claim_refuses_an_interrupted_attempt(play: Play) -> None:
    first = await resumable(play)
    e = first.execution_id
    assert await play.vector(e) == RESUMABLE
    await play.grant(e, "wa")
    async with play.refused(errors.UseClaimResumedExecution):
        await play.claim(e, "wa")
    assert await play.live_grant(e) is not None

    resumed = await play.resume(e, "wa")

    assert resumed.handle.kind is HandleKind.RESUMED
    assert (resumed.attempt_id, resumed.attempt_index, resumed.lease_epoch) == (first.attempt_id, 0, 2)
    assert resumed.attempt_type is AttemptType.INITIAL
    assert resumed.lease_id != first.lease_id
    assert await play.vector(e) == ACTIVE


@pytest.mark.spec("EX-024")
async def test_a_resumed_claim_refuses_what_was_not_interrupted(play: Play) -> None:
    e = await play.create()
    await play.grant(e)

    async with play.refused(errors.NotAResumedExecution):
        await play.resume(e)
    async with play.refused(errors.NotFound, entity="execution"):
        await play.resume(MISSING)


@pytest.mark.spec("EX-025")
async def test_resume_grant_misuse(play: Play) -> None:
    engine = play.engine
    e = (await resumable(play)).execution_id
    await play.grant(e, "wa", ttl=200)
    async with play.refused(errors.InvalidClaimGrant):
        await play.resume(e, "wb")
    play.clock.advance_ms(200)
    before = await play.core(e)
    with pytest.raises(errors.ClaimGrantExpired):
        await play.resume(e, "wa")
    assert await play.core(e) == before | {"last_mutation_at": play.now}
    assert (await play.sheet(e)).grant is None

    grant = await play.next_for("wa")
    assert isinstance(grant, ClaimGrant)
    handle = await engine.claim_from_resume_grant(grant, worker_id="wa", worker_instance_id="wa-1", lease_ttl_ms=30_000)
    assert (handle.kind, handle.fields.lease_epoch) == (HandleKind.RESUMED, 2)
    async with play.refused(errors.ExecutionNotLeaseable):
        await engine.claim_from_resume_grant(grant, worker_id="wa", worker_instance_id="wa-1", lease_ttl_ms=30_000)
    async with play.refused(errors.ExecutionNotLeaseable):
        await play.resume(e, "wa")
    assert await play.told(e) == ["acquired", "released worker_delay", "acquired claim_resumed"]
