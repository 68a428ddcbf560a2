"""Cancelling a flow: the header, the members, and the wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Set
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.flows.bulk_cancel import BulkCanceller, load_readable
from flowfabric.engine.flows.completion_dispatcher import CompletionDispatcher, outgoing_edges
from flowfabric.engine.flows.join_resolver import CompletedEdge, Downstream, JoinResolver
from flowfabric.engine.operations.bulk_create import defaults_of
from flowfabric.engine.runtime.after_commit import Rows, first
from flowfabric.engine.runtime.keyed_lock import KeyedLock
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.answers.execution import Moved
from flowfabric.model.execution import Execution
from flowfabric.model.flow import (
    CancellationPolicy,
    Dependency,
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
from flowfabric.rules.flow import build, dependencies, graph
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow.build import StageEdge
from flowfabric.rules.flow.dependencies import ApplyDependency
from flowfabric.rules.flow.graph import CreateGraph
from flowfabric.rules.flow.joins import Verdict
from flowfabric.stores.queries import Read

MAX_WAIT_MS = 300_000
MAX_LISTED_MEMBERS = 1000  # members that the answer to a repeated cancel lists
FlowCancel = flow_answers.FlowCancelled | flow_answers.CancellationScheduled | flow_answers.PartiallyCancelled
MAX_SEARCHED_NODES = 1000
_RESOLUTION = {
    Verdict.SATISFIED: flow_answers.Resolution.SATISFIED,
    Verdict.IMPOSSIBLE: flow_answers.Resolution.IMPOSSIBLE,
    Verdict.PENDING: flow_answers.Resolution.PENDING,
    Verdict.ALREADY_FIRED: flow_answers.Resolution.ALREADY_RESOLVED,
    Verdict.ALREADY_RESOLVED: flow_answers.Resolution.ALREADY_RESOLVED,
}


class NoWait(msgspec.Struct, frozen=True):
    """Answer when the flow is marked; members are cancelled in the background."""


class WaitTimeout(msgspec.Struct, frozen=True):
    """Answer when every member is dealt with, or raise when that takes longer."""

    timeout_ms: int


class WaitIndefinite(msgspec.Struct, frozen=True):
    """Answer when every member is dealt with; "for ever" ends after five minutes."""


Wait = NoWait | WaitTimeout | WaitIndefinite
NO_WAIT = NoWait()


class GraphEdge(msgspec.Struct, frozen=True):
    """An edge of a graph that is created as a whole; an id is minted when none is given."""

    upstream: str
    downstream: str
    dependency_kind: str = "success_only"
    data_passing_ref: str | None = None
    edge_id: str | None = None


class FlowOperations:
    """Operations on flows, their edges and joins."""

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
        """Cancel a flow and those of its members that the policy selects; a repeated call changes nothing."""
        wanted = validate.value_or_raise(flow_cancel.parse_cancellation_policy(policy))
        longest_ms = max_wait_ms_of(wait)
        why = validation.text("reason", reason)
        answer = await self.cancel_flow_header(flow_id, reason=why, policy=wanted)
        if isinstance(answer, flow_answers.HeaderAlreadyTerminal):
            stored = answer.stored_cancellation_policy or wanted
            return flow_answers.FlowCancelled(stored, answer.member_execution_ids[:MAX_LISTED_MEMBERS])
        everyone, chosen = answer.member_execution_ids, answer.selected_execution_ids
        if not chosen:
            return flow_answers.FlowCancelled(wanted, everyone)
        flow = validate.validate_flow_id(flow_id)
        work = self.bulk_canceller.cancel_members(flow, chosen, why or flow_cancel.FALLBACK_REASON)
        if longest_ms is None:
            self.bulk_canceller.finish_in_background(work)
            return flow_answers.CancellationScheduled(wanted, len(everyone), everyone)
        try:
            failed = await asyncio.wait_for(work, longest_ms / 1000)
        except TimeoutError:
            raise errors.OperationTimeout("cancel_flow", longest_ms) from None
        if failed:
            return flow_answers.PartiallyCancelled(wanted, everyone, failed)
        return flow_answers.FlowCancelled(wanted, everyone)

    async def cancel_flow_header(
        self,
        flow_id: str,
        *,
        reason: str = "",
        policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        grace_ms: Any = flow_cancel.GRACE_MS,
    ) -> flow_answers.HeaderCancelled | flow_answers.HeaderAlreadyTerminal:
        """Mark a flow as cancelled and list the members to cancel; a reconciler sees to them after the grace."""
        flow = validate.validate_flow_id(flow_id)
        wanted = validate.value_or_raise(flow_cancel.parse_cancellation_policy(policy))
        why = validation.text("reason", reason)
        if refused := flow_cancel.check_grace(grace_ms):
            raise refused

        async def members(rows: Rows) -> Rows:
            names = [member.execution_id for member in rows[1]]
            found = await load_readable(self.runtime, names)
            return [[row for row in found.values() if row is not None], [name for name in names if name not in found]]

        return await self.runtime.decide_and_commit(
            (Read(Flow, (flow,)), Read(FlowMember, (flow,))),
            lambda rows, _: flow_cancel.cancel_header(
                first(rows[0]),
                rows[1],
                {row.execution_id: row for row in rows[2]},
                unread=rows[3],
                reason=why,
                policy=wanted,
                grace_ms=grace_ms,
            ),
            load_more=members,
        )

    async def ack_cancel_member(self, flow_id: str, execution_id: str) -> None:
        """One member of a cancelled flow is done with; one that is not listed is done with already."""
        execution = validate.validate_execution_id(execution_id)
        await self.bulk_canceller.acknowledge(validate.validate_flow_id(flow_id), [execution])

    async def drain_sibling_cancel_group(self, flow_id: str, downstream: str) -> flow_answers.SiblingDrain:
        """Clear what a fired join had flagged for cancelling."""
        return await self.bulk_canceller.drain(_child(flow_id, downstream))

    async def reconcile_sibling_cancel_group(self, flow_id: str, downstream: str) -> flow_answers.SiblingReconcile:
        """Finish a drain that a crash interrupted; cancels nobody."""
        child = _child(flow_id, downstream)

        async def listed(rows: Rows) -> Rows:
            names = flow_cancel.siblings_to_cancel(rows[1][0]) if rows[1] else []
            return [[row for each in await self._rows_of(names) for row in each]]

        if (await self.runtime.load((Read(PendingSiblingCancel, child),))).rows[0]:
            await self.bulk_canceller.resolve_unrecorded_outcomes(child)
        return await self.runtime.decide_and_commit(
            (Read(PendingSiblingCancel, child), Read(EdgeGroup, child), Read(Dependency, (child.execution_id,))),
            lambda rows, _: flow_cancel.reconcile_siblings(
                first(rows[0]),
                first(rows[1]),
                {row.execution_id: row for row in rows[3]},
                rows[2],
            ),
            load_more=listed,
        )

    async def _rows_of(self, names: list[str]) -> Rows:
        if not names:
            return []
        return (await self.runtime.load([Read(Execution, (name,)) for name in names])).rows

    async def create_flow(
        self, flow_id: str, *, flow_kind: str = "dag", namespace: str = "default"
    ) -> flow_answers.FlowCreated | flow_answers.FlowExists:
        """Create a flow; one that exists stays as it is."""
        flow = validate.validate_flow_id(flow_id)
        kind, namespace = _labels(flow_kind, namespace)
        partition = ids.flow_partition(flow, self.runtime.partitions)
        return await self.runtime.decide_and_commit(
            (Read(Flow, (flow,)),),
            lambda rows, _: build.create_flow(first(rows[0]), flow, partition, kind, namespace),
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
        """Create a flow with all its members, edges and joins, all of it or nothing; repeating the call is harmless."""
        flow = validate.validate_flow_id(flow_id)
        kind, namespace = _labels(flow_kind, namespace)
        here = ids.flow_partition(flow, self.runtime.partitions)
        if not isinstance(policies or {}, Mapping):
            raise errors.InvalidInput("policies: not a mapping")
        members = [_on(here, node) for node in validate.validate_creates(nodes)]
        names = {node.execution_id for node in members}
        ask = CreateGraph(
            flow,
            here,
            kind,
            namespace,
            members,
            [self._staged(flow, _an_edge(edge, names)) for edge in validate.validate_iterable("edges", edges)],
            {self._member_id(flow, name): _policy(policy) for name, policy in (policies or {}).items()},
        )
        if refused := graph.check_graph(ask):
            raise refused
        wants = [Read(Flow, (flow,)), *(Read(Execution, (node.execution_id,)) for node in ask.nodes)]

        def decide(rows: Rows, now: int) -> Any:
            existing = {each[0].execution_id: each[0] for each in rows[1:] if each}
            return graph.create_graph(first(rows[0]), existing, ask, now, defaults=defaults_of(self.runtime))

        answer: flow_answers.GraphCreated | flow_answers.FlowExists
        answer = await self.runtime.decide_and_commit(wants, decide, assumed_rows=[[] for _ in wants])
        return answer

    async def add_execution_to_flow(
        self, flow_id: str, execution_id: str
    ) -> flow_answers.Added | flow_answers.AlreadyMember:
        """Make an execution a member of a flow on its partition."""
        flow = validate.validate_flow_id(flow_id)
        member = self._member_id(flow, execution_id)
        wants = (Read(Flow, (flow,)), Read(Execution, (member,)), Read(FlowMember, (flow, member)))
        async with self.flow_locks.hold(flow):
            return await self.runtime.decide_and_commit(
                wants,
                lambda rows, _: build.add_member(first(rows[0]), first(rows[1]), first(rows[2]), member),
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
        """Add an edge to the graph; without an expected revision none is asked for."""
        flow = validate.validate_flow_id(flow_id)
        expected = validate.validate_revision("expected_graph_revision", expected_graph_revision)
        edge = GraphEdge(
            validate.validate_member_id("upstream", upstream),
            validate.validate_member_id("downstream", downstream),
            dependency_kind,
            data_passing_ref,
        )
        ask = msgspec.structs.replace(
            self._staged(flow, edge),
            edge_id=validate.validate_edge_id(edge_id),
            expected_graph_revision=expected,
        )
        wants = (
            Read(Flow, (flow,)),
            Read(Edge, (flow, ask.edge_id)),
            Read(FlowMember, (flow, ask.upstream)),
            Read(FlowMember, (flow, ask.downstream)),
            Read(EdgeGroup, (flow, ask.downstream)),
        )
        circle = False

        async def search(rows: Rows) -> Rows:
            # After the flow was read: an edge that is staged since then makes the flow's guard fail.
            nonlocal circle
            circle = bool(rows[0]) and await self._reaches(ask.downstream, ask.upstream)
            return []

        async with self.flow_locks.hold(flow):
            return await self.runtime.decide_and_commit(
                wants,
                lambda rows, _: build.stage_edge(
                    first(rows[0]),
                    first(rows[1]),
                    (first(rows[2]), first(rows[3])),
                    first(rows[4]),
                    ask,
                    closes_cycle=circle,
                ),
                load_more=search,
            )

    async def _reaches(self, start: str, goal: str) -> bool:
        """Whether a way leads from start to goal; a search that grows too large counts as yes."""
        visited, level = {start}, [start]
        while level:
            nexts = {edge.downstream_execution_id for edge in await outgoing_edges(self.runtime, level)}
            if goal in nexts:
                return True
            level = sorted(nexts - visited)
            visited |= nexts
            if len(visited) > MAX_SEARCHED_NODES:
                return True
        return False

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
        """Let the downstream of a staged edge wait for its upstream; what is left out is taken from the edge."""
        seen = validate.validate_revision("graph_revision", graph_revision)
        ask = ApplyDependency(
            validate.validate_flow_id(flow_id),
            validate.validate_edge_id(edge_id),
            validate.validate_member_id("upstream", upstream),
            validate.validate_member_id("downstream", downstream),
            None if dependency_kind is None else validate.value_or_raise(build.parse_dependency_kind(dependency_kind)),
            validation.optional_text("data_passing_ref", data_passing_ref),
            None
            if seen is None
            else min(seen, validation.MAX_INTEGER),  # a note for people; no graph has come that far
        )
        wants = (
            Read(Execution, (ask.downstream,)),
            Read(Execution, (ask.upstream,)),
            Read(Edge, (ask.flow_id, ask.edge_id)),
            Read(Dependency, (ask.downstream, ask.edge_id)),
            Read(EdgeGroup, (ask.flow_id, ask.downstream)),
        )

        def decide(
            rows: Rows, _: int
        ) -> Decision[flow_answers.DependencyApplied | flow_answers.DependencyAlreadyApplied]:
            child, above, edge, existing, group = map(first, rows)
            return dependencies.apply_dependency(child, above, edge, existing, group, ask)

        return await self.runtime.decide_and_commit(wants, decide)

    async def set_edge_group_policy(
        self, flow_id: str, downstream: str, policy: Mapping[str, Any]
    ) -> flow_answers.SetJoinPolicyResult:
        """Say how an execution joins its upstreams, before any edge into it is staged."""
        given = _policy(policy)
        flow = validate.validate_flow_id(flow_id)
        child = validate.validate_member_id("downstream", downstream)
        answer = await self.runtime.decide_and_commit(
            (Read(Flow, (flow,)), Read(EdgeGroup, (flow, child))),
            lambda rows, _: build.set_join_policy(first(rows[0]), first(rows[1]), flow, child, given),
        )
        self.runtime.metrics.count("ff_edge_group_policy", policy=given.variant.value)
        return answer

    async def set_flow_tag(self, flow_id: str, key: str, value: str) -> None:
        """Set one tag of a flow."""
        name = validation.text("key", key)
        if refused := tag_rules.check_tag_key(name) or tag_rules.check_not_reserved(name):
            raise refused
        flow, text = validate.validate_flow_id(flow_id), validation.text("value", value)
        await self.runtime.decide_and_commit(
            (Read(Flow, (flow,)),), lambda rows, _: build.set_flow_tag(first(rows[0]), name, text)
        )

    async def resolve_dependency(
        self, flow_id: str, edge_id: str, downstream: str, outcome: str
    ) -> flow_answers.Resolution:
        """Count the end of an edge's upstream on its downstream; counting it again changes nothing."""
        ended = _outcome(outcome)
        child = Downstream(validate.validate_flow_id(flow_id), validate.validate_member_id("downstream", downstream))
        edge = validate.validate_edge_id(edge_id)
        [fold] = await self.join_resolver.resolve([CompletedEdge(child, edge, ended)])
        if fold.refused is not None:
            raise fold.refused
        if edge not in fold.verdicts:
            raise errors.InvalidDependency(f"edge {edge} was never applied to {downstream}")
        return _RESOLUTION[fold.verdicts[edge]]

    async def cascade_completion(self, execution_id: str) -> flow_answers.CascadeOutcome:
        """Resolve every edge of an execution that has ended, and of those that this skips, before it answers."""
        resolved, descended = await self.dispatcher.cascade([validate.validate_execution_id(execution_id)])
        return flow_answers.CascadeOutcome(resolved, descended)

    async def promote_blocked_to_eligible(self, execution_id: str) -> Moved:
        """Make an execution claimable that waits although its dependencies are met."""
        execution = validate.validate_execution_id(execution_id)
        return await self.runtime.decide_and_commit(
            (Read(Execution, (execution,)),),
            lambda rows, _: dependencies.promote_blocked(first(rows[0]), first(rows[1])),
            load_more=self.join_resolver.load_join_group,
        )

    async def evaluate_flow_eligibility(self, execution_id: str) -> flow_answers.Eligibility:
        """Whether dependencies let an execution run."""
        rows = (await self.runtime.load((Read(Execution, (validate.validate_execution_id(execution_id),)),))).rows
        return dependencies.dependency_eligibility(
            first(rows[0]), first((await self.join_resolver.load_join_group(rows))[0])
        )

    def _member_id(self, flow_id: ids.FlowId, execution_id: str) -> str:
        execution = validate.validate_execution_id(execution_id)
        _check_partition(execution, ids.partition_of(execution), ids.flow_partition(flow_id, self.runtime.partitions))
        return execution

    def _staged(self, flow_id: ids.FlowId, edge: GraphEdge) -> StageEdge:
        return StageEdge(
            flow_id,
            self.runtime.minter.uuid() if edge.edge_id is None else validate.validate_edge_id(edge.edge_id),
            edge.upstream,
            edge.downstream,
            validate.value_or_raise(build.parse_dependency_kind(edge.dependency_kind)),
            validation.optional_text("data_passing_ref", edge.data_passing_ref),
            None,
        )


