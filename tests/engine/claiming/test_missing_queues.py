"""Executions whose ready queue row is missing can be read, are reported, and are repaired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest

from flowfabric.cli.commands import maintenance
from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.model import obstacles
from flowfabric.model.execution import MISSING_QUEUE, Execution
from flowfabric.model.states import PublicState
from flowfabric.stores.queries import Read
from flowfabric.testing.invariants import check_invariants

WHO: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1", "lease_ttl_ms": 30_000}


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store whose rows can be deleted."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ff.db'}"
    database: str = request.getfixturevalue("database")
    return database


async def delete_queues(url: str) -> None:
    """Delete all rows of the queue table, as a failover may."""
    if url.startswith("sqlite"):
        db = apsw.Connection(url.removeprefix("sqlite:///"))
        db.execute("DELETE FROM ff_line")
        db.close()
    else:
        connection: Any = await asyncpg.connect(url)
        await connection.execute("delete from ff_line")
        await connection.close()


async def create_without_queue(url: str, **more: Any) -> str:
    """Create an execution, delete its queue and return its id."""
    async with await open_engine(url) as engine:
        execution_id = engine.new_execution_id()
        await engine.create_execution(execution_id=execution_id, lane_id="mail", **more)
    await delete_queues(url)
    return execution_id


async def row_of(engine: Engine, execution_id: str) -> Execution:
    row: Execution = (await engine.store.load([Read(Execution, (execution_id,))])).rows[0][0]
    return row


async def test_an_execution_without_a_queue_can_be_read_explained_and_cancelled(url: str) -> None:
    execution_id = await create_without_queue(url)

    async with await open_engine(url) as engine:
        assert (await row_of(engine, execution_id)).line == MISSING_QUEUE
        assert (await row_of(engine, execution_id)).public_state is PublicState.WAITING
        assert await engine.describe_execution(execution_id) is not None
        explained = await engine.explain(execution_id)
        assert explained.obstacle == obstacles.QueueMissing("mail")
        assert "mail" in explained.obstacle.sentence()
        await engine.cancel_execution(execution_id, reason="no longer needed")
        assert (await row_of(engine, execution_id)).public_state is PublicState.CANCELLED
        assert await engine.store.executions_in_missing_queues(10) == []


async def test_the_doctor_reports_executions_without_a_queue(url: str) -> None:
    execution_id = await create_without_queue(url)

    found = {one["check"]: one for one in await maintenance._check_store(url)}

    assert not found["queues"]["ok"]
    assert execution_id in found["queues"]["says"]


async def test_the_reconciler_enqueues_an_execution_again(url: str) -> None:
    execution_id = await create_without_queue(url)

    async with await open_engine(url) as engine, await open_engine(url) as other:
        assert await other.claim_many("mail", 5, **WHO) == []
        assert (await engine.sweep_once("queue_reconciler")).processed == 1
        assert (await engine.sweep_once("queue_reconciler")).processed == 0
        assert await engine.store.executions_in_missing_queues(10) == []
        await check_invariants(engine)
        assert [one.execution_id for one in await other.claim_many("mail", 5, **WHO)] == [execution_id]


async def test_the_reconciler_restores_the_queue_of_an_expired_lease(url: str) -> None:
    async with await open_engine(url) as engine:
        execution_id = engine.new_execution_id()
        await engine.create_execution(execution_id=execution_id, lane_id="mail")
        [claimed] = await engine.claim_many("mail", 1, **WHO)
        await engine.revoke_lease(execution_id)
        assert claimed.execution_id == execution_id
    await delete_queues(url)

    async with await open_engine(url) as engine:
        assert (await engine.sweep_once("queue_reconciler")).processed == 1
        await check_invariants(engine)
        assert [one.execution_id for one in await engine.claim_many("mail", 5, **WHO)] == [execution_id]
