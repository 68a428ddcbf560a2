"""Flow views row by row: a join in numbers, the state of a flow, and when a summary is written."""

from __future__ import annotations

from msgspec.structs import replace

from flowfabric.model.change import Patch, Upsert
from flowfabric.model.flow import EdgeGroup, Flow, FlowState, FlowSummary
from flowfabric.rules.flow import views
from tests.rules.flow.test_guards import CHILD, FLOW, GROUP, SKIPPED, flow


def running(join: EdgeGroup) -> int:
    return views.group_snapshot(join).running_count


def test_an_upstream_without_an_outcome_counts_as_running() -> None:
    assert running(replace(GROUP, n=9, succeeded=1, failed=2, skipped=3)) == 3
    assert running(replace(GROUP, n=3, succeeded=1, failed=1, skipped=1)) == 0
    assert running(replace(GROUP, n=0, succeeded=1)) == 0, "a spoilt count is no reason for less than nothing"


def test_a_flow_is_active_until_all_members_have_finished() -> None:
    words = {state: views.flow_status(replace(FLOW, public_flow_state=state)).status for state in FlowState}

    active = {FlowState.OPEN, FlowState.RUNNING, FlowState.BLOCKED}
    assert words == {state: "active" if state in active else state.value for state in FlowState}


def test_a_flow_without_members_gets_no_summary_and_is_not_projected_again() -> None:
    decision = views.project_summary(FLOW, 1, [])

    assert decision.answer is False
    assert decision.change is not None
    assert decision.change.guards == (flow,)
    assert decision.change.writes == (Patch(Flow, (FLOW.flow_id,), {"project_at": None}),)
    assert views.project_summary(replace(FLOW, project_at=None), 1, []).change is None


def test_a_flow_that_needs_no_projection_gets_a_summary_and_is_not_projected_again() -> None:
    decision = views.project_summary(replace(FLOW, project_at=None), 2, [CHILD, SKIPPED])

    assert decision.answer is True
    assert decision.change is not None
    [write] = decision.change.writes
    assert isinstance(write, Upsert)
    assert isinstance(write.row, FlowSummary)
    assert (write.row.members_waiting, write.row.members_skipped) == (1, 1)
