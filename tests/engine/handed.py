"""A worker of one slot that is about to be killed: `python -m tests.engine.handed URL LANE TTL_MS {heard,unheard}`.

It claims a step of a chain, says "ready", waits for a line, ends the step, and is handed the next one. When it has that
(`heard`), or when the store has given it and nobody here knows yet (`unheard`), it says so and does nothing any more.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from flowfabric.connector import open_engine
from flowfabric.model.change import Change
from flowfabric.stores.claims import ClaimRequest, CommitAndClaimResult


async def stop(*names: str) -> None:
    print("got", *names, flush=True)
    await asyncio.Event().wait()


async def work(url: str, lane: str, ttl_ms: int, *, heard: bool) -> None:
    async with await open_engine(url, migrate=False) as engine:
        hand_over: Any = engine.store.commit_and_claim

        async def hand_over_and_stop(
            changes: Sequence[Change], topics: frozenset[str], request: ClaimRequest
        ) -> CommitAndClaimResult:
            handed: CommitAndClaimResult = await hand_over(changes, topics, request)
            await stop(*(row.execution_id for row, _ in handed.rows))
            return handed

        if not heard:
            engine.store.commit_and_claim = hand_over_and_stop  # type: ignore[method-assign]
        pull = engine.pulling([lane], worker_id="w", worker_instance_id="w-killed", lease_ttl_ms=ttl_ms)
        [held] = await pull.claim(1)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        telling = asyncio.create_task(engine.complete_many([(held.handle, b"{}")]))
        claimed = await pull.claim(1, max_wait_ms=60_000)
        await telling
        await stop(*(one.execution_id for one in claimed))


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], int(sys.argv[3]), heard=sys.argv[4] == "heard"))
