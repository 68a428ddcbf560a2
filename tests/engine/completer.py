"""One of several processes that complete the parents of one join: `python -m tests.engine.completer URL LANE COUNT
[TTL_MS]`.

It claims, prints "ready", waits for a line, completes all claimed executions concurrently, and prints a count as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from flowfabric.connector import open_engine


async def complete_parents(url: str, lane: str, count: int, ttl_ms: int) -> dict[str, Any]:
    async with await open_engine(url, migrate=False) as engine:
        held = await engine.claim_many(lane, count, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=ttl_ms)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.gather(*(engine.complete(one.handle, result=b"r") for one in held))
        await engine.dispatcher.wait_idle()
        return {"finished": len(held)}


if __name__ == "__main__":
    print(
        json.dumps(
            asyncio.run(complete_parents(sys.argv[1], sys.argv[2], int(sys.argv[3]), int((*sys.argv, "60000")[4])))
        )
    )
