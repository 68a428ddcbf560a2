"""The context: what a handler knows of its run, and what it can do that survives."""

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
_making = threading.Lock()


class Context(ContextWaits, ContextOutput, ContextBudgets):
    """One attempt at one run, in the hands of a handler. A plain `def` handler uses what it has through `sync`."""

    def __init__(
        self,
        app: Fabric,
        engine: EngineAPI,
        handle: Handle,
        task: Task[..., Any],
        *,
        lease_until: Callable[[], int],
        budgets: Mapping[str, str] | None = None,
        root: asyncio.Task[Any] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`root` is the task that runs the handler; None when a thread does. `lease_until` is by the store's clock.

        `budgets` are the ids of the budgets that hold for this run, by name.
        """
        super().__init__()
        self.app = app
        self.engine = engine
        self._handle = handle
        self._lease_until = lease_until
        self._budgets = budgets or {}
        self._durable: DurableAttempt | None = None
        self.root = root
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
        """A `random.Random` seeded with the run's id: the same numbers in the same order on every attempt."""
        return random.Random(self.run_id)

    @property
    def handle(self) -> Handle:
        """The lease under which this attempt runs."""
        return self._handle

    @property
    def _itself(self) -> Context:
        return self

    @property
    def sync(self) -> SyncContext:
        """The same for plain functions: each method waits for what the method of this name here would be awaited."""
        from flowfabric.sdk.sync import SyncContext

        return SyncContext(self, Portal(self._loop, self.app.thread_turns))

    @property
    def durable(self) -> DurableAttempt:
        """What earlier attempts left behind; read when first needed, so that plain tasks pay nothing for it."""
        if self._durable is None:
            self._durable = DurableAttempt(
                self.engine, self.handle, self.root, flush=self.flush, strict=self.on_mismatch == "error"
            )
        return self._durable

    @property
    def may_park(self) -> bool:
        """Whether the code that asks is the handler itself or a branch of it, where a wait can put the run away."""
        found = _current.get(None)
        here = found.context if isinstance(found, ClaimedAttempt) else found
        return here is self and not self._cancelled and self.durable.is_in_handler()

    @property
    def is_parked(self) -> bool:
        """Whether the run was put away: this attempt's handler is over, whatever it still does."""
        return self._durable is not None and self._durable.parked is not None

    @property
    def cancelled(self) -> bool:
        """Whether this attempt is over: timed out, cancelled, or its lease lost. For plain functions to look at."""
        return self._cancelled

    def give_up(self) -> None:
        """Tell a handler that cannot be interrupted that nobody waits for it any more."""
        self._cancelled = True

    @property
    def lease_seconds_left(self) -> float:
        """How long the lease lasts as things are; it is renewed as long as the worker lives."""
        left_ms = self._lease_until() - self.engine.estimate.now()
        # No longer than it was given for: what a server says of its time is a little late here.
        return max(0, min(left_ms, self._handle.fields.lease_ttl_ms)) / 1000

    def key(self, name: str) -> str:
        """An idempotency key for a call to the outside: the same on every attempt of this run."""
        return hashlib.sha256(f"{self.run_id}|{name}".encode()).hexdigest()

    def end(self) -> None:
        """The function has ended, one way or another: what it left behind has no say any more."""
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
        """Run a function once: its result is remembered, and later attempts return it without running it.

        A step is known by its name (by default the function's; give lambdas one, they are all called alike) and how
        often that occurred in its branch; `key` names one explicitly, wherever it occurs.
        """
        step = await self.recall(function, args, kwargs, name, key)
        if not step.is_recorded:
            async with self.durable.without_parking():
                await self.at(step.fault_point, "before_effect")
                with in_step(step.name, step.occurrence):
                    value = await run_step(step_function(function, self), args, kwargs)
                step = await self.keep(step, value)
        return step.result()

    async def recall(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None, key: str | None
    ) -> StepCall:
        """The step that stands here, with what it returned if it ran before."""
        step = identify_step(self.durable, function, args, kwargs, name, key)
        memo = await self.durable.step_memo(step.name, step.occurrence, step.digest)
        return step if memo is None else step.with_memo(memo)

    async def keep(self, step: StepCall, value: Any) -> StepCall:
        """Remember what a step returned."""
        await self.at(step.fault_point, "after_effect")
        result = step.encode(value)
        memo = await self.engine.record_step(
            self.handle, step.name, step.occurrence, result, encoding="json", digest=step.digest
        )
        await self.at(step.fault_point, "after_commit")
        return step.with_memo(memo)

    async def at(self, point: str, moment: str) -> None:
        """Come to a place where a test may want something to go wrong."""
        if self.app.on_point is not None:
            await self.app.on_point(self, point, moment)

    async def now(self) -> int:
        """The time when this was first asked, in milliseconds since the epoch; the same on every attempt."""
        return await self.step(self._now, name="now")

    async def _now(self) -> int:
        return self.engine.estimate.now()

    def uuid(self) -> uuid.UUID:
        """A fresh id that is the same on every attempt."""
        name, occurrence = self.durable.next_occurrence("uuid")
        return uuid.uuid5(uuid.NAMESPACE_OID, f"{self.run_id}|{name}|{occurrence}")

    async def remembered(self, label: str, ask: Callable[[str], Awaitable[Any]]) -> Any:
        """Ask something of the engine once, under a key that is the same on every attempt; the answer is plain JSON."""
        name, occurrence = self.durable.next_occurrence(label)
        memo = await self.durable.step_memo(name, occurrence, None)
        if memo is None:
            async with self.durable.without_parking():
                await self.at(label, "before_effect")
                answer = await ask(self.key(f"{name}#{occurrence}"))
                await self.at(label, "after_effect")
                memo = await self.engine.record_step(self.handle, name, occurrence, json_bytes(answer), encoding="json")
                await self.at(label, "after_commit")
        return from_json(memo.result)


class ClaimedAttempt:
    """An attempt at what was claimed. Its context is made when somebody asks for it: many handlers never do."""

    __slots__ = ("_make", "claimed", "context", "handler_task", "is_process_starting")

    def __init__(self, claimed: Claimed, make: Callable[[ClaimedAttempt], Context]) -> None:
        self.claimed = claimed
        self._make = make
        self.context: Context | None = None
        self.handler_task: asyncio.Task[Any] | None = None  # the task that runs the handler, once it has begun
        self.is_process_starting = False  # a process for it, which is none of the time that the handler has

    def get_context(self) -> Context:
        """The context; a thread of the handler's may be the first to ask."""
        if self.context is None:
            with _making:
                if self.context is None:
                    self.context = self._make(self)
        return self.context

    @property
    def is_parked(self) -> bool:
        """Whether the run was put away."""
        return self.context is not None and self.context.is_parked


def current() -> Context:
    """The context of the handler that is running, from anywhere below it."""
    try:
        found = _current.get()
    except LookupError:
        raise RuntimeError("no handler of FlowFabric is running here") from None
    return found.get_context() if isinstance(found, ClaimedAttempt) else found


def set_current(context: Context | ClaimedAttempt) -> contextvars.Token[Context | ClaimedAttempt]:
    """Make a context the current one of this task or thread."""
    return _current.set(context)


async def run_with_context(context: Context, call: Awaitable[T]) -> T:
    """Await something with a context as the current one."""
    token = set_current(context)
    try:
        return await call
    finally:
        _current.reset(token)
