"""Admitting: may this work run now, by its budgets and quotas; what may not is blocked by what is in its way.

Admission lives in other partitions than the claim and is committed before it: a claim that then fails gives back
exactly the admission that this call got.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from flowfabric import errors
from flowfabric.engine.limits.unblocker import Room
from flowfabric.engine.operations.budgets import Budgets
from flowfabric.engine.operations.quotas import Quotas
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.budget import Budget, BudgetDimension
from flowfabric.model.execution import Execution
from flowfabric.model.owned_id import OwnedId
from flowfabric.model.quota import QuotaPolicy, QuotaRequest
from flowfabric.model.states import BlockingReason
from flowfabric.model.text import counted
from flowfabric.model.worker import Worker
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.quota import QuotaSheet
from flowfabric.stores.queries import Want


class Seen(msgspec.Struct):
    """What one call has learnt of budgets, policies and workers, and who refused something."""

    spent: dict[OwnedId, BudgetDimension | None] = {}  # by budget: the dimension that is exhausted
    budgets: dict[OwnedId, Budget | None] = {}
    limits: dict[OwnedId, limit_answers.QuotaLimits | None] = {}
    policies: dict[OwnedId, QuotaPolicy | None] = {}
    unreadable: dict[OwnedId, errors.FabricError] = {}  # and why; they matter to whom they belong
    full: set[OwnedId] = set()  # policies that refused somebody
    live: dict[str, list[Worker]] = {}
    refused: set[tuple[BlockingReason, OwnedId]] = set()  # since somebody last looked whether there is room now
    refusals: int = 0

    def budgets_of(self, row: Execution) -> list[OwnedId]:
        """The budgets that the ids in a row's policy stand for."""
        return [owner_rules.owner(row.namespace, one, self.budgets) for one in decode_terms(row.terms).budget_ids]

    def policies_of(self, row: Execution) -> list[OwnedId]:
        """The quota policies that the ids in a row's policy stand for."""
        return [
            owner_rules.owner(row.namespace, one, self.policies) for one in decode_terms(row.terms).quota_policy_ids
        ]


class Refusal(msgspec.Struct, frozen=True):
    """What keeps a row from running now."""

    reason: BlockingReason
    on: OwnedId  # the budget or the quota policy
    detail: str
    dimension: str = ""  # of the budget
    hit: limit_answers.Hit | None = None  # of the quota
    wait_ms: int | None = None


class Admitted(msgspec.Struct, frozen=True):
    """An execution that may run, and the admissions that this call got for it."""

    row: Execution
    got: tuple[tuple[OwnedId, int], ...] = ()


class Asked(msgspec.Struct):
    """A policy that did not refuse: what was asked, whether this call got a slot, and the request before this one."""

    policy: OwnedId
    numbers: limit_answers.QuotaLimits
    ask: quota.Asking
    got: bool
    before: QuotaRequest | None


