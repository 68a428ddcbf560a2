"""A closed engine refuses every call at once, without retries."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flowfabric import errors
from flowfabric.connector import open_engine
from tests.executions import new_execution


@pytest.fixture(params=["sqlite", "postgres"])  # A memory store has nothing to close.
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ff.db" if request.param == "sqlite" else request.getfixturevalue("database")


async def test_a_closed_engine_refuses_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await open_engine(url, migrate=True)
    execution_id = await new_execution(engine)
    await engine.close()
    await engine.close()

    async def never(_: float) -> None:
        raise AssertionError("nobody waits for a closed store")

    monkeypatch.setattr(asyncio, "sleep", never)
    for call in (
        engine.describe_execution(execution_id),
        engine.create_execution(execution_id=engine.new_execution_id()),
        engine.claim("default", worker_id="w", worker_instance_id="w-1"),
        engine.list_lanes(),
    ):
        with pytest.raises(errors.StoreUnavailable, match="the store is closed"):
            await call
