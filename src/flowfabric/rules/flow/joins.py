"""Joins: how the ends of upstream executions let a downstream run, or make it impossible.

A group counts the ends of its inbound edges in three buckets and fires once: satisfied or impossible. Ends arrive
many at a time; they are counted one after another, so that the result is the same as if each had come alone:

    policy      satisfied when      impossible when
    all_of      succeeded == n      failed + skipped >= 1
    any_of      succeeded >= 1      failed + skipped > n - 1
    quorum(k)   succeeded >= k      failed + skipped > n - k

Satisfied is asked first. An end that satisfies its edge counts as succeeded, whatever the end was (`DependencyKind`);
any other counts as skipped when the upstream was skipped, else as failed. What a fold needs to know beyond group,
child and dependencies depends on what it finds: `Tally` tells, so that nothing is loaded in vain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import takewhile
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.change import (
    NOW,
    Change,
    ColumnRef,
    Expected,
    Guard,
    Patch,
    Upsert,
    Write,
    expect,
    from_now,
    seen,
)
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution, Payload, QueueKey, Result
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
from flowfabric.model.states import (
    AttemptRecordState,
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import cancel, lease, transitions
from flowfabric.rules.flow.build import seen_flow, seen_group
from flowfabric.rules.scheduling import queue

IMPOSSIBLE_REASON = "dependency_impossible"


class Verdict(StrEnum):
    """What one end meant to the group."""

    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"
    PENDING = "pending"
    ALREADY_FIRED = "already_fired"
    ALREADY_RESOLVED = "already_resolved"


class UpstreamOutcome(msgspec.Struct, frozen=True, gc=False):
    """An edge and how its upstream ended.

    An end that is not noted on the edge counts only while the edge is as it was seen: another life of the upstream
    writes it. That of an `upstream` with many edges is written after them: it counts only while that is as it was seen.
    """

    dependency: Dependency
    outcome: TerminalOutcome
    is_recorded: bool = True
    upstream: Execution | None = None


class JoinCounts(msgspec.Struct, frozen=True):
    """A group after some ends were counted: what is to be written, and what that means."""

    succeeded: int
    failed: int
    skipped: int
    state: GroupState
    counted: tuple[UpstreamOutcome, ...]
    verdicts: tuple[Verdict, ...]  # one for each settlement, counted or not
    fired_by: Dependency | None = None

    def cancels_siblings(self, group: EdgeGroup) -> bool:
        """Whether the other upstreams have to be cancelled now."""
        return self.fired_by is not None and group.on_satisfied is OnSatisfied.CANCEL_REMAINING

    def skips(self, child: Execution | None) -> bool:
        """Whether the child can no longer run."""
        return self.fired_by is not None and self.state is GroupState.IMPOSSIBLE and _is_open(child)

    def result_edges(self, group: EdgeGroup, child: Execution | None) -> list[Dependency]:
        """The edges whose upstream's result becomes the child's input: the first of them that has a result does."""
        if not _is_open(child) or group.group_state is not GroupState.PENDING:
            return []
        if group.policy_variant is JoinPolicyKind.ALL_OF:
            # Up to the end that made it impossible: a replay of the child goes on from what had come until then.
            found = [one.dependency for one in takewhile(is_satisfying, self.counted)]
        else:
            found = [] if self.fired_by is None or self.state is GroupState.IMPOSSIBLE else [self.fired_by]
        return [one for one in reversed(found) if one.data_passing_ref]


def _is_open(child: Execution | None) -> bool:
    return child is not None and child.terminal_outcome is TerminalOutcome.NONE


def satisfies(kind: DependencyKind, outcome: TerminalOutcome) -> bool:
    """Whether this end of the upstream is one that the edge asks for."""
    if kind is DependencyKind.ANY_OUTCOME:
        return True
    return (outcome is TerminalOutcome.SUCCESS) == (kind is DependencyKind.SUCCESS_ONLY)


def is_satisfying(one: UpstreamOutcome) -> bool:
    """Whether the upstream ended as its edge asks."""
    return satisfies(one.dependency.dependency_kind, one.outcome)


def current_outcome(one: Dependency, upstream: Execution | None) -> TerminalOutcome | None:
    """How the upstream of an edge has ended as things are now; None for one that lives, even if it had ended before.

    Of an upstream that retention has removed, what it left on the edge is the last word.
    """
    if upstream is None:
        return one.outcome
    return upstream.terminal_outcome if upstream.lifecycle_phase is LifecyclePhase.TERMINAL else None


def evaluate(group: EdgeGroup, succeeded: int, unsuccessful: int) -> GroupState:
    """What these counts make of a pending group."""
    if group.policy_variant is JoinPolicyKind.ALL_OF:
        if succeeded == group.n:
            return GroupState.SATISFIED
        return GroupState.IMPOSSIBLE if unsuccessful else GroupState.PENDING
    if succeeded >= group.k:
        return GroupState.SATISFIED
    return GroupState.IMPOSSIBLE if unsuccessful > group.n - group.k else GroupState.PENDING


def count_outcomes(group: EdgeGroup, settlements: Sequence[UpstreamOutcome]) -> JoinCounts:
    """Count the ends in the order in which they came; an edge that was counted before is passed over."""
    succeeded, failed, skipped = group.succeeded, group.failed, group.skipped
    state, fired_by = group.group_state, None
    counted, verdicts = [], []
    for one in sorted(settlements, key=arrival_order) if len(settlements) > 1 else settlements:
        if one.dependency.state is not DependencyState.UNSATISFIED:
            verdicts.append(Verdict.ALREADY_RESOLVED)
            continue
        counted.append(one)
        if is_satisfying(one):
            succeeded += 1
        elif one.outcome is TerminalOutcome.SKIPPED:
            skipped += 1
        else:
            failed += 1
        if state is not GroupState.PENDING:
            verdicts.append(Verdict.ALREADY_FIRED)
            continue
        state = evaluate(group, succeeded, failed + skipped)
        if state is not GroupState.PENDING:
            fired_by = one.dependency
        verdicts.append(Verdict(state.value))
    return JoinCounts(succeeded, failed, skipped, state, tuple(counted), tuple(verdicts), fired_by)


def arrival_order(one: UpstreamOutcome) -> tuple[int, str]:
    """The order in which ends are counted: when they came, then by edge."""
    return one.dependency.unfolded_at or 0, one.dependency.edge_id


class JoinContext(msgspec.Struct, frozen=True):
    """What a fold has to know besides group, child and dependencies, as far as its tally asks for it."""

    siblings: Sequence[str] = ()  # the upstreams that have not ended, when they are flagged
    passed_result: tuple[Payload, Result] | None = None  # the child's input, and the result that replaces it if it may
    flow: Flow | None = None  # when the child is skipped
    cancel_pending: bool = False  # the child is about to be cancelled with its flow


def running_siblings(inbound: Sequence[Dependency], counts: JoinCounts, again: Mapping[str, Execution]) -> list[str]:
    """The upstreams that have not ended: no end came to their edges, or they live all the same (`again`)."""
    over = {one.dependency.upstream_execution_id for one in counts.counted}
    going = {one.upstream_execution_id for one in inbound if one.outcome is None} - over
    going |= {name for name, row in again.items() if row.lifecycle_phase is not LifecyclePhase.TERMINAL}
    return sorted(going & {one.upstream_execution_id for one in inbound})


class JoinResolution(msgspec.Struct, frozen=True):
    """What a fold did: a verdict for each settlement in order of arrival, and whether the child ended by it."""

    verdicts: tuple[Verdict, ...]
    resolved: int = 0
    skipped: bool = False


def resolve_join(
    group: EdgeGroup, child: Execution | None, counts: JoinCounts, around: JoinContext
) -> Decision[JoinResolution]:
    """Count settled edges and do what follows: let the child run, skip it, flag its other upstreams.

    The change is decided on the group; and on the child and its flow where those are touched.
    """
    if not counts.counted:
        return Decision(JoinResolution(counts.verdicts))
    total = counts.succeeded + counts.failed + counts.skipped
    if total > group.n:
        return Decision(errors.BugError(f"invariant_violation: {total} ends of {group.n} edges"))
    key = (group.flow_id, group.downstream_execution_id)
    guards: list[Guard] = [seen_group(group, *key)]
    fields: dict[str, Any] = {
        "succeeded": counts.succeeded,
        "failed": counts.failed,
        "skipped": counts.skipped,
        **_fired(group, counts, around),
    }
    writes: list[Write] = [Patch(EdgeGroup, key, fields), *map(_resolved, counts.counted)]
    events: tuple[Event, ...] = ()
    if counts.cancels_siblings(group):
        writes.append(Upsert(PendingSiblingCancel(*key, from_now(0))))
    carriers = counts.result_edges(group, child)
    carried = around.passed_result if carriers else None
    if child is not None and (counts.fired_by is not None or carried is not None):
        # Also when the child is left as it is: its worker may be about to park it until this group fires.
        guards.append(seen(child))
    relied_on = [
        *_without_result(carriers, carried),
        *(one.dependency for one in counts.counted if not one.is_recorded),
    ]
    guards += {one.edge_id: seen_dependency(one) for one in relied_on}.values()
    lived = {one.upstream.execution_id: one.upstream for one in counts.counted if one.upstream is not None}
    guards += map(seen, lived.values())
    if carried is not None:
        writes.append(_pass_result(*carried))
    skips = counts.skips(child) and not around.cancel_pending
    if skips and child is not None:
        ended = skip_child(child)
        writes += ended.writes
        events = ended.events
        if around.flow is not None:
            # Decided on the flow as well: its cancel, when it comes first, wants the child for itself.
            guards.append(seen_flow(around.flow))
    elif counts.fired_by is not None and counts.state is GroupState.SATISFIED and waits_for_dependencies(child):
        writes.append(release_child(child))
    change = Change(guards=tuple(guards), writes=tuple(writes), events=events)
    return Decision(JoinResolution(counts.verdicts, len(counts.counted), skips), change)


def seen_dependency(one: Dependency) -> Guard:
    """The edge as the rule saw it."""
    return Guard(Dependency, (one.downstream_execution_id, one.edge_id), one.revision)


def _without_result(carriers: Sequence[Dependency], carried: tuple[Payload, Result] | None) -> Iterable[Dependency]:
    """The edges that handed nothing on. A replay takes a result away, and the note on the edge with it."""
    found = None if carried is None else carried[1].execution_id
    return takewhile(lambda one: one.upstream_execution_id != found, carriers)


def inline_release(
    group: EdgeGroup, child: Execution, settlement: UpstreamOutcome, around: JoinContext
) -> Change | None:
    """The fold of a child that waits for this edge alone, to be written with whatever settles the edge.

    None when it waits for others by now, has counted an end already, or needs a closer look than this.
    """
    if group.n != 1 or group.succeeded or group.failed or group.skipped:
        return None
    counts = count_outcomes(group, [settlement])
    if counts.cancels_siblings(group) or counts.skips(child):
        return None
    return resolve_join(group, child, counts, around).change


# A group that waits for one edge and has counted nothing, and a child that has never run and waits for that alone.
EXPECTED_GROUP = Expected(
    {
        "policy_variant": JoinPolicyKind.ALL_OF,
        "n": 1,
        "succeeded": 0,
        "failed": 0,
        "skipped": 0,
        "group_state": GroupState.PENDING,
    }
)
EXPECTED_CHILD = Expected(
    {
        "lifecycle_phase": LifecyclePhase.RUNNABLE,
        "ownership_state": OwnershipState.UNOWNED,
        "eligibility_state": EligibilityState.BLOCKED_BY_DEPENDENCIES,
        "terminal_outcome": TerminalOutcome.NONE,
        "attempt_state": AttemptState.PENDING_FIRST_ATTEMPT,
        "next_type": AttemptType.INITIAL,
    }
)


def inline_release_without_load(
    flow_id: str, edge_id: str, child: str, line: QueueKey, carried: tuple[Payload, Result] | None = None
) -> Change:
    """What `advance` says of a success when group and child are as applying the edge left them; the store proves it.

    `line` is where the child belongs by what never changes of it.
    """
    counted, resolved, stands = _advanced(line)
    key = (flow_id, child)
    writes: tuple[Write, ...] = (
        Patch(EdgeGroup, key, counted),
        Patch(Dependency, (child, edge_id), resolved),
        Patch(Execution, (child,), stands),
    )
    if carried is not None:
        writes += (_pass_result(*carried),)
    guards = (expect(EdgeGroup, EXPECTED_GROUP, *key), expect(Execution, EXPECTED_CHILD, child))
    return Change(guards=guards, writes=writes)


@lru_cache(maxsize=1024)
def _advanced(line: QueueKey) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The fields that group, dependency and child get, taken from what the rule makes of rows that look like that."""
    group = EdgeGroup(
        **(
            {name: ColumnRef(name) for name in EdgeGroup.__struct_fields__}
            | {"on_satisfied": None}
            | EXPECTED_GROUP.fields
        )
    )
    columns = {name: ColumnRef(name) for name in Execution.__struct_fields__} | {
        "lane_id": "",
        "required_capabilities": None,
        "terms": None,
    }
    child = Execution(**(columns | EXPECTED_CHILD.fields))
    settlement = UpstreamOutcome(Dependency("", "", "", "", DependencyKind.SUCCESS_ONLY), TerminalOutcome.SUCCESS)
    change = inline_release(group, child, settlement, JoinContext())
    assert change is not None
    counted, resolved, stands = (write.fields for write in change.writes if isinstance(write, Patch))
    # A first attempt has had its kind and its time since the create.
    stands = {name: value for name, value in stands.items() if name not in ("next_type", "next_timeout_ms")}
    return counted, resolved, stands | {"line": line}


