"""Neither a cached lease that is used without a load nor an estimated clock may cause a refusal."""

from __future__ import annotations

import pytest

from flowfabric.clock import ManualClock, StoreClockEstimate
from flowfabric.engine.engine import Engine
from flowfabric.model.answers.execution import Completed
from flowfabric.model.states import PublicState
from flowfabric.stores.port import Store
from tests.executions import claim_one, new_execution


@pytest.mark.parametrize("road", ["complete", "complete_many", "fail", "progress"])
async def test_a_clock_estimate_that_runs_ahead_costs_a_load_and_has_no_other_effect(
    store: Store, clock: ManualClock, road: str
) -> None:
    engine = Engine(store)
    execution_id = await new_execution(engine)
    claimed = await claim_one(engine, lease_ttl_ms=1000)
    lines = await store.queues()

    engine.runtime.estimate = StoreClockEstimate()  # as on a server, whose clock only the server can read
    engine.estimate.update(clock.now + 3_600_000)
    match road:
        case "complete":
            await engine.complete(claimed.handle)
        case "complete_many":
            assert await engine.complete_many([(claimed.handle, None)]) == [Completed(execution_id)]
        case "fail":
            await engine.fail(claimed.handle, reason="no luck", category="permanent")
        case "progress":
            await engine.progress(claimed.handle, pct=50)

    ended = {"fail": PublicState.FAILED, "progress": PublicState.ACTIVE}
    described = await engine.describe_execution(execution_id)
    assert described is not None
    assert described.public_state is ended.get(road, PublicState.COMPLETED)
    assert await store.queues() == lines


async def test_a_local_clock_is_not_estimated(store: Store, clock: ManualClock) -> None:
    engine = Engine(store)
    await engine.create_execution(execution_id=engine.new_execution_id())

    clock.advance_ms(3_600_000)

    assert engine.estimate.now() == clock.now
