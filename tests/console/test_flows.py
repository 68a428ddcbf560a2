"""What the console draws of a flow: boxes, folded siblings, edges."""

from __future__ import annotations

import pytest

from flowfabric.console.flows import FOLD_ABOVE, MAX_NODE_CHARS, Drawing, Label, draw
from flowfabric.engine.types import FlowGraph
from flowfabric.model.flow import DependencyKind, FlowState, GroupState, JoinPolicyKind
from flowfabric.model.states import PublicState
from flowfabric.rules.flow.views import GraphJoin, GraphLink, GraphNode

DONE, FAILED, WAITING = PublicState.COMPLETED, PublicState.FAILED, PublicState.WAITING
PARTS = 1000


def graph(
    nodes: list[tuple[str, PublicState | None]], edges: list[tuple[int, int]], joins: list[GraphJoin] | None = None
) -> FlowGraph:
    return FlowGraph(
        "flow",
        "film",
        "default",
        FlowState.OPEN,
        3,
        0,
        None,
        None,
        [GraphNode(f"run{number}", kind, state) for number, (kind, state) in enumerate(nodes)],
        [GraphLink(a, b, DependencyKind.SUCCESS_ONLY) for a, b in edges],
        joins or [],
    )


def fan(states: list[PublicState | None]) -> FlowGraph:
    """Return one node before many equal ones, and one after them."""
    nodes: list[tuple[str, PublicState | None]] = [
        ("split", DONE),
        *(("part", state) for state in states),
        ("sum", WAITING),
    ]
    last = len(nodes) - 1
    return graph(nodes, [(0, part) for part in range(1, last)] + [(part, last) for part in range(1, last)])


def labels(drawing: Drawing) -> list[Label]:
    """Return the label of each box."""
    return [drawing.labels[label] for label, _ in drawing.nodes]


def texts(drawing: Drawing) -> list[str]:
    return [label.text for label in labels(drawing)]


def test_every_member_of_a_small_graph_is_a_box_that_leads_to_its_run() -> None:
    drawing = draw(graph([("split", DONE), ("part", FAILED), ("part", None)], [(0, 1), (0, 2)]), frozenset())
    assert texts(drawing) == ["✓ split", "✕ part", "· part"]
    assert [(label.colour, label.state, label.is_folded) for label in labels(drawing)] == [
        ("ok", "completed", False),
        ("bad", "failed", False),
        ("off", "deleted", False),
    ]
    assert [member for _, member in drawing.nodes] == [0, 1, 2]
    assert drawing.edges == [(0, 1), (0, 2)]


def test_equal_siblings_of_a_large_graph_are_one_box_with_the_worst_state() -> None:
    states: list[PublicState | None] = [*[DONE] * (PARTS - 3), *[FAILED] * 3]
    drawing = draw(fan(states), frozenset())
    assert texts(drawing) == ["✓ split", "✕ part × 1000, 3 ✕", "○ sum"]
    assert (labels(drawing)[1].colour, labels(drawing)[1].is_folded, drawing.nodes[1][1]) == ("bad", True, 1)
    assert drawing.edges == [(0, 1), (1, 2)]


def test_an_opened_box_shows_its_members() -> None:
    folded, opened = draw(fan([DONE] * PARTS), frozenset()), draw(fan([DONE] * PARTS), frozenset({1}))
    assert len(opened.nodes) == PARTS + 2
    assert len(opened.edges) == 2 * PARTS
    assert folded.revision != opened.revision


def test_members_with_other_neighbours_or_of_another_task_are_not_folded() -> None:
    chain = graph([("part", DONE)] * PARTS, [(number, number + 1) for number in range(PARTS - 1)])
    assert len(draw(chain, frozenset()).nodes) == PARTS
    kinds = graph([(f"part{number % 2}", DONE) for number in range(PARTS)], [])
    assert texts(draw(kinds, frozenset())) == ["✓ part0 × 500", "✓ part1 × 500"]
    small = graph([("part", DONE)] * FOLD_ABOVE, [])
    assert len(draw(small, frozenset()).nodes) == FOLD_ABOVE


def test_the_states_of_the_members_do_not_change_the_boxes() -> None:
    before, after = (
        draw(fan([WAITING] * PARTS), frozenset({1})),
        draw(fan([DONE, FAILED] * (PARTS // 2)), frozenset({1})),
    )
    assert (before.revision, before.edges) == (after.revision, after.edges)
    assert [member for _, member in before.nodes] == [member for _, member in after.nodes]


@pytest.mark.parametrize(("need", "text"), [(2, "○ sum (1 of 2)"), (None, "○ sum (1 of 3)")])
def test_a_join_says_how_many_it_needs(need: int | None, text: str) -> None:
    join = GraphJoin(3, JoinPolicyKind.ALL_OF, need, 3, 1, 0, 0, GroupState.PENDING)
    nodes: list[tuple[str, PublicState | None]] = [*[("part", DONE)] * 3, ("sum", WAITING)]
    assert texts(draw(graph(nodes, [(0, 3), (1, 3), (2, 3)], [join]), frozenset()))[3] == text


def test_long_names_are_cut() -> None:
    (text,) = texts(draw(graph([("a" * 100, DONE)], []), frozenset()))
    assert len(text) == MAX_NODE_CHARS
