"""A flow is cancelled through a server as on a store: same waits, same results, same errors."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import NoWait, WaitIndefinite, WaitTimeout
from flowfabric.ids import FlowId, mint_for_flow
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.flow import CancellationPolicy
from tests.executions import create_request


async def create_flow(engine: Engine) -> tuple[FlowId, str]:
    """Create a flow with one member; return both ids."""
    flow = FlowId(engine.minter.uuid())
    member = mint_for_flow(flow, engine.partitions, engine.minter)
    node = create_request(member)
    await engine.create_flow_graph(flow, [node])
    return flow, member


async def test_a_cancel_that_waits_returns_after_all_members_are_cancelled(caller: Engine, engine: Engine) -> None:
    for wait in (WaitIndefinite(), WaitTimeout(60_000)):
        flow, member = await create_flow(engine)

        answer = await caller.cancel_flow(flow, wait=wait)

        assert answer == flow_answers.FlowCancelled(CancellationPolicy.CANCEL_ALL, [member])
        assert await engine.read_execution_state(member) == "cancelled"


async def test_a_cancel_without_a_wait_returns_at_once(caller: Engine, engine: Engine) -> None:
    flow, member = await create_flow(engine)

    answer = await caller.cancel_flow(flow, wait=NoWait())

    assert answer == flow_answers.CancellationScheduled(CancellationPolicy.CANCEL_ALL, 1, [member])


async def test_a_cancel_that_times_out_still_cancels_the_flow(caller: Engine, engine: Engine) -> None:
    flow, _ = await create_flow(engine)

    with pytest.raises(errors.OperationTimeout) as caught:
        await caller.cancel_flow(flow, wait=WaitTimeout(0))

    assert (caught.value.op, caught.value.elapsed_ms) == ("cancel_flow", 0)
    described = await engine.describe_flow(flow)
    assert described is not None
    assert described.public_flow_state == "cancelled"


@pytest.mark.parametrize("wait", [None, True, 5, WaitTimeout(-1), WaitTimeout("soon")])  # type: ignore[arg-type]
async def test_an_invalid_wait_is_refused_and_nothing_is_cancelled(caller: Engine, engine: Engine, wait: Any) -> None:
    flow, _ = await create_flow(engine)

    with pytest.raises(errors.InvalidInput):
        await caller.cancel_flow(flow, wait=wait)

    described = await engine.describe_flow(flow)
    assert described is not None
    assert described.public_flow_state == "open"
