"""Flows whose shape is known: nodes are calls of tasks, and an argument that is a node is an edge.

    flow = app.flow("nightly")
    rows = flow.add(extract, day)
    clean = flow.add(scrub, rows)
    flow.add(publish, clean, rows)
    flow.add(alert, join=AnyOf(rows.failed, clean.failed))
    run = await flow.submit()

The whole graph is created at once or not at all. A node reads the results it refers to when it starts; one that the
join did not need may have none, and is None then.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import msgspec

from flowfabric import ids
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.model.states import PublicState
from flowfabric.sdk import validation
from flowfabric.sdk.durations import Duration, to_seconds
from flowfabric.sdk.exceptions import RunEnded, RunSkipped
from flowfabric.sdk.joins import AllOf, Join
from flowfabric.sdk.run import Run
from flowfabric.sdk.task import Call, Task, as_call

if TYPE_CHECKING:
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.sync import SyncFlow, SyncFlowRun

R = TypeVar("R")

ALL = AllOf()


class NodeOutcome(msgspec.Struct, frozen=True):
    """The end of a node that another one waits for."""

    node: Node[Any]
    kind: str = "success_only"


class Node(Generic[R]):
    """A call in a flow. Given as an argument of another call it carries its result there."""

    def __init__(self, flow: Flow, name: str, call: Call[R]) -> None:
        self.flow = flow
        self.name = name
        self.call = call
        self.edges: list[NodeOutcome] = []  # what it waits for
        self.join: Join = ALL
        self.results: dict[str, Any] = {}  # parameter -> node, or list of nodes
        self.arguments: dict[str, Any] = {}  # the others

    @property
    def failed(self) -> NodeOutcome:
        """Its end without success, for a join."""
        return NodeOutcome(self, "failure_only")

    @property
    def done(self) -> NodeOutcome:
        """Its end, whatever it is, for a join."""
        return NodeOutcome(self, "any_outcome")

    def __repr__(self) -> str:
        return f"<Node {self.name} of {self.flow.name}>"


class Graph(msgspec.Struct, frozen=True):
    """The shape of a flow: its nodes with their tasks, and who waits for whom for which end."""

    nodes: dict[str, str]
    edges: list[tuple[str, str, str]]

    def mermaid(self) -> str:
        """The same as a diagram."""
        places = {name: f"n{number}" for number, name in enumerate(self.nodes)}
        lines = ["flowchart LR", *(f'    {place}["{name}"]' for name, place in places.items())]
        arrows = {"success_only": "-->", "failure_only": "-. failed .->", "any_outcome": "-. done .->"}
        lines += [f"    {places[above]} {arrows[kind]} {places[below]}" for above, below, kind in self.edges]
        return "\n".join(lines)


class Flow:
    """A flow in the making. It can be submitted any number of times."""

    def __init__(self, app: Fabric, name: str) -> None:
        validation.validate_name(name)
        self.app = app
        self.name = name
        self.nodes: dict[str, Node[Any]] = {}

    @overload
    def add(
        self,
        task: Task[..., R],
        /,
        *args: Any,
        join: Join = ALL,
        after: Iterable[Node[Any] | NodeOutcome] = (),
        **kwargs: Any,
    ) -> Node[R]: ...
    @overload
    def add(self, task: Call[R], /, *, join: Join = ALL, after: Iterable[Node[Any] | NodeOutcome] = ()) -> Node[R]: ...
    def add(
        self,
        task: Task[..., R] | Call[R],
        /,
        *args: Any,
        join: Join = ALL,
        after: Iterable[Node[Any] | NodeOutcome] = (),
        **kwargs: Any,
    ) -> Node[R]:
        """A call that runs when its upstreams let it: the nodes among its arguments, those of the join, and `after`."""
        if isinstance(after, Node | NodeOutcome) or not isinstance(after, Iterable):
            raise InvalidInput("after: not a list; write after=[node]")
        if not isinstance(join, Join):
            raise InvalidInput(f"join: {join!r} is no join; write join=AnyOf(first.failed, second.failed)")
        call = as_call(task, *args, **kwargs)
        name = call.task.__name__
        while name in self.nodes:
            base, _, number = name.partition("-")
            name = f"{base}-{int(number or 1) + 1}"
        node = Node(self, name, call)
        for parameter, value in call.task.signature.bind(call.args, call.kwargs).items():
            if isinstance(value, Node) or _are_nodes(value):
                node.results[parameter] = value
            else:
                node.arguments[parameter] = value
        call.task.signature.dump(node.arguments)  # wrong input is refused here
        upstreams = [one for value in node.results.values() for one in _several(value)]
        node.edges = list(dict.fromkeys(_edge(one) for one in (*upstreams, *join.of, *after)))
        for edge in node.edges:
            if edge.node.flow is not self:
                raise InvalidInput(f"flow {self.name}: {edge.node} is of another flow")
        node.join = join
        if node.edges:
            join.needed(len(node.edges))
        self.nodes[name] = node
        return node

    @property
    def sync(self) -> SyncFlow:
        """The same for code that cannot await."""
        from flowfabric.sdk.sync import SyncFlow

        return SyncFlow(self)

    def graph(self) -> Graph:
        """Its shape."""
        return Graph(
            {name: node.call.task.name for name, node in self.nodes.items()},
            [(edge.node.name, node.name, edge.kind) for node in self.nodes.values() for edge in node.edges],
        )

    async def submit(self, *, key: str | None = None) -> FlowRun:
        """Hand the whole flow over; it is kept when this returns. `key` makes that idempotent.

        A key holds as long as the flow is kept: the same name and key are the same flow.
        """
        if not self.nodes:
            raise InvalidInput(f"flow {self.name}: it has no nodes")
        engine = await self.app.engine()
        flow_id = engine.minter.uuid()
        if key is not None:
            flow_id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"flowfabric|{self.app.namespace}|flow|{self.name}|{key}"))
        partition = ids.flow_partition(ids.FlowId(flow_id), engine.partitions)
        run_ids = {
            name: f"{{fp:{partition}}}:{uuid.uuid5(uuid.UUID(flow_id), name)}" for name in self.nodes
        }  # derived, so that a lost answer and a second try mean the same flow
        read = {one.name for node in self.nodes.values() for value in node.results.values() for one in _several(value)}
        asks = [
            await node.call.task.ask(
                engine,
                node.arguments,
                options=node.call.options,
                execution_id=run_ids[name],
                results={parameter: _runs(value, run_ids) for parameter, value in node.results.items()},
                is_read=name in read,
            )
            for name, node in self.nodes.items()
        ]
        edges = [
            GraphEdge(
                run_ids[edge.node.name],
                run_ids[node.name],
                edge.kind,
                edge_id=str(uuid.uuid5(uuid.UUID(flow_id), f"{edge.node.name}|{edge.kind}|{node.name}")),
            )
            for node in self.nodes.values()
            for edge in node.edges
        ]
        policies = {
            run_ids[node.name]: policy
            for node in self.nodes.values()
            if node.edges and (policy := node.join.policy()) is not None
        }
        await engine.create_flow_graph(
            flow_id, asks, edges, policies=policies, flow_kind=self.name, namespace=self.app.namespace
        )
        return FlowRun(self, flow_id, run_ids)


class FlowRun:
    """A flow that was handed over."""

    def __init__(self, flow: Flow, flow_id: str, run_ids: dict[str, str]) -> None:
        self.flow = flow
        self.id = flow_id
        self._run_ids = run_ids

    @overload
    def __getitem__(self, node: Node[R]) -> Run[R]: ...
    @overload
    def __getitem__(self, node: str) -> Run[Any]: ...
    def __getitem__(self, node: Node[Any] | str) -> Run[Any]:
        """The run of one node, or of the one of this name."""
        known = self.flow.nodes.get(node) if isinstance(node, str) else node
        if not isinstance(known, Node) or known.name not in self._run_ids:
            raise InvalidInput(f"flow {self.flow.name}: {node!r} is none of {', '.join(self._run_ids)}")
        return known.call.task.own_run(self._run_ids[known.name])

    @property
    def sync(self) -> SyncFlowRun:
        """The same for code that cannot await."""
        from flowfabric.sdk.sync import SyncFlowRun

        return SyncFlowRun(self, self.flow.app.portal())

    async def result(self, timeout: Duration | None = None) -> dict[str, Any]:
        """What the last nodes returned, by name, once all have ended; what was skipped is left out.

        Raises what the first failed node would raise, unless some node of the flow waited for that failure or ran
        without it, or without those that it skipped. A node that retention has removed is not missed when one after it
        succeeded.
        """
        nodes = list(self.flow.nodes.values())
        longest_s = to_seconds(timeout)
        try:
            async with asyncio.timeout(longest_s):
                ends = await asyncio.gather(*(self[node].result() for node in nodes), return_exceptions=True)
        except TimeoutError:
            late = f"{self.flow.name} {self.id} has not ended after {longest_s:g} s; it goes on all the same"
            told = TimeoutError(late)
            told.add_note("run.states() tells what each node is doing; is a worker running?")
            raise told from None
        awaited = {edge.node.name for node in nodes for edge in node.edges if edge.kind != "success_only"}
        awaited |= {  # a join that was met without them
            edge.node.name
            for node, end in zip(nodes, ends, strict=True)
            if not isinstance(node.join, AllOf) and not isinstance(end, BaseException)
            for edge in node.edges
        }
        for node, end in zip(reversed(nodes), reversed(ends), strict=True):
            if isinstance(end, RunSkipped) and node.name in awaited:  # nor was what kept such a one from running missed
                awaited |= {edge.node.name for edge in node.edges}
        followed = {edge.node.name for node in nodes for edge in node.edges if edge.kind == "success_only"}
        passed = {
            edge.node.name
            for node, end in zip(nodes, ends, strict=True)
            if not isinstance(end, BaseException)
            for edge in node.edges
        }
        results: dict[str, Any] = {}
        for node, end in zip(nodes, ends, strict=True):
            if isinstance(end, RunSkipped) or (isinstance(end, NotFound) and node.name in passed):
                continue
            if isinstance(end, BaseException):
                if isinstance(end, RunEnded) and node.name in awaited:
                    continue
                raise end
            if node.name not in followed:
                results[node.name] = end
        return results

    async def states(self) -> dict[str, PublicState]:
        """What each node is doing; those that retention has removed are left out."""
        nodes = self.flow.nodes
        states = await asyncio.gather(*(self[node].state() for node in nodes.values()), return_exceptions=True)
        known: dict[str, PublicState] = {}
        for name, state in zip(nodes, states, strict=True):
            if isinstance(state, PublicState):
                known[name] = state
            elif not isinstance(state, NotFound) or len(nodes) == 1:
                raise state
        return known

    async def cancel(self, reason: str = "") -> None:
        """End everything in it that has not ended."""
        await (await self.flow.app.engine()).cancel_flow(self.id, reason=reason)

    def graph(self) -> Graph:
        """Its shape."""
        return self.flow.graph()

    def __repr__(self) -> str:
        return f"<FlowRun {self.flow.name} {self.id}>"


def _edge(given: Node[Any] | NodeOutcome) -> NodeOutcome:
    if not isinstance(given, Node | NodeOutcome):
        raise InvalidInput(f"flow: {given!r} is no node; nodes are what flow.add returns")
    return given if isinstance(given, NodeOutcome) else NodeOutcome(given)


def _are_nodes(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, Node) for one in value)


def _several(value: Any) -> Iterable[Node[Any]]:
    return [value] if isinstance(value, Node) else value


def _runs(value: Any, run_ids: dict[str, str]) -> str | list[str]:
    return run_ids[value.name] if isinstance(value, Node) else [run_ids[one.name] for one in value]
