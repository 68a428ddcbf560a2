"""What is true of a whole deployment."""

from __future__ import annotations

from flowfabric.engine.operations.base import Operations
from flowfabric.engine.runtime.after_commit import first
from flowfabric.model.deployment import Deployment
from flowfabric.rules import deployment
from flowfabric.stores.queries import Read


class DeploymentOperations(Operations):
    """The deployment that this engine belongs to."""

    async def ensure_partitions(self) -> None:
        """See that this engine counts partitions as everybody else; `PartitionMismatch` otherwise."""
        await self.runtime.decide_and_commit(
            (Read(Deployment, (deployment.DEPLOYMENT_ID,)),),
            lambda rows, _: deployment.ensure_partitions(first(rows[0]), self.runtime.partitions),
        )
