"""Flow operations: build a graph, resolve its edges, cancel its members."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.flows.bulk_cancel import BulkCanceller, load_readable
from flowfabric.engine.flows.completion_dispatcher import CompletionDispatcher, outgoing_edges
from flowfabric.engine.flows.join_resolver import CompletedEdge, Downstream, JoinResolver
from flowfabric.engine.operations.create import defaults_of
from flowfabric.engine.operations.flow_lists import FlowLists
from flowfabric.engine.operations.pages import FlowListPage
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.keyed_lock import KeyedLock
from flowfabric.engine.runtime.read_set import ReadSet, decide_row, load_each, load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.answers.execution import Moved
from flowfabric.model.execution import Execution
from flowfabric.model.flow import (
    CancellationPolicy,
    Dependency,
    DependencyKind,
    Edge,
    EdgeGroup,
    Flow,
    FlowMember,
    PendingSiblingCancel,
)
from flowfabric.model.states import TerminalOutcome
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.flow import build, dependencies, graph, joins
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow.build import StageEdge
from flowfabric.rules.flow.dependencies import ApplyDependency
from flowfabric.rules.flow.graph import CreateGraph
from flowfabric.rules.flow.views import FlowGraph

MAX_WAIT_MS = 300_000
MAX_LISTED_MEMBERS = 1000  # members that the answer to a repeated cancel lists
FlowCancel = flow_answers.FlowCancelled | flow_answers.CancellationScheduled | flow_answers.PartiallyCancelled


class NoWait(msgspec.Struct, frozen=True):
    """Return once the flow is marked; members are cancelled in the background."""


class WaitTimeout(msgspec.Struct, frozen=True):
    """Return once every member is cancelled; raise `OperationTimeout` if that takes longer."""

    timeout_ms: int


class WaitIndefinite(msgspec.Struct, frozen=True):
    """Return once every member is cancelled; the limit is five minutes."""


Wait = NoWait | WaitTimeout | WaitIndefinite
NO_WAIT = NoWait()


class GraphEdge(msgspec.Struct, frozen=True):
    """An edge of a graph that is created as a whole; without an id, one is minted."""

    upstream: str
    downstream: str
    dependency_kind: str = "success_only"
    data_passing_ref: str | None = None
    edge_id: str | None = None


class FlowOperations:
    """Operations on flows, their edges and joins."""

    flow_lists: FlowLists
    runtime: Runtime
    flow_locks: KeyedLock
    bulk_canceller: BulkCanceller
    join_resolver: JoinResolver
    dispatcher: CompletionDispatcher

    async def cancel_flow(
        self,
        flow_id: str,
        *,
        policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        reason: str = "",
        wait: Wait = NO_WAIT,
    ) -> FlowCancel:
        """Cancel a flow and the members that the policy selects; a repeated call changes nothing."""
        policy = flow_cancel.parse_cancellation_policy(policy)
        timeout_ms = max_wait_ms_of(wait)
        reason = validation.text("reason", reason)
        answer = await self.cancel_flow_header(flow_id, reason=reason, policy=policy)
        if isinstance(answer, flow_answers.HeaderAlreadyTerminal):
            stored = answer.stored_cancellation_policy or policy
            return flow_answers.FlowCancelled(stored, answer.member_execution_ids[:MAX_LISTED_MEMBERS])
        members, selected = answer.member_execution_ids, answer.selected_execution_ids
        if not selected:
            return flow_answers.FlowCancelled(policy, members)
        flow = validate.validate_flow_id(flow_id)
        work = self.bulk_canceller.cancel_members(flow, selected, reason or flow_cancel.FALLBACK_REASON)
        if timeout_ms is None:
            self.bulk_canceller.finish_in_background(work)
            return flow_answers.CancellationScheduled(policy, len(members), members)
        try:
            failed = await asyncio.wait_for(work, timeout_ms / 1000)
        except TimeoutError:
            raise errors.OperationTimeout("cancel_flow", timeout_ms) from None
        if failed:
            return flow_answers.PartiallyCancelled(policy, members, failed)
        return flow_answers.FlowCancelled(policy, members)

    async def cancel_flow_header(
        self,
        flow_id: str,
        *,
        reason: str = "",
        policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        grace_ms: Any = flow_cancel.GRACE_MS,
    ) -> flow_answers.HeaderCancelled | flow_answers.HeaderAlreadyTerminal:
        """Mark a flow as cancelled and list the members to cancel; a reconciler cancels them after the grace."""
        flow_id = validate.validate_flow_id(flow_id)
        cancellation_policy = flow_cancel.parse_cancellation_policy(policy)
        reason = validation.text("reason", reason)
        if refused := flow_cancel.check_grace(grace_ms):
            raise refused
        reads = ReadSet()
        flow, members = reads.one(Flow, flow_id), reads.many(FlowMember, flow_id)
        executions = reads.more_many(Execution)
        unreadable: list[str] = []

        async def load_members(rows: Rows) -> Rows:
            names = [member.execution_id for member in members(rows)]
            found = await load_readable(self.runtime, names)
            unreadable[:] = [name for name in names if name not in found]
            return [[row for row in found.values() if row is not None]]

        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, _: flow_cancel.cancel_header(
                flow(rows),
                members(rows),
                {row.execution_id: row for row in executions(rows)},
                unread=unreadable,
                reason=reason,
                policy=cancellation_policy,
                grace_ms=grace_ms,
            ),
            load_more=load_members,
        )

    async def ack_cancel_member(self, flow_id: str, execution_id: str) -> None:
        """Remove a member from the cancel backlog of its flow; one that is not listed is ignored."""
        execution = validate.validate_execution_id(execution_id)
        await self.bulk_canceller.acknowledge(validate.validate_flow_id(flow_id), [execution])

    async def drain_sibling_cancel_group(self, flow_id: str, downstream: str) -> flow_answers.SiblingDrain:
        """Clear the pending sibling cancels of a join that has fired."""
        return await self.bulk_canceller.drain(_downstream(flow_id, downstream))

    async def reconcile_sibling_cancel_group(self, flow_id: str, downstream: str) -> flow_answers.SiblingReconcile:
        """Finish a drain that a crash interrupted; cancels nothing."""
        child = _downstream(flow_id, downstream)
        reads = ReadSet()
        pending, group = reads.one(PendingSiblingCancel, *child), reads.one(EdgeGroup, *child)
        inbound, siblings = reads.many(Dependency, child.execution_id), reads.more_many(Execution)

        async def load_siblings(rows: Rows) -> Rows:
            join = group(rows)
            names = [] if join is None else flow_cancel.siblings_to_cancel(join)
            found = await load_each(self.runtime, Execution, ((name,) for name in names))
            return [[row for row in found if row is not None]]

        if await load_one(self.runtime, PendingSiblingCancel, *child) is not None:
            await self.bulk_canceller.resolve_unrecorded_outcomes(child)
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, _: flow_cancel.reconcile_siblings(
                pending(rows), group(rows), {row.execution_id: row for row in siblings(rows)}, inbound(rows)
            ),
            load_more=load_siblings,
        )

    async def create_flow(
        self, flow_id: str, *, flow_kind: str = "dag", namespace: str = "default"
    ) -> flow_answers.FlowCreated | flow_answers.FlowExists:
        """Create a flow; an existing one does not change."""
        name = validate.validate_flow_id(flow_id)
        kind, namespace = _validate_labels(flow_kind, namespace)
        partition = ids.flow_partition(name, self.runtime.partitions)
        reads = ReadSet()
        flow = reads.one(Flow, name)
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, _: build.create_flow(flow(rows), name, partition, kind, namespace),
            assumed_rows=[[]],
        )

    async def create_flow_graph(
        self,
        flow_id: str,
        nodes: Iterable[CreateExecution],
        edges: Iterable[GraphEdge] = (),
        *,
        policies: Mapping[str, Mapping[str, Any]] | None = None,
        flow_kind: str = "dag",
        namespace: str = "default",
    ) -> flow_answers.GraphCreated | flow_answers.FlowExists:
        """Create a flow with its members, edges and joins in one change; repeating the call changes nothing."""
        name = validate.validate_flow_id(flow_id)
        kind, namespace = _validate_labels(flow_kind, namespace)
        partition = ids.flow_partition(name, self.runtime.partitions)
        if not isinstance(policies or {}, Mapping):
            raise errors.InvalidInput("policies: not a mapping")
        members = validate.validate_creates(nodes)
        for node in members:
            _check_partition(node.execution_id, node.partition, partition)
        names = {node.execution_id for node in members}
        request = CreateGraph(
            name,
            partition,
            kind,
            namespace,
            members,
            [
                self._stage_request(name, _check_edge(edge, names))
                for edge in validate.validate_iterable("edges", edges)
            ],
            {self._member_id(name, child): _parse_policy(policy) for child, policy in (policies or {}).items()},
        )
        if refused := graph.check_graph(request):
            raise refused
        reads = ReadSet()
        flow = reads.one(Flow, name)
        executions = reads.each(Execution, ((node.execution_id,) for node in request.nodes))

        def decide(rows: Rows, now: int) -> Decision[flow_answers.GraphCreated | flow_answers.FlowExists]:
            existing = {row.execution_id: row for row in executions(rows) if row is not None}
            return graph.create_graph(flow(rows), existing, request, now, defaults=defaults_of(self.runtime))

        return await self.runtime.decide_and_commit(reads, decide, assumed_rows=[[] for _ in reads])

    async def add_execution_to_flow(
        self, flow_id: str, execution_id: str
    ) -> flow_answers.Added | flow_answers.AlreadyMember:
        """Make an execution a member of a flow on its partition."""
        name = validate.validate_flow_id(flow_id)
        execution = self._member_id(name, execution_id)
        reads = ReadSet()
        flow, row = reads.one(Flow, name), reads.one(Execution, execution)
        member = reads.one(FlowMember, name, execution)
        async with self.flow_locks.hold(name):
            return await self.runtime.decide_and_commit(
                reads, lambda rows, _: build.add_member(flow(rows), row(rows), member(rows), execution)
            )

    async def stage_dependency_edge(
        self,
        flow_id: str,
        edge_id: str,
        upstream: str,
        downstream: str,
        *,
        dependency_kind: str = "success_only",
        data_passing_ref: str | None = None,
        expected_graph_revision: int | None = None,
    ) -> flow_answers.Staged:
        """Add an edge to the graph; without an expected revision, any revision is accepted."""
        name = validate.validate_flow_id(flow_id)
        expected = validate.validate_revision("expected_graph_revision", expected_graph_revision)
        edge = GraphEdge(
            validate.validate_member_id("upstream", upstream),
            validate.validate_member_id("downstream", downstream),
            dependency_kind,
            data_passing_ref,
        )
        request = msgspec.structs.replace(
            self._stage_request(name, edge),
            edge_id=validate.parse_uuid("edge_id", edge_id),
            expected_graph_revision=expected,
        )
        reads = ReadSet()
        flow, existing = reads.one(Flow, name), reads.one(Edge, name, request.edge_id)
        members = [reads.one(FlowMember, name, end) for end in (request.upstream, request.downstream)]
        group = reads.one(EdgeGroup, name, request.downstream)
        search = graph.start_search(request)

        async def search_cycle(rows: Rows) -> Rows:
            # The flow is already loaded: an edge that is staged from now on makes the guard on the flow fail.
            nonlocal search
            search = graph.start_search(request)
            while flow(rows) is not None and search.frontier:
                search = graph.continue_search(search, await outgoing_edges(self.runtime, search.frontier))
            return []

        async with self.flow_locks.hold(name):
            return await self.runtime.decide_and_commit(
                reads,
                lambda rows, _: build.stage_edge(
                    flow(rows),
                    existing(rows),
                    (members[0](rows), members[1](rows)),
                    group(rows),
                    request,
                    closes_cycle=search.closes_cycle,
                ),
                load_more=search_cycle,
            )

    async def apply_dependency_to_child(
        self,
        flow_id: str,
        edge_id: str,
        downstream: str,
        upstream: str,
        *,
        graph_revision: int | None = None,
        dependency_kind: str | None = None,
        data_passing_ref: str | None = None,
    ) -> flow_answers.DependencyApplied | flow_answers.DependencyAlreadyApplied:
        """Make the downstream of a staged edge wait for its upstream; omitted arguments are those of the edge."""
        revision = validate.validate_revision("graph_revision", graph_revision)
        request = ApplyDependency(
            validate.validate_flow_id(flow_id),
            validate.parse_uuid("edge_id", edge_id),
            validate.validate_member_id("upstream", upstream),
            validate.validate_member_id("downstream", downstream),
            None if dependency_kind is None else validation.choice(DependencyKind, "dependency_kind", dependency_kind),
            validation.optional_text("data_passing_ref", data_passing_ref),
            None if revision is None else min(revision, validation.MAX_INTEGER),  # informational: cap what is stored
        )
        reads = ReadSet()
        child, parent = reads.one(Execution, request.downstream), reads.one(Execution, request.upstream)
        edge = reads.one(Edge, request.flow_id, request.edge_id)
        existing = reads.one(Dependency, request.downstream, request.edge_id)
        group = reads.one(EdgeGroup, request.flow_id, request.downstream)
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, _: dependencies.apply_dependency(
                child(rows), parent(rows), edge(rows), existing(rows), group(rows), request
            ),
        )

    async def set_edge_group_policy(
        self, flow_id: str, downstream: str, policy: Mapping[str, Any]
    ) -> flow_answers.SetJoinPolicyResult:
        """Set how an execution joins its upstreams, before any edge into it is staged."""
        join_policy = _parse_policy(policy)
        key = _downstream(flow_id, downstream)
        reads = ReadSet()
        flow, group = reads.one(Flow, key.flow_id), reads.one(EdgeGroup, *key)
        answer = await self.runtime.decide_and_commit(
            reads, lambda rows, _: build.set_join_policy(flow(rows), group(rows), *key, join_policy)
        )
        self.runtime.metrics.count("ff_edge_group_policy", policy=join_policy.variant.value)
        return answer

    async def set_flow_tag(self, flow_id: str, key: str, value: str) -> None:
        """Set one tag of a flow."""
        name = validation.text("key", key)
        if refused := tag_rules.check_tag_key(name) or tag_rules.check_not_reserved(name):
            raise refused
        flow, text = validate.validate_flow_id(flow_id), validation.text("value", value)
        await decide_row(self.runtime, Flow, (flow,), lambda row, _: build.set_flow_tag(row, name, text))

    async def resolve_dependency(
        self, flow_id: str, edge_id: str, downstream: str, outcome: str
    ) -> flow_answers.Resolution:
        """Count the outcome of an edge's upstream in the downstream's join; a repeated call changes nothing."""
        upstream_outcome = _parse_outcome(outcome)
        child = _downstream(flow_id, downstream)
        edge = validate.parse_uuid("edge_id", edge_id)
        [resolved] = await self.join_resolver.resolve([CompletedEdge(child, edge, upstream_outcome)])
        if resolved.refused is not None:
            raise resolved.refused
        return validate.value_or_raise(joins.resolution_of(resolved.verdicts.get(edge), edge, downstream))

    async def cascade_completion(self, execution_id: str) -> flow_answers.CascadeOutcome:
        """Resolve every edge of an execution that has ended, and those of descendants that this skips."""
        resolved, descended = await self.dispatcher.cascade([validate.validate_execution_id(execution_id)])
        return flow_answers.CascadeOutcome(resolved, descended)

    async def promote_blocked_to_eligible(self, execution_id: str) -> Moved:
        """Make an execution claimable that is blocked although its dependencies are met."""
        reads = ReadSet()
        row = reads.one(Execution, validate.validate_execution_id(execution_id))
        group = reads.more_one(EdgeGroup)
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, _: dependencies.promote_blocked(row(rows), group(rows)),
            load_more=self.join_resolver.load_join_group,
        )

    async def evaluate_flow_eligibility(self, execution_id: str) -> flow_answers.Eligibility:
        """Return whether dependencies let an execution run."""
        reads = ReadSet()
        row = reads.one(Execution, validate.validate_execution_id(execution_id))
        group = reads.more_one(EdgeGroup)
        rows = (await self.runtime.load(reads)).rows
        rows = rows + await self.join_resolver.load_join_group(rows)
        return dependencies.dependency_eligibility(row(rows), group(rows))

    def _member_id(self, flow_id: ids.FlowId, execution_id: str) -> str:
        execution = validate.validate_execution_id(execution_id)
        _check_partition(execution, ids.partition_of(execution), ids.flow_partition(flow_id, self.runtime.partitions))
        return execution

    def _stage_request(self, flow_id: ids.FlowId, edge: GraphEdge) -> StageEdge:
        return StageEdge(
            flow_id,
            self.runtime.minter.uuid() if edge.edge_id is None else validate.parse_uuid("edge_id", edge.edge_id),
            edge.upstream,
            edge.downstream,
            validation.choice(DependencyKind, "dependency_kind", edge.dependency_kind),
            validation.optional_text("data_passing_ref", edge.data_passing_ref),
            None,
        )

    async def search_flows(
        self,
        *,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> FlowListPage:
        """List flows of all partitions, newest first, after the cursor, with the counts of the last projection.

        A page that is not full and has a cursor is incomplete: one call reads at most FLOW_BUDGET flows.
        """
        return await self.flow_lists.search_flows(
            namespace=namespace, namespaces=namespaces, cursor=cursor, limit=limit
        )

    async def read_flow_graph(self, flow_id: str) -> FlowGraph:
        """Return the members of a flow with their kinds and states, the edges between them, and the joins.

        The graph is one snapshot; states may be newer. Members that retention has deleted have no state.
        """
        return await self.flow_lists.read_flow_graph(flow_id)


def max_wait_ms_of(wait: Wait) -> int | None:
    """Return the longest time that a caller waits; None if it does not wait."""
    match wait:
        case NoWait():
            return None
        case WaitTimeout(timeout_ms=timeout_ms):
            return validation.duration_ms("timeout_ms", timeout_ms, least=0)
        case WaitIndefinite():
            return MAX_WAIT_MS
        case _:
            raise errors.InvalidInput("wait: none of NoWait, WaitTimeout, WaitIndefinite")


def _downstream(flow_id: str, downstream: str) -> Downstream:
    return Downstream(validate.validate_flow_id(flow_id), validate.validate_member_id("downstream", downstream))


def _check_partition(execution_id: str, partition: int, flow_partition: int) -> None:
    if partition != flow_partition:
        raise errors.InvalidInput(f"partition mismatch: {execution_id} is on {partition}, its flow on {flow_partition}")


def _check_edge(edge: object, names: Set[str]) -> GraphEdge:
    """Return the edge if both its ends are ids; those of members are already validated."""
    edge = validate.check_type("edges", edge, GraphEdge)
    for part, end in (("upstream", edge.upstream), ("downstream", edge.downstream)):
        if type(end) is not str or end not in names:
            validate.validate_member_id(part, end)
    return edge


def _validate_labels(flow_kind: str, namespace: str) -> tuple[str, str]:
    kind = validation.name("flow_kind", flow_kind)
    if not kind:
        raise errors.InvalidInput("flow_kind: empty")
    return kind, validation.name("namespace", namespace)


def _parse_policy(policy: object) -> build.JoinPolicy:
    return validate.value_or_raise(build.parse_join_policy(dict(policy) if isinstance(policy, Mapping) else policy))


def _parse_outcome(outcome: str) -> TerminalOutcome:
    try:
        parsed = TerminalOutcome(outcome)
    except ValueError:
        parsed = TerminalOutcome.NONE
    if parsed is TerminalOutcome.NONE:
        raise errors.InvalidInput(f"outcome: {validation.preview(outcome)} is no terminal outcome")
    return parsed
