"""Claims of the store port: what a claim or a renewal asks for, what a claim writes to a row, and what it returns."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.model.execution import Execution, Payload, QueueKey


class LeaseIds(msgspec.Struct, frozen=True, gc=False):
    """The new identifiers for one claimed row."""

    lease_id: str
    attempt_id: str
    revision: int


class ClaimRequest(msgspec.Struct, frozen=True, gc=False):
    """A claim of the first rows of some fast queues: the batched form of `rules.execution.lease.acquire`.

    `shared_fields` are the fields that every claimed row gets alike, as that rule decided. The rest is the arithmetic
    of every claim. The n-th row gets the n-th `LeaseIds`; `now` is the store's time.

    * Lease: `lease_id`, `worker_id` and `worker_instance_id` as given, `lease_epoch` + 1,
      `lease_acquired_at` = `lease_renewed_at` = now, `lease_expires_at` = now + ttl, `current_lane` = `lane_id`.
    * A row with a `next_type` starts an attempt: the new `attempt_id`, `attempt_type` = `next_type`,
      `attempt_index` = `total_attempt_count`, which then grows by 1, `attempt_started_at` = now,
      `attempt_resumed_at` = null. A row without one continues its attempt: only `attempt_resumed_at` = now.
    * `started_at` = now unless set; `attempt_timeout_at` = now + `next_timeout_ms`, null without one.
    * `last_transition_at` = `last_mutation_at` = now; the new `revision`.

    Each row emits one `acquired` event with the new lease and attempt; its `reason` is `claim_resumed` if the attempt
    continues.
    """

    queues: tuple[QueueKey, ...]
    lease_ids: tuple[LeaseIds, ...]
    worker_id: str
    worker_instance_id: str
    lease_ttl_ms: int
    shared_fields: dict[str, Any]

    def fields_for(self, row: Execution, ids: LeaseIds, now: int) -> dict[str, Any]:
        """Return the fields that the claim sets on this row, for stores that do not compute them natively."""
        fields = {
            **self.shared_fields,
            "lease_id": ids.lease_id,
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
            "revision": ids.revision,
        }
        if row.next_type is None:
            fields["attempt_resumed_at"] = now
        else:
            fields["attempt_id"] = ids.attempt_id
            fields["attempt_type"] = row.next_type
            fields["attempt_index"] = row.total_attempt_count
            fields["total_attempt_count"] = row.total_attempt_count + 1
            fields["attempt_started_at"] = now
            fields["attempt_resumed_at"] = None
        if row.started_at is None:
            fields["started_at"] = now
        return fields


class ClaimedRows(msgspec.Struct, frozen=True, gc=False):
    """The claimed rows after the claim, by position, each with its payload."""

    now: int
    rows: list[tuple[Execution, Payload]]


class CommitAndClaimResult(msgspec.Struct, frozen=True, gc=False):
    """The verdicts of a commit, and the rows that it claimed.

    `drained` says that a claim right after it would find no more rows.
    """

    verdicts: list[int | None]
    rows: list[tuple[Execution, Payload]]
    drained: bool = False


class LeaseRef(msgspec.Struct, frozen=True, gc=False):
    """A lease to renew, identified by all its fields."""

    execution_id: str
    attempt_index: int
    attempt_id: str
    lease_id: str
    lease_epoch: int
    lease_ttl_ms: int
