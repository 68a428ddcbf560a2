"""EX-026 to EX-030: what a worker is given next, and what an operator takes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.claiming import ready_queues
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Claimed, ClaimGrant, OperatorClaim, ReclaimGrant, RetryScheduled
from flowfabric.model.states import AttemptType
from flowfabric.rules.security import grant_key as grant_keys
from flowfabric.rules.security.grant_key import GrantFault
from tests.scenarios.play import ACTIVE, LEASE_MS, WAITING, Play, terminal
from tests.scenarios.scheduling.test_grants import MISSING, requires

RETRY_ONCE = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}}
ROUTE_BLOCKED = "runnable/unowned/blocked_by_route/waiting_for_capable_worker/none/pending_first_attempt/waiting"


async def after_a_retry(play: Play, a: str) -> None:
    await play.grant(a)
    held = await play.claim(a)
    assert isinstance(await play.engine.fail(held.handle, reason="flaky"), RetryScheduled)
    await play.promoted(a)


async def after_a_delay(play: Play, a: str) -> None:
    await play.grant(a)
    await play.delayed(await play.claim(a))
    await play.promoted(a)


async def after_a_block(play: Play, a: str) -> None:
    await play.engine.block_execution_for_admission(a, reason="waiting_for_quota")
    await play.engine.unblock_execution(a)


async def after_a_replay(play: Play, a: str) -> None:
    await play.grant(a)
    await play.engine.complete((await play.claim(a)).handle)
    await play.engine.replay_execution(a)


async def after_a_lapse(play: Play, a: str) -> None:
    await play.grant(a)
    await play.expired(await play.claim(a))


RETURNS = [after_a_retry, after_a_delay, after_a_block, after_a_replay, after_a_lapse]


@pytest.mark.spec("EX-026")
@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("road", ["scheduler", "pull"])
async def test_returning_executions_keep_their_age(play: Play, returns: Any, road: str) -> None:
    a = await play.create(policy=RETRY_ONCE)
    play.clock.advance_ms(10)
    b = await play.create(policy=RETRY_ONCE)

    await returns(play, a)

    if road == "pull":
        taken = [await play.pull("wc"), await play.pull("wc")]
    else:
        taken = [await play.next_for("wc"), await play.next_for("wc")]
    assert [one.execution_id for one in taken if one] == [a, b]


@pytest.mark.spec("EX-027")
async def test_unroutable_work_does_not_hold_up_the_lane(play: Play) -> None:
    a = await play.create(priority=9, policy=requires("gpu"))
    b = await play.create(priority=1)

    grant = await play.next_for("wa")

    assert isinstance(grant, ClaimGrant)
    assert grant.execution_id == b
    assert await play.next_for("wb") is None
    assert await play.live_grant(a) is None


@pytest.mark.spec("EX-027")
@pytest.mark.parametrize("road", ["scheduler", "pull"])
async def test_a_capable_claim_takes_route_blocked_work_at_once(play: Play, road: str) -> None:
    a = await play.create(priority=9, policy=requires("gpu"))
    b = await play.create(priority=1)
    await play.engine.block_route(a)
    assert await play.vector(a) == ROUTE_BLOCKED
    core = await play.core(a)
    assert core["blocking_detail"] == "no connected worker satisfies required_capabilities"
    assert await play.eligible() == [b]

    if road == "scheduler":
        grant = await play.next_for("wa", can={"gpu"})
        assert grant.execution_id == a
        assert await play.vector(a) == WAITING
        claimed = await play.claim(a, "wa")
    else:
        pulled = await play.pull("wa", can={"gpu"})
        assert pulled is not None
        claimed = pulled

    assert (claimed.execution_id, claimed.attempt_type) == (a, AttemptType.INITIAL)
    assert await play.vector(a) == ACTIVE
    assert "blocking_detail" not in await play.core(a)


@pytest.mark.spec("EX-027")
async def test_work_that_is_blocked_by_route_while_it_is_granted_is_unblocked_with_its_grant(play: Play) -> None:
    a = await play.create(policy=requires("gpu"))
    elsewhere = Engine(play.store.store, minter=SeededMinter(2))
    gate = play.slowed("commit")
    asked = asyncio.ensure_future(play.next_for("wa", can={"gpu"}))
    async with asyncio.timeout(20):
        await gate.reached()
        await elsewhere.block_route(a)
        gate.release()
        grant = await asked

    assert (grant.execution_id, await play.vector(a)) == (a, WAITING)
    assert await play.live_grant(a) is not None
    assert "blocking_detail" not in await play.core(a)
    assert (await play.claim(a, "wa")).lease_epoch == 1


@pytest.mark.spec("EX-027")
async def test_a_worker_without_the_capability_passes_route_blocked_work_by(play: Play) -> None:
    a = await play.create(priority=9, policy=requires("gpu"))
    await play.engine.block_route(a)

    async with play.untouched():
        assert await play.next_for("wa", can={"cpu"}) is None
        assert await play.pull("wa", can={"cpu"}) is None
    async with play.refused(errors.ExecutionNotEligible):
        await play.grant(a, can={"gpu"})


async def test_takeovers_and_waiting_work_are_served_in_one_order(play: Play) -> None:
    held = {}
    for priority in (7, 3):
        e = await play.create(priority=priority)
        await play.grant(e)
        held[priority] = await play.claim(e)
    waiting = {priority: await play.create(priority=priority) for priority in (9, 5, 1)}
    for claimed in held.values():
        await play.engine.revoke_lease(claimed.execution_id)

    taken = [await play.pull("wb") for _ in range(6)]

    assert taken[-1] is None
    order = [waiting[9], held[7].execution_id, waiting[5], held[3].execution_id, waiting[1]]
    assert [one.execution_id for one in taken if one] == order
    assert [one.attempt_type for one in taken if one] == ["initial", "reclaim", "initial", "reclaim", "initial"]


ROADS_OF_WORKERS = ["claim", "claim_admitted", "claim_for_worker"]


@pytest.mark.parametrize("ttl", [1, 100, LEASE_MS])
@pytest.mark.parametrize("road", ROADS_OF_WORKERS)
async def test_a_lease_that_lapses_right_after_a_look_is_taken_over_in_its_place(
    play: Play, road: str, ttl: int
) -> None:
    await play.create(priority=9)
    held = await play.engine.claim("default", worker_id="wa", worker_instance_id="wa-1", lease_ttl_ms=ttl)
    assert held is not None
    await play.create()
    play.clock.advance_ms(ttl)

    answer = await getattr(play.engine, road)("default", worker_id="wb", worker_instance_id="wb-1")

    taken = answer[0] if isinstance(answer, list) else answer
    assert taken.execution_id == held.execution_id


async def test_a_lease_of_another_process_that_lapses_right_after_a_look_is_taken_over_in_its_place(play: Play) -> None:
    other = Engine(play.engine.store, minter=SeededMinter(9))
    await play.create(priority=9)
    held = await other.claim("default", worker_id="wa", worker_instance_id="wa-1", lease_ttl_ms=100)
    assert held is not None
    for _ in range(2):
        await play.create()
    assert await play.pull("wb") is not None  # a look, while the lease holds
    play.clock.advance_ms(100)

    taken = await play.pull("wb")

    assert taken is not None
    assert taken.execution_id == held.execution_id


async def test_a_lease_that_a_renewal_made_shorter_is_taken_over_in_its_place(play: Play) -> None:
    await play.create(priority=9)
    held = await play.pull("wa")
    assert held is not None
    await play.create()
    await play.engine.renew(held.handle, lease_ttl_ms=50)
    play.clock.advance_ms(50)

    taken = await play.pull("wb")

    assert taken is not None
    assert taken.execution_id == held.execution_id


async def test_a_lease_that_was_claimed_with_another_lane_s_name_is_taken_over_in_its_own(play: Play) -> None:
    urgent = await play.create(priority=9)
    for _ in range(2):
        await play.create()
    await play.grant(urgent, "wa")
    assert await play.pull("wb") is not None  # a look, before the lease is taken
    await play.claim(urgent, "wa", lane_id="elsewhere", ttl=100)
    play.clock.advance_ms(100)

    taken = await play.pull("wb")

    assert taken is not None
    assert taken.execution_id == urgent


async def test_many_are_claimed_in_one_order_in_one_call(play: Play) -> None:
    low = (await play.claimed(priority=2)).execution_id
    high = (await play.claimed(priority=8)).execution_id
    waiting = {priority: await play.create(priority=priority) for priority in (9, 5, 1)}
    play.clock.advance_ms(LEASE_MS)

    taken = await play.engine.claim_many(
        "default", 10, worker_id="wb", worker_instance_id="wb-1", lease_ttl_ms=LEASE_MS
    )

    assert [one.execution_id for one in taken] == [waiting[9], high, waiting[5], low, waiting[1]]


async def test_the_scheduler_merges_takeovers_and_waiting_work(play: Play) -> None:
    lapsed = (await play.claimed(priority=5)).execution_id
    first, last = await play.create(priority=9), await play.create(priority=1)
    play.clock.advance_ms(LEASE_MS)

    grants = [await play.next_for("wb") for _ in range(4)]

    assert [grant.execution_id for grant in grants if grant] == [first, lapsed, last]
    assert [type(grant) for grant in grants[:3]] == [ClaimGrant, ReclaimGrant, ClaimGrant]
    assert isinstance(await play.reclaim(lapsed, "wb"), Claimed)


@pytest.mark.parametrize("road", ["scheduler", "pull"])
async def test_a_takeover_at_the_cap_ends_the_execution_and_goes_on(play: Play, road: str) -> None:
    capped = [await play.claimed(priority=9, policy={"max_reclaim_count": 0}) for _ in range(12)]
    lapsed = (await play.claimed(priority=1)).execution_id
    play.clock.advance_ms(LEASE_MS)

    taken: Any = await play.next_for("wb") if road == "scheduler" else await play.pull("wb")

    assert taken.execution_id == lapsed
    for one in capped:
        assert await play.vector(one.execution_id) == terminal("failed")
        assert (await play.core(one.execution_id))["failure_reason"] == "max_reclaims_exceeded"


@pytest.mark.parametrize("road", ["scheduler", "pull"])
@pytest.mark.parametrize(
    "others", [{"lane": "main"}, {"policy": requires("gpu")}, {"priority": 1}], ids=["lane", "capability", "priority"]
)
async def test_however_many_leases_have_lapsed_before_it_the_best_of_the_lane_is_taken_over(
    play: Play, monkeypatch: pytest.MonkeyPatch, road: str, others: dict[str, Any]
) -> None:
    monkeypatch.setattr(ready_queues, "EXPIRED_LEASES_BATCH", 2)
    lane, can = others.get("lane", "default"), {"gpu"}
    for _ in range(5):
        e = await play.create(**others)
        await play.grant(e, "wz", can=can, lane=lane)
        await play.claim(e, "wz")
    play.clock.advance_ms(1)
    best = (await play.claimed("wz", priority=9)).execution_id
    play.clock.advance_ms(LEASE_MS)

    taken: Any = await play.next_for("wb") if road == "scheduler" else await play.pull("wb")

    assert taken is not None
    assert taken.execution_id == best


async def test_work_that_another_process_put_up_for_takeover_is_found_at_once(play: Play) -> None:
    other = Engine(play.engine.store, minter=SeededMinter(9))
    await play.revoked(await play.claimed())
    assert await other.claim("default", worker_id="wb", worker_instance_id="wb-1") is not None
    held = await play.claimed()
    assert await other.claim("default", worker_id="wb", worker_instance_id="wb-1") is None
    await play.revoked(held)

    taken = await other.claim("default", worker_id="wb", worker_instance_id="wb-1")

    assert taken is not None
    assert (taken.execution_id, taken.attempt_type) == (held.execution_id, AttemptType.RECLAIM)


async def test_a_busy_worker_hears_of_a_new_line_soon(play: Play) -> None:
    other = Engine(play.engine.store, minter=SeededMinter(9))
    for _ in range(3):
        await play.create()
    first = await other.claim("default", worker_id="wb", worker_instance_id="wb-1", capabilities={"gpu"})
    assert first is not None
    urgent = await play.create(priority=9, policy=requires("gpu"))
    play.clock.advance_ms(2000)
    await other.describe_execution(urgent)  # whatever it does, an engine hears what time it is

    taken = await other.claim("default", worker_id="wb", worker_instance_id="wb-1", capabilities={"gpu"})

    assert taken is not None
    assert taken.execution_id == urgent


@pytest.mark.parametrize("each", ["capability", "tenant"])
@pytest.mark.parametrize("road", ROADS_OF_WORKERS)
async def test_however_many_kinds_of_work_a_lane_has_the_best_comes_first(
    play: Play, monkeypatch: pytest.MonkeyPatch, road: str, each: str
) -> None:
    monkeypatch.setattr(ready_queues, "MAX_QUEUES_PER_CLAIM", 3)
    kind = {n: requires(f"c{n}") if each == "capability" else {"fairness_key": f"t{n}"} for n in range(10)}
    created = {n: await play.create(priority=n, policy=kind[n]) for n in (4, 9, 1, 7, 3, 8, 2, 6, 5, 0)}
    claim, can = getattr(play.engine, road), {f"c{n}" for n in range(10)}

    answers = [await claim("default", worker_id="wb", worker_instance_id="wb-1", capabilities=can) for _ in created]

    got = [(answer[0] if isinstance(answer, list) else answer).execution_id for answer in answers]
    assert got == [created[n] for n in reversed(range(10))]


async def test_of_many_kinds_of_work_many_are_claimed_in_one_order(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_queues, "MAX_QUEUES_PER_CLAIM", 3)
    deep = [await play.create(priority=9, policy={"fairness_key": "t0"}) for _ in range(2)]
    kinds = {n: await play.create(priority=n, policy={"fairness_key": f"t{n}"}) for n in (1, 5, 2, 4, 3)}
    await play.create(priority=0, policy={"fairness_key": "t0"})

    claimed = await play.engine.claim_many("default", 5, worker_id="wb", worker_instance_id="wb-1")

    got = [one.execution_id for one in claimed]
    assert got == [*deep, kinds[5], kinds[4], kinds[3]][: len(got)]
    assert len(got) >= 3


async def test_granted_heads_hide_neither_queue_nor_takeovers(play: Play) -> None:
    heads = [await play.create(priority=9) for _ in range(25)]
    for e in heads:
        await play.grant(e, "wx")
    gone = [await play.claimed(priority=8) for _ in range(25)]
    for held in gone:
        await play.revoked(held)
        await play.reclaim_grant(held.execution_id, "wx")
    late = await play.claimed(priority=5)
    await play.revoked(late)
    last = await play.create(priority=1)

    grants = [await play.next_for("wb"), await play.next_for("wb"), await play.next_for("wb")]
    assert [grant.execution_id for grant in grants if grant] == [late.execution_id, last]

    play.clock.advance_ms(5000)
    grant = await play.next_for("wb")
    assert grant.execution_id == heads[0], "a grant that lapsed hides nothing, and no maintenance is needed"


async def test_schedulers_in_parallel_never_grant_one_execution_twice(play: Play) -> None:
    created = {await play.create() for _ in range(30)}

    grants = await asyncio.gather(*(play.next_for(f"w{number}") for number in range(35)))

    granted = [grant.execution_id for grant in grants if grant]
    assert len(granted) == 30
    assert set(granted) == created


@pytest.mark.spec("EX-028")
async def test_operator_grant_and_claim_fresh(play: Play) -> None:
    e = await play.create(policy=requires("gpu"))

    answer = await play.engine.issue_grant_and_claim(e, lane_id="default", lease_duration_ms=30_000)

    core = await play.core(e)
    assert answer == OperatorClaim(core["current_lease_id"], 1, 0)
    assert await play.vector(e) == ACTIVE
    assert (core["current_worker_id"], core["current_worker_instance_id"]) == ("operator", "operator")
    assert (core["lease_expires_at"], core["lease_renewal_deadline"]) == (play.now + 30_000, play.now + 20_000)
    assert (await play.sheet(e)).grant is None
    assert await play.told(e) == ["acquired issue_grant_and_claim"]


@pytest.mark.spec("EX-028")
async def test_operator_grant_and_claim_resumed(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    await play.delayed(held)
    await play.promoted(e)

    answer = await play.engine.issue_grant_and_claim(e, lane_id="default", lease_duration_ms=30_000)

    assert (answer.lease_epoch, answer.attempt_index) == (2, 0)
    assert (await play.core(e))["current_attempt_id"] == held.attempt_id
    assert (await play.told(e))[-1] == "acquired issue_grant_and_claim_resumed"


@pytest.mark.spec("EX-029")
async def test_operator_grant_and_claim_refusals(play: Play) -> None:
    active = (await play.claimed()).execution_id
    granted = await play.create()
    await play.grant(granted, "wa")
    delayed = await play.create(delay_until=play.now + 1000)
    waiting = await play.create()

    async def operator(e: str, lane: str = "default") -> Any:
        return await play.engine.issue_grant_and_claim(e, lane_id=lane, lease_duration_ms=30_000)

    async with play.refused(errors.NotFound, entity="execution"):
        await operator(MISSING)
    async with play.refused(errors.ExecutionNotEligible):
        await operator(active)
    async with play.refused(errors.GrantAlreadyExists):
        await operator(granted)
    async with play.refused(errors.ExecutionNotEligible):
        await operator(delayed)
    async with play.refused(errors.ExecutionNotInEligibleSet):
        await operator(waiting, "main")
    held = await play.live_grant(granted)
    assert held is not None
    assert held.worker_id == "wa"


@pytest.mark.spec("EX-030")
async def test_a_scheduler_s_grant_is_signed_and_outlives_a_rotation(play: Play) -> None:
    engine, e = play.engine, await play.create()
    grant = await play.next_for("wa")
    assert (grant.execution_id, grant.partition_key, grant.lane_id) == (e, "{fp:86}", "default")
    assert grant.expires_at_ms == play.now + 5000
    stored = await play.live_grant(e)
    assert stored is not None
    assert stored.key_id == grant_keys.grant_id(grant.grant_key)

    await engine.rotate_waitpoint_hmac_secret_all("k2", "ffeeddccbbaa99887766554433221100" * 2, 1000)

    assert await engine.verify_grant(e, grant.grant_key) is None
    play.clock.advance_ms(4999)
    assert await engine.verify_grant(e, grant.grant_key) is None
    play.clock.advance_ms(1)
    assert await engine.verify_grant(e, grant.grant_key) is GrantFault.EXPIRED
    play.clock.advance_ms(-5000)
    await play.create()
    assert ":k2:" in (await play.next_for("wb")).grant_key
    assert isinstance(await play.claim(e, "wa"), Claimed)


@pytest.mark.spec("EX-030")
async def test_a_grant_key_that_was_altered_is_not_good(play: Play) -> None:
    engine, e = play.engine, await play.create()
    key = (await play.next_for("wa")).grant_key
    end = key.split(":")[4]

    stranger, later = "99999999-9999-4999-8999-999999999999", str(int(end) + 1)
    for old, new in ((e[-36:], stranger), ("{fp:86}", "{fp:85}"), (end, later)):
        assert await engine.verify_grant(e, key.replace(old, new)) is GrantFault.SIGNATURE_MISMATCH
    assert await engine.verify_grant(e, key.replace("pg:", "pg:reclaim:")) is GrantFault.SIGNATURE_MISMATCH
    assert await engine.verify_grant(e, key[:-1] + ("0" if key[-1] != "0" else "1")) is GrantFault.SIGNATURE_MISMATCH
    assert await engine.verify_grant(e, key.replace(":k1:", ":k7:")) is GrantFault.UNKNOWN_KID
    assert await engine.verify_grant(e, "pg:") is GrantFault.MALFORMED
    assert await engine.verify_grant(MISSING, key) is GrantFault.UNKNOWN_GRANT
    await play.claim(e, "wa")
    assert await engine.verify_grant(e, key) is GrantFault.UNKNOWN_GRANT, "a grant is used once"


@pytest.mark.spec("EX-030")
async def test_without_a_key_nothing_is_granted(keyless: Engine, clock: ManualClock) -> None:
    play = Play(keyless, clock)
    await play.create()
    lapsed = await play.claimed()
    await play.expired(lapsed)

    async with play.refused(errors.Unavailable, op="claim_for_worker"):
        await play.next_for("wa")
    async with play.refused(errors.Unavailable, op="issue_reclaim_grant"):
        await play.reclaim_grant(lapsed.execution_id)
