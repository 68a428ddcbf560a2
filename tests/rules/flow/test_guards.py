"""The guards of flow changes: the flow, the join, the executions and the lists as they were loaded.

Many processes build one flow concurrently, and many outcomes meet in one join. A decision about an outdated graph,
count or list is made again.
"""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.model.change import Guard, LeaseCheck, LeaseRequirement
from flowfabric.model.execution import Execution, Payload, Result
from flowfabric.model.flow import (
    CancelBacklog,
    CancellationPolicy,
    Dependency,
    DependencyKind,
    Edge,
    EdgeGroup,
    Flow,
    FlowMember,
    FlowState,
    GroupState,
    JoinPolicyKind,
    OnSatisfied,
    PendingMemberCancel,
    PendingSiblingCancel,
)
from flowfabric.model.states import EligibilityState, TerminalOutcome
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.flow import build, dependencies, graph, joins
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow.build import JoinPolicy, StageEdge
from flowfabric.rules.flow.joins import JoinContext, UpstreamOutcome
from tests.rules.execution.rows import EXECUTION, NOW
from tests.rules.execution.test_guards import ACTIVE, ELIGIBLE, FENCE, RUNNABLE, TERMINAL, changed, row

F = "f"
U = "{fp:86}:22222222-2222-4222-8222-222222222222"
SUCCESS_ONLY = DependencyKind.SUCCESS_ONLY
FLOW = Flow(F, 86, "task", "n", FlowState.OPEN, NOW - 9, NOW - 9, node_count=2, project_at=NOW, revision=5)
GROUP = EdgeGroup(F, EXECUTION, JoinPolicyKind.ALL_OF, staged=1, n=1, revision=6)
EMPTY = EdgeGroup(F, EXECUTION, JoinPolicyKind.ALL_OF, revision=6)
FREE = row(RUNNABLE, ELIGIBLE)
CHILD = row(RUNNABLE, ELIGIBLE, flow_id=F)
UPSTREAM = changed(CHILD, {"execution_id": U, "revision": 8})
SKIPPED = row(TERMINAL, terminal_outcome=TerminalOutcome.SKIPPED, flow_id=F)
BLOCKED = row(RUNNABLE, EligibilityState.BLOCKED_BY_DEPENDENCIES, flow_id=F)
DEPENDENCY = Dependency(EXECUTION, "e", F, U, SUCCESS_ONLY)
EDGE = Edge(F, "e", U, EXECUTION, SUCCESS_ONLY, NOW - 5)
ASK = StageEdge(F, "e", U, EXECUTION, SUCCESS_ONLY, None, None)
MEMBERS = (FlowMember(F, U), FlowMember(F, EXECUTION))
APPLY = dependencies.ApplyDependency(F, "e", U, EXECUTION)
TWO = EdgeGroup(F, EXECUTION, JoinPolicyKind.ALL_OF, staged=2, n=2, revision=6)
CARRIER = Dependency(EXECUTION, "e", F, U, SUCCESS_ONLY, data_passing_ref="r", unfolded_at=NOW, revision=2)
EARLIER = Dependency(EXECUTION, "d", F, "u", SUCCESS_ONLY, data_passing_ref="r", unfolded_at=NOW - 1, revision=1)
BACKLOG = CancelBacklog(F, NOW, 2, revision=9)
PENDING = [PendingMemberCancel(F, EXECUTION)]
ENTRY = PendingSiblingCancel(F, EXECUTION, NOW - 1, revision=4)
FLAGGED = EdgeGroup(
    F,
    EXECUTION,
    JoinPolicyKind.ANY_OF,
    OnSatisfied.CANCEL_REMAINING,
    n=2,
    group_state=GroupState.SATISFIED,
    cancel_siblings_pending_flag=True,
    cancel_siblings_pending_members=U,
    revision=6,
)

flow, no_flow = Guard(Flow, (F,), 5), Guard(Flow, (F,), None)
join, no_join = Guard(EdgeGroup, (F, EXECUTION), 6), Guard(EdgeGroup, (F, EXECUTION), None)
execution, upstream = Guard(Execution, (EXECUTION,), 7), Guard(Execution, (U,), 8)
held = Guard(Execution, (EXECUTION,), 7, LeaseCheck(LeaseRequirement.LIVE, "lease-1", 3))
carrier = Guard(Dependency, (EXECUTION, "e"), 2)
backlog = Guard(CancelBacklog, (F,), 9)
entry = Guard(PendingSiblingCancel, (F, EXECUTION), 4)


def staged(group: EdgeGroup | None) -> Decision[Any]:
    return build.stage_edge(FLOW, None, MEMBERS, group, ASK, closes_cycle=False)


def waiting(group: EdgeGroup | None, flow_id: str | None = F) -> Decision[Any]:
    return dependencies.wait_children(row(ACTIVE, flow_id=flow_id), group, FENCE, None, NOW)


def header(*rows: Execution) -> Decision[Any]:
    known = {one.execution_id: one for one in rows}
    return flow_cancel.cancel_header(FLOW, MEMBERS, known, reason="r", policy=CancellationPolicy.CANCEL_ALL)


def resolved(group: EdgeGroup, *ends: UpstreamOutcome, handed_on_by: str | None = None) -> Decision[Any]:
    carried = None if handed_on_by is None else (Payload(EXECUTION, "task", ""), Result(handed_on_by, b"r"))
    return joins.resolve_join(
        group, BLOCKED, joins.count_outcomes(group, ends), JoinContext(flow=FLOW, passed_result=carried)
    )


