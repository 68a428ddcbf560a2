"""The row of an execution that is worked on."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from flowfabric.model.execution import Execution
from flowfabric.model.states import (
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)

NOW = 1_700_000_000_000
EXECUTION = "{fp:86}:11111111-1111-4111-8111-111111111111"


def running(**fields: Any) -> Execution:
    """Return an execution in the middle of its second attempt."""
    row = Execution(
        execution_id=EXECUTION,
        partition=86,
        namespace="n",
        lane_id="default",
        priority=0,
        created_at=NOW - 1000,
        last_transition_at=NOW - 10,
        last_mutation_at=NOW - 10,
        lifecycle_phase=LifecyclePhase.ACTIVE,
        ownership_state=OwnershipState.LEASED,
        eligibility_state=EligibilityState.NOT_APPLICABLE,
        blocking_reason=BlockingReason.NONE,
        terminal_outcome=TerminalOutcome.NONE,
        attempt_state=AttemptState.RUNNING_ATTEMPT,
        public_state=PublicState.ACTIVE,
        total_attempt_count=2,
        started_at=NOW - 500,
        attempt_index=1,
        attempt_id="attempt-1",
        attempt_type=AttemptType.RETRY,
        attempt_started_at=NOW - 10,
        lease_epoch=3,
        lease_id="lease-1",
        worker_id="w",
        worker_instance_id="w-1",
        current_lane="default",
        lease_expires_at=NOW + 1000,
        revision=7,
    )
    return replace(row, **fields)
