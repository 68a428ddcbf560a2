"""A worker is killed right after it claimed the next step: its lease expires, and another worker claims the step."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flowfabric.connector import open_engine
from flowfabric.model.states import AttemptType
from flowfabric.testing.flow_invariants import check_flow_invariants
from tests.conftest import emptied
from tests.engine.claiming.test_claim_after_completion import LANE, create_chain
from tests.executions import claim_one

TTL_MS = 1500
SURVIVOR: dict[str, Any] = {
    "worker_id": "w",
    "worker_instance_id": "w-other",
    "lease_ttl_ms": 60_000,
    "max_wait_ms": 20_000,
}


@asynccontextmanager
async def worker(url: str, end: str) -> AsyncIterator[Process]:
    """A worker that holds the first step; it is killed at the end of the test."""
    command = (sys.executable, "-m", "tests.engine.killed_worker", url, LANE, str(TTL_MS), end)
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        assert await read_line(process) == ["ready"]
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def read_line(process: Process) -> list[str]:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 30)).decode().split()


@pytest.mark.serial
@pytest.mark.parametrize(("kind", "end"), [("postgres", "heard"), ("postgres", "unheard"), ("sqlite", "heard")])
async def test_another_worker_claims_the_step_of_a_killed_worker(
    kind: str, end: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/ff.db"
    if kind == "postgres":
        url = await emptied(request.getfixturevalue("own_database"))
    async with await open_engine(url) as engine:
        first, second, third = await create_chain(engine, 3)
        async with worker(url, end) as process:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            assert await read_line(process) == ["got", second]
            process.kill()

        taken_over = await claim_one(engine, LANE, **SURVIVOR)
        assert (taken_over.execution_id, taken_over.lease_epoch, taken_over.attempt_index) == (second, 2, 1)
        assert taken_over.attempt_type is AttemptType.RECLAIM
        await engine.complete(taken_over.handle)
        last = await claim_one(engine, LANE, **SURVIVOR)
        assert (last.execution_id, last.lease_epoch, last.attempt_index) == (third, 1, 0)
        await engine.complete(last.handle)

        attempts = {name: await engine.attempt_history(name) for name in (first, second, third)}
        assert [len(each) for each in attempts.values()] == [1, 2, 1]
        lost, found = attempts[second]
        assert (lost.worker_instance_id, found.worker_instance_id) == ("w-killed", "w-other")
        assert found.started_at >= lost.started_at + TTL_MS
        for name in attempts:
            assert await engine.read_execution_state(name) == "completed"
        assert await engine.claim(LANE, **(SURVIVOR | {"max_wait_ms": 0})) is None
        await check_flow_invariants(engine)
