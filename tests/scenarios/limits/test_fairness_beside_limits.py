"""Turns beside limits: what a full limit blocked is unblocked by priority, then by weighted turns, then by age."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.limits import unblocker
from flowfabric.ids import SeededMinter
from flowfabric.model.execution import Execution
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Scan, Where
from tests.scenarios.limits.test_budgets import B, budget, report
from tests.scenarios.limits.test_quotas import Q2, Q, policy
from tests.scenarios.play import Play
from tests.scenarios.scheduling.test_fairness import tenant
from tests.scenarios.scheduling.test_sweeps import write
from tests.scenarios.watched import Watched

ONE, BOTH = [Q], [Q, Q2]


@pytest.fixture
async def play(store: Store, clock: ManualClock) -> Play:
    """An engine that nobody watches: to look at hundreds of rows after each write takes long."""
    return Play(Engine(store, minter=SeededMinter(1)), clock)


async def submit(play: Play, key: str, count: int, quotas: list[str], **more: Any) -> list[str]:
    given = {name: more.pop(name) for name in ("priority", "lane") if name in more}
    terms = tenant(key, quota_policy_ids=quotas, **more)
    created: list[str] = []
    for _ in range(count):
        play.clock.advance_ms(1)
        created.append(await play.create(policy=terms, **given))
    return created


async def run_in_turn(play: Play, count: int, *engines: Engine, slots: int = 1, lane: str = "default") -> list[str]:
    """Run `count` executions, the first that was claimed ends first; workers ask for more than a limit lets them have.

    The engines take turns with claims and ends. Every claim that finds the limit full blocks what it meets.
    """
    engines = engines or (play.engine,)
    order: list[str] = []
    running: list[Any] = []
    for number in range(4 * count + 8):
        engine = engines[number % len(engines)]
        claimed = await engine.claim_admitted(lane, slots, worker_id="w", worker_instance_id=f"w-{number % 2}")
        running += claimed
        order += [one.execution_id for one in claimed]
        if len(order) >= count:
            break
        if not claimed and running:
            await engine.complete(running.pop(0).handle)
            await engine.outbox.wait_for_deliveries()
    for held in running:
        await play.engine.complete(held.handle)
    return order[:count]


def places(order: list[str], some: list[str]) -> list[int]:
    return [order.index(one) for one in some]


async def blocked(play: Play) -> list[Execution]:
    return await play.engine.runtime.scan(Scan(Execution, (Where("blocked_on", "starts", "quota:"),), limit=1000))


async def full(play: Play, quotas: list[str]) -> Any:
    """Fill the limit by work of another lane, and have everything blocked that waits."""
    await play.create(policy={"quota_policy_ids": quotas}, lane="elsewhere")
    [held] = await play.engine.claim_admitted("elsewhere", worker_id="w", worker_instance_id="w-9")
    return held


@pytest.mark.parametrize("slots", [1, 10])
@pytest.mark.parametrize("caps", [(1,), (1, 1), (3, 1), (1, 3)])
async def test_a_late_tenant_gets_every_second_turn(play: Play, caps: tuple[int, ...], slots: int) -> None:
    for quota, cap in zip(BOTH, caps, strict=False):
        await policy(play, quota, cap=cap)
    quotas = BOTH[: len(caps)]
    many = await submit(play, "a", 200, quotas)
    few = await submit(play, "b", 5, quotas)

    order = await run_in_turn(play, 14, slots=slots)

    assert places(order, few) == [1, 3, 5, 7, 9]
    ran = [one for one in order if one in many]
    assert ran == many[: len(ran)], "by age within a tenant"


async def test_weights_count_beside_a_limit(play: Play) -> None:
    await policy(play, cap=1)
    held = await full(play, ONE)
    gold = await submit(play, "gold", 20, ONE, fairness_weight=3)
    await submit(play, "silver", 20, ONE)
    assert await play.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    assert len(await blocked(play)) == 40
    await play.engine.complete(held.handle)
    await play.engine.outbox.wait_for_deliveries()

    order = await run_in_turn(play, 16)

    assert [sum(one in gold for one in order[start : start + 4]) for start in (0, 4, 8, 12)] == [3, 3, 3, 3]


async def test_priority_comes_before_turns_beside_a_limit(play: Play) -> None:
    await policy(play, cap=1)
    held = await full(play, ONE)
    low = await submit(play, "a", 5, ONE)
    others = await submit(play, "b", 5, ONE)
    urgent = await submit(play, "a", 3, ONE, priority=7)
    assert await play.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    await play.engine.complete(held.handle)
    await play.engine.outbox.wait_for_deliveries()

    order = await run_in_turn(play, 9)

    assert order[:3] == urgent
    assert {len(set(order[3:]) & set(some)) for some in (low, others)} == {3}


async def test_each_of_many_tenants_gets_its_turn_beside_a_limit(play: Play) -> None:
    await policy(play, cap=1)
    many = await submit(play, "a", 200, ONE)
    others = [(await submit(play, f"tenant-{number}", 1, ONE))[0] for number in range(100)]

    order = await run_in_turn(play, 103)

    assert set(others) <= set(order)
    assert len(set(order) & set(many)) == 3


async def test_more_tenants_than_one_read_compares_are_all_reached(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unblocker, "MAX_LISTS", 4)
    await policy(play, cap=1)
    held = await full(play, ONE)
    everyone = [(await submit(play, f"tenant-{number}", 1, ONE))[0] for number in range(11)]
    assert await play.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    await play.engine.complete(held.handle)
    await play.engine.outbox.wait_for_deliveries()

    assert set(await run_in_turn(play, 11)) == set(everyone)


async def test_a_process_that_has_not_heard_of_a_tenant_gives_it_its_turn(play: Play) -> None:
    await policy(play, cap=1)
    held = await full(play, ONE)
    await submit(play, "a", 150, ONE)
    few = await submit(play, "b", 2, ONE)
    assert await play.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    stranger = Engine(play.engine.store, minter=SeededMinter(9))

    await stranger.complete(held.handle)  # and nothing else: it never claimed, and never saw the tenants
    await stranger.outbox.wait_for_deliveries()
    order = await run_in_turn(play, 6, stranger)

    assert places(order, few) == [1, 3]


async def test_two_processes_share_by_turns_beside_a_limit(play: Play) -> None:
    await policy(play, cap=1)
    await submit(play, "a", 60, ONE)
    few = await submit(play, "b", 5, ONE)

    order = await run_in_turn(play, 24, play.engine, Engine(play.engine.store, minter=SeededMinter(9)))

    assert places(order, few)[-1] <= 20


async def test_turns_of_one_lane_leave_the_turns_of_another_alone(play: Play) -> None:
    await policy(play, cap=1)
    held = await full(play, ONE)
    await submit(play, "a", 4, ONE)
    lone = await submit(play, "a", 2, ONE, lane="other")
    few = await submit(play, "b", 2, ONE)
    for lane in ("default", "other"):
        assert await play.engine.claim_admitted(lane, worker_id="w", worker_instance_id="w") == []

    order = [await _unblocked_by(play, held)]
    for _ in range(7):
        lane = next(row.lane_id for row in await _ready(play))
        [held] = await play.engine.claim_admitted(lane, worker_id="w", worker_instance_id="w")
        order.append(await _unblocked_by(play, held))

    assert places(order, lone) == [1, 2], "it is older than the work whose turn it is in the first lane"
    assert places(order, few) == [3, 5]


async def _ready(play: Play) -> list[Execution]:
    return await play.engine.runtime.scan(Scan(Execution, (Where("line", "set"),), limit=10))


async def _unblocked_by(play: Play, held: Any) -> str:
    await play.engine.complete(held.handle)
    await play.engine.outbox.wait_for_deliveries()
    [row] = await _ready(play)
    return row.execution_id


async def test_what_an_earlier_release_blocked_takes_part(play: Play) -> None:
    await policy(play, cap=1)
    held = await full(play, ONE)
    old = await submit(play, "a", 2, ONE)
    assert await play.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    for name in old:  # a release without fair lists wrote the name of the limit alone
        await write(play, name, blocked_on=f"quota:{Q}")
    few = await submit(play, "b", 2, ONE)
    assert await play.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    await play.engine.complete(held.handle)
    await play.engine.outbox.wait_for_deliveries()

    order = await run_in_turn(play, 4)

    assert order == [old[0], few[0], old[1], few[1]]


async def test_what_a_budget_blocked_goes_on_when_there_is_room(play: Play) -> None:
    await budget(play, tokens=1)
    await report(play, tokens=1)
    names = [await play.create(policy=tenant(key, budget_ids=[B])) for key in "ab" * 40]
    assert await play.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []

    await play.engine.change_budget_limits(B, dimensions=["tokens"], hard_limits=[9], soft_limits=[0])

    assert {
        row.execution_id for row in await play.engine.runtime.scan(Scan(Execution, (Where("line", "set"),)))
    } == set(names)


@pytest.mark.parametrize("keys", [1, 100])
async def test_a_freed_slot_costs_few_reads_and_frees_one(
    play: Play, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await policy(play, cap=1)
    held = await full(play, ONE)
    for number in range(120):
        await submit(play, f"tenant-{number % keys}", 1, ONE)
    assert await play.engine.claim_admitted("default", worker_id="w", worker_instance_id="w") == []
    monkeypatch.setattr(play.engine.unblocker, "unblock_quota_waiters", _wakes_nobody)
    await play.engine.complete(held.handle)
    await play.engine.outbox.wait_for_deliveries()
    watched = Watched(play.engine.store)

    assert await Engine(watched, minter=SeededMinter(9)).unblocker.unblock_quota_waiters(Q)

    assert len(await blocked(play)) == 119
    asked = {verb: watched.calls[verb] for verb in ("scan", "load", "commit")}
    assert asked == {"scan": 2, "load": 2, "commit": 1}


async def _wakes_nobody(*_: Any, **__: Any) -> bool:
    return True
