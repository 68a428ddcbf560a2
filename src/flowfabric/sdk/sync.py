"""Blocking twins: the same verbs for scripts, views and plain `def` handlers, where nobody can await.

    receipt = send.sync.submit(mail).result(timeout=10)

    @app.task
    def pay(ctx: Context, order: Order) -> str:
        receipt = ctx.sync.step(charge, order)          # runs in this thread, is remembered like any step
        ctx.sync.sleep("7d")                            # the thread is free meanwhile: the function runs again later
        return receipt

Each method does on an event loop what the method of the same name is awaited for, and waits for it. A wait that has
to park ends the function by an exception of ours that is no `Exception`, so that usual handlers let it pass.
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
    from flowfabric.engine.operations.reads import ExecutionSnapshot
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
    """A run, for code that cannot await."""

    def __init__(self, run: Run[R], portal: Portal) -> None:
        self._run = run
        self._portal = portal

    @property
    def id(self) -> str:
        """Its id."""
        return self._run.id

    @property
    def task(self) -> str:
        """The name of its task."""
        return self._run.task

    @property
    def created(self) -> bool:
        """False when an earlier submit with the same key stands for this one."""
        return self._run.created

    def result(self, timeout: Duration | None = None) -> R:
        """What the handler returned; raises as `Run.result` does."""
        return self._portal.call(self._run.result(timeout))

    def state(self) -> PublicState:
        """The one public word for what it is doing."""
        return self._portal.call(self._run.state())

    def describe(self) -> ExecutionSnapshot:
        """Everything people want to know of it."""
        return self._portal.call(self._run.describe())

    def attempts(self) -> list[AttemptView]:
        """Every attempt so far."""
        return self._portal.call(self._run.attempts())

    def explain(self) -> Explanation:
        """Why it is not running."""
        return self._portal.call(self._run.explain())

    def cancel(self, reason: str = "") -> None:
        """End it, whatever it is doing."""
        self._portal.call(self._run.cancel(reason))

    def replay(self) -> None:
        """Give a finished run another life."""
        self._portal.call(self._run.replay())

    def signal(self, name: str, value: Any = None, *, key: str | None = None, token: str | None = None) -> bool:
        """Send a message to its function, or answer an approval; False when it was sent before."""
        return self._portal.call(self._run.signal(name, value, key=key, token=token))

    def vote(self, link: str, value: Any = True, *, by: str = "") -> bool:
        """Answer an approval of this run with one of its links; False when that link has voted before."""
        return self._portal.call(self._run.vote(link, value, by=by))

    def progress(self) -> dict[str, Any]:
        """What its handler last said."""
        return self._portal.call(self._run.progress())

    def stream(self, name: str, *, after: str | None = None) -> Iterator[OutputFrame | Reset]:
        """What its handler writes under this name, until the run ends."""
        frames = self._run.stream(name, after=after)
        while True:
            try:
                yield self._portal.call(event_loop.next_item(frames))
            except event_loop.IteratorExhausted:
                return

    def __repr__(self) -> str:
        return repr(self._run)


class SyncSubmitter(Generic[P, R]):
    """A task's submits, for code that cannot await."""

    def __init__(self, submitter: Submitter[P, R], portal: Callable[[], Portal]) -> None:
        self._submitter = submitter
        self._portal = portal

    @overload
    def submit(self, *args: P.args, **kwargs: P.kwargs) -> SyncRun[R]: ...
    @overload
    def submit(self, *args: Any, using: object, **kwargs: Any) -> SyncRun[R]: ...
    def submit(self, *args: Any, **kwargs: Any) -> SyncRun[R]:
        """Hand a call over; it is kept when this returns, or with `using` when that transaction commits."""
        portal = self._portal()
        return SyncRun(portal.call(self._submitter.submit(*args, **kwargs)), portal)

    def submit_many(self, inputs: Iterable[Any]) -> list[SyncRun[R]]:
        """Hand many calls over in one round trip."""
        portal = self._portal()
        return [SyncRun(run, portal) for run in portal.call(self._submitter.submit_many(inputs))]

    def run(self, run_id: str) -> SyncRun[R]:
        """A run of this task that was submitted earlier, by its id."""
        return SyncRun(self._submitter.task.run(run_id), self._portal())


class SyncOutput:
    """A stream of output, for plain handlers."""

    def __init__(self, output: Output, portal: Portal) -> None:
        self._output = output
        self._portal = portal

    def write(self, piece: str | bytes | dict[str, Any] | Sequence[Any]) -> None:
        """Add a piece; refused for a worker that lost its lease."""
        self._portal.call(self._output.write(piece))

    def text(self) -> str:
        """Everything that was written so far."""
        return self._output.text()


class SyncApproval(Generic[V]):
    """An open question, for plain handlers."""

    def __init__(self, approval: Approval[V], portal: Portal) -> None:
        self._approval = approval
        self._portal = portal

    @property
    def links(self) -> list[str]:
        """One signed link per approver."""
        return self._approval.links

    def votes(self) -> Votes[V]:
        """The votes; the thread is free while people think."""
        return self._portal.call(_awaited(self._approval))


