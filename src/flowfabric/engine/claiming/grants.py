"""Signed grants: an execution that is reserved for one worker until it is redeemed or expires."""

from __future__ import annotations

from typing import Any

from flowfabric import ids
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution
from flowfabric.model.states import AttemptState
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import grant as grant_rules
from flowfabric.rules.execution import reclaim
from flowfabric.rules.execution.grant import GrantRequest
from flowfabric.rules.security import grant_key as grant_keys


class GrantKeySigner:
    """Signs the grant that a rule decides on, and keeps the key for the answer."""

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
        """Return the fields of the signed grant for the answer."""
        execution = ids.ExecutionId(row.execution_id)
        return execution, partition_key(execution), self.grant_key, self.expires_at, order.lane_id


def sign_claim_grant(row: Execution | None, order: GrantRequest, key: Any, now: int) -> Decision[answers.ClaimGrant]:
    """Grant ready work, with a key for its receiver.

    A decision that is made again signs a new key, and either may be committed, so the answer has the key of its own
    decision.
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
    """Grant work that lost its lease, with a key for its receiver."""
    signer = GrantKeySigner(key, reclaim=True)
    decision: Decision[Any] = reclaim.issue_reclaim_grant(row, order, now, signer)
    if row is None or not isinstance(decision.answer, answers.Granted):
        return decision
    return Decision(answers.ReclaimGrant(*signer.grant_fields(row, order)), decision.change)


def partition_key(execution_id: ids.ExecutionId) -> str:
    return f"{{fp:{ids.partition_of(execution_id)}}}"
