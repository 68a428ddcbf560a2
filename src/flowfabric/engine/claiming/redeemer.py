"""GrantRedeemer: redeems grants for one worker, within its capacity.

SDK workers claim directly and do not need it. It is for workers that receive grants from a scheduler. A slot is
reserved before the grant is redeemed, so a worker without capacity leaves the grant unused. The key that was issued
with a grant is checked when it is redeemed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from flowfabric import errors
from flowfabric.engine.validation import execution as validate
from flowfabric.handles import Handle
from flowfabric.model.answers.execution import (
    Claimed,
    ClaimGrant,
    GrantNotFound,
    NotReclaimable,
    ReclaimCapExceeded,
    ReclaimGrant,
)
from flowfabric.rules import validation

if TYPE_CHECKING:
    from flowfabric.engine.operations.claims import ClaimOperations

T = TypeVar("T")
POOL = "tasks"


class GrantRedeemer:
    """Redeems grants of one worker, up to the number of tasks that it may run at a time."""

    def __init__(
        self,
        engine: ClaimOperations,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int,
        max_concurrent_tasks: int,
    ) -> None:
        self._engine = engine
        self._worker_id = validate.validate_worker_id(worker_id)
        self._instance_id = validate.validate_instance_id(worker_instance_id)
        self._lease_ttl_ms = validation.duration_ms("lease_ttl_ms", lease_ttl_ms)
        self._max_tasks = validation.integer("max_concurrent_tasks", max_concurrent_tasks, least=1)
        self._redeeming = 0
        self._lease_ids: set[str] = set()  # a lost lease and the one that took over are two tasks

    async def claim_from_grant(
        self, grant: ClaimGrant | ReclaimGrant
    ) -> Claimed | NotReclaimable | ReclaimCapExceeded | GrantNotFound:
        """Redeem a grant of any kind: start an attempt, continue an interrupted one, or take over a lost one."""
        if isinstance(grant, ReclaimGrant):
            return await self._with_slot(lambda: self._reclaim(grant))
        return await self._with_slot(lambda: self._claim(_claim_grant(grant)))

    async def claim_from_resume_grant(self, grant: ClaimGrant) -> Handle:
        """Redeem a grant for an interrupted attempt."""
        claimed = await self._with_slot(lambda: self._resume(_claim_grant(grant)))
        return claimed.handle

    async def claim_from_reclaim_grant(
        self, grant: ReclaimGrant, *, execution_id: str, lane_id: str, max_reclaim_count: int | None = None
    ) -> Claimed | NotReclaimable | ReclaimCapExceeded | GrantNotFound:
        """Redeem a reclaim grant; refuse it if it is expired or for another execution or lane."""
        if not isinstance(grant, ReclaimGrant):
            raise errors.InvalidInput("grant: not a reclaim grant")
        if (execution_id, lane_id) != (grant.execution_id, grant.lane_id):
            raise errors.InvalidInput("grant: for another execution or lane")
        if grant.expires_at_ms <= await self._engine.runtime.store.ping():
            raise errors.InvalidInput("grant: its time is over")
        return await self._with_slot(lambda: self._reclaim(grant, max_reclaim_count))

    def finished(self, handle: Handle) -> None:
        """Free the slot of a task that has ended."""
        self._lease_ids.discard(handle.fields.lease_id)

    async def _with_slot(self, redeem: Callable[[], Awaitable[T]]) -> T:
        if len(self._lease_ids) + self._redeeming >= self._max_tasks:
            raise errors.WorkerAtCapacity(POOL, self._max_tasks)
        self._redeeming += 1
        try:
            answer = await redeem()
        finally:
            self._redeeming -= 1
        if isinstance(answer, Claimed):
            self._lease_ids.add(answer.lease_id)
        return answer

    async def _claim(self, grant: ClaimGrant) -> Claimed:
        try:
            return await self._engine.claim_execution(
                grant.execution_id,
                worker_id=self._worker_id,
                worker_instance_id=self._instance_id,
                lane_id=grant.lane_id,
                lease_ttl_ms=self._lease_ttl_ms,
                grant_key=grant.grant_key,
            )
        except errors.UseClaimResumedExecution:
            return await self._resume(grant)

    async def _resume(self, grant: ClaimGrant) -> Claimed:
        return await self._engine.claim_resumed_execution(
            grant.execution_id,
            worker_id=self._worker_id,
            worker_instance_id=self._instance_id,
            lane_id=grant.lane_id,
            lease_ttl_ms=self._lease_ttl_ms,
            grant_key=grant.grant_key,
        )

    async def _reclaim(
        self, grant: ReclaimGrant, max_reclaim_count: int | None = None
    ) -> Claimed | NotReclaimable | ReclaimCapExceeded | GrantNotFound:
        return await self._engine.reclaim_execution(
            grant.execution_id,
            worker_id=self._worker_id,
            worker_instance_id=self._instance_id,
            lane_id=grant.lane_id,
            lease_ttl_ms=self._lease_ttl_ms,
            max_reclaim_count=max_reclaim_count,
            grant_key=grant.grant_key,
        )


def _claim_grant(grant: object) -> ClaimGrant:
    if not isinstance(grant, ClaimGrant):
        raise errors.InvalidInput("grant: not a claim grant")
    return grant
