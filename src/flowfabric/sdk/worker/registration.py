"""A worker's entry in the registry, which makes it visible, and says which capabilities are served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.errors import FabricError, SchemaTooNew
from flowfabric.model.scheduling.worker import STOPPED, NotRegistered, ServedTask

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.sdk.task import Task

logger = logging.getLogger("flowfabric.worker")


MAX_SCHEMAS_BYTES = 200_000  # of all tasks; those that do not fit are reported without a schema
MAX_TASKS = 1000


def served_tasks(tasks: Iterable[Task[..., Any]], lanes: Collection[str]) -> list[ServedTask]:
    """Describe the tasks of these lanes for forms and lists, by name."""
    served: list[ServedTask] = []
    left = MAX_SCHEMAS_BYTES
    for task in sorted(tasks, key=lambda task: task.name)[:MAX_TASKS]:
        lane = task.default_options.lane
        if lane not in lanes:
            continue
        schemas = _schema(task.signature.input_schema), _schema(task.signature.result_codec.schema)
        size = sum(len(text.encode()) for text in schemas if text is not None)
        described = schemas if size <= left else (None, None)
        left -= size if size <= left else 0
        served.append(ServedTask(name=task.name, lane=lane, input_schema=described[0], result_schema=described[1]))
    return served


def _schema(make: Callable[[], str | None]) -> str | None:
    """Return a schema, or None if it cannot be made: a worker runs tasks whose types have no schema."""
    try:
        return make()
    except Exception as error:
        logger.debug("no schema: %s", error)
        return None


class WorkerRegistrar(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps a worker in the registry. Its entry expires if it is not refreshed for `ttl_ms`."""

    namespace: str
    worker_id: str
    instance_id: str
    lanes: Sequence[str]
    capabilities: Sequence[str]
    ttl_ms: int
    tasks: Sequence[ServedTask] = ()

    async def register(self, engine: EngineAPI) -> None:
        """Register the worker, which unblocks executions that need its capabilities."""
        await engine.register_worker(
            namespace=self.namespace,
            worker_instance_id=self.instance_id,
            worker_id=self.worker_id,
            lanes=self.lanes,
            capabilities=self.capabilities,
            liveness_ttl_ms=self.ttl_ms,
            tasks=self.tasks,
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