class Admitting(Budgets, Quotas):
    """Asks budgets and quotas on behalf of a claim."""

    async def admit(self, rows: Sequence[Execution], seen: Seen | None = None) -> list[Admitted]:
        """Those of the rows that may run now, in order; the others are blocked by what is in their way."""
        if not rows:
            return []
        seen = seen or Seen()
        for row in rows:
            if row.blocking_reason is BlockingReason.WAITING_FOR_CAPABLE_WORKER:  # here is one
                await self.let_go(row.execution_id, row.blocking_reason)
        await self._learn(rows, seen)
        verdict = await asyncio.gather(*(self._admit_row(row, seen) for row in rows))
        await self._look_again_at(seen)
        return [one for one in verdict if one is not None]

    async def _refuse_first(self, rows: Sequence[Execution], seen: Seen) -> list[Execution]:
        """Block these rows up to the first that what refused others in this call would let run; which were blocked.

        Nobody is admitted: a request that is not followed by a claim would be missing in its window.
        """
        await self._learn(rows, seen)  # budgets come first for these, too
        now, sheets = await self.quota_chains.look(sorted(seen.full)) if seen.full else (0, {})
        refused: list[tuple[Execution, Refusal]] = []
        for row in rows:
            refusal = self._refusal(row, seen, sheets, now)
            if refusal is None:
                break
            refused.append((row, refusal))
        await asyncio.gather(*(self._refuse(row, refusal, seen) for row, refusal in refused))
        await self._look_again_at(seen)
        return [row for row, _ in refused]

    async def _learn(self, rows: Sequence[Execution], seen: Seen) -> None:
        terms = [(row.namespace, decode_terms(row.terms)) for row in rows]
        named = {one for namespace, given in terms for one in owner_rules.candidates(namespace, given.budget_ids)}
        unknown = sorted(named - seen.spent.keys())
        if unknown:
            _, sheets = await self.budget_chains.look(unknown)
            for name, sheet in sheets.items():
                if corrupt := budget_rules.corruption(sheet):
                    seen.unreadable[name] = corrupt
                seen.budgets[name] = sheet.root
                seen.spent[name] = budget_rules.exhausted(sheet.dimensions.values())
        named = {one for namespace, given in terms for one in owner_rules.candidates(namespace, given.quota_policy_ids)}
        unknown = sorted(named - seen.limits.keys())
        if unknown:
            loaded = await self.load([Want(QuotaPolicy, policy) for policy in unknown])
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

    async def _admit_row(self, row: Execution, seen: Seen) -> Admitted | None:
        if refusal := _spent(row, seen):
            await self._refuse(row, refusal, seen)
            return None
        limited = [
            (policy, numbers) for policy in seen.policies_of(row) if (numbers := seen.limits[policy]) is not None
        ]
        asked: list[Asked] = []
        for place, (policy, numbers) in enumerate(limited, start=1):
            ask = self._asking(row, numbers, provisional=place < len(limited))
            verdict, before = await self._check(policy, ask)
            if refusal := _full(policy, numbers, verdict):
                await self._refuse_asked(row, refusal, asked, seen)
                return None
            got = isinstance(verdict, limit_answers.Admitted)
            asked.append(Asked(policy, numbers, ask, got, before if got else None))
        for one in asked[:-1]:
            verdict = await self._confirm(one.policy, one.ask, got=one.got)
            if refusal := _full(one.policy, one.numbers, verdict):
                await self._refuse_asked(row, refusal, asked, seen)
                return None
            one.got = isinstance(verdict, limit_answers.Admitted)
        return Admitted(row, tuple((one.policy, one.ask.admission) for one in asked if one.got))

    async def _refuse_asked(self, row: Execution, refusal: Refusal, asked: Sequence[Asked], seen: Seen) -> None:
        """Block a row that some of its policies have admitted, and undo that."""
        for one in asked:
            await self._take_back(one.policy, row.execution_id, one.ask.admission, got=one.got, before=one.before)
        await self._refuse(row, refusal, seen)

    def _refusal(self, row: Execution, seen: Seen, sheets: dict[OwnedId, QuotaSheet], now: int) -> Refusal | None:
        """What of that which refused others is in the way of this row, too."""
        if refusal := _spent(row, seen):
            return refusal
        for policy in seen.policies_of(row):
            numbers = seen.limits.get(policy)
            if numbers is None or policy not in sheets:
                continue
            verdict, _ = quota.check(sheets[policy], self._asking(row, numbers), now)
            if refusal := _full(policy, numbers, verdict):
                return refusal
        return None

    def _asking(self, row: Execution, numbers: limit_answers.QuotaLimits, *, provisional: bool = False) -> quota.Asking:
        return quota.Asking(
            execution_id=row.execution_id,
            window_ms=quota.window_ms(numbers),
            rate_limit=numbers.max_requests_per_window,
            concurrency_cap=numbers.active_concurrency_cap,
            jitter_ms=numbers.jitter_ms,
            life=row.replay_count,
            admission=self.minter.change_id(),
            taking_over=True,
            provisional=provisional,
            chance=self.chance(),
        )

    async def _refuse(self, row: Execution, refusal: Refusal, seen: Seen) -> None:
        """Block a row by what is in its way; room that it leaves unused elsewhere is for others."""
        seen.refusals += 1
        if refusal.hit is None:
            self.meters.count("ff_budget_hit", dimension=refusal.dimension)
        else:
            self.meters.count("ff_quota_hit", reason=refusal.hit)
            seen.full.add(refusal.on)
        if refusal.wait_ms is not None:
            self.wake_quota_later(refusal.on.id, refusal.wait_ms, namespace=refusal.on.namespace)
        if await self.hold_up(row, refusal.reason, refusal.detail, str(refusal.on)):
            seen.refused.add((refusal.reason, refusal.on))
            seen.refused.update((BlockingReason.WAITING_FOR_QUOTA, policy) for policy in seen.policies_of(row))

    async def _look_again_at(self, seen: Seen) -> None:
        """Room that was made while rows were being blocked must not wait for the sweep."""
        for reason, name in sorted(seen.refused):
            wake = self.wake_budget if reason is BlockingReason.WAITING_FOR_BUDGET else self.wake_quota
            await wake(name.id, namespace=name.namespace)
        seen.refused.clear()

    async def look_after(self, row: Execution) -> None:
        """Somebody else was faster with this row: see that no slot which calls took over from each other is left to it.

        One that has ended needs none any more; one that was blocked meanwhile goes on with what it has.
        """
        policies = decode_terms(row.terms).quota_policy_ids
        if not policies:
            return
        rows = (await self.load((Want(Execution, (row.execution_id,)),))).rows[0]
        found = rows[0] if rows else None
        if quota.is_over(row, found):
            for policy in owner_rules.candidates(row.namespace, policies):
                await self._release(policy, row.execution_id, life=row.replay_count)
        elif found is not None and quota.is_held_up(row, found):
            await self.set_free([found], Room(self))  # wherever it stands in the lists of what is blocked
            for policy in owner_rules.candidates(row.namespace, policies):
                await self.wake_quota(policy.id, namespace=policy.namespace)

    async def give_back(self, admitted: Admitted) -> None:
        """Release exactly what this call got."""
        for policy, admission_id in admitted.got:
            await self._release(policy, admitted.row.execution_id, admitted=admission_id)


def _spent(row: Execution, seen: Seen) -> Refusal | None:
    """The first budget of a row that is known to be exhausted."""
    for budget in seen.budgets_of(row):
        if full := seen.spent.get(budget):
            detail = f"budget {budget.id}: {full.dimension} {budget_rules.counted(full)}/{full.hard_limit}"
            return Refusal(BlockingReason.WAITING_FOR_BUDGET, budget, detail, full.dimension)
    return None


def _full(policy: OwnedId, numbers: limit_answers.QuotaLimits, verdict: object) -> Refusal | None:
    """What a policy's verdict means for a row; None when it lets it run."""
    match verdict:
        case limit_answers.RateExceeded(retry_after_ms=wait):
            detail = f"quota {policy.id}: rate, again in {wait} ms"
            return Refusal(BlockingReason.WAITING_FOR_QUOTA, policy, detail, hit=limit_answers.Hit.RATE, wait_ms=wait)
        case limit_answers.ConcurrencyExceeded():
            detail = f"quota {policy.id}: {counted(numbers.active_concurrency_cap, 'slot')}, all taken"
            return Refusal(BlockingReason.WAITING_FOR_QUOTA, policy, detail, hit=limit_answers.Hit.CONCURRENCY)
        case _:
            return None
