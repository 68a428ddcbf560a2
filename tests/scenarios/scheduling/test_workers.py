"""S-083 to S-087: the worker registry; EX-027: registrations unblock unroutable executions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter, fnv1a_64
from flowfabric.model.answers.execution import ClaimGrant
from flowfabric.model.scheduling.worker import (
    MarkedDead,
    NotRegistered,
    ServedTask,
    TaskEntry,
    WorkerRefreshed,
    WorkerRegistered,
)
from tests.scenarios.env import ACTIVE, WAITING, Env
from tests.scenarios.scheduling.test_grants import requires

ROUTE_BLOCKED = "runnable/unowned/blocked_by_route/waiting_for_capable_worker/none/pending_first_attempt/waiting"


async def register(env: Env, instance: str = "i1", worker: str = "pool", **options: Any) -> Any:
    """Register a worker."""
    what: dict[str, Any] = {"lanes": ["default"], "liveness_ttl_ms": 1000} | options
    return await env.engine.register_worker(worker_instance_id=instance, worker_id=worker, **what)


async def heartbeat(env: Env, instance: str = "i1") -> Any:
    return await env.engine.heartbeat_worker(worker_instance_id=instance)


async def events(env: Env, instance: str = "i1", namespace: str = "default") -> list[tuple[str, int, str | None]]:
    log = await env.engine.list_worker_events(namespace, instance)
    return [(event.event_kind, event.event_at_ms, event.reason) for event in log]


async def list_instance_ids(env: Env) -> list[str]:
    return [entry.worker_instance_id for entry in (await env.engine.list_workers("default")).entries]


@pytest.mark.spec("S-083")
async def test_a_heartbeat_refreshes_a_worker_until_its_ttl_ends(env: Env) -> None:
    t0 = env.now
    assert await register(env) == WorkerRegistered("i1", t0 + 1000)

    env.clock.now = t0 + 999
    assert await heartbeat(env) == WorkerRefreshed("i1", t0 + 1999)
    env.clock.now = t0 + 1999
    async with env.unchanged():
        assert await heartbeat(env) == NotRegistered("i1")
    env.clock.now = t0 + 2000
    assert await register(env, worker="another pool".replace(" ", "-")) == WorkerRegistered("i1", t0 + 3000)


@pytest.mark.spec("S-083")
async def test_a_live_instance_cannot_change_its_worker(env: Env) -> None:
    await register(env)
    async with env.refused(errors.InvalidInput, "instance_id reassigned"):
        await register(env, worker="other")


@pytest.mark.spec("S-083")
async def test_registering_again_keeps_the_first_registration_time(env: Env) -> None:
    t0 = env.now
    await register(env, capabilities=["a"])
    env.clock.advance_ms(500)

    assert await register(env, lanes=["x", "y"], capabilities=["b", "c"]) == WorkerRefreshed("i1", t0 + 1500)

    [entry] = (await env.engine.list_workers("default")).entries
    assert (entry.worker_id, entry.lanes, entry.capabilities) == ("pool", ("x", "y"), ("b", "c"))
    assert (entry.registered_at_ms, entry.last_heartbeat_ms, entry.liveness_ttl_ms) == (t0, t0 + 500, 1000)
    row = (await env.dump())["ff_worker_registry"][0]
    assert row.partition == fnv1a_64(b"i1") % 256


@pytest.mark.spec("S-083")
@pytest.mark.parametrize(
    ("options", "detail"),
    [
        ({"liveness_ttl_ms": 0}, "liveness_ttl_ms: 0 is not within 1..315360000000"),
        ({"lanes": []}, "lanes: empty"),
        ({"capabilities": ["a,b"]}, "capabilities: comma in token: 'a,b'"),
        ({"capabilities": ["a b"]}, "capabilities: control or whitespace character in token: 'a b'"),
        ({"tasks": ["mail"]}, "tasks: not a ServedTask"),
        ({"tasks": "mail"}, "tasks: not a list"),
        ({"tasks": [ServedTask(name="mail"), ServedTask(name="mail", lane="b")]}, "tasks: two have the same name"),
        ({"tasks": [ServedTask(name="mail", input_schema="[]")]}, "input_schema: not a JSON object"),
        ({"tasks": [ServedTask(name="mail", result_schema="{")]}, "result_schema: not a JSON object"),
        (
            {"tasks": [ServedTask(name=f"t{n}", input_schema='{"title":"%s"}' % ("x" * 9000)) for n in range(30)]},
            "tasks: schemas of more than 262144 bytes",
        ),
    ],
)
async def test_invalid_registrations_are_refused(env: Env, options: dict[str, Any], detail: str) -> None:
    async with env.refused(errors.InvalidInput, detail):
        await register(env, **options)


async def test_the_tasks_of_live_workers_are_listed_as_the_last_registration_describes_them(env: Env) -> None:
    old = [ServedTask(name="pay", lane="slow"), ServedTask(name="mail", input_schema='{"type":"object"}')]
    await register(env, "i2", tasks=old)
    env.clock.advance_ms(1)
    new = [ServedTask(name="mail", lane="fast", input_schema='{"a":1}', result_schema="{}")]
    await register(env, "i1", tasks=new)
    await register(env, "i1", "pool", namespace="n2", tasks=[ServedTask(name="mail")])
    await register(env, "i3")

    mail = TaskEntry(namespace="default", name="mail", lane="fast", workers=2, input_schema={"a": 1}, result_schema={})
    pay = TaskEntry(namespace="default", name="pay", lane="slow", workers=1)
    other = TaskEntry(namespace="n2", name="mail", lane="default", workers=1)
    found = await env.engine.list_tasks()
    assert (found.tasks, found.complete) == ([mail, pay, other], True)
    assert (await env.engine.list_tasks(namespace="n2")).tasks == [other]
    assert (await env.engine.list_tasks(namespaces=["n2", "n3"])).tasks == [other]
    assert (await env.engine.list_tasks(namespace="default", namespaces=["n2"])).tasks == []

    await heartbeat(env, "i2")
    assert (await env.engine.list_tasks()).tasks == [mail, pay, other]
    await env.engine.mark_worker_dead(worker_instance_id="i1")
    [first, _, _] = (await env.engine.list_tasks()).tasks
    assert (first.lane, first.workers, first.input_schema) == ("default", 1, {"type": "object"})
    env.clock.advance_ms(2000)
    assert (await env.engine.list_tasks()).tasks == []


@pytest.mark.spec("S-084")
async def test_a_worker_marked_dead_is_unregistered_and_keeps_its_lease(env: Env) -> None:
    await register(env, "wa-1", "wa")
    claim = await env.create_and_claim("wa")

    marked = await env.engine.mark_worker_dead(worker_instance_id="wa-1", reason="oom")

    assert marked == MarkedDead("wa-1")
    assert await list_instance_ids(env) == []
    assert ("marked_dead", env.now, "oom") in await events(env, "wa-1")
    again = await env.engine.mark_worker_dead(worker_instance_id="wa-1", reason="oom")
    assert again == NotRegistered("wa-1")
    assert await heartbeat(env, "wa-1") == NotRegistered("wa-1")
    assert await env.vector(claim.execution_id) == ACTIVE
    await env.engine.renew(claim.handle)


@pytest.mark.spec("S-084")
@pytest.mark.parametrize(
    ("reason", "detail"), [("r" * 257, "reason: more than"), ("a\nb", "reason: control character")]
)
async def test_invalid_reasons_are_refused(env: Env, reason: str, detail: str) -> None:
    await register(env)
    async with env.unchanged():
        with pytest.raises(errors.InvalidInput, match=detail):
            await env.engine.mark_worker_dead(worker_instance_id="i1", reason=reason)
    assert await env.engine.mark_worker_dead(worker_instance_id="i1", reason="r" * 256) == MarkedDead("i1")


@pytest.mark.spec("S-085")
async def test_the_ttl_sweep_removes_expired_workers_and_records_an_event(env: Env) -> None:
    t0 = env.now
    await register(env)
    await heartbeat(env)
    assert await events(env) == [("heartbeat", t0, None), ("registered", t0, None)]

    env.clock.advance_ms(1000)
    assert await list_instance_ids(env) == []
    assert await env.sweep("worker_registry_ttl_sweep") == 0  # it expired just now
    assert await env.sweep("worker_registry_ttl_sweep", after_ms=1) == 1
    assert (await events(env))[-1] == ("ttl_swept", env.now, None)
    async with env.unchanged():
        assert await env.sweep("worker_registry_ttl_sweep") == 0


@pytest.mark.spec("S-085")
async def test_a_worker_that_registers_again_after_the_scan_is_not_swept(env: Env) -> None:
    await register(env)
    env.clock.advance_ms(1001)
    env.store.after_due = lambda: register(env)

    assert await env.sweep("worker_registry_ttl_sweep") == 0

    assert await list_instance_ids(env) == ["i1"]


@pytest.mark.spec("S-086")
async def test_list_workers_pages_by_instance_id(env: Env) -> None:
    for name in "ebadc":
        await register(env, name, namespace="n1")
    await register(env, "z", namespace="n2")

    pages = []
    after = None
    while True:
        page = await env.engine.list_workers("n1", after=after, limit=2)
        pages.append(([entry.worker_instance_id for entry in page.entries], page.cursor))
        if page.cursor is None:
            break
        after = page.cursor

    assert pages == [(["a", "b"], "b"), (["c", "d"], "d"), (["e"], None)]
    four = await env.engine.list_workers("n1", after="a", limit=4)
    assert (len(four.entries), four.cursor) == (4, None)
    async with env.refused(errors.Unavailable):
        await env.engine.list_workers()


async def test_the_workers_of_all_namespaces_are_listed_in_pages(env: Env) -> None:
    for namespace, name in (("n2", "a"), ("n1", "b"), ("n1", "a"), ("n3", "c")):
        await register(env, name, namespace=namespace)

    found = []
    after = None
    while True:
        page = await env.engine.list_workers(after=after, limit=3, all_namespaces=True)
        found += [(entry.namespace, entry.worker_instance_id) for entry in page.entries]
        if page.cursor is None:
            break
        after = page.cursor

    assert found == [("n1", "a"), ("n1", "b"), ("n2", "a"), ("n3", "c")]
    async with env.refused(errors.InvalidInput):
        await env.engine.list_workers(after="nonsense", all_namespaces=True)


@pytest.mark.spec("S-087")
async def test_expired_leases_are_listed_by_namespace(env: Env) -> None:
    lanes = ("default", "mail", "ocr", "etl")
    claims = [
        await env.create_and_claim(lane=lane, ttl=ttl)
        for lane, ttl in zip(lanes, (1000, 1000, 2000, 9000), strict=True)
    ]
    foreign = await env.create_and_claim(namespace="n2", ttl=1500)
    start = env.now
    first = sorted(one.execution_id for one in claims[:2])

    page = await env.engine.list_expired_leases(as_of=start + 2000, limit=2, namespace="default")
    assert [entry.execution_id for entry in page.entries] == first
    assert page.cursor == (start + 1000, first[1])
    rest = await env.engine.list_expired_leases(as_of=start + 2000, limit=2, namespace="default", after=page.cursor)
    assert ([entry.execution_id for entry in rest.entries], rest.cursor) == ([claims[2].execution_id], None)
    others = await env.engine.list_expired_leases(as_of=start + 2000, namespace="n2")
    assert [entry.execution_id for entry in others.entries] == [foreign.execution_id]
    everyone = await env.engine.list_expired_leases(as_of=start + 2000)
    assert len(everyone.entries) == 4


# -- routes --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EX-027")
async def test_the_scheduler_blocks_an_unroutable_execution_and_grants_the_next(env: Env) -> None:
    a = await env.create(priority=9, policy=requires("gpu"))
    b = await env.create(priority=1)

    grant = await env.grant_next("wa")

    assert isinstance(grant, ClaimGrant)
    assert grant.execution_id == b
    assert await env.vector(a) == ROUTE_BLOCKED
    assert (await env.row(a)).blocking_text == "no connected worker satisfies required_capabilities"


@pytest.mark.spec("EX-027")
async def test_a_registration_unblocks_matching_executions_at_once(env: Env) -> None:
    low = await env.create(priority=1, policy=requires("gpu"))
    high = await env.create(priority=9, policy=requires("gpu"))
    assert await env.grant_next("wa") is None
    assert await env.vector(high) == ROUTE_BLOCKED

    await register(env, "elsewhere", namespace="n2", capabilities=["gpu"])
    await register(env, "other-lane", lanes=["mail"], capabilities=["gpu"])
    await register(env, "lacking", capabilities=["cpu"])
    assert await env.vector(high) == ROUTE_BLOCKED
    await register(env, "wg-1", "wg", capabilities=["gpu", "cpu"])

    assert [await env.vector(e) for e in (low, high)] == [WAITING, WAITING]
    assert [(await env.grant_next("wg", capabilities={"gpu"})).execution_id for _ in range(2)] == [high, low]


@pytest.mark.spec("EX-027")
async def test_any_registration_unblocks_executions_without_requirements(env: Env) -> None:
    e = await env.create()
    await env.engine.block_route(e)

    await register(env, "elsewhere", namespace="n2")
    await register(env, "other-lane", lanes=["mail"])
    assert await env.vector(e) == ROUTE_BLOCKED
    await register(env, "wg-1", "wg")

    assert await env.vector(e) == WAITING


@pytest.mark.spec("EX-027")
async def test_an_admitted_claim_blocks_unroutable_executions(env: Env) -> None:
    a = await env.create(policy=requires("gpu"))

    pulled = await env.engine.claim_admitted("default", worker_id="wa", worker_instance_id="wa-1")

    assert pulled == []
    assert await env.vector(a) == ROUTE_BLOCKED
    [claimed] = await env.engine.claim_admitted(
        "default", worker_id="wb", worker_instance_id="wb-1", capabilities={"gpu"}
    )
    assert claimed.execution_id == a


@pytest.mark.spec("EX-027")
async def test_a_worker_that_registers_during_a_route_block_is_not_missed(env: Env) -> None:
    a = await env.create(policy=requires("gpu"))
    other = Engine(env.store.store, minter=SeededMinter(9))
    worker: dict[str, Any] = {"worker_instance_id": "wg-1", "worker_id": "wg", "lanes": ["default"]}

    granted, registered = await env.race(
        env.grant_next("wa"),
        lambda: other.register_worker(**worker, capabilities=["gpu"], liveness_ttl_ms=9000),
    )

    assert (granted, type(registered)) == (None, WorkerRegistered)
    assert await env.vector(a) == WAITING


async def test_concurrent_registrations_of_an_instance_leave_one_record(env: Env) -> None:
    await asyncio.gather(register(env), register(env), env.engine.mark_worker_dead(worker_instance_id="i1"))

    assert await list_instance_ids(env) in ([], ["i1"])
    assert len((await env.dump())["ff_worker_registry"]) == len(await list_instance_ids(env))
