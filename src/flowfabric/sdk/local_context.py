"""The context of a plain call: `await send(mail)` in a unit test just runs the function, without an engine.

Steps and children run in place, sleeps return at once, and spending is not counted. Messages and votes cannot arrive
here: test a function that waits for them in a `World`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from flowfabric.sdk.context import Context
from flowfabric.sdk.durable.branches import BranchTree, as_coroutine
from flowfabric.sdk.durable.budgets import Reservation
from flowfabric.sdk.durable.inbox import encode_fact
from flowfabric.sdk.durable.output import Output, apply_merge_patch, progress_patch
from flowfabric.sdk.durable.races import Won
from flowfabric.sdk.durable.step_identity import (
    StepCall,
    StepOptions,
    check_step_function,
    identify_step,
    options_of,
    step_function,
)
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.worker.threads import DaemonThreadPool

if TYPE_CHECKING:
    from flowfabric.sdk.durable.step_execution import RunnableStep
    from flowfabric.sdk.durable.sync_context import SyncContext
    from flowfabric.sdk.limits import Budget
    from flowfabric.sdk.task import Task

T = TypeVar("T")

NEEDS_WORLD = "a plain call has no run that could wait; test this function in a World"


class LocalContext(Context):
    """A context without a run."""

    def __init__(self, task: Task[..., Any]) -> None:
        self.app = task.app
        self.task = task.name
        self.run_id = f"plain-call-{uuid.uuid4()}"
        self.origin = self.run_id
        self.life = self.attempt = 0
        self.lane = task.default_options.lane
        self.reported_progress: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.branches = BranchTree()
        self._occurrences: Counter[str] = Counter()
        self._outputs = {}
        self._scheduled = None

    @property
    def sync(self) -> SyncContext:
        """The blocking twin of this context, for plain functions."""
        from flowfabric.sdk.durable.sync_context import SyncContext

        return SyncContext(self, _ThreadPortal())

    def next_place(self, label: str) -> tuple[str, int]:
        """Return the label, and how often it occurred before."""
        self._occurrences[label] += 1
        return label, self._occurrences[label] - 1

    @property
    def cancelled(self) -> bool:
        """False: a plain call is not cancelled."""
        return False

    @property
    def lease_seconds_left(self) -> float:
        """Infinity: a plain call has no lease."""
        return float("inf")

    async def begin_step(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: StepOptions
    ) -> RunnableStep:
        """Return the step, ready for its only try."""
        check_step_function(function)
        options = options_of(function, options)
        call = identify_step(self, function, args, kwargs, options)
        return _LocalStep(call, options, step_function(function, self))

    def is_final(self, failure: BaseException) -> bool:
        """False: a plain call has no attempts."""
        return False

    async def reach_fault_point(self, point: str, moment: str) -> None:
        """Do nothing: no faults are injected into a plain call."""

    async def _now(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, length: Duration) -> None:
        """Return at once."""
        to_ms(length, "sleep")

    @property
    def should_continue(self) -> bool:
        """False: a plain call remembers nothing."""
        return False

    async def continue_as_new(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a plain call has one life."""
        raise RuntimeError("ctx.continue_as_new: a plain call has one life; test this function in a World")

    async def patched(self, patch: str) -> bool:
        """Return True: a plain call is new."""
        return True

    async def receive(self, name: str, shape: Any = Any, *, timeout: Duration | None = None) -> Any:
        """Return None, as after a timeout; without a timeout raise."""
        if timeout is None:
            raise RuntimeError(f"receive {name!r}: {NEEDS_WORLD}")

    async def set(self, name: str, value: Any) -> None:
        """Keep the value in `facts`."""
        encode_fact(name, value)
        self.facts[name] = value

    def inbox(self, **messages: Any) -> Any:
        """Raise: nobody can send a message."""
        raise RuntimeError(f"inbox: {NEEDS_WORLD}")

    async def approval(self, name: str, shape: type[Any], **_: Any) -> Any:
        """Raise: nobody can vote."""
        raise RuntimeError(f"approval {name!r}: {NEEDS_WORLD}")

    async def spawn(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise: there is no engine that could run a child."""
        raise RuntimeError(f"spawn: {NEEDS_WORLD}")

    async def gather(self, *members: Any, join: Any = None) -> list[Any]:
        """Run all children one after the other, or all branches concurrently."""
        from flowfabric.sdk.task import child_calls

        calls = child_calls(members)
        if calls is not None:
            return [await _run_call(call) for call in calls]
        return list(await asyncio.gather(*members))

    async def race(self, *calls: Any, **members: Any) -> Any:
        """Run the first child or member only, which wins."""
        if calls:
            return await _run_call(calls[0])
        (name, first), *others = ((name, as_coroutine(member)) for name, member in members.items())
        for _, other in others:
            other.close()
        return Won(name, await first)

    async def progress(self, patch: dict[str, Any] | str | None = None, *, pct: int | None = None) -> None:
        """Keep the report in `reported_progress`."""
        self.reported_progress = apply_merge_patch(self.reported_progress, progress_patch(patch, pct))

    def stream(self, name: str) -> Output:
        """Return an output that only collects its text."""
        return self._outputs.setdefault(name, _CollectedOutput())

    async def spend(self, budget: Budget, **amounts: int | float) -> None:
        """Check the amounts; they are not counted."""
        budget.amounts(amounts)

    @asynccontextmanager
    async def reserve(
        self, budget: Budget, *, lasts: Duration = "1h", **amounts: int | float
    ) -> AsyncIterator[Reservation]:
        """Check the amounts and grant the reservation."""
        budget.amounts(amounts)

        async def check(spent: Mapping[str, int | float]) -> None:
            budget.amounts(spent)

        yield Reservation(check)


class _LocalStep:
    """A step of a plain call: it runs once, and its result is encoded as a store would keep it."""

    def __init__(self, call: StepCall, options: StepOptions, function: Any) -> None:
        self.call = call
        self.options = options
        self.function = function
        self.is_due = True
        self._result = b""

    def running(self) -> AbstractContextManager[None]:
        """Mark nothing: a plain call never parks."""
        return nullcontext()

    async def end_try(self, value: Any, error: BaseException | None) -> None:
        """Keep the result, or raise."""
        if error is not None:
            raise error
        self._result, self.is_due = self.call.encode(value), False

    def expire(self) -> None:
        """Do nothing: there is no context to refuse."""

    def result(self) -> Any:
        """Decode the result."""
        return self.call.decode(self._result)


class _CollectedOutput(Output):
    """An output that only collects its text."""

    def __init__(self) -> None:
        self._written = []

    async def write(self, piece: str | bytes | dict[str, Any] | Sequence[Any]) -> None:
        match piece:
            case bytes():
                self._written.append(piece.decode("utf-8", "replace"))
            case str():
                self._written.append(piece)
            case _:
                self._written.append(msgspec.json.encode(piece).decode())

    async def flush(self) -> None:
        """Do nothing: no frame is in flight."""


class _ThreadPortal:
    """Runs a coroutine on a new loop in another thread, since this thread may already run a loop."""

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result."""
        threads = DaemonThreadPool("flowfabric-plain-call")
        try:
            return threads.submit(lambda: asyncio.run(coroutine)).result()
        finally:
            threads.shutdown()


async def _run_call(call: Any) -> Any:
    value = call.task(*call.args, **call.kwargs)
    return await value if call.task.is_async else value
