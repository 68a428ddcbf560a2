"""`ff bench flow`: chains, a fan-out with its join, and the sibling cancels of a quorum, in one process."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from operator import truediv
from statistics import median, quantiles
from time import perf_counter
from uuid import uuid4

import msgspec

from flowfabric import CreateExecution, Engine
from flowfabric.bench.scratch_store import BenchReport, Control, scratch_store
from flowfabric.bench.throughput import ProgressCallback, StepCounter
from flowfabric.bench.workload import LEASE_MS, RESULT, WORKER, noop
from flowfabric.connector import open_engine
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.engine.types import Change, outcome_of
from flowfabric.ids import FlowId, mint_for_flow
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.execution import Execution
from flowfabric.sdk.worker.completions import OutcomeReporter
from flowfabric.sdk.worker.outcome import Succeeded

IN_FLIGHT = 16
TIMEOUT_MS = 10_000


class LatencyPercentiles(msgspec.Struct, frozen=True):
    """Milliseconds: half of all samples took at most p50, all but one in a hundred at most p99."""

    p50_ms: float
    p99_ms: float
    samples: int


class FlowReport(BenchReport, frozen=True):
    """The results; rates are medians over the rounds."""

    rounds: int
    steps: int
    in_flight: int
    chains_per_s: float
    control_chains_per_s: float | None  # bare rows: no fence, no graph, no history, no events
    chains_ratio: float | None
    fan: int
    fan_out_and_join: LatencyPercentiles  # from the call that creates the graph to the end of the join
    siblings: int
    quorum_cancel: LatencyPercentiles  # from the call that completes the winner to the cancel of the last sibling
    control_cancel: LatencyPercentiles | None  # one statement that cancels as many bare rows
    graph_nodes: int
    graph_create_s: float


async def flow(
    url: str,
    *,
    chains: int = 600,
    steps: int = 10,
    fan: int = 100,
    siblings: int = 1000,
    samples: int = 100,
    graph: int = 10_000,
    rounds: int = 3,
    progress: ProgressCallback | None = None,
) -> FlowReport:
    """Measure on a scratch store beside the named one."""
    begin_step = StepCounter(progress, 2 * rounds + 4)
    async with AsyncExitStack() as stack:
        scratch = await stack.enter_async_context(scratch_store(url))
        engine = await stack.enter_async_context(await open_engine(scratch.url))
        await _chains(engine, "bench-warm", IN_FLIGHT * 4, steps)
        rates, bare = [], []
        for number in range(rounds):
            begin_step(f"round {number + 1}: {chains} chains of {steps}")
            gc.collect()
            rates.append(await _chains(engine, f"bench-chains-{number}", chains, steps))
            begin_step(f"round {number + 1}: bare chains")
            if scratch.control is not None:
                bare.append(await _bare_chains(scratch.control, chains, steps))
        begin_step(f"fan-out of {fan} and join")
        async with _worker(engine, "bench-fan", slots=fan) as ended:
            fans = [await _fan(engine, "bench-fan", fan, ended) for _ in range(samples + 2)]
        begin_step(f"cancel of {siblings - 1} siblings")
        cancels = [await _quorum(engine, f"bench-quorum-{number}", siblings) for number in range(samples + 2)]
        begin_step(f"cancel of {siblings - 1} bare rows")
        bare_cancels = [] if scratch.control is None else [await scratch.control.cancel(siblings - 1) for _ in cancels]
        begin_step(f"one graph of {graph} nodes")
        created_s = await _graph(engine, graph)
        begin_step.finish()
    return FlowReport(
        **scratch.report_fields(),
        rounds=rounds,
        steps=steps,
        in_flight=IN_FLIGHT,
        chains_per_s=round(median(rates), 1),
        control_chains_per_s=round(median(bare), 1) if bare else None,
        chains_ratio=round(median(map(truediv, rates, bare)), 3) if bare else None,
        fan=fan,
        fan_out_and_join=_percentiles(fans[2:]),
        siblings=siblings,
        quorum_cancel=_percentiles(cancels[2:]),
        control_cancel=_percentiles(bare_cancels[2:]) if bare_cancels else None,
        graph_nodes=graph,
        graph_create_s=round(created_s, 2),
    )


def _percentiles(times: Sequence[float]) -> LatencyPercentiles:
    percentiles = quantiles(times, n=100, method="inclusive")
    return LatencyPercentiles(round(percentiles[49] * 1000, 1), round(percentiles[98] * 1000, 1), len(times))


async def _chains(engine: Engine, lane: str, chains: int, steps: int) -> float:
    """Create and run chains, `IN_FLIGHT` at a time; return the rate per second."""
    left = iter(range(chains))

    async def run_chains() -> None:
        for _ in left:
            flow_id, names = _ids(engine, steps)
            edges = [GraphEdge(*pair) for pair in pairwise(names)]
            await engine.create_flow_graph(flow_id, _nodes(lane, names), edges, namespace="bench")
            await ended(names[-1])

    async with _worker(engine, lane, slots=IN_FLIGHT) as ended:
        started = perf_counter()
        await asyncio.gather(*(run_chains() for _ in range(IN_FLIGHT)))
        return chains / (perf_counter() - started)


async def _bare_chains(control: Control, chains: int, steps: int) -> float:
    started = perf_counter()
    ended = await control.chains(chains, steps, IN_FLIGHT)
    took = perf_counter() - started
    if ended != chains * steps:
        raise AssertionError(f"{chains * steps} bare steps were created and {ended} ended")
    return chains / took


async def _fan(engine: Engine, lane: str, fan: int, ended: _CompletionWaiter) -> float:
    """Run a fan-out and its join; return the seconds from the create to the end of the join."""
    flow_id, names = _ids(engine, fan + 2)
    first, *middle, last = names
    edges = [GraphEdge(first, name) for name in middle] + [GraphEdge(name, last) for name in middle]
    started = perf_counter()
    await engine.create_flow_graph(flow_id, _nodes(lane, names), edges, namespace="bench")
    await ended(last)
    took = perf_counter() - started
    await engine.dispatcher.wait_idle()
    return took


async def _quorum(engine: Engine, lane: str, siblings: int) -> float:
    """Run a quorum of one; return the seconds from the first completion to the last cancel of a sibling."""
    flow_id, names = _ids(engine, siblings + 1)
    *many, last = names
    policy = {last: {"kind": "quorum", "k": 1, "on_satisfied": "cancel_remaining"}}
    edges = [GraphEdge(name, last) for name in many]
    await engine.create_flow_graph(flow_id, _nodes(lane, names), edges, policies=policy, namespace="bench")
    winner = await engine.claim(lane, worker_id=WORKER, worker_instance_id=WORKER, lease_ttl_ms=LEASE_MS)
    if winner is None:
        raise AssertionError("nothing could be claimed")
    cancelled = asyncio.Event()
    left = siblings - 1

    def count(change: Change, _: object) -> None:
        nonlocal left
        left -= outcome_of(change) == "cancelled"
        if not left:
            cancelled.set()

    engine.runtime.on_write(count, Execution)
    try:
        started = perf_counter()
        await engine.complete(winner.handle, result=RESULT)
        await asyncio.wait_for(cancelled.wait(), TIMEOUT_MS / 1000)
        took = perf_counter() - started
    finally:
        engine.runtime.write_listeners[Execution].remove(count)
    await engine.dispatcher.wait_idle()
    return took


async def _graph(engine: Engine, size: int) -> float:
    """Create a layered graph in which most nodes wait for two others; return the seconds that it takes."""
    flow_id, names = _ids(engine, size)
    width = 100
    edges = [
        GraphEdge(names[number - width + step], names[number])
        for number in range(width, size)
        for step in ((0, 1) if (number + 1) % width else (0,))
    ]
    started = perf_counter()
    await engine.create_flow_graph(flow_id, _nodes("bench-graph", names), edges, namespace="bench")
    return perf_counter() - started


def _ids(engine: Engine, count: int) -> tuple[FlowId, list[str]]:
    flow_id = FlowId(str(uuid4()))
    return flow_id, [mint_for_flow(flow_id, engine.partitions, engine.minter) for _ in range(count)]


def _nodes(lane: str, names: Sequence[str]) -> list[CreateExecution]:
    return [noop(name, lane, b"{}") for name in names]


class _CompletionWaiter:
    """Waits for completions by the worker of this process."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._known: set[str] = set()

    def on_completed(self, execution_id: str) -> None:
        waiter = self._waiting.pop(execution_id, None)
        if waiter is None:
            self._known.add(execution_id)
        elif not waiter.done():
            waiter.set_result(None)

    async def __call__(self, execution_id: str) -> None:
        if execution_id in self._known:
            return
        waiter = self._waiting[execution_id] = asyncio.get_running_loop().create_future()
        await asyncio.wait_for(waiter, TIMEOUT_MS / 1000)


