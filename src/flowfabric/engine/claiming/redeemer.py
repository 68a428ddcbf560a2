"""Redeeming: a worker that is offered work by grants, and takes no more of it than it has room for.

SDK workers claim directly and need none of this. It is for workers that a scheduler sends grants to: the place is taken
before the grant is used up, so a worker that is full leaves the grant as good as it was. The key that was issued with a
grant is checked when it is redeemed.
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
    """One worker's grants, turned into leases: never more of them at a time than it may run."""

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
        self._most = validation.integer("max_concurrent_tasks", max_concurrent_tasks, least=1)
        self._asking = 0
        self._held: set[str] = set()  # leases: one that was lost, and the one that took over, are two tasks

    async def claim_from_grant(
        self, grant: ClaimGrant | ReclaimGrant
    ) -> Claimed | NotReclaimable | ReclaimCapExceeded | GrantNotFound:
        """Redeem a grant of any kind: begin an attempt, go on with an interrupted one, or take over a lost one."""
        if isinstance(grant, ReclaimGrant):
            return await self._redeemed(lambda: self._reclaim(grant))
        return await self._redeemed(lambda: self._claim(_claim_grant(grant)))

    async def claim_from_resume_grant(self, grant: ClaimGrant) -> Handle:
        """Redeem a grant for an interrupted attempt."""
        claimed = await self._redeemed(lambda: self._resume(_claim_grant(grant)))
        return claimed.handle

    async def claim_from_reclaim_grant(
        self, grant: ReclaimGrant, *, execution_id: str, lane_id: str, max_reclaim_count: int | None = None
    ) -> Claimed | NotReclaimable | ReclaimCapExceeded | GrantNotFound:
        """Redeem a reclaim grant for the execution it is for; another one, or too late, is refused before anything."""
        if not isinstance(grant, ReclaimGrant):
            raise errors.InvalidInput("grant: not a reclaim grant")
        if (execution_id, lane_id) != (grant.execution_id, grant.lane_id):
            raise errors.InvalidInput("grant: for another execution or lane")
        if grant.expires_at_ms <= await self._engine.runtime.store.ping():
            raise errors.InvalidInput("grant: its time is over")
        return await self._redeemed(lambda: self._reclaim(grant, max_reclaim_count))

    def finished(self, handle: Handle) -> None:
        """The task of this handle has ended, one way or another: there is room for the next."""
        self._held.discard(handle.fields.lease_id)

    async def _redeemed(self, redeem: Callable[[], Awaitable[T]]) -> T:
        if len(self._held) + self._asking >= self._most:
            raise errors.WorkerAtCapacity(POOL, self._most)
        self._asking += 1
        try:
            answer = await redeem()
        finally:
            self._asking -= 1
        if isinstance(answer, Claimed):
            self._held.add(answer.lease_id)
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
