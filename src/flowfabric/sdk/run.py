"""A run: the handle that a caller keeps of work it submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from flowfabric import errors
from flowfabric.model.states import PublicState, TerminalOutcome
from flowfabric.sdk.codec import Shape, from_json
from flowfabric.sdk.failing import RunCancelled, RunExpired, RunFailed, RunSkipped

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine
    from flowfabric.engine.pulling import Ended
    from flowfabric.engine.reads import ExecutionSnapshot
    from flowfabric.model.answers import AttemptView

R = TypeVar("R")

LONGEST_LOOK_MS = 30_000

_ENDS = {
    TerminalOutcome.FAILED: RunFailed,
    TerminalOutcome.CANCELLED: RunCancelled,
    TerminalOutcome.EXPIRED: RunExpired,
    TerminalOutcome.SKIPPED: RunSkipped,
}


class Run(Generic[R]):
    """One submitted piece of work. It can be looked at from any process that knows its id."""

    def __init__(
        self, run_id: str, task: str, shape: Shape, engine: Callable[[], Awaitable[Engine]], *, created: bool = True
    ) -> None:
        self.id = run_id
        self.task = task
        self.created = created  # False when an earlier submit with the same key stands for this one
        self._shape = shape
        self._engine = engine

    async def result(self, timeout: float | None = None) -> R:
        """What the handler returned; raises RunFailed, RunCancelled, RunExpired, RunSkipped or TimeoutError."""
        engine = await self._engine()
        clock = asyncio.get_running_loop().time
        until = None if timeout is None else clock() + timeout
        longest_ms = max(LONGEST_LOOK_MS, engine.settings.poll_ms)
        while True:
            left_ms = longest_ms if until is None else max(0, int((until - clock()) * 1000))
            ended = await engine.await_end(self.id, max_wait_ms=min(left_ms, longest_ms))
            if ended is not None:
                return self._value(ended)
            if until is not None and clock() >= until:
                raise TimeoutError(f"{self.task} {self.id} has not ended after {timeout} s; it goes on all the same")

    async def state(self) -> PublicState:
        """The one public word for what it is doing."""
        state = await (await self._engine()).read_execution_state(self.id)
        if state is None:
            raise errors.NotFound("execution", execution_id=self.id)
        return state

    async def describe(self) -> ExecutionSnapshot:
        """Everything people want to know of it."""
        snapshot = await (await self._engine()).describe_execution(self.id)
        if snapshot is None:
            raise errors.NotFound("execution", execution_id=self.id)
        return snapshot

    async def attempts(self) -> list[AttemptView]:
        """Every attempt so far."""
        return await (await self._engine()).attempt_history(self.id)

    async def cancel(self, reason: str = "") -> None:
        """End it, whatever it is doing; again is fine."""
        await (await self._engine()).cancel_execution(self.id, reason=reason)

    async def replay(self) -> None:
        """Give a finished run another life."""
        await (await self._engine()).replay_execution(self.id)

    async def progress(self) -> tuple[int | None, str | None]:
        """What its handler last said: percentage and message."""
        return await (await self._engine()).read_progress(self.id)

    def _value(self, ended: Ended) -> R:
        if ended.outcome is not TerminalOutcome.SUCCESS:
            raise _ENDS.get(ended.outcome, RunFailed)(self.id, self.task, ended.reason)
        plain = from_json(ended.result) if ended.result else None
        value: R = self._shape.load(plain, "result")
        return value

    def __repr__(self) -> str:
        return f"<Run {self.task} {self.id}>"
