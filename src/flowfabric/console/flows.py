"""Flows: the list, and one flow as a table and as a graph, which the browser lays out and draws."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

import msgspec

from flowfabric.console.pages import PAGE_SIZE, SECURITY_HEADERS, Ui, View, action, page
from flowfabric.console.show import STATES
from flowfabric.engine.types import FlowGraph, FlowListing
from flowfabric.model.flow import CancellationPolicy
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.states import PublicState
from flowfabric.model.view import view_of
from flowfabric.server.errors import bad_request, not_found
from flowfabric.server.request import JSON, encode, path_uuid
from flowfabric.server.routing import Response

if TYPE_CHECKING:
    from flowfabric.server.app import App

MAX_TABLE = 200
GRAPH_AGE_S = 2.0
MAX_GRAPHS = 16
# A drawing has no token of a form, so it may be compressed, and a browser may keep it to ask whether it has changed.
DRAWING_HEADERS = (
    *(header for header in SECURITY_HEADERS if header[0] != "cache-control"),
    ("cache-control", "private, no-cache"),
)
FOLD_ABOVE = 400  # members; in a larger graph equal siblings are drawn as one
MAX_NODE_CHARS = 20
MAX_OPENED = 200
_WORST_FIRST = (
    *(PublicState.FAILED, PublicState.EXPIRED, PublicState.ACTIVE, PublicState.SUSPENDED, PublicState.RATE_LIMITED),
    *(PublicState.WAITING, PublicState.RESUMABLE, PublicState.DELAYED, PublicState.WAITING_CHILDREN),
    *(PublicState.CANCELLED, PublicState.SKIPPED, PublicState.COMPLETED),
)
POLICIES = tuple(policy.value for policy in CancellationPolicy)


class FlowsPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "flows.html"
    flows: list[FlowListing]
    next_cursor: str | None


class Member(msgspec.Struct, frozen=True):
    """A member of a flow in the table beside the graph."""

    execution_id: str
    task: str
    state: PublicState
    join: str


class Label(msgspec.Struct, frozen=True, array_like=True):
    """The text of a box, which is one member or equal siblings."""

    text: str
    colour: str
    state: str
    is_folded: bool


class Drawing(msgspec.Struct, frozen=True):
    """The data that the browser lays out and draws. Two drawings of the same revision have the same boxes and edges.

    A box is the number of its label and that of its first member. Many boxes have the same label, and ids would be
    most of the answer: the browser asks for one by its number.
    """

    revision: str
    labels: list[Label]
    nodes: list[tuple[int, int]]
    edges: list[tuple[int, int]]


class FlowPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "flow.html"
    flow_id: str
    flow_kind: str
    namespace: str
    created_at: int
    cancelled_at: int | None
    cancel_reason: str | None
    node_count: int
    edge_count: int
    counts: list[tuple[PublicState, int]]
    members: list[Member]
    more: int
    policies: tuple[str, ...] = POLICIES


@page("/flows", rows="flows")
async def show_flows(ui: Ui) -> FlowsPage:
    """List flows, newest first."""
    found = await ui.engine.search_flows(
        namespace=ui.given_namespace,
        namespaces=ui.namespaces,
        cursor=ui.request.cursor,
        limit=PAGE_SIZE,
    )
    return FlowsPage(title="Flows", about="flows", flows=found.flows, next_cursor=found.next_cursor)


async def _flow_id(ui: Ui) -> str:
    """Return the flow of the path; raise NotFound if the caller may not see it."""
    flow_id = path_uuid("flow_id", ui.request.path_params[0].removesuffix(".json"))
    await ui.request.require_flow_access(flow_id)
    return flow_id


@page("/flows/{id}")
async def show_flow(ui: Ui) -> FlowPage:
    """Show a flow: counts by state, the graph, and the members as a table."""
    graph = await _read_graph(ui, await _flow_id(ui))
    counts = Counter(node.public_state for node in graph.nodes if node.public_state is not None)
    chosen = ui.request.query_param("state") or ""
    members = _members(graph, chosen)
    return view_of(
        FlowPage,
        graph,
        title="Flow",
        about="flows",
        node_count=len(graph.nodes),
        edge_count=len(graph.edges),
        counts=[(state, counts[state]) for state in PublicState if counts[state]],
        members=members[:MAX_TABLE],
        more=max(0, len(members) - MAX_TABLE),
    )


_read_last: WeakKeyDictionary[App, dict[str, tuple[float, FlowGraph]]] = WeakKeyDictionary()


async def _read_graph(ui: Ui, flow_id: str, max_age_s: float = 0.0) -> FlowGraph:
    """Read a graph; one that another request has read at most `max_age_s` ago will do.

    The page reads it, and its script asks for the drawing at once: a large graph is read once for both.
    """
    loop, known = asyncio.get_running_loop(), _read_last.setdefault(ui.request.app, {})
    for other, (read_at, _) in tuple(known.items()):
        if loop.time() - read_at > GRAPH_AGE_S:
            del known[other]
    if flow_id in known and loop.time() - known[flow_id][0] < max_age_s:
        return known[flow_id][1]
    graph = await ui.engine.read_flow_graph(flow_id)
    if flow_id in known or len(known) < MAX_GRAPHS:
        known[flow_id] = (loop.time(), graph)
    return graph


def _members(graph: FlowGraph, state: str) -> list[Member]:
    joins = {
        join.node: f"{join.succeeded} of {join.staged}" + (f", {join.need} are enough" if join.need else "")
        for join in graph.joins
        if join.staged
    }
    return [
        Member(node.execution_id, node.execution_kind, node.public_state, joins.get(index, ""))
        for index, node in enumerate(graph.nodes)
        if node.public_state is not None and state in ("", node.public_state)
    ]


@page("/flows/{id}/graph.json")
async def draw_flow(ui: Ui) -> Response:
    """Return the graph as the browser draws it; `open` names siblings that are not folded."""
    graph = await _read_graph(ui, await _flow_id(ui), GRAPH_AGE_S)
    return Response(200, encode(draw(graph, _opened(ui.request.query_param("open") or ""))), JSON, DRAWING_HEADERS)


@page("/flows/{id}/members/{revision}/{number}")
async def open_member(ui: Ui) -> str:
    """Lead to the run of a box; if members were added since it was drawn, lead to the graph of now."""
    flow_id = await _flow_id(ui)
    graph = await _read_graph(ui, flow_id, GRAPH_AGE_S)
    _, revision, number = ui.request.path_params
    if revision != str(graph.graph_revision):
        return ui.url(f"/flows/{flow_id}", done="graph-changed")
    if not _is_number(number) or int(number) >= len(graph.nodes):
        raise not_found("there is no such member")
    return ui.url(f"/runs/{graph.nodes[int(number)].execution_id}")


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 8


def _opened(text: str) -> frozenset[int]:
    words = text.split(",") if text else []
    if len(words) > MAX_OPENED or not all(map(_is_number, words)):
        raise bad_request("open: not numbers of members")
    return frozenset(map(int, words))


def draw(graph: FlowGraph, opened: frozenset[int]) -> Drawing:
    """Return the boxes and edges of a graph; in a large one, members of a task with the same neighbours are one box."""
    siblings = _siblings(graph, opened)
    box_of = {member: number for number, members in enumerate(siblings) for member in members}
    joins = {join.node: f" ({join.succeeded} of {join.need or join.staged})" for join in graph.joins if join.staged > 1}
    labels: dict[Label, int] = {}
    nodes = [(labels.setdefault(_label(graph, members, joins), len(labels)), members[0]) for members in siblings]
    return Drawing(
        f"{graph.graph_revision}/{','.join(map(str, sorted(opened)))}",
        list(labels),
        nodes,
        list(dict.fromkeys((box_of[link.upstream], box_of[link.downstream]) for link in graph.edges)),
    )


def _siblings(graph: FlowGraph, opened: frozenset[int]) -> list[list[int]]:
    """Return the members of each box; a box is named by its first member."""
    if len(graph.nodes) <= FOLD_ABOVE:
        return [[number] for number in range(len(graph.nodes))]
    before: list[list[int]] = [[] for _ in graph.nodes]
    after: list[list[int]] = [[] for _ in graph.nodes]
    for link in graph.edges:
        after[link.upstream].append(link.downstream)
        before[link.downstream].append(link.upstream)
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for number, node in enumerate(graph.nodes):
        key = (node.execution_kind, tuple(sorted(before[number])), tuple(sorted(after[number])))
        groups.setdefault(key, []).append(number)
    found: list[list[int]] = []
    for members in groups.values():
        found += [[member] for member in members] if members[0] in opened else [members]
    return found


def _label(graph: FlowGraph, members: list[int], joins: Mapping[int, str]) -> Label:
    first = graph.nodes[members[0]]
    states = {graph.nodes[member].public_state for member in members}
    worst = next((state for state in _WORST_FIRST if state in states), None)
    word, mark, colour = ("deleted", "·", "off") if worst is None else STATES[worst]
    if len(members) == 1:
        join = joins.get(members[0], "")
        name = _clip(first.execution_kind, MAX_NODE_CHARS - 2 - len(join))
        return Label(f"{mark} {name}{join}", colour, word, False)
    failed = sum(graph.nodes[member].public_state is PublicState.FAILED for member in members)
    count = f" × {len(members)}" + (f", {failed} ✕" if failed else "")
    name = _clip(first.execution_kind, MAX_NODE_CHARS - len(count))
    return Label(f"{mark} {name}{count}", colour, word, True)


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: max(1, limit - 1)]}…"


@action("/flows/{id}/cancel", scope=ApiScope.OPERATE)
async def cancel_whole_flow(ui: Ui, fields: Mapping[str, str]) -> str:
    """Cancel a flow and the members that the policy selects."""
    flow_id = await _flow_id(ui)
    policy = fields.get("policy") or CancellationPolicy.CANCEL_ALL
    await ui.engine.cancel_flow(flow_id, policy=policy, reason=fields.get("reason") or f"cancelled by {ui.name}")
    return ui.url(f"/flows/{flow_id}", done="flow-cancelled")
