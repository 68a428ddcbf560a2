"""The guarded path of a claim: rows that need a rule, a budget or a quota are claimed one by one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from itertools import takewhile
from typing import Any

from flowfabric import errors
from flowfabric.engine.claiming.admission import AdmissionContext, AdmissionControl, AdmittedExecution
from flowfabric.engine.claiming.fair_turns import Rival
from flowfabric.engine.claiming.ready_queues import LOOKAHEAD_ROWS, MAX_KEYS_PER_CLAIM, ReadyQueues, in_namespaces
from flowfabric.engine.limits.unblocker import PAGE_SIZE, Unblocker
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation.execution import ClaimOrder
from flowfabric.handles import Handle, HandleFields, HandleKind
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.model.states import AttemptType, BlockingReason
from flowfabric.model.text import pluralize
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import operator, reclaim
from flowfabric.rules.execution.lease import AcquiredLease, LeaseHolder
from flowfabric.stores.queries import Read, Where

logger = logging.getLogger("flowfabric.claiming")


class GuardedClaims:
    """Claims of single rows by load, rule and commit."""

    def __init__(
        self,
        runtime: Runtime,
        queues: ReadyQueues,
        admission: AdmissionControl,
        unblocker: Unblocker,
    ) -> None:
        self.runtime = runtime
        self.admission = admission
        self.queues = queues
        self.unblocker = unblocker

    async def claim_rows(self, rows: Sequence[Execution], order: ClaimOrder) -> list[answers.Claimed]:
        """Claim these rows; leave out those that others claimed, that a limit refused, or that failed at their cap."""
        if not order.admission:
            return await gather_claims(*(self._claim_row(row, order) for row in rows))
        lost = [row for row in rows if reclaim.is_reclaimable(row)]  # these were admitted before
        seen = AdmissionContext()
        admitted = await self.admission.admit([row for row in rows if not reclaim.is_reclaimable(row)], seen)
        admitted += [AdmittedExecution(row) for row in lost]
        if rows and not admitted:
            lines = await self.queues.covered_queues(order.lane_id, order.capabilities)
            await self.refuse_alike(rows, lines, seen, in_namespaces(order.namespaces))
        return await gather_claims(*(self._claim_admitted(one, order) for one in admitted))

    async def refuse_alike(
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
            first = await self.queues.queue_heads(lines, size, exclude=tried, where=own)
            refused = await self.admission.refuse_first(list(takewhile(operator.is_eligible, first)), seen)
            if not refused:
                return
            tried.update(row.execution_id for row in refused)
            size = min(2 * size, PAGE_SIZE)

    async def let_blocked_go_first(self, rows: Sequence[Execution], rival: Rival) -> None:
        is_quota = rival.reason is BlockingReason.WAITING_FOR_QUOTA
        wake = self.unblocker.unblock_quota_waiters if is_quota else self.unblocker.unblock_budget_waiters
        await wake(rival.limit.id, namespace=rival.limit.namespace)
        seen = AdmissionContext(full_policies={rival.limit} if is_quota else set())
        await self.admission.refuse_first([row for row in rows if rival.holds_up(row)], seen)

    async def _claim_admitted(self, admitted: AdmittedExecution, order: ClaimOrder) -> answers.Claimed | None:
        # An error leaves the admission where it is: the claim may have been written after all. If it was not, the next
        # claim of this execution finds it admitted.
        claimed = await self._claim_row(admitted.row, order)
        if claimed is None:
            await self.admission.release_slots(admitted)
            await self.admission.clean_up_lost_race(admitted.row)
        return claimed

    async def _claim_row(self, row: Execution, order: ClaimOrder) -> answers.Claimed | None:
        holder = self._holder(order)
        wants = (Read(Execution, (row.execution_id,)), Read(Payload, (row.execution_id,)))
        payload: list[Payload] = []

        def decide(rows: list[list[Any]], now: int) -> Decision[Any]:
            payload[:] = rows[1]
            return reclaim.claim_guarded(rows[0][0] if rows[0] else None, holder, order.capabilities, now)

        try:
            answer = await self.runtime.decide_and_commit(wants, decide)
        except errors.Corruption as fault:
            self.queues.skip_unreadable(row.execution_id, fault)
            return None
        if not isinstance(answer, AcquiredLease):
            return None
        kind = HandleKind.RECLAIMED if answer.attempt_type is AttemptType.RECLAIM else HandleKind.FRESH
        if answer.attempt_id != holder.attempt_id:
            kind = HandleKind.RESUMED
        return self.claimed_by_rule(answer, kind, payload[0] if payload else None, row.namespace)

    def claimed_by_rule(
        self, acquired: AcquiredLease, kind: HandleKind, payload: Payload | None = None, namespace: str | None = None
    ) -> answers.Claimed:
        self.runtime.track_lease_expiry(acquired.lane_id, acquired.lease_expires_at)
        if (count := acquired.reclaim_count) and count % reclaim.WARNED_EVERY == 0:
            logger.warning(
                "%s has been reclaimed %s: its workers keep losing it", acquired.execution_id, pluralize(count, "time")
            )
        fields = HandleFields(
            acquired.execution_id,  # type: ignore[arg-type]
            acquired.attempt_index,
            acquired.attempt_id,  # type: ignore[arg-type]
            acquired.lease_id,  # type: ignore[arg-type]
            acquired.lease_epoch,
            acquired.lease_ttl_ms,
            acquired.current_lane,  # type: ignore[arg-type]
            acquired.worker_instance_id,  # type: ignore[arg-type]
        )
        return answers.Claimed(
            acquired.execution_id,
            acquired.lease_id,
            acquired.lease_epoch,
            acquired.attempt_index,
            acquired.attempt_id,
            acquired.attempt_type,
            acquired.lease_expires_at,
            Handle.mint(self.runtime.store.tag, kind, fields),
            payload,
            namespace,
        )

    def _holder(self, order: ClaimOrder) -> LeaseHolder:
        return LeaseHolder(
            order.worker_id,
            order.worker_instance_id,
            order.lane_id,
            self.runtime.minter.uuid(),
            self.runtime.minter.uuid(),
            order.lease_ttl_ms,
        )


async def gather_claims(*claims: Awaitable[answers.Claimed | list[answers.Claimed] | None]) -> list[answers.Claimed]:
    """What several claims at once have got; that one of them failed matters only when none got anything.

    What is claimed is held: it must not be lost because the store was away for a neighbour.
    """
    answered = await asyncio.gather(*claims, return_exceptions=True)
    claimed: list[answers.Claimed] = []
    for answer in answered:
        if isinstance(answer, answers.Claimed):
            claimed.append(answer)
        elif isinstance(answer, list):
            claimed += answer
    for failed in answered:
        if isinstance(failed, BaseException) and (not claimed or not isinstance(failed, errors.FabricError)):
            raise failed
    return claimed
