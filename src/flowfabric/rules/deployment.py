"""Partition counts: stored by the first process of a deployment and fixed from then on, because ids contain them."""

from __future__ import annotations

from flowfabric import errors
from flowfabric.ids import PartitionCounts
from flowfabric.model.change import Change, Insert, absent
from flowfabric.model.deployment import Deployment
from flowfabric.rules.decision import Decision, refuse

DEPLOYMENT_ID = 0


def ensure_partitions(row: Deployment | None, counts: PartitionCounts) -> Decision[None]:
    """Accept the stored counts, store them if there are none, and refuse others by name."""
    configured = Deployment(DEPLOYMENT_ID, counts.flow, counts.budget, counts.quota)
    if row is None:
        return Decision(None, Change((absent(Deployment, DEPLOYMENT_ID),), (Insert(configured),)))
    for name in ("num_flow_partitions", "num_budget_partitions", "num_quota_partitions"):
        stored, value = getattr(row, name), getattr(configured, name)
        if stored != value:
            return refuse(
                errors.PartitionMismatch(
                    "open", f"{name}: stored={stored}, config={value}", stored=stored, config=value
                )
            )
    return Decision(None)
