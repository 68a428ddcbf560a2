"""Pulling and waiting: the verbs that an application's process lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import msgspec

from flowfabric import errors
from flowfabric.engine.scheduler import Scheduler
from flowfabric.engine.wakes import end_topic, lane_topic, waited
from flowfabric.ids import parse_execution_id
from flowfabric.model import answers
from flowfabric.model.execution import Execution, Result
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.rules import limits
from flowfabric.rules.create import CreateExecution as CreateExecution  # part of the engine's own vocabulary
from flowfabric.stores.base import Want


class Ended(msgspec.Struct, frozen=True):
    """How a life ended."""

    execution_id: str
    outcome: TerminalOutcome
    result: bytes | None
    encoding: str | None
    reason: str | None


class Pulling(Scheduler):
    """Work for a worker of several lanes, and the end of an execution for whoever waits for it."""

    _next_lane: int = 0

    async def claim_from_lanes(
        self,
        lanes: Sequence[str],
        limit: int,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        max_wait_ms: int = 0,
        go_on: Callable[[], bool] = lambda: True,
    ) -> list[answers.Claimed]:
        """Up to `limit` executions from these lanes, by turns, as soon as there is at least one.

        Ends early when `go_on` says no, which is asked after each hint; cancelling a claim could lose its answer.
        """
        if not lanes:
            raise errors.InvalidInput("lanes: empty")
        offered = tuple(capabilities)
        clock = asyncio.get_running_loop().time
        until = clock() + max_wait_ms / 1000
        while True:
            hint = self.wakes.expect(*(lane_topic(lane) for lane in lanes))
            try:
                claimed: list[answers.Claimed] = []
                for turn in range(len(lanes)):
                    lane = lanes[(self._next_lane + turn) % len(lanes)]
                    claimed += await self.claim_admitted(
                        lane,
                        limit - len(claimed),
                        worker_id=worker_id,
                        worker_instance_id=worker_instance_id,
                        capabilities=offered,
                        lease_ttl_ms=lease_ttl_ms,
                    )
                    if len(claimed) >= limit:
                        break
                self._next_lane = (self._next_lane + 1) % len(lanes)
                left = until - clock()
                if claimed or left <= 0 or not go_on():
                    return claimed
                await waited(hint, min(left, self.poll_s))
            finally:
                hint.cancel()

    def nudge(self, lanes: Sequence[str]) -> None:
        """Let the claims of this process that wait for these lanes look again, or end."""
        self.wakes.fire(lane_topic(lane) for lane in lanes)

    async def await_end(self, execution_id: str, *, max_wait_ms: int = 0) -> Ended | None:
        """How the execution ended; None when it has not within the time."""
        execution = parse_execution_id(limits.text("execution_id", execution_id))
        clock = asyncio.get_running_loop().time
        until = clock() + limits.duration("max_wait_ms", max_wait_ms, least=0) / 1000
        wants = (Want(Execution, (execution,)), Want(Result, (execution,)))
        while True:
            hint = self.wakes.expect(end_topic(execution))
            try:
                loaded = await self.load(wants)
                if not loaded.rows[0]:
                    raise errors.NotFound("execution", execution_id=execution)
                row: Execution = loaded.rows[0][0]
                if row.lifecycle_phase is LifecyclePhase.TERMINAL:
                    return _ended(row, loaded.rows[1][0] if loaded.rows[1] else None)
                left = until - clock()
                if left <= 0:
                    return None
                await waited(hint, min(left, self.poll_s))
            finally:
                hint.cancel()


def _ended(row: Execution, result: Result | None) -> Ended:
    return Ended(
        row.execution_id,
        row.terminal_outcome,
        result.payload if result else None,
        result.encoding if result else None,
        row.failure_reason or row.cancellation_reason,
    )
