"""Grants: work offered to one worker, and claims that redeem such an offer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flowfabric import errors, ids
from flowfabric.engine.claiming.namespace_filter import NamespaceClaimer
from flowfabric.engine.operations.signing_keys import SIGNING_KEYS, SigningKeyOperations
from flowfabric.engine.validation import execution as validate
from flowfabric.handles import Handle, HandleKind
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution
from flowfabric.model.states import AttemptState, BlockingReason, LifecyclePhase
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import claim, reclaim
from flowfabric.rules.execution import grant as grant_rules
from flowfabric.rules.execution.grant import GrantRequest
from flowfabric.rules.execution.lease import AcquiredLease
from flowfabric.rules.security import grant_key as grant_keys
from flowfabric.stores.queries import Read, Scan, Where

OPERATOR = "operator"


class GrantOperations(NamespaceClaimer, SigningKeyOperations):
    """Grants, and the claims that redeem them."""

    # -- grants ---------------------------------------------------------------------------------------------------

    async def issue_claim_grant(
        self,
        execution_id: str,
        *,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
    ) -> answers.Granted:
        """Offer one claimable execution to one worker."""
        execution = validate.validate_execution_id(execution_id)
        order = validate.build_grant_request(
            lane_id,
            worker_id,
            worker_instance_id,
            worker_capabilities,
            grant_ttl_ms,
            capability_hash,
            route_snapshot_json,
            admission_summary,
        )
        return await self.runtime.decide_execution(
            execution, lambda row, now: grant_rules.issue_claim_grant(row, order, now)
        )

    async def issue_reclaim_grant(
        self,
        execution_id: str,
        *,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
    ) -> answers.ReclaimGrant | answers.NotReclaimable | answers.ReclaimCapExceeded:
        """Offer work whose lease is gone to one worker; a lapse that nobody noticed yet is marked first.

        Without a key to sign it, what would be granted is `Unavailable`.
        """
        execution = validate.validate_execution_id(execution_id)
        order = validate.build_grant_request(
            lane_id,
            worker_id,
            worker_instance_id,
            worker_capabilities,
            grant_ttl_ms,
            capability_hash,
            route_snapshot_json,
            admission_summary,
        )
        key = await self.find_signing_key("issue_reclaim_grant")
        await self.mark_lease_expired_if_due(execution)

        def decide(
            row: Execution | None, now: int
        ) -> Decision[answers.ReclaimGrant | answers.NotReclaimable | answers.ReclaimCapExceeded]:
            if not isinstance(key, errors.FabricError):
                return sign_reclaim_grant(row, order, key, now)
            unsigned: Decision[Any] = reclaim.issue_reclaim_grant(row, order, now)
            return refuse(key) if isinstance(unsigned.answer, answers.Granted) else unsigned

        return await self.runtime.decide_execution(execution, decide)

    async def verify_grant(self, execution_id: str, grant_key: str) -> grant_keys.GrantFault | None:
        """What is wrong with a key for the grant in this execution's slot; None when it is good."""
        execution = validate.validate_execution_id(execution_id)
        key = validation.text("grant_key", grant_key)
        loaded = await self.runtime.load((Read(Execution, (execution,)), SIGNING_KEYS))
        grant = grant_rules.stored_grant(loaded.rows[0][0]) if loaded.rows[0] else None
        return grant_keys.verify_grant(key, grant, self.unseal_loaded_keys(loaded.rows[1]), loaded.now)

    # -- claims by grant ------------------------------------------------------------------------------------------

    async def claim_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str = "",
        lease_id: str | None = None,
        attempt_id: str | None = None,
        lease_ttl_ms: int = 15_000,
        attempt_timeout_ms: int | None = None,
        execution_deadline_at: int | None = None,
        grant_key: str | None = None,
    ) -> answers.Claimed:
        """Redeem a claim grant by beginning a new attempt; a `grant_key` has to be the one that was issued with it."""
        execution = validate.validate_execution_id(execution_id)
        holder = validate.build_holder(
            worker_id, worker_instance_id, lane_id, lease_id, attempt_id, lease_ttl_ms, self.runtime.minter
        )
        timeout = validate.optional_duration("attempt_timeout_ms", attempt_timeout_ms)
        deadline = validate.optional_instant("execution_deadline_at", execution_deadline_at)
        proof = await self._proof(grant_key)
        return await self._redeem(
            execution,
            HandleKind.FRESH,
            lambda row, now: claim.claim_execution(
                row, holder, now, attempt_timeout_ms=timeout, execution_deadline_at=deadline, proof=proof
            ),
        )

    async def claim_resumed_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str = "",
        lease_id: str | None = None,
        lease_ttl_ms: int = 15_000,
        remaining_attempt_timeout_ms: int | None = None,
        grant_key: str | None = None,
    ) -> answers.Claimed:
        """Redeem a grant by going on with the interrupted attempt; the key is checked as by `claim_execution`."""
        execution = validate.validate_execution_id(execution_id)
        holder = validate.build_holder(
            worker_id, worker_instance_id, lane_id, lease_id, None, lease_ttl_ms, self.runtime.minter
        )
        remaining = validate.optional_duration("remaining_attempt_timeout_ms", remaining_attempt_timeout_ms)
        proof = await self._proof(grant_key)
        return await self._redeem(
            execution,
            HandleKind.RESUMED,
            lambda row, now: claim.claim_resumed_execution(
                row, holder, now, remaining_attempt_timeout_ms=remaining, proof=proof
            ),
        )

    async def claim_from_resume_grant(
        self,
        grant: answers.ClaimGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int = 15_000,
    ) -> Handle:
        """The handle-level form of the resumed claim."""
        if not isinstance(grant, answers.ClaimGrant):
            raise errors.InvalidInput("grant: not a claim grant")
        claimed = await self.claim_resumed_execution(
            grant.execution_id,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lane_id=grant.lane_id,
            lease_ttl_ms=lease_ttl_ms,
            grant_key=grant.grant_key,
        )
        return claimed.handle

    async def issue_grant_and_claim(
        self, execution_id: str, *, lane_id: str, lease_duration_ms: int
    ) -> answers.OperatorClaim:
        """The operator takes one execution in hand; capabilities, budgets and quotas are not asked."""
        execution = validate.validate_execution_id(execution_id)
        holder = validate.build_holder(OPERATOR, OPERATOR, lane_id, None, None, lease_duration_ms, self.runtime.minter)
        answer = await self.runtime.decide_execution(
            execution, lambda row, now: claim.issue_grant_and_claim(row, holder, now)
        )
        self.runtime.track_lease_expiry(holder.lane_id, answer.lease_expires_at)
        return answers.OperatorClaim(answer.lease_id, answer.lease_epoch, answer.attempt_index)

    async def reclaim_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str = "",
        lease_id: str | None = None,
        attempt_id: str | None = None,
        lease_ttl_ms: int = 15_000,
        max_reclaim_count: int | None = None,
        grant_key: str | None = None,
    ) -> answers.Claimed | answers.NotReclaimable | answers.ReclaimCapExceeded | answers.GrantNotFound:
        """Redeem a reclaim grant; at the cap the execution ends as failed. A key is checked as by `claim_execution`."""
        execution = validate.validate_execution_id(execution_id)
        holder = validate.build_holder(
            worker_id, worker_instance_id, lane_id, lease_id, attempt_id, lease_ttl_ms, self.runtime.minter
        )
        asked = (
            None if max_reclaim_count is None else validation.integer("max_reclaim_count", max_reclaim_count, least=0)
        )
        proof = await self._proof(grant_key)
        answer = await self.runtime.decide_execution(
            execution, lambda row, now: reclaim.reclaim_execution(row, holder, asked, now, proof)
        )
        return self._claimed_by_rule(answer, HandleKind.RECLAIMED) if isinstance(answer, AcquiredLease) else answer

    async def scan_eligible_executions(self, lane_id: str, partition: int, limit: int) -> list[str]:
        """The ids of claimable executions of a lane and partition in claim order; changes nothing."""
        lane = validate.validate_lane_id(lane_id)
        place = validate.validate_flow_partition(partition, self.runtime.partitions)
        most = validation.integer("limit", limit, least=0, most=10_000)
        rows: list[Execution] = []
        for line in await self.runtime.retry_while_unavailable(lambda: self.runtime.store.queues(lane)):
            if most:
                where = (
                    Where("line", "=", line),
                    Where("partition", "=", place),
                    Where("lifecycle_phase", "=", LifecyclePhase.RUNNABLE),
                    Where("blocking_reason", "=", BlockingReason.WAITING_FOR_WORKER),
                )
                rows += await self.runtime.scan(Scan(Execution, where, ("rank", "execution_id"), limit=most))
        rows.sort(key=lambda row: (row.rank, row.execution_id))
        return [row.execution_id for row in rows[:most]]

    async def _proof(self, grant_key: str | None) -> grant_keys.GrantProof | None:
        """A shown grant key with the keys that check it; they are of another partition than the grant."""
        shown = validation.optional_text("grant_key", grant_key)
        if shown is None:
            return None
        loaded = await self.runtime.load((SIGNING_KEYS,))
        return grant_keys.GrantProof(shown, self.unseal_loaded_keys(loaded.rows[0]))

    async def _redeem(self, execution_id: str, kind: HandleKind, decide: Any) -> answers.Claimed:
        return self._claimed_by_rule(await self.runtime.decide_execution(execution_id, decide), kind)


