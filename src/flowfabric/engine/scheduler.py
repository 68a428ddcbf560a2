"""The scheduler: work for workers, as far as budgets and quotas allow.

The order is always capability, budget, quota, claim, so that a worker that cannot run something never uses up quota
for it. Admission lives in other partitions than the claim and is committed before it: a claim that then fails gives
back exactly the admission that this call got. Whatever cannot be read stops the call: in doubt nothing is given out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine import intake
from flowfabric.engine.budgets import Budgets
from flowfabric.engine.claims import Claims, Signer, partition_key
from flowfabric.engine.intake import ClaimOrder
from flowfabric.engine.lines import CANDIDATES, HOUSEKEEPING_MS
from flowfabric.engine.quotas import Quotas
from flowfabric.engine.workers import Workers
from flowfabric.model import answers, verdicts
from flowfabric.model.budget import BudgetDimension
from flowfabric.model.execution import Execution
from flowfabric.model.quota import QuotaPolicy
from flowfabric.model.states import BlockingReason, EligibilityState
from flowfabric.rules import admission, budgets, capabilities, claim, fairness, reclaim
from flowfabric.rules.claim import GrantOrder
from flowfabric.rules.policy import decode_terms
from flowfabric.stores.base import Want, Where

ELIGIBLE = (Where("eligibility_state", "=", EligibilityState.ELIGIBLE_NOW),)


class Pass(msgspec.Struct):
    """What one call has learnt of budgets and policies, and which of them refused something."""

    spent: dict[str, BudgetDimension | None] = {}  # by budget: the dimension that is exhausted
    policies: dict[str, verdicts.QuotaLimits | None] = {}
    refused: set[tuple[BlockingReason, str]] = set()


class Admitted(msgspec.Struct, frozen=True):
    """An execution that may run, and the admissions that this call got for it."""

    row: Execution
    got: tuple[tuple[str, int], ...] = ()


class Scheduler(Claims, Budgets, Quotas, Workers):
    """Claims that respect limits."""

    @cached_property
    def _routes_looked_at(self) -> dict[str, int]:
        return {}

    async def claim_admitted(
        self,
        lane_id: str,
        limit: int = 1,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        max_wait_ms: int = 0,
    ) -> list[answers.Claimed]:
        """Up to `limit` executions in claim order that their budgets and quotas let run, as soon as there is one."""
        order = intake.claim_order(lane_id, worker_id, worker_instance_id, capabilities, lease_ttl_ms, admission=True)
        return await self.pull(order, limit, max_wait_ms)

    async def _claim_now(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        claimed = await super()._claim_now(order, limit)
        if order.admission and not claimed:
            await self._close_routes(order)
        return claimed

    async def _close_routes(self, order: ClaimOrder) -> None:
        """When there is nothing to do, say of what stands in other lines that nobody can do it, if that is so."""
        now = self.estimate.now()
        if abs(now - self._routes_looked_at.get(order.lane_id, 0)) < HOUSEKEEPING_MS:
            return
        self._routes_looked_at[order.lane_id] = now
        lines = await self.lines_of(order.lane_id)
        others = [line for line in lines if not capabilities.covers(line.required, order.capabilities)]
        for row in await self.heads(others, CANDIDATES, where=ELIGIBLE):
            await self.close_route(row)

    async def _claim_decided(self, rows: Sequence[Execution], order: ClaimOrder) -> list[answers.Claimed]:
        if not order.admission:
            return await super()._claim_decided(rows, order)
        lost = [row for row in rows if reclaim.is_reclaimable(row)]  # these were admitted before
        admitted = await self._admit([row for row in rows if not reclaim.is_reclaimable(row)])
        admitted += [Admitted(row) for row in lost]
        claimed = await asyncio.gather(*(self._claim_admitted(one, order) for one in admitted))
        return [one for one in claimed if one is not None]

    async def _claim_admitted(self, admitted: Admitted, order: ClaimOrder) -> answers.Claimed | None:
        # An error leaves the admission where it is: the claim may have been written after all. If it was not, the next
        # claim of this execution finds it admitted.
        claimed = await self._claim_row(admitted.row, order)
        if claimed is None:
            await self._give_back(admitted)
        return claimed

    # -- admission ------------------------------------------------------------------------------------------------

    async def _admit(self, rows: Sequence[Execution], seen: Pass | None = None) -> list[Admitted]:
        """Those of the rows that may run now, in order; the others are blocked by what is in their way."""
        if not rows:
            return []
        seen = seen or Pass()
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

    async def _learn(self, rows: Sequence[Execution], seen: Pass) -> None:
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

    async def _admit_row(self, row: Execution, seen: Pass) -> Admitted | None:
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
                    await self._give_back(Admitted(row, tuple(got)))
                    self.meters.count("ff_quota_hit", reason=verdicts.Hit.RATE)
                    self.wake_quota_later(policy, wait)
                    detail = f"quota {policy}: rate, again in {wait} ms"
                    await self._refuse(row, BlockingReason.WAITING_FOR_QUOTA, detail, policy, seen)
                    return None
                case verdicts.ConcurrencyExceeded():
                    await self._give_back(Admitted(row, tuple(got)))
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

    async def _refuse(self, row: Execution, reason: BlockingReason, detail: str, on: str, seen: Pass) -> None:
        """Block a row by what is in its way; room that it leaves unused elsewhere is for others."""
        if await self.hold_up(row, reason, detail, on):
            seen.refused.add((reason, on))
            seen.refused.update(
                (BlockingReason.WAITING_FOR_QUOTA, policy) for policy in decode_terms(row.terms).quota_policy_ids
            )

    async def _give_back(self, admitted: Admitted) -> None:
        """Release exactly what this call got."""
        for policy, admission_id in admitted.got:
            await self._release(policy, admitted.row.execution_id, admitted=admission_id)

    # -- grants ---------------------------------------------------------------------------------------------------

    async def claim_for_worker(
        self,
        lane_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
    ) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        """The scheduler's step: a signed grant for the best execution that this worker may run, or None."""
        offered = intake.offered(capabilities)
        order = intake.grant_order(lane_id, worker_id, worker_instance_id, offered, grant_ttl_ms)
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            key = await self.signing_key("claim_for_worker")
            await self.look_around(order.lane_id)
            return await self._best(order, key)
        finally:
            self.meters.took("ff_claim_from_grant_duration", clock() - began, lane=order.lane_id)

    async def _best(self, order: GrantOrder, key: Any) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        seen, tried = Pass(), set[str]()
        while candidates := await self._candidates(order, tried):
            while candidates:
                [row], after = fairness.plan(candidates, self.turns_of(order.lane_id), self.estimate.now(), 1)
                candidates.remove(row)
                tried.add(row.execution_id)
                granted = await self._offer(row, order, key, seen)
                if granted is not None:
                    self.keep_turns(order.lane_id, after)
                    return granted
        return None

    async def _candidates(self, order: GrantOrder, tried: set[str]) -> list[Execution]:
        """The next best executions of the lane: what this worker covers, and what it does not and nobody looked at."""
        lines = await self.lines_of(order.lane_id)
        mine = [line for line in lines if capabilities.covers(line.required, order.capabilities)]
        others = [line for line in lines if line not in mine]
        rows = await self.heads(mine, CANDIDATES, without=tried)
        rows += await self.heads(others, CANDIDATES, without=tried, where=ELIGIBLE)
        return rows

    async def _offer(
        self, row: Execution, order: GrantOrder, key: Any, seen: Pass
    ) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        """A grant for this row, if nothing is in its way; what is in its way is noted on it."""
        if capabilities.missing(row.required_capabilities, order.capabilities):
            await self.close_route(row)
            return None
        if reclaim.is_reclaimable(row):
            return await self._reclaim_grant(row, order, key)
        admitted = await self._admit([row], seen)
        if not admitted:
            return None
        try:
            return await self._grant(row, order, key)
        except errors.StoreUnavailable:
            raise
        except errors.CapabilityMismatch:
            await self.close_route(row)
        except errors.FabricError:
            pass  # somebody was faster: the next one
        await self._give_back(admitted[0])
        return None

    async def _grant(self, row: Execution, order: GrantOrder, key: Any) -> answers.ClaimGrant:
        execution = ids.ExecutionId(row.execution_id)
        signer = Signer(key, reclaim=False)
        await self.settle_execution(
            execution, lambda row, now: claim.issue_claim_grant(row, order, now, signer, unblocking=True)
        )
        return answers.ClaimGrant(
            execution, partition_key(execution), signer.grant_key, signer.expires_at, order.lane_id
        )

    async def _reclaim_grant(self, row: Execution, order: GrantOrder, key: Any) -> answers.ReclaimGrant | None:
        execution = ids.ExecutionId(row.execution_id)
        signer = Signer(key, reclaim=True)
        try:
            answer = await self.settle_execution(
                execution, lambda row, now: reclaim.issue_reclaim_grant(row, order, now, signer)
            )
            if isinstance(answer, answers.ReclaimCapExceeded):
                await self.settle_execution(execution, lambda row, _: reclaim.end_at_cap(row))
        except errors.StoreUnavailable:
            raise
        except errors.FabricError:
            return None  # granted to somebody else
        if not isinstance(answer, answers.Granted):
            return None
        return answers.ReclaimGrant(
            execution, partition_key(execution), signer.grant_key, signer.expires_at, order.lane_id
        )
