"""A backup: a copy of the append-only files of a running server, restored on another one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from flowfabric.connector import open_engine
from flowfabric.cursors import FROM_THE_START
from flowfabric.engine.engine import Engine
from flowfabric.testing.invariants import check_invariants
from tests.valkey_servers import ValkeyNode, leave, valkey

WHO: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}


@pytest.fixture
def nodes() -> Iterator[tuple[ValkeyNode, ValkeyNode]]:
    """A server, and an empty one."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    servers = [valkey(f"{name}-{worker}") for name in ("source", "restored")]
    yield servers[0].nodes[0], servers[1].nodes[0]
    for one in servers:
        leave(one)


async def complete(engine: Engine, number: int) -> list[str]:
    claimed = await engine.claim_many("default", number, **WHO)
    for one in claimed:
        await engine.complete(one.handle, result=b"done")
    return [one.execution_id for one in claimed]


async def test_a_copy_of_the_append_only_files_of_a_running_server_is_a_backup(
    nodes: tuple[ValkeyNode, ValkeyNode],
) -> None:
    source, restored = nodes
    async with await open_engine(f"valkey://127.0.0.1:{source.port}/0") as engine:
        names = [engine.new_execution_id() for _ in range(30)]
        for name in names:
            await engine.create_execution(execution_id=name, input_payload=name.encode())
        done = await complete(engine, 10)
        (held,) = await engine.claim_many("default", 1, **WHO, lease_ttl_ms=1000)
        source.execute("CONFIG", "SET", "auto-aof-rewrite-percentage", 0)  # no file is replaced during the copy
        restored.kill()
        shutil.rmtree(restored.folder / "appendonlydir")
        shutil.copytree(source.folder / "appendonlydir", restored.folder / "appendonlydir")
        await complete(engine, 5)  # is not in the backup

    restored.start()
    async with await open_engine(f"valkey://127.0.0.1:{restored.port}/0") as engine:
        rest = set(names) - set(done)
        found = list[str]()
        while len(found) < len(rest):  # the claim that the copy contains expires
            claimed = await engine.claim_many("default", 50, **WHO, max_wait_ms=5000)
            for one in claimed:
                assert one.payload is not None
                assert one.payload.input_payload == one.execution_id.encode()
                await engine.complete(one.handle, result=b"done")
            found += [one.execution_id for one in claimed]

        assert sorted(found) == sorted(rest)
        assert held.execution_id in found
        feed = await engine.subscribe_completion(FROM_THE_START)
        reported = [await feed.next(timeout_s=5) for _ in names]
        assert {entry.execution_id for entry in reported if entry is not None} == set(names)
        await check_invariants(engine)
