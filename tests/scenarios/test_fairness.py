"""Fair shares: weighted turns between tenants, and ageing, each under a flood."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.settings import Settings
from tests.scenarios.play import Play
from tests.scenarios.test_s_quotas import Q, policy
from tests.scenarios.test_s_scheduling import ROADS, ask, pull


def tenant(name: str, weight: int = 1, **more: Any) -> dict[str, Any]:
    return {"fairness_key": name, "fairness_weight": weight, **more}


@pytest.mark.parametrize("road", [*ROADS, "bare"])
async def test_a_flood_of_one_tenant_does_not_hold_up_another(play: Play, road: str) -> None:
    for _ in range(30):
        await play.create(policy=tenant("flood"))
    play.clock.pass_ms(1000)
    late = {await play.create(policy=tenant("late")) for _ in range(5)}

    got = []
    for _ in range(10):
        if road == "bare":
            claimed = await play.pull()
            got.append(None if claimed is None else claimed.execution_id)
        else:
            got.append(await ask(play, road))

    assert late <= set(got)
    assert len(set(got)) == 10


async def test_one_claim_of_many_is_shared_by_weight(play: Play) -> None:
    names: dict[str, str] = {}
    for name, weight in (("gold", 3), ("silver", 1)):
        for _ in range(12):
            names[await play.create(policy=tenant(name, weight))] = name

    got = Counter(names[e] for e in await pull(play, 8))

    assert got == {"gold": 6, "silver": 2}


async def test_turns_span_lines_of_other_capabilities_and_limited_work(play: Play) -> None:
    await policy(play, cap=100)
    names: dict[str, str] = {}
    for n in range(10):
        terms = tenant("a", routing_requirements={"required_capabilities": ["gpu"]} if n % 2 else None)
        names[await play.create(policy=terms)] = "a"
        names[await play.create(policy=tenant("b", quota_policy_ids=[Q]))] = "b"
    play.clock.pass_ms(1000)
    for _ in range(10):
        names[await play.create()] = "none"

    got = [names[e] for _ in range(5) for e in await pull(play, 3, capabilities={"gpu"})]

    assert Counter(got) == {"a": 5, "b": 5, "none": 5}


async def test_priority_outranks_turns(play: Play) -> None:
    low = [await play.create(policy=tenant("low")) for _ in range(2)]
    high = {await play.create(priority=5, policy=tenant("high")) for _ in range(4)}

    got = [(await pull(play))[0] for _ in range(6)]

    assert set(got[:4]) == high
    assert set(got[4:]) == set(low)


async def test_two_workers_share_fairly_without_talking_to_each_other(play: Play) -> None:
    names: dict[str, str] = {}
    for name in ("flood", "late"):
        for _ in range(40 if name == "flood" else 8):
            names[await play.create(policy=tenant(name))] = name
    workers = [play.engine, Engine(play.engine.store, minter=SeededMinter(9))]

    got: Counter[str] = Counter()
    for n in range(20):
        [claimed] = await workers[n % 2].claim_admitted("default", worker_id="w", worker_instance_id=f"w-{n % 2}")
        got[names[claimed.execution_id]] += 1

    assert got["late"] == 8


@pytest.mark.parametrize("ageing", [True, False])
async def test_with_ageing_low_priority_never_starves_under_a_flood(play: Play, ageing: bool) -> None:
    terms = {"ageing": 1000} if ageing else {}
    patient = await play.create(priority=0, policy=terms)

    got = []
    for _ in range(12):  # two urgent ones come for each one that is done
        for _ in range(2):
            await play.create(priority=5, policy=terms)
        play.clock.pass_ms(1000)
        got += await pull(play)

    assert (patient in got) is ageing
    if ageing:
        assert got.index(patient) == 10, "five steps of priority: what comes within five seconds goes first, no more"


async def test_a_lane_gives_its_ageing_to_work_whose_policy_names_none(play: Play) -> None:
    ageing = Engine(play.engine.store, minter=SeededMinter(9), settings=Settings(ageing_ms={"default": 1000}))
    play = Play(ageing, play.clock)
    patient = await play.create(priority=0)
    elsewhere = await play.create(priority=0, lane="other")
    play.clock.pass_ms(6000)
    urgent = await play.create(priority=5)
    urgent_elsewhere = await play.create(priority=5, lane="other")

    assert await pull(play) == [patient]
    assert await pull(play) == [urgent]
    taken = [await play.pull(lane="other") for _ in range(2)]
    assert [one.execution_id for one in taken if one] == [urgent_elsewhere, elsewhere]


async def test_very_many_lines_are_all_reached(play: Play) -> None:
    waiting = {await play.create(policy=tenant(f"t{n:03}")) for n in range(150)}

    got = set()
    while claimed := await pull(play, 40):
        got.update(claimed)

    assert got == waiting
