"""`ff bench flow`: chains, fan-out with a join, the cancel of a quorum's rest, through the engine of one process."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from operator import truediv
from statistics import median, quantiles
from time import perf_counter
from uuid import uuid4

import msgspec

from flowfabric import CreateExecution, Engine, __version__
from flowfabric.bench.scratch_store import Control, scratch_store
from flowfabric.bench.throughput import ProgressCallback, StepCounter
from flowfabric.bench.workload import LEASE_MS, RESULT, WORKER
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


class FlowReport(msgspec.Struct, frozen=True):
    """What was measured; rates are medians over the rounds."""

    store: str
    durability: str
    versions: dict[str, str]
    cores: int
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
    tell = StepCounter(progress, 2 * rounds + 4)
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(scratch_store(url))
        engine = await stack.enter_async_context(await open_engine(place.url))
        await _chains(engine, "bench-warm", IN_FLIGHT * 4, steps)
        rates, bare = [], []
        for number in range(rounds):
            tell(f"round {number + 1}: {chains} chains of {steps}")
            gc.collect()
            rates.append(await _chains(engine, f"bench-chains-{number}", chains, steps))
            tell(f"round {number + 1}: bare chains")
            if place.control is not None:
                bare.append(await _bare_chains(place.control, chains, steps))
        tell(f"fan-out of {fan} and join")
        async with _worker(engine, "bench-fan", slots=fan) as ended:
            fans = [await _fan(engine, "bench-fan", fan, ended) for _ in range(samples + 2)]
        tell(f"cancel of {siblings - 1} siblings")
        cancels = [await _quorum(engine, f"bench-quorum-{number}", siblings) for number in range(samples + 2)]
        tell(f"cancel of {siblings - 1} bare rows")
        bare_cancels = [] if place.control is None else [await place.control.cancel(siblings - 1) for _ in cancels]
        tell(f"one graph of {graph} nodes")
        created_s = await _graph(engine, graph)
        tell.finish()
    return FlowReport(
        store=place.url.partition("://")[0],
        durability=place.durability,
        versions={"flowfabric": __version__, "python": platform.python_version(), **place.versions},
        cores=os.cpu_count() or 1,
        rounds=rounds,
        steps=steps,
        in_flight=IN_FLIGHT,
        chains_per_s=round(median(rates), 1),
        control_chains_per_s=round(median(bare), 1) if bare else None,
        chains_ratio=round(median(map(truediv, rates, bare)), 3) if bare else None,
        fan=fan,
        fan_out_and_join=_spread(fans[2:]),
        siblings=siblings,
        quorum_cancel=_spread(cancels[2:]),
        control_cancel=_spread(bare_cancels[2:]) if bare_cancels else None,
        graph_nodes=graph,
        graph_create_s=round(created_s, 2),
    )


def _spread(times: Sequence[float]) -> LatencyPercentiles:
    percentiles = quantiles(times, n=100, method="inclusive")
    return LatencyPercentiles(round(percentiles[49] * 1000, 1), round(percentiles[98] * 1000, 1), len(times))


async def _chains(engine: Engine, lane: str, chains: int, steps: int) -> float:
    """Chains that are created and worked off, so many of them at any time; how many a second."""
    left = iter(range(chains))

    async def one_after_another() -> None:
        for _ in left:
            flow_id, names = _names(engine, steps)
            edges = [GraphEdge(*pair) for pair in pairwise(names)]
            await engine.create_flow_graph(flow_id, _nodes(lane, names), edges, namespace="bench")
            await ended(names[-1])

    async with _worker(engine, lane, slots=IN_FLIGHT) as ended:
        began = perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))
        return chains / (perf_counter() - began)


async def _bare_chains(control: Control, chains: int, steps: int) -> float:
    began = perf_counter()
    ended = await control.chains(chains, steps, IN_FLIGHT)
    took = perf_counter() - began
    if ended != chains * steps:
        raise AssertionError(f"{chains * steps} bare steps were created and {ended} ended")
    return chains / took


async def _fan(engine: Engine, lane: str, fan: int, ended: _Ends) -> float:
    """One execution, many after it, one after all of these; seconds from the create to the last end."""
    flow_id, names = _names(engine, fan + 2)
    first, *middle, last = names
    edges = [GraphEdge(first, name) for name in middle] + [GraphEdge(name, last) for name in middle]
    began = perf_counter()
    await engine.create_flow_graph(flow_id, _nodes(lane, names), edges, namespace="bench")
    await ended(last)
    took = perf_counter() - began
    await engine.wait_for_dispatch()
    return took


async def _quorum(engine: Engine, lane: str, siblings: int) -> float:
    """Many before one that needs the first of them; seconds from the first end to the last cancel."""
    flow_id, names = _names(engine, siblings + 1)
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
        began = perf_counter()
        await engine.complete(winner.handle, result=RESULT)
        await asyncio.wait_for(cancelled.wait(), TIMEOUT_MS / 1000)
        took = perf_counter() - began
    finally:
        engine.runtime.write_listeners[Execution].remove(count)
    await engine.wait_for_dispatch()
    return took


async def _graph(engine: Engine, size: int) -> float:
    """A layered graph in which most nodes wait for two others; seconds until it is created."""
    flow_id, names = _names(engine, size)
    width = 100
    edges = [
        GraphEdge(names[place - width + step], names[place])
        for place in range(width, size)
        for step in ((0, 1) if (place + 1) % width else (0,))
    ]
    began = perf_counter()
    await engine.create_flow_graph(flow_id, _nodes("bench-graph", names), edges, namespace="bench")
    return perf_counter() - began


def _names(engine: Engine, count: int) -> tuple[FlowId, list[str]]:
    flow_id = FlowId(str(uuid4()))
    return flow_id, [mint_for_flow(flow_id, engine.partitions, engine.minter) for _ in range(count)]


def _nodes(lane: str, names: Sequence[str]) -> list[CreateExecution]:
    return [
        CreateExecution(
            execution_id=name, partition=0, namespace="bench", lane_id=lane, execution_kind="noop", input_payload=b"{}"
        )
        for name in names
    ]


class _Ends:
    """Waits for ends that the worker of this process brings about."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._known: set[str] = set()

    def told(self, execution_id: str) -> None:
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
async def _worker(engine: Engine, lane: str, *, slots: int) -> AsyncIterator[_Ends]:
    """A worker as there is one in `flowfabric.sdk`, whose handlers do nothing, until the block is left.

    It claims what it has slots for, and while ends are on their way it claims again. It is one for many samples: to
    cancel a claim that is on its way costs the store a connection.
    """
    ends, begun = _Ends(), 0

    def told(over: list[Claimed]) -> None:
        for one in over:
            ends.told(one.execution_id)

    telling = OutcomeReporter(engine, told)
    pull = engine.pulling([lane], worker_id=WORKER, worker_instance_id=WORKER, lease_ttl_ms=LEASE_MS)

    async def work() -> None:
        nonlocal begun
        while True:
            for one in await pull.claim(slots, max_wait_ms=TIMEOUT_MS):
                begun += 1
                telling.add(one, Succeeded(RESULT))

    working = asyncio.create_task(work())
    try:
        yield ends
    finally:
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        pull.close()
        await telling.flush()
        await engine.wait_for_dispatch()
        if telling.succeeded < begun:
            raise AssertionError(f"{begun - telling.succeeded} of {begun} ends were refused")
