"""How much memory a finished execution takes."""

from __future__ import annotations

import asyncio

from flowfabric.connector import open_engine
from flowfabric.stores.valkey.store import ValkeyStore

NUMBER = 3000
MAX_BYTES = 2300  # with 1 KiB of input; 2,281 to 2,290 were measured with 3,000 to 10,000 executions


async def test_a_finished_execution_takes_little_memory(valkey_url: str) -> None:
    engine = await open_engine(valkey_url)
    names = [engine.new_execution_id() for _ in range(NUMBER)]
    await asyncio.gather(*(engine.create_execution(execution_id=name, input_payload=b"x" * 1024) for name in names))
    for _ in range(NUMBER // 100):
        claimed = await engine.claim_from_lanes(("default",), 100, worker_id="worker", worker_instance_id="worker-1")
        await asyncio.gather(*(engine.complete(one.handle, result=b"ok") for one in claimed))
    states = await asyncio.gather(*(engine.read_execution_state(name) for name in names))
    store = engine.store
    assert isinstance(store, ValkeyStore)
    script = """
        local total = 0
        for _, key in ipairs(redis.call('KEYS', '*')) do
          total = total + redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0)
        end
        return total"""
    total = await store.client.call("{ff}", "EVAL", script, 0)
    await engine.close()

    assert {str(state) for state in states} == {"completed"}
    assert total / NUMBER <= MAX_BYTES
