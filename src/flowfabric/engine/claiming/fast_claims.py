"""The fast path of a claim: the store leases the first rows of some ready queues in one statement."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from flowfabric import errors
from flowfabric.engine.claiming.late_claims import LateClaims
from flowfabric.engine.claiming.ready_queues import ReadyQueues, claim_limit
from flowfabric.engine.runtime.backoff import StoreBackoff
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.wakeups import FEED_TOPIC
from flowfabric.engine.validation.execution import ClaimOrder
from flowfabric.handles import Handle, HandleKind
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.model.states import AttemptType
from flowfabric.rules.execution import lease
from flowfabric.stores.claims import ClaimRequest, LeaseIds
from flowfabric.stores.queries import Scan, Where

# A global is found faster than a member of an enum; this runs for every claimed row.
_FRESH, _INITIAL, _RECLAIM = HandleKind.FRESH, AttemptType.INITIAL, AttemptType.RECLAIM

# The pauses of a claim that finds only work locked by concurrent transactions; most of these end within milliseconds.
PAUSES_S = (0.005, 0.01, 0.02, 0.04)
MIN_PREMINTED_IDS = 16  # lease ids of a request that are worth minting beforehand


class FastClaims:
    """Claims that the store executes without a rule."""

    def __init__(
        self,
        runtime: Runtime,
        queues: ReadyQueues,
        give_back: Callable[[answers.Claimed], Awaitable[object]],
    ) -> None:
        """`give_back` makes an execution claimable again that was claimed after the caller had given up."""
        self.runtime = runtime
        self.queues = queues
        self.late_claims = LateClaims(self.find_claimed, give_back)
        self._spare: tuple[LeaseIds, ...] = ()
        self._found_enough = False

    async def claim_fast(self, queues: Sequence[QueueKey], order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """Claim the first rows of these queues; of very many, those of the first batch of queues that has any."""
        most = claim_limit(queues, limit)
        for batch in await self.queues.batch_queues(queues):
            if claimed := await self.send_claim(self.claim_request(tuple(batch), most, order)):
                return claimed
        return []

    async def send_claim(self, request: ClaimRequest, *unknown: ClaimRequest) -> list[answers.Claimed]:
        """Send a claim; the outcomes of the requests in `unknown` are unknown, and they may still be executed."""
        pending = [*unknown]
        claimed: list[answers.Claimed] = []
        try:
            claimed = await self._send_until_known(request, pending)
            return claimed
        finally:
            if pending:
                self.late_claims.watch(pending, claimed)

    async def _send_until_known(self, request: ClaimRequest, unknown: list[ClaimRequest]) -> list[answers.Claimed]:
        """Send a claim, with new lease ids after each failure; add requests with unknown outcome to `unknown`.

        A transaction that locks a row without claiming it, as a message to a run does, wakes nobody when it ends. So a
        claim that finds only locked rows is sent again a few times.
        """
        pause, pauses_s = StoreBackoff(), iter(PAUSES_S)
        while True:
            count = len(request.lease_ids)
            if self._found_enough and count >= MIN_PREMINTED_IDS:  # mint for the next claim while the store is busy
                asyncio.get_running_loop().call_soon(self._mint_spare, count)
            try:
                claimed = await self.runtime.store.claim_rows(request)
            except asyncio.CancelledError:
                unknown.append(request)
                raise
            except errors.StoreUnavailable as lost:
                if lost.in_doubt:
                    unknown.append(request)
                    if found := await self.find_claimed(unknown):
                        return found
                await pause.sleep_or_raise()
                request = self.with_new_lease_ids(request)
                continue
            self.runtime.estimate.update(claimed.now)
            if claimed.has_locked and (pause_s := next(pauses_s, None)) is not None:
                await asyncio.sleep(pause_s)
                continue
            if unknown and not claimed.rows:  # an earlier request may have been executed after the search for it
                return await self.find_claimed(unknown)
            return self.accept_claimed(request, claimed.rows)

    def with_new_lease_ids(self, request: ClaimRequest) -> ClaimRequest:
        """Return the request with unused lease ids."""
        return msgspec.structs.replace(request, lease_ids=self._next_lease_ids(len(request.lease_ids)))

    def claim_request(self, queues: tuple[QueueKey, ...], limit: int, order: ClaimOrder) -> ClaimRequest:
        """Return a request for the first rows of these queues."""
        return ClaimRequest(
            queues,
            self._next_lease_ids(limit),
            order.worker_id,
            order.worker_instance_id,
            order.lease_ttl_ms,
            lease.CLAIM,
        )

    def accept_claimed(self, request: ClaimRequest, rows: Sequence[tuple[Execution, Payload]]) -> list[answers.Claimed]:
        """Return the answers for the rows of a reply; keep the lease ids that were not used."""
        self._found_enough = len(rows) == len(request.lease_ids)
        if not self._found_enough:
            used = {row.lease_id for row, _ in rows}
            self._spare = tuple(ids for ids in request.lease_ids if ids.lease_id not in used)
        if rows:
            self.runtime.notify((FEED_TOPIC,), at_once=False)  # completions may follow soon, and are emitted, too
            self.runtime.wake_sweeps_for([row for row, _ in rows])
            first, _ = rows[0]
            self.runtime.track_lease_expiry(first.lane_id, first.lease_expires_at or 0)
        return [self._claimed_by_store(row, payload, request.lease_ttl_ms) for row, payload in rows]

    def _next_lease_ids(self, count: int) -> tuple[LeaseIds, ...]:
        """Return unused lease ids, first those that an earlier request did not need: workers request many."""
        self._mint_spare(count)
        lease_ids, self._spare = self._spare[:count], ()
        return lease_ids

    def _mint_spare(self, count: int) -> None:
        """Mint lease ids until there are `count` spare ones."""
        missing = count - len(self._spare)
        if missing > 0:
            uuid, change_id = self.runtime.minter.uuid, self.runtime.minter.change_id
            self._spare += tuple([LeaseIds(uuid(), uuid(), change_id()) for _ in range(missing)])

    async def find_claimed(self, requests: Sequence[ClaimRequest]) -> list[answers.Claimed]:
        """Return what these requests with unknown outcome have claimed, found by their lease ids."""
        lease_ids = tuple(ids.lease_id for request in requests for ids in request.lease_ids)
        where = (Where("lease_expires_at", "set"), Where("lease_id", "in", lease_ids))
        rows = await self.runtime.scan(Scan(Execution, where, ("rank", "execution_id"), limit=len(lease_ids)))
        if not rows:
            return []
        reads = ReadSet()
        payloads = reads.each(Payload, ((row.execution_id,) for row in rows))
        loaded = await self.runtime.load(reads)
        ttl_ms = requests[0].lease_ttl_ms
        return [
            self._claimed_by_store(row, payload, ttl_ms)
            for row, payload in zip(rows, payloads(loaded.rows), strict=True)
        ]

    def _claimed_by_store(self, row: Execution, payload: Payload | None, lease_ttl_ms: int) -> answers.Claimed:
        self.runtime.cache_leased_row(row)
        kind = _FRESH
        if row.attempt_resumed_at is not None:
            kind = HandleKind.RESUMED
        elif row.attempt_type is _RECLAIM:
            kind = HandleKind.RECLAIMED
        fields = lease.handle_fields(row, lease_ttl_ms)
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
            row.life or 0,
        )
