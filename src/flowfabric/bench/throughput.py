"""`ff bench throughput`: rates and latency through the engine, beside the control, in one run."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import Protocol

import msgspec

from flowfabric import Engine
from flowfabric.bench import workload
from flowfabric.bench.scratch_store import BenchReport, Control, ScratchStore, per_job, scratch_store
from flowfabric.connector import open_engine

PER_SECOND = 50  # submits while latency is measured
WARM_UP = 20  # submits that are not counted
SAMPLES = 200
CLAIMS = 50  # timed claims in each of two stores


class ThroughputReport(BenchReport, frozen=True, omit_defaults=True):
    """The results; rates are medians over the rounds, and so are ratios to the control of the same round."""

    jobs: int
    payload_bytes: int
    rounds: int
    drain_per_s: float
    bulk_submit_per_s: float
    single_submit_per_s: float
    latency_p50_ms: float
    latency_p99_ms: float
    control_drain_per_s: float | None = None
    drain_ratio: float | None = None
    control_insert_per_s: float | None = None
    submit_ratio: float | None = None
    control_latency_p50_ms: float | None = None
    latency_ratio: float | None = None
    server_us_per_submit: float | None = None  # CPU of all servers, of a bulk submit
    server_us_per_drained: float | None = None
    control_server_us_per_drained: float | None = None
    depth: int | None = None
    claim_ms: float | None = None  # time of a claim of 100 rows in an almost empty store
    claim_at_depth_ms: float | None = None
    claim_cost_ratio: float | None = None


class ProgressCallback(Protocol):
    """Called with the name of each step, how many are done, and how many there are."""

    def __call__(self, what: str, done: int, steps: int) -> None: ...


async def throughput(
    url: str,
    *,
    jobs: int,
    payload_bytes: int,
    rounds: int = 3,
    depth: int = 0,
    samples: int = SAMPLES,
    progress: ProgressCallback | None = None,
) -> ThroughputReport:
    """Measure on a scratch store beside the named one."""
    begin_step = StepCounter(progress, 5 * rounds + 1 + (2 if depth else 0))
    rng = random.Random(0)
    payloads = [rng.randbytes(payload_bytes) for _ in range(jobs)]
    async with AsyncExitStack() as stack:
        scratch = await stack.enter_async_context(scratch_store(url))
        engine = await stack.enter_async_context(await open_engine(scratch.url))
        claimer = await stack.enter_async_context(await open_engine(scratch.url)) if scratch.shared else engine
        begin_step("latency at 50 submits a second")  # first: after the rounds the server is busy with vacuuming
        times = await _latencies(engine, claimer, scratch.control, payloads[0], WARM_UP + samples)
        rates = [await _round(engine, scratch, number, payloads, begin_step) for number in range(rounds)]
        costs = None
        if depth:
            other = await stack.enter_async_context(scratch_store(url))
            empty = await stack.enter_async_context(await open_engine(other.url))
            costs = await _claim_costs(empty, engine, scratch.control, depth, payloads[0], begin_step)
        begin_step.finish()
        return _report(scratch, rates, times, costs, jobs=jobs, payload_bytes=payload_bytes, depth=depth)


async def _latencies(
    engine: Engine, claimer: Engine, control: Control | None, payload: bytes, count: int
) -> tuple[list[float], list[float]]:
    """Return the milliseconds from submit to claim, of the engine and of the control."""
    own = await workload.latencies(engine, claimer, "bench-latency", payload, count=count, per_second=PER_SECOND)
    bare = [] if control is None else await control.latencies(payload, count=count, per_second=PER_SECOND)
    return own[WARM_UP:], bare[WARM_UP:]


class RoundRates(msgspec.Struct, frozen=True):
    """The rates of one round."""

    bulk: float
    insert: float | None
    drain: float
    control_drain: float | None
    single: float
    submit_us: float | None  # CPU of the servers for each execution
    drain_us: float | None
    control_drain_us: float | None


class StepCounter:
    """Reports which step of a benchmark is running."""

    def __init__(self, progress: ProgressCallback | None, steps: int) -> None:
        self._progress = progress
        self._done = 0
        self._steps = steps

    def __call__(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what, self._done, self._steps)
        self._done += 1

    def finish(self) -> None:
        if self._progress is not None:
            self._progress("done", self._steps, self._steps)


async def _round(
    engine: Engine, scratch: ScratchStore, number: int, payloads: Sequence[bytes], begin_step: Callable[[str], None]
) -> RoundRates:
    """Measure engine and control in turns, so that a slow moment of the machine affects both."""
    lane, name, insert, control_drain = f"bench-{number}", f"round {number + 1}: ", None, None
    control, used_us = scratch.control, [await scratch.server_us()]
    gc.collect()
    begin_step(name + "bulk submit")
    bulk = await workload.bulk_submit(engine, lane, payloads)
    used_us.append(await scratch.server_us())
    begin_step(name + "bare insert")
    if control is not None:
        started = perf_counter()
        await control.insert(payloads)
        insert = len(payloads) / (perf_counter() - started)
    begin_step(name + "drain")
    used_us.append(await scratch.server_us())
    drained = await workload.drain(engine, lane, len(payloads))
    used_us.append(await scratch.server_us())
    begin_step(name + "bare drain")
    if control is not None:
        started = perf_counter()
        control_drain = await control.drain() / (perf_counter() - started)
    used_us.append(await scratch.server_us())
    begin_step(name + f"{workload.CALLERS} concurrent submits")
    batch = payloads[: max(1, len(payloads) // 4)]
    single = await workload.single_submits(engine, lane, batch)
    await workload.drain(engine, lane, len(batch))
    submit_us, _, drain_us, bare_us = (per_job(*pair, len(payloads)) for pair in pairwise(used_us))
    return RoundRates(bulk, insert, drained, control_drain, single, submit_us, drain_us, bare_us)


async def _claim_costs(
    empty: Engine, full: Engine, control: Control | None, depth: int, payload: bytes, begin_step: Callable[[str], None]
) -> tuple[float, float]:
    """Return the milliseconds of a claim of 100 rows: in an empty store, and in one with `depth` other rows."""
    lane = "bench-depth"
    begin_step(f"{depth} finished and {depth} waiting rows")
    for begin in range(0, depth, 20_000):
        batch = [payload] * min(20_000, depth - begin)
        await workload.bulk_submit(full, lane, batch)
        await workload.drain(full, lane, len(batch))
    for begin in range(0, depth, 20_000):
        await workload.bulk_submit(full, lane, [payload] * min(20_000, depth - begin))
    if control is not None:
        await control.vacuum()
    begin_step("claims beside them, and in an empty store")
    for engine in (empty, full):
        await workload.bulk_submit(engine, lane, [payload] * (workload.CLAIM_BATCH * (CLAIMS + 1)))
    pairs = [(await _claim_ms(empty, lane), await _claim_ms(full, lane)) for _ in range(CLAIMS + 1)]
    shallow, deep = zip(*pairs[1:], strict=True)
    return median(shallow), median(deep)


async def _claim_ms(engine: Engine, lane: str) -> float:
    started = perf_counter()
    claimed = await engine.claim_many(
        lane,
        workload.CLAIM_BATCH,
        worker_id=workload.WORKER,
        worker_instance_id=workload.WORKER,
        lease_ttl_ms=3_600_000,
    )
    took = perf_counter() - started
    if len(claimed) != workload.CLAIM_BATCH:
        raise AssertionError(f"a claim of {workload.CLAIM_BATCH} got {len(claimed)}")
    return took * 1000


def _report(
    scratch: ScratchStore,
    rates: list[RoundRates],
    times: tuple[list[float], list[float]],
    costs: tuple[float, float] | None,
    *,
    jobs: int,
    payload_bytes: int,
    depth: int,
) -> ThroughputReport:
    drained, bulk = median(rate.drain for rate in rates), median(rate.bulk for rate in rates)
    control_drain = _median([rate.control_drain for rate in rates])
    insert = _median([rate.insert for rate in rates])
    own, bare = times
    percentiles = quantiles(own, n=100)
    return ThroughputReport(
        **scratch.report_fields(),
        jobs=jobs,
        payload_bytes=payload_bytes,
        rounds=len(rates),
        drain_per_s=round(drained),
        bulk_submit_per_s=round(bulk),
        single_submit_per_s=round(median(rate.single for rate in rates)),
        latency_p50_ms=round(percentiles[49], 2),
        latency_p99_ms=round(percentiles[98], 2),
        control_drain_per_s=None if control_drain is None else round(control_drain),
        drain_ratio=_ratio([(rate.drain, rate.control_drain) for rate in rates]),
        control_insert_per_s=None if insert is None else round(insert),
        submit_ratio=_ratio([(rate.bulk, rate.insert) for rate in rates]),
        control_latency_p50_ms=round(median(bare), 2) if bare else None,
        latency_ratio=_ratio([(median(own), _median(bare))]),
        server_us_per_submit=_rounded(_median([rate.submit_us for rate in rates])),
        server_us_per_drained=_rounded(_median([rate.drain_us for rate in rates])),
        control_server_us_per_drained=_rounded(_median([rate.control_drain_us for rate in rates])),
        depth=depth or None,
        claim_ms=None if costs is None else round(costs[0], 2),
        claim_at_depth_ms=None if costs is None else round(costs[1], 2),
        claim_cost_ratio=None if costs is None else round(costs[1] / costs[0], 2),
    )


def _ratio(pairs: Sequence[tuple[float, float | None]]) -> float | None:
    value = _median([None if control is None else engine / control for engine, control in pairs])
    return None if value is None else round(value, 3)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
