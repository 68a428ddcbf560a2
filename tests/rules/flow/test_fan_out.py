"""An outcome with many dependents is dispatched in steps: each edge once, and the dispatch row records the progress."""

from __future__ import annotations

from flowfabric.model.change import Delete, Guard, Patch
from flowfabric.model.flow import CompletionDispatch, Dependency, DependencyKind, Edge, EdgeGroup, JoinPolicyKind
from flowfabric.model.states import TerminalOutcome
from flowfabric.rules.flow.fan_out import FanOutEdge, FanOutStep, fan_out
from tests.rules.flow.test_joins import CHILD, child, edge, group

OWED = CompletionDispatch("u0", "f", TerminalOutcome.SUCCESS, 0, revision=7)


def ahead(number: int, waits_for: EdgeGroup | None, dependency: Dependency | None) -> FanOutEdge:
    leads = Edge("f", f"e{number:03}", "u0", CHILD, DependencyKind.SUCCESS_ONLY, 0)
    return FanOutEdge(leads, waits_for, child() if waits_for else None, dependency)


ALONE = ahead(0, group(JoinPolicyKind.ALL_OF, 1), edge(0))
WITH_OTHERS = ahead(1, group(JoinPolicyKind.ALL_OF, 2), edge(1))
STAGED = ahead(2, None, None)


def test_a_child_with_a_single_edge_is_advanced_at_once_and_the_others_are_left_to_the_resolver() -> None:
    decision = fan_out(OWED, [ALONE, WITH_OTHERS, STAGED], is_last=True, inline=True)

    assert decision.answer == FanOutStep(3, (edge(1),), is_last=True)
    assert decision.change is not None
    assert decision.change.guards[0] == Guard(CompletionDispatch, ("u0",), 7)
    assert {guard.row for guard in decision.change.guards[1:]} == {EdgeGroup, type(ALONE.child)}
    assert decision.change.writes[0] == Delete(CompletionDispatch, ("u0",))
    noted = [write.key for write in decision.change.writes if isinstance(write, Patch) and write.row is Dependency]
    assert noted == [(CHILD, "e000"), (CHILD, "e001")], "an edge that is only staged is not marked"


def test_without_inline_advance_every_edge_is_left_to_the_resolver() -> None:
    decision = fan_out(OWED, [ALONE, WITH_OTHERS], is_last=True, inline=False)

    assert decision.answer == FanOutStep(2, (edge(0), edge(1)), is_last=True)
    assert decision.change is not None
    assert decision.change.guards == (Guard(CompletionDispatch, ("u0",), 7),)


def test_a_child_that_the_outcome_skips_is_left_to_the_resolver_which_loads_its_flow() -> None:
    failed = CompletionDispatch("u0", "f", TerminalOutcome.FAILED, 0, revision=7)

    decision = fan_out(failed, [ALONE], is_last=True, inline=True)

    assert decision.answer == FanOutStep(1, (edge(0),), is_last=True)
    assert decision.change is not None
    assert decision.change.events == ()
    assert decision.change.guards == (Guard(CompletionDispatch, ("u0",), 7),)


def test_a_step_that_is_not_the_last_records_its_progress() -> None:
    decision = fan_out(OWED, [ALONE, WITH_OTHERS], is_last=False, inline=True)

    assert decision.change is not None
    assert decision.change.writes[0] == Patch(CompletionDispatch, ("u0",), {"after_edge": "e001"})


def test_a_deleted_dispatch_row_leaves_nothing_to_do() -> None:
    assert fan_out(None, (), is_last=True, inline=True).change is None