SUCCESS, FAILED = TerminalOutcome.SUCCESS, TerminalOutcome.FAILED
CAME = (UpstreamOutcome(EARLIER, SUCCESS), UpstreamOutcome(CARRIER, SUCCESS))
ANY_OF = JoinPolicy(JoinPolicyKind.ANY_OF, OnSatisfied.LET_RUN)
REQUIRED_GUARDS: dict[str, tuple[Decision[Any], set[Guard]]] = {
    "create": (build.create_flow(None, F, 86, "task", "n"), {no_flow}),
    "add": (build.add_member(FLOW, FREE, None, EXECUTION), {flow, execution}),
    "add what is listed but does not know": (build.add_member(FLOW, FREE, MEMBERS[1], EXECUTION), {flow, execution}),
    "stage the first edge": (staged(None), {flow, no_join}),
    "stage another edge": (staged(GROUP), {flow, join}),
    "fix the first policy": (build.set_join_policy(FLOW, None, F, EXECUTION, ANY_OF), {flow, no_join}),
    "fix another policy": (build.set_join_policy(FLOW, EMPTY, F, EXECUTION, ANY_OF), {flow, join}),
    "tag": (build.set_flow_tag(FLOW, "a.b", "c"), {flow}),
    "apply": (dependencies.apply_dependency(CHILD, UPSTREAM, EDGE, None, GROUP, APPLY), {join, execution, upstream}),
    "apply the first": (
        dependencies.apply_dependency(CHILD, UPSTREAM, EDGE, None, None, APPLY),
        {no_join, execution, upstream},
    ),
    "wait": (waiting(GROUP), {held, join}),
    "wait for nobody": (waiting(None), {held, no_join}),
    "wait outside of a flow": (waiting(None, flow_id=None), {held}),
    "promote": (dependencies.promote_blocked(BLOCKED, None), {execution, no_join}),
    "promote outside of a flow": (dependencies.promote_blocked(changed(BLOCKED, {"flow_id": None}), None), {execution}),
    "replay": (
        dependencies.replay_skipped_member(SKIPPED, GROUP, [DEPENDENCY], {U: UPSTREAM}),
        {execution, join, upstream},
    ),
    "count": (resolved(TWO, UpstreamOutcome(DEPENDENCY, SUCCESS)), {join}),
    "count what is noted nowhere": (
        resolved(TWO, UpstreamOutcome(CARRIER, FAILED, is_recorded=False)),
        {join, execution, flow, carrier},
    ),
    "let run": (resolved(GROUP, UpstreamOutcome(DEPENDENCY, SUCCESS)), {join, execution}),
    "skip": (resolved(GROUP, UpstreamOutcome(DEPENDENCY, FAILED)), {join, execution, flow}),
    "hand on": (resolved(TWO, CAME[1], handed_on_by=U), {join, execution}),
    "hand nothing on": (resolved(TWO, CAME[1]), {join, carrier}),
    "hand on what came earlier": (resolved(TWO, *CAME, handed_on_by="u"), {join, execution, carrier}),
    "cancel": (header(CHILD), {flow}),
    "strike off": (flow_cancel.acknowledge_cancels(BACKLOG, PENDING), {backlog}),
    "forget a backlog": (flow_cancel.drop_backlog(BACKLOG), {backlog}),
    "spare": (
        flow_cancel.without_pending_cancel(dependencies.replay_skipped_member(SKIPPED, None, [], {}), BACKLOG, PENDING),
        {execution, backlog},
    ),
    "drain": (flow_cancel.drain_siblings(ENTRY, FLAGGED), {entry, join}),
    "drain without a join": (flow_cancel.drain_siblings(ENTRY, None), {entry}),
    "finish a drain": (flow_cancel.reconcile_siblings(ENTRY, FLAGGED, {}, []), {entry, join}),
    "forget a drain": (flow_cancel.reconcile_siblings(ENTRY, GROUP, {}, []), {entry}),
}


@pytest.mark.parametrize(("decision", "guards"), REQUIRED_GUARDS.values(), ids=REQUIRED_GUARDS.keys())
def test_a_flow_change_guards_everything_it_was_decided_on(decision: Decision[Any], guards: set[Guard]) -> None:
    assert decision.change is not None
    assert set(decision.change.guards) == guards


# Each: when the nodes may run; the instants between which the graph is decided so.
TIMES: dict[str, tuple[list[int | None], int | None, int | None]] = {
    "any time": ([None, None], None, None),
    "delayed": ([NOW + 9, NOW + 5, None], None, NOW + 4),
    "due": ([NOW - 3, None, NOW - 1], NOW - 1, None),
    "both": ([NOW + 9, NOW], NOW, NOW + 8),
}


@pytest.mark.parametrize(("times", "not_before", "not_after"), TIMES.values(), ids=TIMES.keys())
def test_a_graph_guards_the_absence_of_its_flow_and_the_time_of_every_node(
    times: list[int | None], not_before: int | None, not_after: int | None
) -> None:
    nodes = tuple(
        CreateExecution(
            execution_id=f"{{fp:86}}:22222222-2222-4222-8222-22222222222{number}",
            partition=86,
            namespace="n",
            lane_id="default",
            execution_kind="task",
            delay_until=due,
        )
        for number, due in enumerate(times)
    )
    ask = graph.CreateGraph(F, 86, "task", "n", nodes, (), {})

    change = graph.create_graph(None, {}, ask, NOW).change

    assert change is not None
    assert change.guards == (no_flow,)
    assert (change.not_before, change.not_after) == (not_before, not_after)
