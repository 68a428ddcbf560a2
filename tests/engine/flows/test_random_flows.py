"""Random graphs, outcomes and process deaths: every join fires once and by its policy, and no execution is stranded.

The expected outcome is computed a second time, naively, from the graph and the planned outcomes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import msgspec
import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.ids import FlowId, SeededMinter, mint_for_flow
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.event import Topic
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.testing.flaky_store import FlakyStore
from flowfabric.testing.flow_invariants import check_flow_invariants
from flowfabric.testing.invariants import check_invariants
from tests.executions import create_request

KINDS = ("success_only", "success_only", "success_only", "failure_only", "any_outcome")
SEEDS = {"memory": 60, "sqlite": 8, "postgres": 8, "valkey": 3}


class Plan(msgspec.Struct):
    """A graph with the planned outcome and the join policy of each node."""

    nodes: list[str]
    edges: list[tuple[str, str, str]]
    ends: dict[str, bool]
    policies: dict[str, dict[str, Any]]


def random_plan(chance: random.Random, flow: FlowId, engine: Engine, *, cancelling: bool) -> Plan:
    nodes: list[str] = [mint_for_flow(flow, engine.partitions, engine.minter) for _ in range(chance.randint(2, 14))]
    edges = [
        (one, other, chance.choice(KINDS))
        for index, other in enumerate(nodes)
        for one in nodes[:index]
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


def expected_outcomes(random_plan: Plan) -> dict[str, str]:
    """Return the outcome of every node if nothing is cancelled; nodes are listed after their upstreams."""
    ended: dict[str, str] = {}
    for node in random_plan.nodes:
        inbound = [(ended[one], kind) for one, other, kind in random_plan.edges if other == node]
        met = sum(kind == "any_outcome" or (end == "completed") == (kind == "success_only") for end, kind in inbound)
        policy = random_plan.policies.get(node, {"kind": "all_of"})
        needed = {"all_of": len(inbound), "any_of": 1}.get(policy["kind"], policy.get("k", 0))
        runs = not inbound or (met >= needed and needed <= len(inbound))
        ended[node] = ("completed" if random_plan.ends[node] else "failed") if runs else "skipped"
    return ended


class Cluster:
    """Processes that share a store behind an unreliable network and may die."""

    def __init__(self, store: Store, seed: int) -> None:
        self.chance = random.Random(seed)
        self.store = FlakyStore(store, rng=random.Random(seed), rate=0.03)
        self.calm = Engine(store, minter=SeededMinter(seed), settings=Settings(dispatch=False))
        self.flow = FlowId(str(UUID(int=seed + 1, version=4)))
        self.processes: list[Engine] = []
        self.started: list[str] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        for number in range(2):
            self.processes.append(self.start_process(number))

    def start_process(self, number: int) -> Engine:
        """Start a process; one in three does not dispatch its own outcomes, as if it died after each."""
        alive = self.chance.random() < 0.67
        return Engine(
            self.store, minter=SeededMinter(self.chance.getrandbits(60) + number), settings=Settings(dispatch=alive)
        )

    async def kill(self, index: int) -> None:
        """Kill a process in the middle of its background work."""
        for task in [*self.processes[index].dispatcher._tasks]:
            task.cancel()
        await asyncio.gather(*self.processes[index].dispatcher._tasks, return_exceptions=True)
        self.processes[index] = self.start_process(index)

    async def run(self, random_plan: Plan) -> None:
        nodes = [create_request(node) for node in random_plan.nodes]
        edges = [GraphEdge(one, other, kind) for one, other, kind in random_plan.edges]
        await self.calm.create_flow_graph(self.flow, nodes, edges, policies=random_plan.policies)
        idle = 0
        while idle < 3:
            held = await self.retry(self.claims(self.chance.choice(self.processes)))
            for one in held:
                await self.check_start(one, random_plan)
                ending = asyncio.create_task(self.finish(self.chance.choice(self.processes), one, random_plan))
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
        """Wait for everything in flight, then let the sweeps find the rest."""
        if self.tasks:
            await asyncio.gather(*self.tasks)
        for process in self.processes:
            await process.dispatcher.wait_idle()
        for sweep in ("completion_dispatch", "edge_cancel_dispatcher", "edge_cancel_reconciler"):
            await self.calm.sweep_once(sweep)

    async def finish(self, process: Engine, held: Claimed, random_plan: Plan) -> None:
        if self.chance.random() < 0.5:
            await asyncio.sleep(0)
        if random_plan.ends[held.execution_id]:
            await self.retry(lambda: process.complete(held.handle, result=b"r"))
        else:
            await self.retry(lambda: process.fail(held.handle, reason="planned", category="permanent"))

    async def retry(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Retry a call until the network delivers it; ignore executions that were cancelled meanwhile."""
        while True:
            try:
                return await call()
            except errors.StoreUnavailable:
                continue
            except errors.ExecutionNotActive:
                return None

    async def check_start(self, held: Claimed, random_plan: Plan) -> None:
        """Check that no execution starts early or twice."""
        assert held.execution_id not in self.started
        self.started.append(held.execution_id)
        inbound = [(one, kind) for one, other, kind in random_plan.edges if other == held.execution_id]
        met = 0
        for one, kind in inbound:
            state = await self.calm.read_execution_state(one)
            over = state in ("completed", "failed", "skipped", "cancelled", "expired")
            met += over and (kind == "any_outcome" or (state == "completed") == (kind == "success_only"))
        policy = random_plan.policies.get(held.execution_id, {"kind": "all_of"})
        needed = {"all_of": len(inbound), "any_of": min(1, len(inbound))}.get(policy["kind"], policy.get("k", 0))
        assert met >= needed, f"{held.execution_id} started with {met} of {needed}"


@pytest.mark.parametrize("cancelling", [False, True])
async def test_every_join_fires_once_and_no_execution_is_stranded(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, cancelling: bool
) -> None:
    for seed in range(SEEDS[store.tag.title.lower()]):
        monkeypatch.setattr("flowfabric.engine.flows.bulk_cancel.MIN_UNLOADED_CANCELS", 1 if seed % 2 else 50)
        cluster = Cluster(store, seed * 2 + cancelling)
        wanted = random_plan(cluster.chance, cluster.flow, cluster.calm, cancelling=cancelling)

        await cluster.run(wanted)

        states = {node: str(await cluster.calm.read_execution_state(node)) for node in wanted.nodes}
        if not cancelling:
            assert states == expected_outcomes(wanted), f"seed {seed}"
        open_states = set(states.values()) - {"completed", "failed", "skipped", "cancelled"}
        assert not open_states, f"seed {seed}: stranded"
        for node in wanted.nodes:
            completions = await cluster.store.history(node, Topic.COMPLETION, 10)
            assert len(completions) == 1, f"seed {seed}: {node} ended {len(completions)} times"
        await check_flow_invariants(cluster.calm)
        await check_invariants(cluster.calm)
