"""S-072 to S-082: what the scheduler gives out, and what it holds up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.runtime.load_queue import LoadQueue
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import ClaimGrant
from flowfabric.model.budget import Budget, BudgetDimension
from flowfabric.model.change import Change, Guard, Patch
from flowfabric.model.quota import QuotaRequest, QuotaSlot
from flowfabric.stores.queries import Read, Scan
from flowfabric.testing import FlakyStore, Loss
from tests.scenarios.limits.test_budgets import B2, B, budget, report
from tests.scenarios.limits.test_quotas import Q2, Q, check, policy, root
from tests.scenarios.play import GRANT_MS, WAITING, Play
from tests.scenarios.scheduling.test_grants import requires
from tests.scenarios.scheduling.test_workers import ROUTE_BLOCKED, register

BUDGET_BLOCKED = "runnable/unowned/blocked_by_budget/waiting_for_budget/none/pending_first_attempt/rate_limited"
QUOTA_BLOCKED = "runnable/unowned/blocked_by_quota/waiting_for_quota/none/pending_first_attempt/rate_limited"


async def pull(play: Play, limit: int = 1, worker: str = "wa", **given: Any) -> list[str]:
    """What a worker that goes through admission gets."""
    claimed = await play.engine.claim_admitted(
        "default", limit, worker_id=worker, worker_instance_id=f"{worker}-1", **given
    )
    return [one.execution_id for one in claimed]


ROADS = ("scheduler", "pull")


async def ask(play: Play, road: str, worker: str = "wa", can: tuple[str, ...] = ()) -> str | None:
    """The next execution for a worker, by a grant or by a claim."""
    if road == "scheduler":
        grant = await play.next_for(worker, can=can)
        return None if grant is None else str(grant.execution_id)
    return next(iter(await pull(play, worker=worker, capabilities=can)), None)


@pytest.mark.spec("S-072")
async def test_priority_then_age(play: Play) -> None:
    by_priority = {priority: await play.create(priority=priority) for priority in (1, 10, 5)}
    play.clock.advance_ms(1)
    younger = await play.create(priority=5)

    got = []
    for _ in range(4):
        grant = await play.next_for()
        got.append(grant.execution_id)
        await play.claim(grant.execution_id)

    assert got == [by_priority[10], by_priority[5], younger, by_priority[1]]
    assert await play.next_for() is None


@pytest.mark.spec("S-073")
async def test_a_granted_head_does_not_hide_the_queue(play: Play) -> None:
    x, y = await play.create(priority=9), await play.create(priority=1)

    assert (await play.next_for("w1")).execution_id == x
    assert (await play.next_for("w2")).execution_id == y
    assert await play.next_for("w3") is None
    play.clock.advance_ms(GRANT_MS)
    assert (await play.next_for("w3")).execution_id == x


@pytest.mark.spec("S-074")
async def test_two_callers_two_executions(play: Play) -> None:
    waiting = {await play.create() for _ in range(2)}

    grants = await asyncio.gather(play.next_for("w1"), play.next_for("w2"))

    assert {grant.execution_id for grant in grants} == waiting


@pytest.mark.spec("S-075")
async def test_the_union_of_workers_is_not_enough(play: Play) -> None:
    e = await play.create(policy=requires("gpu", "cuda"))
    await play.engine.block_route(e)
    await register(play, "i1", capabilities=["gpu"])
    await register(play, "i2", capabilities=["cuda"])
    await register(play, "i3", namespace="n2", capabilities=["gpu", "cuda"])
    await register(play, "i4", lanes=["mail"], capabilities=["gpu", "cuda"])

    assert (await play.engine.sweep_once("unblock")).processed == 0
    assert await play.vector(e) == ROUTE_BLOCKED

    await register(play, "i5", capabilities=["gpu", "cuda"])
    assert await play.vector(e) == WAITING


@pytest.mark.spec("S-075")
async def test_the_net_finds_what_a_registration_missed(play: Play) -> None:
    e = await play.create(policy=requires("gpu"))
    await register(play, "i1", capabilities=["gpu"])
    await play.engine.block_route(e)

    assert (await play.engine.sweep_once("unblock")).processed == 1
    assert await play.vector(e) == WAITING


@pytest.mark.spec("S-076")
@pytest.mark.parametrize("road", ROADS)
async def test_mismatch_with_a_capable_peer_leaves_it_eligible(play: Play, road: str) -> None:
    await register(play, "i1", capabilities=["gpu"])
    e = await play.create(policy=requires("gpu"))

    assert await ask(play, road, can=("cpu",)) is None

    assert await play.vector(e) == WAITING


@pytest.mark.spec("S-077")
@pytest.mark.parametrize("road", ROADS)
async def test_a_budget_is_exhausted_at_equality(play: Play, road: str) -> None:
    await budget(play, tokens=10)
    await report(play, tokens=10)
    e = await play.create(policy={"budget_ids": [B]})
    hits = play.engine.metrics.counter_value("ff_budget_hit", dimension="tokens")

    assert await ask(play, road) is None

    assert await play.vector(e) == BUDGET_BLOCKED
    assert (await play.sheet(e)).blocking_text == f"budget {B}: tokens 10/10"
    assert play.engine.metrics.counter_value("ff_budget_hit", dimension="tokens") == hits + 1
    await play.engine.reset_budget(B)
    await play.engine.sweep_once("unblock")
    assert await ask(play, road) == e


@pytest.mark.parametrize("road", ROADS)
async def test_what_a_budget_counts_without_a_limit_holds_nobody_up(play: Play, road: str) -> None:
    await budget(play, calls=0, tokens=5)
    await report(play, calls=1000, others=7, tokens=4)
    e = await play.create(policy={"budget_ids": [B]})

    assert await ask(play, road) == e


@pytest.mark.spec("S-077")
async def test_work_that_had_begun_goes_on_with_its_attempt_when_there_is_room_again(play: Play) -> None:
    await budget(play, tokens=10)
    e = await play.create(policy={"budget_ids": [B]})
    assert await ask(play, "scheduler") == e
    await play.delayed(await play.claim(e), 5)
    await report(play, tokens=10)
    await play.promoted(e)

    assert await ask(play, "scheduler") is None
    began = BUDGET_BLOCKED.replace("pending_first_attempt", "attempt_interrupted")
    assert await play.vector(e) == began
    await play.engine.reset_budget(B)

    assert await ask(play, "scheduler") == e
    assert (await play.resume(e)).attempt_index == 0


@pytest.mark.spec("S-077")
@pytest.mark.parametrize("road", ROADS)
async def test_a_reset_sets_free_at_once_without_a_pass(play: Play, road: str) -> None:
    await budget(play, tokens=10)
    await report(play, tokens=10)
    waiting = {await play.create(policy={"budget_ids": [B]}) for _ in range(3)}
    assert await ask(play, road) is None

    await play.engine.reset_budget(B)

    assert {await ask(play, road) for _ in range(3)} == waiting


@pytest.mark.spec("S-078")
@pytest.mark.parametrize("road", ROADS)
async def test_fail_closed_on_an_unreadable_budget(play: Play, road: str) -> None:
    await budget(play, tokens=10)
    e = await play.create(policy={"budget_ids": [B]})
    await write_limit(play, -1)

    with pytest.raises(errors.Corruption):
        await ask(play, road)

    assert await play.vector(e) == WAITING
    assert await play.live_grant(e) is None
    await write_limit(play, 10)
    assert await ask(play, road) == e


async def write_limit(play: Play, hard: int) -> None:
    """Write into a budget what no rule would."""
    [row] = (await play.engine.runtime.load((Read(Budget, ("default", B)),))).rows[0]
    patch = Patch(BudgetDimension, ("default", B, "tokens"), {"hard_limit": hard})
    change = Change(guards=(Guard(Budget, ("default", B), row.revision),), writes=(patch,), id=1)
    assert await play.engine.store.commit([change]) != [None]


@pytest.mark.spec("S-078")
@pytest.mark.parametrize("road", ROADS)
async def test_fail_closed_when_the_store_is_away(play: Play, road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.engine.runtime.runtime.StoreBackoff.__init__.__defaults__", (0.0,))
    await policy(play, cap=5)
    e = await play.create(policy={"quota_policy_ids": [Q]})
    await play.pull(lane="other")  # lines are known: only admission has to be read
    flaky = FlakyStore(play.engine.store)
    play.engine.runtime.store = flaky
    play.engine.runtime.load_queue = LoadQueue(flaky)
    flaky.lose("load", Loss.REQUEST, times=50)

    with pytest.raises(errors.StoreUnavailable):
        await ask(play, road)

    flaky.heal()
    play.engine.runtime.store = flaky.inner
    play.engine.runtime.load_queue = LoadQueue(flaky.inner)
    assert await play.vector(e) == WAITING
    assert await play.live_grant(e) is None
    assert await ask(play, road) == e


@pytest.mark.spec("S-079")
@pytest.mark.parametrize("road", ROADS)
async def test_a_quota_refusal_blocks_until_the_window_opens(play: Play, road: str) -> None:
    await policy(play, window=60, rate=1)
    await check(play, play.engine.new_execution_id(), rate_limit=1)
    start = play.now
    e = await play.create(policy={"quota_policy_ids": [Q]})
    hits = play.engine.metrics.counter_value("ff_quota_hit", reason="rate")

    assert await ask(play, road) is None

    assert await play.vector(e) == QUOTA_BLOCKED
    assert (await play.sheet(e)).blocking_text == f"quota {Q}: rate, again in 60000 ms"
    assert play.engine.metrics.counter_value("ff_quota_hit", reason="rate") == hits + 1
    for later in (1, 30_000, 59_999):
        play.clock.now = start + later
        assert (await play.engine.sweep_once("unblock")).processed == 0
        assert await play.vector(e) == QUOTA_BLOCKED
    play.clock.now = start + 60_000
    assert (await play.engine.sweep_once("unblock")).processed == 1
    assert await ask(play, road) == e


@pytest.mark.spec("S-080")
@pytest.mark.parametrize("road", ROADS)
async def test_capability_is_checked_before_quota(play: Play, road: str) -> None:
    await policy(play, cap=1, rate=5)
    await play.create(policy={"quota_policy_ids": [Q], **requires("gpu")})

    for _ in range(10):
        assert await ask(play, road, can=("cpu",)) is None

    assert (await root(play)).active == 0
    assert await play.engine.runtime.scan(Scan(QuotaRequest)) == []
    assert await play.engine.runtime.scan(Scan(QuotaSlot)) == []


@pytest.mark.spec("S-081")
@pytest.mark.parametrize(
    ("tokens", "accepted"),
    [
        ([""], False),
        (["a,b"], False),
        (["a b"], False),
        (["a\nb"], False),
        ([f"t{n}" for n in range(257)], False),
        (["x" * 4097], False),
        (["x" * 4096], True),
        ([f"t{n}" for n in range(256)], True),
    ],
)
@pytest.mark.parametrize("road", ROADS)
async def test_claim_input_validation(play: Play, tokens: list[str], accepted: bool, road: str) -> None:
    async def asked() -> Any:
        if road == "scheduler":
            return await play.next_for(can=tokens)
        return await pull(play, capabilities=tokens)

    if accepted:
        assert not await asked()
    else:
        async with play.refused(errors.InvalidInput):
            await asked()


@pytest.mark.spec("S-082")
async def test_full_partition_coverage(play: Play) -> None:
    for partition in (0, 31, 32, 137, 255):
        e = await play.create(execution_id=f"{{fp:{partition}}}:0e000000-0000-4000-8000-000000000{partition:03}")
        polls = []
        for _ in range(8):
            play.clock.advance_ms(250)
            polls.append(await play.next_for())
        assert [grant.execution_id for grant in polls if grant] == [e]
        await play.claim(e)


# -- limits and claims ---------------------------------------------------------------------------------------------


async def test_the_bare_claim_takes_limited_work_without_admission(play: Play) -> None:
    await policy(play, cap=1)
    await budget(play, tokens=1)
    await report(play, tokens=1)
    first = await play.create(policy={"quota_policy_ids": [Q]})
    second = await play.create(policy={"budget_ids": [B]})
    third = await play.create()

    claimed = [await play.pull() for _ in range(4)]

    assert [one.execution_id for one in claimed if one] == [first, second, third]
    assert (await root(play)).active == 0


async def test_all_of_several_policies_must_admit_and_what_some_admitted_is_given_back(play: Play) -> None:
    await policy(play, cap=5)
    await policy(play, Q2, cap=1)
    blocker = await play.create(policy={"quota_policy_ids": [Q2]})
    e = await play.create(policy={"quota_policy_ids": [Q, Q2]})

    assert await pull(play, 5) == [blocker]

    assert await play.vector(e) == QUOTA_BLOCKED
    assert (await play.sheet(e)).blocked_on == f"quota:{Q2}"
    assert ((await root(play)).active, (await root(play, Q2)).active) == (0, 1)


@pytest.mark.parametrize("road", ROADS)
async def test_what_another_policy_refuses_is_no_request_in_the_window_of_the_first(play: Play, road: str) -> None:
    await policy(play, rate=1)
    await policy(play, Q2, cap=1)
    await play.create(policy={"quota_policy_ids": [Q2]})
    assert await ask(play, road) is not None
    play.clock.advance_ms(1)
    refused = await play.create(policy={"quota_policy_ids": [Q, Q2]})
    assert await ask(play, road) is None
    assert (await play.sheet(refused)).blocked_on == f"quota:{Q2}"

    other = await play.create(policy={"quota_policy_ids": [Q]})

    assert await ask(play, road) == other
    assert [
        one.execution_id for one in await play.engine.runtime.scan(Scan(QuotaRequest)) if one.quota_policy_id == Q
    ] == [other]


async def test_many_that_one_policy_refuses_use_up_nothing_of_the_rate_of_another(play: Play) -> None:
    await policy(play, rate=10)
    await policy(play, Q2, cap=1)
    crowd = [await play.create(policy={"quota_policy_ids": [Q, Q2]}) for _ in range(20)]
    others = [await play.create(policy={"quota_policy_ids": [Q]}) for _ in range(9)]

    got = set[str]()
    while more := await pull(play, 30):
        got.update(more)

    assert len(got.intersection(crowd)) == 1
    assert got.issuperset(others)


async def test_work_that_two_processes_are_refused_at_once_keeps_no_slot(play: Play) -> None:
    await policy(play, cap=1)
    await policy(play, Q2, cap=1)
    await play.create(policy={"quota_policy_ids": [Q2]})
    assert len(await pull(play)) == 1
    refused = await play.create(policy={"quota_policy_ids": [Q, Q2]})
    wires = [FlakyStore(play.store), FlakyStore(play.store)]
    gates = [wire.stop_after("commit") for wire in wires]
    asked = []
    for seed, (wire, gate) in enumerate(zip(wires, gates, strict=True), start=2):
        process = Play(Engine(wire, minter=SeededMinter(seed)), play.clock)
        asked.append(asyncio.ensure_future(pull(process)))
        async with asyncio.timeout(20):
            await gate.reached()  # the first policy has admitted it, the second was not asked yet

    for gate, answer in zip(gates, asked, strict=True):
        gate.release()
        assert await answer == []

    assert (await play.sheet(refused)).blocked_on == f"quota:{Q2}"
    assert ((await root(play)).active, (await root(play, Q2)).active) == (0, 1)
    other = await play.create(policy={"quota_policy_ids": [Q]})
    assert await pull(play) == [other]


async def test_a_request_of_an_earlier_life_stays_where_it_was_when_another_policy_refuses(play: Play) -> None:
    await policy(play, rate=2)
    await policy(play, Q2, cap=1)
    e = await play.create(policy={"quota_policy_ids": [Q, Q2]})
    [held] = await play.engine.claim_admitted("default", 1, worker_id="wa", worker_instance_id="wa-1")
    began = play.now
    await play.engine.complete(held.handle)
    await play.engine.outbox.wait_for_deliveries()
    await play.engine.replay_execution(e)
    await play.create(priority=1, policy={"quota_policy_ids": [Q2]})
    play.clock.advance_ms(1000)

    assert e not in await pull(play, 5)

    [kept] = [one for one in await play.engine.runtime.scan(Scan(QuotaRequest)) if one.quota_policy_id == Q]
    assert (kept.execution_id, kept.admitted_at) == (e, began)


@pytest.mark.parametrize("road", ROADS)
async def test_budgets_come_before_quotas_also_for_what_stands_behind_a_refusal(play: Play, road: str) -> None:
    await policy(play, cap=1)
    await budget(play, tokens=10)
    await report(play, tokens=10)
    await play.create(policy={"quota_policy_ids": [Q]})
    assert await ask(play, road) is not None
    first = await play.create(policy={"quota_policy_ids": [Q]})
    play.clock.advance_ms(1)
    second = await play.create(policy={"quota_policy_ids": [Q], "budget_ids": [B]})

    assert await ask(play, road) is None

    assert (await play.vector(first), await play.vector(second)) == (QUOTA_BLOCKED, BUDGET_BLOCKED)


async def test_every_exhausted_budget_of_several_holds_work_up(play: Play) -> None:
    await budget(play, tokens=10)
    await budget(play, B2, tokens=10)
    await report(play, B2, tokens=10)
    e = await play.create(policy={"budget_ids": [B, B2]})
    assert await pull(play) == []
    assert (await play.sheet(e)).blocked_on == f"budget:{B2}"

    await report(play, tokens=10)
    assert (await play.engine.sweep_once("unblock")).processed == 0
    await play.engine.reset_budget(B2)
    assert await pull(play) == []
    assert (await play.sheet(e)).blocked_on == f"budget:{B}", "the other one is exhausted by now"
    await play.engine.reset_budget(B)
    assert await pull(play) == [e]


async def test_undefined_and_unlimited_policies_admit_everything_and_keep_no_books(play: Play) -> None:
    await policy(play, Q2)
    executions = [await play.create(policy={"quota_policy_ids": [Q, Q2], "budget_ids": [B]}) for _ in range(3)]

    assert await pull(play, 5) == executions

    assert await play.engine.runtime.scan(Scan(QuotaSlot)) == []


async def test_a_window_of_zero_counts_as_a_minute(play: Play) -> None:
    await policy(play, window=0, rate=1)
    first = await play.create(policy={"quota_policy_ids": [Q]})
    play.clock.advance_ms(1)
    second = await play.create(policy={"quota_policy_ids": [Q]})
    assert await pull(play, 5) == [first]

    play.clock.advance_ms(59_999)
    assert (await play.engine.sweep_once("unblock")).processed == 0
    play.clock.advance_ms(1)
    assert (await play.engine.sweep_once("unblock")).processed == 1
    assert second in await pull(play, 5)


async def test_limited_and_unlimited_work_is_served_in_one_order(play: Play) -> None:
    await policy(play, cap=9)
    limited = {priority: await play.create(priority=priority, policy={"quota_policy_ids": [Q]}) for priority in (8, 4)}
    plain = {priority: await play.create(priority=priority) for priority in (9, 6, 2)}

    got = [(await pull(play))[0] for _ in range(2)] + await pull(play, 5)

    assert got == [plain[9], limited[8], plain[6], limited[4], plain[2]]


async def test_a_takeover_needs_no_second_admission(play: Play) -> None:
    await policy(play, cap=1)
    e = await play.create(policy={"quota_policy_ids": [Q]})
    assert await pull(play) == [e]
    play.clock.advance_ms(60_001)

    [again] = await play.engine.claim_admitted("default", worker_id="wb", worker_instance_id="wb-1")

    assert (again.execution_id, again.lease_epoch, again.attempt_type) == (e, 2, "reclaim")
    assert (await root(play)).active == 1


async def test_route_blocked_limited_work_is_admitted_by_a_capable_worker(play: Play) -> None:
    await policy(play, cap=1)
    e = await play.create(policy={"quota_policy_ids": [Q], **requires("gpu")})
    await play.engine.block_route(e)

    grant = await play.next_for("wa", can={"gpu"})

    assert isinstance(grant, ClaimGrant)
    assert (grant.execution_id, (await root(play)).active) == (e, 1)
