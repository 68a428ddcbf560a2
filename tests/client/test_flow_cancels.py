"""A flow is cancelled through a server as it is on a store: the same waits, the same answers, the same refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from flowfabric import CreateExecution, errors
from flowfabric.client import RemoteEngine
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import NoWait, WaitIndefinite, WaitTimeout
from flowfabric.ids import FlowId, mint_for_flow
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.flow import CancellationPolicy
from flowfabric.server import create_app


@pytest.fixture(params=["on a store", "through a server"])
async def caller(request: pytest.FixtureRequest, engine: Engine) -> AsyncIterator[Engine | RemoteEngine]:
    if request.param == "on a store":
        yield engine
        return
    async with RemoteEngine("http://ff", transport=httpx2.ASGITransport(app=create_app(engine))) as remote:
        yield remote


async def begun(engine: Engine) -> tuple[FlowId, str]:
    """A flow with one member."""
    flow = FlowId(engine.minter.uuid())
    member = mint_for_flow(flow, engine.partitions, engine.minter)
    node = CreateExecution(
        execution_id=member, partition=0, namespace="default", lane_id="default", execution_kind="task"
    )
    await engine.create_flow_graph(flow, [node])
    return flow, member


async def test_whoever_waits_hears_when_everybody_is_cancelled(caller: Engine, engine: Engine) -> None:
    for wait in (WaitIndefinite(), WaitTimeout(60_000)):
        flow, member = await begun(engine)

        answer = await caller.cancel_flow(flow, wait=wait)

        assert answer == flow_answers.FlowCancelled(CancellationPolicy.CANCEL_ALL, [member])
        assert await engine.read_execution_state(member) == "cancelled"


async def test_whoever_does_not_wait_hears_at_once(caller: Engine, engine: Engine) -> None:
    flow, member = await begun(engine)

    answer = await caller.cancel_flow(flow, wait=NoWait())

    assert answer == flow_answers.CancellationScheduled(CancellationPolicy.CANCEL_ALL, 1, [member])


async def test_a_wait_that_is_over_is_a_timeout_and_the_flow_is_cancelled(caller: Engine, engine: Engine) -> None:
    flow, _ = await begun(engine)

    with pytest.raises(errors.OperationTimeout) as caught:
        await caller.cancel_flow(flow, wait=WaitTimeout(0))

    assert (caught.value.op, caught.value.elapsed_ms) == ("cancel_flow", 0)
    described = await engine.describe_flow(flow)
    assert described is not None
    assert described.public_flow_state == "cancelled"


@pytest.mark.parametrize("wait", [None, True, 5, WaitTimeout(-1), WaitTimeout("soon")])  # type: ignore[arg-type]
async def test_what_is_no_wait_is_refused_and_nothing_is_cancelled(caller: Engine, engine: Engine, wait: Any) -> None:
    flow, _ = await begun(engine)

    with pytest.raises(errors.InvalidInput):
        await caller.cancel_flow(flow, wait=wait)

    described = await engine.describe_flow(flow)
    assert described is not None
    assert described.public_flow_state == "open"
