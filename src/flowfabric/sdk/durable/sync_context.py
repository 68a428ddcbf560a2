"""The blocking twin of `Context`, for plain `def` handlers, which cannot await.

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
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar, overload

from flowfabric.sdk.approvals import Approval, Votes
from flowfabric.sdk.durable.budgets import Reservation
from flowfabric.sdk.durable.options import SyncContextOptions
from flowfabric.sdk.durable.races import Won
from flowfabric.sdk.durable.step_identity import StepOptions, named_in_call, run_step
from flowfabric.sdk.durations import Duration
from flowfabric.sdk.joins import AllOf, Join
from flowfabric.sdk.limits import Budget
from flowfabric.sdk.retry import Retry
from flowfabric.sdk.sync import SyncRun
from flowfabric.sdk.worker.threads import DaemonThreadPool, Portal

if TYPE_CHECKING:
    from flowfabric.sdk.call import Call
    from flowfabric.sdk.context import Context
    from flowfabric.sdk.durable.inbox import Inbox, Message
    from flowfabric.sdk.durable.output import Output
    from flowfabric.sdk.durable.step_execution import RunnableStep
    from flowfabric.sdk.task import Task

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")

ALL = AllOf()
_branches = DaemonThreadPool("flowfabric-branch")


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


class SyncMessage:
    """The blocking twin of `Message`."""

    __match_args__ = ("name", "value")

    def __init__(self, message: Message, portal: Portal) -> None:
        self.name = message.name
        self.value = message.value
        self.sender = message.sender
        self.wants_reply = message.wants_reply
        self._message = message
        self._portal = portal

    def reply(self, value: Any = None) -> None:
        """Reply to the sender; the first reply stays."""
        self._portal.call(self._message.reply(value))

    def refuse(self, reason: str) -> None:
        """Refuse what was asked, with a reason."""
        self._portal.call(self._message.refuse(reason))

    def __repr__(self) -> str:
        return repr(self._message)


class SyncInbox:
    """The blocking twin of `Inbox`."""

    def __init__(self, inbox: Inbox, portal: Portal) -> None:
        self._inbox = inbox
        self._portal = portal

    def next(self, timeout: Duration | None = None) -> SyncMessage | None:
        """Return the next message; None if none arrives in time. This frees the thread meanwhile."""
        message = self._portal.call(self._inbox.next(timeout))
        return None if message is None else SyncMessage(message, self._portal)

    def close(self) -> bool:
        """Close the inbox if every message has been read; False if one is unread."""
        return self._portal.call(self._inbox.close())


class SyncContext:
    """The blocking twin of `Context`, with the same steps, gates and lease."""

    def __init__(self, context: Context, portal: Portal) -> None:
        self._context = context
        self._portal = portal

    @overload
    def step(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def step(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function once and record its result; a plain function runs in this thread."""
        return self.run_step(function, args, kwargs, named_in_call(kwargs))

    def options(
        self,
        *,
        name: str | None = None,
        key: str | None = None,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        at_most_once: bool | None = None,
    ) -> SyncContextOptions:
        """Return a context that runs a step with options. With a timeout, a plain function runs in another thread."""
        options = StepOptions(name=name, key=key, retry=retry, timeout=timeout, at_most_once=at_most_once)
        return SyncContextOptions(self, options)

    def run_step(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: StepOptions) -> Any:
        """Run a step with options, or return its recorded result."""
        execution = self._portal.call(self._context.begin_step(function, args, kwargs, options))
        while execution.is_due:
            value, raised = None, None
            try:
                with execution.running():
                    value = self._call(execution, args, kwargs)
            except BaseException as error:
                raised = error
            self._portal.call(execution.end_try(value, raised))
        return execution.result()

    def _call(self, execution: RunnableStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        timeout_s, function = execution.options.timeout_s, execution.function
        if timeout_s is not None:
            label = execution.call.label
            return self._portal.call(
                run_step(function, args, kwargs, label=label, timeout_s=timeout_s, on_timeout=execution.expire)
            )
        value = function(*args, **kwargs)
        return self._portal.call(_as_coroutine(value)) if inspect.isawaitable(value) else value

    def sleep(self, length: Duration) -> None:
        """Wait for a length of time; this frees the thread meanwhile."""
        self._portal.call(self._context.sleep(length))

    @property
    def should_continue(self) -> bool:
        """True if this life has reached over 1,000 operations."""
        return self._context.should_continue

    def continue_as_new(self, *args: Any, **kwargs: Any) -> NoReturn:
        """End this life and begin the next one with these arguments; does not return."""
        self._portal.call(self._context.continue_as_new(*args, **kwargs))
        raise AssertionError("the function continues although its life has ended")

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

    def set(self, name: str, value: Any) -> None:
        """Show a value under a name: `run.get(name)` reads it without a worker."""
        self._portal.call(self._context.set(name, value))

    def inbox(self, **messages: Any) -> SyncInbox:
        """Return the messages to this run, of these names and types or of all that the task declares."""
        return SyncInbox(self._context.inbox(**messages), self._portal)

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

    @overload
    def race(self, *calls: Call[T]) -> T: ...
    @overload
    def race(self, **members: Callable[[], T]) -> Won[T]: ...
    @overload
    def race(self, **members: Callable[[], Any]) -> Won[Any]: ...
    def race(self, *calls: Call[Any], **members: Callable[[], Any]) -> Any:
        """Return the first of several functions that ends, by name, or the result of the first child that succeeds."""
        if calls:
            return self._portal.call(self._context.race(*calls))
        branches = {name: _run_in_thread(member) for name, member in members.items()}
        return self._portal.call(self._context.race(**branches))

    def patched(self, patch: str) -> bool:
        """Return True if this run goes the new way of a change in its function, False if it had passed this place."""
        return self._portal.call(self._context.patched(patch))

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
    def reserve(self, budget: Budget, *, lasts: Duration = "1h", **amounts: int | float) -> Iterator[SyncReservation]:
        """Reserve capacity while the block runs. At its end what it did not spend is released."""
        manager = self._context.reserve(budget, lasts=lasts, **amounts)
        reservation = self._portal.call(manager.__aenter__())
        try:
            yield SyncReservation(reservation, self._portal)
        except BaseException as error:
            self._portal.call(manager.__aexit__(type(error), error, error.__traceback__))
            raise
        self._portal.call(manager.__aexit__(None, None, None))

    def stream(self, name: str) -> SyncOutput:
        """Return the attempt's output of this name."""
        return SyncOutput(self._context.stream(name), self._portal)


class SyncReservation:
    """The blocking twin of `Reservation`."""

    def __init__(self, reservation: Reservation, portal: Portal) -> None:
        self._reservation = reservation
        self._portal = portal

    def spend(self, **amounts: int | float) -> None:
        """Count amounts against the reservation, exactly once however often the run is retried."""
        self._portal.call(self._reservation.count(amounts))


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _run_in_thread(branch: Callable[[], T]) -> T:
    """Run a branch of a plain function in a thread, with the context variables of its branch."""
    variables = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_branches, lambda: variables.run(branch))
