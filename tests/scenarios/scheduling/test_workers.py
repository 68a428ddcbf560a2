"""S-083 to S-087: the worker registry, and EX-027: what a registration means for work that nobody could run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter, fnv1a_64
from flowfabric.model.answers.execution import ClaimGrant
from flowfabric.model.worker import MarkedDead, NotRegistered, WorkerRefreshed, WorkerRegistered
from tests.scenarios.play import ACTIVE, WAITING, Play
from tests.scenarios.scheduling.test_grants import requires

ROUTE_BLOCKED = "runnable/unowned/blocked_by_route/waiting_for_capable_worker/none/pending_first_attempt/waiting"


async def register(play: Play, instance: str = "i1", worker: str = "pool", **given: Any) -> Any:
    """What a worker that registers hears."""
    what: dict[str, Any] = {"lanes": ["default"], "liveness_ttl_ms": 1000} | given
    return await play.engine.register_worker(worker_instance_id=instance, worker_id=worker, **what)


async def beat(play: Play, instance: str = "i1") -> Any:
    return await play.engine.heartbeat_worker(worker_instance_id=instance)


async def events(play: Play, instance: str = "i1", namespace: str = "default") -> list[tuple[str, int, str | None]]:
    log = await play.engine.list_worker_events(namespace, instance)
    return [(event.event_kind, event.event_at_ms, event.reason) for event in log]


async def listed(play: Play, namespace: str = "default") -> list[str]:
    return [entry.worker_instance_id for entry in (await play.engine.list_workers(namespace)).entries]


@pytest.mark.spec("S-083")
async def test_heartbeat_boundary(play: Play) -> None:
    t0 = play.now
    assert await register(play) == WorkerRegistered("i1", t0 + 1000)

    play.clock.now = t0 + 999
    assert await beat(play) == WorkerRefreshed("i1", t0 + 1999)
    play.clock.now = t0 + 1999
    async with play.untouched():
        assert await beat(play) == NotRegistered("i1")
    play.clock.now = t0 + 2000
    assert await register(play, worker="another pool".replace(" ", "-")) == WorkerRegistered("i1", t0 + 3000)


@pytest.mark.spec("S-083")
async def test_a_live_instance_cannot_change_its_worker(play: Play) -> None:
    await register(play)
    async with play.refused(errors.InvalidInput, "instance_id reassigned"):
        await register(play, worker="other")


@pytest.mark.spec("S-083")
async def test_registering_again_refreshes_and_keeps_the_first_time(play: Play) -> None:
    t0 = play.now
    await register(play, capabilities=["a"])
    play.clock.advance_ms(500)

    assert await register(play, lanes=["x", "y"], capabilities=["b", "c"]) == WorkerRefreshed("i1", t0 + 1500)

    [entry] = (await play.engine.list_workers("default")).entries
    assert (entry.worker_id, entry.lanes, entry.capabilities) == ("pool", ("x", "y"), ("b", "c"))
    assert (entry.registered_at_ms, entry.last_heartbeat_ms, entry.liveness_ttl_ms) == (t0, t0 + 500, 1000)
    row = (await play.everything())["ff_worker_registry"][0]
    assert row.partition == fnv1a_64(b"i1") % 256


@pytest.mark.spec("S-083")
@pytest.mark.parametrize(
    ("given", "detail"),
    [
        ({"liveness_ttl_ms": 0}, "liveness_ttl_ms: 0 is not within 1..315360000000"),
        ({"lanes": []}, "lanes: empty"),
        ({"capabilities": ["a,b"]}, "capabilities: comma in token: 'a,b'"),
        ({"capabilities": ["a b"]}, "capabilities: control or whitespace character in token: 'a b'"),
    ],
)
async def test_registrations_that_are_refused(play: Play, given: dict[str, Any], detail: str) -> None:
    async with play.refused(errors.InvalidInput, detail):
        await register(play, **given)


@pytest.mark.spec("S-084")
async def test_mark_dead(play: Play) -> None:
    await register(play, "wa-1", "wa")
    held = await play.claimed("wa")

    marked = await play.engine.mark_worker_dead(worker_instance_id="wa-1", reason="oom")

    assert marked == MarkedDead("wa-1")
    assert await listed(play) == []
    assert ("marked_dead", play.now, "oom") in await events(play, "wa-1")
    again = await play.engine.mark_worker_dead(worker_instance_id="wa-1", reason="oom")
    assert again == NotRegistered("wa-1")
    assert await beat(play, "wa-1") == NotRegistered("wa-1")
    assert await play.vector(held.execution_id) == ACTIVE
    await play.engine.renew(held.handle)


@pytest.mark.spec("S-084")
@pytest.mark.parametrize(
    ("reason", "detail"), [("r" * 257, "reason: more than"), ("a\nb", "reason: control character")]
)
async def test_reasons_that_are_refused(play: Play, reason: str, detail: str) -> None:
    await register(play)
    async with play.untouched():
        with pytest.raises(errors.InvalidInput, match=detail):
            await play.engine.mark_worker_dead(worker_instance_id="i1", reason=reason)
    assert await play.engine.mark_worker_dead(worker_instance_id="i1", reason="r" * 256) == MarkedDead("i1")


@pytest.mark.spec("S-085")
async def test_ttl_sweep_and_events(play: Play) -> None:
    t0 = play.now
    await register(play)
    await beat(play)
    assert await events(play) == [("heartbeat", t0, None), ("registered", t0, None)]

    play.clock.advance_ms(1000)
    assert await listed(play) == []
    assert (await play.engine.sweep_once("worker_registry_ttl_sweep")).processed == 0  # it lapsed just now
    play.clock.advance_ms(1)
    assert (await play.engine.sweep_once("worker_registry_ttl_sweep")).processed == 1
    assert (await events(play))[-1] == ("ttl_swept", play.now, None)
    async with play.untouched():
        assert (await play.engine.sweep_once("worker_registry_ttl_sweep")).processed == 0


@pytest.mark.spec("S-085")
async def test_a_worker_that_returns_between_look_and_sweep_stays(play: Play) -> None:
    await register(play)
    play.clock.advance_ms(1001)
    play.store.after_due = lambda: register(play)

    assert (await play.engine.sweep_once("worker_registry_ttl_sweep")).processed == 0

    assert await listed(play) == ["i1"]


@pytest.mark.spec("S-086")
async def test_listing_pages(play: Play) -> None:
    for name in "ebadc":
        await register(play, name, namespace="n1")
    await register(play, "z", namespace="n2")

    pages = []
    after = None
    while True:
        page = await play.engine.list_workers("n1", after=after, limit=2)
        pages.append(([entry.worker_instance_id for entry in page.entries], page.cursor))
        if page.cursor is None:
            break
        after = page.cursor

    assert pages == [(["a", "b"], "b"), (["c", "d"], "d"), (["e"], None)]
    four = await play.engine.list_workers("n1", after="a", limit=4)
    assert (len(four.entries), four.cursor) == (4, None)
    async with play.refused(errors.Unavailable):
        await play.engine.list_workers()


@pytest.mark.spec("S-087")
async def test_expired_leases_listing(play: Play) -> None:
    lanes = ("default", "mail", "ocr", "etl")
    held = [await play.claimed(lane=lane, ttl=ttl) for lane, ttl in zip(lanes, (1000, 1000, 2000, 9000), strict=True)]
    foreign = await play.claimed(namespace="n2", ttl=1500)
    start = play.now
    first = sorted(one.execution_id for one in held[:2])

    page = await play.engine.list_expired_leases(as_of=start + 2000, limit=2, namespace="default")
    assert [entry.execution_id for entry in page.entries] == first
    assert page.cursor == (start + 1000, first[1])
    rest = await play.engine.list_expired_leases(as_of=start + 2000, limit=2, namespace="default", after=page.cursor)
    assert ([entry.execution_id for entry in rest.entries], rest.cursor) == ([held[2].execution_id], None)
    others = await play.engine.list_expired_leases(as_of=start + 2000, namespace="n2")
    assert [entry.execution_id for entry in others.entries] == [foreign.execution_id]
    everyone = await play.engine.list_expired_leases(as_of=start + 2000)
    assert len(everyone.entries) == 4


# -- routes --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EX-027")
async def test_the_scheduler_blocks_unroutable_work_and_moves_on(play: Play) -> None:
    a = await play.create(priority=9, policy=requires("gpu"))
    b = await play.create(priority=1)

    grant = await play.next_for("wa")

    assert isinstance(grant, ClaimGrant)
    assert grant.execution_id == b
    assert await play.vector(a) == ROUTE_BLOCKED
    assert (await play.sheet(a)).blocking_text == "no connected worker satisfies required_capabilities"


@pytest.mark.spec("EX-027")
async def test_a_registration_unblocks_in_the_same_step(play: Play) -> None:
    low = await play.create(priority=1, policy=requires("gpu"))
    high = await play.create(priority=9, policy=requires("gpu"))
    assert await play.next_for("wa") is None
    assert await play.vector(high) == ROUTE_BLOCKED

    await register(play, "elsewhere", namespace="n2", capabilities=["gpu"])
    await register(play, "other-lane", lanes=["mail"], capabilities=["gpu"])
    await register(play, "lacking", capabilities=["cpu"])
    assert await play.vector(high) == ROUTE_BLOCKED
    await register(play, "wg-1", "wg", capabilities=["gpu", "cpu"])

    assert [await play.vector(e) for e in (low, high)] == [WAITING, WAITING]
    assert [(await play.next_for("wg", can={"gpu"})).execution_id for _ in range(2)] == [high, low]


@pytest.mark.spec("EX-027")
async def test_any_registration_unblocks_what_requires_nothing(play: Play) -> None:
    e = await play.create()
    await play.engine.block_route(e)

    await register(play, "elsewhere", namespace="n2")
    await register(play, "other-lane", lanes=["mail"])
    assert await play.vector(e) == ROUTE_BLOCKED
    await register(play, "wg-1", "wg")

    assert await play.vector(e) == WAITING


@pytest.mark.spec("EX-027")
async def test_a_worker_that_pulls_with_admission_says_what_nobody_can_run(play: Play) -> None:
    a = await play.create(policy=requires("gpu"))

    pulled = await play.engine.claim_admitted("default", worker_id="wa", worker_instance_id="wa-1")

    assert pulled == []
    assert await play.vector(a) == ROUTE_BLOCKED
    [taken] = await play.engine.claim_admitted(
        "default", worker_id="wb", worker_instance_id="wb-1", capabilities={"gpu"}
    )
    assert taken.execution_id == a


@pytest.mark.spec("EX-027")
async def test_a_worker_that_registers_while_work_is_being_blocked_is_not_missed(play: Play) -> None:
    a = await play.create(policy=requires("gpu"))
    other = Engine(play.store.store, minter=SeededMinter(9))
    gate = play.slowed("commit")

    asking = asyncio.create_task(play.next_for("wa"))
    await gate.reached()  # the scheduler has looked for a worker, and is about to block
    await other.register_worker(
        worker_instance_id="wg-1", worker_id="wg", lanes=["default"], capabilities=["gpu"], liveness_ttl_ms=9000
    )
    gate.release()

    assert await asking is None
    assert await play.vector(a) == WAITING


async def test_two_registrations_of_one_instance_leave_one_record(play: Play) -> None:
    await asyncio.gather(register(play), register(play), play.engine.mark_worker_dead(worker_instance_id="i1"))

    assert await listed(play) in ([], ["i1"])
    assert len((await play.everything())["ff_worker_registry"]) == len(await listed(play))
