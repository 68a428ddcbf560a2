"""Rows that exist once per deployment: its partition counts and the leases of its background sweeps."""

from __future__ import annotations

from typing import Generic

import msgspec

from flowfabric.model.instant import Instant


class Deployment(msgspec.Struct, frozen=True):
    """The single row with the partition counts, which are part of every id and never change."""

    deployment_id: int
    num_flow_partitions: int
    num_budget_partitions: int
    num_quota_partitions: int
    revision: int = 0


class SweepLease(msgspec.Struct, Generic[Instant], frozen=True):
    """One sweep, held by one process for a short while; afterwards any process may take it over."""

    sweep: str
    holder: str
    lease_until: Instant
    revision: int = 0


class SnapshotHolder(msgspec.Struct, frozen=True, gc=False):
    """A session whose old snapshot keeps the store from removing dead rows, which makes claims ever slower."""

    kind: str  # transaction, prepared transaction, replication slot
    name: str
    application: str | None
    database: str | None
    state: str | None
    age_s: int | None
    transactions: int  # transactions that began since


class NodeLoad(msgspec.Struct, frozen=True):
    """A server of the store: the share of a core that its commands use, and the flow partitions that it holds."""

    address: str
    cpu: float
    partitions: tuple[int, ...]


class LaneNearCeiling(msgspec.Struct, frozen=True):
    """A lane that has most of the work of a server which is nearly busy."""

    lane_id: str
    spread: int
    share: float  # which part of the unfinished executions is on that server
    address: str
    cpu: float


class ServerReport(msgspec.Struct, frozen=True):
    """What acknowledged writes survive, what an operator should change, one sentence each, and how busy servers are."""

    durability: str
    warnings: list[str]
    nodes: list[NodeLoad] = []
