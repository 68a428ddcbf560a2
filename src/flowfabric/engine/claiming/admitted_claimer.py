"""The scheduler: work for workers, as far as budgets and quotas allow.

The order is always capability, budget, quota, claim, so that a worker that cannot run something never uses up quota
for it. Whatever cannot be read stops the call: in doubt nothing is given out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.claiming.admission import AdmissionContext, AdmissionControl, AdmittedExecution
from flowfabric.engine.claiming.claimer import gather_claims
from flowfabric.engine.claiming.fair_turns import Rival
from flowfabric.engine.claiming.ready_queues import (
    LANE_REFRESH_MS,
    LOOKAHEAD_ROWS,
    MAX_KEYS_PER_CLAIM,
    MAX_QUEUES_PER_CLAIM,
)
from flowfabric.engine.limits.unblocker import PAGE_SIZE
from flowfabric.engine.operations.grants import GrantOperations, sign_claim_grant, sign_reclaim_grant
from flowfabric.engine.operations.workers import LiveWorkers, WorkerOperations
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation.execution import ClaimOrder
from flowfabric.handles import HandleKind
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.states import BlockingReason, EligibilityState
from flowfabric.rules.execution import grant as grant_rules
from flowfabric.rules.execution import operator, reclaim
from flowfabric.rules.execution.grant import GrantRequest
from flowfabric.rules.scheduling import capabilities, fairness
from flowfabric.stores.queries import Read, Where

ELIGIBLE = (Where("eligibility_state", "=", EligibilityState.ELIGIBLE_NOW),)


class AdmittedClaimer(GrantOperations, AdmissionControl, WorkerOperations):
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
        namespaces: Collection[str] | None = None,
    ) -> list[answers.Claimed]:
        """Up to `limit` executions in claim order that their budgets and quotas let run, as soon as there is one.

        `namespaces` are those whose work is wanted; None is all.
        """
        order = validate.build_claim_order(
            lane_id,
            worker_id,
            worker_instance_id,
            capabilities,
            lease_ttl_ms,
            admission=True,
            namespaces=namespaces,
        )
        return await self.poll_lane(order, limit, max_wait_ms)

    async def claim_available(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """Claim what is there; when that is nothing, what others wait for in vain is marked."""
        claimed = await super().claim_available(order, limit)
        if order.admission and not claimed:
            await self._close_routes(order)
        return claimed

    async def _close_routes(self, order: ClaimOrder) -> None:
        """When there is nothing to do, say of what stands in other lines that nobody can do it, if that is so."""
        now = self.runtime.estimate.now()
        if abs(now - self._routes_looked_at.get(order.lane_id, 0)) < LANE_REFRESH_MS:
            return
        self._routes_looked_at[order.lane_id] = now
        lines = await self.lane_queues(order.lane_id)
        others = [line for line in lines if not capabilities.covers(line.required, order.capabilities)]
        live: LiveWorkers = {}
        for row in await self.queue_heads(others, _depth(others), where=ELIGIBLE):
            await self.block_if_unserved(row, live)

    async def _claim_guarded(self, rows: Sequence[Execution], order: ClaimOrder) -> list[answers.Claimed]:
        if not order.admission:
            return await super()._claim_guarded(rows, order)
        lost = [row for row in rows if reclaim.is_reclaimable(row)]  # these were admitted before
        seen = AdmissionContext()
        admitted = await self.admit([row for row in rows if not reclaim.is_reclaimable(row)], seen)
        admitted += [AdmittedExecution(row) for row in lost]
        if rows and not admitted:
            lines = await self.covered_queues(order.lane_id, order.capabilities)
            await self._refuse_alike(rows, lines, seen, _of_namespaces(order.namespaces))
        return await gather_claims(*(self._claim_admitted(one, order) for one in admitted))

    async def _refuse_alike(
        self, rows: Sequence[Execution], lines: Sequence[QueueKey], seen: AdmissionContext, own: tuple[Where, ...]
    ) -> None:
        """Block what stands first in these lines for the same reasons as the rows that were refused, many at once.

        Thousands may stand here, and one after the other each would cost the caller several trips. Of many lines only
        those of the refused rows are looked at.
        """
        if len(lines) > MAX_KEYS_PER_CLAIM:
            lines = [line for line in lines if any(row.line == line for row in rows)]
        tried, size = set[str](), LOOKAHEAD_ROWS
        while True:
            first = await self.queue_heads(lines, size, exclude=tried, where=own)
            refused = await self._refuse_first(list(takewhile(operator.is_eligible, first)), seen)
            if not refused:
                return
            tried.update(row.execution_id for row in refused)
            size = min(2 * size, PAGE_SIZE)

    async def _let_blocked_go_first(self, rows: Sequence[Execution], rival: Rival) -> None:
        is_quota = rival.reason is BlockingReason.WAITING_FOR_QUOTA
        wake = self.unblock_quota_waiters if is_quota else self.unblock_budget_waiters
        await wake(rival.limit.id, namespace=rival.limit.namespace)
        seen = AdmissionContext(full_policies={rival.limit} if is_quota else set())
        await self._refuse_first([row for row in rows if rival.holds_up(row)], seen)

    async def _claim_admitted(self, admitted: AdmittedExecution, order: ClaimOrder) -> answers.Claimed | None:
        # An error leaves the admission where it is: the claim may have been written after all. If it was not, the next
        # claim of this execution finds it admitted.
        claimed = await self._claim_row(admitted.row, order)
        if claimed is None:
            await self.release_slots(admitted)
            await self.clean_up_lost_race(admitted.row)
        return claimed

    # -- grants ---------------------------------------------------------------------------------------------------

    async def claim_for_worker(
        self,
        lane_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        namespaces: Collection[str] | None = None,
    ) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        """The scheduler's step: a signed grant for the best execution that this worker may run, or None."""
        own = _of_namespaces(validate.validate_namespaces(namespaces))
        offered = validate.validate_capabilities(capabilities)
        order = validate.build_grant_request(lane_id, worker_id, worker_instance_id, offered, grant_ttl_ms)
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            key = await self.require_signing_key("claim_for_worker")
            await self.refresh_lane(order.lane_id)
            return await self._best(order, key, own)
        finally:
            self.runtime.metrics.observe(
                "ff_claim_from_grant_duration", clock() - began, lane=self.runtime.metrics.lane_label(order.lane_id)
            )

    async def _best(
        self, order: GrantRequest, key: Any, own: tuple[Where, ...]
    ) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        """Offer the rows that this worker covers until one is granted, those of other lines among them.

        Of the others the first are looked at, once: they are not for this worker, however many there are.
        """
        seen = AdmissionContext()
        lines = await self.lane_queues(order.lane_id)
        mine = [line for line in lines if capabilities.covers(line.required, order.capabilities)]
        others = [line for line in lines if not capabilities.covers(line.required, order.capabilities)]
        beyond = await self.queue_heads(others, _depth(others), where=ELIGIBLE + own)
        for portion in self.rotating_windows(mine) or [()]:
            if (granted := await self._best_of(portion, beyond, order, key, own, seen)) is not None:
                return granted
            beyond = []
        return None

    async def _best_of(
        self,
        mine: Sequence[QueueKey],
        beyond: list[Execution],
        order: GrantRequest,
        key: Any,
        own: tuple[Where, ...],
        seen: AdmissionContext,
    ) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        tried, depth = set[str](), _depth(mine)
        while rows := await self.queue_heads(mine, depth, exclude=tried, where=own) + beyond:
            counts = Counter(row.line for row in rows)
            while rows:
                [row], after = fairness.fair_order(rows, self.turns_of(order.lane_id), self.runtime.estimate.now(), 1)
                rows.remove(row)
                tried.add(row.execution_id)
                refusals = seen.refusal_count
                granted = await self._offer(row, order, key, seen)
                if granted is not None:
                    self.keep_turns(order.lane_id, after)
                    return granted
                if seen.refusal_count > refusals:
                    await self._refuse_alike([row], mine, seen, own)
                    break
                if counts[row.line] >= depth and row not in beyond and all(one.line != row.line for one in rows):
                    break  # what stands behind these in their line may come before the rest
            beyond = [row for row in beyond if row.execution_id not in tried]
        return None

    async def _offer(
        self, row: Execution, order: GrantRequest, key: Any, seen: AdmissionContext
    ) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        """A grant for this row, if nothing is in its way; what is in its way is noted on it."""
        if capabilities.missing(row.required_capabilities, order.capabilities):
            await self.block_if_unserved(row, seen.live_workers)
            return None
        if reclaim.is_reclaimable(row):
            return await self._reclaim_grant(row, order, key)
        admitted = await self.admit([row], seen)
        if not admitted:
            return None
        order = msgspec.structs.replace(order, admitted=True)
        try:
            return await self.runtime.decide_execution(
                row.execution_id, lambda row, now: sign_claim_grant(row, order, key, now)
            )
        except errors.StoreUnavailable:
            raise
        except errors.CapabilityMismatch:
            await self.block_if_unserved(row, seen.live_workers)
        except errors.FabricError:
            pass  # somebody was faster: the next one
        await self.release_slots(admitted[0])
        return None

    async def _reclaim_grant(self, row: Execution, order: GrantRequest, key: Any) -> answers.ReclaimGrant | None:
        execution = ids.ExecutionId(row.execution_id)
        try:
            answer = await self.runtime.decide_execution(
                execution, lambda row, now: sign_reclaim_grant(row, order, key, now)
            )
            if isinstance(answer, answers.ReclaimCapExceeded):
                await self.runtime.decide_execution(execution, lambda row, _: reclaim.fail_if_at_cap(row))
        except errors.StoreUnavailable:
            raise
        except errors.FabricError:
            return None  # granted to somebody else
        return answer if isinstance(answer, answers.ReclaimGrant) else None

    async def _redeem(self, execution_id: str, kind: HandleKind, decide: Any) -> answers.Claimed:
        """Redeem a grant; one that was given out after admission is admitted again, as its slots may have lapsed.

        An execution that is refused then waits for the limit that refused it, and the claim finds it not eligible.
        """
        rows = (await self.runtime.load((Read(Execution, (execution_id,)),))).rows[0]
        row = rows[0] if rows else None
        admitted = (
            await self.admit([row], AdmissionContext())
            if row is not None and grant_rules.holds_admitted_grant(row)
            else []
        )
        try:
            return await super()._redeem(execution_id, kind, decide)
        except errors.StoreUnavailable:
            raise  # it may have been written, and then it needs what it got
        except errors.FabricError:
            for one in admitted:
                await self.release_slots(one)
            raise


def _depth(lines: Sequence[QueueKey]) -> int:
    """How many rows of each of these lines are read at once."""
    return LOOKAHEAD_ROWS if len(lines) <= MAX_QUEUES_PER_CLAIM else 1


def _of_namespaces(names: frozenset[str] | None) -> tuple[Where, ...]:
    """What a store filters by so that a look brings work of these namespaces only; None is all."""
    return () if names is None else (Where("namespace", "in", tuple(sorted(names))),)
