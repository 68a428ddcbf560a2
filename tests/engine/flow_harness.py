"""A harness for flow tests: one flow, a worker that acts on request, and a store whose calls can be held."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.ids import FlowId, SeededMinter, mint_for_flow
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.flow import CompletionDispatch, Dependency, EdgeGroup
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read, Scan
from flowfabric.testing.flaky_store import FlakyStore
from tests.executions import create_request

LANE = "default"
FIRST_OF_ALL = {"kind": "quorum", "k": 1, "on_satisfied": "cancel_remaining"}


class FlowHarness:
    """A flow, a worker that acts on request, and two processes: `engine` lives, `mortal` may die."""

    def __init__(self, store: Store) -> None:
        self.store = FlakyStore(store)
        self.engine = Engine(self.store, minter=SeededMinter(1))
        self.mortal = Engine(self.store, minter=SeededMinter(2), settings=Settings(dispatch=False))
        self.flow = FlowId(str(UUID(int=7)))
        self.names: dict[str, str] = {}

    async def graph(self, nodes: list[str], edges: list[tuple[str, str]], **given: Any) -> None:
        self.names = {name: mint_for_flow(self.flow, self.engine.partitions, self.engine.minter) for name in nodes}
        asks = [create_request(execution, LANE) for execution in self.names.values()]
        policies = {self.names[name]: policy for name, policy in given.pop("policies", {}).items()}
        pairs = [GraphEdge(self.names[one], self.names[other], **given) for one, other in edges]
        await self.engine.create_flow_graph(self.flow, asks, pairs, policies=policies)

    async def claim(self, count: int = 1000, by: Engine | None = None) -> list[Claimed]:
        return await (by or self.engine).claim_many(
            LANE, count, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=60_000
        )

    async def work(self, by: Engine | None = None, *, failing: str = "") -> list[str]:
        """Claim and finish everything that is claimable now; return the names."""
        claimed = await self.claim(by=by)
        known = {execution: name for name, execution in self.names.items()}
        done = []
        for one in claimed:
            name = known[one.execution_id]
            done.append(name)
            if name in failing:
                await (by or self.engine).fail(one.handle, reason="broken")
            else:
                await (by or self.engine).complete(one.handle, result=name.encode())
        return sorted(done)

    async def states(self, *names: str) -> str:
        wanted = names or tuple(self.names)
        return " ".join([str(await self.engine.read_execution_state(self.names[name])) for name in wanted])

    async def group(self, name: str) -> EdgeGroup:
        found = (await self.engine.runtime.load((Read(EdgeGroup, (self.flow, self.names[name])),))).rows[0]
        group: EdgeGroup = found[0]
        return group

    async def unprocessed(self) -> int:
        """Count the outcomes that are not folded yet and the dispatches that are pending."""
        unfolded = await self.store.scan(Scan(Dependency, limit=100_000))
        dispatches = await self.store.scan(Scan(CompletionDispatch, limit=100))
        return sum(one.unfolded_at is not None for one in unfolded) + len(dispatches)

    async def sweep(self, *names: str) -> None:
        for name in names:
            while (await self.engine.sweep_once(name)).processed:
                pass
