"""Blocking twins of the public objects, for scripts and views, which cannot await.

    receipt = send.sync.submit(mail).result(timeout=10)

Each method runs the coroutine of the same name on an event loop and blocks until it returns. The twin of `Context` is
in `sdk/durable/sync_context.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from flowfabric import event_loop
from flowfabric.sdk.durations import Duration
from flowfabric.sdk.worker.threads import Portal

if TYPE_CHECKING:
    from flowfabric.engine.types import ExecutionSnapshot
    from flowfabric.model.answers.execution import AttemptView
    from flowfabric.model.obstacles import Explanation
    from flowfabric.model.states import PublicState
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.flows import Flow, FlowRun, Graph, Node
    from flowfabric.sdk.keys.keyed_sync import SyncKeyed
    from flowfabric.sdk.run import OutputFrame, Reset, Run, RunMethods
    from flowfabric.sdk.submitter import Submitter

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class SyncRunMethods(Generic[R]):
    """What `SyncRun` and `SyncKeyed` have in common: the blocking twins of `RunMethods`."""

    def __init__(self, run: RunMethods[R], portal: Portal) -> None:
        self._run = run
        self._portal = portal

    def result(self, timeout: Duration | None = None) -> R:
        """Wait for the end and return what the handler returned; raises as `Run.result` does."""
        return self._portal.call(self._run.result(timeout))

    def state(self) -> PublicState:
        """Return its public state."""
        return self._portal.call(self._run.state())

    def describe(self) -> ExecutionSnapshot:
        """Return a snapshot of the run."""
        return self._portal.call(self._run.describe())

    def attempts(self) -> list[AttemptView]:
        """Return all attempts so far, the first one first."""
        return self._portal.call(self._run.attempts())

    def release(self, *, accept: bool = False) -> bool:
        """Let a run continue that is held because its function has changed; False if it is not held."""
        return self._portal.call(self._run.release(accept=accept))

    def unpin(self, to: str | None = None) -> bool:
        """Let workers of any version continue a pinned run, or those of the version `to`; False if nothing changes."""
        return self._portal.call(self._run.unpin(to))

    def explain(self) -> Explanation:
        """Return why it is not running."""
        return self._portal.call(self._run.explain())

    def cancel(self, reason: str = "") -> None:
        """Cancel the run, whatever its state. Idempotent."""
        self._portal.call(self._run.cancel(reason))

    def replay(self) -> None:
        """Run a finished run again, under the same id."""
        self._portal.call(self._run.replay())

    def signal(self, name: str, value: Any = None, *, key: str | None = None, token: str | None = None) -> bool:
        """Send a message to its handler, or answer an approval; False if it was sent before."""
        return self._portal.call(self._run.signal(name, value, key=key, token=token))

    @overload
    def ask(
        self, name: str, value: Any, shape: type[T], *, timeout: Duration | None = None, key: str | None = None
    ) -> T: ...
    @overload
    def ask(
        self, name: str, value: Any = None, shape: Any = Any, *, timeout: Duration | None = None, key: str | None = None
    ) -> Any: ...
    def ask(
        self, name: str, value: Any = None, shape: Any = Any, *, timeout: Duration | None = None, key: str | None = None
    ) -> Any:
        """Send a message and return the reply of its handler; raises as `Run.ask` does."""
        return self._portal.call(self._run.ask(name, value, shape, timeout=timeout, key=key))

    @overload
    def get(self, name: str, shape: type[T], *, wait: Duration) -> T: ...
    @overload
    def get(self, name: str, shape: type[T], *, wait: None = None) -> T | None: ...
    @overload
    def get(self, name: str, shape: Any = Any, *, wait: Duration | None = None) -> Any: ...
    def get(self, name: str, shape: Any = Any, *, wait: Duration | None = None) -> Any:
        """Return the fact of this name; with `wait`, wait for its first value."""
        return self._portal.call(self._run.get(name, shape, wait=wait))

    @overload
    def watch(self, name: str, shape: type[T]) -> Iterator[T]: ...
    @overload
    def watch(self, name: str, shape: Any = Any) -> Iterator[Any]: ...
    def watch(self, name: str, shape: Any = Any) -> Iterator[Any]:
        """Iterate over the values of a fact, until the run ends."""
        yield from _iterate(self._run.watch(name, shape), self._portal)

    def vote(self, link: str, value: Any = True, *, by: str = "") -> bool:
        """Answer an approval of this run with one of its links; False if that link has voted before."""
        return self._portal.call(self._run.vote(link, value, by=by))

    def progress(self) -> dict[str, Any]:
        """Return the progress that its handler last reported."""
        return self._portal.call(self._run.progress())

    def stream(self, name: str, *, after: str | None = None) -> Iterator[OutputFrame | Reset]:
        """Iterate over what its handler writes to this output, until the run ends."""
        yield from _iterate(self._run.stream(name, after=after), self._portal)


class SyncRun(SyncRunMethods[R]):
    """The blocking twin of `Run`."""

    _run: Run[R]

    @property
    def id(self) -> str:
        """The run's id."""
        return self._run.id

    @property
    def task(self) -> str:
        """The name of its task."""
        return self._run.task

    @property
    def created(self) -> bool:
        """False if the submit returned the run of an earlier submit with the same key."""
        return self._run.created

    def __repr__(self) -> str:
        return repr(self._run)


