"""The fast path of a claim: the store leases the first rows of some ready queues in one statement."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from flowfabric import errors
from flowfabric.engine.claiming.late_claims import LateClaims
from flowfabric.engine.claiming.ready_queues import ReadyQueues, claim_limit
from flowfabric.engine.runtime.runtime import Runtime, StoreBackoff
from flowfabric.engine.runtime.wakeups import FEED_TOPIC
from flowfabric.engine.validation.execution import ClaimOrder
from flowfabric.handles import Handle, HandleFields, HandleKind
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.model.states import AttemptType
from flowfabric.rules.execution import lease
from flowfabric.stores.claims import ClaimRequest, LeaseIds
from flowfabric.stores.queries import Read, Scan, Where

# Names of this module are found faster than members of an enum; this runs for every claimed row.
_FRESH, _INITIAL, _RECLAIM = HandleKind.FRESH, AttemptType.INITIAL, AttemptType.RECLAIM

MIN_PREMINTED_IDS = 16  # identities that it is worth making beforehand


class FastClaims:
    """Claims that the store makes alone."""

    def __init__(
        self,
        runtime: Runtime,
        queues: ReadyQueues,
        give_back: Callable[[answers.Claimed], Awaitable[object]],
    ) -> None:
        """`give_back` makes an execution claimable again that a request claimed after its caller had given up."""
        self.runtime = runtime
        self.queues = queues
        self.late_claims = LateClaims(self.find_claimed, give_back)
        self._spare: tuple[LeaseIds, ...] = ()
        self._found_enough = False

    async def claim_fast(self, lines: Sequence[QueueKey], order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """The first rows of these lines; of very many lines, those of the first portion that has any."""
        most = claim_limit(lines, limit)
        for portion in await self.queues.batch_queues(lines):
            if taken := await self.send_claim(self.claim_request(tuple(portion), most, order)):
                return taken
        return []

    async def send_claim(self, take: ClaimRequest, *doubts: ClaimRequest) -> list[answers.Claimed]:
        """Take; `doubts` are such of before whose answers got lost, and which may still arrive."""
        doubtful = [*doubts]
        got: list[answers.Claimed] = []
        try:
            got = await self._take_doubted(take, doubtful)
            return got
        finally:
            if doubtful:
                self.late_claims.watch(doubtful, got)

    async def _take_doubted(self, take: ClaimRequest, doubtful: list[ClaimRequest]) -> list[answers.Claimed]:
        """Take; what may still arrive of this and of earlier takes is added to the doubtful ones."""
        pause = StoreBackoff()
        while True:
            if (
                self._found_enough and len(take.lease_ids) >= MIN_PREMINTED_IDS
            ):  # while the store is at it, make what the next one needs
                asyncio.get_running_loop().call_soon(self._stock, len(take.lease_ids))
            try:
                taken = await self.runtime.store.claim_rows(take)
            except asyncio.CancelledError:
                doubtful.append(take)
                raise
            except errors.StoreUnavailable as lost:
                if lost.in_doubt:
                    doubtful.append(take)
                    if found := await self.find_claimed(doubtful):
                        return found
                await pause.sleep_or_raise()
                take = self.with_new_lease_ids(take)
                continue
            self.runtime.estimate.update(taken.now)
            if doubtful and not taken.rows:  # perhaps the doubtful one arrived just after we had looked for it
                return await self.find_claimed(doubtful)
            return self.accept_claimed(take, taken.rows)

    def with_new_lease_ids(self, take: ClaimRequest) -> ClaimRequest:
        """The same take once more, with identities that nobody has seen."""
        return msgspec.structs.replace(take, lease_ids=self._next_lease_ids(len(take.lease_ids)))

    def claim_request(self, lines: tuple[QueueKey, ...], limit: int, order: ClaimOrder) -> ClaimRequest:
        return ClaimRequest(
            lines,
            self._next_lease_ids(limit),
            order.worker_id,
            order.worker_instance_id,
            order.lease_ttl_ms,
            lease.CLAIM,
        )

    def accept_claimed(self, take: ClaimRequest, rows: Sequence[tuple[Execution, Payload]]) -> list[answers.Claimed]:
        """What a take got; the stamps that it did not use are used later."""
        self._found_enough = len(rows) == len(take.lease_ids)
        if not self._found_enough:
            used = {row.lease_id for row, _ in rows}
            self._spare = tuple(stamp for stamp in take.lease_ids if stamp.lease_id not in used)
        if rows:
            self.runtime.notify((FEED_TOPIC,), at_once=False)  # what is claimed may soon be over, which is told, too
            self.runtime.wake_sweeps_for([row for row, _ in rows])
            self.runtime.track_lease_expiry(rows[0][0].lane_id, rows[0][0].lease_expires_at or 0)
        return [self._claimed_by_store(row, payload, take.lease_ttl_ms) for row, payload in rows]

    def _next_lease_ids(self, count: int) -> tuple[LeaseIds, ...]:
        """New identities, and before them those that an earlier take found nothing for: workers ask for many."""
        self._stock(count)
        stamps, self._spare = self._spare[:count], ()
        return stamps

    def _stock(self, count: int) -> None:
        """Have so many identities to give out."""
        missing = count - len(self._spare)
        if missing > 0:
            uuid, change_id = self.runtime.minter.uuid, self.runtime.minter.change_id
            self._spare += tuple([LeaseIds(uuid(), uuid(), change_id()) for _ in range(missing)])

    async def find_claimed(self, takes: Sequence[ClaimRequest]) -> list[answers.Claimed]:
        """After lost answers: the rows that carry the stamps, if one of the takes happened."""
        leases = tuple(stamp.lease_id for take in takes for stamp in take.lease_ids)
        where = (Where("lease_expires_at", "set"), Where("lease_id", "in", leases))
        rows = await self.runtime.scan(Scan(Execution, where, ("rank", "execution_id"), limit=len(leases)))
        if not rows:
            return []
        loaded = await self.runtime.load([Read(Payload, (row.execution_id,)) for row in rows])
        ttl = takes[0].lease_ttl_ms
        return [self._claimed_by_store(row, found[0], ttl) for row, found in zip(rows, loaded.rows, strict=True)]

    def _claimed_by_store(self, row: Execution, payload: Payload, lease_ttl_ms: int) -> answers.Claimed:
        self.runtime.cache_leased_row(row)
        kind = _FRESH
        if row.attempt_resumed_at is not None:
            kind = HandleKind.RESUMED
        elif row.attempt_type is _RECLAIM:
            kind = HandleKind.RECLAIMED
        fields = HandleFields(
            row.execution_id,  # type: ignore[arg-type]
            row.attempt_index or 0,
            row.attempt_id,  # type: ignore[arg-type]
            row.lease_id,  # type: ignore[arg-type]
            row.lease_epoch,
            lease_ttl_ms,
            row.current_lane or row.lane_id,  # type: ignore[arg-type]
            row.worker_instance_id,  # type: ignore[arg-type]
        )
        return answers.Claimed(
            row.execution_id,
            fields.lease_id,
            row.lease_epoch,
            fields.attempt_index,
            fields.attempt_id,
            row.attempt_type or _INITIAL,
            row.lease_expires_at or 0,
            Handle.mint(self.runtime.store.tag, kind, fields),
            payload,
            row.namespace,
        )
