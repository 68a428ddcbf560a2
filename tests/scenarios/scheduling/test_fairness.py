"""Fair shares: weighted turns between tenants, and ageing, each under a flood."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from flowfabric.engine.claiming import ready_queues
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.settings import Settings
from tests.scenarios.limits.test_quotas import Q, policy
from tests.scenarios.play import LEASE_MS, Play
from tests.scenarios.scheduling.test_claims import ROADS, ask, pull
from tests.scenarios.scheduling.test_grants import requires


def tenant(name: str, weight: int = 1, **more: Any) -> dict[str, Any]:
    return {"fairness_key": name, "fairness_weight": weight, **more}


async def following(play: Play, road: str) -> str | None:
    """The next execution for a worker, by a grant or by a claim, which may be bare or for some namespaces."""
    if road == "namespaces":
        return next(iter(await pull(play, namespaces={"default"})), None)
    if road != "bare":
        return await ask(play, road)
    claimed = await play.pull()
    return None if claimed is None else claimed.execution_id


@pytest.mark.parametrize("road", [*ROADS, "bare"])
async def test_a_flood_of_one_tenant_does_not_hold_up_another(play: Play, road: str) -> None:
    for _ in range(30):
        await play.create(policy=tenant("flood"))
    play.clock.advance_ms(1000)
    late = {await play.create(policy=tenant("late")) for _ in range(5)}

    got = [await following(play, road) for _ in range(10)]

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
    play.clock.advance_ms(1000)
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
        play.clock.advance_ms(1000)
        got += await pull(play)

    assert (patient in got) is ageing
    if ageing:
        assert got.index(patient) == 10, "five steps of priority: what comes within five seconds goes first, no more"


async def test_a_lane_gives_its_ageing_to_work_whose_policy_names_none(play: Play) -> None:
    ageing = Engine(play.engine.store, minter=SeededMinter(9), settings=Settings(ageing_ms={"default": 1000}))
    play = Play(ageing, play.clock)
    patient = await play.create(priority=0)
    elsewhere = await play.create(priority=0, lane="other")
    play.clock.advance_ms(6000)
    urgent = await play.create(priority=5)
    own = await play.create(priority=5, policy={"ageing": 1300})
    urgent_elsewhere = await play.create(priority=5, lane="other")

    assert [*await pull(play), *await pull(play), *await pull(play)] == [own, patient, urgent]
    taken = [await play.pull(lane="other") for _ in range(2)]
    assert [one.execution_id for one in taken if one] == [urgent_elsewhere, elsewhere]


@pytest.mark.parametrize("road", [*ROADS, "bare", "namespaces"])
@pytest.mark.parametrize("lines_at_once", [64, 5])
async def test_however_many_tenants_there_are_a_newcomer_soon_has_its_turn(
    play: Play, monkeypatch: pytest.MonkeyPatch, road: str, lines_at_once: int
) -> None:
    monkeypatch.setattr(ready_queues, "MAX_QUEUES_PER_CLAIM", lines_at_once)
    for _ in range(4):
        for n in range(12):
            await play.create(policy=tenant(f"t{n:02}"))
        play.clock.advance_ms(1)
    for _ in range(3):
        await following(play, road)
    late = await play.create(policy=tenant("newcomer"))

    got = [await following(play, road) for _ in range(26)]

    assert late in got[:13], "one turn of all of them"
    assert len(set(got)) == 26


@pytest.mark.parametrize("at_once", [1, 4, 15])
@pytest.mark.parametrize("limited", [12, 6, 0])
async def test_weights_count_however_many_tenants_there_are(play: Play, at_once: int, limited: int) -> None:
    await policy(play, cap=100)
    names: dict[str, str] = {}
    for _ in range(12):
        for n in range(12):
            limits = {"quota_policy_ids": [Q]} if n < limited else {}
            names[await play.create(policy=tenant(f"t{n:02}", 4 if n == 0 else 1, **limits))] = f"t{n:02}"
        play.clock.advance_ms(1)

    got: Counter[str] = Counter()
    while got.total() < 30:
        got.update(names[e] for e in await pull(play, min(at_once, 30 - got.total())))

    assert got == {"t00": 8} | {f"t{n:02}": 2 for n in range(1, 12)}


@pytest.mark.parametrize("compared", [1024, 70])
@pytest.mark.parametrize("each", ["tenant", "capability"])
async def test_very_many_lines_are_all_reached(
    play: Play, monkeypatch: pytest.MonkeyPatch, compared: int, each: str
) -> None:
    monkeypatch.setattr(ready_queues, "MAX_COMPARED_QUEUES", compared)
    names = [f"t{n:03}" for n in range(150)]
    terms = {name: tenant(name) if each == "tenant" else requires(name) for name in names}
    waiting = {await play.create(policy=terms[name]) for name in names}

    got = set()
    while claimed := await pull(play, 40, capabilities=names):
        got.update(claimed)

    assert got == waiting


@pytest.mark.parametrize("road", ["admitted", "bare", "namespaces"])
@pytest.mark.parametrize("compared", [1024, 64])
async def test_one_claim_serves_as_many_tenants_as_there_is_room_for(
    play: Play, monkeypatch: pytest.MonkeyPatch, road: str, compared: int
) -> None:
    monkeypatch.setattr(ready_queues, "MAX_QUEUES_PER_CLAIM", 10)
    monkeypatch.setattr(ready_queues, "MAX_COMPARED_QUEUES", compared)
    names: dict[str, str] = {}
    for _ in range(3):
        for n in range(30):
            names[await play.create(policy=tenant(f"t{n:02}"))] = f"t{n:02}"
        play.clock.advance_ms(1)
    urgent = {await play.create(priority=1, policy=tenant("urgent")) for _ in range(5)}

    async def claimed(count: int) -> list[str]:
        if road != "bare":
            return await pull(play, count, namespaces={"default"} if road == "namespaces" else None)
        got = await play.engine.claim_many(
            "default", count, worker_id="w", worker_instance_id="w", lease_ttl_ms=LEASE_MS
        )
        return [one.execution_id for one in got]

    first, second, rest = await claimed(20), await claimed(20), await claimed(100)

    assert set(first[:5]) == urgent, "priority comes before turns"
    assert len({names[e] for e in first[5:]}) == 15
    assert len({names[e] for e in [*first[5:], *second[:15]]}) == 30, "everybody once before somebody twice"
    assert len({*first, *second, *rest}) == 95
