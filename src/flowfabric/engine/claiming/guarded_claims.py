"""The guarded path of a claim: rows that need a rule, a budget or a quota are claimed one by one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from itertools import takewhile
from typing import Any

from flowfabric import errors
from flowfabric.engine.claiming.admission import AdmissionContext, AdmissionControl, AdmittedExecution
from flowfabric.engine.claiming.ready_queues import LOOKAHEAD_ROWS, MAX_KEYS_PER_CLAIM, ReadyQueues, in_namespaces
from flowfabric.engine.limits.unblocker import PAGE_SIZE, Unblocker
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation.execution import ClaimOrder
from flowfabric.handles import Handle, HandleFields, HandleKind
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.model.states import AttemptType, BlockingReason
from flowfabric.model.text import pluralize
from flowfabric.model.view import view_of
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import operator, reclaim
from flowfabric.rules.execution.lease import AcquiredLease, LeaseHolder
from flowfabric.rules.limits.blocked_keys import Competitor
from flowfabric.stores.queries import Where

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
        """Claim these rows, except those that others claimed, that a limit refused, or that failed at their cap."""
        if not order.admission:
            return await gather_claims(*(self._claim_row(row, order) for row in rows))
        lost = [row for row in rows if reclaim.is_reclaimable(row)]  # admitted before
        seen = AdmissionContext()
        admitted = await self.admission.admit([row for row in rows if not reclaim.is_reclaimable(row)], seen)
        admitted += [AdmittedExecution(row) for row in lost]
        if rows and not admitted:
            queues = await self.queues.covered_queues(order.lane_id, order.capabilities)
            await self.refuse_alike(rows, queues, seen, in_namespaces(order.namespaces))
        return await gather_claims(*(self._claim_admitted(one, order) for one in admitted))

    async def refuse_alike(
        self, rows: Sequence[Execution], queues: Sequence[QueueKey], seen: AdmissionContext, own: tuple[Where, ...]
    ) -> None:
        """Block further rows at the heads of these queues that the same limits refuse, in batches.

        There may be thousands, and refusing them one by one would cost several round trips each. Of many queues only
        those of the refused rows are read.
        """
        if len(queues) > MAX_KEYS_PER_CLAIM:
            queues = [queue for queue in queues if any(row.line == queue for row in rows)]
        tried, size = set[str](), LOOKAHEAD_ROWS
        while True:
            heads = await self.queues.queue_heads(queues, size, exclude=tried, where=own)
            refused = await self.admission.refuse_first(list(takewhile(operator.is_eligible, heads)), seen)
            if not refused:
                return
            tried.update(row.execution_id for row in refused)
            size = min(2 * size, PAGE_SIZE)

    async def let_blocked_go_first(self, rows: Sequence[Execution], blocked: Competitor) -> None:
        """Unblock what waits for the limit of a blocked row; if it has no capacity, block the rows that need it."""
        await self.unblocker.unblock_waiters(blocked.reason, blocked.limit)
        is_quota = blocked.reason is BlockingReason.WAITING_FOR_QUOTA
        seen = AdmissionContext(full_policies={blocked.limit} if is_quota else set())
        await self.admission.refuse_first([row for row in rows if blocked.competes_with(row)], seen)

    async def _claim_admitted(self, admitted: AdmittedExecution, order: ClaimOrder) -> answers.Claimed | None:
        # After an error the admission is kept, because the claim may have been committed. If it was not, the next claim
        # of this execution finds it admitted.
        claimed = await self._claim_row(admitted.row, order)
        if claimed is None:
            await self.admission.clean_up_lost_claim(admitted)
        return claimed

    async def _claim_row(self, row: Execution, order: ClaimOrder) -> answers.Claimed | None:
        holder = self._holder(order)
        reads = ReadSet()
        current = reads.one(Execution, row.execution_id)
        payload = reads.one(Payload, row.execution_id)
        loaded: Payload | None = None

        def decide(rows: Rows, now: int) -> Decision[Any]:
            nonlocal loaded
            loaded = payload(rows)
            return reclaim.claim_guarded(current(rows), holder, order.capabilities, now)

        try:
            answer = await self.runtime.decide_and_commit(reads, decide)
        except errors.Corruption as fault:
            self.queues.skip_unreadable(row.execution_id, fault)
            return None
        if not isinstance(answer, AcquiredLease):
            return None
        kind = HandleKind.RECLAIMED if answer.attempt_type is AttemptType.RECLAIM else HandleKind.FRESH
        if answer.attempt_id != holder.attempt_id:
            kind = HandleKind.RESUMED
        return self.claimed_by_rule(answer, kind, loaded, row.namespace)

    def claimed_by_rule(
        self, acquired: AcquiredLease, kind: HandleKind, payload: Payload | None = None, namespace: str | None = None
    ) -> answers.Claimed:
        """Return the answer to a claim that a rule decided."""
        self.runtime.track_lease_expiry(acquired.lane_id, acquired.lease_expires_at)
        if (count := acquired.reclaim_count) and count % reclaim.WARNED_EVERY == 0:
            logger.warning(
                "%s has been reclaimed %s: its workers keep losing it", acquired.execution_id, pluralize(count, "time")
            )
        fields = view_of(HandleFields, acquired, lane_id=acquired.current_lane)
        handle = Handle.mint(self.runtime.store.tag, kind, fields)
        return view_of(answers.Claimed, acquired, handle=handle, payload=payload, namespace=namespace)

    def _holder(self, order: ClaimOrder) -> LeaseHolder:
        mint = self.runtime.minter.uuid
        return view_of(LeaseHolder, order, lease_id=mint(), attempt_id=mint())


async def gather_claims(*claims: Awaitable[answers.Claimed | list[answers.Claimed] | None]) -> list[answers.Claimed]:
    """Return the results of concurrent claims; raise an error only if none claimed anything.

    Claimed executions are leased: they must not be lost because the store was unavailable for another claim.
    """
    replies = await asyncio.gather(*claims, return_exceptions=True)
    claimed: list[answers.Claimed] = []
    for answer in replies:
        if isinstance(answer, answers.Claimed):
            claimed.append(answer)
        elif isinstance(answer, list):
            claimed += answer
    for failed in replies:
        if isinstance(failed, BaseException) and (not claimed or not isinstance(failed, errors.FabricError)):
            raise failed
    return claimed
