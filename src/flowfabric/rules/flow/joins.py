"""Joins: how the outcomes of upstream executions let a downstream run, or make it impossible.

A group counts the outcomes of its inbound edges in three buckets and fires once: satisfied or impossible. Outcomes
arrive in batches; they are counted one after another, so the result is the same as if each had arrived alone:

    policy      satisfied when      impossible when
    all_of      succeeded == n      failed + skipped >= 1
    any_of      succeeded >= 1      failed + skipped > n - 1
    quorum(k)   succeeded >= k      failed + skipped > n - k

Satisfied is checked first. An outcome that satisfies its edge counts as succeeded, even if it is a failure
(`DependencyKind`). Any other counts as skipped if the upstream was skipped, else as failed. `JoinCounts` tells which
further rows a resolution needs, so that nothing is loaded in vain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers.flow import Resolution
from flowfabric.model.change import Change, Guard, Patch, Upsert, Write, seen
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution, Payload, Result
from flowfabric.model.flow import (
    Dependency,
    DependencyKind,
    DependencyState,
    EdgeGroup,
    Flow,
    GroupState,
    JoinPolicyKind,
    OnSatisfied,
    PendingSiblingCancel,
)
from flowfabric.model.instant import NOW
from flowfabric.model.states import (
    LifecyclePhase,
    TerminalOutcome,
)
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import cancel
from flowfabric.rules.flow.build import seen_flow, seen_group
from flowfabric.rules.flow.downstreams import release_child, skip_child, waits_for_dependencies


class Verdict(StrEnum):
    """The effect of one outcome on the group."""

    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"
    PENDING = "pending"
    ALREADY_FIRED = "already_fired"
    ALREADY_RESOLVED = "already_resolved"


_RESOLUTIONS = {
    Verdict.SATISFIED: Resolution.SATISFIED,
    Verdict.IMPOSSIBLE: Resolution.IMPOSSIBLE,
    Verdict.PENDING: Resolution.PENDING,
    Verdict.ALREADY_FIRED: Resolution.ALREADY_RESOLVED,
    Verdict.ALREADY_RESOLVED: Resolution.ALREADY_RESOLVED,
}


def resolution_of(verdict: Verdict | None, edge_id: str, downstream: str) -> Resolution | errors.InvalidDependency:
    """Return the public form of a verdict; an edge without one was never applied to its downstream."""
    if verdict is None:
        return errors.InvalidDependency(f"edge {edge_id} was never applied to {downstream}")
    return _RESOLUTIONS[verdict]


class UpstreamOutcome(msgspec.Struct, frozen=True, gc=False):
    """An edge and how its upstream ended.

    An outcome that is not recorded on the edge counts only while the edge is unchanged, because a replay of the
    upstream writes the edge. If the upstream has many edges, its replay writes them before itself; then `upstream` is
    guarded too.
    """

    dependency: Dependency
    outcome: TerminalOutcome
    is_recorded: bool = True
    upstream: Execution | None = None


class JoinCounts(msgspec.Struct, frozen=True):
    """A group after outcomes were counted."""

    succeeded: int
    failed: int
    skipped: int
    state: GroupState
    counted: tuple[UpstreamOutcome, ...]
    verdicts: tuple[Verdict, ...]  # one per outcome, counted or not
    fired_by: Dependency | None = None

    def cancels_siblings(self, group: EdgeGroup) -> bool:
        """True if the other upstreams have to be cancelled now."""
        return self.fired_by is not None and group.on_satisfied is OnSatisfied.CANCEL_REMAINING

    def skips(self, child: Execution | None) -> bool:
        """True if the child can no longer run."""
        return self.fired_by is not None and self.state is GroupState.IMPOSSIBLE and _is_open(child)

    def result_edges(self, group: EdgeGroup, child: Execution | None) -> list[Dependency]:
        """Return the edges whose result may become the child's input; the first with a result wins."""
        if not _is_open(child) or group.group_state is not GroupState.PENDING:
            return []
        if group.policy_variant is JoinPolicyKind.ALL_OF:
            # Up to the outcome that made it impossible: a replay of the child continues from what arrived before.
            edges = [outcome.dependency for outcome in takewhile(is_satisfying, self.counted)]
        else:
            edges = [] if self.fired_by is None or self.state is GroupState.IMPOSSIBLE else [self.fired_by]
        return [edge for edge in reversed(edges) if edge.data_passing_ref]


def _is_open(child: Execution | None) -> bool:
    return child is not None and child.terminal_outcome is TerminalOutcome.NONE


