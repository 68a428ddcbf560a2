"""Pulling and waiting: the verbs that an application's process lives on."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.claiming.claimer import MAX_CLAIM_LIMIT
from flowfabric.engine.claiming.commit_and_claim import ClaimOnCommit
from flowfabric.engine.runtime.commit_queue import PendingClaim
from flowfabric.engine.runtime.wakeups import completion_topic, lane_topic, wait_for_wakeup
from flowfabric.engine.validation import execution as validate
from flowfabric.ids import parse_execution_id
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution, Result
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.rules import validation
from flowfabric.rules.execution.create import CreateExecution as CreateExecution  # part of the engine's own vocabulary
from flowfabric.stores.queries import Read

YIELD_TURNS = 2  # of the loop, within which a worker hands over to the store what it has just done
FIRST_CHECK_DELAY_S = 0.02  # that the end of what was just created is waited for before a look at it
MAX_RECENT_CREATES = 1000  # that are remembered as just created


class ExecutionOutcome(msgspec.Struct, frozen=True):
    """How a life ended."""

    execution_id: str
    outcome: TerminalOutcome
    result: bytes | None
    encoding: str | None
    reason: str | None
    namespace: str | None = None  # None when a server does not say it


class LanePoller:
    """One worker's claims from its lanes, one after the other.

    A look that found less than there was room for has seen the end of its lane. That lane is looked at again when there
    is a hint, which is expected from before that look on, so that nothing falls in between; or after the poll interval.
    So an idle worker costs nothing, and work in one lane does not cost a look at the others.
    """

    def __init__(
        self,
        engine: PollingOperations,
        lanes: Sequence[str],
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        namespaces: Collection[str] | None = None,
    ) -> None:
        wanted = tuple(validate.validate_iterable("lanes", lanes))
        if not wanted:
            raise errors.InvalidInput("lanes: empty")
        self._engine = engine
        tokens = tuple(validate.validate_iterable("capabilities", capabilities))
        self._orders = [
            validate.build_claim_order(
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
        self._ends: dict[str, EmptyLane] = {}  # by lane: those of which the last look saw the end

    async def claim(
        self, limit: int, *, max_wait_ms: int = 0, go_on: Callable[[], bool] = lambda: True
    ) -> list[answers.Claimed]:
        """Up to `limit` executions, by turns, as soon as there is at least one.

        Ends early when `go_on` says no, which is asked after each hint; cancelling a claim could lose its answer.
        """
        validation.integer("limit", limit, least=1, most=MAX_CLAIM_LIMIT)
        validation.duration_ms("max_wait_ms", max_wait_ms, least=0)
        clock = asyncio.get_running_loop().time
        until = clock() + max_wait_ms / 1000
        while True:
            orders = self._worth_a_look(clock())
            sets_free = self._engine.runtime.store.executes_in_order or self._engine.runtime.may_unblock_others()
            wish = self._wish(orders, limit) if sets_free else None
            end = None if wish is None or not orders else self._next_end(orders[0].lane_id)
            try:
                if orders:
                    await self._behind_own_work(orders, sets_free=sets_free)
                else:
                    await self._told(min(until, *(end.poll_again_at for end in self._ends.values())) - clock(), wish)
                if wish is not None and (claimed := await self._engine.collect_pending_claim(wish)):
                    return claimed
            finally:
                if wish is not None:
                    self._engine.abandon_pending_claim(wish)
                if wish is not None and end is not None:
                    self._keep(orders[0].lane_id, end, is_end=wish.drained)
            if not orders:
                if not go_on():
                    return []
                orders = self._worth_a_look(clock()) or self._orders  # without a hint, all of them
            claimed = await self._look(orders, limit)
            if claimed or until <= clock() or not go_on():
                return claimed

    def _wish(self, orders: Sequence[validate.ClaimOrder], limit: int) -> PendingClaim | None:
        """A wish for what this process sets free; where several lanes may have work it is the turn of all of them."""
        if self._engine.runtime.store.executes_in_order or len(orders) > 1:
            return None
        return self._engine.register_pending_claim(orders or self._orders, limit)

    async def _behind_own_work(self, orders: Sequence[validate.ClaimOrder], *, sets_free: bool) -> None:
        """Let what this process has just done go before the look, which finds what that sets free.

        Where the store keeps the order it is enough to be handed over behind it, and both are one commit. Where it does
        not, and nothing that is held here sets others free, the look goes first: the server has then something to do
        while this process puts together what there is to tell.
        """
        engine = self._engine
        if sets_free:
            for _ in range(YIELD_TURNS):
                await asyncio.sleep(0)
        if not engine.runtime.store.executes_in_order:
            await engine.runtime.commit_queue.wait_for_lanes([lane_topic(order.lane_id) for order in orders])

    def close(self) -> None:
        """Expect no more hints."""
        for end in self._ends.values():
            end.wakeup.cancel()

    def _worth_a_look(self, now: float) -> list[validate.ClaimOrder]:
        """Those lanes of which the end was not seen, or there was a hint since, or it was long ago."""
        ends = self._ends
        return [
            order
            for order in self._orders
            if (end := ends.get(order.lane_id)) is None or end.wakeup.done() or end.poll_again_at <= now
        ]

    async def _told(self, longest_s: float, wish: PendingClaim | None) -> None:
        """Wait for a hint about any of the lanes, or for what comes of a wish."""
        hints: list[asyncio.Future[Any]] = [end.wakeup for end in self._ends.values()]
        if wish is not None:
            hints.append(wish.rows)
        if len(hints) == 1:
            await wait_for_wakeup(hints[0], longest_s)
        else:
            await asyncio.wait(hints, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)

    async def _look(self, orders: Sequence[validate.ClaimOrder], limit: int) -> list[answers.Claimed]:
        """What these lanes have, by turns."""
        engine = self._engine
        claimed: list[answers.Claimed] = []
        turn = engine.next_lane_index(len(orders))
        for order in [*orders[turn:], *orders[:turn]]:
            try:
                claimed += await self._look_at(order, limit - len(claimed))
            except errors.StoreUnavailable:
                if not claimed:  # what was got of the other lanes is held already
                    raise
                break
            if len(claimed) >= limit:
                break
        return claimed

    async def _look_at(self, order: validate.ClaimOrder, limit: int) -> list[answers.Claimed]:
        engine, lane = self._engine, order.lane_id
        if (before := self._ends.pop(lane, None)) is not None:
            before.wakeup.cancel()
        end, is_end = self._next_end(lane), False
        try:
            claimed = await engine.claim_available(order, limit)
            is_end = not claimed or (len(claimed) < limit and engine.fits_one_round_trip(lane))
        finally:
            self._keep(lane, end, is_end=is_end)
        return claimed

    def _next_end(self, lane: str) -> EmptyLane:
        """What the end of a lane is, if the look that comes next sees it."""
        engine = self._engine
        return EmptyLane(
            engine.runtime.wakeups.subscribe(lane_topic(lane)),
            asyncio.get_running_loop().time() + engine.runtime.poll_interval_s,
        )

    def _keep(self, lane: str, end: EmptyLane, *, is_end: bool) -> None:
        if is_end:
            self._ends[lane] = end
        else:
            end.wakeup.cancel()


class EmptyLane(msgspec.Struct, frozen=True):
    """The end of a lane as a look saw it."""

    wakeup: asyncio.Future[None]  # that there may be more by now
    poll_again_at: float  # when to look again, hint or not


class PollingOperations(ClaimOnCommit):
    """Work for a worker of several lanes, and the end of an execution for whoever waits for it."""

    _next_lane: int = 0

    @cached_property
    def _created(self) -> OrderedDict[str, int]:
        """What was created here of late and not waited for yet, and how many ends had been told of before."""
        return OrderedDict()

    async def create(self, ask: CreateExecution) -> answers.Created | answers.Duplicate:
        """Create an execution as a request says that stands ready."""
        ends = self.runtime.wakeups.completion_count
        answer = await super().create(ask)
        if type(answer) is answers.Created:
            self._created[answer.execution_id] = ends
            if len(self._created) > MAX_RECENT_CREATES:
                self._created.popitem(last=False)
        return answer

    def pulling(
        self,
        lanes: Sequence[str],
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        namespaces: Collection[str] | None = None,
    ) -> LanePoller:
        """Claims from these lanes, one after the other; of some namespaces only, when they are named."""
        return LanePoller(
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

    def next_lane_index(self, count: int) -> int:
        """Which of so many lanes is looked at first this time."""
        turn, self._next_lane = self._next_lane % count, (self._next_lane + 1) % count
        return turn

    def wake_claims(self, lanes: Sequence[str]) -> None:
        """Let the claims of this process that wait for these lanes look again, or end."""
        self.runtime.wakeups.notify(lane_topic(lane) for lane in lanes)

    async def await_end(self, execution_id: str, *, max_wait_ms: int = 0) -> ExecutionOutcome | None:
        """How the execution ended; None when it has not within the time."""
        execution = parse_execution_id(validation.text("execution_id", execution_id))
        clock = asyncio.get_running_loop().time
        until = clock() + validation.duration_ms("max_wait_ms", max_wait_ms, least=0) / 1000
        wants = (Read(Execution, (execution,)), Read(Result, (execution,)))
        is_new = (
            self._created.pop(execution, None) == self.runtime.wakeups.completion_count
        )  # and nothing has ended since it was created
        while True:
            hint = self.runtime.wakeups.subscribe(completion_topic(execution))
            try:
                if is_new and until > clock():  # a look would be in vain, and in the way of whoever works on it
                    is_new = False
                    await asyncio.wait((hint,), timeout=min(FIRST_CHECK_DELAY_S, until - clock()))
                loaded = await self.runtime.load(wants)
                if not loaded.rows[0]:
                    raise errors.NotFound("execution", execution_id=execution)
                row: Execution = loaded.rows[0][0]
                if row.lifecycle_phase is LifecyclePhase.TERMINAL:
                    return _ended(row, loaded.rows[1][0] if loaded.rows[1] else None)
                left = until - clock()
                if left <= 0:
                    return None
                await wait_for_wakeup(hint, min(left, self.runtime.poll_interval_s))
            finally:
                hint.cancel()


def _ended(row: Execution, result: Result | None) -> ExecutionOutcome:
    succeeded = row.terminal_outcome is TerminalOutcome.SUCCESS  # then a reason is that of an earlier attempt
    return ExecutionOutcome(
        row.execution_id,
        row.terminal_outcome,
        result.payload if result else None,
        result.encoding if result else None,
        None if succeeded else row.failure_reason or row.cancellation_reason,
        row.namespace,
    )
