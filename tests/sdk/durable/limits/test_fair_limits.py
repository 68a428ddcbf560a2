"""Fair tasks with limits: a tenant with few runs does not wait for the many runs of another."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric import Fabric, Limit
from tests.sdk.conftest import running_worker


@pytest.mark.parametrize(
    "limits",
    [
        [Limit(concurrency=1)],
        [Limit(concurrency=1), Limit(concurrency=1)],
        [Limit(concurrency=2), Limit(concurrency=1)],
        [Limit(concurrency=4), Limit(concurrency=2, rate="1000/1s")],
    ],
    ids=["one", "two alike", "two", "two with a rate"],
)
@pytest.mark.parametrize("slots", [1, 10])
async def test_fairness_holds_together_with_limits(app: Fabric, limits: list[Limit], slots: int) -> None:
    order: list[str] = []

    @app.task(fair="tenant", limits=limits)
    async def work(tenant: str, number: int) -> None:
        order.append(tenant)

    for number in range(200):
        await work.submit("a", number)
    few = [await work.submit("b", number) for number in range(5)]
    async with running_worker(app, slots=slots):
        await asyncio.gather(*(run.result(60) for run in few))
    places = [place for place, tenant in enumerate(order, start=1) if tenant == "b"]
    assert places == [2, 4, 6, 8, 10]
