"""EX-061 to EX-071: work whose lease is gone goes to another worker."""

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
from flowfabric.rules.execution.lease import Fence
from tests.scenarios.play import ACTIVE, EXPIRED_LEASE, LEASE_MS, Play, fence_of, lease_bound, terminal
from tests.scenarios.scheduling.test_grants import MISSING, requires
from tests.scenarios.waits import Waits

L2 = "33333333-3333-4333-8333-333333333332"
A2 = "22222222-2222-4222-8222-222222222222"


async def lapsed(play: Play, worker: str = "wa", **given: Any) -> Claimed:
    """An execution whose lease expired and was marked."""
    held = await play.claimed(worker, **given)
    await play.expired(held)
    return held


@pytest.mark.spec("EX-061")
async def test_reclaim_after_expiry(play: Play) -> None:
    held = await lapsed(play)
    e = held.execution_id
    started = (await play.core(e))["started_at"]
    play.clock.advance_ms(100)
    t = play.now
    grant = await play.reclaim_grant(e, "wb")
    assert isinstance(grant, ReclaimGrant)
    assert (grant.execution_id, grant.partition_key, grant.lane_id) == (e, "{fp:86}", "default")
    assert grant.expires_at_ms == t + 5000

    claimed = await play.reclaim(e, "wb", lease_id=L2, attempt_id=A2)

    assert claimed == Claimed(e, L2, 2, 1, A2, AttemptType.RECLAIM, t + LEASE_MS, claimed.handle)
    fields = claimed.handle.fields
    assert claimed.handle.kind is HandleKind.RECLAIMED
    assert (fields.lease_id, fields.attempt_id, fields.attempt_index, fields.lease_epoch) == (L2, A2, 1, 2)
    old, new = await play.engine.attempt_history(e)
    assert (old.attempt_state, old.failure_reason) == (AttemptRecordState.INTERRUPTED_RECLAIMED, "lease_expired")
    assert (old.attempt_id, old.ended_at) == (held.attempt_id, t)
    assert (new.attempt_type, new.attempt_state) == (AttemptType.RECLAIM, AttemptRecordState.STARTED)
    assert (new.lineage.previous_attempt_index, new.lineage.reclaim_reason) == (0, "lease_expired")
    assert await play.vector(e) == ACTIVE
    core = await play.core(e)
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
    assert (await play.history(e))[-1] == HistoryEntry(
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
    assert [(news.variant, news.worker_instance_id) for news in await play.lease_feed(e)] == [
        ("Acquired", "wa-1"),
        ("Expired", "wa-1"),
        ("Reclaimed", "wb-1"),
    ]
    assert await play.outcomes() == []


@pytest.mark.spec("EX-062")
async def test_reclaim_a_revoked_lease(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    await play.revoked(held)

    claimed = await play.reclaimed(e)

    old, new = await play.engine.attempt_history(e)
    assert (old.attempt_state, old.failure_reason) == (AttemptRecordState.INTERRUPTED_RECLAIMED, "lease_revoked")
    assert new.lineage.reclaim_reason == "lease_revoked"
    assert (claimed.attempt_index, claimed.lease_epoch) == (1, 2)
    assert not {"lease_revoked_at", "lease_revoke_reason"} & set(await play.core(e))
    await play.engine.renew(claimed.handle)
    assert await play.engine.complete(claimed.handle) == Completed(e)


@pytest.mark.spec("EX-063")
async def test_reclaim_grant_refusals(play: Play, waits: Waits) -> None:
    async with play.refused(errors.NotFound, entity="execution"):
        await play.reclaim_grant(MISSING)
    async with play.refused(errors.NotFound, entity="execution"):
        await play.reclaim(MISSING)
    expired = (await lapsed(play)).execution_id
    runnable = await play.create()
    leased = (await play.claimed()).execution_id
    suspended = (await waits.suspended())[0].execution_id
    ended = await play.create()
    await play.engine.cancel_execution(ended)
    async with play.untouched():
        for e in (runnable, leased, suspended, ended):
            assert await play.reclaim_grant(e) == NotReclaimable("execution_not_reclaimable")
            assert await play.reclaim(e) == NotReclaimable("execution_not_reclaimable")
    await play.reclaim_grant(expired, "wb")
    for worker in ("wb", "wc"):
        async with play.refused(errors.GrantAlreadyExists):
            await play.reclaim_grant(expired, worker)
    play.clock.advance_ms(5000)
    assert isinstance(await play.reclaim_grant(expired, "wc"), ReclaimGrant)


@pytest.mark.spec("EX-063")
async def test_a_grant_that_cannot_be_signed_is_refused_after_everything_else(
    keyless: Engine, clock: ManualClock
) -> None:
    play = Play(keyless, clock)
    expired, runnable = (await lapsed(play)).execution_id, await play.create()

    async with play.refused(errors.NotFound, entity="execution"):
        await play.reclaim_grant(MISSING)
    assert await play.reclaim_grant(runnable) == NotReclaimable("execution_not_reclaimable")
    async with play.refused(errors.Unavailable, op="issue_reclaim_grant"):
        await play.reclaim_grant(expired)
    assert await play.live_grant(expired) is None


@pytest.mark.spec("EX-064")
async def test_lazy_expiry_at_reclaim(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    play.clock.advance_ms(LEASE_MS)

    grant = await play.reclaim_grant(e, ttl=700)

    assert isinstance(grant, ReclaimGrant)
    assert grant.expires_at_ms == play.now + 700
    assert await play.vector(e) == EXPIRED_LEASE
    assert await play.told(e) == ["acquired", "expired"]
    async with play.untouched():
        assert await play.engine.mark_lease_expired_if_due(e) == NothingToDo("already_expired")


@pytest.mark.spec("EX-065")
async def test_reclaim_respects_capabilities(play: Play) -> None:
    e = await play.create(policy=requires("gpu"))
    await play.grant(e, can={"gpu"})
    await play.expired(await play.claim(e))
    before = await play.core(e)
    play.clock.advance_ms(10)

    assert await play.reclaim_grant(e, can={"cpu"}) == NotReclaimable("capability_mismatch: gpu")

    stamped = {"last_capability_mismatch_at": play.now, "last_mutation_at": play.now}
    assert await play.core(e) == before | stamped
    assert await play.live_grant(e) is None
    async with play.untouched():
        assert await play.pull("wb", can={"cpu"}) is None
    assert isinstance(await play.reclaim_grant(e, can={"cpu", "gpu"}), ReclaimGrant)
    assert isinstance(await play.reclaim(e), Claimed)


@pytest.mark.spec("EX-066")
async def test_reclaim_without_a_valid_grant(play: Play) -> None:
    e = (await lapsed(play)).execution_id
    async with play.untouched():
        assert await play.reclaim(e, "wb") == GrantNotFound(e)
    await play.reclaim_grant(e, "wa")
    async with play.untouched():
        assert await play.reclaim(e, "wb") == GrantNotFound(e)
    assert isinstance(await play.reclaim(e, "wa"), Claimed)

    late = (await lapsed(play)).execution_id
    await play.reclaim_grant(late, "wb", ttl=200)
    play.clock.advance_ms(200)
    async with play.untouched():
        assert await play.reclaim(late, "wb") == GrantNotFound(late)
    await play.reclaim_grant(late, "wb", ttl=200)
    play.clock.advance_ms(199)
    claimed = await play.reclaim(late, "wb", instance="wb-7")
    assert isinstance(claimed, Claimed)
    assert (await play.core(late))["current_worker_instance_id"] == "wb-7"


@pytest.mark.spec("EX-066")
async def test_a_grant_that_ends_on_the_way_to_the_store_reclaims_nothing(play: Play) -> None:
    e = (await lapsed(play)).execution_id
    await play.reclaim_grant(e, "wb", ttl=200)

    assert await play.late(play.reclaim(e, "wb"), 200) == GrantNotFound(e)

    assert await play.vector(e) == EXPIRED_LEASE
    await play.reclaim_grant(e, "wb", ttl=200)
    assert isinstance(await play.late(play.reclaim(e, "wb"), 199), Claimed)


@pytest.mark.spec("EX-067")
async def test_reclaim_cap_boundary(play: Play) -> None:
    held = await lapsed(play)
    e = held.execution_id
    for count in (1, 2, 3, 4):
        claimed = await play.reclaimed(e, max_reclaim_count=4)
        assert (claimed.lease_epoch, claimed.attempt_index) == (count + 1, count)
        await play.expired(claimed)
    await play.reclaim_grant(e)
    told = await play.told(e)
    play.clock.advance_ms(10)

    assert await play.reclaim(e, max_reclaim_count=4) == ReclaimCapExceeded(4)

    assert await play.vector(e) == terminal("failed")
    core = await play.core(e)
    assert (core["failure_reason"], core["completed_at"]) == ("max_reclaims_exceeded", play.now)
    assert (core["lease_reclaim_count"], core["total_attempt_count"]) == (4, 5)
    attempt = await play.attempt(e, 4)
    assert (attempt.attempt_state, attempt.ended_at) == (AttemptRecordState.INTERRUPTED_RECLAIMED, play.now)
    assert await play.told(e) == [*told, "released max_reclaims_exceeded"]
    assert [(news.variant, news.revoked_by) for news in await play.lease_feed(e)][-1] == ("Revoked", "reconciler")
    assert await play.outcomes() == ["failed"]
    assert (await play.sheet(e)).grant is None


async def reclaimed_before(play: Play, e: str, count: int) -> None:
    """Let an execution have been reclaimed so often."""
    reclaimed = Patch(Execution, (e,), {"lease_reclaim_count": count})
    change = Change((seen(await play.sheet(e)),), (reclaimed,), id=play.engine.minter.change_id())
    assert await play.store.commit([change]) == [play.now]


@pytest.mark.spec("EX-067")
@pytest.mark.parametrize("policy", [None, {}, {"timeout_policy": {"max_reclaim_count": 1}}])
async def test_without_a_word_of_anybody_a_thousand_reclaims_are_enough(play: Play, policy: Any) -> None:
    last, over = [(await lapsed(play, policy=policy)).execution_id for _ in range(2)]
    await reclaimed_before(play, last, 999)
    await reclaimed_before(play, over, 1000)

    async with play.untouched():
        assert await play.reclaim_grant(over, "wb") == ReclaimCapExceeded(1000)
    assert isinstance(await play.reclaim_grant(last, "wb"), ReclaimGrant)
    assert isinstance(await play.reclaim(last, "wb"), Claimed)
    assert await play.reclaim(over, "wb") == ReclaimCapExceeded(1000)
    assert await play.vector(over) == terminal("failed")


@pytest.mark.spec("EX-067")
@pytest.mark.parametrize("lease", ["lease_expired", "lease_revoked"])
async def test_the_attempt_that_was_one_too_many_says_how_it_was_lost(play: Play, lease: str) -> None:
    held = await play.claimed(policy={"max_reclaim_count": 0})
    e = held.execution_id
    if lease == "lease_revoked":
        await play.engine.revoke_lease(e)
    else:
        await play.expired(held)

    assert await play.reclaim(e, "wb", max_reclaim_count=5) == ReclaimCapExceeded(0)

    attempt = await play.attempt(e, 0)
    assert (attempt.attempt_state, attempt.failure_reason) == (AttemptRecordState.INTERRUPTED_RECLAIMED, lease)
    assert (await play.core(e))["failure_reason"] == "max_reclaims_exceeded"
    assert await play.outcomes(e) == ["failed"]


@pytest.mark.parametrize("road", ["grant", "pull"])
@pytest.mark.parametrize(("count", "warned"), [(98, False), (99, True), (100, False), (199, True)])
async def test_every_hundredth_reclaim_is_worth_a_warning(
    play: Play, caplog: pytest.LogCaptureFixture, road: str, count: int, warned: bool
) -> None:
    e = (await lapsed(play)).execution_id
    await reclaimed_before(play, e, count)

    if road == "grant":
        await play.reclaim_grant(e, "wb")
        await play.reclaim(e, "wb")
    else:
        await play.pull("wb")

    assert (await play.core(e))["lease_reclaim_count"] == count + 1
    words = f"{e} has been reclaimed {count + 1} times: its workers keep losing it"
    assert [one.message for one in caplog.records] == ([words] if warned else [])


@pytest.mark.spec("EX-067")
async def test_with_cap_zero_the_first_reclaim_ends_it_without_a_grant(play: Play) -> None:
    held = await lapsed(play)

    assert await play.reclaim(held.execution_id, max_reclaim_count=0) == ReclaimCapExceeded(0)

    assert await play.vector(held.execution_id) == terminal("failed")


@pytest.mark.spec("EX-067")
async def test_the_policy_s_cap_counts_before_the_caller_s(play: Play) -> None:
    held = await lapsed(play, policy={"max_reclaim_count": 1})
    e = held.execution_id
    await play.expired(await play.reclaimed(e, max_reclaim_count=0))

    async with play.untouched():
        assert await play.reclaim_grant(e) == ReclaimCapExceeded(1)
    assert await play.reclaim(e, max_reclaim_count=9) == ReclaimCapExceeded(1)


@pytest.mark.spec("EX-068")
async def test_terminal_between_grant_and_reclaim(play: Play) -> None:
    e = (await lapsed(play)).execution_id
    await play.reclaim_grant(e)
    await play.engine.cancel_execution(e)

    async with play.untouched():
        assert await play.reclaim(e) == NotReclaimable()

    assert await play.vector(e) == terminal("cancelled")
    assert await play.outcomes(e) == ["cancelled"]


@pytest.mark.spec("EX-069")
@pytest.mark.parametrize("road", ["reclaim", "takeover"])
async def test_late_writes_from_the_old_holder(play: Play, road: str) -> None:
    old = await lapsed(play)
    e = old.execution_id
    new = await play.reclaimed(e) if road == "reclaim" else await play.pull("wb")
    assert new is not None

    for call in lease_bound(play.engine, old.handle, play.now).values():
        async with play.refused(errors.StaleLease):
            await call()
    async with play.refused(errors.StaleLease):
        await play.engine.cancel_execution(e, source="lease_holder", fence=fence_of(old))
    for mixed in (Fence(old.lease_id, 2, new.attempt_id), Fence(new.lease_id, 2, old.attempt_id)):
        async with play.refused(errors.StaleLease):
            await play.engine.complete(execution_id=e, fence=mixed)

    core = await play.core(e)
    assert (core["lease_expires_at"], core["current_lease_epoch"]) == (new.lease_expires_at, 2)
    assert await play.engine.complete(new.handle) == Completed(e)


@pytest.mark.spec("EX-070")
async def test_double_redemption_of_a_reclaim_grant(play: Play) -> None:
    e = (await lapsed(play)).execution_id
    await play.reclaim_grant(e, "wb")

    answers: list[Any] = await asyncio.gather(*(play.reclaim(e, "wb", instance=f"wb-{n}") for n in range(2)))

    assert sorted(type(answer).__name__ for answer in answers) == ["Claimed", "NotReclaimable"]
    assert (await play.core(e))["lease_reclaim_count"] == 1
    assert (await play.told(e)).count("reclaimed") == 1


async def test_an_ordinary_claim_takes_over_what_lapsed_without_any_sweep(play: Play) -> None:
    held = await play.claimed(input_payload=b"in", policy={"timeout_policy": {"attempt_timeout_ms": 90_000}})
    e = held.execution_id
    play.clock.advance_ms(LEASE_MS - 1)
    assert await play.pull("wb") is None
    play.clock.advance_ms(1)

    taken = await play.pull("wb")

    assert taken is not None
    assert (taken.execution_id, taken.attempt_type) == (e, AttemptType.RECLAIM)
    assert (taken.lease_epoch, taken.attempt_index) == (2, 1)
    assert taken.handle.kind is HandleKind.RECLAIMED
    assert taken.payload is not None
    assert taken.payload.input_payload == b"in"
    assert await play.told(e) == ["acquired", "expired", "reclaimed"]
    core = await play.core(e)
    assert (core["lease_reclaim_count"], core["attempt_timeout_at"]) == (1, play.now + 90_000)


async def test_a_takeover_respects_a_reclaim_grant_of_somebody_else(play: Play) -> None:
    e = (await lapsed(play)).execution_id
    await play.reclaim_grant(e, "wc")

    async with play.untouched():
        assert await play.pull("wb") is None
    play.clock.advance_ms(5000)
    taken = await play.pull("wb")
    assert taken is not None
    assert taken.execution_id == e


@pytest.mark.spec("EX-071")
async def test_list_expired_leases(play: Play) -> None:
    engine, t = play.engine, play.now

    async def leased(ttl: int, uuid_digit: int, **given: Any) -> Claimed:
        e = f"{{fp:86}}:{uuid_digit:08d}-1111-4111-8111-111111111111"
        return await play.claimed(ttl=ttl, execution_id=e, **given)

    e2 = await leased(100, 2)
    e1 = await leased(100, 1)
    e3 = await leased(200, 3, namespace="n3")
    await leased(60_000, 4)
    revoked = await leased(100, 5)
    await play.revoked(revoked)
    done = await leased(100, 6)
    await engine.complete(done.handle)
    play.clock.now = t + 200
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
async def test_a_page_never_exceeds_ten_thousand(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    scan = play.store.store.scan

    async def counted(asked: Any) -> Any:
        limits.append(asked.limit)
        return await scan(msgspec.structs.replace(asked, limit=1))

    monkeypatch.setattr(play.store.store, "scan", counted)
    await play.engine.list_expired_leases(as_of=play.now, limit=20_000)

    assert limits == [10_001], "a page and one more, to know whether there is a next"
