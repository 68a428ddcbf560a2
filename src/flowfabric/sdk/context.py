"""`Context`: what a handler knows of its run, and the operations whose results are recorded.

`Context` joins the parts in `sdk/durable`: steps here, waits and children in `waits`, facts and messages in `inbox`,
output in `output`, spending in `budgets`. `ClaimedAttempt` creates it on first use, and `current()` finds it from
anywhere below the handler.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, overload

from flowfabric.handles import Handle
from flowfabric.sdk.durable.attempt import DurableAttempt
from flowfabric.sdk.durable.branches import BranchOwner, BranchTree, current_owner
from flowfabric.sdk.durable.budgets import ContextBudgets, SpendKeys
from flowfabric.sdk.durable.code_mismatch import CodeVersion, ask_patched
from flowfabric.sdk.durable.inbox import Codecs, ContextInbox
from flowfabric.sdk.durable.lives import continue_run, should_continue
from flowfabric.sdk.durable.options import ContextOptions
from flowfabric.sdk.durable.output import ContextOutput
from flowfabric.sdk.durable.step_execution import RunnableStep, StepExecution, drive
from flowfabric.sdk.durable.step_identity import StepOptions, named_in_call, run_step
from flowfabric.sdk.durable.waits import ContextWaits
from flowfabric.sdk.durations import Duration
from flowfabric.sdk.retry import Retry
from flowfabric.sdk.worker.threads import LoopPortal

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.model.answers.execution import Claimed
    from flowfabric.sdk.durable.sync_context import SyncContext
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.task import Task

P = ParamSpec("P")
T = TypeVar("T")

_creation_lock = threading.Lock()


class Context(ContextWaits, ContextInbox, ContextOutput, ContextBudgets):
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
        branches: BranchTree | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        life: int = 0,
        scheduled: tuple[str, int] | None = None,
    ) -> None:
        """Create the context of a claimed attempt.

        `branches` are those of the task that runs the handler; None if a thread does. `lease_until` returns the expiry
        of the lease by the store's clock. `budgets` are the ids of the budgets of this run, by name. `scheduled` is the
        schedule of the run, by name, with its instant.
        """
        super().__init__()
        self.app = app
        self.engine = engine
        self._handle = handle
        self._lease_until = lease_until
        self._budgets = budgets or {}
        self._durable: DurableAttempt | None = None
        self.branches = branches or BranchTree()
        self._loop = loop or asyncio.get_running_loop()
        self._cancelled = False
        self.continues_elsewhere = False  # the worker gave this attempt up, and another one continues the run
        self._spends = SpendKeys()
        fields = handle.fields
        self.task = task.name
        self._declared_inbox = task.inbox
        self.run_id: str = fields.execution_id
        self.life = life  # how often the run has continued as new
        self.origin = f"{self.run_id}/{life}" if life else self.run_id  # names of this life are derived from it
        self.open_reservations = 0
        self.attempt = fields.attempt_index
        self.lane: str = fields.lane_id
        self._scheduled = scheduled
        self._code = CodeVersion(task.name, task.on_mismatch, partial(app.version_of, task), task.pin)

    @cached_property
    def random(self) -> random.Random:
        """A `random.Random` seeded with the run's id, so that every attempt gets the same numbers in the same order."""
        return random.Random(self.origin)

    @property
    def schedule(self) -> str | None:
        """The name of the schedule that created this run; None if none did."""
        return None if self._scheduled is None else self._scheduled[0]

    @property
    def scheduled_at(self) -> datetime | None:
        """The instant for which its schedule created this run, without jitter; None without a schedule."""
        return None if self._scheduled is None else datetime.fromtimestamp(self._scheduled[1] / 1000, UTC)

    @property
    def handle(self) -> Handle:
        """The handle of the lease under which this attempt runs."""
        return self._handle

    @property
    def _itself(self) -> Context:
        return self

    @property
    def declared_inbox(self) -> Codecs:
        """What the task declares to take, by the name of the message."""
        return self._declared_inbox

    @property
    def sync(self) -> SyncContext:
        """The blocking twin of this context, for plain functions: its methods have the same names and block."""
        from flowfabric.sdk.durable.sync_context import SyncContext

        return SyncContext(self, LoopPortal(self._loop, self.app.thread_scheduler))

    @property
    def durable(self) -> DurableAttempt:
        """The replay state of this attempt, created on first use, so that plain tasks do not pay for it."""
        if self._durable is None:
            self._durable = DurableAttempt(
                self.engine,
                self.handle,
                self.branches,
                flush=self.flush,
                reach=self.reach_fault_point,
                code=self._code,
            )
        return self._durable

    @property
    def may_park(self) -> bool:
        """True if the caller is the handler itself or a branch of it, where a wait can park the run."""
        owner = current_owner.get(None)
        context = owner.context if isinstance(owner, ClaimedAttempt) else owner
        return context is self and not self._cancelled and self.durable.is_in_handler()

    @property
    def is_parked(self) -> bool:
        """True if the run was parked or continued as new: its lease is released, the handler records nothing more."""
        return self._durable is not None and self._durable.is_released

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

    async def _load_reported(self) -> Mapping[str, int]:
        if self.handle.fields.lease_epoch <= 1:  # the first lease of the run
            return {}
        await self.durable.ledger.load()
        return self.durable.ledger.progress_counts

    def key(self, name: str) -> str:
        """Return an idempotency key for a call to another service: the same on every attempt of this life."""
        return hashlib.sha256(f"{self.origin}|{name}".encode()).hexdigest()

    def close(self) -> None:
        """Note that the handler has finished: tasks that it left behind can no longer park the run."""
        if self._durable is not None:
            self._durable.close()

    # -- steps ----------------------------------------------------------------------------------------------------

    @overload
    async def step(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def step(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function once and record its result; later attempts return the result without running it again.

        A failure that the function catches and moves past is remembered, too, and raised again by later attempts. One
        that ends the attempt is not: the step runs again. A process that dies between the effect and the record runs
        the step again: pass `ctx.key(…)` to services that accept an idempotency key.

        A step is identified by its name and by how many steps of that name came before it in its branch. The name is
        the function's by default; `ctx.options(…)` gives it another one, a key, retries or a timeout.
        """
        return await self.run_step(function, args, kwargs, named_in_call(kwargs))

    def options(
        self,
        *,
        name: str | None = None,
        key: str | None = None,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        at_most_once: bool | None = None,
    ) -> ContextOptions:
        """Return a context that runs a step with options: `await ctx.options(timeout="10s").step(charge, card)`.

        `name` takes the place of the function's; give lambdas one, since they all have the same name. `key` identifies
        a step explicitly, wherever it occurs. With `retry` the step owns its retries: when they are used up, the task's
        are not asked. `timeout` is for each try, and raises `StepTimeout`. A step with `at_most_once` never runs
        twice: an attempt that finds that it began, but no end, raises `StepInterrupted`.
        """
        options = StepOptions(name=name, key=key, retry=retry, timeout=timeout, at_most_once=at_most_once)
        return ContextOptions(self, options)

    async def run_step(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: StepOptions) -> Any:
        """Run a step with options, or return its recorded result."""
        execution = await self.begin_step(function, args, kwargs, options)
        return await drive(
            execution,
            lambda: run_step(
                execution.function,
                args,
                kwargs,
                label=execution.call.label,
                timeout_s=execution.options.timeout_s,
                on_timeout=execution.expire,
            ),
        )

    async def begin_step(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: StepOptions
    ) -> RunnableStep:
        """Return the step at this point of the function, ready for a try, or with its recorded result."""
        return await StepExecution.begin(self, function, args, kwargs, options)

    def is_final(self, failure: BaseException) -> bool:
        """True if an attempt that ends with this failure is not retried: it would only reach it again."""
        return self._durable is not None and self._durable.is_final(failure)

    async def patched(self, patch: str) -> bool:
        """Return True if this run goes the new way of a change in its function, False if it had passed this place.

        The first answer is remembered for the whole run:

            if await ctx.patched("fraud-check"):
                await ctx.step(check_fraud, order)
        """
        return await ask_patched(self.durable, patch)

    @property
    def should_continue(self) -> bool:
        """True if this life has reached over 1,000 operations, all of which every attempt loads: continue as new."""
        return should_continue(self.durable.ledger, self.run_id)

    async def continue_as_new(self, *args: Any, **kwargs: Any) -> NoReturn:
        """End this life and begin the next one with these arguments; does not return.

        The run keeps its id, key, tags, parent and unread messages, and forgets its steps and waits. Children continue
        without a parent that waits for them; open approvals are closed. `run.result()` waits for the last life.
        Arguments are checked against the task's; `task.s(…)` as the only one lets a type checker do so, too.
        """
        await continue_run(self, args, kwargs)

    async def reach_fault_point(self, point: str, moment: str) -> None:
        """Mark a point at which a test can inject a crash."""
        if self.app.on_fault_point is not None:
            await self.app.on_fault_point(self, point, moment)

    async def now(self) -> int:
        """Return the time in milliseconds since the epoch, recorded on first use: the same on every attempt."""
        return await self.options(name="now").step(self._now)

    async def _now(self) -> int:
        return self.engine.estimate.now()

    def uuid(self) -> uuid.UUID:
        """Return a new unique id that is the same on every attempt."""
        name, occurrence = self.durable.next_occurrence("uuid")
        return uuid.uuid5(uuid.NAMESPACE_OID, f"{self.origin}|{name}|{occurrence}")


class ClaimedAttempt:
    """An attempt of a claimed execution. Its context is created on first use: many handlers need none."""

    __slots__ = (
        "_branches",
        "_make_context",
        "claimed",
        "context",
        "handler_task",
        "is_cancelled",
        "is_process_starting",
        "time_limit",
    )

    def __init__(self, claimed: Claimed, make_context: Callable[[ClaimedAttempt], Context]) -> None:
        self.claimed = claimed
        self._make_context = make_context
        self._branches: BranchTree | None = None
        self.context: Context | None = None
        self.handler_task: asyncio.Task[Any] | None = None  # the task that runs the handler; None before it starts
        self.is_cancelled = False  # set by the worker when it stops or has lost the lease
        self.time_limit: asyncio.Timeout | None = None  # timeout of the handler
        self.is_process_starting = False  # the start of its subprocess does not count towards the timeout

    def get_context(self) -> Context:
        """Return the context; threads of the handler may call this concurrently."""
        if self.context is None:
            with _creation_lock:
                if self.context is None:
                    self.context = self._make_context(self)
        return self.context

    @property
    def branches(self) -> BranchTree:
        """The branches of an `async def` handler, created with its first task or its context."""
        if self._branches is None:
            self._branches = BranchTree(self.handler_task, is_ending=self.is_ending)
        return self._branches

    def is_ending(self) -> bool:
        """True once the worker has cancelled the attempt, or its time is over.

        The cancellation requests of the task do not show it: before Python 3.13 a task group that failed leaves one.
        """
        return self.is_cancelled or (self.time_limit is not None and self.time_limit.expired())

    @property
    def is_parked(self) -> bool:
        """True if the run was parked."""
        return self.context is not None and self.context.is_parked


def current() -> Context:
    """Return the context of the running handler, from anywhere below it; `RuntimeError` if none is running."""
    match current_owner.get(None):
        case ClaimedAttempt() as attempt:
            return attempt.get_context()
        case Context() as context:
            return context
        case _:
            raise RuntimeError("no handler of FlowFabric is running here")


def set_current(context: Context | ClaimedAttempt) -> contextvars.Token[BranchOwner]:
    """Make a context the current one of this task or thread."""
    return current_owner.set(context)


async def run_with_context(context: Context, awaitable: Awaitable[T]) -> T:
    """Await something with a context as the current one."""
    token = set_current(context)
    try:
        return await awaitable
    finally:
        current_owner.reset(token)
