"""The search for a cycle in a stored graph, level by level."""

from __future__ import annotations

import pytest

from flowfabric.model.flow import DependencyKind, Edge
from flowfabric.rules.flow import graph
from flowfabric.rules.flow.build import StageEdge
from flowfabric.rules.flow.graph import CycleSearch

SUCCESS_ONLY = DependencyKind.SUCCESS_ONLY


def search_for(upstream: str, downstream: str, *stored: str) -> tuple[CycleSearch, list[list[str]]]:
    """Search for a cycle through a new edge in a graph of stored edges; return the levels that were loaded too."""
    search = graph.start_search(StageEdge("f", "e", upstream, downstream, SUCCESS_ONLY, None, None))
    levels = []
    while search.frontier:
        levels.append([*search.frontier])
        edges = [Edge("f", pair, pair[0], pair[1], SUCCESS_ONLY, 0) for pair in stored if pair[0] in search.frontier]
        search = graph.continue_search(search, edges)
    return search, levels


def test_an_edge_whose_downstream_leads_to_its_upstream_closes_a_cycle() -> None:
    search, levels = search_for("d", "a", "ab", "bc", "cd", "de")

    assert search.closes_cycle
    assert levels == [["a"], ["b"], ["c"]]


def test_each_node_is_visited_once_also_in_a_stored_cycle() -> None:
    search, levels = search_for("u", "a", "ab", "ac", "bd", "cd", "da")

    assert not search.closes_cycle
    assert levels == [["a"], ["b", "c"], ["d"]]


def test_a_graph_that_is_too_large_to_search_counts_as_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MAX_SEARCHED_NODES", 3)

    assert not search_for("u", "b", "ab", "bc", "cd")[0].closes_cycle
    assert search_for("u", "a", "ab", "bc", "cd")[0].closes_cycle
