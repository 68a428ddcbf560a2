"""Admitting: may this work run now, by its budgets and quotas; what may not is blocked by what is in its way.

Admission lives in other partitions than the claim and is committed before it: a claim that then fails gives back
exactly the admission that this call got.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from flowfabric import errors
from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.limits.quota_slots import QuotaSlots
from flowfabric.engine.limits.unblocker import Capacity, Unblocker
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.budget import Budget, BudgetDimension
from flowfabric.model.execution import Execution
from flowfabric.model.owned_id import NamespacedId
from flowfabric.model.quota import QuotaPolicy, QuotaRequest
from flowfabric.model.states import BlockingReason
from flowfabric.model.text import pluralize
from flowfabric.model.worker import RegisteredWorker
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.quota import QuotaState
from flowfabric.stores.queries import Read


class AdmissionContext(msgspec.Struct):
    """What one call has learnt of budgets, policies and workers, and who refused something."""

    exhausted: dict[NamespacedId, BudgetDimension | None] = {}  # by budget: the dimension that is exhausted
    budgets: dict[NamespacedId, Budget | None] = {}
    limits: dict[NamespacedId, limit_answers.QuotaLimits | None] = {}
    policies: dict[NamespacedId, QuotaPolicy | None] = {}
    unreadable: dict[NamespacedId, errors.FabricError] = {}  # and why; they matter to whom they belong
    full_policies: set[NamespacedId] = set()  # policies that refused somebody
    live_workers: dict[str, list[RegisteredWorker]] = {}
    refused_limits: set[tuple[BlockingReason, NamespacedId]] = (
        set()
    )  # since somebody last looked whether there is room now
    refusal_count: int = 0

    def budgets_of(self, row: Execution) -> list[NamespacedId]:
        """The budgets that the ids in a row's policy stand for."""
        return [
            owner_rules.resolve_owner(row.namespace, one, self.budgets) for one in decode_terms(row.terms).budget_ids
        ]

    def policies_of(self, row: Execution) -> list[NamespacedId]:
        """The quota policies that the ids in a row's policy stand for."""
        return [
            owner_rules.resolve_owner(row.namespace, one, self.policies)
            for one in decode_terms(row.terms).quota_policy_ids
        ]


class AdmissionRefusal(msgspec.Struct, frozen=True):
    """What keeps a row from running now."""

    reason: BlockingReason
    limit: NamespacedId  # the budget or the quota policy
    detail: str
    dimension: str = ""  # of the budget
    hit: limit_answers.QuotaLimitKind | None = None  # of the quota
    wait_ms: int | None = None


class AdmittedExecution(msgspec.Struct, frozen=True):
    """An execution that may run, and the admissions that this call got for it."""

    row: Execution
    admissions: tuple[tuple[NamespacedId, int], ...] = ()


class PolicyCheck(msgspec.Struct):
    """A policy that did not refuse: what was asked, whether this call got a slot, and the request before this one."""

    policy: NamespacedId
    limits: limit_answers.QuotaLimits
    request: quota.AdmissionRequest
    acquired: bool
    previous_request: QuotaRequest | None


