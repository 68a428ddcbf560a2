"""A flow under test: members with short names, their edges and outcomes.

Dispatch and sweeps are stopped; a scenario runs them itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.flows.join_resolver import Downstream
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.engine.operations.suspensions import Suspended
from flowfabric.ids import FlowId, flow_partition, mint_for_flow
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.change import Change, Guard, Write
from flowfabric.model.execution import Execution
from flowfabric.model.flow import (
    CancelBacklog,
    Dependency,
    EdgeGroup,
    FlowSummary,
    PendingMemberCancel,
    PendingSiblingCancel,
)
from flowfabric.rules.flow.views import FlowSnapshot
from flowfabric.stores.queries import Read
from tests.executions import create_request, suspend_args
from tests.scenarios.waits import ANY

ALL_OF = {"kind": "all_of"}
ONE_LIFE = {"retry_policy": {"max_retries": 0}}
WAITS = "runnable/unowned/blocked_by_dependencies/waiting_for_children/none/pending_first_attempt/waiting_children"
WAITING = "runnable/unowned/eligible_now/waiting_for_worker/none/pending_first_attempt/waiting"


def any_of(then: str) -> dict[str, Any]:
    return {"kind": "any_of", "on_satisfied": then}


def quorum(k: int, then: str) -> dict[str, Any]:
    return {"kind": "quorum", "k": k, "on_satisfied": then}


class FlowEnv:
    """One flow and the ids of its members by short name."""

    def __init__(self, engine: Engine, clock: ManualClock) -> None:
        self.engine = engine
        self.clock = clock
        self.id = FlowId(engine.minter.uuid())
        self.names: dict[str, str] = {}
        self.edges: dict[tuple[str, str], str] = {}

    # -- building ---------------------------------------------------------------------------------------------------

    @property
    def partition(self) -> int:
        return flow_partition(self.id, self.engine.partitions)

    async def begin(self, members: str | Iterable[str] = "", edges: Iterable[str] = (), **options: Any) -> FlowEnv:
        """Create the flow with these members and edges; an edge is a pair of one-letter names."""
        namespace = options.get("namespace", "default")
        assert await self.engine.create_flow(self.id, namespace=namespace) == flow_answers.FlowCreated(self.id)
        for name in members:
            await self.add(name, **options)
        for pair in edges:
            await self.edge(pair[0], pair[1])
        return self

    async def create_mixed(self, namespaces: dict[str, str], *pairs: str) -> None:
        """Create the flow as one graph with members of several namespaces and these edges."""
        for name in namespaces:
            self.names.setdefault(name, self.new_id())
        nodes = [
            create_request(self.names[name], namespace=namespace, policy='{"retry_policy": {"max_retries": 0}}')
            for name, namespace in namespaces.items()
        ]
        edges = [GraphEdge(self.names[pair[0]], self.names[pair[1]]) for pair in pairs]
        assert isinstance(await self.engine.create_flow_graph(self.id, nodes, edges), flow_answers.GraphCreated)

    def new_id(self) -> str:
        """Return a new execution id on the partition of the flow."""
        return mint_for_flow(self.id, self.engine.partitions, self.engine.minter)

    async def create(self, name: str, **options: Any) -> str:
        """Create an execution on the partition of the flow that is not a member."""
        self.names[name] = self.new_id()
        await self.engine.create_execution(
            execution_id=self.names[name], policy=options.pop("policy", ONE_LIFE), **options
        )
        return self.names[name]

    async def add(self, name: str, **options: Any) -> str:
        """Create an execution and add it to the flow."""
        added = await self.engine.add_execution_to_flow(self.id, await self.create(name, **options))
        assert isinstance(added, flow_answers.Added)
        return self.names[name]

    async def stage(self, upstream: str, downstream: str, **options: Any) -> str:
        """Stage an edge and return its id."""
        edge_id = self.engine.minter.uuid()
        await self.engine.stage_dependency_edge(
            self.id, edge_id, self.names[upstream], self.names[downstream], **options
        )
        self.edges[upstream, downstream] = edge_id
        return edge_id

    async def apply(self, upstream: str, downstream: str, edge_id: str | None = None) -> int:
        """Apply an edge to its child and return how many dependencies the child waits for."""
        edge = edge_id or self.edges[upstream, downstream]
        answer = await self.engine.apply_dependency_to_child(
            self.id, edge, self.names[downstream], self.names[upstream]
        )
        assert isinstance(answer, flow_answers.DependencyApplied)
        return answer.unsatisfied_count

    async def edge(self, upstream: str, downstream: str, **options: Any) -> str:
        """Stage and apply an edge."""
        edge_id = await self.stage(upstream, downstream, **options)
        await self.apply(upstream, downstream)
        return edge_id

    async def chain(self, names: str) -> None:
        """Add an edge from each member to the next."""
        for upstream, downstream in pairwise(names):
            await self.edge(upstream, downstream)

    async def join(self, upstreams: str | Iterable[str], downstream: str, policy: Any = None, **options: Any) -> None:
        """Add edges from several members into one, under a join policy."""
        if policy is not None:
            await self.set_policy(downstream, policy)
        for upstream in upstreams:
            await self.edge(upstream, downstream, **options)

    async def begin_join(self, upstreams: str, downstream: str, policy: Any = None, **options: Any) -> None:
        """Create the flow with these members and join the upstreams into the downstream."""
        await self.begin(downstream + upstreams, **options)
        await self.join(upstreams, downstream, policy)

    async def set_policy(self, downstream: str, policy: Any) -> flow_answers.SetJoinPolicyResult:
        return await self.engine.set_edge_group_policy(self.id, self.names[downstream], policy)

    # -- outcomes ---------------------------------------------------------------------------------------------------

    async def claim(self, name: str) -> Claimed:
        """Claim a member; an interrupted attempt continues."""
        execution = self.names[name]
        await self.engine.issue_claim_grant(
            execution, lane_id="default", worker_id="w", worker_instance_id="w-1", grant_ttl_ms=5000
        )
        resumed = (await self.row(name)).attempt_state == "attempt_interrupted"
        claim = self.engine.claim_resumed_execution if resumed else self.engine.claim_execution
        return await claim(execution, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=30_000)

    async def suspend(self, name: str) -> None:
        """Claim a member and suspend it until a signal arrives."""
        claim, args = await self.claim(name), suspend_args(self.clock.now, ANY)
        assert isinstance(await self.engine.suspend(claim.handle, args), Suspended)

    async def succeed(self, *names: str, result: bytes | None = None) -> None:
        for name in names:
            await self.engine.complete((await self.claim(name)).handle, result=result)

    async def fail(self, *names: str) -> None:
        for name in names:
            await self.engine.fail((await self.claim(name)).handle, reason="broken")

    async def succeed_and_cascade(self, *names: str, result: bytes | None = None) -> None:
        await self.succeed(*names, result=result)
        await self.cascade(*names)

    async def fail_and_cascade(self, *names: str) -> None:
        await self.fail(*names)
        await self.cascade(*names)

    async def cancel(self, *names: str) -> None:
        for name in names:
            await self.engine.cancel_execution(self.names[name], reason="no more")

    async def cascade(self, *names: str) -> list[flow_answers.CascadeOutcome]:
        """Deliver the completions of these members."""
        return [await self.engine.cascade_completion(self.names[name]) for name in names]

    async def resolve(self, upstream: str, downstream: str, outcome: str) -> flow_answers.Resolution:
        edge = self.edges[upstream, downstream]
        return await self.engine.resolve_dependency(self.id, edge, self.names[downstream], outcome)

    async def sweep(self, name: str, times: int = 1, *, after_ms: int = 0) -> list[int]:
        """Advance the clock and run a sweep several times; return how many rows each run processed."""
        self.clock.advance_ms(after_ms)
        return [(await self.engine.sweep_once(name)).processed for _ in range(times)]

    async def write(self, *writes: Write, guards: tuple[Guard, ...] = ()) -> None:
        """Write rows directly, as a crash or corruption might leave them."""
        [written] = await self.engine.store.commit([Change(guards=guards, writes=writes, id=1)])
        assert written is not None

    # -- reads ------------------------------------------------------------------------------------------------------

    async def load(self, row: type[Any], *key: Any) -> Any:
        found = (await self.engine.runtime.load((Read(row, key),))).rows[0]
        return found[0] if found else None

    async def row(self, name: str) -> Execution:
        found: Execution = await self.load(Execution, self.names[name])
        return found

    async def state(self, *names: str) -> str:
        """Return the public states of these members."""
        return " ".join([str(await self.engine.read_execution_state(self.names[name])) for name in names])

    async def vector(self, name: str) -> str:
        row = await self.row(name)
        parts = (row.lifecycle_phase, row.ownership_state, row.eligibility_state, row.blocking_reason)
        return "/".join([*parts, row.terminal_outcome, row.attempt_state, row.public_state])

    async def describe(self) -> FlowSnapshot:
        described = await self.engine.describe_flow(self.id)
        assert described is not None
        return described

    async def summary(self) -> FlowSummary:
        summary = await self.engine.get_flow_summary(self.id)
        assert summary is not None
        return summary

    async def group(self, name: str) -> EdgeGroup:
        found: EdgeGroup = await self.load(EdgeGroup, self.id, self.names[name])
        return found

    async def counts(self, name: str) -> str:
        """Return the edge group in short: succeeded/failed/skipped of n, and its state."""
        group = await self.group(name)
        return f"{group.succeeded}/{group.failed}/{group.skipped} of {group.n} {group.group_state}"

    async def dependency(self, upstream: str, downstream: str) -> Dependency:
        found: Dependency = await self.load(Dependency, self.names[downstream], self.edges[upstream, downstream])
        return found

    async def pending_sibling_cancel(self, name: str) -> PendingSiblingCancel | None:
        """Return the entry of a join in the index of pending sibling cancels."""
        found: PendingSiblingCancel | None = await self.load(PendingSiblingCancel, *self.downstream(name))
        return found

    def downstream(self, name: str) -> Downstream:
        return Downstream(self.id, self.names[name])

    async def backlog(self) -> tuple[CancelBacklog | None, list[str]]:
        """Return the cancel backlog of the flow and the names of its pending members."""
        pending = (await self.engine.runtime.load((Read(PendingMemberCancel, (self.id,)),))).rows[0]
        known = {execution: name for name, execution in self.names.items()}
        names = sorted(known.get(one.execution_id, one.execution_id) for one in pending)
        return await self.load(CancelBacklog, self.id), names

    async def payload(self, name: str) -> bytes:
        return (await self.engine.read_execution_context(self.names[name])).input_payload

    def ids(self, names: str | Iterable[str]) -> list[str]:
        """Return the ids of these members in ascending order."""
        return sorted(self.names[name] for name in names)
