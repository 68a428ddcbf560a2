"""The spreads of lanes as this process knows them, and the places of idempotency keys that follow from them.

The rows are read when an engine is opened, and again every few seconds while it creates. Minting an id uses the rows in
memory. A wrong spread is harmless for an id without a key: workers serve every partition. A create with a key relies on
rows of known age (`rules/scheduling/lane_spread.py`).
"""

from __future__ import annotations

import asyncio
import logging

from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.deployment import Deployment
from flowfabric.model.execution import IdempotencyKey
from flowfabric.model.scheduling.lane import Lane
from flowfabric.rules.deployment import DEPLOYMENT_ID
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.scheduling.lane_spread import GRACE_MS, KeyPlace, place_key, spread_of
from flowfabric.stores.queries import Scan

REFRESH_MS = 3_000
MAX_AGE_MS = GRACE_MS // 2  # of rows that a create with a key relies on
PAGE_SIZE = 500
LOOKUP_PAUSE_S = 0.1  # between lookups while the last creates under an earlier spread are not yet visible
logger = logging.getLogger("flowfabric.lanes")


class LaneSpreads:
    """Reads the spreads of lanes, and says where idempotency keys belong."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lanes: dict[str, Lane] = {}
        self._loaded_at: int | None = None  # the store's time before the rows were read
        self._refresh: asyncio.Task[None] | None = None

    def spread(self, lane_id: str) -> int:
        """Return the spread that is in effect, as far as this process knows."""
        row = self._lanes.get(lane_id)
        return 1 if row is None else spread_of(row, self._runtime.estimate.now())

    def spreads(self) -> dict[str, int]:
        """Return the spread of every lane that has or had another one than 1."""
        return {lane_id: self.spread(lane_id) for lane_id in self._lanes}

    async def refresh(self) -> None:
        """Read the lanes; callers share one read."""
        await asyncio.shield(self._refresh or self._start_refresh())

    def refresh_if_old(self) -> None:
        """Read the lanes in the background if that was done before, but some seconds ago."""
        if self._loaded_at is not None and self._refresh is None and self._age_ms() > REFRESH_MS:
            _ = self._start_refresh()  # in the background

    async def close(self) -> None:
        """Wait for a read in flight."""
        if self._refresh is not None:
            await asyncio.wait([self._refresh])

    async def prepare(self) -> None:
        """Make sure that creates with a key can rely on the rows in memory."""
        if self._loaded_at is None or not 0 <= self._age_ms() < MAX_AGE_MS:
            await self.refresh()

    def place(self, ask: CreateExecution) -> KeyPlace | None:
        """Return where a create with a key belongs, by rows that `prepare` has read; None if no spread decides it."""
        if not ask.idempotency_key or ask.parent_id is not None or self._loaded_at is None:
            return None
        lane = ask.key_lane or ask.lane_id
        return place_key(
            self._lanes.get(lane),
            lane,
            ask.idempotency_key,
            ask.partition,
            loaded_at=self._loaded_at,
            now=self._runtime.estimate.now(),
            counts=self._runtime.partitions,
        )

    async def find_key(self, ask: CreateExecution, place: KeyPlace) -> str | None:
        """Return the run that has this key on one of its other partitions."""
        if not place.lookups:
            return None
        found = await asyncio.gather(*(self._find_on(ask.digest, *lookup) for lookup in place.lookups))
        return next((execution_id for execution_id in found if execution_id is not None), None)

    async def _find_on(self, digest: str, partition: int, readable_at: int) -> str | None:
        reads = ReadSet()
        key = reads.one(IdempotencyKey, partition, digest)
        while True:
            loaded = await self._runtime.load(reads)
            row = key(loaded.rows)
            if row is not None and row.expires_at > loaded.now:
                return row.execution_id
            if loaded.now >= readable_at:
                return None
            await asyncio.sleep(LOOKUP_PAUSE_S)

    def _age_ms(self) -> int:
        return self._runtime.estimate.now() - (self._loaded_at or 0)

    def _start_refresh(self) -> asyncio.Task[None]:
        self._refresh = asyncio.ensure_future(self._load())
        self._refresh.add_done_callback(self._end_refresh)
        return self._refresh

    def _end_refresh(self, ended: asyncio.Task[None]) -> None:
        self._refresh = None
        if not ended.cancelled() and (fault := ended.exception()) is not None:
            logger.debug("the spreads of lanes could not be read: %s", fault)

    async def _load(self) -> None:
        reads = ReadSet()
        reads.one(Deployment, DEPLOYMENT_ID)  # on the home of the lanes, whose clock dates their rows
        loaded_at = (await self._runtime.load(reads)).now
        lanes: dict[str, Lane] = {}
        after: tuple[str] | None = None
        while True:
            rows: list[Lane] = await self._runtime.scan(Scan(Lane, (), ("lane_id",), after, PAGE_SIZE))
            lanes |= {row.lane_id: row for row in rows}
            if len(rows) < PAGE_SIZE:
                break
            after = (rows[-1].lane_id,)
        self._lanes, self._loaded_at = lanes, loaded_at
