"""`ff bench capability`: the cost of capability requirements, and how tasks are routed to capable workers.

The same number of no-ops is drained twice in each round: without requirements, and spread over ten capability sets.
Then a hundred workers claim a thousand tasks in three scenarios: every worker has all capabilities (happy), ten workers
have rare ones that half of the tasks need (partial), one worker has those that a tenth of the tasks need (scarce).
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median, quantiles
from time import perf_counter

import msgspec

from flowfabric import Engine
from flowfabric.bench.scratch_store import BenchReport, scratch_store
from flowfabric.bench.throughput import ProgressCallback, StepCounter
from flowfabric.bench.workload import CLAIM_BATCH, LEASE_MS, RESULT, WORKER, create_all, drain_by, noop
from flowfabric.connector import open_engine

SETS = 10
EXCLUSIVE = 3  # rare capabilities in the partial scenario
WAIT_MS = 200
Offer = frozenset[str]


class RoutingResult(msgspec.Struct, frozen=True):
    """How tasks were routed to capable workers."""

    tasks: int
    workers: int
    routed: float  # the share of tasks that a capable worker claimed
    claims_per_task: float
    latency_p50_ms: float  # from the submit to the claim
    latency_p99_ms: float


class CapabilityReport(BenchReport, frozen=True):
    """The results; rates are medians over the rounds."""

    jobs: int
    rounds: int
    sets: int
    plain_drain_per_s: float
    drain_per_s: float
    drain_ratio: float
    happy: RoutingResult
    partial: RoutingResult
    scarce: RoutingResult


async def capability(
    url: str,
    *,
    jobs: int = 20_000,
    rounds: int = 3,
    tasks: int = 1000,
    workers: int = 100,
    progress: ProgressCallback | None = None,
) -> CapabilityReport:
    """Measure on a scratch store beside the named one."""
    begin_step = StepCounter(progress, 2 * rounds + 3)
    rng = random.Random(0)
    names = [f"cap{number}" for number in range(SETS)]
    async with AsyncExitStack() as stack:
        scratch = await stack.enter_async_context(scratch_store(url))
        engine = await stack.enter_async_context(await open_engine(scratch.url))
        await _drain(engine, "bench-warm", min(jobs, 1000), names)
        plain, spread = [], []
        for number in range(rounds):
            gc.collect()
            begin_step(f"round {number + 1}: no requirements")
            plain.append(await _drain(engine, f"bench-plain-{number}", jobs, ()))
            begin_step(f"round {number + 1}: {SETS} capability sets")
            spread.append(await _drain(engine, f"bench-sets-{number}", jobs, names))
        routings = []
        for scenario in (_happy, _partial, _scarce):
            begin_step(scenario.__name__.removeprefix("_"))
            needs, offers = scenario(names, tasks, workers, rng)
            routings.append(await _route(engine, f"bench-{scenario.__name__}", needs, offers))
        begin_step.finish()
    return CapabilityReport(
        **scratch.report_fields(),
        jobs=jobs,
        rounds=rounds,
        sets=SETS,
        plain_drain_per_s=round(median(plain)),
        drain_per_s=round(median(spread)),
        drain_ratio=round(median(spread) / median(plain), 3),
        happy=routings[0],
        partial=routings[1],
        scarce=routings[2],
    )


# ---------------------------------------------------------------------------------------------------------------
# Draining


async def _drain(engine: Engine, lane: str, jobs: int, names: Sequence[str]) -> float:
    """Drain jobs that require one of these capabilities each by workers that have all; return the rate per second."""
    needs: list[Offer] = [frozenset({names[n % len(names)]}) if names else frozenset() for n in range(jobs)]
    await _submit(engine, lane, needs)

    async def loop(instance: str) -> int:
        done = 0
        while claimed := await engine.claim_admitted(
            lane,
            CLAIM_BATCH,
            worker_id=WORKER,
            worker_instance_id=instance,
            capabilities=names,
            lease_ttl_ms=LEASE_MS,
        ):
            await asyncio.gather(*(engine.complete(row.handle, result=RESULT) for row in claimed))
            done += len(claimed)
        return done

    return await drain_by(loop, jobs)


async def _submit(engine: Engine, lane: str, needs: Sequence[Offer]) -> list[str]:
    policies = {need: _policy(need) for need in set(needs)}
    requests = [noop(engine.new_execution_id(lane), lane, policy=policies[need]) for need in needs]
    await create_all(engine, requests)
    return [request.execution_id for request in requests]


def _policy(need: Offer) -> str | None:
    if not need:
        return None
    routing = {"required_capabilities": sorted(need)}
    return msgspec.json.encode({"routing_requirements": routing}).decode()


# ---------------------------------------------------------------------------------------------------------------
# Routing


def _happy(names: Sequence[str], tasks: int, workers: int, rng: random.Random) -> tuple[list[Offer], list[Offer]]:
    return [frozenset({rng.choice(names)}) for _ in range(tasks)], [frozenset(names)] * workers


def _partial(names: Sequence[str], tasks: int, workers: int, rng: random.Random) -> tuple[list[Offer], list[Offer]]:
    rare, common = names[:EXCLUSIVE], names[EXCLUSIVE:]
    power = max(EXCLUSIVE, workers // 10)
    offers = [frozenset({rare[n % EXCLUSIVE], *rng.sample(common, 3)}) for n in range(power)]
    offers += [frozenset(common[(n + k) % len(common)] for k in range(3)) for n in range(workers - power)]
    needs = [frozenset({rng.choice(rare if n % 2 else common)}) for n in range(tasks)]
    return needs, offers


def _scarce(names: Sequence[str], tasks: int, workers: int, rng: random.Random) -> tuple[list[Offer], list[Offer]]:
    needs = [frozenset({names[0]} if n % 10 else {rng.choice(names[1:])}) for n in range(tasks)]
    return needs, [frozenset(names), *[frozenset({names[0]})] * (workers - 1)]


async def _route(engine: Engine, lane: str, needs: Sequence[Offer], offers: Sequence[Offer]) -> RoutingResult:
    """Let workers claim one task at a time until all are done."""
    started = perf_counter()
    required = dict(zip(await _submit(engine, lane, needs), needs, strict=True))
    left, calls, right = len(required), 0, 0
    times: list[float] = []

    async def worker(name: int, offered: Offer) -> None:
        nonlocal left, calls, right
        while left:
            calls += 1
            claimed = await engine.claim_admitted(
                lane,
                worker_id=WORKER,
                worker_instance_id=f"{WORKER}-{name}",
                capabilities=offered,
                lease_ttl_ms=LEASE_MS,
                max_wait_ms=WAIT_MS,
            )
            for row in claimed:
                times.append((perf_counter() - started) * 1000)
                right += required[row.execution_id] <= offered
                await engine.complete(row.handle, result=RESULT)
                left -= 1

    await asyncio.gather(*(worker(name, offered) for name, offered in enumerate(offers)))
    percentiles = quantiles(times, n=100, method="inclusive")
    return RoutingResult(
        tasks=len(needs),
        workers=len(offers),
        routed=round(right / len(needs), 3),
        claims_per_task=round(calls / len(needs), 2),
        latency_p50_ms=round(percentiles[49], 1),
        latency_p99_ms=round(percentiles[98], 1),
    )