def satisfies(kind: DependencyKind, outcome: TerminalOutcome) -> bool:
    """True if this outcome of the upstream satisfies an edge of this kind."""
    if kind is DependencyKind.ANY_OUTCOME:
        return True
    return (outcome is TerminalOutcome.SUCCESS) == (kind is DependencyKind.SUCCESS_ONLY)


def is_satisfying(upstream_outcome: UpstreamOutcome) -> bool:
    """True if the upstream ended as its edge requires."""
    return satisfies(upstream_outcome.dependency.dependency_kind, upstream_outcome.outcome)


def current_outcome(dependency: Dependency, upstream: Execution | None) -> TerminalOutcome | None:
    """Return how the upstream of an edge has ended; None while it lives, also after a replay.

    If retention has removed the upstream, the outcome recorded on the edge is final.
    """
    if upstream is None:
        return dependency.outcome
    return upstream.terminal_outcome if upstream.lifecycle_phase is LifecyclePhase.TERMINAL else None


def evaluate(group: EdgeGroup, succeeded: int, unsuccessful: int) -> GroupState:
    """Return the state of a pending group with these counts."""
    if group.policy_variant is JoinPolicyKind.ALL_OF:
        if succeeded == group.n:
            return GroupState.SATISFIED
        return GroupState.IMPOSSIBLE if unsuccessful else GroupState.PENDING
    if succeeded >= group.k:
        return GroupState.SATISFIED
    return GroupState.IMPOSSIBLE if unsuccessful > group.n - group.k else GroupState.PENDING


def count_outcomes(group: EdgeGroup, outcomes: Sequence[UpstreamOutcome]) -> JoinCounts:
    """Count outcomes in the order of their arrival; an edge that was counted before is ignored."""
    succeeded, failed, skipped = group.succeeded, group.failed, group.skipped
    state, fired_by = group.group_state, None
    counted, verdicts = [], []
    for outcome in sorted(outcomes, key=arrival_order) if len(outcomes) > 1 else outcomes:
        if outcome.dependency.state is not DependencyState.UNSATISFIED:
            verdicts.append(Verdict.ALREADY_RESOLVED)
            continue
        counted.append(outcome)
        if is_satisfying(outcome):
            succeeded += 1
        elif outcome.outcome is TerminalOutcome.SKIPPED:
            skipped += 1
        else:
            failed += 1
        if state is not GroupState.PENDING:
            verdicts.append(Verdict.ALREADY_FIRED)
            continue
        state = evaluate(group, succeeded, failed + skipped)
        if state is not GroupState.PENDING:
            fired_by = outcome.dependency
        verdicts.append(Verdict(state.value))
    return JoinCounts(succeeded, failed, skipped, state, tuple(counted), tuple(verdicts), fired_by)


def arrival_order(outcome: UpstreamOutcome) -> tuple[int, str]:
    """The order in which outcomes are counted: by arrival, then by edge."""
    return outcome.dependency.unfolded_at or 0, outcome.dependency.edge_id


class JoinContext(msgspec.Struct, frozen=True):
    """Further rows that a resolution needs, as far as its counts ask for them."""

    siblings: Sequence[str] = ()  # upstreams that have not ended, if they are to be cancelled
    passed_result: tuple[Payload, Result] | None = None  # the child's input and the result that replaces it
    flow: Flow | None = None  # loaded if the child is skipped
    cancel_pending: bool = False  # the child is in the cancel backlog of its flow


def running_siblings(inbound: Sequence[Dependency], counts: JoinCounts, replayed: Mapping[str, Execution]) -> list[str]:
    """Return the upstreams that have not ended: no outcome on their edges, or replayed since."""
    ended = {outcome.dependency.upstream_execution_id for outcome in counts.counted}
    running = {edge.upstream_execution_id for edge in inbound if edge.outcome is None} - ended
    running |= {name for name, row in replayed.items() if row.lifecycle_phase is not LifecyclePhase.TERMINAL}
    return sorted(running & {edge.upstream_execution_id for edge in inbound})


class JoinResolution(msgspec.Struct, frozen=True):
    """The result of resolving a join: a verdict per outcome in order of arrival, and whether the child was skipped."""

    verdicts: tuple[Verdict, ...]
    resolved: int = 0
    skipped: bool = False


