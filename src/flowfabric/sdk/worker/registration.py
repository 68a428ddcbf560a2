"""Presence: a worker's entry in the registry, so that people see it and work that needs it is not called hopeless."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from flowfabric.engine_api import EngineAPI
from flowfabric.errors import FabricError, SchemaTooNew
from flowfabric.model.worker import STOPPED, NotRegistered

logger = logging.getLogger("flowfabric.worker")


class WorkerRegistrar(msgspec.Struct, frozen=True, kw_only=True):
    """Who a worker is and what it offers; the entry lapses when nothing is heard of it for `ttl_ms`."""

    namespace: str
    worker_id: str
    instance_id: str
    lanes: Sequence[str]
    capabilities: Sequence[str]
    ttl_ms: int

    async def register(self, engine: EngineAPI) -> None:
        """Enter the registry; work that waited for these capabilities can be claimed from now on."""
        await engine.register_worker(
            namespace=self.namespace,
            worker_instance_id=self.instance_id,
            worker_id=self.worker_id,
            lanes=self.lanes,
            capabilities=self.capabilities,
            liveness_ttl_ms=self.ttl_ms,
        )

    async def refresh(self, engine: EngineAPI) -> None:
        """Stay in it; an entry that lapsed meanwhile is made anew. A store that is away is asked again next time."""
        try:
            heard = await engine.heartbeat_worker(namespace=self.namespace, worker_instance_id=self.instance_id)
            if isinstance(heard, NotRegistered):
                await self.register(engine)
        except SchemaTooNew:
            raise
        except FabricError as refused:
            logger.warning("the registry did not hear of this worker: %s", refused)

    async def deregister(self, engine: EngineAPI) -> None:
        """Leave the registry; one that cannot be told finds out when the entry lapses."""
        try:
            await engine.mark_worker_dead(namespace=self.namespace, worker_instance_id=self.instance_id, reason=STOPPED)
        except FabricError as refused:
            logger.info("the registry could not be told of the end: %s", refused)
