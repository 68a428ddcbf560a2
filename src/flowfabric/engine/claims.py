"""How workers come to work: grants, claims, takeovers.

Two roads lead to a claim. *Uniform* rows are taken by the store in one trip: the first rows of the lines that the
worker covers. *Decided* rows need a decision at the claim: an expired or revoked lease has a cap to respect and an
attempt to end; they stand in lines of their own and are claimed by load, rule and commit. Both are merged by rank.

Leases that lapsed enter their line when somebody notices. Every claim looks for them, and for lines that other
processes began: always when it found nothing, and about once a second when it is busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence, Set
from typing import Any

from flowfabric import errors, ids
from flowfabric.engine import intake
from flowfabric.engine.core import Pause
from flowfabric.engine.executions import Executions
from flowfabric.engine.intake import ClaimOrder
from flowfabric.engine.keys import Keys
from flowfabric.engine.wakes import FEED, lane_topic, waited
from flowfabric.handles import Handle, HandleFields, HandleKind
from flowfabric.model import answers
from flowfabric.model.execution import Execution, LineKey, Payload
from flowfabric.model.states import AttemptType, BlockingReason
from flowfabric.rules import capabilities, claim, lease, limits, reclaim, tokens
from flowfabric.rules.change import Decision
from flowfabric.rules.claim import Acquired, GrantOrder
from flowfabric.rules.lease import Holder
from flowfabric.stores.base import Scan, Stamp, Take, Want, Where

OPERATOR = "operator"
HOUSEKEEPING_MS = 1000
CANDIDATES = 10
LAPSED_BATCH = 100


class Claims(Executions, Keys):
    """What a worker does to get work."""

    # -- pull -----------------------------------------------------------------------------------------------------

    async def claim(
        self,
        lane_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        max_wait_ms: int = 0,
    ) -> answers.Claimed | None:
        """The best claimable execution of the lane, fresh, resumed or taken over; None when there is none in time."""
        claimed = await self.claim_many(
            lane_id,
            1,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            lease_ttl_ms=lease_ttl_ms,
            max_wait_ms=max_wait_ms,
        )
        return claimed[0] if claimed else None

    async def claim_many(
        self,
        lane_id: str,
        limit: int,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        max_wait_ms: int = 0,
    ) -> list[answers.Claimed]:
        """Up to `limit` executions in claim order, as soon as there is at least one."""
        order = intake.claim_order(lane_id, worker_id, worker_instance_id, capabilities, lease_ttl_ms)
        limits.integer("limit", limit, least=1, most=10_000)
        limits.duration("max_wait_ms", max_wait_ms, least=0)
        clock = asyncio.get_running_loop().time
        until = clock() + max_wait_ms / 1000
        while True:
            hint = self.wakes.expect(lane_topic(lane_id))
            try:
                claimed = await self._claim_now(order, limit)
                left = until - clock()
                if claimed or left <= 0:
                    return claimed
                await waited(hint, min(left, self.poll_s))
            finally:
                hint.cancel()

    async def _claim_now(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """Claim what is there, after a look around when the last one is old, and with one before finding nothing."""
        age = abs(self.estimate.now() - self._looked_at.get(order.lane_id, 0))
        looked = age >= HOUSEKEEPING_MS or order.lane_id in self._takeovers
        if looked:
            await self._look_around(order.lane_id)
            claimed = await self._claim_merged(order, limit)
        else:
            claimed = await self._take(order, limit)
        if not claimed and not looked:
            await self._look_around(order.lane_id)
            claimed = await self._claim_merged(order, limit)
        return claimed

    async def _look_around(self, lane_id: str) -> None:
        """Put lapsed leases into their lines, and hear of lines that other processes began."""
        await asyncio.gather(self.mark_lapsed_leases(), self._learn_lines(lane_id))
        self._looked_at[lane_id] = self.estimate.now()

    async def _learn_lines(self, lane_id: str) -> None:
        for line in await self.patiently(lambda: self.store.lines(lane_id)):
            self.note_line(line)

    async def _claim_merged(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        """Claim from both kinds of lines, best rank first."""
        claimed: list[answers.Claimed] = []
        tried: set[str] = set()
        while decided := await self._heads(order, limit - len(claimed), decided=True, without=tried):
            uniform = await self._heads(order, limit - len(claimed), decided=False)
            for row in decided:
                better = sum(1 for head in uniform if _before(head, row))
                uniform = uniform[better:]
                if better:
                    claimed += await self._take(order, min(better, limit - len(claimed)))
                if len(claimed) >= limit:
                    return claimed
                tried.add(row.execution_id)
                if (taken := await self._take_over(row, order)) is not None:
                    claimed.append(taken)
            if len(claimed) >= limit:
                return claimed
        if order.lane_id in self._takeovers and not await self._has_takeovers(order.lane_id):
            self._takeovers.discard(order.lane_id)
        return claimed + await self._take(order, limit - len(claimed))

    async def _has_takeovers(self, lane_id: str) -> bool:
        """Whether anything is up for takeover in the lane, for whomever: also what is granted or beyond this worker."""
        for line in tuple(self._lines.get(lane_id, ())):
            if line.decided and await self.scan(Scan(Execution, (Where("line", "=", line),), limit=1)):
                return True
        return False

    async def _take(self, order: ClaimOrder, limit: int) -> list[answers.Claimed]:
        lines = await self._covered(order.lane_id, order.capabilities, decided=False)
        if not lines:
            return []
        pause = Pause()
        doubtful: list[Take] = []
        while True:
            stamps = tuple(Stamp(self.minter.uuid(), self.minter.uuid(), self.minter.change_id()) for _ in range(limit))
            take = Take(lines, stamps, order.worker_id, order.worker_instance_id, order.lease_ttl_ms, lease.CLAIMED)
            try:
                taken = await self.store.take(take)
            except errors.StoreUnavailable as lost:
                if lost.in_doubt:
                    doubtful.append(take)
                    if found := await self._find_taken(doubtful):
                        return found
                await pause.or_raise()
                continue
            self.estimate.hear(taken.now)
            if doubtful and not taken.rows:  # perhaps the doubtful one arrived just after we had looked for it
                return await self._find_taken(doubtful)
            if taken.rows:
                self.tell(frozenset({FEED}))
                self.note_taken([row for row, _ in taken.rows])
            return [self._claimed(row, payload, order.lease_ttl_ms) for row, payload in taken.rows]

    async def _find_taken(self, takes: Sequence[Take]) -> list[answers.Claimed]:
        """After lost answers: the rows that carry the stamps, if one of the takes happened."""
        leases = tuple(stamp.lease_id for take in takes for stamp in take.stamps)
        where = (Where("lease_expires_at", "set"), Where("lease_id", "in", leases))
        rows = await self.scan(Scan(Execution, where, ("rank", "execution_id"), limit=len(leases)))
        if not rows:
            return []
        loaded = await self.load([Want(Payload, (row.execution_id,)) for row in rows])
        ttl = takes[0].lease_ttl_ms
        return [self._claimed(row, found[0], ttl) for row, found in zip(rows, loaded.rows, strict=True)]

    def _claimed(self, row: Execution, payload: Payload, lease_ttl_ms: int) -> answers.Claimed:
        self.remember(row)
        resumed = row.attempt_resumed_at is not None
        return _claimed(row, payload, lease_ttl_ms, self._mint(row, lease_ttl_ms, resumed))

    def _mint(self, row: Execution, lease_ttl_ms: int, resumed: bool) -> Handle:
        kind = HandleKind.RESUMED if resumed else HandleKind.FRESH
        if row.attempt_type is AttemptType.RECLAIM and not resumed:
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
        return Handle.mint(self.store.tag, kind, fields)

    # -- takeover -------------------------------------------------------------------------------------------------

    async def mark_lapsed_leases(self) -> int:
        """Mark leases that lapsed, so that their work stands in line again; how many were marked."""
        unmarked = (Where("lease_expired_at", "unset"),)
        due = await self.patiently(
            lambda: self.store.due(Execution, "lease_expires_at", limit=LAPSED_BATCH, where=unmarked)
        )
        self.estimate.hear(due.now)
        marks = await asyncio.gather(*(self.mark_lease_expired_if_due(row.execution_id) for row in due.rows))
        return sum(isinstance(mark, answers.MarkedExpired) for mark in marks)

    async def _take_over(self, row: Execution, order: ClaimOrder) -> answers.Claimed | None:
        holder = self._holder(order)
        wants = (Want(Execution, (row.execution_id,)), Want(Payload, (row.execution_id,)))
        payload: list[Payload] = []

        def decide(rows: list[list[Any]], now: int) -> Decision[Any]:
            payload[:] = rows[1]
            return reclaim.take_over(rows[0][0] if rows[0] else None, holder, order.capabilities, now)

        answer = await self.settle(wants, decide)
        if not isinstance(answer, Acquired):
            return None
        return self._acquired(answer, HandleKind.RECLAIMED, payload[0] if payload else None)

    async def _heads(
        self, order: ClaimOrder, limit: int, *, decided: bool, without: Set[str] = frozenset()
    ) -> list[Execution]:
        """The first rows of the covered lines, merged by rank, without those granted to somebody."""
        heads: list[Execution] = []
        for line in await self._covered(order.lane_id, order.capabilities, decided=decided):
            heads += await self._free(line, limit, without)
        heads.sort(key=lambda row: (row.rank, row.execution_id))
        return heads[:limit]

    async def _free(self, line: LineKey, limit: int, without: Set[str]) -> list[Execution]:
        found: list[Execution] = []
        after: tuple[int, str] | None = None
        while True:
            where = (Where("line", "=", line),)
            page = await self.scan(Scan(Execution, where, ("rank", "execution_id"), after, limit + CANDIDATES))
            now = self.estimate.now()
            found += [row for row in page if row.execution_id not in without and not claim.live_grant(row, now)]
            if len(found) >= limit or len(page) < limit + CANDIDATES:
                return found
            after = (page[-1].rank, page[-1].execution_id)

    async def _covered(self, lane_id: str, offered: frozenset[str], *, decided: bool) -> tuple[LineKey, ...]:
        if lane_id not in self._lines:
            await self._learn_lines(lane_id)
        known = self._lines.get(lane_id, set())
        return tuple(
            sorted(line for line in known if line.decided is decided and capabilities.covers(line.required, offered))
        )

    # -- grants ---------------------------------------------------------------------------------------------------

    async def issue_claim_grant(
        self,
        execution_id: str,
        *,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
    ) -> answers.Granted:
        """Offer one claimable execution to one worker."""
        execution = intake.execution(execution_id)
        order = intake.grant_order(
            lane_id,
            worker_id,
            worker_instance_id,
            worker_capabilities,
            grant_ttl_ms,
            capability_hash,
            route_snapshot_json,
            admission_summary,
        )
        return await self.settle_execution(execution, lambda row, now: claim.issue_claim_grant(row, order, now))

    async def claim_for_worker(
        self,
        lane_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
    ) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        """The scheduler's step: a signed grant for the best execution that this worker may run, or None."""
        offered = intake.offered(capabilities)
        order = intake.grant_order(lane_id, worker_id, worker_instance_id, offered, grant_ttl_ms)
        key = await self.signing_key("claim_for_worker")
        pull = ClaimOrder(lane_id, worker_id, worker_instance_id, offered, grant_ttl_ms)
        await self._look_around(lane_id)
        tried: set[str] = set()
        while candidates := await self._candidates(pull, tried):
            for row in candidates:
                tried.add(row.execution_id)
                try:
                    granted = await self._grant(row, order, key)
                except errors.StoreUnavailable:
                    raise
                except errors.FabricError:
                    continue  # somebody was faster, or it is not for us: the next one
                if granted is not None:
                    return granted
        return None

    async def _candidates(self, order: ClaimOrder, tried: Set[str]) -> list[Execution]:
        """The next best executions that this worker may run, waiting or to be taken over."""
        candidates = await self._heads(order, CANDIDATES, decided=False, without=tried)
        candidates += await self._heads(order, CANDIDATES, decided=True, without=tried)
        candidates.sort(key=lambda row: (row.rank, row.execution_id))
        return candidates[:CANDIDATES]

    async def _grant(
        self, row: Execution, order: GrantOrder, key: Any
    ) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        execution = ids.parse_execution_id(row.execution_id)
        if reclaim.is_reclaimable(row):
            return await self._reclaim_grant(execution, order, key)
        signer = _Signer(key, reclaim=False)
        await self.settle_execution(
            execution, lambda row, now: claim.issue_claim_grant(row, order, now, signer, unblocking=True)
        )
        return answers.ClaimGrant(
            execution, _partition_key(execution), signer.grant_key, signer.expires_at, order.lane_id
        )

    async def _reclaim_grant(
        self, execution: ids.ExecutionId, order: GrantOrder, key: Any
    ) -> answers.ReclaimGrant | None:
        signer = _Signer(key, reclaim=True)
        answer = await self.settle_execution(
            execution, lambda row, now: reclaim.issue_reclaim_grant(row, order, now, signer)
        )
        if isinstance(answer, answers.ReclaimCapExceeded):
            await self.settle_execution(execution, _end_at_cap)
            return None
        if not isinstance(answer, answers.Granted):
            return None
        return answers.ReclaimGrant(
            execution, _partition_key(execution), signer.grant_key, signer.expires_at, order.lane_id
        )

    async def issue_reclaim_grant(
        self,
        execution_id: str,
        *,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
    ) -> answers.ReclaimGrant | answers.NotReclaimable | answers.ReclaimCapExceeded:
        """Offer work whose lease is gone to one worker; a lapse that nobody noticed yet is marked first."""
        execution = intake.execution(execution_id)
        order = intake.grant_order(
            lane_id,
            worker_id,
            worker_instance_id,
            worker_capabilities,
            grant_ttl_ms,
            capability_hash,
            route_snapshot_json,
            admission_summary,
        )
        key = await self.signing_key("issue_reclaim_grant")
        await self.mark_lease_expired_if_due(execution)
        signer = _Signer(key, reclaim=True)
        answer = await self.settle_execution(
            execution, lambda row, now: reclaim.issue_reclaim_grant(row, order, now, signer)
        )
        if not isinstance(answer, answers.Granted):
            return answer
        return answers.ReclaimGrant(execution, _partition_key(execution), signer.grant_key, signer.expires_at, lane_id)

    # -- claims by grant ------------------------------------------------------------------------------------------

    async def claim_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str = "",
        lease_id: str | None = None,
        attempt_id: str | None = None,
        lease_ttl_ms: int = 15_000,
        attempt_timeout_ms: int | None = None,
        execution_deadline_at: int | None = None,
    ) -> answers.Claimed:
        """Redeem a claim grant by beginning a new attempt."""
        execution = intake.execution(execution_id)
        holder = intake.holder(worker_id, worker_instance_id, lane_id, lease_id, attempt_id, lease_ttl_ms, self.minter)
        timeout = intake.optional_duration("attempt_timeout_ms", attempt_timeout_ms)
        deadline = intake.optional_instant("execution_deadline_at", execution_deadline_at)
        return await self._redeem(
            execution,
            HandleKind.FRESH,
            lambda row, now: claim.claim_execution(
                row, holder, now, attempt_timeout_ms=timeout, execution_deadline_at=deadline
            ),
        )

    async def claim_resumed_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str = "",
        lease_id: str | None = None,
        lease_ttl_ms: int = 15_000,
        remaining_attempt_timeout_ms: int | None = None,
    ) -> answers.Claimed:
        """Redeem a grant by going on with the interrupted attempt."""
        execution = intake.execution(execution_id)
        holder = intake.holder(worker_id, worker_instance_id, lane_id, lease_id, None, lease_ttl_ms, self.minter)
        remaining = intake.optional_duration("remaining_attempt_timeout_ms", remaining_attempt_timeout_ms)
        return await self._redeem(
            execution,
            HandleKind.RESUMED,
            lambda row, now: claim.claim_resumed_execution(row, holder, now, remaining_attempt_timeout_ms=remaining),
        )

    async def claim_from_resume_grant(
        self,
        grant: answers.ClaimGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int = 15_000,
    ) -> Handle:
        """The handle-level form of the resumed claim."""
        if not isinstance(grant, answers.ClaimGrant):
            raise errors.InvalidInput("grant: not a claim grant")
        claimed = await self.claim_resumed_execution(
            grant.execution_id,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lane_id=grant.lane_id,
            lease_ttl_ms=lease_ttl_ms,
        )
        return claimed.handle

    async def issue_grant_and_claim(
        self, execution_id: str, *, lane_id: str, lease_duration_ms: int
    ) -> answers.OperatorClaim:
        """The operator takes one execution in hand; capabilities, budgets and quotas are not asked."""
        execution = intake.execution(execution_id)
        holder = intake.holder(OPERATOR, OPERATOR, lane_id, None, None, lease_duration_ms, self.minter)
        answer = await self.settle_execution(execution, lambda row, now: claim.issue_grant_and_claim(row, holder, now))
        return answers.OperatorClaim(answer.lease_id, answer.lease_epoch, answer.attempt_index)

    async def reclaim_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str = "",
        lease_id: str | None = None,
        attempt_id: str | None = None,
        lease_ttl_ms: int = 15_000,
        max_reclaim_count: int | None = None,
    ) -> answers.Claimed | answers.NotReclaimable | answers.ReclaimCapExceeded | answers.GrantNotFound:
        """Redeem a reclaim grant; at the cap the execution ends as failed."""
        execution = intake.execution(execution_id)
        holder = intake.holder(worker_id, worker_instance_id, lane_id, lease_id, attempt_id, lease_ttl_ms, self.minter)
        asked = None if max_reclaim_count is None else limits.integer("max_reclaim_count", max_reclaim_count, least=0)
        answer = await self.settle_execution(
            execution, lambda row, now: reclaim.reclaim_execution(row, holder, asked, now)
        )
        return self._acquired(answer, HandleKind.RECLAIMED) if isinstance(answer, Acquired) else answer

    async def scan_eligible_executions(self, lane_id: str, partition: int, limit: int) -> list[str]:
        """The ids of claimable executions of a lane and partition in claim order; changes nothing."""
        lane = intake.lane(lane_id)
        limits.integer("partition", partition, least=0, most=65_535)
        limits.integer("limit", limit, least=0, most=10_000)
        rows: list[Execution] = []
        for line in await self.patiently(lambda: self.store.lines(lane)):
            if limit and not line.decided:
                where = (
                    Where("line", "=", line),
                    Where("partition", "=", partition),
                    Where("blocking_reason", "=", BlockingReason.WAITING_FOR_WORKER),
                )
                rows += await self.scan(Scan(Execution, where, ("rank", "execution_id"), limit=limit))
        rows.sort(key=lambda row: (row.rank, row.execution_id))
        return [row.execution_id for row in rows[:limit]]

    async def _redeem(self, execution_id: str, kind: HandleKind, decide: Any) -> answers.Claimed:
        return self._acquired(await self.settle_execution(execution_id, decide), kind)

    def _acquired(self, acquired: Acquired, kind: HandleKind, payload: Payload | None = None) -> answers.Claimed:
        fields = HandleFields(
            acquired.execution_id,  # type: ignore[arg-type]
            acquired.attempt_index,
            acquired.attempt_id,  # type: ignore[arg-type]
            acquired.lease_id,  # type: ignore[arg-type]
            acquired.lease_epoch,
            acquired.lease_ttl_ms,
            acquired.lane_id,  # type: ignore[arg-type]
            acquired.worker_instance_id,  # type: ignore[arg-type]
        )
        return answers.Claimed(
            acquired.execution_id,
            acquired.lease_id,
            acquired.lease_epoch,
            acquired.attempt_index,
            acquired.attempt_id,
            acquired.attempt_type,
            acquired.lease_expires_at,
            Handle.mint(self.store.tag, kind, fields),
            payload,
        )

    def _holder(self, order: ClaimOrder) -> Holder:
        return Holder(
            order.worker_id,
            order.worker_instance_id,
            order.lane_id,
            self.minter.uuid(),
            self.minter.uuid(),
            order.lease_ttl_ms,
        )


