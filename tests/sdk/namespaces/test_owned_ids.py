"""Ids that the SDK derives: a row of another namespace under that id is refused, and its result is never used."""

from __future__ import annotations

import uuid

import pytest

from flowfabric import Context, Fabric, Retry, RunFailed, ids
from flowfabric.errors import IdInOtherNamespace
from flowfabric.sdk.flows import FlowRun
from tests.sdk.conftest import running_worker


async def test_a_flow_that_another_namespace_occupies_is_a_conflict(shared_app: Fabric) -> None:
    @shared_app.task
    async def answer() -> str:
        return "ours"

    flow = shared_app.flow("nightly")
    flow.add(answer)
    flow_id = str(uuid.uuid5(uuid.NAMESPACE_URL, "flowfabric|default|flow|nightly|monday"))
    engine = await shared_app.engine()
    await engine.create_flow_graph(flow_id, [], namespace="intruder")

    with pytest.raises(IdInOtherNamespace):
        await flow.submit(key="monday")


async def test_the_result_of_a_node_that_another_namespace_occupies_is_refused(shared_app: Fabric) -> None:
    intruder = Fabric(shared_app.url, namespace="intruder")

    @shared_app.task(name="answer")
    async def ours() -> str:
        return "ours"

    @intruder.task(name="answer")
    async def theirs() -> str:
        return "forged"

    flow = shared_app.flow("nightly")
    node = flow.add(ours)
    async with intruder, running_worker(intruder):
        engine = await intruder.engine()
        flow_id = engine.minter.uuid()
        here = ids.flow_partition(ids.FlowId(flow_id), engine.partitions)
        run_id = f"{{fp:{here}}}:{uuid.uuid5(uuid.UUID(flow_id), node.name)}"
        forged = await theirs.build_create(engine, {}, options=theirs.default_options, execution_id=run_id)
        await engine.create(forged)
        assert await theirs.run(run_id).result(10) == "forged"
        run = FlowRun(flow, flow_id, {node.name: run_id})

        with pytest.raises(IdInOtherNamespace):
            await run[node].result(10)
        with pytest.raises(IdInOtherNamespace):
            await run.result(10)


async def test_a_node_does_not_read_the_result_of_another_namespace(shared_app: Fabric) -> None:
    intruder = Fabric(shared_app.url, namespace="intruder")

    @intruder.task
    async def forge() -> str:
        return "forged"

    @shared_app.task
    async def reads(given: str) -> str:
        return given

    async with intruder, running_worker(intruder), running_worker(shared_app):
        forged = await forge.submit()
        assert await forged.result(10) == "forged"
        engine = await shared_app.engine()
        ask = await reads.build_create(engine, {}, options=reads.default_options, results={"given": forged.id})
        made = await engine.create(ask)
        with pytest.raises(RunFailed, match="another namespace"):
            await reads.run(made.execution_id).result(10)


async def test_a_child_whose_id_another_namespace_occupies_is_a_conflict(shared_app: Fabric) -> None:
    intruder = Fabric(shared_app.url, namespace="intruder")

    @intruder.task
    async def forge() -> str:
        return "forged"

    @shared_app.task
    async def child() -> str:
        return "ours"

    @shared_app.task(retry=Retry(max=0))
    async def parent(ctx: Context) -> str:
        engine = await intruder.engine()
        name, _, place = ctx.durable.next_gate_name(f"child:{child.name}").rpartition("#")
        taken = ctx._child_id(f"{name}#{int(place) + 1}")  # of the next child: ids of children are derivable
        await engine.create(await forge.build_create(engine, {}, options=forge.default_options, execution_id=taken))
        return await (await ctx.spawn(child)).result()

    async with intruder, running_worker(shared_app):
        with pytest.raises(RunFailed, match="id_in_other_namespace"):
            await (await parent.submit()).result(10)
