"""Dependencies row by row: what an applied edge adds, and when dependencies let an execution run."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers.execution import Moved
from flowfabric.model.answers.flow import DependencyApplied, Eligibility
from flowfabric.model.change import Change, Insert, Patch, Upsert
from flowfabric.model.execution import Execution
from flowfabric.model.flow import (
    Dependency,
    DependencyState,
    EdgeGroup,
    GroupState,
    JoinPolicyKind,
    OnSatisfied,
    PendingSiblingCancel,
)
from flowfabric.model.instant import Draft, FromNow
from flowfabric.model.states import OwnershipState, PublicState, TerminalOutcome
from flowfabric.rules.execution.cancel import QUORUM_SATISFIED
from flowfabric.rules.flow import dependencies, downstreams
from tests.rules.execution.rows import EXECUTION, NOW
from tests.rules.execution.test_guards import TERMINAL, row
from tests.rules.flow.test_guards import APPLY, BLOCKED, CHILD, EDGE, GROUP, SKIPPED, UPSTREAM, U


def group(**own: Any) -> EdgeGroup:
    return replace(GROUP, **own)


MET = {"a join that is met": group(group_state=GroupState.SATISFIED), "nobody": None, "no edge": group(n=0)}
UNMET = {"pending": group(), "impossible": group(group_state=GroupState.IMPOSSIBLE)}


@pytest.mark.parametrize("join", MET.values(), ids=MET.keys())
def test_a_blocked_execution_is_promoted_once_its_dependencies_are_met(join: EdgeGroup | None) -> None:
    decision = dependencies.promote_blocked(BLOCKED, join)

    assert decision.answer == Moved(EXECUTION, PublicState.WAITING)
    assert decision.change is not None
    assert decision.change.writes == (downstreams.release_child(BLOCKED),)


@pytest.mark.parametrize("join", UNMET.values(), ids=UNMET.keys())
def test_an_execution_with_unmet_dependencies_is_not_promoted(join: EdgeGroup) -> None:
    decision = dependencies.promote_blocked(BLOCKED, join)

    assert isinstance(decision.answer, errors.DepsNotSatisfied)
    assert decision.change is None


VERDICTS: dict[str, tuple[Execution | None, EdgeGroup | None, Eligibility]] = {
    "gone": (None, None, Eligibility.NOT_FOUND),
    "ended": (SKIPPED, None, Eligibility.NOT_RUNNABLE),
    "owned": (replace(CHILD, ownership_state=OwnershipState.LEASED), group(), Eligibility.OWNED),
    "with an outcome": (replace(CHILD, terminal_outcome=TerminalOutcome.FAILED), group(), Eligibility.TERMINAL),
    "impossible": (CHILD, UNMET["impossible"], Eligibility.IMPOSSIBLE),
    "waiting": (CHILD, UNMET["pending"], Eligibility.BLOCKED_BY_DEPENDENCIES),
    "with a join without an edge": (CHILD, MET["no edge"], Eligibility.ELIGIBLE),
    "with a join that is met": (CHILD, MET["a join that is met"], Eligibility.ELIGIBLE),
    "without a join": (CHILD, None, Eligibility.ELIGIBLE),
}


@pytest.mark.parametrize(("one", "join", "verdict"), VERDICTS.values(), ids=VERDICTS.keys())
def test_dependencies_decide_whether_an_execution_may_run(
    one: Execution | None, join: EdgeGroup | None, verdict: Eligibility
) -> None:
    assert dependencies.dependency_eligibility(one, join) is verdict


def applied(
    upstream: Execution | None, join: EdgeGroup | None, **own: Any
) -> tuple[Any, EdgeGroup[Draft], Dependency[Draft]]:
    """Return the answer, the join and the edge after another edge was applied."""
    decision = dependencies.apply_dependency(CHILD, upstream, EDGE, None, join, replace(APPLY, **own))
    assert decision.change is not None
    after, dependency, *_ = decision.change.writes
    assert isinstance(after, Upsert)
    assert isinstance(after.row, EdgeGroup)
    assert isinstance(dependency, Insert)
    assert isinstance(dependency.row, Dependency)
    return decision.answer, after.row, dependency.row


def test_an_applied_edge_adds_one_outcome_to_wait_for() -> None:
    quorum = {"policy_variant": JoinPolicyKind.QUORUM, "k": 4, "on_satisfied": OnSatisfied.LET_RUN}
    join = group(**quorum, n=7, succeeded=1, failed=2, skipped=3, waiting_since=NOW - 5)

    answer, after, dependency = applied(UPSTREAM, join)

    assert answer == DependencyApplied(2)
    assert (after.n, after.waiting_since) == (8, NOW - 5)
    assert (dependency.outcome, dependency.unfolded_at, dependency.data_passing_ref) == (None, None, None)


ANY_OF = {"policy_variant": JoinPolicyKind.ANY_OF, "k": 1, "on_satisfied": OnSatisfied.LET_RUN}
MET_ONCE = {"group_state": GroupState.SATISFIED, "satisfied_at": NOW - 5, "succeeded": 1}
# Each: a join that has fired; its state, since when it waits, and when it was met, once another edge is applied.
FIRED: dict[str, tuple[EdgeGroup, GroupState, Any, Any]] = {
    "all_of waits again": (group(**MET_ONCE), GroupState.PENDING, FromNow(), None),
    "any_of is met already": (group(**ANY_OF, **MET_ONCE), GroupState.SATISFIED, None, NOW - 5),
    "impossible for ever": (group(group_state=GroupState.IMPOSSIBLE, failed=1), GroupState.IMPOSSIBLE, None, None),
}


@pytest.mark.parametrize(("join", "state", "waits", "met"), FIRED.values(), ids=FIRED.keys())
def test_a_late_edge_reopens_only_a_join_that_requires_all(
    join: EdgeGroup, state: GroupState, waits: Any, met: Any
) -> None:
    _, after, _ = applied(UPSTREAM, join)

    assert (after.group_state, after.waiting_since, after.satisfied_at, after.n) == (state, waits, met, 2)


def test_the_revision_at_which_an_edge_is_applied_is_recorded() -> None:
    ask = replace(APPLY, graph_revision=7)

    assert dependencies.with_applied_edge(GROUP, ask).last_flow_graph_revision == 7
    assert dependencies.with_applied_edge(group(last_flow_graph_revision=7), APPLY).last_flow_graph_revision == 7


def test_the_data_passed_along_an_edge_is_set_when_it_is_staged_or_applied() -> None:
    passes = replace(EDGE, data_passing_ref="staged")
    for given, kept in ((None, "staged"), ("", "staged"), ("own", "own")):
        ask = replace(APPLY, data_passing_ref=given)
        change = dependencies.apply_dependency(CHILD, UPSTREAM, passes, None, GROUP, ask).change
        assert change is not None
        [dependency] = [write.row for write in change.writes if isinstance(write, Insert)]
        assert isinstance(dependency, Dependency)
        assert dependency.data_passing_ref == kept


def test_an_outcome_that_precedes_the_edge_is_recorded_with_it() -> None:
    ended = replace(row(TERMINAL, terminal_outcome=TerminalOutcome.FAILED), execution_id=U)

    _, _, dependency = applied(ended, GROUP)

    assert (dependency.outcome, dependency.unfolded_at) == (TerminalOutcome.FAILED, FromNow())


def test_an_edge_from_a_purged_execution_is_refused() -> None:
    decision = dependencies.apply_dependency(CHILD, None, EDGE, None, GROUP, APPLY)

    assert isinstance(decision.answer, errors.InvalidDependency)
    assert decision.change is None


V = "{fp:86}:33333333-3333-4333-8333-333333333333"
LIVES = UPSTREAM
OVER = replace(row(TERMINAL, terminal_outcome=TerminalOutcome.SUCCESS), execution_id=V)
CAME = Dependency(EXECUTION, "d", "f", V, EDGE.dependency_kind, DependencyState.SATISFIED)
NEVER_CAME = Dependency(EXECUTION, "e", "f", U, EDGE.dependency_kind, DependencyState.IMPOSSIBLE)
LOST: dict[str, Any] = {"n": 2, "failed": 1, "skipped": 1, "group_state": GroupState.IMPOSSIBLE}


def replayed(join: EdgeGroup) -> Change:
    change = dependencies.replay_skipped_member(SKIPPED, join, [CAME, NEVER_CAME], {U: LIVES, V: OVER}).change
    assert change is not None
    return change


def test_a_replayed_skipped_member_waits_only_for_the_missing_outcomes() -> None:
    change = replayed(group(**LOST))

    [reset] = [write.fields for write in change.writes if isinstance(write, Patch) and write.row is EdgeGroup]
    after: EdgeGroup[Draft] = group(**LOST | reset)
    assert (after.succeeded, after.failed, after.skipped, after.group_state) == (1, 0, 0, GroupState.PENDING)
    assert (after.waiting_since, after.satisfied_at) == (FromNow(), None)
    edges = [write.key for write in change.writes if isinstance(write, Patch) and write.row is Dependency]
    assert edges == [(EXECUTION, "e")]
    written = [write.key for write in change.writes if isinstance(write, Patch) and write.row is Execution]
    assert written == [(EXECUTION,), (U,)], "the upstream that lives, so that its end looks again"
    assert {guard.key for guard in change.guards} == {(EXECUTION,), ("f", EXECUTION), (U,)}


@pytest.mark.parametrize("then", OnSatisfied)
def test_a_replayed_skipped_member_runs_if_enough_outcomes_are_there(then: OnSatisfied) -> None:
    first = {"policy_variant": JoinPolicyKind.ANY_OF, "k": 1, "on_satisfied": then}
    change = replayed(group(**LOST, **first))

    [reset] = [write.fields for write in change.writes if isinstance(write, Patch) and write.row is EdgeGroup]
    after: EdgeGroup[Draft] = group(**LOST | first | reset)
    assert (after.group_state, after.waiting_since, after.satisfied_at) == (GroupState.SATISFIED, None, FromNow())
    edges = [write.key for write in change.writes if isinstance(write, Patch) and write.row is Dependency]
    assert edges == [(EXECUTION, "e")]
    flagged = (after.cancel_siblings_pending_flag, after.cancel_siblings_pending_members, after.cancel_siblings_reason)
    is_listed = PendingSiblingCancel in {type(write.row) for write in change.writes if isinstance(write, Upsert)}
    if then is OnSatisfied.CANCEL_REMAINING:  # The running upstream is no longer needed.
        assert (flagged, is_listed) == ((True, U, QUORUM_SATISFIED), True)
    else:
        assert (flagged, is_listed) == ((False, None, None), False)
