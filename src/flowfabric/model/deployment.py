"""What is true of a whole deployment, whoever opens its store."""

from __future__ import annotations

import msgspec


class Deployment(msgspec.Struct, frozen=True):
    """The one row of its kind: how many partitions ids were and will be minted for."""

    deployment_id: int
    num_flow_partitions: int
    num_budget_partitions: int
    num_quota_partitions: int
    revision: int = 0


class SnapshotHolder(msgspec.Struct, frozen=True, gc=False):
    """Somebody whose old snapshot keeps the store from removing dead rows: claims read over more of them each time."""

    kind: str  # transaction, prepared transaction, replication slot
    name: str
    application: str | None
    database: str | None
    state: str | None
    age_s: int | None
    transactions: int  # that began since
