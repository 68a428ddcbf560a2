"""Executions of which a test names only what matters to it."""

from __future__ import annotations

import uuid
from typing import Any

from flowfabric.engine.engine import Engine
from flowfabric.engine_protocol import EngineAPI
from flowfabric.ids import ExecutionId
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.condition import Condition
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.suspension.arguments import FreshWaitpoint, SuspendArgs


def create_request(execution_id: str, lane_id: str = "default", **fields: Any) -> CreateExecution:
    """Return the request to create a task; the engine reads the partition from the id."""
    given: dict[str, Any] = {"partition": 0, "namespace": "default", "execution_kind": "task", **fields}
    return CreateExecution(execution_id=execution_id, lane_id=lane_id, **given)


def suspend_args(now: int, condition: Condition, *, key: str = "k", **options: Any) -> SuspendArgs:
    """Return the arguments of a suspend on one new waitpoint, which waits for a signal."""
    fields: dict[str, Any] = {
        "suspension_id": str(uuid.uuid4()),
        "waitpoints": (FreshWaitpoint(str(uuid.uuid4()), key),),
        "resume_condition": condition,
        "reason_code": "waiting_for_signal",
        "now": now,
    }
    return SuspendArgs(**(fields | options))


async def new_execution(engine: EngineAPI, lane_id: str = "default", **fields: Any) -> ExecutionId:
    """Create an execution; return its id."""
    execution_id = engine.new_execution_id(lane_id)
    await engine.create_execution(execution_id=execution_id, lane_id=lane_id, **fields)
    return execution_id


async def claim_one(engine: Engine, lane_id: str = "default", **options: Any) -> Claimed:
    """Claim an execution as worker `w`; the test fails if there is none."""
    claim = await engine.claim(lane_id, **{"worker_id": "w", "worker_instance_id": "w-1", **options})
    assert claim is not None
    return claim