def max_wait_ms_of(wait: Wait) -> int | None:
    """How long a caller waits at most; None for one that does not."""
    match wait:
        case NoWait():
            return None
        case WaitTimeout(timeout_ms=timeout_ms):
            return validation.duration_ms("timeout_ms", timeout_ms, least=0)
        case WaitIndefinite():
            return MAX_WAIT_MS
        case _:
            raise errors.InvalidInput("wait: none of NoWait, WaitTimeout, WaitIndefinite")


def _child(flow_id: str, downstream: str) -> Downstream:
    return Downstream(validate.validate_flow_id(flow_id), validate.validate_member_id("downstream", downstream))


def _check_partition(execution_id: str, partition: int, here: int) -> None:
    if partition != here:
        raise errors.InvalidInput(f"partition mismatch: {execution_id} is on {partition}, its flow on {here}")


def _on(here: int, node: CreateExecution) -> CreateExecution:
    _check_partition(node.execution_id, node.partition, here)
    return node


def _an_edge(given: object, names: Set[str]) -> GraphEdge:
    """An edge whose ends are ids, which those of members are known to be."""
    if not isinstance(given, GraphEdge):
        raise errors.InvalidInput("edges: not a GraphEdge")
    for part, end in (("upstream", given.upstream), ("downstream", given.downstream)):
        if type(end) is not str or end not in names:
            validate.validate_member_id(part, end)
    return given


def _labels(flow_kind: str, namespace: str) -> tuple[str, str]:
    kind = validation.text("flow_kind", flow_kind, limit=validation.MAX_NAME_BYTES)
    if not kind:
        raise errors.InvalidInput("flow_kind: empty")
    return kind, validation.text("namespace", namespace, limit=validation.MAX_NAME_BYTES)


def _policy(policy: object) -> build.JoinPolicy:
    return validate.value_or_raise(build.parse_join_policy(dict(policy) if isinstance(policy, Mapping) else policy))


def _outcome(outcome: str) -> TerminalOutcome:
    try:
        ended = TerminalOutcome(outcome)
    except ValueError:
        ended = TerminalOutcome.NONE
    if ended is TerminalOutcome.NONE:
        raise errors.InvalidInput(f"outcome: {validation.preview(outcome)} is no end")
    return ended
