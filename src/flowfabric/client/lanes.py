"""The store behind a server: its clock, its partitions, the spreads of its lanes, and the ids that follow from them."""

from __future__ import annotations

import asyncio
import logging

from flowfabric import errors
from flowfabric.api.admin import StoreInfo
from flowfabric.client.base import ClientBase
from flowfabric.client.transport import quote_segment
from flowfabric.engine.engine import SchemaVersion
from flowfabric.engine.operations.pages import LanePage
from flowfabric.ids import ExecutionId, mint_solo, parse_lane_id
from flowfabric.model.scheduling.lane import LaneSpread

CONNECT_RETRY_FOR_S = 2.0  # short, so that a wrong address is reported soon
REFRESH_S = 3.0
logger = logging.getLogger("flowfabric.lanes")


class ClientLanes(ClientBase):
    """Operations on lanes. The spreads are read with the store's description, and again while this process creates."""

    backend: str
    release: str
    schema: SchemaVersion
    spreads: dict[str, int]  # by lane, if other than 1; a wrong one costs a second request, the server checks keys
    _spreads_read_at: float | None
    _reading_spreads: asyncio.Task[int] | None

    async def ping(self) -> int:
        info = await self.transport.fetch(StoreInfo, "GET", "/v1/store", retry_for_s=CONNECT_RETRY_FOR_S)
        self.backend, self.partitions, self.release = info.backend, info.partitions, info.release
        self.schema = SchemaVersion(info.schema_version, info.schema_version)
        self.spreads, self._spreads_read_at = info.spreads, asyncio.get_running_loop().time()
        self.estimate.update(info.now)
        return info.now

    def new_execution_id(self, lane_id: str = "default", idempotency_key: str | None = None) -> ExecutionId:
        lane = parse_lane_id(lane_id)
        spread = min(self.spreads.get(lane, 1), self.partitions.flow)
        return mint_solo(lane, self.partitions, self.minter, spread=spread, key=idempotency_key)

    async def list_lanes(self, *, cursor: str | None = None, limit: int = 50) -> LanePage:
        query = {"cursor": cursor, "limit": limit}
        return await self.transport.fetch(LanePage, "GET", "/v1/lanes", query=query)

    async def read_lane(self, lane_id: str) -> LaneSpread:
        return await self.transport.fetch(LaneSpread, "GET", _lane_path(lane_id))

    async def set_lane_spread(self, lane_id: str, spread: int) -> LaneSpread:
        return await self.transport.fetch(LaneSpread, "PUT", _lane_path(lane_id), {"spread": spread})

    async def refresh_lanes(self) -> None:
        """Read the spreads of all lanes now."""
        await self.ping()

    def _refresh_lanes_if_old(self) -> None:
        """Read the spreads in the background if that was done before, but some seconds ago."""
        read_at = self._spreads_read_at
        if read_at is None or self._reading_spreads is not None:
            return
        if asyncio.get_running_loop().time() - read_at > REFRESH_S:
            self._reading_spreads = asyncio.ensure_future(self.ping())
            self._reading_spreads.add_done_callback(self._spreads_were_read)

    def _spreads_were_read(self, ended: asyncio.Task[int]) -> None:
        self._reading_spreads = None
        if not ended.cancelled() and isinstance(fault := ended.exception(), errors.FabricError):
            logger.debug("the spreads of lanes could not be read: %s", fault)


def _lane_path(lane_id: str) -> str:
    return f"/v1/lanes/{quote_segment(parse_lane_id(lane_id))}"