class AdmissionControl:
    """Checks budgets and quotas before a claim."""

    def __init__(
        self,
        runtime: Runtime,
        aggregates: LimitAggregates,
        quota_slots: QuotaSlots,
        unblocker: Unblocker,
    ) -> None:
        self.runtime = runtime
        self.unblocker = unblocker
        self.aggregates = aggregates
        self.quota_slots = quota_slots

    async def admit(self, rows: Sequence[Execution], seen: AdmissionContext | None = None) -> list[AdmittedExecution]:
        """Those of the rows that may run now, in order; the others are blocked by what is in their way."""
        if not rows:
            return []
        seen = seen or AdmissionContext()
        for row in rows:
            if row.blocking_reason is BlockingReason.WAITING_FOR_CAPABLE_WORKER:  # here is one
                await self.unblocker.unblock_row(row.execution_id, row.blocking_reason)
        await self._learn(rows, seen)
        verdict = await asyncio.gather(*(self._admit_row(row, seen) for row in rows))
        await self._look_again_at(seen)
        return [one for one in verdict if one is not None]

    async def refuse_first(self, rows: Sequence[Execution], seen: AdmissionContext) -> list[Execution]:
        """Block these rows up to the first that what refused others in this call would let run; which were blocked.

        Nobody is admitted: a request that is not followed by a claim would be missing in its window.
        """
        await self._learn(rows, seen)  # budgets come first for these, too
        now, sheets = await self.aggregates.quotas.load(sorted(seen.full_policies)) if seen.full_policies else (0, {})
        refused: list[tuple[Execution, AdmissionRefusal]] = []
        for row in rows:
            refusal = self._refusal(row, seen, sheets, now)
            if refusal is None:
                break
            refused.append((row, refusal))
        await asyncio.gather(*(self._refuse(row, refusal, seen) for row, refusal in refused))
        await self._look_again_at(seen)
        return [row for row, _ in refused]

    async def _learn(self, rows: Sequence[Execution], seen: AdmissionContext) -> None:
        terms = [(row.namespace, decode_terms(row.terms)) for row in rows]
        named = {one for namespace, given in terms for one in owner_rules.candidates(namespace, given.budget_ids)}
        unknown = sorted(named - seen.exhausted.keys())
        if unknown:
            _, sheets = await self.aggregates.budgets.load(unknown)
            for name, sheet in sheets.items():
                if corrupt := budget_rules.find_corruption(sheet):
                    seen.unreadable[name] = corrupt
                seen.budgets[name] = sheet.root
                seen.exhausted[name] = budget_rules.first_exhausted(sheet.dimensions.values())
        named = {one for namespace, given in terms for one in owner_rules.candidates(namespace, given.quota_policy_ids)}
        unknown = sorted(named - seen.limits.keys())
        if unknown:
            loaded = await self.runtime.load([Read(QuotaPolicy, policy) for policy in unknown])
            for name, found in zip(unknown, loaded.rows, strict=True):
                seen.policies[name] = found[0] if found else None
                numbers = quota.limits_of(seen.policies[name])
                if isinstance(numbers, errors.FabricError):
                    seen.unreadable[name], numbers = numbers, None
                seen.limits[name] = None if numbers is None or numbers.unlimited else numbers
        if seen.unreadable:
            meant = [one for row in rows for one in (*seen.budgets_of(row), *seen.policies_of(row))]
            for one in meant:
                if corrupt := seen.unreadable.get(one):
                    raise corrupt

    async def _admit_row(self, row: Execution, seen: AdmissionContext) -> AdmittedExecution | None:
        if refusal := _spent(row, seen):
            await self._refuse(row, refusal, seen)
            return None
        limited = [
            (policy, numbers) for policy in seen.policies_of(row) if (numbers := seen.limits[policy]) is not None
        ]
        asked: list[PolicyCheck] = []
        for place, (policy, numbers) in enumerate(limited, start=1):
            ask = self._asking(row, numbers, provisional=place < len(limited))
            verdict, before = await self.quota_slots.check(policy, ask)
            if refusal := _full(policy, numbers, verdict):
                await self._refuse_asked(row, refusal, asked, seen)
                return None
            got = isinstance(verdict, limit_answers.Admitted)
            asked.append(PolicyCheck(policy, numbers, ask, got, before if got else None))
        for one in asked[:-1]:
            verdict = await self.quota_slots.confirm(one.policy, one.request, acquired=one.acquired)
            if refusal := _full(one.policy, one.limits, verdict):
                await self._refuse_asked(row, refusal, asked, seen)
                return None
            one.acquired = isinstance(verdict, limit_answers.Admitted)
        return AdmittedExecution(row, tuple((one.policy, one.request.call_id) for one in asked if one.acquired))

    async def _refuse_asked(
        self, row: Execution, refusal: AdmissionRefusal, asked: Sequence[PolicyCheck], seen: AdmissionContext
    ) -> None:
        """Block a row that some of its policies have admitted, and undo that."""
        for one in asked:
            await self.quota_slots.undo_admission(
                one.policy,
                row.execution_id,
                one.request.call_id,
                acquired=one.acquired,
                previous_request=one.previous_request,
            )
        await self._refuse(row, refusal, seen)

    def _refusal(
        self, row: Execution, seen: AdmissionContext, sheets: dict[NamespacedId, QuotaState], now: int
    ) -> AdmissionRefusal | None:
        """What of that which refused others is in the way of this row, too."""
        if refusal := _spent(row, seen):
            return refusal
        for policy in seen.policies_of(row):
            numbers = seen.limits.get(policy)
            if numbers is None or policy not in sheets:
                continue
            verdict, _ = quota.admit(sheets[policy], self._asking(row, numbers), now)
            if refusal := _full(policy, numbers, verdict):
                return refusal
        return None

    def _asking(
        self, row: Execution, numbers: limit_answers.QuotaLimits, *, provisional: bool = False
    ) -> quota.AdmissionRequest:
        return quota.AdmissionRequest(
            execution_id=row.execution_id,
            window_ms=quota.window_ms(numbers),
            rate_limit=numbers.max_requests_per_window,
            concurrency_cap=numbers.active_concurrency_cap,
            jitter_ms=numbers.jitter_ms,
            life=row.replay_count,
            call_id=self.runtime.minter.change_id(),
            takes_over_slot=True,
            provisional=provisional,
            chance=self.runtime.random(),
        )

    async def _refuse(self, row: Execution, refusal: AdmissionRefusal, seen: AdmissionContext) -> None:
        """Block a row by what is in its way; room that it leaves unused elsewhere is for others."""
        seen.refusal_count += 1
        if refusal.hit is None:
            self.runtime.metrics.count("ff_budget_hit", dimension=refusal.dimension)
        else:
            self.runtime.metrics.count("ff_quota_hit", reason=refusal.hit)
            seen.full_policies.add(refusal.limit)
        if refusal.wait_ms is not None:
            self.unblocker.schedule_quota_unblock(refusal.limit.id, refusal.wait_ms, namespace=refusal.limit.namespace)
        if await self.unblocker.block_row(row, refusal.reason, refusal.detail, str(refusal.limit)):
            seen.refused_limits.add((refusal.reason, refusal.limit))
            seen.refused_limits.update((BlockingReason.WAITING_FOR_QUOTA, policy) for policy in seen.policies_of(row))

    async def _look_again_at(self, seen: AdmissionContext) -> None:
        """Room that was made while rows were being blocked must not wait for the sweep."""
        for reason, name in sorted(seen.refused_limits):
            wake = (
                self.unblocker.unblock_budget_waiters
                if reason is BlockingReason.WAITING_FOR_BUDGET
                else self.unblocker.unblock_quota_waiters
            )
            await wake(name.id, namespace=name.namespace)
        seen.refused_limits.clear()

    async def clean_up_lost_race(self, row: Execution) -> None:
        """Somebody else was faster with this row: see that no slot which calls took over from each other is left to it.

        One that has ended needs none any more; one that was blocked meanwhile goes on with what it has.
        """
        policies = decode_terms(row.terms).quota_policy_ids
        if not policies:
            return
        rows = (await self.runtime.load((Read(Execution, (row.execution_id,)),))).rows[0]
        found = rows[0] if rows else None
        if quota.is_life_over(row, found):
            for policy in owner_rules.candidates(row.namespace, policies):
                await self.quota_slots.release(policy, row.execution_id, life=row.replay_count)
        elif found is not None and quota.is_blocked_by_quota(row, found):
            await self.unblocker.unblock_rows(
                [found], Capacity(self.aggregates)
            )  # wherever it stands in the lists of what is blocked
            for policy in owner_rules.candidates(row.namespace, policies):
                await self.unblocker.unblock_quota_waiters(policy.id, namespace=policy.namespace)

    async def release_slots(self, admitted: AdmittedExecution) -> None:
        """Release exactly what this call got."""
        for policy, admission_id in admitted.admissions:
            await self.quota_slots.release(policy, admitted.row.execution_id, admitted=admission_id)


