"""Inline release: a completion also releases the downstream that waited for it alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from flowfabric.model.change import Change, ColumnRef, Expected, Patch, Write, expect
from flowfabric.model.execution import Execution, Payload, QueueKey, Result
from flowfabric.model.flow import (
    Dependency,
    DependencyKind,
    EdgeGroup,
    GroupState,
    JoinPolicyKind,
)
from flowfabric.model.states import (
    AttemptState,
    AttemptType,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.rules.flow.joins import JoinContext, UpstreamOutcome, _pass_result, count_outcomes, resolve_join


def inline_release(group: EdgeGroup, child: Execution, outcome: UpstreamOutcome, context: JoinContext) -> Change | None:
    """Return the resolution of a child that waits for this edge only, to commit with the upstream's completion.

    None if the group has other edges, has counted an outcome, or needs further loads.
    """
    if group.n != 1 or group.succeeded or group.failed or group.skipped:
        return None
    counts = count_outcomes(group, [outcome])
    if counts.cancels_siblings(group) or counts.skips(child):
        return None
    return resolve_join(group, child, counts, context).change


# A group with one edge and no counted outcome, and a child that never ran and waits only for that group.
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
    flow_id: str, edge_id: str, child: str, line: QueueKey, passed_result: tuple[Payload, Result] | None = None
) -> Change:
    """Return what `inline_release` decides on success if group and child are as the applied edge left them.

    The store verifies that. `line` is the child's ready queue, which follows from columns that never change.
    """
    counted, resolved, enqueued = _release_fields(line)
    key = (flow_id, child)
    writes: tuple[Write, ...] = (
        Patch(EdgeGroup, key, counted),
        Patch(Dependency, (child, edge_id), resolved),
        Patch(Execution, (child,), enqueued),
    )
    if passed_result is not None:
        writes += (_pass_result(*passed_result),)
    guards = (expect(EdgeGroup, EXPECTED_GROUP, *key), expect(Execution, EXPECTED_CHILD, child))
    return Change(guards=guards, writes=writes)


@lru_cache(maxsize=1024)
def _release_fields(line: QueueKey) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the columns that group, dependency and child get, derived by running the rule on template rows."""
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
    outcome = UpstreamOutcome(Dependency("", "", "", "", DependencyKind.SUCCESS_ONLY), TerminalOutcome.SUCCESS)
    change = inline_release(group, child, outcome, JoinContext())
    assert change is not None
    counted, resolved, enqueued = (write.fields for write in change.writes if isinstance(write, Patch))
    # The create already set type and timeout of the first attempt.
    enqueued = {name: value for name, value in enqueued.items() if name not in ("next_type", "next_timeout_ms")}
    return counted, resolved, enqueued | {"line": line}
