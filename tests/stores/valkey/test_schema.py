"""Two releases on one Valkey store: the older one runs on the next compatible schema, and stops at any other."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from flowfabric import Context, Fabric, errors
from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.sdk.worker.worker import Worker
from flowfabric.stores.valkey import schema
from flowfabric.stores.valkey.store import ValkeyStore
from tests.sdk.conftest import wait_until_true

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w:1"}
NEXT = schema.VERSION + 1
# A schema that the next release says is not compatible, and one that is two releases ahead.
INCOMPATIBLE = [(NEXT, False), (NEXT + 1, True)]


@pytest.fixture
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "CHECK_INTERVAL_S", 0.0)


async def set_schema(engine: Engine, version: int, *, compatible: bool) -> None:
    """Write a schema version, as a newer release does when it migrates."""
    store = engine.store
    assert isinstance(store, ValkeyStore)
    await store.client.call(schema.SCHEMA, "HSET", schema.SCHEMA, "version", version, "compatible", int(compatible))


async def create(engine: Engine) -> str:
    execution_id = engine.new_execution_id()
    await engine.create_execution(execution_id=execution_id)
    return execution_id


async def refusal(engine: Engine) -> errors.SchemaTooNew:
    """Call the engine until it refuses a call; the version is read in the background."""
    async with asyncio.timeout(20):
        while True:
            try:
                await create(engine)
            except errors.SchemaTooNew as refused:
                return refused


async def test_an_empty_store_gets_the_schema_of_this_release(valkey_url: str) -> None:
    with pytest.raises(errors.Unavailable, match="has schema version 0, this release needs 1: migrate first"):
        await open_engine(valkey_url, migrate=False)
    async with await open_engine(valkey_url) as engine:
        assert (engine.schema.found, engine.schema.current) == (0, schema.VERSION)
    async with await open_engine(valkey_url, migrate=False) as engine:
        assert engine.schema.found == schema.VERSION


@pytest.mark.usefixtures("frequent_checks")
async def test_a_release_runs_beside_a_compatible_newer_one(valkey_url: str) -> None:
    async with await open_engine(valkey_url) as older:
        await set_schema(older, NEXT, compatible=True)
        created = [await create(older) for _ in range(20)]
        claimed = await older.claim_many("default", 20, lease_ttl_ms=30_000, **WORKER)
        assert sorted(one.execution_id for one in claimed) == sorted(created)
    async with await open_engine(valkey_url) as again:
        assert again.schema.current == NEXT, "an older release does not set the version back"


@pytest.mark.usefixtures("frequent_checks")
@pytest.mark.parametrize(("version", "compatible"), INCOMPATIBLE)
async def test_a_running_release_refuses_every_call_once_the_schema_is_incompatible(
    valkey_url: str, version: int, compatible: bool
) -> None:
    async with await open_engine(valkey_url) as older:
        execution_id = await create(older)
        await set_schema(older, version, compatible=compatible)
        assert await refusal(older) == errors.SchemaTooNew(found=version, known=schema.VERSION)
        for call in (
            lambda: create(older),
            lambda: older.claim_many("default", 1, lease_ttl_ms=30_000, **WORKER),
            lambda: older.describe_execution(execution_id),
            lambda: older.search_executions(),
            lambda: older.sweep_once("delayed_promoter"),
        ):
            with pytest.raises(errors.SchemaTooNew):
                await call()
    with pytest.raises(errors.SchemaTooNew):
        await open_engine(valkey_url)


@pytest.mark.usefixtures("frequent_checks")
async def test_a_worker_reports_that_the_schema_is_newer_and_stops(
    valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    app, begun = Fabric(valkey_url), asyncio.Event()

    @app.task
    async def endless(ctx: Context) -> None:
        begun.set()
        await asyncio.sleep(3600)

    worker = Worker(app, lease_ttl="1s")
    task = asyncio.create_task(worker.work())
    await endless.submit()
    await asyncio.wait_for(begun.wait(), 20)
    async with await open_engine(valkey_url) as newer:
        await set_schema(newer, NEXT, compatible=False)

    with pytest.raises(errors.SchemaTooNew):
        await asyncio.wait_for(task, 20)
    assert sum("this worker stops" in one for one in caplog.messages) == 1
    assert worker.running == 0
    await app.close()


@pytest.mark.usefixtures("frequent_checks")
async def test_an_idle_worker_notices_a_newer_schema(valkey_url: str) -> None:
    app = Fabric(valkey_url)

    @app.task
    async def nothing() -> None: ...

    worker = Worker(app, lease_ttl="1s")
    task = asyncio.create_task(worker.work())
    await wait_until_true(lambda: worker._engine is not None)
    async with await open_engine(valkey_url) as newer:
        await set_schema(newer, NEXT, compatible=False)
    with pytest.raises(errors.SchemaTooNew):
        await asyncio.wait_for(task, 20)
    await app.close()
