"""Flows: graphs of calls that are submitted as a whole. An argument that is a node makes an edge.

    flow = app.flow("nightly")
    rows = flow.add(extract, day)
    clean = flow.add(scrub, rows)
    flow.add(publish, clean, rows)
    flow.add(alert, join=AnyOf(rows.failed, clean.failed))
    run = await flow.submit()

The graph is created in one transaction. A node reads the results of its upstream nodes when it starts; a result that
the join did not need may not exist, and is None then.
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
from flowfabric.sdk.call import Call
from flowfabric.sdk.durations import Duration, to_seconds
from flowfabric.sdk.exceptions import RunEnded, RunSkipped
from flowfabric.sdk.joins import AllOf, Join
from flowfabric.sdk.run import Run
from flowfabric.sdk.task import Task, as_call

if TYPE_CHECKING:
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.sync import SyncFlow, SyncFlowRun

R = TypeVar("R")

ALL = AllOf()


class NodeOutcome(msgspec.Struct, frozen=True):
    """An outcome of a node that another node waits for."""

    node: Node[Any]
    kind: str = "success_only"


class Node(Generic[R]):
    """A call in a flow. Passed as an argument to another call, it is replaced by its result."""

    def __init__(self, flow: Flow, name: str, call: Call[R]) -> None:
        self.flow = flow
        self.name = name
        self.call = call
        self.edges: list[NodeOutcome] = []  # the outcomes it waits for
        self.join: Join = ALL
        self.results: dict[str, Any] = {}  # parameters that get results: a node or a list of nodes
        self.arguments: dict[str, Any] = {}  # the other parameters, with their values

    @property
    def failed(self) -> NodeOutcome:
        """The outcome that it ended without success, for a join or `after`."""
        return NodeOutcome(self, "failure_only")

    @property
    def done(self) -> NodeOutcome:
        """The outcome that it ended in any way, for a join or `after`."""
        return NodeOutcome(self, "any_outcome")

    def __repr__(self) -> str:
        return f"<Node {self.name} of {self.flow.name}>"


class Graph(msgspec.Struct, frozen=True):
    """The shape of a flow: the task of each node, and edges as (upstream, downstream, kind)."""

    nodes: dict[str, str]
    edges: list[tuple[str, str, str]]

    def mermaid(self) -> str:
        """Return the graph as a Mermaid flowchart."""
        ids = {name: f"n{number}" for number, name in enumerate(self.nodes)}
        rows = ["flowchart LR", *(f'    {node_id}["{name}"]' for name, node_id in ids.items())]
        arrows = {"success_only": "-->", "failure_only": "-. failed .->", "any_outcome": "-. done .->"}
        rows += [f"    {ids[upstream]} {arrows[kind]} {ids[downstream]}" for upstream, downstream, kind in self.edges]
        return "\n".join(rows)


class Flow:
    """A graph of calls under construction. It can be submitted any number of times."""

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
        """Add a call, which runs when its join is met. It waits for the nodes in its arguments, `join` and `after`."""
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
        call.task.signature.dump(node.arguments)  # refuses arguments of the wrong type
        upstreams = [upstream for value in node.results.values() for upstream in _as_nodes(value)]
        node.edges = list(dict.fromkeys(_as_outcome(upstream) for upstream in (*upstreams, *join.of, *after)))
        for edge in node.edges:
            if edge.node.flow is not self:
                raise InvalidInput(f"flow {self.name}: {edge.node} is of another flow")
        node.join = join
        if node.edges:
            join.required_successes(len(node.edges))
        self.nodes[name] = node
        return node

    @property
    def sync(self) -> SyncFlow:
        """The blocking twin of this object, for code that cannot await."""
        from flowfabric.sdk.sync import SyncFlow

        return SyncFlow(self)

    def graph(self) -> Graph:
        """Return the nodes and edges of the flow."""
        return Graph(
            {name: node.call.task.name for name, node in self.nodes.items()},
            [(edge.node.name, node.name, edge.kind) for node in self.nodes.values() for edge in node.edges],
        )

    async def submit(self, *, key: str | None = None) -> FlowRun:
        """Submit the whole graph. It is stored when this returns, all of it or nothing. `key` makes this idempotent.

        A key is valid as long as the flow is kept: the same name and key are the same flow.
        """
        if not self.nodes:
            raise InvalidInput(f"flow {self.name}: it has no nodes")
        engine = await self.app.engine()
        flow_id = engine.minter.uuid()
        if key is not None:
            flow_id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"flowfabric|{self.app.namespace}|flow|{self.name}|{key}"))
        partition = ids.flow_partition(ids.FlowId(flow_id), engine.partitions)
        # All ids are derived from the flow's id, so that a retry after a lost reply creates the same graph.
        run_ids = {name: f"{{fp:{partition}}}:{uuid.uuid5(uuid.UUID(flow_id), name)}" for name in self.nodes}
        read = {
            upstream.name
            for node in self.nodes.values()
            for value in node.results.values()
            for upstream in _as_nodes(value)
        }
        requests = [
            await node.call.task.build_create(
                engine,
                node.arguments,
                options=node.call.options,
                execution_id=run_ids[name],
                results={parameter: _ids_of(value, run_ids) for parameter, value in node.results.items()},
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
            flow_id, requests, edges, policies=policies, flow_kind=self.name, namespace=self.app.namespace
        )
        return FlowRun(self, flow_id, run_ids)


class FlowRun:
    """The handle of a submitted flow. `flow_run[node]` is the run of a node."""

    def __init__(self, flow: Flow, flow_id: str, run_ids: dict[str, str]) -> None:
        self.flow = flow
        self.id = flow_id
        self._run_ids = run_ids

    @overload
    def __getitem__(self, node: Node[R]) -> Run[R]: ...
    @overload
    def __getitem__(self, node: str) -> Run[Any]: ...
    def __getitem__(self, node: Node[Any] | str) -> Run[Any]:
        """Return the run of a node, given as the node or its name."""
        known = self.flow.nodes.get(node) if isinstance(node, str) else node
        if not isinstance(known, Node) or known.name not in self._run_ids:
            raise InvalidInput(f"flow {self.flow.name}: {node!r} is not one of {', '.join(self._run_ids)}")
        return known.call.task.own_run(self._run_ids[known.name])

    @property
    def sync(self) -> SyncFlowRun:
        """The blocking twin of this object, for code that cannot await."""
        from flowfabric.sdk.sync import SyncFlowRun

        return SyncFlowRun(self, self.flow.app.portal())

    async def result(self, timeout: Duration | None = None) -> dict[str, Any]:
        """Wait until all nodes have ended; return the results of the last nodes by name, without skipped ones.

        Raises the error of the first failed node, unless the flow handled it: a node waited for that failure, or a
        join was met without the failed node or without nodes that were skipped because of it. A node that retention has
        removed is ignored if a node after it succeeded.
        """
        nodes = list(self.flow.nodes.values())
        timeout_s = to_seconds(timeout)
        try:
            async with asyncio.timeout(timeout_s):
                outcomes = await asyncio.gather(*(self[node].result() for node in nodes), return_exceptions=True)
        except TimeoutError:
            error = TimeoutError(f"{self.flow.name} {self.id} has not ended after {timeout_s:g} s; it continues to run")
            error.add_note("run.states() lists the state of each node; is a worker running?")
            raise error from None
        ended = list(zip(nodes, outcomes, strict=True))
        # The nodes whose failure the flow handled: a node waited for it ...
        handled = {edge.node.name for node in nodes for edge in node.edges if edge.kind != "success_only"}
        handled |= {  # ... or a join was met without it ...
            edge.node.name
            for node, outcome in ended
            if not isinstance(node.join, AllOf) and not isinstance(outcome, BaseException)
            for edge in node.edges
        }
        for node, outcome in reversed(ended):
            if isinstance(outcome, RunSkipped) and node.name in handled:  # ... or without nodes skipped because of it.
                handled |= {edge.node.name for edge in node.edges}
        inner = {edge.node.name for node in nodes for edge in node.edges if edge.kind == "success_only"}
        before_success = {
            edge.node.name for node, outcome in ended if not isinstance(outcome, BaseException) for edge in node.edges
        }
        results: dict[str, Any] = {}
        for node, outcome in ended:
            if isinstance(outcome, RunSkipped) or (isinstance(outcome, NotFound) and node.name in before_success):
                continue
            if isinstance(outcome, BaseException):
                if isinstance(outcome, RunEnded) and node.name in handled:
                    continue
                raise outcome
            if node.name not in inner:
                results[node.name] = outcome
        return results

    async def states(self) -> dict[str, PublicState]:
        """Return the public state of each node, without nodes that retention has removed."""
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
        """Cancel every node that has not ended."""
        await (await self.flow.app.engine()).cancel_flow(self.id, reason=reason)

    def graph(self) -> Graph:
        """Return the nodes and edges of the flow."""
        return self.flow.graph()

    def __repr__(self) -> str:
        return f"<FlowRun {self.flow.name} {self.id}>"


def _as_outcome(upstream: Node[Any] | NodeOutcome) -> NodeOutcome:
    if not isinstance(upstream, Node | NodeOutcome):
        raise InvalidInput(f"flow: {upstream!r} is no node; nodes are what flow.add returns")
    return upstream if isinstance(upstream, NodeOutcome) else NodeOutcome(upstream)


def _are_nodes(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Node) for item in value)


def _as_nodes(value: Any) -> Iterable[Node[Any]]:
    return [value] if isinstance(value, Node) else value


def _ids_of(value: Any, run_ids: dict[str, str]) -> str | list[str]:
    return run_ids[value.name] if isinstance(value, Node) else [run_ids[node.name] for node in value]
