"""A worker's entry in the registry, which makes it visible, and tells the engine which capabilities are served."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from flowfabric.engine_api import EngineAPI
from flowfabric.errors import FabricError, SchemaTooNew
from flowfabric.model.worker import STOPPED, NotRegistered

logger = logging.getLogger("flowfabric.worker")


class WorkerRegistrar(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps a worker in the registry. Its entry expires if it is not refreshed for `ttl_ms`."""

    namespace: str
    worker_id: str
    instance_id: str
    lanes: Sequence[str]
    capabilities: Sequence[str]
    ttl_ms: int

    async def register(self, engine: EngineAPI) -> None:
        """Register the worker, which unblocks executions that need its capabilities."""
        await engine.register_worker(
            namespace=self.namespace,
            worker_instance_id=self.instance_id,
            worker_id=self.worker_id,
            lanes=self.lanes,
            capabilities=self.capabilities,
            liveness_ttl_ms=self.ttl_ms,
        )

    async def refresh(self, engine: EngineAPI) -> None:
        """Refresh the entry, or register again if it has expired. A failure is logged; the next refresh follows."""
        try:
            answer = await engine.heartbeat_worker(namespace=self.namespace, worker_instance_id=self.instance_id)
            if isinstance(answer, NotRegistered):
                await self.register(engine)
        except SchemaTooNew:
            raise
        except FabricError as error:
            logger.warning("the worker's registration was not refreshed: %s", error)

    async def deregister(self, engine: EngineAPI) -> None:
        """Remove the entry; if that fails it expires by itself."""
        try:
            await engine.mark_worker_dead(namespace=self.namespace, worker_instance_id=self.instance_id, reason=STOPPED)
        except FabricError as error:
            logger.info("the worker could not be deregistered: %s", error)