def _fired(group: EdgeGroup, counts: JoinCounts, around: JoinContext) -> dict[str, Any]:
    if counts.fired_by is None:
        return {}
    satisfied = counts.state is GroupState.SATISFIED
    fields: dict[str, Any] = {
        "group_state": counts.state,
        "waiting_since": None,
        "satisfied_at": NOW if satisfied else None,
    }
    if counts.cancels_siblings(group):
        fields.update(sibling_cancel_fields(around.siblings, satisfied=satisfied))
    return fields


def sibling_cancel_fields(siblings: Sequence[str], *, satisfied: bool) -> dict[str, Any]:
    """The fields of a fired group whose other upstreams are to be cancelled; the list may be empty."""
    return {
        "cancel_siblings_pending_flag": True,
        "cancel_siblings_pending_members": "|".join(sorted(siblings)) or None,
        "cancel_siblings_reason": cancel.QUORUM_SATISFIED if satisfied else cancel.QUORUM_IMPOSSIBLE,
    }


def _resolved(one: UpstreamOutcome) -> Patch:
    fields = {
        "state": DependencyState.SATISFIED if is_satisfying(one) else DependencyState.IMPOSSIBLE,
        "outcome": one.outcome,
        "last_resolved_at": NOW,
        "unfolded_at": None,
    }
    return Patch(Dependency, (one.dependency.downstream_execution_id, one.dependency.edge_id), fields)


