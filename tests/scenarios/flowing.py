"""Words for scenarios of flows: members with short names, edges staged and applied, ends, and what became of everybody.

Dispatch and sweeps are stopped; a scenario runs what it wants to see.
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
from flowfabric.model.flow import CancelBacklog, Dependency, EdgeGroup, PendingMemberCancel, PendingSiblingCancel
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.suspension.arguments import FreshWaitpoint, SuspendArgs
from flowfabric.stores.queries import Read
from tests.scenarios.waits import ANY

ALL_OF = {"kind": "all_of"}
ONE_LIFE = {"retry_policy": {"max_retries": 0}}
WAITS = "runnable/unowned/blocked_by_dependencies/waiting_for_children/none/pending_first_attempt/waiting_children"
WAITING = "runnable/unowned/eligible_now/waiting_for_worker/none/pending_first_attempt/waiting"


def any_of(then: str) -> dict[str, Any]:
    return {"kind": "any_of", "on_satisfied": then}


def quorum(k: int, then: str) -> dict[str, Any]:
    return {"kind": "quorum", "k": k, "on_satisfied": then}


class Flowing:
    """One flow under a scenario."""

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

    async def begin(self, members: str | Iterable[str] = "", **given: Any) -> Flowing:
        """The flow, with these members."""
        whose = given.get("namespace", "default")
        assert await self.engine.create_flow(self.id, namespace=whose) == flow_answers.FlowCreated(self.id)
        for name in members:
            await self.add(name, **given)
        return self

    async def mixed(self, namespaces: dict[str, str], *pairs: str) -> None:
        """The flow with new members of several namespaces, and these edges; it is created whole."""
        for name in namespaces:
            self.names.setdefault(name, self.new_id())
        nodes = [
            CreateExecution(
                execution_id=self.names[name],
                partition=0,
                namespace=namespace,
                lane_id="default",
                execution_kind="task",
                policy='{"retry_policy": {"max_retries": 0}}',
            )
            for name, namespace in namespaces.items()
        ]
        edges = [GraphEdge(self.names[pair[0]], self.names[pair[1]]) for pair in pairs]
        assert isinstance(await self.engine.create_flow_graph(self.id, nodes, edges), flow_answers.GraphCreated)

    def new_id(self) -> str:
        """A fresh execution id on the flow's partition."""
        return mint_for_flow(self.id, self.engine.partitions, self.engine.minter)

    async def create(self, name: str, **given: Any) -> str:
        """An execution that could be a member."""
        self.names[name] = self.new_id()
        await self.engine.create_execution(execution_id=self.names[name], policy=given.pop("policy", ONE_LIFE), **given)
        return self.names[name]

    async def add(self, name: str, **given: Any) -> str:
        """A new member."""
        added = await self.engine.add_execution_to_flow(self.id, await self.create(name, **given))
        assert isinstance(added, flow_answers.Added)
        return self.names[name]

    async def stage(self, upstream: str, downstream: str, **given: Any) -> str:
        """A staged edge; its id."""
        edge_id = self.engine.minter.uuid()
        await self.engine.stage_dependency_edge(self.id, edge_id, self.names[upstream], self.names[downstream], **given)
        self.edges[upstream, downstream] = edge_id
        return edge_id

    async def apply(self, upstream: str, downstream: str, edge_id: str | None = None) -> int:
        """The edge applied to its child; how many dependencies the child waits for now."""
        edge = edge_id or self.edges[upstream, downstream]
        answer = await self.engine.apply_dependency_to_child(
            self.id, edge, self.names[downstream], self.names[upstream]
        )
        assert isinstance(answer, flow_answers.DependencyApplied)
        return answer.unsatisfied_count

    async def edge(self, upstream: str, downstream: str, **given: Any) -> str:
        """An edge staged and applied."""
        edge_id = await self.stage(upstream, downstream, **given)
        await self.apply(upstream, downstream)
        return edge_id

    async def chain(self, names: str) -> None:
        """Edges from each to the next."""
        for upstream, downstream in pairwise(names):
            await self.edge(upstream, downstream)

    async def join(self, upstreams: str | Iterable[str], downstream: str, policy: Any = None, **given: Any) -> None:
        """Edges from many into one, under a policy."""
        if policy is not None:
            await self.policy(downstream, policy)
        for upstream in upstreams:
            await self.edge(upstream, downstream, **given)

    async def policy(self, downstream: str, policy: Any) -> flow_answers.SetJoinPolicyResult:
        return await self.engine.set_edge_group_policy(self.id, self.names[downstream], policy)

    # -- living -----------------------------------------------------------------------------------------------------

    async def run(self, name: str) -> Claimed:
        """A worker claims this member, freshly or going on with its attempt."""
        execution = self.names[name]
        await self.engine.issue_claim_grant(
            execution, lane_id="default", worker_id="w", worker_instance_id="w-1", grant_ttl_ms=5000
        )
        resumed = (await self.row(name)).attempt_state == "attempt_interrupted"
        claim = self.engine.claim_resumed_execution if resumed else self.engine.claim_execution
        return await claim(execution, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=30_000)

    async def suspend(self, name: str) -> None:
        """A worker claims this member and puts it away until a signal comes."""
        minter = self.engine.minter
        args = SuspendArgs(
            suspension_id=minter.uuid(),
            waitpoints=(FreshWaitpoint(minter.uuid(), "k"),),
            resume_condition=ANY,
            reason_code="waiting_for_signal",
            now=self.clock.now,
        )
        assert isinstance(await self.engine.suspend((await self.run(name)).handle, args), Suspended)

    async def succeed(self, *names: str, result: bytes | None = None) -> None:
        for name in names:
            await self.engine.complete((await self.run(name)).handle, result=result)

    async def fail(self, *names: str) -> None:
        for name in names:
            await self.engine.fail((await self.run(name)).handle, reason="broken")

    async def cancel(self, *names: str) -> None:
        for name in names:
            await self.engine.cancel_execution(self.names[name], reason="no more")

    async def cascade(self, *names: str) -> list[flow_answers.CascadeOutcome]:
        """The ends of these, delivered."""
        return [await self.engine.cascade_completion(self.names[name]) for name in names]

    async def resolve(self, upstream: str, downstream: str, outcome: str) -> flow_answers.Resolution:
        edge = self.edges[upstream, downstream]
        return await self.engine.resolve_dependency(self.id, edge, self.names[downstream], outcome)

    async def sweep(self, name: str, times: int = 1) -> list[int]:
        """So many passes; what each processed."""
        return [(await self.engine.sweep_once(name)).processed for _ in range(times)]

    async def write(self, *writes: Write, guards: tuple[Guard, ...] = ()) -> None:
        """Rows as an accident might leave them."""
        [written] = await self.engine.store.commit([Change(guards=guards, writes=writes, id=1)])
        assert written is not None

    # -- looking ----------------------------------------------------------------------------------------------------

    async def one(self, row: type[Any], *key: Any) -> Any:
        found = (await self.engine.runtime.load((Read(row, key),))).rows[0]
        return found[0] if found else None

    async def row(self, name: str) -> Execution:
        found: Execution = await self.one(Execution, self.names[name])
        return found

    async def state(self, *names: str) -> str:
        """The public states, in order."""
        return " ".join([str(await self.engine.read_execution_state(self.names[name])) for name in names])

    async def vector(self, name: str) -> str:
        row = await self.row(name)
        parts = (row.lifecycle_phase, row.ownership_state, row.eligibility_state, row.blocking_reason)
        return "/".join([*parts, row.terminal_outcome, row.attempt_state, row.public_state])

    async def group(self, name: str) -> EdgeGroup:
        found: EdgeGroup = await self.one(EdgeGroup, self.id, self.names[name])
        return found

    async def counts(self, name: str) -> str:
        """The group in short: succeeded/failed/skipped of n, and its state."""
        group = await self.group(name)
        return f"{group.succeeded}/{group.failed}/{group.skipped} of {group.n} {group.group_state}"

    async def dependency(self, upstream: str, downstream: str) -> Dependency:
        found: Dependency = await self.one(Dependency, self.names[downstream], self.edges[upstream, downstream])
        return found

    async def entry(self, name: str) -> PendingSiblingCancel | None:
        """The group's place in the index of groups with siblings to cancel."""
        found: PendingSiblingCancel | None = await self.one(PendingSiblingCancel, *self.child(name))
        return found

    def child(self, name: str) -> Downstream:
        return Downstream(self.id, self.names[name])

    async def backlog(self) -> tuple[CancelBacklog | None, list[str]]:
        """The flow's backlog entry, and the names of those who stand in it."""
        pending = (await self.engine.runtime.load((Read(PendingMemberCancel, (self.id,)),))).rows[0]
        known = {execution: name for name, execution in self.names.items()}
        names = sorted(known.get(one.execution_id, one.execution_id) for one in pending)
        return await self.one(CancelBacklog, self.id), names

    async def payload(self, name: str) -> bytes:
        return (await self.engine.read_execution_context(self.names[name])).input_payload

    def ids(self, names: str | Iterable[str]) -> list[str]:
        """The members' ids, ascending."""
        return sorted(self.names[name] for name in names)
