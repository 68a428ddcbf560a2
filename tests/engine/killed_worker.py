"""A worker with one slot that is about to be killed: `python -m tests.engine.killed_worker URL LANE TTL_MS
{heard,unheard}`.

It claims a step of a chain, prints "ready", waits for a line, completes the step and claims the next one in the same
commit. It prints the claimed step and stops once it has the reply (`heard`), or once the store has committed and before
the reply is processed (`unheard`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from flowfabric.connector import open_engine
from flowfabric.model.change import Change
from flowfabric.stores.claims import ClaimRequest, CommitAndClaimResult


async def print_and_stop(*names: str) -> None:
    print("got", *names, flush=True)
    await asyncio.Event().wait()


async def work(url: str, lane: str, ttl_ms: int, *, heard: bool) -> None:
    async with await open_engine(url, migrate=False) as engine:
        commit_and_claim: Any = engine.store.commit_and_claim

        async def commit_and_stop(
            changes: Sequence[Change], topics: frozenset[str], request: ClaimRequest
        ) -> CommitAndClaimResult:
            committed: CommitAndClaimResult = await commit_and_claim(changes, topics, request)
            await print_and_stop(*(row.execution_id for row, _ in committed.rows))
            return committed

        if not heard:
            engine.store.commit_and_claim = commit_and_stop  # type: ignore[method-assign]
        pull = engine.pulling([lane], worker_id="w", worker_instance_id="w-killed", lease_ttl_ms=ttl_ms)
        [held] = await pull.claim(1)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        completing = asyncio.create_task(engine.complete_many([(held.handle, b"{}")]))
        claimed = await pull.claim(1, max_wait_ms=60_000)
        await completing
        await print_and_stop(*(one.execution_id for one in claimed))


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], int(sys.argv[3]), heard=sys.argv[4] == "heard"))
