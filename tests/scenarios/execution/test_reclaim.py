"""EX-061 to EX-071: reclaiming executions whose lease was lost."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.pages import ExpiredLease, HistoryEntry
from flowfabric.handles import HandleKind
from flowfabric.model.answers.execution import (
    Claimed,
    Completed,
    GrantNotFound,
    NothingToDo,
    NotReclaimable,
    ReclaimCapExceeded,
    ReclaimGrant,
)
from flowfabric.model.change import Change, Patch, seen
from flowfabric.model.execution import Execution
from flowfabric.model.states import AttemptRecordState, AttemptType
from flowfabric.rules.execution.fences import Fence
from tests.scenarios.env import ACTIVE, EXPIRED_LEASE, LEASE_MS, Env, fence_of, lease_operations, terminal
from tests.scenarios.scheduling.test_grants import MISSING, requires
from tests.scenarios.waits import Waits

L2 = "33333333-3333-4333-8333-333333333332"
A2 = "22222222-2222-4222-8222-222222222222"


async def create_expired(env: Env, **options: Any) -> Claimed:
    """Create an execution whose lease expired and was marked."""
    claim = await env.create_and_claim(**options)
    await env.expire_lease(claim)
    return claim


@pytest.mark.spec("EX-061")
async def test_a_reclaim_after_expiry_starts_a_new_attempt(env: Env) -> None:
    claim = await create_expired(env)
    e = claim.execution_id
    started = (await env.core(e))["started_at"]
    env.clock.advance_ms(100)
    t = env.now
    grant = await env.issue_reclaim_grant(e, "wb")
    assert isinstance(grant, ReclaimGrant)
    assert (grant.execution_id, grant.partition_key, grant.lane_id) == (e, "{fp:86}", "default")
    assert grant.expires_at_ms == t + 5000

    claimed = await env.reclaim(e, "wb", lease_id=L2, attempt_id=A2)

    assert claimed == Claimed(e, L2, 2, 1, A2, AttemptType.RECLAIM, t + LEASE_MS, claimed.handle)
    fields = claimed.handle.fields
    assert claimed.handle.kind is HandleKind.RECLAIMED
    assert (fields.lease_id, fields.attempt_id, fields.attempt_index, fields.lease_epoch) == (L2, A2, 1, 2)
    old, new = await env.engine.attempt_history(e)
    assert (old.attempt_state, old.failure_reason) == (AttemptRecordState.INTERRUPTED_RECLAIMED, "lease_expired")
    assert (old.attempt_id, old.ended_at) == (claim.attempt_id, t)
    assert (new.attempt_type, new.attempt_state) == (AttemptType.RECLAIM, AttemptRecordState.STARTED)
    assert (new.lineage.previous_attempt_index, new.lineage.reclaim_reason) == (0, "lease_expired")
    assert await env.vector(e) == ACTIVE
    core = await env.core(e)
    expected = {
        "lease_reclaim_count": 1,
        "total_attempt_count": 2,
        "retry_count": 0,
        "started_at": started,
        "current_lease_id": L2,
        "current_attempt_id": A2,
        "current_attempt_index": 1,
        "current_worker_id": "wb",
        "current_worker_instance_id": "wb-1",
        "lease_expires_at": t + LEASE_MS,
        "lease_renewal_deadline": t + LEASE_MS * 2 // 3,
    }
    assert {name: core.get(name) for name in expected} == expected
    assert not {"lease_expired_at", "blocking_detail"} & set(core)
    assert (await env.lease_history(e))[-1] == HistoryEntry(
        "reclaimed",
        t,
        {
            "old_lease_epoch": 1,
            "new_lease_id": L2,
            "new_lease_epoch": 2,
            "new_attempt_id": A2,
            "new_attempt_index": 1,
            "worker_id": "wb",
        },
    )
    assert [(event.variant, event.worker_instance_id) for event in await env.lease_feed(e)] == [
        ("Acquired", "wa-1"),
        ("Expired", "wa-1"),
        ("Reclaimed", "wb-1"),
    ]
    assert await env.outcomes() == []


@pytest.mark.spec("EX-062")
async def test_a_revoked_lease_is_reclaimed(env: Env) -> None:
    claim, e = await env.create_claimed()
    await env.revoke_lease(claim)

    claimed = await env.grant_and_reclaim(e)

    old, new = await env.engine.attempt_history(e)
    assert (old.attempt_state, old.failure_reason) == (AttemptRecordState.INTERRUPTED_RECLAIMED, "lease_revoked")
    assert new.lineage.reclaim_reason == "lease_revoked"
    assert (claimed.attempt_index, claimed.lease_epoch) == (1, 2)
    assert not {"lease_revoked_at", "lease_revoke_reason"} & set(await env.core(e))
    await env.engine.renew(claimed.handle)
    assert await env.engine.complete(claimed.handle) == Completed(e)


@pytest.mark.spec("EX-063")
async def test_reclaim_grants_are_refused_for_executions_that_are_not_reclaimable(env: Env, waits: Waits) -> None:
    async with env.refused(errors.NotFound, entity="execution"):
        await env.issue_reclaim_grant(MISSING)
    async with env.refused(errors.NotFound, entity="execution"):
        await env.reclaim(MISSING)
    expired = (await create_expired(env)).execution_id
    runnable = await env.create()
    leased = (await env.create_and_claim()).execution_id
    suspended = (await waits.create_suspended())[0].execution_id
    ended = await env.create()
    await env.engine.cancel_execution(ended)
    async with env.unchanged():
        for e in (runnable, leased, suspended, ended):
            assert await env.issue_reclaim_grant(e) == NotReclaimable("execution_not_reclaimable")
            assert await env.reclaim(e) == NotReclaimable("execution_not_reclaimable")
    await env.issue_reclaim_grant(expired, "wb")
    for worker in ("wb", "wc"):
        async with env.refused(errors.GrantAlreadyExists):
            await env.issue_reclaim_grant(expired, worker)
    env.clock.advance_ms(5000)
    assert isinstance(await env.issue_reclaim_grant(expired, "wc"), ReclaimGrant)


@pytest.mark.spec("EX-063")
async def test_a_reclaim_grant_without_a_signing_key_is_refused_after_all_other_checks(
    keyless: Engine, clock: ManualClock
) -> None:
    env = Env(keyless, clock)
    expired, runnable = (await create_expired(env)).execution_id, await env.create()

    async with env.refused(errors.NotFound, entity="execution"):
        await env.issue_reclaim_grant(MISSING)
    assert await env.issue_reclaim_grant(runnable) == NotReclaimable("execution_not_reclaimable")
    async with env.refused(errors.Unavailable, op="issue_reclaim_grant"):
        await env.issue_reclaim_grant(expired)
    assert await env.live_grant(expired) is None


@pytest.mark.spec("EX-064")
async def test_a_reclaim_grant_marks_an_expired_lease_first(env: Env) -> None:
    _, e = await env.create_claimed()
    env.clock.advance_ms(LEASE_MS)

    grant = await env.issue_reclaim_grant(e, ttl=700)

    assert isinstance(grant, ReclaimGrant)
    assert grant.expires_at_ms == env.now + 700
    assert await env.vector(e) == EXPIRED_LEASE
    assert await env.lease_events(e) == ["acquired", "expired"]
    async with env.unchanged():
        assert await env.engine.mark_lease_expired_if_due(e) == NothingToDo("already_expired")


@pytest.mark.spec("EX-065")
async def test_a_reclaim_requires_the_capabilities(env: Env) -> None:
    e = await env.create(policy=requires("gpu"))
    await env.grant(e, capabilities={"gpu"})
    await env.expire_lease(await env.claim(e))
    before = await env.core(e)
    env.clock.advance_ms(10)

    assert await env.issue_reclaim_grant(e, capabilities={"cpu"}) == NotReclaimable("capability_mismatch: gpu")

    stamped = {"last_capability_mismatch_at": env.now, "last_mutation_at": env.now}
    assert await env.core(e) == before | stamped
    assert await env.live_grant(e) is None
    async with env.unchanged():
        assert await env.claim_next("wb", capabilities={"cpu"}) is None
    assert isinstance(await env.issue_reclaim_grant(e, capabilities={"cpu", "gpu"}), ReclaimGrant)
    assert isinstance(await env.reclaim(e), Claimed)


@pytest.mark.spec("EX-066")
async def test_a_reclaim_without_a_valid_grant_is_refused(env: Env) -> None:
    e = (await create_expired(env)).execution_id
    async with env.unchanged():
        assert await env.reclaim(e, "wb") == GrantNotFound(e)
    await env.issue_reclaim_grant(e, "wa")
    async with env.unchanged():
        assert await env.reclaim(e, "wb") == GrantNotFound(e)
    assert isinstance(await env.reclaim(e, "wa"), Claimed)

    late = (await create_expired(env)).execution_id
    await env.issue_reclaim_grant(late, "wb", ttl=200)
    env.clock.advance_ms(200)
    async with env.unchanged():
        assert await env.reclaim(late, "wb") == GrantNotFound(late)
    await env.issue_reclaim_grant(late, "wb", ttl=200)
    env.clock.advance_ms(199)
    claimed = await env.reclaim(late, "wb", instance="wb-7")
    assert isinstance(claimed, Claimed)
    assert (await env.core(late))["current_worker_instance_id"] == "wb-7"


@pytest.mark.spec("EX-066")
async def test_a_reclaim_grant_that_expires_before_the_commit_reclaims_nothing(env: Env) -> None:
    e = (await create_expired(env)).execution_id
    await env.issue_reclaim_grant(e, "wb", ttl=200)

    assert await env.commit_late(env.reclaim(e, "wb"), 200) == GrantNotFound(e)

    assert await env.vector(e) == EXPIRED_LEASE
    await env.issue_reclaim_grant(e, "wb", ttl=200)
    assert isinstance(await env.commit_late(env.reclaim(e, "wb"), 199), Claimed)


@pytest.mark.spec("EX-067")
async def test_the_reclaim_after_the_cap_fails_the_execution(env: Env) -> None:
    claim = await create_expired(env)
    e = claim.execution_id
    for count in (1, 2, 3, 4):
        claimed = await env.grant_and_reclaim(e, max_reclaim_count=4)
        assert (claimed.lease_epoch, claimed.attempt_index) == (count + 1, count)
        await env.expire_lease(claimed)
    await env.issue_reclaim_grant(e)
    before = await env.lease_events(e)
    env.clock.advance_ms(10)

    assert await env.reclaim(e, max_reclaim_count=4) == ReclaimCapExceeded(4)

    assert await env.vector(e) == terminal("failed")
    core = await env.core(e)
    assert (core["failure_reason"], core["completed_at"]) == ("max_reclaims_exceeded", env.now)
    assert (core["lease_reclaim_count"], core["total_attempt_count"]) == (4, 5)
    attempt = await env.attempt(e, 4)
    assert (attempt.attempt_state, attempt.ended_at) == (AttemptRecordState.INTERRUPTED_RECLAIMED, env.now)
    assert await env.lease_events(e) == [*before, "released max_reclaims_exceeded"]
    assert [(event.variant, event.revoked_by) for event in await env.lease_feed(e)][-1] == ("Revoked", "reconciler")
    assert await env.outcomes() == ["failed"]
    assert (await env.row(e)).grant is None


async def set_reclaim_count(env: Env, e: str, count: int) -> None:
    """Set the reclaim count of an execution."""
    reclaimed = Patch(Execution, (e,), {"lease_reclaim_count": count})
    change = Change((seen(await env.row(e)),), (reclaimed,), id=env.engine.minter.change_id())
    assert await env.store.commit([change]) == [env.now]


@pytest.mark.spec("EX-067")
@pytest.mark.parametrize("policy", [None, {}, {"timeout_policy": {"max_reclaim_count": 1}}])
async def test_the_default_reclaim_cap_is_1000(env: Env, policy: Any) -> None:
    last, over = [(await create_expired(env, policy=policy)).execution_id for _ in range(2)]
    await set_reclaim_count(env, last, 999)
    await set_reclaim_count(env, over, 1000)

    async with env.unchanged():
        assert await env.issue_reclaim_grant(over, "wb") == ReclaimCapExceeded(1000)
    assert isinstance(await env.issue_reclaim_grant(last, "wb"), ReclaimGrant)
    assert isinstance(await env.reclaim(last, "wb"), Claimed)
    assert await env.reclaim(over, "wb") == ReclaimCapExceeded(1000)
    assert await env.vector(over) == terminal("failed")


@pytest.mark.spec("EX-067")
@pytest.mark.parametrize("lease", ["lease_expired", "lease_revoked"])
async def test_the_attempt_beyond_the_reclaim_cap_records_how_its_lease_was_lost(env: Env, lease: str) -> None:
    claim, e = await env.create_claimed(policy={"max_reclaim_count": 0})
    if lease == "lease_revoked":
        await env.engine.revoke_lease(e)
    else:
        await env.expire_lease(claim)

    assert await env.reclaim(e, "wb", max_reclaim_count=5) == ReclaimCapExceeded(0)

    attempt = await env.attempt(e, 0)
    assert (attempt.attempt_state, attempt.failure_reason) == (AttemptRecordState.INTERRUPTED_RECLAIMED, lease)
    assert (await env.core(e))["failure_reason"] == "max_reclaims_exceeded"
    assert await env.outcomes(e) == ["failed"]


@pytest.mark.parametrize("method", ["grant", "claim"])
@pytest.mark.parametrize(("count", "warned"), [(98, False), (99, True), (100, False), (199, True)])
async def test_every_hundredth_reclaim_logs_a_warning(
    env: Env, caplog: pytest.LogCaptureFixture, method: str, count: int, warned: bool
) -> None:
    e = (await create_expired(env)).execution_id
    await set_reclaim_count(env, e, count)

    if method == "grant":
        await env.issue_reclaim_grant(e, "wb")
        await env.reclaim(e, "wb")
    else:
        await env.claim_next("wb")

    assert (await env.core(e))["lease_reclaim_count"] == count + 1
    message = f"{e} has been reclaimed {count + 1} times: its workers keep losing it"
    assert [one.message for one in caplog.records] == ([message] if warned else [])


@pytest.mark.spec("EX-067")
async def test_a_reclaim_cap_of_zero_fails_the_execution_without_a_grant(env: Env) -> None:
    claim = await create_expired(env)

    assert await env.reclaim(claim.execution_id, max_reclaim_count=0) == ReclaimCapExceeded(0)

    assert await env.vector(claim.execution_id) == terminal("failed")


@pytest.mark.spec("EX-067")
async def test_the_reclaim_cap_of_the_policy_overrides_the_one_of_the_caller(env: Env) -> None:
    claim = await create_expired(env, policy={"max_reclaim_count": 1})
    e = claim.execution_id
    await env.expire_lease(await env.grant_and_reclaim(e, max_reclaim_count=0))

    async with env.unchanged():
        assert await env.issue_reclaim_grant(e) == ReclaimCapExceeded(1)
    assert await env.reclaim(e, max_reclaim_count=9) == ReclaimCapExceeded(1)


@pytest.mark.spec("EX-068")
async def test_a_reclaim_of_an_execution_that_ended_after_the_grant_is_refused(env: Env) -> None:
    e = (await create_expired(env)).execution_id
    await env.issue_reclaim_grant(e)
    await env.engine.cancel_execution(e)

    async with env.unchanged():
        assert await env.reclaim(e) == NotReclaimable()

    assert await env.vector(e) == terminal("cancelled")
    assert await env.outcomes(e) == ["cancelled"]


@pytest.mark.spec("EX-069")
@pytest.mark.parametrize("method", ["reclaim", "takeover"])
async def test_late_writes_of_the_previous_holder_are_refused(env: Env, method: str) -> None:
    old = await create_expired(env)
    e = old.execution_id
    new = await env.grant_and_reclaim(e) if method == "reclaim" else await env.claim_next("wb")
    assert new is not None

    for call in lease_operations(env.engine, old.handle, env.now).values():
        async with env.refused(errors.StaleLease):
            await call()
    async with env.refused(errors.StaleLease):
        await env.engine.cancel_execution(e, source="lease_holder", fence=fence_of(old))
    for mixed in (Fence(old.lease_id, 2, new.attempt_id), Fence(new.lease_id, 2, old.attempt_id)):
        async with env.refused(errors.StaleLease):
            await env.engine.complete(execution_id=e, fence=mixed)

    core = await env.core(e)
    assert (core["lease_expires_at"], core["current_lease_epoch"]) == (new.lease_expires_at, 2)
    assert await env.engine.complete(new.handle) == Completed(e)


@pytest.mark.spec("EX-070")
async def test_a_reclaim_grant_is_redeemed_once(env: Env) -> None:
    e = (await create_expired(env)).execution_id
    await env.issue_reclaim_grant(e, "wb")

    answers: list[Any] = await asyncio.gather(*(env.reclaim(e, "wb", instance=f"wb-{n}") for n in range(2)))

    assert sorted(type(answer).__name__ for answer in answers) == ["Claimed", "NotReclaimable"]
    assert (await env.core(e))["lease_reclaim_count"] == 1
    assert (await env.lease_events(e)).count("reclaimed") == 1


async def test_a_claim_takes_over_an_expired_lease_without_a_sweep(env: Env) -> None:
    _, e = await env.create_claimed(input_payload=b"in", policy={"timeout_policy": {"attempt_timeout_ms": 90_000}})
    env.clock.advance_ms(LEASE_MS - 1)
    assert await env.claim_next("wb") is None
    env.clock.advance_ms(1)

    takeover = await env.claim_next("wb")

    assert takeover is not None
    assert (takeover.execution_id, takeover.attempt_type) == (e, AttemptType.RECLAIM)
    assert (takeover.lease_epoch, takeover.attempt_index) == (2, 1)
    assert takeover.handle.kind is HandleKind.RECLAIMED
    assert takeover.payload is not None
    assert takeover.payload.input_payload == b"in"
    assert await env.lease_events(e) == ["acquired", "expired", "reclaimed"]
    core = await env.core(e)
    assert (core["lease_reclaim_count"], core["attempt_timeout_at"]) == (1, env.now + 90_000)


async def test_a_takeover_respects_the_reclaim_grant_of_another_worker(env: Env) -> None:
    e = (await create_expired(env)).execution_id
    await env.issue_reclaim_grant(e, "wc")

    async with env.unchanged():
        assert await env.claim_next("wb") is None
    env.clock.advance_ms(5000)
    takeover = await env.claim_existing("wb")
    assert takeover.execution_id == e


@pytest.mark.spec("EX-071")
async def test_list_expired_leases_pages_in_order_of_expiry(env: Env) -> None:
    engine, t = env.engine, env.now

    async def leased(ttl: int, uuid_digit: int, **options: Any) -> Claimed:
        e = f"{{fp:86}}:{uuid_digit:08d}-1111-4111-8111-111111111111"
        return await env.create_and_claim(ttl=ttl, execution_id=e, **options)

    e2 = await leased(100, 2)
    e1 = await leased(100, 1)
    e3 = await leased(200, 3, namespace="n3")
    await leased(60_000, 4)
    revoked = await leased(100, 5)
    await env.revoke_lease(revoked)
    done = await leased(100, 6)
    await engine.complete(done.handle)
    env.clock.now = t + 200
    await engine.mark_lease_expired_if_due(e1.execution_id)

    first = await engine.list_expired_leases(as_of=t + 200, limit=2)

    assert first.entries == [ExpiredLease(one.execution_id, one.lease_id, 1, "wa-1", t + 100, 0) for one in (e1, e2)]
    assert first.cursor == (t + 100, e2.execution_id)
    rest = await engine.list_expired_leases(as_of=t + 200, limit=2, after=first.cursor)
    assert rest.entries == [ExpiredLease(e3.execution_id, e3.lease_id, 1, "wa-1", t + 200, 0)]
    assert rest.cursor is None
    early = await engine.list_expired_leases(as_of=t + 150)
    assert [entry.execution_id for entry in early.entries] == [e1.execution_id, e2.execution_id]
    for namespace, expected in (("n3", [e3]), ("default", [e1, e2]), ("nobody", [])):
        page = await engine.list_expired_leases(as_of=t + 200, namespace=namespace)
        assert [entry.execution_id for entry in page.entries] == [one.execution_id for one in expected]
    assert (await engine.list_expired_leases(as_of=t + 200, limit=0)).entries == []
    assert len((await engine.list_expired_leases(as_of=t + 200, limit=2**40)).entries) == 3


@pytest.mark.spec("EX-071")
async def test_a_page_of_expired_leases_has_at_most_10000_entries(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    scan = env.store.store.scan

    async def counted(request: Any) -> Any:
        limits.append(request.limit)
        return await scan(msgspec.structs.replace(request, limit=1))

    monkeypatch.setattr(env.store.store, "scan", counted)
    await env.engine.list_expired_leases(as_of=env.now, limit=20_000)

    assert limits == [10_001], "one more than a page, to detect the next page"
