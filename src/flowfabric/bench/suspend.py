"""`ff bench suspend`: how soon a signal resumes a suspended execution, and how fast output reaches its readers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from statistics import median, quantiles
from time import perf_counter
from typing import TypeVar

from flowfabric import Engine, Handle
from flowfabric.bench.scratch_store import BenchReport, scratch_store
from flowfabric.bench.throughput import ProgressCallback, StepCounter
from flowfabric.connector import open_engine
from flowfabric.engine.operations.suspensions import Suspended
from flowfabric.engine.types import FreshWaitpoint, SignalArgs, SuspendArgs
from flowfabric.model.condition import Single

LANE = "bench-suspend"
LEASE_MS = 600_000
WARM_UP = 20
FRAME = b'{"token":"word"}'
WRITERS = 256  # tasks that write frames at the same time, each waiting for its own
PAUSE_S = 0.005  # time in which the waiting side becomes idle

T = TypeVar("T")


class SuspendReport(BenchReport, frozen=True):
    """The results; times are in milliseconds."""

    rounds: int
    resume_p50_ms: float  # from the call of suspend until a waiting worker has claimed the same attempt
    resume_p99_ms: float
    suspend_p50_ms: float
    signal_p50_ms: float
    running_p50_ms: float  # from the call of the signal to the claim
    commit_p50_ms: float  # the control in the same run: one small guarded commit
    resume_in_commits: float  # resume_p50_ms divided by commit_p50_ms
    frames: int
    frames_per_s: float
    tails: int
    tail_p50_ms: float  # from the call of append until a reader has the frame
    tail_p99_ms: float


async def suspend(
    url: str,
    *,
    rounds: int,
    frames: int,
    tails: int,
    progress: ProgressCallback | None = None,
) -> SuspendReport:
    """Measure on a scratch store beside the named one."""
    begin_step = StepCounter(progress, 3)
    async with AsyncExitStack() as stack:
        scratch = await stack.enter_async_context(scratch_store(url))
        engine = await stack.enter_async_context(await open_engine(scratch.url))
        await engine.ensure_signing_key(secrets.token_hex(32))
        begin_step("suspend, signal, claim")
        times, commit_times = await _round_trips(engine, rounds)
        begin_step("frames")
        rate = await _frames(engine, frames)
        begin_step("tail")
        reader = await stack.enter_async_context(await open_engine(scratch.url)) if scratch.shared else engine
        delays = await _tails(engine, reader, tails)
        begin_step.finish()
        totals = [suspending + resuming for suspending, _, resuming in times]
        return SuspendReport(
            **(scratch.report_fields() | {"versions": scratch.versions}),
            rounds=rounds,
            resume_p50_ms=_ms(median(totals)),
            resume_p99_ms=_p99(totals),
            suspend_p50_ms=_ms(median(parts[0] for parts in times)),
            signal_p50_ms=_ms(median(parts[1] for parts in times)),
            running_p50_ms=_ms(median(parts[2] for parts in times)),
            commit_p50_ms=_ms(median(commit_times)),
            resume_in_commits=round(median(totals) / median(commit_times), 2),
            frames=frames,
            frames_per_s=round(rate),
            tails=tails,
            tail_p50_ms=_ms(median(delays)),
            tail_p99_ms=_p99(delays),
        )


async def _claimed(engine: Engine) -> tuple[str, Handle]:
    execution_id = engine.new_execution_id(LANE)
    await engine.create_execution(execution_id=execution_id, lane_id=LANE)
    return execution_id, await _claim(engine)


async def _claim(engine: Engine) -> Handle:
    claimed = await engine.claim(
        LANE, worker_id="bench", worker_instance_id="bench-1", lease_ttl_ms=LEASE_MS, max_wait_ms=10_000
    )
    assert claimed is not None
    return claimed.handle


async def _round_trips(engine: Engine, rounds: int) -> tuple[list[tuple[float, float, float]], list[float]]:
    """Return the times of suspend-and-resume round trips, and of a small commit before each."""
    _, held = await _claimed(engine)
    round_trips, commits = [], []
    for _ in range(WARM_UP + rounds):
        round_trip, commit = await _round_trip(engine, held)
        round_trips.append(round_trip)
        commits.append(commit)
    await engine.complete(held)
    return round_trips[WARM_UP:], commits[WARM_UP:]


async def _round_trip(engine: Engine, held: Handle) -> tuple[tuple[float, float, float], float]:
    """Return the seconds of a suspend, of its signal, and until a worker has claimed it; and those of a commit."""
    execution_id, handle = await _claimed(engine)
    claiming = asyncio.create_task(_timed(_claim(engine)))
    await asyncio.sleep(PAUSE_S)
    await engine.progress(held, pct=0)  # warm-up: the first commit after a pause is slow
    started = perf_counter()
    await engine.progress(held, pct=1)
    committed = perf_counter()
    waitpoint_id = engine.minter.uuid()
    args = SuspendArgs(
        suspension_id=engine.minter.uuid(),
        waitpoints=(FreshWaitpoint(waitpoint_id, "k"),),
        resume_condition=Single("k"),
        reason_code="waiting_for_signal",
        now=engine.estimate.now(),
    )
    begun = perf_counter()
    suspended = await engine.suspend(handle, args)
    parked = perf_counter()
    assert isinstance(suspended, Suspended)
    await engine.deliver_signal(
        SignalArgs(
            execution_id=execution_id,
            waitpoint_id=waitpoint_id,
            signal_id=engine.minter.uuid(),
            signal_name="go",
            waitpoint_token=suspended.details.waitpoint_token,
        )
    )
    signalled = perf_counter()
    again, running = await claiming
    assert again.fields.execution_id == execution_id
    await engine.complete(again)
    return (parked - begun, signalled - parked, running - parked), committed - started


async def _frames(engine: Engine, count: int) -> float:
    """Return how many small durable frames per second one execution accepts, each acknowledged after its commit."""
    _, handle = await _claimed(engine)

    async def write(share: int) -> None:
        for _ in range(share):
            await engine.append_frame(handle, FRAME)

    await write(1)
    begun = perf_counter()
    await asyncio.gather(*(write(count // WRITERS) for _ in range(WRITERS)))
    rate = count // WRITERS * WRITERS / (perf_counter() - begun)
    await engine.complete(handle)
    return rate


async def _tails(engine: Engine, reader: Engine, count: int) -> list[float]:
    """Return the seconds from each append until a waiting reader, in another engine, has the frame."""
    execution_id, handle = await _claimed(engine)
    delays: list[float] = []
    after = "0-0"
    for number in range(WARM_UP + count):
        waiting = asyncio.create_task(reader.tail_stream(execution_id, 0, after, 10_000))
        await asyncio.sleep(PAUSE_S)
        begun = perf_counter()
        appended = asyncio.create_task(engine.append_frame(handle, FRAME))
        page, had = await _timed(waiting)
        after = page.frames[-1].id
        await appended
        if number >= WARM_UP:
            delays.append(had - begun)
    await engine.complete(handle)
    return delays


async def _timed(awaitable: Awaitable[T]) -> tuple[T, float]:
    """Return the result of an awaitable and the time at which it arrived."""
    return await awaitable, perf_counter()


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


def _p99(values: list[float]) -> float:
    return _ms(quantiles(values, n=100)[98] if len(values) > 1 else values[0])
