"""`Context`: what a handler knows of its run, and the operations whose results are recorded.

`Context` joins the parts in `sdk/durable`: steps here, waits and children in `waits`, output in `output`, spending in
`budgets`. `ClaimedAttempt` creates it on first use, and `current()` finds it from anywhere below the handler.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, overload

from flowfabric.handles import Handle
from flowfabric.sdk.durable.attempt import DurableAttempt, in_step
from flowfabric.sdk.durable.budgets import ContextBudgets
from flowfabric.sdk.durable.output import ContextOutput
from flowfabric.sdk.durable.steps import StepCall, identify_step, run_step, step_function
from flowfabric.sdk.durable.waits import ContextWaits
from flowfabric.sdk.serialization.values import from_json, json_bytes
from flowfabric.sdk.worker.threads import Portal

if TYPE_CHECKING:
    from flowfabric.engine_api import EngineAPI
    from flowfabric.model.answers.execution import Claimed
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.sync import SyncContext
    from flowfabric.sdk.task import Task

T = TypeVar("T")

_current: contextvars.ContextVar[Context | ClaimedAttempt] = contextvars.ContextVar("flowfabric_context")
_creation_lock = threading.Lock()


class Context(ContextWaits, ContextOutput, ContextBudgets):
    """One attempt of a run, as its handler sees it. A plain `def` handler uses the blocking twin, `ctx.sync`."""

    def __init__(
        self,
        app: Fabric,
        engine: EngineAPI,
        handle: Handle,
        task: Task[..., Any],
        *,
        lease_until: Callable[[], int],
        budgets: Mapping[str, str] | None = None,
        handler_task: asyncio.Task[Any] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Create the context of a claimed attempt.

        `handler_task` is the task that runs the handler; None if a thread does. `lease_until` returns the expiry of the
        lease by the store's clock. `budgets` are the ids of the budgets of this run, by name.
        """
        super().__init__()
        self.app = app
        self.engine = engine
        self._handle = handle
        self._lease_until = lease_until
        self._budgets = budgets or {}
        self._durable: DurableAttempt | None = None
        self.handler_task = handler_task
        self._loop = loop or asyncio.get_running_loop()
        self._cancelled = False
        fields = handle.fields
        self.task = task.name
        self.run_id: str = fields.execution_id
        self.attempt = fields.attempt_index
        self.lane: str = fields.lane_id
        self.on_mismatch = task.on_mismatch

    @cached_property
    def random(self) -> random.Random:
        """A `random.Random` seeded with the run's id, so that every attempt gets the same numbers in the same order."""
        return random.Random(self.run_id)

    @property
    def handle(self) -> Handle:
        """The handle of the lease under which this attempt runs."""
        return self._handle

    @property
    def _itself(self) -> Context:
        return self

    @property
    def sync(self) -> SyncContext:
        """The blocking twin of this context, for plain functions: its methods have the same names and block."""
        from flowfabric.sdk.sync import SyncContext

        return SyncContext(self, Portal(self._loop, self.app.thread_scheduler))

    @property
    def durable(self) -> DurableAttempt:
        """The replay state of this attempt, created on first use, so that plain tasks do not pay for it."""
        if self._durable is None:
            self._durable = DurableAttempt(
                self.engine, self.handle, self.handler_task, flush=self.flush, strict=self.on_mismatch == "error"
            )
        return self._durable

    @property
    def may_park(self) -> bool:
        """True if the caller is the handler itself or a branch of it, where a wait can park the run."""
        holder = _current.get(None)
        context = holder.context if isinstance(holder, ClaimedAttempt) else holder
        return context is self and not self._cancelled and self.durable.is_in_handler()

    @property
    def is_parked(self) -> bool:
        """True if the run was parked: its lease is released, and the handler can record nothing more."""
        return self._durable is not None and self._durable.parked is not None

    @property
    def cancelled(self) -> bool:
        """True if this attempt has timed out, was cancelled or lost its lease. Long plain functions should poll it."""
        return self._cancelled

    def mark_cancelled(self) -> None:
        """Set `cancelled`, for a handler in a thread, which cannot be interrupted."""
        self._cancelled = True

    @property
    def lease_seconds_left(self) -> float:
        """Seconds until the lease expires; the worker renews it as long as the worker is alive."""
        left_ms = self._lease_until() - self.engine.estimate.now()
        # At most the lease's length: the estimate of the store's clock lags by the delay of the server's reply.
        return max(0, min(left_ms, self._handle.fields.lease_ttl_ms)) / 1000

    def key(self, name: str) -> str:
        """Return an idempotency key for a call to another service: the same on every attempt of this run."""
        return hashlib.sha256(f"{self.run_id}|{name}".encode()).hexdigest()

    def close(self) -> None:
        """Note that the handler has finished: tasks that it left behind can no longer park the run."""
        if self._durable is not None:
            self._durable.close()

    # -- steps ----------------------------------------------------------------------------------------------------

    @overload
    async def step(
        self,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        name: str | None = None,
        key: str | None = None,
        **kwargs: Any,
    ) -> T: ...
    @overload
    async def step(
        self, function: Callable[..., T], /, *args: Any, name: str | None = None, key: str | None = None, **kwargs: Any
    ) -> T: ...
    async def step(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        name: str | None = None,
        key: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a function once and record its result; later attempts return the result without running it again.

        A process that dies between the effect and the record runs the step again: pass `ctx.key(…)` to services that
        accept an idempotency key.

        A step is identified by its name and by how many steps of that name came before it in its branch. The name is
        the function's by default; give lambdas one, since they all have the same name. `key` identifies a step
        explicitly, wherever it occurs.
        """
        step = await self.find_step(function, args, kwargs, name, key)
        if not step.is_recorded:
            async with self.durable.without_parking():
                await self.reach_fault_point(step.fault_point, "before_effect")
                with in_step(step.name, step.occurrence):
                    value = await run_step(step_function(function, self), args, kwargs)
                step = await self.record_step_result(step, value)
        return step.result()

    async def find_step(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None, key: str | None
    ) -> StepCall:
        """Return the step at this point of the function, with its recorded result if it has run before."""
        step = identify_step(self.durable, function, args, kwargs, name, key)
        memo = await self.durable.step_memo(step.name, step.occurrence, step.digest)
        return step if memo is None else step.with_memo(memo)

    async def record_step_result(self, step: StepCall, value: Any) -> StepCall:
        """Record the result of a step."""
        await self.reach_fault_point(step.fault_point, "after_effect")
        result = step.encode(value)
        memo = await self.engine.record_step(
            self.handle, step.name, step.occurrence, result, encoding="json", digest=step.digest
        )
        await self.reach_fault_point(step.fault_point, "after_commit")
        return step.with_memo(memo)

    async def reach_fault_point(self, point: str, moment: str) -> None:
        """Mark a point at which a test can inject a crash."""
        if self.app.on_fault_point is not None:
            await self.app.on_fault_point(self, point, moment)

    async def now(self) -> int:
        """Return the time in milliseconds since the epoch, recorded on first use: the same on every attempt."""
        return await self.step(self._now, name="now")

    async def _now(self) -> int:
        return self.engine.estimate.now()

    def uuid(self) -> uuid.UUID:
        """Return a new unique id that is the same on every attempt."""
        name, occurrence = self.durable.next_occurrence("uuid")
        return uuid.uuid5(uuid.NAMESPACE_OID, f"{self.run_id}|{name}|{occurrence}")

    async def run_once(self, label: str, operation: Callable[[str], Awaitable[Any]]) -> Any:
        """Run an engine operation once and record its answer, which must be plain JSON data.

        The operation gets an idempotency key that is the same on every attempt.
        """
        name, occurrence = self.durable.next_occurrence(label)
        memo = await self.durable.step_memo(name, occurrence, None)
        if memo is None:
            async with self.durable.without_parking():
                await self.reach_fault_point(label, "before_effect")
                answer = await operation(self.key(f"{name}#{occurrence}"))
                await self.reach_fault_point(label, "after_effect")
                memo = await self.engine.record_step(self.handle, name, occurrence, json_bytes(answer), encoding="json")
                await self.reach_fault_point(label, "after_commit")
        return from_json(memo.result)


class ClaimedAttempt:
    """An attempt of a claimed execution. Its context is created on first use: many handlers need none."""

    __slots__ = ("_make_context", "claimed", "context", "handler_task", "is_process_starting")

    def __init__(self, claimed: Claimed, make_context: Callable[[ClaimedAttempt], Context]) -> None:
        self.claimed = claimed
        self._make_context = make_context
        self.context: Context | None = None
        self.handler_task: asyncio.Task[Any] | None = None  # the task that runs the handler; None before it starts
        self.is_process_starting = False  # while its subprocess starts, which does not count towards the timeout

    def get_context(self) -> Context:
        """Return the context; threads of the handler may call this concurrently."""
        if self.context is None:
            with _creation_lock:
                if self.context is None:
                    self.context = self._make_context(self)
        return self.context

    @property
    def is_parked(self) -> bool:
        """True if the run was parked."""
        return self.context is not None and self.context.is_parked


def current() -> Context:
    """Return the context of the running handler, from anywhere below it; `RuntimeError` if none is running."""
    try:
        holder = _current.get()
    except LookupError:
        raise RuntimeError("no handler of FlowFabric is running here") from None
    return holder.get_context() if isinstance(holder, ClaimedAttempt) else holder


def set_current(context: Context | ClaimedAttempt) -> contextvars.Token[Context | ClaimedAttempt]:
    """Make a context the current one of this task or thread."""
    return _current.set(context)


async def run_with_context(context: Context, awaitable: Awaitable[T]) -> T:
    """Await something with a context as the current one."""
    token = set_current(context)
    try:
        return await awaitable
    finally:
        _current.reset(token)
