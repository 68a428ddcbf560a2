"""Random graphs, random ends, random deaths: every join fires once and as its policy says, and nobody is stranded.

What has to come out is told a second time, naively: from the graph and the ends that were planned.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import msgspec
import pytest

from flowfabric import CreateExecution, errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.ids import FlowId, SeededMinter, mint_for_flow
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.event import Topic
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.testing.faults import FlakyStore
from flowfabric.testing.flow_invariants import check_flow_invariants
from flowfabric.testing.invariants import check_invariants

KINDS = ("success_only", "success_only", "success_only", "failure_only", "any_outcome")
SEEDS = {"memory": 60, "sqlite": 8, "postgres": 8}


class Plan(msgspec.Struct):
    """A graph, how each node ends if it gets to run, and how each joins."""

    nodes: list[str]
    edges: list[tuple[str, str, str]]
    ends: dict[str, bool]
    policies: dict[str, dict[str, Any]]


def plan(chance: random.Random, flow: FlowId, engine: Engine, *, cancelling: bool) -> Plan:
    nodes: list[str] = [mint_for_flow(flow, engine.partitions, engine.minter) for _ in range(chance.randint(2, 14))]
    edges = [
        (one, other, chance.choice(KINDS))
        for place, other in enumerate(nodes)
        for one in nodes[:place]
        if chance.random() < 2.2 / len(nodes)
    ]
    policies: dict[str, dict[str, Any]] = {}
    for node in nodes:
        inbound = sum(other == node for _, other, _ in edges)
        if inbound and chance.random() < 0.5:
            then = "cancel_remaining" if cancelling and chance.random() < 0.5 else "let_run"
            kind = chance.choice(("any_of", "quorum"))
            policies[node] = {"kind": kind, "on_satisfied": then}
            if kind == "quorum":
                policies[node]["k"] = chance.randint(1, inbound + (chance.random() < 0.1))
    return Plan(nodes, edges, {node: chance.random() < 0.75 for node in nodes}, policies)


def expected(plan: Plan) -> dict[str, str]:
    """How every node ends, when nothing is cancelled: nodes come after those they wait for."""
    ended: dict[str, str] = {}
    for node in plan.nodes:
        inbound = [(ended[one], kind) for one, other, kind in plan.edges if other == node]
        met = sum(kind == "any_outcome" or (end == "completed") == (kind == "success_only") for end, kind in inbound)
        policy = plan.policies.get(node, {"kind": "all_of"})
        needed = {"all_of": len(inbound), "any_of": 1}.get(policy["kind"], policy.get("k", 0))
        runs = not inbound or (met >= needed and needed <= len(inbound))
        ended[node] = ("completed" if plan.ends[node] else "failed") if runs else "skipped"
    return ended


class World:
    """Processes that share a store behind a bad wire, and die."""

    def __init__(self, store: Store, seed: int) -> None:
        self.chance = random.Random(seed)
        self.store = FlakyStore(store, rng=random.Random(seed), rate=0.03)
        self.calm = Engine(store, minter=SeededMinter(seed), settings=Settings(dispatch=False))
        self.flow = FlowId(str(UUID(int=seed + 1, version=4)))
        self.processes: list[Engine] = []
        self.started: list[str] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        for number in range(2):
            self.processes.append(self.process(number))

    def process(self, number: int) -> Engine:
        """A new process; one in three does not follow up its own ends, as if it died each time."""
        alive = self.chance.random() < 0.67
        return Engine(
            self.store, minter=SeededMinter(self.chance.getrandbits(60) + number), settings=Settings(dispatch=alive)
        )

    async def kill(self, place: int) -> None:
        """A process dies in the middle of whatever it carries on with."""
        for task in [*self.processes[place].dispatcher._tasks]:
            task.cancel()
        await asyncio.gather(*self.processes[place].dispatcher._tasks, return_exceptions=True)
        self.processes[place] = self.process(place)

    async def run(self, plan: Plan) -> None:
        nodes = [
            CreateExecution(
                execution_id=node, partition=0, namespace="default", lane_id="default", execution_kind="task"
            )
            for node in plan.nodes
        ]
        edges = [GraphEdge(one, other, kind) for one, other, kind in plan.edges]
        await self.calm.create_flow_graph(self.flow, nodes, edges, policies=plan.policies)
        idle = 0
        while idle < 3:
            held = await self.surely(self.claims(self.chance.choice(self.processes)))
            for one in held:
                await self.check_start(one, plan)
                ending = asyncio.create_task(self.end(self.chance.choice(self.processes), one, plan))
                self.tasks.add(ending)
                ending.add_done_callback(self.tasks.discard)
                if self.chance.random() < 0.5:
                    await ending
            if self.chance.random() < 0.2:
                await self.kill(self.chance.randrange(2))
            if not held:
                await self.settle()
                idle += 1
            else:
                idle = 0

    def claims(self, worker: Engine) -> Callable[[], Awaitable[list[Claimed]]]:
        some = self.chance.randint(1, 3)
        return lambda: worker.claim_many("default", some, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=10**9)

    async def settle(self) -> None:
        """Whatever is under way comes to its end, and the sweeps find what is left."""
        if self.tasks:
            await asyncio.gather(*self.tasks)
        for process in self.processes:
            await process.dispatcher.wait_idle()
        for sweep in ("completion_dispatch", "edge_cancel_dispatcher", "edge_cancel_reconciler"):
            await self.calm.sweep_once(sweep)

    async def end(self, process: Engine, held: Claimed, plan: Plan) -> None:
        if self.chance.random() < 0.5:
            await asyncio.sleep(0)
        if plan.ends[held.execution_id]:
            await self.surely(lambda: process.complete(held.handle, result=b"r"))
        else:
            await self.surely(lambda: process.fail(held.handle, reason="planned", category="permanent"))

    async def surely(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Ask until the wire holds; who was cancelled meanwhile is left alone."""
        while True:
            try:
                return await call()
            except errors.StoreUnavailable:
                continue
            except errors.ExecutionNotActive:
                return None

    async def check_start(self, held: Claimed, plan: Plan) -> None:
        """Nobody starts early, and nobody twice."""
        assert held.execution_id not in self.started
        self.started.append(held.execution_id)
        inbound = [(one, kind) for one, other, kind in plan.edges if other == held.execution_id]
        met = 0
        for one, kind in inbound:
            state = await self.calm.read_execution_state(one)
            over = state in ("completed", "failed", "skipped", "cancelled", "expired")
            met += over and (kind == "any_outcome" or (state == "completed") == (kind == "success_only"))
        policy = plan.policies.get(held.execution_id, {"kind": "all_of"})
        needed = {"all_of": len(inbound), "any_of": min(1, len(inbound))}.get(policy["kind"], policy.get("k", 0))
        assert met >= needed, f"{held.execution_id} started with {met} of {needed}"


@pytest.mark.parametrize("cancelling", [False, True])
async def test_every_join_fires_once_and_nobody_is_stranded(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, cancelling: bool
) -> None:
    for seed in range(SEEDS[store.tag.title.lower()]):
        monkeypatch.setattr("flowfabric.engine.flows.bulk_cancel.MIN_UNSEEN_CANCELS", 1 if seed % 2 else 50)
        world = World(store, seed * 2 + cancelling)
        wanted = plan(world.chance, world.flow, world.calm, cancelling=cancelling)

        await world.run(wanted)

        states = {node: str(await world.calm.read_execution_state(node)) for node in wanted.nodes}
        if not cancelling:
            assert states == expected(wanted), f"seed {seed}"
        open_states = set(states.values()) - {"completed", "failed", "skipped", "cancelled"}
        assert not open_states, f"seed {seed}: stranded"
        for node in wanted.nodes:
            told = await world.store.history(node, Topic.COMPLETION, 10)
            assert len(told) == 1, f"seed {seed}: {node} ended {len(told)} times"
        await check_flow_invariants(world.calm)
        await check_invariants(world.calm)