def _pass_result(payload: Payload, result: Result) -> Upsert:
    """The upstream's result in place of the child's input, bytes and encoding."""
    encoding = result.encoding or payload.payload_encoding
    return Upsert(msgspec.structs.replace(payload, input_payload=result.payload or None, payload_encoding=encoding))


def waits_for_dependencies(child: Execution | None) -> bool:
    """Whether the child waits for its dependencies and for nothing else."""
    return (
        child is not None
        and child.lifecycle_phase is LifecyclePhase.RUNNABLE
        and child.ownership_state is OwnershipState.UNOWNED
        and child.terminal_outcome is TerminalOutcome.NONE
        and child.eligibility_state is EligibilityState.BLOCKED_BY_DEPENDENCIES
    )


def release_child(child: Execution | None) -> Patch:
    """A child whose dependencies are met stands in line for a worker."""
    assert child is not None
    fields: dict[str, Any] = {}
    state = child.attempt_state
    if state is AttemptState.NONE:
        fields["attempt_state"] = state = AttemptState.PENDING_FIRST_ATTEMPT
    fields.update(queue.enqueue_fields(child, state))
    return transitions.transition(child, fields)


def waiting_fields(text: str) -> dict[str, Any]:
    """The fields of an execution that waits for others and can be claimed by nobody."""
    return {
        "eligibility_state": EligibilityState.BLOCKED_BY_DEPENDENCIES,
        "blocking_reason": BlockingReason.WAITING_FOR_CHILDREN,
        "blocking_text": text,
        "delay_until": None,
        "blocked_on": None,
        "blocked_at": None,
        "line": None,
    }


def skip_child(child: Execution) -> Change:
    """The end of an execution that can never run: nothing it waits for can come any more."""
    fields: dict[str, Any] = {} if lease.has_open_attempt(child) else {"attempt_state": AttemptState.NONE}
    return transitions.terminate(
        child,
        TerminalOutcome.SKIPPED,
        attempt=AttemptRecordState.ENDED_CANCELLED,
        attempt_reason=IMPOSSIBLE_REASON,
        release_reason=IMPOSSIBLE_REASON,
        suspension_reason=TerminalOutcome.CANCELLED.value,
        **fields,
    )
