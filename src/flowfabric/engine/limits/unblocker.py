"""Work that waits for room: find what a budget or quota policy holds up, and set it free as soon as there is some.

Whoever makes room (a release, a reset, a refund, a higher limit) wakes the first rows that wait for it, as many as
there is room for; `rules.unblock_order` says which are first. The unblock sweep is only a net. Whoever blocks a row
looks again afterwards: room that was made between its look and its write would otherwise wait for the sweep. A window
that opens by the passing of time has a timer in the process that was refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from flowfabric import errors
from flowfabric.engine.claiming.fair_turns import FairTurns
from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.limits.budget_suspension import BudgetSuspender
from flowfabric.engine.runtime.root_queue import Decide
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.budget import Budget
from flowfabric.model.execution import Execution
from flowfabric.model.owned_id import DEFAULT_NAMESPACE, NamespacedId, parse_namespaced_id
from flowfabric.model.quota import QuotaPolicy
from flowfabric.model.states import BlockingReason
from flowfabric.rules.execution import operator
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.limits import quota, unblock_order
from flowfabric.rules.limits.budget import BudgetState
from flowfabric.rules.scheduling import queue
from flowfabric.stores.queries import Read, Scan, Where

logger = logging.getLogger("flowfabric.limits")
A = TypeVar("A")

PAGE_SIZE = 100
MAX_PAGES = 20
MAX_LISTS = 1024  # fairness keys whose first rows are compared in one read
MAX_RECHECK_MS = 1000
QUEUE_ORDER = ("rank", "execution_id")


class Capacity:
    """What budgets and quota policies have left, looked up once.

    `only` looks at one of them: work that waits for it is set free when there is room there, whatever else is in its
    way; the next claim finds that out, and it waits for that instead. Room is counted down then, so that no more are
    set free than can run. The sweep, which looks at all of them, only peeks: the first in line may be for workers that
    are not there, and must not keep others waiting.
    """

    def __init__(self, aggregates: LimitAggregates, only: NamespacedId | None = None) -> None:
        self._aggregates = aggregates
        self._only = only
        self._spent: dict[NamespacedId, bool] = {}
        self._left: dict[NamespacedId, int | None] = {}
        self._holders: dict[NamespacedId, frozenset[tuple[str, int]]] = {}
        self._budget_roots: dict[NamespacedId, Budget | None] = {}
        self._policy_roots: dict[NamespacedId, QuotaPolicy | None] = {}
        self.unreadable: set[NamespacedId] = set()  # these have no room for anybody, as far as anybody can know

    async def load(self, rows: Sequence[Execution]) -> None:
        """Know what these rows depend on."""
        unknown = sorted({one for row in rows for one in self._among(row, _budget_ids(row))} - self._spent.keys())
        if unknown:
            _, sheets = await self._aggregates.budgets.load(unknown)
            for name, sheet in sheets.items():
                self._budget_roots[name] = sheet.root
                self._spent[name] = budget_rules.first_exhausted(sheet.dimensions.values()) is not None
                if budget_rules.find_corruption(sheet):
                    self._spent[name] = True
                    self.unreadable.add(name)
        unknown = sorted({one for row in rows for one in self._among(row, _policy_ids(row))} - self._left.keys())
        if unknown:
            now, policies = await self._aggregates.quotas.load(unknown)
            for name, policy in policies.items():
                self._policy_roots[name] = policy.root
                self._left[name] = quota.free_capacity(policy, now)
                self._holders[name] = quota.slot_holders(policy, now)
                if isinstance(quota.limits_of(policy.root), errors.FabricError):
                    self._left[name] = 0
                    self.unreadable.add(name)

    def is_list_full(self, on: str) -> bool:
        """Whether what a row is blocked on has no room, so that nothing else that waits for it need be looked at."""
        return self.is_full(queue.parse_blocking_limit(on))

    def is_full(self, limit: NamespacedId) -> bool:
        """Whether a limit that was looked at has no room."""
        return self._spent.get(limit, False) or self._left.get(limit) == 0

    def admits(self, row: Execution) -> bool:
        """Whether nothing of what blocked this row is in its way any more; if room is counted, it takes its share."""
        # One that was blocked by a call that knew nothing of the slot which another call got for it needs no room.
        me = (row.execution_id, row.replay_count)
        policies = [policy for policy in self._policies(row) if me not in self._holders[policy]]
        if any(self._spent[budget] for budget in self._budgets(row)):
            return False
        if any(self._left[policy] == 0 for policy in policies):
            return False
        for policy in policies if self._only else ():
            left = self._left[policy]
            self._left[policy] = None if left is None else left - 1
        return True

    def _budgets(self, row: Execution) -> list[NamespacedId]:
        return self._owners(row, _budget_ids(row), self._budget_roots)

    def _policies(self, row: Execution) -> list[NamespacedId]:
        return self._owners(row, _policy_ids(row), self._policy_roots)

    def _owners(
        self, row: Execution, names: Sequence[str], roots: Mapping[NamespacedId, owner_rules.LimitRoot | None]
    ) -> list[NamespacedId]:
        """What these ids stand for; if only one counts, whether that may be one of them."""
        if self._only is not None:
            return self._among(row, names)
        return [owner_rules.resolve_owner(row.namespace, name, roots) for name in names]

    def _among(self, row: Execution, names: Sequence[str]) -> list[NamespacedId]:
        return [one for one in owner_rules.candidates(row.namespace, names) if self._only in (None, one)]


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

    async def unblock_rows(self, rows: Sequence[Execution], room: Capacity) -> int:
        """Set those of the rows free that nothing holds up any more; how many."""
        await room.load(rows)
        free = (row for row in rows if room.admits(row))
        return sum(await asyncio.gather(*(self.unblock_row(row.execution_id, row.blocking_reason) for row in free)))

    async def block_row(self, row: Execution, reason: BlockingReason, detail: str, on: str = "") -> bool:
        """Block a row that was found claimable; False when that could not be done or is not to be done any more.

        Either way it was not given out, and the next claim that meets it tries again.
        """
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
        """Unblock a row that was blocked for this reason; False when it waits for something else by now."""
        try:
            await self.runtime.decide_execution(execution_id, lambda row, _: operator.unblock(row, reason.value))
        except errors.StoreUnavailable:
            raise
        except errors.FabricError:
            return False
        return True

    async def unblock_budget_waiters(self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> bool:
        """There may be room in this budget: set free what waits for it; True when something still waits."""
        budget = NamespacedId(namespace, budget_id)
        return await self._wake(budget, BlockingReason.WAITING_FOR_BUDGET, queue.asleep_on_key(budget))

    async def change_budget(
        self, budget: NamespacedId, decide: Decide[BudgetState, A], reads: tuple[Read, ...] = ()
    ) -> A:
        """Decide on a budget and commit, then unblock what may run within it now."""
        answer = await self.aggregates.budgets.decide_and_commit(budget, decide, reads)
        await self.unblock_budget_waiters(budget.id, namespace=budget.namespace)
        return answer

    async def unblock_quota_waiters(self, quota_policy_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> bool:
        """There may be room in this policy: set free as many as it can admit; True when something still waits."""
        policy = NamespacedId(namespace, quota_policy_id)
        return await self._wake(policy, BlockingReason.WAITING_FOR_QUOTA)

    async def unblock_redefined(self, own: NamespacedId, reason: BlockingReason) -> None:
        """A namespace has an id of its own: what the shared namesake holds up may go on there.

        A definition that is repeated does this again, in case the process of the first one died before it.
        """
        if own.is_shared:
            return
        keyed = Where("blocked_on", "starts", queue.fair_list_prefix(reason, own.shared))
        unkeyed = Where("blocked_on", "=", queue.blocked_on_key(reason, str(own.shared)))
        try:
            for listed in (unkeyed, keyed):
                await self._set_all_free((listed, Where("namespace", "=", own.namespace)))
        except errors.FabricError as away:
            logger.warning("what waits for %s is left to the sweep: %s", own.shared, away)

    async def _set_all_free(self, where: tuple[Where, ...]) -> None:
        after: tuple[str, int, str] | None = None
        for _ in range(MAX_PAGES):
            rows = await self._listed(Scan(Execution, where, ("blocked_on", *QUEUE_ORDER), after, PAGE_SIZE))
            await self.unblock_rows(rows, Capacity(self.aggregates))
            if len(rows) < PAGE_SIZE:
                return
            after = (rows[-1].blocked_on or "", rows[-1].rank, rows[-1].execution_id)

    async def _wake(self, limit: NamespacedId, reason: BlockingReason, asleep: str | None = None) -> bool:
        """Unblock what waits for a limit, as far as there is room; True when something still waits.

        One freed slot costs two reads of lists at once, one of the limit, and the unblocked row with its commit.
        """
        unkeyed = queue.blocked_on_key(reason, str(limit))
        lists = (Where("blocked_on", "in", (unkeyed, asleep)),)
        scan = Scan(Execution, lists, QUEUE_ORDER, limit=PAGE_SIZE, limit_by="blocked_on", partial=True)
        try:
            rows, keyed = await asyncio.gather(self._listed(scan), self._first_of_keys(limit, reason, 1))
            first = [row for row in rows if row.blocked_on == unkeyed]
            waits = await self._unblock(limit, reason, first, keyed)
            if asleep is not None:
                waits |= await self._wake_asleep(asleep, [row for row in rows if row.blocked_on == asleep])
        except errors.FabricError as away:
            logger.warning("what waits for %s is left to the sweep: %s", limit, away)
            return True
        return waits

    async def _unblock(
        self, limit: NamespacedId, reason: BlockingReason, unkeyed: list[Execution], keyed: list[Execution]
    ) -> bool:
        """Unblock in fair order, beginning with the first rows of each list; True when something still waits."""
        room, left, depth = Capacity(self.aggregates, only=limit), False, 1
        lists = queue.fair_list_prefix(reason, limit)
        for _ in range(MAX_PAGES):
            rows = unkeyed + keyed
            self.turns.note_lists(reason, limit, rows, whole=lists not in self._last_lists)
            if not rows:
                return left
            await room.load(rows)
            now, turns = self.runtime.estimate.now(), self.turns.unblock_turns(lists, rows)
            cut = _unfinished(keyed, depth) | _unfinished(unkeyed, PAGE_SIZE)
            order = unblock_order.unblock_order(rows, turns, now, truncated=cut)
            chosen = [row for row in order if room.admits(row)]
            after = unblock_order.credits_after(rows, turns, now, chosen, truncated=cut)
            self.turns.keep_unblock_turns(lists, after, chosen)
            freed = sum(
                await asyncio.gather(*(self.unblock_row(row.execution_id, row.blocking_reason) for row in chosen))
            )
            left = left or freed < len(rows)
            if not freed or not cut or len(chosen) < len(order) or room.is_full(limit):
                return left or bool(cut)
            depth = max(1, min(PAGE_SIZE, MAX_LISTS // max(1, len({row.blocked_on for row in keyed}))))
            where = (Where("blocked_on", "=", queue.blocked_on_key(reason, str(limit))),)
            unkeyed, keyed = await asyncio.gather(
                self._listed(Scan(Execution, where, QUEUE_ORDER, limit=PAGE_SIZE, partial=True)),
                self._first_of_keys(limit, reason, depth),
            )
        return True

    async def _listed(self, scan: Scan) -> list[Execution]:
        return await self.runtime.store.scan(scan)

    async def _first_of_keys(self, limit: NamespacedId, reason: BlockingReason, depth: int) -> list[Execution]:
        """The first rows of each fairness key that waits for a limit; of very many keys, of others each time."""
        lists = queue.fair_list_prefix(reason, limit)
        begins = Where("blocked_on", "starts", lists)
        after = self._last_lists.pop(lists, None)
        rows: list[Execution] = []
        for skip in (after, None) if after is not None else (None,):
            where = (begins,) if skip is None else (begins, Where("blocked_on", ">", skip))
            rows = await self._listed(
                Scan(Execution, where, QUEUE_ORDER, None, depth, "blocked_on", max_values=MAX_LISTS, partial=True)
            )
            if rows:
                break
        names = {row.blocked_on for row in rows if row.blocked_on is not None}
        if len(names) >= MAX_LISTS:
            self._last_lists[lists] = max(names)
        return rows

    async def _wake_asleep(self, on: str, rows: list[Execution]) -> bool:
        """Resume what a budget put to sleep, beginning with the first page; True when something still waits."""
        left = False
        for _ in range(MAX_PAGES):
            if not rows:
                return left
            left |= await self.budget_suspender.resume_budget_suspended(rows) < len(rows)
            if len(rows) < PAGE_SIZE:
                return left
            after = (rows[-1].rank, rows[-1].execution_id)
            rows = await self._listed(Scan(Execution, (Where("blocked_on", "=", on),), QUEUE_ORDER, after, PAGE_SIZE))
        return True

    def schedule_quota_unblock(self, quota_policy_id: str, wait_ms: int, *, namespace: str = DEFAULT_NAMESPACE) -> None:
        """A window opens then: wake what waits for it. One timer a policy, the earliest."""
        policy = NamespacedId(namespace, quota_policy_id)
        loop = asyncio.get_running_loop()
        at = loop.time() + wait_ms / 1000
        timer = self._timers.get(policy)
        if timer is not None and timer.when() <= at:
            return
        if timer is not None:
            timer.cancel()
        self._timers[policy] = loop.call_at(at, self._ring, policy)

    def cancel_window_timers(self) -> None:
        """Forget the windows that were to open; the sweep looks after what waits for them."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._rechecks:
            task.cancel()
        self._timers.clear()

    def _ring(self, policy: NamespacedId) -> None:
        del self._timers[policy]
        task = asyncio.create_task(self._look_again(policy))
        self._rechecks.add(task)
        task.add_done_callback(self._rechecks.discard)

    async def _look_again(self, policy: NamespacedId) -> None:
        if not await self.unblock_quota_waiters(policy.id, namespace=policy.namespace):
            return
        wait_ms = MAX_RECHECK_MS
        try:
            now, sheets = await self.aggregates.quotas.load([policy])
            opens_at = quota.next_capacity_at(sheets[policy], now)
            if opens_at is not None:
                wait_ms = max(1, opens_at - now)
        except errors.FabricError as away:
            logger.warning("when %s has room again is not known: %s", policy, away)
        self.schedule_quota_unblock(policy.id, wait_ms, namespace=policy.namespace)


def _budget_ids(row: Execution) -> Sequence[str]:
    return decode_terms(row.terms).budget_ids if row.blocking_reason is BlockingReason.WAITING_FOR_BUDGET else ()


def _policy_ids(row: Execution) -> Sequence[str]:
    return decode_terms(row.terms).quota_policy_ids if row.blocking_reason is BlockingReason.WAITING_FOR_QUOTA else ()


def _unfinished(rows: Sequence[Execution], depth: int) -> set[str]:
    """The lists of which as many rows were read as were asked for, so that more may follow."""
    counts = Counter(row.blocked_on for row in rows)
    return {name for name, count in counts.items() if name is not None and count >= depth}
