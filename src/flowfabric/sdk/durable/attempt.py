"""The run of a durable function: its branches, its waits, and when it parks.

A durable function runs from the top on every attempt and after every wait. Finished steps return what they returned,
closed gates what came of them, so it arrives where it was. It parks only when every branch is blocked: until then a
wait just waits, and a step beside a long sleep finishes and is remembered before the lease goes.

A function may also make tasks of its own, with asyncio's `gather` or a task group. Nobody knows what they are up to
between two calls of the context, so they count only while they are in one: none of their steps is torn, and once none
is under way, a wait of theirs parks the run. `ctx.gather` knows its branches, and lets all of them come to a wait.

Parking does not raise through user code: the wait never returns, the lease is given back, and the coroutine is
discarded. Code in a `finally` then sees a cancellation, and the context refuses to write anything more.
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

YIELDS_BEFORE_PARK = 5  # of the loop, after which a task that was about to call the context has done so


class NonDeterministic(Fatal):
    """The function took another way than the one it is remembered to have taken."""


class SimulatedCrash(BaseException):
    """Stands for the death of the process, in tests: nothing after it is written, and the lease lapses."""


def is_simulated_crash(failure: BaseException) -> bool:
    """Whether the process is to be taken for dead: a crash, or one among what a task group raised."""
    if isinstance(failure, BaseExceptionGroup):
        return failure.subgroup(SimulatedCrash) is not None
    return isinstance(failure, SimulatedCrash)


class HandlerUnwound(BaseException):
    """Unwinds a plain function that has to wait; not an `Exception`, so that it passes the usual handlers."""


class DurableAttempt:
    """What one attempt of a durable function knows of the earlier ones, and what it is doing."""

    def __init__(
        self,
        engine: EngineAPI,
        handle: Handle,
        root: asyncio.Task[Any] | None,
        *,
        flush: Callable[[], Awaitable[None]],
        strict: bool = False,
    ) -> None:
        """`root` is the task that runs the handler; None when a thread does. `flush` writes what is still buffered.

        `strict` makes an error of what is otherwise a warning: that the function took another way than before.
        """
        self.engine = engine
        self.handle = handle
        self.parked: ParkResult | None = None
        self._is_over = False
        self._root = root
        self._flush = flush
        self._strict = strict
        self._active = 1
        self._branches: set[asyncio.Task[Any]] = set()
        self._blocked: dict[str, asyncio.Future[GateMemo]] = {}
        self._aside: set[str] = set()  # those of the blocked that are in tasks of the function's own making
        self._working = 0  # calls under way that must not be torn
        self._parking = asyncio.Lock()
        self._looking: set[asyncio.Task[None]] = set()
        self._names: Counter[str] = Counter()
        self._steps: dict[tuple[str, int], StepMemo] | None = None
        self._met: set[tuple[str, int]] = set()  # the steps that this attempt has come to
        self._then: list[Callable[[], Awaitable[Any]]] = []
        self._warned = False
        self._reading = asyncio.Lock()

    # -- names ----------------------------------------------------------------------------------------------------

    def next_occurrence(self, label: str) -> tuple[str, int]:
        """The name of the next thing of this label in this branch, and how many came before it."""
        name = f"{_branch.get()}{label}"
        occurrence = self._names[name]
        self._names[name] += 1
        return name, occurrence

    def next_gate_name(self, label: str) -> str:
        """The name of the next gate of this label in this branch."""
        name, occurrence = self.next_occurrence(label)
        return f"{name}#{occurrence}"

    # -- steps ----------------------------------------------------------------------------------------------------

    async def step_memo(self, name: str, occurrence: int, digest: str | None) -> StepMemo | None:
        """What this step returned earlier; a memo of another input is passed over for one that fits."""
        steps = await self._remembered()
        memo = steps.get((name, occurrence))
        self._met.add((name, occurrence))
        if memo is None:
            await self._check_way(steps, name, occurrence)
            return None
        if digest is None or memo.digest in (None, digest):
            return memo
        for (known, place), other in steps.items():
            if known == name and other.digest == digest and place > occurrence:
                steps[(name, occurrence)], steps[(known, place)] = other, memo
                return other
        self.report_mismatch(
            f"step {name!r} (number {occurrence}) is remembered with another input; what it returned then stands. Give "
            "steps that may swap places a key="
        )
        return memo

    async def _remembered(self) -> dict[tuple[str, int], StepMemo]:
        if self._steps is None:
            async with self._reading:
                if self._steps is None:
                    found = await self.engine.read_steps_as_holder(self.handle)
                    self._steps = {(memo.name, memo.occurrence): memo for memo in found}
        return self._steps

    async def _check_way(self, steps: dict[tuple[str, int], StepMemo], name: str, occurrence: int) -> None:
        """Notice that a step is new although steps of its branch are remembered that the function has not come to."""
        branch = _branch.get()
        if self._warned or name.startswith("key:") or not self._passed_over(steps, branch):
            return
        await asyncio.sleep(0)  # steps that are started together come to their places in one turn
        if left := self._passed_over(steps, branch):
            self.report_mismatch(
                f"step {name!r} (number {occurrence}) runs for the first time although {', '.join(left)} ran before: "
                "was it renamed or moved? Give it its old name= or a key=, or let runs of the old function finish first"
            )

    def _passed_over(self, steps: dict[tuple[str, int], StepMemo], branch: str) -> list[str]:
        left = (name for name, place in steps.keys() - self._met if _branch_of(name) == branch)
        return sorted({repr(name) for name in left if not name.startswith("key:")})

    def report_mismatch(self, words: str) -> None:
        """Say that the function took another way than before: once an attempt, or as an error that ends it."""
        words = f"{self.handle.fields.execution_id}: {words}"
        if self._strict:
            raise NonDeterministic(words)
        self._warned = True
        logger.warning(words)

    # -- branches -------------------------------------------------------------------------------------------------

    async def gather(self, awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
        """Run branches beside each other; each counts its steps and gates for itself. The first failure ends all."""
        name, occurrence = self.next_occurrence("gather")
        members = list(awaitables)
        branches = {f"{name}#{occurrence}.{number}/": member for number, member in enumerate(members)}
        going_on = set(branches)
        self._active += len(members) - 1  # the branch that gathers waits for these
        tasks = [asyncio.create_task(self._run(member, branch, going_on)) for branch, member in branches.items()]
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
            self._active += 1 - len(going_on)
            self._branches.difference_update(tasks)

    def _unwind_waits(self, branches: str) -> None:
        """End the waits that threads of these branches are still in: a thread does not hear that it was cancelled."""
        for name in [name for name in self._blocked if name.startswith(branches)]:
            if (waiting := self._wakes(name)) is not None:
                waiting.set_exception(HandlerUnwound("another branch failed"))

    def is_in_handler(self) -> bool:
        """Whether the code that asks is the handler or a branch of it; a step, or a task of the handler's own making,
        is neither."""
        if _step.get() or self.parked is not None:
            return False
        return self._root is None or asyncio.current_task() in (self._root, *self._branches)

    def close(self) -> None:
        """The function has ended: tasks that it left behind do nothing more, and do not put the run away."""
        self._is_over = True
        for name in self._aside:
            self._blocked[name].cancel("the function is over")

    def _is_aside(self) -> bool:
        """Whether the code that asks runs in a task of the function's own making."""
        return self._root is not None and asyncio.current_task() not in (self._root, *self._branches)

    @asynccontextmanager
    async def without_parking(self) -> AsyncIterator[None]:
        """Let nothing park while this lasts, except for a wait within it."""
        if self._parking.locked():
            async with self._parking:
                pass
        if self.parked is not None or self._is_over:
            raise asyncio.CancelledError("the function is over")
        self._working += 1
        token = _depth.set(_depth.get() + 1)
        try:
            yield
        finally:
            _depth.reset(token)
            self._working -= 1
            if self._blocked and self._working <= 0 and (self._aside or self._is_aside()):
                looking = asyncio.create_task(self._look_again())
                self._looking.add(looking)
                looking.add_done_callback(self._looking.discard)

    async def _look_again(self) -> None:
        """Park if nothing is under way; whoever goes on with another call gets the time to do so first."""
        for _ in range(YIELDS_BEFORE_PARK):
            await asyncio.sleep(0)
        await self._park_if_blocked()

    async def _run(self, member: Awaitable[Any], branch: str, going_on: set[str]) -> Any:
        """A branch. One that fails counts as going on until its gather has heard of it: nothing parks before that."""
        _branch.set(branch)
        value = await member
        going_on.discard(branch)
        self._active -= 1
        await self._park_if_blocked()
        return value

    # -- waits ----------------------------------------------------------------------------------------------------

    async def open_and_wait(self, args: GateArgs, *, on_parked: Callable[[], Awaitable[Any]] | None = None) -> GateMemo:
        """What comes of a gate; parks the execution when nothing else is left to do, and does `then` when it has."""
        async with self.without_parking():
            opened = await self.engine.open_gate(self.handle, args)
        if isinstance(opened, GateMemo):
            return opened
        if on_parked is not None:
            self._then.append(on_parked)
        return await self.wait_for_gate(opened)

    async def wait_for_gate(self, opened: OpenedGate) -> GateMemo:
        """The same for a gate that is open already."""
        closed: asyncio.Future[GateMemo] = asyncio.get_running_loop().create_future()
        within, aside = _depth.get(), self._is_aside()
        self._blocked[opened.name] = closed
        self._working -= within  # the steps that this is a part of
        if aside:
            self._aside.add(opened.name)
        else:
            self._active -= 1
        try:
            await (self._look_again() if aside else self._park_if_blocked())
            return await closed
        except asyncio.CancelledError:  # another branch failed: this one is not waiting any more
            self._wakes(opened.name)
            raise
        finally:
            self._working += within

    def _wakes(self, name: str) -> asyncio.Future[GateMemo] | None:
        """Whoever waits for this gate, if anybody does, does so no more."""
        if (closed := self._blocked.pop(name, None)) is None:
            return None
        if name in self._aside:
            self._aside.discard(name)
        else:
            self._active += 1
        return None if closed.done() else closed

    def _is_blocked(self) -> bool:
        """Whether nothing goes on; the function itself waits for the tasks of its own making, if one of them waits."""
        if self._is_over or self.parked is not None or not self._blocked:
            return False
        return self._working <= 0 and self._active - bool(self._aside) <= 0

    async def _park_if_blocked(self) -> None:
        while self._is_blocked():
            async with self._parking:
                if not self._is_blocked():
                    continue
                names = tuple(self._blocked)
                await self._flush()
                answer = await self.engine.park(self.handle, names)
                if isinstance(answer, ParkResult):
                    self.parked = answer
                    for then in self._then:
                        await then()
                    self._discard()
                    return
                waits = await self.engine.read_waits(self.handle.fields.execution_id)
                for name in answer.gates:
                    if (waiting := self._wakes(name)) is not None:
                        waiting.set_result(waits.memos[name])

    def _discard(self) -> None:
        """The lease is gone: end the handler where it waits."""
        if self._root is not None:
            self._root.cancel("parked")
            self.close()
            return
        for waiting in self._blocked.values():
            waiting.set_exception(HandlerUnwound("parked"))


@contextmanager
def in_step(name: str, occurrence: int) -> Iterator[None]:
    """Be in a step while its function runs."""
    token = _step.set(f"{name}#{occurrence}/")
    try:
        yield
    finally:
        _step.reset(token)


def occurrence_scope() -> str:
    """The step that is running, else the branch: things that occur here are counted apart from those elsewhere."""
    return _step.get() or _branch.get()


def _branch_of(name: str) -> str:
    """The branch that a step's name begins with."""
    found = _BRANCH.match(name)
    return found[0] if found else ""