def sign_claim_grant(row: Execution | None, order: GrantRequest, key: Any, now: int) -> Decision[answers.ClaimGrant]:
    """Offer work that waits, with a key for the one who gets it.

    The answer holds the key of this very decision: one that is made again signs anew, and either may be written.
    """
    signer = GrantKeySigner(key, reclaim=False)
    decision: Decision[Any] = grant_rules.issue_claim_grant(row, order, now, signer, include_route_blocked=True)
    if row is None or not isinstance(decision.answer, answers.Granted):
        return decision
    resumes = row.attempt_state is AttemptState.ATTEMPT_INTERRUPTED
    return Decision(answers.ClaimGrant(*signer.grant_fields(row, order), resumes), decision.change)


def sign_reclaim_grant(
    row: Execution | None, order: GrantRequest, key: Any, now: int
) -> Decision[answers.ReclaimGrant | answers.NotReclaimable | answers.ReclaimCapExceeded]:
    """The same for work whose lease is gone."""
    signer = GrantKeySigner(key, reclaim=True)
    decision: Decision[Any] = reclaim.issue_reclaim_grant(row, order, now, signer)
    if row is None or not isinstance(decision.answer, answers.Granted):
        return decision
    return Decision(answers.ReclaimGrant(*signer.grant_fields(row, order)), decision.change)


class GrantKeySigner:
    """Signs the grant that a rule decides on, and keeps the key for its receiver."""

    def __init__(self, key: Any, *, reclaim: bool) -> None:
        self._key = key
        self._reclaim = reclaim
        self.grant_key = ""
        self.expires_at = 0

    def __call__(self, row: Execution, order: GrantRequest, expires_at: int) -> str:
        self.expires_at = expires_at
        self.grant_key = grant_keys.sign_grant(
            self._key,
            row.execution_id,  # type: ignore[arg-type]
            worker_id=order.worker_id,
            worker_instance_id=order.worker_instance_id,
            expires_at=expires_at,
            reclaim=self._reclaim,
        )
        return grant_keys.grant_id(self.grant_key)

    def grant_fields(self, row: Execution, order: GrantRequest) -> tuple[str, str, str, int, str]:
        """What a grant that was signed here tells its receiver."""
        execution = ids.ExecutionId(row.execution_id)
        return execution, partition_key(execution), self.grant_key, self.expires_at, order.lane_id


def partition_key(execution_id: ids.ExecutionId) -> str:
    return f"{{fp:{ids.partition_of(execution_id)}}}"