def _spent(row: Execution, seen: AdmissionContext) -> AdmissionRefusal | None:
    """The first budget of a row that is known to be exhausted."""
    for budget in seen.budgets_of(row):
        if full := seen.exhausted.get(budget):
            detail = f"budget {budget.id}: {full.dimension} {budget_rules.used_and_reserved(full)}/{full.hard_limit}"
            return AdmissionRefusal(BlockingReason.WAITING_FOR_BUDGET, budget, detail, full.dimension)
    return None


def _full(policy: NamespacedId, numbers: limit_answers.QuotaLimits, verdict: object) -> AdmissionRefusal | None:
    """What a policy's verdict means for a row; None when it lets it run."""
    match verdict:
        case limit_answers.RateExceeded(retry_after_ms=wait):
            detail = f"quota {policy.id}: rate, again in {wait} ms"
            return AdmissionRefusal(
                BlockingReason.WAITING_FOR_QUOTA, policy, detail, hit=limit_answers.QuotaLimitKind.RATE, wait_ms=wait
            )
        case limit_answers.ConcurrencyExceeded():
            detail = f"quota {policy.id}: {pluralize(numbers.active_concurrency_cap, 'slot')}, all taken"
            return AdmissionRefusal(
                BlockingReason.WAITING_FOR_QUOTA, policy, detail, hit=limit_answers.QuotaLimitKind.CONCURRENCY
            )
        case _:
            return None
