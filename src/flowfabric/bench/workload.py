"""The load on the engine during a benchmark: the calls that a submitting service and a worker make."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from time import perf_counter

from flowfabric import CreateExecution, Engine
from flowfabric.bench.scratch_store import paced
from flowfabric.model.answers.execution import Completed

CLAIM_BATCH = 100  # executions that one claim asks for
CLAIM_LOOPS = 4  # so that the commit of one loop overlaps the Python code of the others
CALLERS = 64  # concurrent single submits
WORKER = "bench"
LEASE_MS = 60_000
RESULT = b"done"


def noop(execution_id: str, lane: str, payload: bytes = b"", policy: str | None = None) -> CreateExecution:
    """Return the request of an execution that does nothing."""
    return CreateExecution(
        execution_id=execution_id,
        partition=0,
        namespace="bench",
        lane_id=lane,
        execution_kind="noop",
        input_payload=payload,
        policy=policy,
    )


async def create_all(engine: Engine, requests: Iterable[CreateExecution]) -> float:
    """Create executions with a single call; return the seconds that it takes."""
    started = perf_counter()
    created = await engine.create_executions(requests)
    took = perf_counter() - started
    for answer in created:
        if isinstance(answer, Exception):
            raise answer
    return took


async def bulk_submit(engine: Engine, lane: str, payloads: Sequence[bytes]) -> float:
    """Create one execution per payload with a single call; return the rate per second."""
    took = await create_all(engine, (noop(engine.new_execution_id(lane), lane, payload) for payload in payloads))
    return len(payloads) / took


async def single_submits(engine: Engine, lane: str, payloads: Sequence[bytes]) -> float:
    """Create one execution per call from many concurrent callers; return the rate per second."""
    waiting = iter(payloads)

    async def caller() -> None:
        for payload in waiting:
            await engine.create(noop(engine.new_execution_id(lane), lane, payload))

    started = perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return len(payloads) / (perf_counter() - started)


async def drain(engine: Engine, lane: str, expected: int) -> float:
    """Claim and complete executions until the lane is empty; return the rate per second."""

    async def loop(instance: str) -> int:
        done = 0
        while claimed := await engine.claim_many(
            lane, CLAIM_BATCH, worker_id=WORKER, worker_instance_id=instance, lease_ttl_ms=LEASE_MS
        ):
            answered = await engine.complete_many([(row.handle, RESULT) for row in claimed])
            done += sum(isinstance(answer, Completed) for answer in answered)
        return done

    return await drain_by(loop, expected)


async def drain_by(loop: Callable[[str], Awaitable[int]], expected: int) -> float:
    """Run the claim loops of a worker, which return how many they completed; return the rate per second."""
    started = perf_counter()
    done = sum(await asyncio.gather(*(loop(f"{WORKER}-{number}") for number in range(CLAIM_LOOPS))))
    took = perf_counter() - started
    if done != expected:
        raise AssertionError(f"{expected} executions were submitted and {done} completed")
    return done / took


async def latencies(
    submitter: Engine, claimer: Engine, lane: str, payload: bytes, *, count: int, per_second: int
) -> list[float]:
    """Return the milliseconds from submit to claim by a waiting worker, at a low rate."""
    submitted: dict[str, float] = {}
    latencies_ms: list[float] = []

    async def work() -> None:
        while len(latencies_ms) < count:
            claimed = await claimer.claim(
                lane, worker_id=WORKER, worker_instance_id=WORKER, lease_ttl_ms=LEASE_MS, max_wait_ms=10_000
            )
            if claimed is None:
                raise AssertionError("a submitted execution was not claimed within ten seconds")
            latencies_ms.append((perf_counter() - submitted[claimed.execution_id]) * 1000)
            await claimer.complete(claimed.handle, result=RESULT)

    worker = asyncio.create_task(work())
    async for _ in paced(count, per_second):
        execution_id = submitter.new_execution_id(lane)
        submitted[execution_id] = perf_counter()
        await submitter.create(noop(execution_id, lane, payload))
    await worker
    return latencies_ms
