"""Admitting: may this work run now, by its budgets and quotas; what may not is blocked by what is in its way.

Admission lives in other partitions than the claim and is committed before it: a claim that then fails gives back
exactly the admission that this call got.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from flowfabric import errors
from flowfabric.engine.budgets import Budgets
from flowfabric.engine.quotas import Quotas
from flowfabric.model import verdicts
from flowfabric.model.budget import BudgetDimension
from flowfabric.model.execution import Execution
from flowfabric.model.quota import QuotaPolicy
from flowfabric.model.states import BlockingReason
from flowfabric.model.worker import Worker
from flowfabric.rules import admission, budgets
from flowfabric.rules.policy import decode_terms
from flowfabric.stores.base import Want


class Seen(msgspec.Struct):
    """What one call has learnt of budgets, policies and workers, and who refused something."""

    spent: dict[str, BudgetDimension | None] = {}  # by budget: the dimension that is exhausted
    policies: dict[str, verdicts.QuotaLimits | None] = {}
    full: set[str] = set()  # policies that refused somebody
    live: dict[str, list[Worker]] = {}
    refused: set[tuple[BlockingReason, str]] = set()

    def stops(self, row: Execution) -> bool:
        """Whether what stopped others is in the way of this row, too."""
        terms = decode_terms(row.terms)
        return any(map(self.spent.get, terms.budget_ids)) or not self.full.isdisjoint(terms.quota_policy_ids)


class Admitted(msgspec.Struct, frozen=True):
    """An execution that may run, and the admissions that this call got for it."""

    row: Execution
    got: tuple[tuple[str, int], ...] = ()


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
        # Room that was made while these were being blocked must not wait for the sweep.
        for reason, name in sorted(seen.refused):
            await (self.wake_budget if reason is BlockingReason.WAITING_FOR_BUDGET else self.wake_quota)(name)
        seen.refused.clear()
        return [one for one in verdict if one is not None]

    async def _learn(self, rows: Sequence[Execution], seen: Seen) -> None:
        terms = [decode_terms(row.terms) for row in rows]
        unknown = sorted({budget for one in terms for budget in one.budget_ids} - seen.spent.keys())
        if unknown:
            _, sheets = await self.budget_chains.look(unknown)
            for name, sheet in sheets.items():
                if corrupt := budgets.corruption(sheet):
                    raise corrupt
                seen.spent[name] = budgets.exhausted(sheet.dimensions.values())
        unknown = sorted({policy for one in terms for policy in one.quota_policy_ids} - seen.policies.keys())
        if unknown:
            loaded = await self.load([Want(QuotaPolicy, (policy,)) for policy in unknown])
            for name, found in zip(unknown, loaded.rows, strict=True):
                numbers = admission.limits_of(found[0] if found else None)
                if isinstance(numbers, errors.FabricError):
                    raise numbers
                seen.policies[name] = None if numbers is None or numbers.unlimited else numbers

    async def _admit_row(self, row: Execution, seen: Seen) -> Admitted | None:
        terms = decode_terms(row.terms)
        for budget in terms.budget_ids:
            if full := seen.spent[budget]:
                self.meters.count("ff_budget_hit", dimension=full.dimension)
                detail = f"budget {budget}: {full.dimension} {budgets.counted(full)}/{full.hard_limit}"
                await self._refuse(row, BlockingReason.WAITING_FOR_BUDGET, detail, budget, seen)
                return None
        got: list[tuple[str, int]] = []
        for policy in terms.quota_policy_ids:
            numbers = seen.policies[policy]
            if numbers is None:
                continue
            ask = self._asking(row, numbers)
            verdict = await self._check(policy, ask)
            match verdict:
                case verdicts.Admitted():
                    got.append((policy, ask.admission))
                case verdicts.AlreadyAdmitted():
                    pass
                case verdicts.RateExceeded(retry_after_ms=wait):
                    await self.give_back(Admitted(row, tuple(got)))
                    self.meters.count("ff_quota_hit", reason=verdicts.Hit.RATE)
                    self.wake_quota_later(policy, wait)
                    detail = f"quota {policy}: rate, again in {wait} ms"
                    await self._refuse(row, BlockingReason.WAITING_FOR_QUOTA, detail, policy, seen)
                    return None
                case verdicts.ConcurrencyExceeded():
                    await self.give_back(Admitted(row, tuple(got)))
                    self.meters.count("ff_quota_hit", reason=verdicts.Hit.CONCURRENCY)
                    detail = f"quota {policy}: all {numbers.active_concurrency_cap} slots are taken"
                    await self._refuse(row, BlockingReason.WAITING_FOR_QUOTA, detail, policy, seen)
                    return None
        return Admitted(row, tuple(got))

    def _asking(self, row: Execution, numbers: verdicts.QuotaLimits) -> admission.Asking:
        return admission.Asking(
            execution_id=row.execution_id,
            window_ms=admission.window_ms(numbers),
            rate_limit=numbers.max_requests_per_window,
            concurrency_cap=numbers.active_concurrency_cap,
            jitter_ms=numbers.jitter_ms,
            life=row.replay_count,
            admission=self.minter.change_id(),
            taking_over=True,
            chance=self.chance(),
        )

    async def _refuse(self, row: Execution, reason: BlockingReason, detail: str, on: str, seen: Seen) -> None:
        """Block a row by what is in its way; room that it leaves unused elsewhere is for others."""
        if reason is BlockingReason.WAITING_FOR_QUOTA:
            seen.full.add(on)
        if await self.hold_up(row, reason, detail, on):
            seen.refused.add((reason, on))
            seen.refused.update(
                (BlockingReason.WAITING_FOR_QUOTA, policy) for policy in decode_terms(row.terms).quota_policy_ids
            )

    async def give_back(self, admitted: Admitted) -> None:
        """Release exactly what this call got."""
        for policy, admission_id in admitted.got:
            await self._release(policy, admitted.row.execution_id, admitted=admission_id)