@asynccontextmanager
async def _worker(engine: Engine, lane: str, *, slots: int) -> AsyncIterator[_CompletionWaiter]:
    """Run a worker like that of `flowfabric.sdk`, whose handlers do nothing, until the block is left.

    It claims for its slots, and claims again while completions are in flight. One worker serves many samples, since
    cancelling a claim in flight costs the store a connection.
    """
    completions, claimed_count = _CompletionWaiter(), 0

    def on_reported(attempts: list[Claimed]) -> None:
        for claimed in attempts:
            completions.on_completed(claimed.execution_id)

    reporter = OutcomeReporter(engine, on_reported)
    poller = engine.pulling([lane], worker_id=WORKER, worker_instance_id=WORKER, lease_ttl_ms=LEASE_MS)

    async def work() -> None:
        nonlocal claimed_count
        while True:
            for claimed in await poller.claim(slots, max_wait_ms=TIMEOUT_MS):
                claimed_count += 1
                reporter.add(claimed, Succeeded(RESULT))

    working = asyncio.create_task(work())
    try:
        yield completions
    finally:
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        poller.close()
        await reporter.flush()
        await engine.dispatcher.wait_idle()
        if reporter.succeeded < claimed_count:
            raise AssertionError(f"{claimed_count - reporter.succeeded} of {claimed_count} ends were refused")