def resolve_join(
    group: EdgeGroup, child: Execution | None, counts: JoinCounts, context: JoinContext
) -> Decision[JoinResolution]:
    """Count outcomes and apply the consequences: release the child, skip it, flag its other upstreams.

    The change guards the group, and the child and its flow where they are affected.
    """
    if not counts.counted:
        return Decision(JoinResolution(counts.verdicts))
    total = counts.succeeded + counts.failed + counts.skipped
    if total > group.n:
        return Decision(errors.BugError(f"invariant_violation: {total} outcomes of {group.n} edges"))
    key = (group.flow_id, group.downstream_execution_id)
    guards: list[Guard] = [seen_group(group, *key)]
    fields: dict[str, Any] = {
        "succeeded": counts.succeeded,
        "failed": counts.failed,
        "skipped": counts.skipped,
        **_fired_fields(group, counts, context),
    }
    writes: list[Write] = [Patch(EdgeGroup, key, fields), *map(_resolve_dependency, counts.counted)]
    events: tuple[Event, ...] = ()
    if counts.cancels_siblings(group):
        writes.append(Upsert(PendingSiblingCancel(*key, NOW)))
    result_edges = counts.result_edges(group, child)
    passed_result = context.passed_result if result_edges else None
    if child is not None and (counts.fired_by is not None or passed_result is not None):
        # Also if the child does not change: its worker may be about to make it wait for this group.
        guards.append(seen(child))
    unproven_edges = [
        *_edges_without_result(result_edges, passed_result),
        *(outcome.dependency for outcome in counts.counted if not outcome.is_recorded),
    ]
    guards += {edge.edge_id: seen_dependency(edge) for edge in unproven_edges}.values()
    upstreams = {
        outcome.upstream.execution_id: outcome.upstream for outcome in counts.counted if outcome.upstream is not None
    }
    guards += map(seen, upstreams.values())
    if passed_result is not None:
        writes.append(_pass_result(*passed_result))
    skips = counts.skips(child) and not context.cancel_pending
    if skips and child is not None:
        skip = skip_child(child)
        writes += skip.writes
        events = skip.events
        if context.flow is not None:
            # A flow cancel that commits first lists the child in its backlog, so it must win.
            guards.append(seen_flow(context.flow))
    elif counts.fired_by is not None and counts.state is GroupState.SATISFIED and waits_for_dependencies(child):
        writes.append(release_child(child))
    change = Change(guards=tuple(guards), writes=tuple(writes), events=events)
    return Decision(JoinResolution(counts.verdicts, len(counts.counted), skips), change)


def seen_dependency(dependency: Dependency) -> Guard:
    """Return a guard on the edge as it was loaded."""
    return Guard(Dependency, (dependency.downstream_execution_id, dependency.edge_id), dependency.revision)


def _edges_without_result(
    edges: Sequence[Dependency], passed_result: tuple[Payload, Result] | None
) -> Iterable[Dependency]:
    """Return the edges that passed no result. They are guarded: a replay removes a result and writes the edge."""
    provider = None if passed_result is None else passed_result[1].execution_id
    return takewhile(lambda edge: edge.upstream_execution_id != provider, edges)


def _fired_fields(group: EdgeGroup, counts: JoinCounts, context: JoinContext) -> dict[str, Any]:
    if counts.fired_by is None:
        return {}
    satisfied = counts.state is GroupState.SATISFIED
    fields: dict[str, Any] = {
        "group_state": counts.state,
        "waiting_since": None,
        "satisfied_at": NOW if satisfied else None,
    }
    if counts.cancels_siblings(group):
        fields.update(sibling_cancel_fields(context.siblings, satisfied=satisfied))
    return fields


def sibling_cancel_fields(siblings: Sequence[str], *, satisfied: bool) -> dict[str, Any]:
    """Return the columns of a fired group whose other upstreams are to be cancelled; the list may be empty."""
    return {
        "cancel_siblings_pending_flag": True,
        "cancel_siblings_pending_members": "|".join(sorted(siblings)) or None,
        "cancel_siblings_reason": cancel.QUORUM_SATISFIED if satisfied else cancel.QUORUM_IMPOSSIBLE,
    }


def _resolve_dependency(outcome: UpstreamOutcome) -> Patch:
    fields = {
        "state": DependencyState.SATISFIED if is_satisfying(outcome) else DependencyState.IMPOSSIBLE,
        "outcome": outcome.outcome,
        "last_resolved_at": NOW,
        "unfolded_at": None,
    }
    return Patch(Dependency, (outcome.dependency.downstream_execution_id, outcome.dependency.edge_id), fields)


def _pass_result(payload: Payload, result: Result) -> Upsert:
    """Return the write that replaces the child's input and encoding by the upstream's result."""
    encoding = result.encoding or payload.payload_encoding
    return Upsert(msgspec.structs.replace(payload, input_payload=result.payload or None, payload_encoding=encoding))
