"""A worker process that tests start and kill.

    python -m tests.chaos.worker drain URL --submit 1250     submits, and works until no execution is left
    python -m tests.chaos.worker toil URL                    works without end
    python -m tests.chaos.worker hold URL                    stops in the middle of its first batch
    python -m tests.chaos.worker sweep URL                   runs the background sweeps
    python -m tests.chaos.worker spend URL                   works under quotas and spends from budgets

It prints one line per action: `submitted ID`, `claimed ID EPOCH`, `completed ID EPOCH`, `holding`,
`sweeping HOLDER`, and `refused KIND` if its lease was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.errors import ExecutionNotActive, LeaseExpired, StaleLease
from flowfabric.model.answers.execution import Claimed
from flowfabric.settings import Settings, Sweeps
from tests.executions import create_request

LANE = "default"
QUICK = Settings(
    sweeps=Sweeps(
        lease_expiry_ms=100,
        delayed_promoter_ms=100,
        attempt_timeout_ms=100,
        execution_deadline_ms=100,
        suspension_timeout_ms=2000,
        budget_reset_ms=2000,
        batch=5,
    ),
    poll_ms=200,
)
UNFINISHED = ("waiting", "active", "delayed")
LEDGER = "0b000000-0000-4000-8000-00000000000a"  # the budget in which workers reserve and settle
SCARCE = "0b000000-0000-4000-8000-00000000000b"  # the budget that is soon exhausted
PROMISED, SPENT, SCARCE_EACH = 5, 2, 3


def report(*words: object) -> None:
    print(*words, flush=True)


def identity() -> dict[str, str]:
    return {"worker_id": "chaos", "worker_instance_id": f"chaos-{os.getpid()}"}


async def submit(engine: Engine, count: int, *, reported: bool = True) -> None:
    asks = [
        create_request(engine.new_execution_id(LANE), LANE, namespace="chaos", input_payload=b"x" * 100)
        for _ in range(count)
    ]
    for start in range(0, count, 100):
        for answer in await engine.create_executions(asks[start : start + 100]):
            if isinstance(answer, Exception):
                raise answer
            if reported:
                report("submitted", answer.execution_id)


async def claim(engine: Engine, ttl: int, limit: int = 20) -> list[Claimed]:
    claimed = await engine.claim_many(LANE, limit, **identity(), lease_ttl_ms=ttl, max_wait_ms=200)
    for one in claimed:
        report("claimed", one.execution_id, one.lease_epoch)
    return claimed


async def finish(engine: Engine, claimed: Claimed) -> None:
    try:
        await engine.complete(claimed.handle, result=claimed.execution_id.encode())
    except (LeaseExpired, StaleLease, ExecutionNotActive) as late:
        report("refused", late.kind)
    else:
        report("completed", claimed.execution_id, claimed.lease_epoch)


async def is_anything_left(engine: Engine) -> bool:
    for state in UNFINISHED:
        page = await engine.search_executions(public_state=state, limit=1)
        while not page.executions and page.next_cursor is not None:
            page = await engine.search_executions(public_state=state, limit=1, cursor=page.next_cursor)
        if page.executions:
            return True
    return False


async def work(engine: Engine, ttl: int, *, until_empty: bool) -> None:
    while True:
        claimed = await claim(engine, ttl)
        await asyncio.gather(*(finish(engine, one) for one in claimed))
        if until_empty and not claimed and not await is_anything_left(engine):
            return


async def hold(engine: Engine, ttl: int) -> None:
    claimed: list[Claimed] = []
    while not claimed:
        claimed = await claim(engine, ttl)
    for one in claimed[: len(claimed) // 2]:
        await finish(engine, one)
    report("holding")
    await asyncio.Event().wait()


async def spend(engine: Engine, ttl: int) -> None:
    """Claim executions; each reserves, spends, settles and reports once, however often it is started."""
    while True:
        claimed = await engine.claim_admitted(LANE, 2, **identity(), lease_ttl_ms=ttl, max_wait_ms=200)
        for one in claimed:
            report("claimed", one.execution_id, one.lease_epoch)
            e, reservation_id = one.execution_id, one.execution_id.partition(":")[2].partition(":")[2]
            await engine.reserve_budget(LEDGER, e, {"tokens": PROMISED}, ttl_ms=ttl, reservation_id=reservation_id)
            await engine.record_spend(LEDGER, e, {"calls": 1}, idempotency_key=e)
            await engine.report_usage(one.handle, SCARCE, {"tokens": SCARCE_EACH}, dedup_key=e)
            await engine.settle_budget(LEDGER, e, reservation_id, {"tokens": SPENT})
            await finish(engine, one)


async def sweep(engine: Engine) -> None:
    engine.start_sweeps()
    assert engine._sweeper is not None
    report("sweeping", engine._sweeper._holder)
    await asyncio.Event().wait()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("drain", "toil", "hold", "sweep", "spend"))
    parser.add_argument("url")
    parser.add_argument("--submit", type=int, default=0)
    parser.add_argument("--ttl", type=int, default=15_000)
    arguments = parser.parse_args()
    async with await open_engine(arguments.url, settings=QUICK) as engine:
        match arguments.role:
            case "drain" | "toil":
                await submit(engine, arguments.submit)
                await work(engine, arguments.ttl, until_empty=arguments.role == "drain")
            case "hold":
                await hold(engine, arguments.ttl)
            case "spend":
                await spend(engine, arguments.ttl)
            case _:
                await sweep(engine)
    report("done")


if __name__ == "__main__":
    asyncio.run(main())
