"""The context of a plain call: `await send(mail)` in a unit test just runs the function, without an engine.

Steps and children run in place, sleeps return at once, and spending is not counted. Messages and votes cannot arrive
here: test a function that waits for them in a `World`.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from flowfabric.model.gate import StepMemo
from flowfabric.sdk.context import Context
from flowfabric.sdk.durable.budgets import Reservation
from flowfabric.sdk.durable.output import Output, apply_merge_patch, progress_patch
from flowfabric.sdk.durable.steps import StepCall, identify_step
from flowfabric.sdk.durations import Duration, to_ms

if TYPE_CHECKING:
    from flowfabric.sdk.durable.attempt import DurableAttempt
    from flowfabric.sdk.limits import Budget
    from flowfabric.sdk.sync import SyncContext
    from flowfabric.sdk.task import Task
    from flowfabric.sdk.worker.threads import Portal

T = TypeVar("T")

NEEDS_WORLD = "a plain call has nobody to wait for; test this function in a World"


class LocalContext(Context):
    """A context without a run."""

    def __init__(self, task: Task[..., Any]) -> None:
        self.app = task.app
        self.task = task.name
        self.run_id = f"plain-call-{uuid.uuid4()}"
        self.attempt = 0
        self.lane = task.default_options.lane
        self.reported_progress: dict[str, Any] = {}
        self._occurrences: Counter[str] = Counter()
        self._outputs = {}

    @property
    def sync(self) -> SyncContext:
        """The blocking twin of this context, for plain functions."""
        from flowfabric.sdk.sync import SyncContext

        return SyncContext(self, cast("Portal", _ThreadPortal()))

    @property
    def durable(self) -> DurableAttempt:
        """This context itself, which has the part of `DurableAttempt` that steps need."""
        return cast("DurableAttempt", self)

    def next_occurrence(self, label: str) -> tuple[str, int]:
        """Return the label, and how often it occurred before."""
        self._occurrences[label] += 1
        return label, self._occurrences[label] - 1

    @asynccontextmanager
    async def without_parking(self) -> AsyncIterator[None]:
        """Do nothing: a plain call never parks."""
        yield

    @property
    def cancelled(self) -> bool:
        """False: a plain call is not cancelled."""
        return False

    @property
    def lease_seconds_left(self) -> float:
        """Infinity: a plain call has no lease."""
        return float("inf")

    async def find_step(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None, key: str | None
    ) -> StepCall:
        """Return the step, without a recorded result."""
        return identify_step(self.durable, function, args, kwargs, name, key)

    async def record_step_result(self, step: StepCall, value: Any) -> StepCall:
        """Return the step with its result encoded as a store would keep it."""
        return step.with_memo(StepMemo(self.run_id, step.name, step.occurrence, 0, 0, step.encode(value)))

    async def reach_fault_point(self, point: str, moment: str) -> None:
        """Do nothing: no faults are injected into a plain call."""

    async def _now(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, length: Duration) -> None:
        """Return at once."""
        to_ms(length, "sleep")

    async def receive(self, name: str, shape: Any = Any, *, timeout: Duration | None = None) -> Any:
        """Return None, as after a timeout; without a timeout raise."""
        if timeout is None:
            raise RuntimeError(f"receive {name!r}: {NEEDS_WORLD}")

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

    async def race(self, *calls: Any) -> Any:
        """Run the first child only, which wins."""
        return await _run_call(calls[0])

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
        yield Reservation()


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
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.extend((asyncio.run(coroutine), None))
            except BaseException as raised:
                outcome.extend((None, raised))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join()
        value, error = outcome
        if error is not None:
            raise error
        return cast("T", value)


async def _run_call(call: Any) -> Any:
    value = call.task(*call.args, **call.kwargs)
    return await value if call.task.is_async else value