class SyncSubmitter(Generic[P, R]):
    """The blocking twin of `Submitter`."""

    def __init__(self, submitter: Submitter[P, R], portal: Callable[[], Portal]) -> None:
        self._submitter = submitter
        self._portal = portal

    @overload
    def submit(self, *args: P.args, **kwargs: P.kwargs) -> SyncRun[R]: ...
    @overload
    def submit(self, *args: Any, using: object, **kwargs: Any) -> SyncRun[R]: ...
    def submit(self, *args: Any, **kwargs: Any) -> SyncRun[R]:
        """Submit a call. The run is stored when this returns, or with `using`, when that transaction commits."""
        portal = self._portal()
        return SyncRun(portal.call(self._submitter.submit(*args, **kwargs)), portal)

    def submit_many(self, inputs: Iterable[Any]) -> list[SyncRun[R]]:
        """Submit many calls in one round trip."""
        portal = self._portal()
        return [SyncRun(run, portal) for run in portal.call(self._submitter.submit_many(inputs))]

    def at(self, key: str) -> SyncKeyed[P, R]:
        """Return the run that has a key of this task now."""
        return self._submitter.task.at(key).sync

    def find(self, key: str) -> SyncRun[R] | None:
        """Return the run that has a key of this task; None without."""
        portal = self._portal()
        found = portal.call(self._submitter.task.find(key))
        return None if found is None else SyncRun(found, portal)

    def run(self, run_id: str) -> SyncRun[R]:
        """Return the handle of a run of this task that was submitted earlier, by its id."""
        return SyncRun(self._submitter.task.run(run_id), self._portal())


class SyncFlow:
    """The blocking twin of `Flow`."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    def submit(self, *, key: str | None = None) -> SyncFlowRun:
        """Submit the whole graph, all of it or nothing. `key` makes this idempotent."""
        portal = self._flow.app.portal()
        return SyncFlowRun(portal.call(self._flow.submit(key=key)), portal)


class SyncFlowRun:
    """The blocking twin of `FlowRun`."""

    def __init__(self, run: FlowRun, portal: Portal) -> None:
        self._run = run
        self._portal = portal

    @property
    def id(self) -> str:
        """The flow's id."""
        return self._run.id

    @overload
    def __getitem__(self, node: Node[R]) -> SyncRun[R]: ...
    @overload
    def __getitem__(self, node: str) -> SyncRun[Any]: ...
    def __getitem__(self, node: Node[Any] | str) -> SyncRun[Any]:
        """Return the run of a node, given as the node or its name."""
        return SyncRun(self._run[node], self._portal)

    def result(self, timeout: Duration | None = None) -> dict[str, Any]:
        """Wait until all nodes have ended; return the results of the last nodes by name."""
        return self._portal.call(self._run.result(timeout))

    def states(self) -> dict[str, PublicState]:
        """Return the public state of each node."""
        return self._portal.call(self._run.states())

    def cancel(self, reason: str = "") -> None:
        """Cancel every node that has not ended."""
        self._portal.call(self._run.cancel(reason))

    def graph(self) -> Graph:
        """Return the nodes and edges of the flow."""
        return self._run.graph()


class SyncFabric:
    """The blocking twin of `Fabric`."""

    def __init__(self, app: Fabric) -> None:
        self._app = app

    def find(self, run_id: str) -> SyncRun[Any]:
        """Return the handle of a run, by its id."""
        return SyncRun(self._app.find(run_id), self._app.portal())

    def close(self) -> None:
        """Close the engine shared in the background; happens by itself at the end of the process."""
        self._app.stop_own_loop()

    def __enter__(self) -> SyncFabric:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _iterate(items: AsyncIterator[T], portal: Portal) -> Iterator[T]:
    while True:
        try:
            yield portal.call(event_loop.next_item(items))
        except event_loop.IteratorExhausted:
            return
