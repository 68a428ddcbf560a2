"""Admission: checks budgets and quotas before a claim, and blocks the executions that they refuse.

Limits are in other partitions than the execution, so an admission is committed before the claim. A claim that then
fails releases exactly the admissions that its call acquired.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.limits.quota_slots import QuotaSlots
from flowfabric.engine.limits.unblocker import Unblocker
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.execution import Execution
from flowfabric.model.limits.quota import QuotaPolicy, QuotaRequest, QuotaSlot
from flowfabric.model.scheduling.worker import RegisteredWorker
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.model.states import BlockingReason
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import admission as admission_rules
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.admission import AdmissionRefusal, KnownLimits
from flowfabric.rules.limits.capacity import Capacity
from flowfabric.stores.queries import Read


class AdmissionContext(msgspec.Struct):
    """What one call has loaded, and which limits refused executions in it."""

    limits: KnownLimits = msgspec.field(default_factory=KnownLimits)
    full_policies: set[NamespacedId] = set()  # policies that refused an execution
    live_workers: dict[str, list[RegisteredWorker]] = {}
    limits_to_recheck: set[tuple[BlockingReason, NamespacedId]] = set()
    refusal_count: int = 0


class AdmittedExecution(msgspec.Struct, frozen=True):
    """An execution that may run, and the admissions that this call acquired for it."""

    row: Execution
    admissions: tuple[tuple[NamespacedId, int], ...] = ()


class PolicyCheck(msgspec.Struct):
    """A policy that did not refuse: the request, whether it acquired a slot, and the window entry it replaced."""

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
        """Return those of the rows that may run now, in order; block the others."""
        if not rows:
            return []
        seen = seen or AdmissionContext()
        for row in rows:
            if row.blocking_reason is BlockingReason.WAITING_FOR_CAPABLE_WORKER:  # the caller is one
                await self.unblocker.unblock_row(row.execution_id, row.blocking_reason)
        await self._load_limits(rows, seen)
        admitted = await asyncio.gather(*(self._admit_row(row, seen) for row in rows))
        await self._recheck_limits(seen)
        return [one for one in admitted if one is not None]

    async def refuse_first(self, rows: Sequence[Execution], seen: AdmissionContext) -> list[Execution]:
        """Block these rows up to the first that the limits of this call do not refuse; return the blocked ones.

        Nothing is admitted: a request without a claim would use up the rate of its window.
        """
        await self._load_limits(rows, seen)  # budgets come first here, too
        full = sorted(seen.full_policies)
        slots = {policy: [Read(QuotaSlot, (*policy, row.execution_id)) for row in rows] for policy in full}
        now, states = await self.aggregates.quotas.load(full, slots) if full else (0, {})
        refused: list[tuple[Execution, AdmissionRefusal]] = []
        for row in rows:
            call_id, chance = self.runtime.minter.change_id(), self.runtime.random()
            refusal = seen.limits.refusal(row, states, now, call_id=call_id, chance=chance)
            if refusal is None:
                break
            refused.append((row, refusal))
        await asyncio.gather(*(self._refuse(row, refusal, seen) for row, refusal in refused))
        await self._recheck_limits(seen)
        return [row for row, _ in refused]

    async def _load_limits(self, rows: Sequence[Execution], seen: AdmissionContext) -> None:
        """Load the limits of these rows; raise if one of them is corrupt."""
        if missing := seen.limits.missing_budgets(rows):
            _, budgets = await self.aggregates.budgets.load(missing)
            for key, state in budgets.items():
                seen.limits.add_budget(key, state)
        if missing := seen.limits.missing_policies(rows):
            reads = ReadSet()
            policies = reads.each(QuotaPolicy, missing)
            loaded = await self.runtime.load(reads)
            for key, root in zip(missing, policies(loaded.rows), strict=True):
                seen.limits.add_policy(key, root)
        if corrupt := seen.limits.find_corruption(rows):
            raise corrupt

    async def _admit_row(self, row: Execution, seen: AdmissionContext) -> AdmittedExecution | None:
        if refusal := seen.limits.budget_refusal(row):
            await self._refuse(row, refusal, seen)
            return None
        limited = seen.limits.limited_policies(row)
        checks: list[PolicyCheck] = []
        for number, (policy, limits) in enumerate(limited, start=1):
            request = admission_rules.request_for(
                row,
                limits,
                call_id=self.runtime.minter.change_id(),
                chance=self.runtime.random(),
                provisional=number < len(limited),
            )
            verdict, before = await self.quota_slots.check(policy, request)
            if refusal := admission_rules.quota_refusal(policy, limits, verdict):
                await self._undo_and_refuse(row, refusal, checks, seen)
                return None
            acquired = isinstance(verdict, limit_answers.Admitted)
            checks.append(PolicyCheck(policy, limits, request, acquired, before if acquired else None))
        for one in checks[:-1]:
            verdict = await self.quota_slots.confirm(one.policy, one.request, acquired=one.acquired)
            if refusal := admission_rules.quota_refusal(one.policy, one.limits, verdict):
                await self._undo_and_refuse(row, refusal, checks, seen)
                return None
            one.acquired = isinstance(verdict, limit_answers.Admitted)
        return AdmittedExecution(row, tuple((one.policy, one.request.call_id) for one in checks if one.acquired))

    async def _undo_and_refuse(
        self, row: Execution, refusal: AdmissionRefusal, checks: Sequence[PolicyCheck], seen: AdmissionContext
    ) -> None:
        """Undo the admissions of a row by its other policies, and block it."""
        for one in checks:
            await self.quota_slots.undo_admission(
                one.policy,
                row.execution_id,
                one.request.call_id,
                acquired=one.acquired,
                previous_request=one.previous_request,
            )
        await self._refuse(row, refusal, seen)

    async def _refuse(self, row: Execution, refusal: AdmissionRefusal, seen: AdmissionContext) -> None:
        """Block a row on the limit that refuses it. Its other policies are checked again, too."""
        seen.refusal_count += 1
        if refusal.hit is None:
            self.runtime.metrics.count("ff_budget_hit", dimension=refusal.dimension)
        else:
            self.runtime.metrics.count("ff_quota_hit", reason=refusal.hit)
            seen.full_policies.add(refusal.limit)
        if refusal.wait_ms is not None:
            self.unblocker.schedule_quota_unblock(refusal.limit, refusal.wait_ms)
        if await self.unblocker.block_row(row, refusal.reason, refusal.detail, str(refusal.limit)):
            policies = seen.limits.policies_of(row)
            seen.limits_to_recheck.add((refusal.reason, refusal.limit))
            seen.limits_to_recheck.update((BlockingReason.WAITING_FOR_QUOTA, policy) for policy in policies)

    async def _recheck_limits(self, seen: AdmissionContext) -> None:
        """Unblock what has capacity now: capacity freed while rows were being blocked must not wait for the sweep."""
        for reason, limit in sorted(seen.limits_to_recheck):
            await self.unblocker.unblock_waiters(reason, limit)
        seen.limits_to_recheck.clear()

    async def clean_up_lost_claim(self, admitted: AdmittedExecution) -> None:
        """Clean up after an admitted row could not be claimed, because another call claimed or blocked it first.

        Calls take over slots from each other, so a slot may be left that neither call releases. It is released if the
        execution has ended. A row that still waits keeps its slot, so that its request in the window is not lost; if
        another call blocked it meanwhile, it is unblocked.
        """
        row = admitted.row
        policy_ids = decode_terms(row.terms).quota_policy_ids
        if not policy_ids:
            return
        reads = ReadSet()
        current = reads.one(Execution, row.execution_id)
        found = current((await self.runtime.load(reads)).rows)
        policies = owner_rules.candidates(row.namespace, policy_ids)
        if quota.is_life_over(row, found):
            for policy in policies:
                await self.quota_slots.release(policy, row.execution_id, life=row.replay_count)
        elif found is None or not quota.keeps_admission(row, found):
            await self.release_slots(admitted)
        elif quota.is_blocked_by_quota(row, found):
            await self.unblocker.unblock_rows([found], Capacity())  # it may be far from the head of its list
            for policy in policies:
                await self.unblocker.unblock_quota_waiters(policy)

    async def release_slots(self, admitted: AdmittedExecution) -> None:
        """Release exactly the admissions that this call acquired."""
        for policy, admission_id in admitted.admissions:
            await self.quota_slots.release(policy, admitted.row.execution_id, admitted=admission_id)
