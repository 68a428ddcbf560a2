"""Unblocking: finds the executions that wait for a budget or quota policy and unblocks them when there is capacity.

An operation that frees capacity (a release, a reset, a refund, a higher limit) unblocks as many executions as fit, in
the order of `rules.limits.unblock_order`. The unblock sweep is only a safety net. After blocking an execution the limit
is checked again, because capacity freed between the refusal and the commit would otherwise wait for the sweep. For a
rate window that opens over time, the process that was refused sets a timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from flowfabric import errors
from flowfabric.engine.claiming.fair_turns import FairTurns
from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.limits.budget_suspension import BudgetSuspender
from flowfabric.engine.runtime.aggregate_repository import Decide
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.event_loop import start_background
from flowfabric.model.execution import Execution
from flowfabric.model.limits.quota import QuotaSlot
from flowfabric.model.security.owned_id import NamespacedId, parse_namespaced_id
from flowfabric.model.states import BlockingReason
from flowfabric.rules.execution import operator
from flowfabric.rules.limits import quota, unblock_order
from flowfabric.rules.limits.budget import BudgetState
from flowfabric.rules.limits.capacity import Capacity
from flowfabric.rules.scheduling import queue
from flowfabric.stores.queries import Scan, Where

logger = logging.getLogger("flowfabric.limits")
A = TypeVar("A")

PAGE_SIZE = 100
MAX_PAGES = 20
MAX_LISTS = 1024  # fairness keys whose first rows are compared in one read
MAX_CHECKED_SLOTS = 20  # so many waiting rows are checked for a slot of a full policy; the sweep checks all
MAX_RECHECK_MS = 1000
LEFT_TO_SWEEP = "executions that wait for %s are left to the sweep: %s"
QUEUE_ORDER = ("rank", "execution_id")


class Unblocker:
    """Blocks executions on a limit and unblocks them when there is capacity."""

    def __init__(
        self,
        runtime: Runtime,
        aggregates: LimitAggregates,
        turns: FairTurns,
        budget_suspender: BudgetSuspender,
    ) -> None:
        self.runtime = runtime
        self.turns = turns
        self.budget_suspender = budget_suspender
        self.aggregates = aggregates
        self._timers: dict[NamespacedId, asyncio.TimerHandle] = {}
        self._rechecks: set[asyncio.Task[None]] = set()
        self._last_lists: dict[str, str] = {}

    async def unblock_rows(self, rows: Sequence[Execution], capacity: Capacity) -> int:
        """Unblock those of the rows whose limits have capacity; return how many."""
        await self._load_limits(rows, capacity, max_slots=len(rows))
        return await self._unblock_each([row for row in rows if capacity.admits(row)])

    async def _load_limits(self, rows: Sequence[Execution], capacity: Capacity, *, max_slots: int) -> None:
        """Add the limits of these rows, and slots of the first rows if their policies are full."""
        if missing := capacity.missing_budgets(rows):
            _, budgets = await self.aggregates.budgets.load(missing)
            capacity.add_budgets(budgets)
        if missing := capacity.missing_policies(rows):
            now, policies = await self.aggregates.quotas.load(missing)
            capacity.add_policies(policies, now)
        if slots := capacity.slots_to_check(rows[:max_slots]):
            reads = ReadSet()
            found = reads.each(QuotaSlot, ((*policy, execution_id) for policy, execution_id in slots))
            loaded = await self.runtime.load(reads)
            capacity.add_slots((slot for slot in found(loaded.rows) if slot is not None), loaded.now)

    async def _unblock_each(self, rows: Sequence[Execution]) -> int:
        return sum(await asyncio.gather(*(self.unblock_row(row.execution_id, row.blocking_reason) for row in rows)))

    async def block_row(self, row: Execution, reason: BlockingReason, detail: str, on: str = "") -> bool:
        """Block a row that was found claimable; False if that failed. The next claim that finds it tries again."""
        try:
            await self.runtime.decide_execution(
                row.execution_id, lambda row, _: operator.block(row, reason, detail, on)
            )
        except errors.FabricError as failed:
            logger.info("%s is not blocked (%s): %s", row.execution_id, reason, failed)
            return False
        if reason in queue.LIMITS and on:
            self.turns.note_blocked(row, reason, parse_namespaced_id(on))
        return True

    async def unblock_row(self, execution_id: str, reason: BlockingReason) -> bool:
        """Unblock a row that was blocked for this reason; False if it is blocked for another reason by now."""
        try:
            await self.runtime.decide_execution(execution_id, lambda row, _: operator.unblock(row, reason.value))
        except errors.StoreUnavailable:
            raise
        except errors.FabricError:
            return False
        return True

    async def unblock_waiters(self, reason: BlockingReason, limit: NamespacedId) -> bool:
        """Unblock executions that a limit has capacity for; True if some still wait.

        One freed slot costs two concurrent scans, one load of the limit, and the load and commit of the row.
        """
        suspended_list = queue.asleep_on_key(limit) if reason is BlockingReason.WAITING_FOR_BUDGET else None
        unkeyed = queue.blocked_on_key(reason, str(limit))
        lists = (Where("blocked_on", "in", (unkeyed, suspended_list)),)
        scan = Scan(Execution, lists, QUEUE_ORDER, limit=PAGE_SIZE, limit_by="blocked_on", partial=True)
        try:
            rows, keyed = await asyncio.gather(self._scan(scan), self._first_of_keys(limit, reason, 1))
            first = [row for row in rows if row.blocked_on == unkeyed]
            some_wait = await self._unblock_in_order(limit, reason, first, keyed)
            if suspended_list is not None:
                suspended = [row for row in rows if row.blocked_on == suspended_list]
                some_wait |= await self._resume_suspended(suspended_list, suspended)
        except errors.FabricError as failed:
            logger.warning(LEFT_TO_SWEEP, limit, failed)
            return True
        return some_wait

    async def unblock_budget_waiters(self, budget: NamespacedId) -> bool:
        """Unblock executions that this budget has capacity for; True if some still wait."""
        return await self.unblock_waiters(BlockingReason.WAITING_FOR_BUDGET, budget)

    async def change_budget(self, budget: NamespacedId, decide: Decide[BudgetState, A]) -> A:
        """Decide on a budget and commit, then unblock the executions that it has capacity for."""
        answer = await self.aggregates.budgets.decide_and_commit(budget, decide)
        await self.unblock_budget_waiters(budget)
        return answer

    async def unblock_quota_waiters(self, policy: NamespacedId) -> bool:
        """Unblock executions that this policy has capacity for; True if some still wait."""
        return await self.unblock_waiters(BlockingReason.WAITING_FOR_QUOTA, policy)

    async def unblock_redefined(self, own: NamespacedId, reason: BlockingReason) -> None:
        """Unblock executions of a namespace that waited for the shared limit, now that it has its own of that id.

        A repeated definition does this again, in case the first process died before it did.
        """
        if own.is_shared:
            return
        keyed = Where("blocked_on", "starts", queue.fair_list_prefix(reason, own.shared))
        unkeyed = Where("blocked_on", "=", queue.blocked_on_key(reason, str(own.shared)))
        try:
            for lists in (unkeyed, keyed):
                await self._unblock_all((lists, Where("namespace", "=", own.namespace)))
        except errors.FabricError as failed:
            logger.warning(LEFT_TO_SWEEP, own.shared, failed)

    async def _unblock_all(self, where: tuple[Where, ...]) -> None:
        after: tuple[str, int, str] | None = None
        for _ in range(MAX_PAGES):
            rows = await self._scan(Scan(Execution, where, ("blocked_on", *QUEUE_ORDER), after, PAGE_SIZE))
            await self.unblock_rows(rows, Capacity())
            if len(rows) < PAGE_SIZE:
                return
            after = (rows[-1].blocked_on or "", rows[-1].rank, rows[-1].execution_id)

    async def _unblock_in_order(
        self, limit: NamespacedId, reason: BlockingReason, unkeyed: list[Execution], keyed: list[Execution]
    ) -> bool:
        """Unblock in fair order, beginning with these first rows of each list; True if some still wait."""
        capacity, some_wait, depth = Capacity(only=limit), False, 1
        prefix = queue.fair_list_prefix(reason, limit)
        for _ in range(MAX_PAGES):
            rows = unkeyed + keyed
            self.turns.note_lists(reason, limit, rows, whole=prefix not in self._last_lists)
            if not rows:
                return some_wait
            await self._load_limits(rows, capacity, max_slots=MAX_CHECKED_SLOTS)
            now, turns = self.runtime.estimate.now(), self.turns.unblock_turns(prefix, rows)
            cut = _truncated_lists(keyed, depth) | _truncated_lists(unkeyed, PAGE_SIZE)
            order = unblock_order.unblock_order(rows, turns, now, truncated=cut)
            chosen = [row for row in order if capacity.admits(row)]
            after = unblock_order.credits_after(rows, turns, now, chosen, truncated=cut)
            self.turns.keep_unblock_turns(prefix, after, chosen)
            unblocked = await self._unblock_each(chosen)
            some_wait = some_wait or unblocked < len(rows)
            if not unblocked or not cut or len(chosen) < len(order) or capacity.is_full(limit):
                return some_wait or bool(cut)
            depth = max(1, min(PAGE_SIZE, MAX_LISTS // max(1, len({row.blocked_on for row in keyed}))))
            where = (Where("blocked_on", "=", queue.blocked_on_key(reason, str(limit))),)
            unkeyed, keyed = await asyncio.gather(
                self._scan(Scan(Execution, where, QUEUE_ORDER, limit=PAGE_SIZE, partial=True)),
                self._first_of_keys(limit, reason, depth),
            )
        return True

    async def _scan(self, scan: Scan) -> list[Execution]:
        return await self.runtime.store.scan(scan)

    async def _first_of_keys(self, limit: NamespacedId, reason: BlockingReason, depth: int) -> list[Execution]:
        """Return the first rows of each fairness key that waits for a limit.

        At most `MAX_LISTS` keys are read; the next call continues after them.
        """
        prefix = queue.fair_list_prefix(reason, limit)
        has_prefix = Where("blocked_on", "starts", prefix)
        last = self._last_lists.pop(prefix, None)
        rows: list[Execution] = []
        for after in (last, None) if last is not None else (None,):
            where = (has_prefix,) if after is None else (has_prefix, Where("blocked_on", ">", after))
            rows = await self._scan(
                Scan(Execution, where, QUEUE_ORDER, None, depth, "blocked_on", max_values=MAX_LISTS, partial=True)
            )
            if rows:
                break
        names = {row.blocked_on for row in rows if row.blocked_on is not None}
        if len(names) >= MAX_LISTS:
            self._last_lists[prefix] = max(names)
        return rows

    async def _resume_suspended(self, blocked_on: str, rows: list[Execution]) -> bool:
        """Resume executions suspended for a budget, beginning with this first page; True if some still wait."""
        left = False
        for _ in range(MAX_PAGES):
            if not rows:
                return left
            left |= await self.budget_suspender.resume_budget_suspended(rows) < len(rows)
            if len(rows) < PAGE_SIZE:
                return left
            after = (rows[-1].rank, rows[-1].execution_id)
            where = (Where("blocked_on", "=", blocked_on),)
            rows = await self._scan(Scan(Execution, where, QUEUE_ORDER, after, PAGE_SIZE))
        return True

    def schedule_quota_unblock(self, policy: NamespacedId, wait_ms: int) -> None:
        """Unblock waiting executions when the window of a policy opens. Each policy has one timer, the earliest."""
        loop = asyncio.get_running_loop()
        at = loop.time() + wait_ms / 1000
        timer = self._timers.get(policy)
        if timer is not None and timer.when() <= at:
            return
        if timer is not None:
            timer.cancel()
        self._timers[policy] = loop.call_at(at, self._on_window_open, policy)

    def cancel_window_timers(self) -> None:
        """Cancel all timers; the sweep unblocks what waits for these windows."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._rechecks:
            task.cancel()
        self._timers.clear()

    def _on_window_open(self, policy: NamespacedId) -> None:
        del self._timers[policy]
        start_background(self._recheck(policy), self._rechecks)

    async def _recheck(self, policy: NamespacedId) -> None:
        if not await self.unblock_quota_waiters(policy):
            return
        wait_ms = MAX_RECHECK_MS
        try:
            now, states = await self.aggregates.quotas.load([policy])
            opens_at = quota.next_capacity_at(states[policy], now)
            if opens_at is not None:
                wait_ms = max(1, opens_at - now)
        except errors.FabricError as failed:
            logger.warning("cannot compute when %s has capacity again: %s", policy, failed)
        self.schedule_quota_unblock(policy, wait_ms)


def _truncated_lists(rows: Sequence[Execution], depth: int) -> set[str]:
    """Return the lists of which `depth` rows were read, so that more may follow."""
    counts = Counter(row.blocked_on for row in rows)
    return {name for name, count in counts.items() if name is not None and count >= depth}
