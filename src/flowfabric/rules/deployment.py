"""Partition counts: written by whoever comes first, and binding from then on, since ids remember their partition."""

from __future__ import annotations

from flowfabric import errors
from flowfabric.ids import PartitionCounts
from flowfabric.model.change import Change, Insert, absent
from flowfabric.model.deployment import Deployment
from flowfabric.rules.decision import Decision, refuse

DEPLOYMENT_ID = 0


def ensure_partitions(row: Deployment | None, counts: PartitionCounts) -> Decision[None]:
    """Accept the counts that are stored, store them when there are none, and refuse others by their name."""
    wanted = Deployment(DEPLOYMENT_ID, counts.flow, counts.budget, counts.quota)
    if row is None:
        return Decision(None, Change((absent(Deployment, DEPLOYMENT_ID),), (Insert(wanted),)))
    for name in ("num_flow_partitions", "num_budget_partitions", "num_quota_partitions"):
        stored, config = getattr(row, name), getattr(wanted, name)
        if stored != config:
            return refuse(
                errors.PartitionMismatch(
                    "open", f"{name}: stored={stored}, config={config}", stored=stored, config=config
                )
            )
    return Decision(None)
