"""The replay of one durable function: its branches, its waits, and when it parks.

A durable function runs from the top on every attempt and after every wait. Recorded steps return their results and
closed gates return their outcomes, so the function arrives where it was. It parks only when every branch is blocked.
Until then a wait keeps the lease, so that a step in another branch finishes and is recorded first.

A function may also create asyncio tasks itself, with `asyncio.gather` or a task group ("own tasks" below). The context
cannot see what such a task does between two calls of the context. It therefore counts only while it is inside a call:
none of its steps is interrupted, and when no call is in flight, a wait of such a task parks the run. `ctx.gather` knows
its branches, and parks only when each of them waits or has finished.

Parking does not raise through user code: the wait never returns, the lease is released, and the coroutine is cancelled.
Code in a `finally` block sees that cancellation, and the context refuses to record anything more.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from flowfabric.engine.operations.durable import OpenedGate, ParkResult
from flowfabric.model.gate import GateMemo, StepMemo
from flowfabric.sdk.exceptions import Fatal

if TYPE_CHECKING:
    from flowfabric.engine.types import GateArgs
    from flowfabric.engine_api import EngineAPI
    from flowfabric.handles import Handle

logger = logging.getLogger("flowfabric.durable")

_BRANCH = re.compile(r"(?:gather#\d+\.\d+/)*")
_branch: contextvars.ContextVar[str] = contextvars.ContextVar("flowfabric_branch", default="")
_step: contextvars.ContextVar[str] = contextvars.ContextVar("flowfabric_step", default="")
_depth: contextvars.ContextVar[int] = contextvars.ContextVar("flowfabric_depth", default=0)

YIELDS_BEFORE_PARK = 5  # iterations of the loop, after which an own task that is ready has made its next call


class NonDeterministic(Fatal):
    """A durable function no longer matches its recorded steps. Raised if its task has `on_mismatch="error"`."""


class SimulatedCrash(BaseException):
    """Simulates the death of the process in tests: nothing is written afterwards, and the lease expires."""


def is_simulated_crash(failure: BaseException) -> bool:
    """True for a simulated crash, and for an exception group that contains one."""
    if isinstance(failure, BaseExceptionGroup):
        return failure.subgroup(SimulatedCrash) is not None
    return isinstance(failure, SimulatedCrash)


class HandlerUnwound(BaseException):
    """Unwinds a plain function that has to wait. Not an `Exception`, so that `except Exception` does not catch it."""


class DurableAttempt:
    """The replay state of one attempt: recorded steps, numbered names, running branches and blocked waits."""

    def __init__(
        self,
        engine: EngineAPI,
        handle: Handle,
        handler_task: asyncio.Task[Any] | None,
        *,
        flush: Callable[[], Awaitable[None]],
        strict: bool = False,
    ) -> None:
        """Prepare an attempt; nothing is read yet.

        `handler_task` is the task that runs the handler; None if a thread does. `flush` waits for output in flight.
        `strict` raises `NonDeterministic` for a mismatch that is otherwise logged.
        """
        self.engine = engine
        self.handle = handle
        self.parked: ParkResult | None = None
        self._is_closed = False
        self._handler_task = handler_task
        self._flush = flush
        self._strict = strict
        self._active = 1  # the handler and the branches of `gather` that are neither blocked nor finished
        self._branches: set[asyncio.Task[Any]] = set()
        self._blocked: dict[str, asyncio.Future[GateMemo]] = {}
        self._blocked_own_tasks: set[str] = set()  # the blocked gates that own tasks wait for
        self._calls_in_flight = 0  # calls that must not be interrupted by parking
        self._park_lock = asyncio.Lock()
        self._park_checks: set[asyncio.Task[None]] = set()
        self._names: Counter[str] = Counter()
        self._steps: dict[tuple[str, int], StepMemo] | None = None
        self._reached: set[tuple[str, int]] = set()  # the steps that this attempt has reached
        self._on_parked: list[Callable[[], Awaitable[Any]]] = []
        self._has_warned = False
        self._load_lock = asyncio.Lock()

    # -- names ----------------------------------------------------------------------------------------------------

    def next_occurrence(self, label: str) -> tuple[str, int]:
        """Return the qualified name for a label in this branch, and how often that name occurred before."""
        name = f"{_branch.get()}{label}"
        occurrence = self._names[name]
        self._names[name] += 1
        return name, occurrence

    def next_gate_name(self, label: str) -> str:
        """Return the name of the next gate with this label in this branch."""
        name, occurrence = self.next_occurrence(label)
        return f"{name}#{occurrence}"

    # -- steps ----------------------------------------------------------------------------------------------------

    async def step_memo(self, name: str, occurrence: int, digest: str | None) -> StepMemo | None:
        """Return the recorded result of a step, or None if it has not run.

        If the record has another input, a later record of this name with the same input takes its place. Without one
        the mismatch is reported, and the record is used all the same.
        """
        steps = await self._load_steps()
        memo = steps.get((name, occurrence))
        self._reached.add((name, occurrence))
        if memo is None:
            await self._check_for_skipped_steps(steps, name, occurrence)
            return None
        if digest is None or memo.digest in (None, digest):
            return memo
        for (other_name, number), other in steps.items():
            if other_name == name and other.digest == digest and number > occurrence:
                steps[(name, occurrence)], steps[(other_name, number)] = other, memo
                return other
        self.report_mismatch(
            f"step {name!r} (number {occurrence}) is recorded with another input; the recorded result is used. Give "
            "steps that may swap places a key="
        )
        return memo

    async def _load_steps(self) -> dict[tuple[str, int], StepMemo]:
        if self._steps is None:
            async with self._load_lock:
                if self._steps is None:
                    memos = await self.engine.read_steps_as_holder(self.handle)
                    self._steps = {(memo.name, memo.occurrence): memo for memo in memos}
        return self._steps

    async def _check_for_skipped_steps(
        self, steps: dict[tuple[str, int], StepMemo], name: str, occurrence: int
    ) -> None:
        """Report a mismatch if a new step runs before recorded steps of its branch that were not reached yet."""
        branch = _branch.get()
        if self._has_warned or name.startswith("key:") or not self._skipped_steps(steps, branch):
            return
        await asyncio.sleep(0)  # steps that start concurrently are all reached within one iteration of the loop
        if skipped := self._skipped_steps(steps, branch):
            self.report_mismatch(
                f"step {name!r} (number {occurrence}) runs for the first time although {', '.join(skipped)} ran "
                "before: was it renamed or moved? Give it its old name= or a key=, or let runs of the old function "
                "finish first"
            )

    def _skipped_steps(self, steps: dict[tuple[str, int], StepMemo], branch: str) -> list[str]:
        names = (name for name, _ in steps.keys() - self._reached if _branch_of(name) == branch)
        return sorted({repr(name) for name in names if not name.startswith("key:")})

    def report_mismatch(self, message: str) -> None:
        """Report that the function no longer matches its records: by a warning, or if strict, by an error."""
        message = f"{self.handle.fields.execution_id}: {message}"
        if self._strict:
            raise NonDeterministic(message)
        self._has_warned = True
        logger.warning(message)

    # -- branches -------------------------------------------------------------------------------------------------

    async def gather(self, awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
        """Run branches concurrently. Each branch numbers its own steps and gates. The first failure cancels all."""
        name, occurrence = self.next_occurrence("gather")
        members = list(awaitables)
        branches = {f"{name}#{occurrence}.{number}/": member for number, member in enumerate(members)}
        unfinished = set(branches)
        self._active += len(members) - 1  # the calling branch waits for these, so it is not active itself
        tasks = [
            asyncio.create_task(self._run_branch(member, branch, unfinished)) for branch, member in branches.items()
        ]
        self._branches.update(tasks)
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._unwind_waits(f"{name}#{occurrence}.")
            raise
        finally:
            self._active += 1 - len(unfinished)
            self._branches.difference_update(tasks)

    def _unwind_waits(self, prefix: str) -> None:
        """End the waits of threads in the branches with this prefix: cancelling a task does not reach its thread."""
        for name in [name for name in self._blocked if name.startswith(prefix)]:
            if (closed := self._stop_waiting(name)) is not None:
                closed.set_exception(HandlerUnwound("another branch failed"))

    def is_in_handler(self) -> bool:
        """True if the caller is the handler or a branch of it, not a step or an own task."""
        return not _step.get() and self.parked is None and not self._is_own_task()

    def close(self) -> None:
        """Note that the function has finished: its own tasks record nothing more, and cannot park the run."""
        self._is_closed = True
        for name in self._blocked_own_tasks:
            self._blocked[name].cancel("the function is over")

    def _is_own_task(self) -> bool:
        """True if the caller runs in an asyncio task that the function created itself."""
        return self._handler_task is not None and asyncio.current_task() not in (self._handler_task, *self._branches)

    @asynccontextmanager
    async def without_parking(self) -> AsyncIterator[None]:
        """Prevent parking during the block, except for a wait inside it."""
        if self._park_lock.locked():
            async with self._park_lock:
                pass
        if self.parked is not None or self._is_closed:
            raise asyncio.CancelledError("the function is over")
        self._calls_in_flight += 1
        token = _depth.set(_depth.get() + 1)
        try:
            yield
        finally:
            _depth.reset(token)
            self._calls_in_flight -= 1
            if self._blocked and self._calls_in_flight <= 0 and (self._blocked_own_tasks or self._is_own_task()):
                check = asyncio.create_task(self._park_if_still_blocked())
                self._park_checks.add(check)
                check.add_done_callback(self._park_checks.discard)

    async def _park_if_still_blocked(self) -> None:
        """Park if no call is in flight, after own tasks that are ready had time to make their next call."""
        for _ in range(YIELDS_BEFORE_PARK):
            await asyncio.sleep(0)
        await self._park_if_blocked()

    async def _run_branch(self, member: Awaitable[Any], branch: str, unfinished: set[str]) -> Any:
        """Run a branch. A failed branch stays active until its `gather` sees the failure, so nothing parks before."""
        _branch.set(branch)
        value = await member
        unfinished.discard(branch)
        self._active -= 1
        await self._park_if_blocked()
        return value

    # -- waits ----------------------------------------------------------------------------------------------------

    async def open_and_wait(self, args: GateArgs, *, on_parked: Callable[[], Awaitable[Any]] | None = None) -> GateMemo:
        """Open a gate and return its outcome. Parks the execution if everything is blocked, then calls `on_parked`."""
        async with self.without_parking():
            opened = await self.engine.open_gate(self.handle, args)
        if isinstance(opened, GateMemo):
            return opened
        if on_parked is not None:
            self._on_parked.append(on_parked)
        return await self.wait_for_gate(opened)

    async def wait_for_gate(self, opened: OpenedGate) -> GateMemo:
        """Wait for the outcome of an open gate; parks the execution if everything is blocked."""
        closed: asyncio.Future[GateMemo] = asyncio.get_running_loop().create_future()
        depth, is_own_task = _depth.get(), self._is_own_task()
        self._blocked[opened.name] = closed
        self._calls_in_flight -= depth  # the calls that contain this wait
        if is_own_task:
            self._blocked_own_tasks.add(opened.name)
        else:
            self._active -= 1
        try:
            await (self._park_if_still_blocked() if is_own_task else self._park_if_blocked())
            return await closed
        except asyncio.CancelledError:  # another branch failed
            self._stop_waiting(opened.name)
            raise
        finally:
            self._calls_in_flight += depth

    def _stop_waiting(self, name: str) -> asyncio.Future[GateMemo] | None:
        """Count the waiter of a gate as active again; return its future if it is still pending."""
        if (closed := self._blocked.pop(name, None)) is None:
            return None
        if name in self._blocked_own_tasks:
            self._blocked_own_tasks.discard(name)
        else:
            self._active += 1
        return None if closed.done() else closed

    def _is_blocked(self) -> bool:
        """True if nothing can continue. If an own task waits, the handler is assumed to wait for that task."""
        if self._is_closed or self.parked is not None or not self._blocked:
            return False
        return self._calls_in_flight <= 0 and self._active - bool(self._blocked_own_tasks) <= 0

    async def _park_if_blocked(self) -> None:
        while self._is_blocked():
            async with self._park_lock:
                if not self._is_blocked():
                    continue
                names = tuple(self._blocked)
                await self._flush()
                answer = await self.engine.park(self.handle, names)
                if isinstance(answer, ParkResult):
                    self.parked = answer
                    for callback in self._on_parked:
                        await callback()
                    self._discard()
                    return
                waits = await self.engine.read_waits(self.handle.fields.execution_id)
                for name in answer.gates:
                    if (closed := self._stop_waiting(name)) is not None:
                        closed.set_result(waits.memos[name])

    def _discard(self) -> None:
        """End the handler where it waits, since its lease is released."""
        if self._handler_task is not None:
            self._handler_task.cancel("parked")
            self.close()
            return
        for closed in self._blocked.values():
            closed.set_exception(HandlerUnwound("parked"))


@contextmanager
def in_step(name: str, occurrence: int) -> Iterator[None]:
    """Mark the block as running inside a step."""
    token = _step.set(f"{name}#{occurrence}/")
    try:
        yield
    finally:
        _step.reset(token)


def occurrence_scope() -> str:
    """Return the running step, or outside a step the branch: the scope in which occurrences are numbered."""
    return _step.get() or _branch.get()


def _branch_of(name: str) -> str:
    """Return the branch prefix of a step's name."""
    match = _BRANCH.match(name)
    return match[0] if match else ""
