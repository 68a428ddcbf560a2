"""Crashes of durable functions on every store: the process dies at a point, and another attempt takes over at once."""

from __future__ import annotations

from collections.abc import Iterable

from flowfabric import Context, Fabric
from flowfabric.sdk.durable.attempt import SimulatedCrash

Point = tuple[str, str]  # such as "step:charge", and "before_effect", "after_effect" or "after_commit"


class Crashes:
    """Lets the handlers of an app die at points, each once, in any order."""

    def __init__(self, app: Fabric, points: Iterable[Point]) -> None:
        self.left = list(points)
        self._app = app
        app.on_fault_point = self._reach

    async def _reach(self, context: Context, point: str, moment: str) -> None:
        if (point, moment) in self.left:
            self.left.remove((point, moment))
            await (await self._app.engine()).revoke_lease(context.run_id)
            raise SimulatedCrash(f"{point} {moment}")