class SyncContext:
    """A context, for plain handlers; it stands on the same steps, gates and lease."""

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
        """Run a function once, in this thread when it is a plain one; its result is remembered."""
        context = self._context
        step = self._portal.call(context.find_step(function, args, kwargs, name, key))
        if not step.is_recorded:
            self._portal.call(context.reach_fault_point(step.fault_point, "before_effect"))
            with in_step(step.name, step.occurrence):
                value = step_function(function, context)(*args, **kwargs)
                if inspect.isawaitable(value):
                    value = self._portal.call(_awaited(value))
            step = self._portal.call(context.record_step_result(step, value))
        return step.result()

    def sleep(self, length: Duration) -> None:
        """Let time pass; the thread is free meanwhile."""
        self._portal.call(self._context.sleep(length))

    @overload
    def receive(self, name: str, shape: type[T]) -> T: ...
    @overload
    def receive(self, name: str, shape: type[T], *, timeout: Duration | None) -> T | None: ...
    @overload
    def receive(self, name: str, shape: Any = Any, *, timeout: Duration | None = None) -> Any: ...
    def receive(self, name: str, shape: Any = Any, *, timeout: Duration | None = None) -> Any:
        """The next message sent under this name; None when none came in time."""
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
        """Ask people; `votes()` waits for them."""
        asked = self._context.approval(
            name, shape, need=need, approvers=approvers, distinct=distinct, expires=expires, show=show
        )
        return SyncApproval(self._portal.call(asked), self._portal)

    @overload
    def spawn(self, call: Call[T]) -> SyncRun[T]: ...
    @overload
    def spawn(self, call: Task[P, T], *args: P.args, **kwargs: P.kwargs) -> SyncRun[T]: ...
    def spawn(self, call: Any, *args: Any, **kwargs: Any) -> SyncRun[Any]:
        """Submit a child."""
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
    def gather(self, *several: Any, join: Join = ALL) -> list[Any]:
        """Wait for several things at once: children given as calls, or functions of no arguments, each in a thread."""
        from flowfabric.sdk.task import child_calls

        calls = child_calls(several)
        if calls is not None:
            return self._portal.call(self._context.gather(calls, join=join))
        return self._portal.call(self._context.gather(*(_in_thread(branch) for branch in several)))

    def race(self, *calls: Call[T]) -> T:
        """The first child that succeeds; the others are cancelled."""
        return self._portal.call(self._context.race(*calls))

    def now(self) -> int:
        """The time when this was first asked; the same on every attempt."""
        return self._portal.call(self._context.now())

    def uuid(self) -> uuid.UUID:
        """A fresh id that is the same on every attempt."""
        return self._context.uuid()

    @property
    def random(self) -> random.Random:
        """The same numbers in the same order on every attempt."""
        return self._context.random

    def progress(self, patch: dict[str, Any] | str | None = None, *, pct: int | None = None) -> None:
        """Say how far the work is."""
        self._portal.call(self._context.progress(patch, pct=pct))

    def spend(self, budget: Budget, **amounts: int | float) -> None:
        """Count what was spent: once, however often the attempt is retried."""
        self._portal.call(self._context.spend(budget, **amounts))

    @contextmanager
    def reserve(self, budget: Budget, *, lasts: Duration = "1h", **amounts: int | float) -> Iterator[Reservation]:
        """Keep room free while the block runs."""
        kept = self._context.reserve(budget, lasts=lasts, **amounts)
        reservation = self._portal.call(kept.__aenter__())
        try:
            yield reservation
        except BaseException as raised:
            self._portal.call(kept.__aexit__(type(raised), raised, raised.__traceback__))
            raise
        self._portal.call(kept.__aexit__(None, None, None))

    def stream(self, name: str) -> SyncOutput:
        """The attempt's output of this name."""
        return SyncOutput(self._context.stream(name), self._portal)


class SyncFlow:
    """A flow's submit, for code that cannot await."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    def submit(self, *, key: str | None = None) -> SyncFlowRun:
        """Hand the whole flow over."""
        portal = self._flow.app.portal()
        return SyncFlowRun(portal.call(self._flow.submit(key=key)), portal)


class SyncFlowRun:
    """A flow that was handed over, for code that cannot await."""

    def __init__(self, run: FlowRun, portal: Portal) -> None:
        self._run = run
        self._portal = portal

    @property
    def id(self) -> str:
        """Its id."""
        return self._run.id

    @overload
    def __getitem__(self, node: Node[R]) -> SyncRun[R]: ...
    @overload
    def __getitem__(self, node: str) -> SyncRun[Any]: ...
    def __getitem__(self, node: Node[Any] | str) -> SyncRun[Any]:
        """The run of one node, or of the one of this name."""
        return SyncRun(self._run[node], self._portal)

    def result(self, timeout: Duration | None = None) -> dict[str, Any]:
        """What the last nodes returned, by name."""
        return self._portal.call(self._run.result(timeout))

    def states(self) -> dict[str, PublicState]:
        """What each node is doing."""
        return self._portal.call(self._run.states())

    def cancel(self, reason: str = "") -> None:
        """End everything in it that has not ended."""
        self._portal.call(self._run.cancel(reason))

    def graph(self) -> Graph:
        """Its shape."""
        return self._run.graph()


class SyncFabric:
    """An app, for code that cannot await."""

    def __init__(self, app: Fabric) -> None:
        self._app = app

    def find(self, run_id: str) -> SyncRun[Any]:
        """A run by its id."""
        return SyncRun(self._app.find(run_id), self._app.portal())

    def close(self) -> None:
        """Let go of the store; happens by itself when the program ends."""
        self._app.stop_own_loop()

    def __enter__(self) -> SyncFabric:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _in_thread(branch: Callable[[], T]) -> T:
    """A branch of a plain function; it knows its context and its place by the surroundings it is given."""
    surroundings = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_branches, lambda: surroundings.run(branch))
