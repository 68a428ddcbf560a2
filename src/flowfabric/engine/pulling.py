"""Pulling and waiting: the verbs that an application's process lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from flowfabric import errors
from flowfabric.engine import intake
from flowfabric.engine.explain import Explaining
from flowfabric.engine.taking import MOST_AT_ONCE
from flowfabric.engine.wakes import end_topic, lane_topic, waited
from flowfabric.ids import parse_execution_id
from flowfabric.model import answers
from flowfabric.model.execution import Execution, Result
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.rules import limits
from flowfabric.rules.create import CreateExecution as CreateExecution  # part of the engine's own vocabulary
from flowfabric.stores.base import Want

TURNS = 2  # of the loop, within which a worker hands over to the store what it has just done


class Ended(msgspec.Struct, frozen=True):
    """How a life ended."""

    execution_id: str
    outcome: TerminalOutcome
    result: bytes | None
    encoding: str | None
    reason: str | None


class Pull:
    """One worker's claims from its lanes, one after the other.

    A claim that found less than there was room for has seen the end of the lanes. The next one then waits for a hint
    first, which is expected from before that look on, so that nothing falls in between: an idle worker costs nothing.
    """

    def __init__(
        self,
        engine: Pulling,
        lanes: Sequence[str],
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        namespaces: Collection[str] | None = None,
    ) -> None:
        wanted = tuple(intake.each("lanes", lanes))
        if not wanted:
            raise errors.InvalidInput("lanes: empty")
        self._engine = engine
        tokens = tuple(intake.each("capabilities", capabilities))
        self._orders = [
            intake.claim_order(
                lane,
                worker_id,
                worker_instance_id,
                tokens,
                lease_ttl_ms,
                admission=True,
                namespaces=namespaces,
            )
            for lane in wanted
        ]
        self._topics = [lane_topic(order.lane_id) for order in self._orders]
        self._hint: asyncio.Future[None] | None = None  # of the last look, when that came to the end

    async def claim(
        self, limit: int, *, max_wait_ms: int = 0, go_on: Callable[[], bool] = lambda: True
    ) -> list[answers.Claimed]:
        """Up to `limit` executions, by turns, as soon as there is at least one.

        Ends early when `go_on` says no, which is asked after each hint; cancelling a claim could lose its answer.
        """
        limits.integer("limit", limit, least=1, most=MOST_AT_ONCE)
        limits.duration("max_wait_ms", max_wait_ms, least=0)
        clock = asyncio.get_running_loop().time
        until = clock() + max_wait_ms / 1000
        while True:
            if (hint := self._hint) is not None:
                self._hint = None
                await waited(hint, min(max(0.0, until - clock()), self._engine.poll_s))
                if not go_on():
                    return []
            else:
                await self._behind_own_work()
            claimed = await self._look(limit)
            if claimed or until <= clock() or not go_on():
                return claimed

    async def _behind_own_work(self) -> None:
        """Let what this process has just done go before the look, which finds what that sets free.

        Where the store keeps the order it is enough to be handed over behind it, and both are one commit.
        """
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if not self._engine.store.in_order:
            await self._engine.commits.brought(self._topics)

    def close(self) -> None:
        """Expect no more hints."""
        if self._hint is not None:
            self._hint.cancel()

    async def _look(self, limit: int) -> list[answers.Claimed]:
        engine, orders = self._engine, self._orders
        hint = engine.wakes.expect(*self._topics)
        claimed: list[answers.Claimed] = []
        try:
            turn = engine.next_turn(len(orders))
            for order in orders[turn:] + orders[:turn]:
                claimed += await engine.claim_now(order, limit - len(claimed))
                if len(claimed) >= limit:
                    break
        except errors.StoreUnavailable:
            if not claimed:  # what was got of the other lanes is held already
                raise
        finally:
            if not claimed or (len(claimed) < limit and all(engine.sees_whole(order.lane_id) for order in orders)):
                self._hint = hint
            else:
                hint.cancel()
        return claimed


class Pulling(Explaining):
    """Work for a worker of several lanes, and the end of an execution for whoever waits for it."""

    _next_lane: int = 0

    def pulling(
        self,
        lanes: Sequence[str],
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        namespaces: Collection[str] | None = None,
    ) -> Pull:
        """Claims from these lanes, one after the other; of some namespaces only, when they are named."""
        return Pull(
            self,
            lanes,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            lease_ttl_ms=lease_ttl_ms,
            namespaces=namespaces,
        )

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
        namespaces: Collection[str] | None = None,
    ) -> list[answers.Claimed]:
        """One claim of a `Pull`."""
        pull = self.pulling(
            lanes,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            lease_ttl_ms=lease_ttl_ms,
            namespaces=namespaces,
        )
        try:
            return await pull.claim(limit, max_wait_ms=max_wait_ms, go_on=go_on)
        finally:
            pull.close()

    def next_turn(self, count: int) -> int:
        """Which of so many lanes is looked at first this time."""
        turn, self._next_lane = self._next_lane % count, (self._next_lane + 1) % count
        return turn

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
    succeeded = row.terminal_outcome is TerminalOutcome.SUCCESS  # then a reason is that of an earlier attempt
    return Ended(
        row.execution_id,
        row.terminal_outcome,
        result.payload if result else None,
        result.encoding if result else None,
        None if succeeded else row.failure_reason or row.cancellation_reason,
    )
