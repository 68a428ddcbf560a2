"""Releases runs that wait for other code, once for each version that a worker brings.

A run that this version has held before is not released, so a restart alone releases nothing. A worker releases at most
ten runs a second, so that a bad deploy causes no storm.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import TYPE_CHECKING

from flowfabric.errors import FabricError

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.sdk.fabric import Fabric

logger = logging.getLogger("flowfabric.worker")

# A run that an older worker holds after the first check is found by a later one.
FIRST_CHECK_S = 15.0
LAST_CHECK_S = 3600.0
RELEASE_S = 0.1


async def release_held_runs(app: Fabric, engine: EngineAPI) -> int:
    """Release the held runs of the tasks of an app that this version has not held; return how many."""
    released = 0
    if not await engine.list_held(list(app.tasks), namespace=app.namespace, limit=1):
        return released
    tasks_by_version: defaultdict[str, list[str]] = defaultdict(list)
    for task in app.tasks.values():
        tasks_by_version[app.version_of(task)].append(task.name)
    for version, tasks in tasks_by_version.items():
        for run_id in await engine.list_held(tasks, namespace=app.namespace):
            if await engine.release_held(run_id, version=version, sender=f"version {version}"):
                released += 1
                await asyncio.sleep(RELEASE_S)
    return released


async def keep_releasing(app: Fabric, engine: EngineAPI) -> None:
    """Release held runs now, after 15 seconds, and then at intervals that double up to an hour, until cancelled."""
    pause_s = FIRST_CHECK_S
    while True:
        try:
            if released := await release_held_runs(app, engine):
                pause_s = FIRST_CHECK_S
                logger.info("%d held runs continue with version %s", released, app.version or "of this source")
        except FabricError as error:
            logger.warning("held runs were not released: %s", error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_CHECK_S)
