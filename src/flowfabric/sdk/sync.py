"""Blocking twins of the public objects, for scripts, views and plain `def` handlers, which cannot await.

    receipt = send.sync.submit(mail).result(timeout=10)

    @app.task
    def pay(ctx: Context, order: Order) -> str:
        receipt = ctx.sync.step(charge, order)          # runs in this thread, and is recorded like any step
        ctx.sync.sleep("7d")                            # frees the thread: the function runs again later
        return receipt

Each method runs the coroutine of the same name on an event loop and blocks until it returns. A wait that parks the run
unwinds the function by `HandlerUnwound`, which is not an `Exception`, so that `except Exception` does not catch it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from flowfabric import event_loop
from flowfabric.sdk.approvals import Approval, Votes
from flowfabric.sdk.durable.attempt import in_step
from flowfabric.sdk.durable.budgets import Reservation
from flowfabric.sdk.durable.steps import step_function
from flowfabric.sdk.durations import Duration
from flowfabric.sdk.joins import AllOf, Join
from flowfabric.sdk.limits import Budget
from flowfabric.sdk.worker.threads import DaemonThreadPool, Portal

if TYPE_CHECKING:
    from flowfabric.engine.types import ExecutionSnapshot
    from flowfabric.model.answers.execution import AttemptView
    from flowfabric.model.obstacles import Explanation
    from flowfabric.model.states import PublicState
    from flowfabric.sdk.context import Context
    from flowfabric.sdk.durable.output import Output
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.flows import Flow, FlowRun, Graph, Node
    from flowfabric.sdk.run import OutputFrame, Reset, Run
    from flowfabric.sdk.task import Call, Submitter, Task

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
V = TypeVar("V")

ALL = AllOf()
_branches = DaemonThreadPool("flowfabric-branch")


class SyncRun(Generic[R]):
    """The blocking twin of `Run`."""

    def __init__(self, run: Run[R], portal: Portal) -> None:
        self._run = run
        self._portal = portal

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

    def vote(self, link: str, value: Any = True, *, by: str = "") -> bool:
        """Answer an approval of this run with one of its links; False if that link has voted before."""
        return self._portal.call(self._run.vote(link, value, by=by))

    def progress(self) -> dict[str, Any]:
        """Return the progress that its handler last reported."""
        return self._portal.call(self._run.progress())

    def stream(self, name: str, *, after: str | None = None) -> Iterator[OutputFrame | Reset]:
        """Iterate over what its handler writes to this output, until the run ends."""
        frames = self._run.stream(name, after=after)
        while True:
            try:
                yield self._portal.call(event_loop.next_item(frames))
            except event_loop.IteratorExhausted:
                return

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

    def run(self, run_id: str) -> SyncRun[R]:
        """Return the handle of a run of this task that was submitted earlier, by its id."""
        return SyncRun(self._submitter.task.run(run_id), self._portal())


class SyncOutput:
    """The blocking twin of `Output`."""

    def __init__(self, output: Output, portal: Portal) -> None:
        self._output = output
        self._portal = portal

    def write(self, piece: str | bytes | dict[str, Any] | Sequence[Any]) -> None:
        """Write a piece; refused for a worker that has lost its lease."""
        self._portal.call(self._output.write(piece))

    def text(self) -> str:
        """Return everything written so far."""
        return self._output.text()


class SyncApproval(Generic[V]):
    """The blocking twin of `Approval`."""

    def __init__(self, approval: Approval[V], portal: Portal) -> None:
        self._approval = approval
        self._portal = portal

    @property
    def links(self) -> list[str]:
        """One signed link per approver."""
        return self._approval.links

    def votes(self) -> Votes[V]:
        """Wait for the votes; this frees the thread meanwhile."""
        return self._portal.call(_as_coroutine(self._approval))


class SyncContext:
    """The blocking twin of `Context`, with the same steps, gates and lease."""

    def __init__(self, context: Context, portal: Portal) -> None:
        self._context = context
        self._portal = portal

    @overload
    def step(
        self,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        name: str | None = None,
        key: str | None = None,
        **kwargs: Any,
    ) -> T: ...
    @overload
    def step(
        self, function: Callable[..., T], /, *args: Any, name: str | None = None, key: str | None = None, **kwargs: Any
    ) -> T: ...
    def step(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        name: str | None = None,
        key: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a function once and record its result; a plain function runs in this thread."""
        context = self._context
        step = self._portal.call(context.find_step(function, args, kwargs, name, key))
        if not step.is_recorded:
            self._portal.call(context.reach_fault_point(step.fault_point, "before_effect"))
            with in_step(step.name, step.occurrence):
                value = step_function(function, context)(*args, **kwargs)
                if inspect.isawaitable(value):
                    value = self._portal.call(_as_coroutine(value))
            step = self._portal.call(context.record_step_result(step, value))
        return step.result()

    def sleep(self, length: Duration) -> None:
        """Wait for a length of time; this frees the thread meanwhile."""
        self._portal.call(self._context.sleep(length))

    @overload
    def receive(self, name: str, shape: type[T]) -> T: ...
    @overload
    def receive(self, name: str, shape: type[T], *, timeout: Duration | None) -> T | None: ...
    @overload
    def receive(self, name: str, shape: Any = Any, *, timeout: Duration | None = None) -> Any: ...
    def receive(self, name: str, shape: Any = Any, *, timeout: Duration | None = None) -> Any:
        """Return the next message of this name; None if none arrives in time."""
        return self._portal.call(self._context.receive(name, shape, timeout=timeout))

    def approval(
        self,
        name: str,
        shape: type[V],
        *,
        need: int = 1,
        approvers: int | None = None,
        distinct: bool = True,
        expires: Duration | None = None,
        show: dict[str, Any] | None = None,
    ) -> SyncApproval[V]:
        """Ask people for a decision; `votes()` waits for their answers."""
        opening = self._context.approval(
            name, shape, need=need, approvers=approvers, distinct=distinct, expires=expires, show=show
        )
        return SyncApproval(self._portal.call(opening), self._portal)

    @overload
    def spawn(self, call: Call[T]) -> SyncRun[T]: ...
    @overload
    def spawn(self, call: Task[P, T], *args: P.args, **kwargs: P.kwargs) -> SyncRun[T]: ...
    def spawn(self, call: Any, *args: Any, **kwargs: Any) -> SyncRun[Any]:
        """Submit a child run."""
        return SyncRun(self._portal.call(self._context.spawn(call, *args, **kwargs)), self._portal)

    @overload
    def gather(self, first: Iterable[Call[T]], /, *, join: AllOf = ALL) -> list[T]: ...
    @overload
    def gather(self, first: Iterable[Call[T]], /, *, join: Join) -> list[T | None]: ...
    @overload
    def gather(self, first: Call[T], /, *others: Call[T], join: AllOf = ALL) -> list[T]: ...
    @overload
    def gather(self, first: Call[T], /, *others: Call[T], join: Join) -> list[T | None]: ...
    @overload
    def gather(self, first: Callable[[], T], /, *others: Callable[[], T]) -> list[T]: ...
    @overload
    def gather(self, first: Callable[[], Any], /, *others: Callable[[], Any]) -> list[Any]: ...
    def gather(self, *members: Any, join: Join = ALL) -> list[Any]:
        """Wait for several things concurrently: children given as calls, or functions of no arguments in threads."""
        from flowfabric.sdk.task import child_calls

        calls = child_calls(members)
        if calls is not None:
            return self._portal.call(self._context.gather(calls, join=join))
        return self._portal.call(self._context.gather(*(_run_in_thread(branch) for branch in members)))

    def race(self, *calls: Call[T]) -> T:
        """Return the result of the first child that succeeds; the others are cancelled."""
        return self._portal.call(self._context.race(*calls))

    def now(self) -> int:
        """Return the time in milliseconds since the epoch, recorded on first use: the same on every attempt."""
        return self._portal.call(self._context.now())

    def uuid(self) -> uuid.UUID:
        """Return a new unique id that is the same on every attempt."""
        return self._context.uuid()

    @property
    def random(self) -> random.Random:
        """A `random.Random` that yields the same numbers in the same order on every attempt."""
        return self._context.random

    def progress(self, patch: dict[str, Any] | str | None = None, *, pct: int | None = None) -> None:
        """Report progress: a JSON merge patch on the previous report, a message, or a percentage."""
        self._portal.call(self._context.progress(patch, pct=pct))

    def spend(self, budget: Budget, **amounts: int | float) -> None:
        """Count amounts against a budget, exactly once however often the run is retried."""
        self._portal.call(self._context.spend(budget, **amounts))

    @contextmanager
    def reserve(self, budget: Budget, *, lasts: Duration = "1h", **amounts: int | float) -> Iterator[Reservation]:
        """Reserve capacity while the block runs."""
        manager = self._context.reserve(budget, lasts=lasts, **amounts)
        reservation = self._portal.call(manager.__aenter__())
        try:
            yield reservation
        except BaseException as error:
            self._portal.call(manager.__aexit__(type(error), error, error.__traceback__))
            raise
        self._portal.call(manager.__aexit__(None, None, None))

    def stream(self, name: str) -> SyncOutput:
        """Return the attempt's output of this name."""
        return SyncOutput(self._context.stream(name), self._portal)


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


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _run_in_thread(branch: Callable[[], T]) -> T:
    """Run a branch of a plain function in a thread, with the context variables of its branch."""
    variables = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_branches, lambda: variables.run(branch))
