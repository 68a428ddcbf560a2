"""The run of a durable function: its branches, its waits, and when it parks.

A durable function runs from the top on every attempt and after every wait. Finished steps return what they returned,
closed gates what came of them, so it arrives where it was. It parks only when every branch is blocked: until then a
wait just waits, and a step beside a long sleep finishes and is remembered before the lease goes.

Parking does not raise through user code: the wait never returns, the lease is given back, and the coroutine is
discarded. Code in a `finally` then sees a cancellation, and the context refuses to write anything more.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any

from flowfabric.engine.gates import OpenedGate, Parked
from flowfabric.model.gate import GateMemo, StepMemo

if TYPE_CHECKING:
    from flowfabric.engine.asks import GateArgs
    from flowfabric.engine.engine import Engine
    from flowfabric.handles import Handle

_branch: contextvars.ContextVar[str] = contextvars.ContextVar("flowfabric_branch", default="")


class NonDeterministic(Exception):
    """The function took another way than the one it is remembered to have taken."""


class Crash(BaseException):
    """Stands for the death of the process, in tests: nothing after it is written, and the lease lapses."""


class Unwound(BaseException):
    """Unwinds a plain function that has to wait; not an `Exception`, so that it passes the usual handlers."""


class Durable:
    """What one attempt of a durable function knows of the earlier ones, and what it is doing."""

    def __init__(self, engine: Engine, handle: Handle, root: asyncio.Task[Any] | None) -> None:
        """`root` is the task that runs the handler; None when a thread does."""
        self.engine = engine
        self.handle = handle
        self.parked: Parked | None = None
        self._root = root
        self._active = 1
        self._blocked: dict[str, asyncio.Future[GateMemo]] = {}
        self._names: Counter[str] = Counter()
        self._steps: dict[tuple[str, int], StepMemo] | None = None
        self._reading = asyncio.Lock()

    # -- names ----------------------------------------------------------------------------------------------------

    def place(self, label: str) -> tuple[str, int]:
        """The name of the next thing of this label in this branch, and how many came before it."""
        name = f"{_branch.get()}{label}"
        occurrence = self._names[name]
        self._names[name] += 1
        return name, occurrence

    def gate_name(self, label: str) -> str:
        """The name of the next gate of this label in this branch."""
        name, occurrence = self.place(label)
        return f"{name}#{occurrence}"

    # -- steps ----------------------------------------------------------------------------------------------------

    async def step_memo(self, name: str, occurrence: int, digest: str) -> StepMemo | None:
        """What this step returned earlier; a memo of another input is passed over for one that fits."""
        if self._steps is None:
            async with self._reading:
                if self._steps is None:
                    found = await self.engine.read_steps(self.handle.fields.execution_id)
                    self._steps = {(memo.name, memo.occurrence): memo for memo in found}
        memo = self._steps.get((name, occurrence))
        if memo is None or memo.digest in (None, digest):
            return memo
        for (known, place), other in self._steps.items():
            if known == name and other.digest == digest and place > occurrence:
                self._steps[(name, occurrence)], self._steps[(known, place)] = other, memo
                return other
        raise NonDeterministic(
            f"step {name!r} (number {occurrence}) is remembered with another input; give steps that may swap places "
            f"a key=, or start a new run for the changed function"
        )

    # -- branches -------------------------------------------------------------------------------------------------

    async def gather(self, awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
        """Run branches beside each other; each counts its steps and gates for itself."""
        name, occurrence = self.place("gather")
        members = list(awaitables)
        self._active += len(members) - 1  # the branch that gathers waits for these
        tasks = [
            asyncio.create_task(self._run(member, f"{name}#{occurrence}.{number}/"))
            for number, member in enumerate(members)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            self._active += 1

    async def _run(self, member: Awaitable[Any], branch: str) -> Any:
        _branch.set(branch)
        try:
            return await member
        finally:
            self._active -= 1
            await self._park_if_blocked()

    # -- waits ----------------------------------------------------------------------------------------------------

    async def wait(self, args: GateArgs) -> GateMemo:
        """What comes of a gate; parks the execution when nothing else is left to do."""
        opened = await self.engine.open_gate(self.handle, args)
        return opened if isinstance(opened, GateMemo) else await self.wait_for(opened)

    async def wait_for(self, opened: OpenedGate) -> GateMemo:
        """The same for a gate that is open already."""
        closed: asyncio.Future[GateMemo] = asyncio.get_running_loop().create_future()
        self._blocked[opened.name] = closed
        self._active -= 1
        try:
            await self._park_if_blocked()
            return await closed
        except asyncio.CancelledError:  # another branch failed: this one is not waiting any more
            if self._blocked.pop(opened.name, None) is not None:
                self._active += 1
            raise

    async def _park_if_blocked(self) -> None:
        while self._active == 0 and self._blocked and self.parked is None:
            names = tuple(self._blocked)
            await self.engine.frames_written()
            answer = await self.engine.park(self.handle, names)
            if isinstance(answer, Parked):
                self._discard(answer)
                return
            waits = await self.engine.read_waits(self.handle.fields.execution_id)
            for name in answer.gates:
                self._active += 1
                self._blocked.pop(name).set_result(waits.memos[name])

    def _discard(self, parked: Parked) -> None:
        """The lease is gone: end the handler where it waits."""
        self.parked = parked
        if self._root is not None:
            self._root.cancel("parked")
            return
        for waiting in self._blocked.values():
            waiting.set_exception(Unwound("parked"))
