"""Apps of several namespaces that share a store and its lanes: each handles its own runs."""

from __future__ import annotations

import asyncio

from flowfabric import Context, Fabric
from flowfabric.model.states import PublicState
from tests.sdk.conftest import running_worker


async def test_a_worker_leaves_runs_of_other_namespaces_to_their_own_workers(shared_app: Fabric) -> None:
    other = Fabric(shared_app.url, namespace="other")

    @shared_app.task(name="whose")
    async def ours() -> str:
        return "ours"

    @other.task(name="whose")
    async def theirs() -> str:
        return "theirs"

    async with other:
        runs = [await theirs.submit() for _ in range(3)]
        async with running_worker(shared_app):
            assert await (await ours.submit()).result(10) == "ours"
            later = await theirs.submit()
            assert await (await ours.submit()).result(10) == "ours"
            assert {await run.state() for run in (*runs, later)} == {PublicState.WAITING}
            async with running_worker(other):
                assert [await run.result(10) for run in (*runs, later)] == ["theirs"] * 4
                mixed = [await task.submit() for task in (ours, theirs) * 5]
                assert [await run.result(10) for run in mixed] == ["ours", "theirs"] * 5
        assert [len(await run.attempts()) for run in runs] == [1, 1, 1], "it costs no attempt"


async def test_a_durable_function_resumes_in_its_own_namespace(shared_app: Fabric) -> None:
    other = Fabric(shared_app.url, namespace="other")

    @shared_app.task(name="waits")
    async def ours(ctx: Context) -> str:
        return f"ours {await ctx.receive('go', str)}"

    @other.task(name="waits")
    async def theirs(ctx: Context) -> str:
        return f"theirs {await ctx.receive('go', str)}"

    async with other, running_worker(shared_app), running_worker(other):
        runs = [await task.submit() for task in (ours, theirs) * 5]
        await asyncio.gather(*(run.signal("go", "on") for run in runs))
        assert [await run.result(10) for run in runs] == ["ours on", "theirs on"] * 5
