"""Claims of the store port: what a claim or a renewal asks for, and what a claim returns."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.model.change import RowTemplate
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.stores.verdicts import Verdict


class LeaseIds(msgspec.Struct, frozen=True, gc=False):
    """The new identifiers for one claimed row."""

    lease_id: str
    attempt_id: str
    revision: int


class ClaimRequest(msgspec.Struct, frozen=True, gc=False):
    """A claim of the first rows of some fast queues: each gets what the template writes, and emits its event.

    The parameters of the template are the fields of the n-th `LeaseIds` for the n-th row, and `worker_id`,
    `worker_instance_id` and `lease_ttl_ms` for all rows.
    """

    queues: tuple[QueueKey, ...]
    lease_ids: tuple[LeaseIds, ...]
    worker_id: str
    worker_instance_id: str
    lease_ttl_ms: int
    template: RowTemplate

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the parameters for all rows."""
        return {name: getattr(self, name) for name in SHARED_PARAMETERS}


SHARED_PARAMETERS = ("worker_id", "worker_instance_id", "lease_ttl_ms")
ROW_PARAMETERS = LeaseIds.__struct_fields__


class ClaimedRows(msgspec.Struct, frozen=True, gc=False):
    """The claimed rows after the claim, by position, each with its payload.

    `has_locked` says that there was work, but concurrent transactions had locked all of it. Some of it may be claimable
    when they end, without a wakeup.
    """

    now: int
    rows: list[tuple[Execution, Payload]]
    has_locked: bool = False


class CommitAndClaimResult(msgspec.Struct, frozen=True, gc=False):
    """The verdicts of a commit, and the rows that it claimed.

    `drained` says that a claim right after it would find no more rows.
    """

    verdicts: list[Verdict]
    rows: list[tuple[Execution, Payload]]
    drained: bool = False


class LeaseRef(msgspec.Struct, frozen=True, gc=False):
    """A lease to renew; its fields are the parameters of the renewal's template."""

    execution_id: str
    attempt_index: int
    attempt_id: str
    lease_id: str
    lease_epoch: int
    lease_ttl_ms: int