class _Signer:
    """Signs the grant that a rule decides on, and keeps the key for its receiver."""

    def __init__(self, key: Any, *, reclaim: bool) -> None:
        self._key = key
        self._reclaim = reclaim
        self.grant_key = ""
        self.expires_at = 0

    def __call__(self, row: Execution, order: GrantOrder, expires_at: int) -> str:
        self.expires_at = expires_at
        self.grant_key = tokens.sign_grant(
            self._key,
            row.execution_id,  # type: ignore[arg-type]
            worker_id=order.worker_id,
            worker_instance_id=order.worker_instance_id,
            expires_at=expires_at,
            reclaim=self._reclaim,
        )
        return tokens.grant_id(self.grant_key)


def _end_at_cap(row: Execution | None, now: int) -> Decision[Any]:
    if row is None or not reclaim.is_reclaimable(row):
        return Decision(None)
    cap = reclaim.reclaim_cap(row, None)
    return reclaim.cap_reached(row, cap) if row.lease_reclaim_count >= cap else Decision(None)


def _before(one: Execution, other: Execution) -> bool:
    return (one.rank, one.execution_id) < (other.rank, other.execution_id)


def _claimed(row: Execution, payload: Payload, lease_ttl_ms: int, handle: Handle) -> answers.Claimed:
    return answers.Claimed(
        row.execution_id,
        row.lease_id or "",
        row.lease_epoch,
        row.attempt_index or 0,
        row.attempt_id or "",
        row.attempt_type or AttemptType.INITIAL,
        row.lease_expires_at or 0,
        handle,
        payload,
    )


def _partition_key(execution_id: ids.ExecutionId) -> str:
    return f"{{fp:{ids.partition_of(execution_id)}}}"
