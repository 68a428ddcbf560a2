"""The context of a plain call: `await send(mail)` in a unit test just runs the function, and no engine is involved.

Steps run, children run in place, sleeps are over at once, spending is counted nowhere. What has to come from somebody
else, a message or a vote, cannot come here: such a function wants a `World`.
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
from flowfabric.sdk.durable.output import Output, apply_merge_patch
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
        self._names: Counter[str] = Counter()
        self._outputs = {}

    @property
    def sync(self) -> SyncContext:
        """The same for plain functions."""
        from flowfabric.sdk.sync import SyncContext

        return SyncContext(self, cast("Portal", _Aside()))

    @property
    def durable(self) -> DurableAttempt:
        """Where steps get their numbers; nothing else of it is there."""
        return cast("DurableAttempt", self)

    def next_occurrence(self, label: str) -> tuple[str, int]:
        """The number of the next thing of this label."""
        self._names[label] += 1
        return label, self._names[label] - 1

    @asynccontextmanager
    async def without_parking(self) -> AsyncIterator[None]:
        """Nothing is ever put away."""
        yield

    @property
    def cancelled(self) -> bool:
        """Nobody cancels a plain call."""
        return False

    @property
    def lease_seconds_left(self) -> float:
        """There is no lease that could end."""
        return float("inf")

    async def find_step(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None, key: str | None
    ) -> StepCall:
        """The step, which never ran before."""
        return identify_step(self.durable, function, args, kwargs, name, key)

    async def record_step_result(self, step: StepCall, value: Any) -> StepCall:
        """What it returned, as it would come back from a store."""
        return step.with_memo(StepMemo(self.run_id, step.name, step.occurrence, 0, 0, step.encode(value)))

    async def reach_fault_point(self, point: str, moment: str) -> None:
        """Nothing goes wrong here."""

    async def _now(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, length: Duration) -> None:
        """Over at once."""
        to_ms(length, "sleep")

    async def receive(self, name: str, shape: Any = Any, *, timeout: Duration | None = None) -> Any:
        """None after a timeout; without one nothing could ever come."""
        if timeout is None:
            raise RuntimeError(f"receive {name!r}: {NEEDS_WORLD}")

    async def approval(self, name: str, shape: type[Any], **_: Any) -> Any:
        """Nobody could answer."""
        raise RuntimeError(f"approval {name!r}: {NEEDS_WORLD}")

    async def spawn(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """A child would be a run."""
        raise RuntimeError(f"spawn: {NEEDS_WORLD}")

    async def gather(self, *several: Any, join: Any = None) -> list[Any]:
        """Children run here, all of them."""
        from flowfabric.sdk.task import child_calls

        calls = child_calls(several)
        if calls is not None:
            return [await _called(call) for call in calls]
        return list(await asyncio.gather(*several))

    async def race(self, *calls: Any) -> Any:
        """The first one wins."""
        return await _called(calls[0])

    async def progress(self, patch: dict[str, Any] | str | None = None, *, pct: int | None = None) -> None:
        """What was said is in `said`."""
        given: dict[str, Any] = {"message": patch} if isinstance(patch, str) else dict(patch or {})
        self.reported_progress = apply_merge_patch(
            self.reported_progress, given if pct is None else {**given, "pct": pct}
        )

    def stream(self, name: str) -> Output:
        """An output that is only collected."""
        return self._outputs.setdefault(name, _Collected())

    async def spend(self, budget: Budget, **amounts: int | float) -> None:
        """Looked at, and counted nowhere."""
        budget.amounts(amounts)

    @asynccontextmanager
    async def reserve(
        self, budget: Budget, *, lasts: Duration = "1h", **amounts: int | float
    ) -> AsyncIterator[Reservation]:
        """There is always room."""
        budget.amounts(amounts)
        yield Reservation()


class _Collected(Output):
    """What was written, and nothing more."""

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
        """Nothing is under way."""


class _Aside:
    """Runs a coroutine on a loop of its own beside this thread, which may have one that runs."""

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What it returns."""
        box: list[Any] = []

        def run() -> None:
            try:
                box.extend((asyncio.run(coroutine), None))
            except BaseException as raised:
                box.extend((None, raised))

        aside = threading.Thread(target=run, daemon=True)
        aside.start()
        aside.join()
        value, error = box
        if error is not None:
            raise error
        return cast("T", value)


async def _called(call: Any) -> Any:
    value = call.task(*call.args, **call.kwargs)
    return await value if call.task.is_async else value
