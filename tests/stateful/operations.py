"""The operations that executions go through: every engine operation with valid and invalid arguments.

The clock stands still until an operation advances it, most often to just before, at or just after a deadline. Leases,
handles and grants that ended stay in use.
"""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution, IdempotencyKey
from flowfabric.testing.invariants import scan_all
from tests.executions import create_request
from tests.stateful import choices as some
from tests.stateful.players import Held
from tests.stateful.predicates import (
    is_abandoned,
    is_active,
    is_blocked,
    is_delayed,
    is_granted,
    is_over,
    is_resumable,
    is_waiting,
)
from tests.stateful.state_machine import Table, move

INSTANTS = (
    "lease_expires_at",
    "delay_until",
    "granted_until",
    "attempt_timeout_at",
    "deadline_at",
    "purge_at",
)


class Lives(Table):
    """Every operation that writes."""

    # -- creation -----------------------------------------------------------------------------------------------------

    @move(weight=0, seeded=(True, True, True, False), one=some.policies, other=some.policies)
    def begin(self, seeded: bool, one: Any, other: Any) -> None:
        if seeded:
            self.do("seed_waitpoint_hmac_secret", kid="k1", secret_hex=some.SECRET)
        for policy in (None, one, other):
            self.do("create_execution", execution_id=self.new_id("default"), policy=policy)

    @move(
        weight=2,
        lane=some.lanes,
        namespace=some.namespaces,
        priority=some.priorities,
        policy=some.policies,
        key=some.keys,
        tags=some.tags,
        delay=some.instants,
        deadline=some.instants,
        payload=some.results,
        seat=some.seats,
    )
    def create(self, lane: str, seat: int, key: str | None, **asked: Any) -> None:
        if self.is_crowded():
            return
        self.do(
            "create_execution",
            seat=seat,
            execution_id=self.new_id(lane),
            lane_id=lane,
            namespace=asked["namespace"],
            priority=asked["priority"],
            policy=asked["policy"],
            idempotency_key=key,
            tags=asked["tags"],
            delay_until=self.instant(asked["delay"]),
            execution_deadline_at=self.instant(asked["deadline"]),
            input_payload=asked["payload"] or b"",
        )

    @move(pick=some.picks, policy=some.policies, key=some.keys)
    def create_again(self, pick: int, policy: Any, key: str | None) -> None:
        execution_id = self.pick(pick)
        lane = self.lane_of(execution_id)
        self.known += [execution_id] * (execution_id not in self.known)
        self.do("create_execution", execution_id=execution_id, lane_id=lane, policy=policy, idempotency_key=key)

    @move(lane=some.lanes, policy=some.UNSOUND_POLICIES, tags=some.tags)
    def create_unsoundly(self, lane: str, policy: Any, tags: dict[str, str]) -> None:
        execution_id = self.new_id(lane)
        self.do("create_execution", execution_id=execution_id, lane_id=lane, policy=policy, idempotency_key="k")
        self.do("create_execution", execution_id=execution_id, lane_id=lane, tags={**tags, "Bad Key": "v"})

    @move(lane=some.lanes, count=range(1, 5), keys=some.four_keys, seat=some.seats)
    def create_many(self, lane: str, count: int, keys: tuple[str | None, ...], seat: int) -> None:
        if self.is_crowded():
            return
        asks = [
            create_request(self.new_id(lane), lane, namespace="n1", priority=number, idempotency_key=keys[number])
            for number in range(count)
        ]
        self.do("create_executions", seat=seat, asks=[*asks, asks[0]])

    # -- claims -------------------------------------------------------------------------------------------------------

    @move(weight=6, lane=some.lanes, worker=some.workers, instance=some.instances, offer=some.offers, ttl=some.ttls)
    def claim(self, lane: str, worker: str, instance: str, offer: tuple[str, ...], ttl: int) -> None:
        who, seat = self.who(worker, instance), self.claimer(instance)
        self.do("claim", seat=seat, lane_id=lane, **who, capabilities=offer, lease_ttl_ms=ttl)

    @move(weight=2, lane=some.lanes, worker=some.workers, offer=some.offers, limit=range(1, 5), ttl=some.ttls)
    def claim_many(self, lane: str, worker: str, offer: tuple[str, ...], limit: int, ttl: int) -> None:
        self.do("claim_many", lane_id=lane, limit=limit, **self.who(worker), capabilities=offer, lease_ttl_ms=ttl)

    @move(weight=3, lane=some.lanes, worker=some.workers, offer=some.offers, ttl=some.ttls, redeem=(True, False))
    def claim_for_worker(self, lane: str, worker: str, offer: tuple[str, ...], ttl: int, redeem: bool) -> None:
        who = self.who(worker)
        grant = self.do("claim_for_worker", lane_id=lane, **who, capabilities=offer, grant_ttl_ms=ttl)
        if redeem and isinstance(grant, answers.ClaimGrant):
            self.do("claim_execution", execution_id=grant.execution_id, **who, lane_id=lane)
        if redeem and isinstance(grant, answers.ReclaimGrant):
            self.do("reclaim_execution", execution_id=grant.execution_id, **who, lane_id=lane)

    @move(
        weight=3,
        pick=some.picks,
        lane=(None, None, None, None, "mail"),
        worker=some.workers,
        offer=some.offers,
        ttl=some.ttls,
        seat=some.seats,
    )
    def issue_claim_grant(self, pick: int, lane: str | None, worker: str, offer: Any, ttl: int, seat: int) -> None:
        execution_id = self.pick(pick, is_waiting)
        self.do(
            "issue_claim_grant",
            seat=seat,
            execution_id=execution_id,
            lane_id=lane or self.lane_of(execution_id),
            **self.who(worker),
            worker_capabilities=offer,
            grant_ttl_ms=ttl,
        )

    @move(
        weight=3,
        pick=some.picks,
        worker=some.workers,
        is_mine=some.mostly,
        ttl=some.ttls,
        timeout=some.lengths,
        deadline=some.instants,
        seat=some.seats,
    )
    def claim_execution(self, pick: int, worker: str, is_mine: bool, seat: int, **asked: Any) -> None:
        execution_id = self.pick(pick, is_granted)
        self.do(
            "claim_execution",
            seat=seat,
            execution_id=execution_id,
            **self.who(self.grantee(execution_id, worker) if is_mine else worker),
            lease_ttl_ms=asked["ttl"],
            attempt_timeout_ms=asked["timeout"],
            execution_deadline_at=self.instant(asked["deadline"]),
        )

    @move(
        weight=2,
        pick=some.picks,
        worker=some.workers,
        is_mine=some.mostly,
        ttl=some.ttls,
        remaining=some.lengths,
        seat=some.seats,
    )
    def claim_resumed_execution(self, pick: int, worker: str, is_mine: bool, seat: int, **asked: Any) -> None:
        execution_id = self.pick(pick, is_resumable)
        self.do(
            "claim_resumed_execution",
            seat=seat,
            execution_id=execution_id,
            **self.who(self.grantee(execution_id, worker) if is_mine else worker),
            lease_ttl_ms=asked["ttl"],
            remaining_attempt_timeout_ms=asked["remaining"],
        )

    @move(pick=some.picks, worker=some.workers, is_mine=some.mostly, ttl=some.ttls)
    def claim_from_resume_grant(self, pick: int, worker: str, is_mine: bool, ttl: int) -> None:
        if not self.grants:
            return
        grant = self.grants[-1 - pick % len(self.grants)]
        who = self.who(self.grantee(grant.execution_id, worker) if is_mine else worker)
        self.do("claim_from_resume_grant", grant=grant, **who, lease_ttl_ms=ttl)

    @move(weight=2, pick=some.picks, lane=(None, None, None, "mail"), ttl=some.ttls, seat=some.seats)
    def issue_grant_and_claim(self, pick: int, lane: str | None, ttl: int, seat: int) -> None:
        execution_id = self.pick(pick, is_waiting)
        lane = lane or self.lane_of(execution_id)
        self.do("issue_grant_and_claim", seat=seat, execution_id=execution_id, lane_id=lane, lease_duration_ms=ttl)

    @move(weight=2, pick=some.picks, worker=some.workers, offer=some.offers, ttl=some.ttls, seat=some.seats)
    def issue_reclaim_grant(self, pick: int, worker: str, offer: tuple[str, ...], ttl: int, seat: int) -> None:
        execution_id = self.pick(pick, is_active)
        self.do(
            "issue_reclaim_grant",
            seat=seat,
            execution_id=execution_id,
            lane_id=self.lane_of(execution_id),
            **self.who(worker),
            worker_capabilities=offer,
            grant_ttl_ms=ttl,
        )

    @move(
        weight=2,
        pick=some.picks,
        worker=some.workers,
        is_mine=some.mostly,
        ttl=some.ttls,
        cap=(None, None, None, 0, 1, 2),
        seat=some.seats,
    )
    def reclaim_execution(self, pick: int, worker: str, is_mine: bool, ttl: int, cap: int | None, seat: int) -> None:
        execution_id = self.pick(pick, is_abandoned)
        self.do(
            "reclaim_execution",
            seat=seat,
            execution_id=execution_id,
            **self.who(self.grantee(execution_id, worker) if is_mine else worker),
            lease_ttl_ms=ttl,
            max_reclaim_count=cap,
        )

    # -- the lease holder ---------------------------------------------------------------------------------------------

    @move(weight=2, pick=some.picks, ttl=(None, None, 1, 100, 60_000), seat=some.seats)
    def renew(self, pick: int, ttl: int | None, seat: int) -> None:
        if self.held:
            self.do("renew", seat=seat, handle=self.handle(pick), lease_ttl_ms=ttl)

    @move(picked=((0,), (0, 1), (2, 0, 1), (7, 0), (9, 8)), ttl=some.ttls)
    def renew_many(self, picked: tuple[int, ...], ttl: int) -> None:
        if self.held:
            held = {held.fields.lease_id: held for held in map(self.handle, picked)}
            self.do("renew_many", handles=list(held.values()), lease_ttl_ms=ttl)

    @move(pick=some.picks, parts=some.parts, index=(None, None, 0, 7), is_known=some.mostly)
    def renew_by_name(self, pick: int, parts: int, index: int | None, is_known: bool) -> None:
        if self.held:
            held = self.handle(pick)
            self.do(
                "renew",
                execution_id=held.fields.execution_id if is_known else some.MISSING,
                attempt_index=held.fields.attempt_index if index is None else index,
                fence=self.fence(held, parts),
                lease_ttl_ms=1000,
            )

    @move(
        pick=some.picks,
        pct=(None, 0, 40, 100, 101),
        message=(None, "half", "later"),
        seat=some.seats,
    )
    def progress(self, pick: int, pct: int | None, message: str | None, seat: int) -> None:
        if self.held:
            self.do("progress", seat=seat, handle=self.handle(pick), pct=pct, message=message)

    @move(weight=2, pick=some.picks, result=some.results, seat=some.seats)
    def complete(self, pick: int, result: bytes | None, seat: int) -> None:
        if self.held:
            self.do("complete", seat=seat, handle=self.handle(pick), result=result)

    @move(weight=4, pick=some.picks, reason=some.reasons, category=some.categories, seat=some.seats)
    def fail(self, pick: int, reason: str, category: str, seat: int) -> None:
        if self.held:
            self.do("fail", seat=seat, handle=self.handle(pick), reason=reason, category=category)

    @move(weight=3, pick=some.picks, until=(-5, 0, 1, 500, 2000), seat=some.seats)
    def delay(self, pick: int, until: int, seat: int) -> None:
        if self.held:
            self.do("delay", seat=seat, handle=self.handle(pick), delay_until=self.clock.now + until)

    @move(weight=2, pick=some.picks, seat=some.seats)
    def wait_children(self, pick: int, seat: int) -> None:
        if self.held:
            self.do("wait_children", seat=seat, handle=self.handle(pick))

    @move(
        weight=3,
        verb=("complete", "fail", "fail", "delay", "wait_children", "update_progress"),
        pick=some.picks,
        parts=some.parts,
        source=some.sources,
        retry=(None, '{"max_retries": 0}', '{"max_retries": 1}', "{not json"),
        is_known=some.mostly,
    )
    def finish_by_name(
        self, verb: str, pick: int, parts: int, source: str | None, retry: str | None, is_known: bool
    ) -> None:
        if not self.held:
            return
        held = self.handle(pick)
        execution_id = held.fields.execution_id if is_known else some.MISSING
        more: dict[str, dict[str, Any]] = {
            "complete": {"source": source, "result": b"by name"},
            "fail": {"source": source, "reason": "by name", "retry_policy": retry},
            "delay": {"source": source, "delay_until": self.clock.now + 100},
            "wait_children": {"source": source},
            "update_progress": {"pct": 7},
        }
        self.do(verb, execution_id=execution_id, fence=self.fence(held, parts), **more[verb])

    @move(weight=10, lane=some.lanes, worker=some.workers, verb=some.holders_verbs, category=some.categories)
    def work(self, lane: str, worker: str, verb: str, category: str) -> None:
        """Promote what is due, claim, and act on the claim: the most frequent sequence."""
        self.do("sweep_once", name="delayed_promoter")
        offer = ("cuda", "gpu")
        if self.do("claim", lane_id=lane, **self.who(worker), capabilities=offer, lease_ttl_ms=30_000):
            self.use(self.held[-1], verb, category=category)

    def use(self, held: Held, verb: str, *, seat: int = 0, category: str = "transient") -> None:
        more: dict[str, dict[str, Any]] = {
            "fail": {"reason": "used", "category": category},
            "delay": {"delay_until": self.clock.now},
        }
        self.do(verb, seat=seat, handle=held, **more.get(verb, {}))

    @move(
        weight=6,
        pick=some.picks,
        verb=some.holders_verbs,
        offset=(None, None, -1, 0, 0, 1),
        belief=(None, None, -60_000, 60_000),
        seat=some.seats,
    )
    def act_at_expiry(self, pick: int, verb: str, offset: int | None, belief: int | None, seat: int) -> None:
        """Use a lease around its expiry, or with a wrong estimate of the time."""
        if not self.held:
            return
        held = self.handle(pick)
        ends = {row.lease_id: row.lease_expires_at for row in self.rows()}
        end = ends.get(held.fields.lease_id)
        if offset is not None and end is not None:
            self.clock.now = max(self.clock.now, end + offset)
        if belief is not None:
            self.skew_clock(belief, seat)
        self.use(held, verb, seat=seat)

    @move(pick=some.picks, reason=some.reasons, seat=some.seats)
    def cancel(self, pick: int, reason: str, seat: int) -> None:
        if self.held:
            self.do("cancel", seat=seat, handle=self.handle(pick), reason=reason)

    @move(verb=("renew", "complete", "wait_children", "progress", "cancel"), pick=some.picks)
    def use_a_foreign_handle(self, verb: str, pick: int) -> None:
        if self.held:
            held = msgspec.structs.replace(self.handle(pick), foreign=True)
            self.do(verb, handle=held)

    # -- operators, schedulers and sweeps -----------------------------------------------------------------------------

    @move(
        pick=some.picks,
        source=some.cancel_sources,
        reason=some.reasons,
        is_fenced=(True, False),
        parts=some.parts,
        seat=some.seats,
    )
    def cancel_execution(self, pick: int, source: str, reason: str, is_fenced: bool, parts: int, seat: int) -> None:
        execution_id, fence = self.pick(pick), None
        if is_fenced and self.held:
            held = self.handle(pick)
            execution_id, fence = held.fields.execution_id, self.fence(held, parts)
        given = {} if fence is None else {"fence": fence}
        self.do("cancel_execution", seat=seat, execution_id=execution_id, reason=reason, source=source, **given)

    @move(weight=2, pick=some.picks, seat=some.seats)
    def replay_execution(self, pick: int, seat: int) -> None:
        self.do("replay_execution", seat=seat, execution_id=self.pick(pick, is_over))

    @move(
        verb=("expire_execution", "expire_if_due", "expire_if_due"),
        pick=some.picks,
        reason=some.expiries,
    )
    def expire(self, verb: str, pick: int, reason: str) -> None:
        self.do(verb, execution_id=self.pick(pick), reason=reason)

    @move(weight=2, pick=some.picks, seat=some.seats)
    def promote_delayed(self, pick: int, seat: int) -> None:
        self.do("promote_delayed", seat=seat, execution_id=self.pick(pick, is_delayed))

    @move(pick=some.picks, seat=some.seats)
    def mark_lease_expired_if_due(self, pick: int, seat: int) -> None:
        self.do("mark_lease_expired_if_due", seat=seat, execution_id=self.pick(pick, is_active))

    @move(pick=some.picks)
    def purge_execution(self, pick: int) -> None:
        self.do("purge_execution", execution_id=self.pick(pick, is_over))

    @move(weight=3, name=some.sweeps, seat=some.seats)
    def sweep(self, name: str, seat: int) -> None:
        self.do("sweep_once", seat=seat, name=name)

    @move(
        weight=2,
        pick=some.picks,
        lease=("", "", "", "00000000-0000-4000-8000-000000000001"),
        instance=("", "", "wa-1", "wb-1"),
        seat=some.seats,
    )
    def revoke_lease(self, pick: int, lease: str, instance: str, seat: int) -> None:
        self.do(
            "revoke_lease",
            seat=seat,
            execution_id=self.pick(pick, is_active),
            expected_lease_id=lease,
            worker_instance_id=instance,
            reason="bad node",
        )

    @move(pick=some.picks, priority=some.priorities, seat=some.seats)
    def change_priority(self, pick: int, priority: int, seat: int) -> None:
        self.do("change_priority", seat=seat, execution_id=self.pick(pick, is_waiting), new_priority=priority)

    @move(pick=some.picks, reason=some.blockings, seat=some.seats)
    def block(self, pick: int, reason: str, seat: int) -> None:
        execution_id = self.pick(pick, is_waiting)
        self.do("block_execution_for_admission", seat=seat, execution_id=execution_id, reason=reason, detail="why")

    @move(pick=some.picks, seat=some.seats)
    def block_route(self, pick: int, seat: int) -> None:
        self.do("block_route", seat=seat, execution_id=self.pick(pick, is_waiting))

    @move(pick=some.picks, expected=some.expectations, seat=some.seats)
    def unblock(self, pick: int, expected: str | None, seat: int) -> None:
        self.do("unblock_execution", seat=seat, execution_id=self.pick(pick, is_blocked), expected_reason=expected)

    @move(pick=some.picks, key=("a.b", "cairn.instance_id", "Bad"), value=some.reasons, seat=some.seats)
    def tag(self, pick: int, key: str, value: str, seat: int) -> None:
        self.do("set_execution_tag", seat=seat, execution_id=self.pick(pick), key=key, value=value)
        self.do("set_execution_tags", seat=seat, execution_id=self.pick(pick), pairs={"x.y": value, key: "v"})

    # -- time ---------------------------------------------------------------------------------------------------------

    @move(ms=(1, 10, 100, 999, 1000, 5000))
    def pass_time(self, ms: int) -> None:
        self.clock.advance_ms(ms)

    @move(weight=4, far=(0, 0, 0, 0, 1, 1, 2, 3, 5, 8), offset=some.around)
    def advance_to_deadline(self, far: int, offset: int) -> None:
        """Advance the clock to just before, at or just after a deadline."""
        known = sorted(self.run(self._instants()))
        ahead = [instant + offset for instant in known if instant + offset > self.clock.now]
        if ahead:
            self.clock.now = ahead[far % len(ahead)]

    async def _instants(self) -> set[int]:
        rows = await scan_all(self.players[0].store, Execution)
        found = {getattr(row, name) for row in rows for name in INSTANTS}
        found |= {entry.expires_at for entry in await scan_all(self.players[0].store, IdempotencyKey)}
        return {instant for instant in found if instant is not None}

    @move(ms=(-60_000, -1, 1, 1000, 60_000), seat=some.seats)
    def skew_clock(self, ms: int, seat: int) -> None:
        """Let an engine estimate an earlier or later time: it may cost a second load, and nothing else."""
        for player in self.players:
            player.engines[seat].estimate.update(self.clock.now + ms)
