"""claims: split from flowfabric.stores.base."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.model.execution import Execution, Payload, QueueKey


class LeaseIds(msgspec.Struct, frozen=True, gc=False):
    """The identities that the n-th taken row gets."""

    lease_id: str
    attempt_id: str
    revision: int


class ClaimRequest(msgspec.Struct, frozen=True, gc=False):
    """A uniform claim of the first rows of some lines: the batched form of `rules.lease.acquire`.

    `becomes` are the fields that every taken row gets alike, decided by that rule. The rest is the arithmetic of any
    claim, for the n-th row with the n-th stamp and the store's `now`:

    * lease: `lease_id`, `worker_id`, `worker_instance_id` as given, `lease_epoch` + 1,
      `lease_acquired_at` = `lease_renewed_at` = now, `lease_expires_at` = now + ttl, `current_lane` = `lane_id`;
    * a row with a `next_type` begins an attempt: `attempt_id` of the stamp, `attempt_type` = `next_type`,
      `attempt_index` = `total_attempt_count`, which then grows by 1, `attempt_started_at` = now,
      `attempt_resumed_at` unset; one without continues its attempt: only `attempt_resumed_at` = now;
    * `started_at` = now unless set; `attempt_timeout_at` = now + `next_timeout_ms`, unset without one;
    * `last_transition_at` = `last_mutation_at` = now; `revision` of the stamp.

    Each row adds an event: lease `acquired`, the new lease and attempt, `reason` = `claim_resumed` when it continues.
    """

    queues: tuple[QueueKey, ...]
    lease_ids: tuple[LeaseIds, ...]
    worker_id: str
    worker_instance_id: str
    lease_ttl_ms: int
    shared_fields: dict[str, Any]

    def fields_for(self, row: Execution, stamp: LeaseIds, now: int) -> dict[str, Any]:
        """What the claim makes of this row: the arithmetic above, for stores that have no native telling of it."""
        fields = {
            **self.shared_fields,
            "lease_id": stamp.lease_id,
            "worker_id": self.worker_id,
            "worker_instance_id": self.worker_instance_id,
            "lease_epoch": row.lease_epoch + 1,
            "lease_acquired_at": now,
            "lease_renewed_at": now,
            "lease_expires_at": now + self.lease_ttl_ms,
            "current_lane": row.lane_id,
            "attempt_timeout_at": None if row.next_timeout_ms is None else now + row.next_timeout_ms,
            "last_transition_at": now,
            "last_mutation_at": now,
            "revision": stamp.revision,
        }
        if row.next_type is None:
            fields["attempt_resumed_at"] = now
        else:
            fields["attempt_id"] = stamp.attempt_id
            fields["attempt_type"] = row.next_type
            fields["attempt_index"] = row.total_attempt_count
            fields["total_attempt_count"] = row.total_attempt_count + 1
            fields["attempt_started_at"] = now
            fields["attempt_resumed_at"] = None
        if row.started_at is None:
            fields["started_at"] = now
        return fields


class ClaimedRows(msgspec.Struct, frozen=True, gc=False):
    """The rows as they are now, in rank order, each with its payload."""

    now: int
    rows: list[tuple[Execution, Payload]]


class CommitAndClaimResult(msgspec.Struct, frozen=True, gc=False):
    """What a commit that hands over came to: its verdicts, and the rows that were claimed, as a take has them.

    `emptied` says that a take right after it would find nothing more.
    """

    verdicts: list[int | None]
    rows: list[tuple[Execution, Payload]]
    drained: bool = False


class LeaseRef(msgspec.Struct, frozen=True, gc=False):
    """A lease to renew."""

    execution_id: str
    attempt_index: int
    attempt_id: str
    lease_id: str
    lease_epoch: int
    lease_ttl_ms: int
