"""The machine that leads executions through random lives, with every verb, sound and unsound.

Old leases, handles and grants stay in play: a rule picks from everything that was ever given out. Time stands still
until a rule moves it, most often onto, just before or just after an instant at which something ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from flowfabric.clock import ManualClock
from flowfabric.ids import SeededMinter
from flowfabric.model import answers
from flowfabric.model.execution import Execution, IdempotencyKey
from flowfabric.rules.create import CreateExecution
from flowfabric.rules.lease import Fence
from flowfabric.testing.invariants import every
from tests.machine import choices as some
from tests.machine.players import Call, Held, Outcome, Player

T = TypeVar("T")

INSTANTS = (
    "lease_expires_at",
    "delay_until",
    "granted_until",
    "attempt_timeout_at",
    "deadline_at",
    "purge_at",
)


def has_handles(lives: Any) -> bool:
    return bool(lives.held)


class Lives(RuleBasedStateMachine):
    """Every verb of an engine as a rule; whoever plays says in `ask` what a call means to them."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.minter = SeededMinter(7)
        self.known: list[str] = []
        self.lane: dict[str, str] = {}
        self.held: list[Held] = []
        self.grants: list[answers.ClaimGrant] = []

        self.players = self.run(self.open())

    async def open(self) -> list[Player]:
        """Whoever plays; the rows of the first one say what may happen next."""
        raise NotImplementedError

    def ask(self, call: Call) -> Outcome:
        """Do this, compare, and answer."""
        raise NotImplementedError

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def do(self, verb: str, *, seat: int = 0, **given: Any) -> Any:
        answer = self.ask(Call(verb, given, seat)).answer
        for one in answer if isinstance(answer, list) else [answer]:
            if isinstance(one, answers.Claimed):
                self.held.append(Held(one.handle.kind, one.handle.fields))
            elif isinstance(one, answers.ClaimGrant):
                self.grants.append(one)
        return answer

    def pick(self, number: int) -> str:
        """One of the executions, the younger ones first; now and then one that never was."""
        if number == 9 or not self.known:
            return some.MISSING
        return self.known[-1 - number % len(self.known)]

    def handle(self, number: int) -> Held:
        """A handle that was given out, perhaps long ago."""
        return self.held[-1 - number % len(self.held)]

    def fence(self, number: int, parts: int) -> Fence:
        """The fence of a handle, or a part of it."""
        fields = self.handle(number).fields
        return Fence(
            fields.lease_id, fields.lease_epoch if parts > 1 else None, fields.attempt_id if parts > 2 else None
        )

    # -- beginnings ---------------------------------------------------------------------------------------------------

    @initialize(seeded=st.sampled_from((True, True, True, False)))
    def begin(self, seeded: bool) -> None:
        if seeded:
            self.do("seed_waitpoint_hmac_secret", kid="k1", secret_hex=some.SECRET)

    @rule(
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
    def create(
        self,
        lane: str,
        namespace: str,
        priority: int,
        policy: Any,
        key: str | None,
        tags: dict[str, str],
        delay: int | None,
        deadline: int | None,
        payload: bytes | None,
        seat: int,
    ) -> None:
        self.do(
            "create_execution",
            seat=seat,
            execution_id=self.new_id(lane),
            lane_id=lane,
            namespace=namespace,
            priority=priority,
            policy=policy,
            idempotency_key=key,
            tags=tags,
            delay_until=self.instant(delay),
            execution_deadline_at=self.instant(deadline),
            input_payload=payload or b"",
        )

    @rule(lane=some.lanes, priority=some.priorities, policy=some.policies)
    def create_simply(self, lane: str, priority: int, policy: Any) -> None:
        self.do("create_execution", execution_id=self.new_id(lane), lane_id=lane, priority=priority, policy=policy)

    @rule(pick=some.picks, policy=some.policies, key=some.keys, lane=some.lanes)
    def create_again(self, pick: int, policy: Any, key: str | None, lane: str) -> None:
        execution_id = self.pick(pick)
        lane = self.lane.get(execution_id, "default")
        self.do("create_execution", execution_id=execution_id, lane_id=lane, policy=policy, idempotency_key=key)

    @rule(lane=some.lanes, policy=st.sampled_from(some.UNSOUND_POLICIES), tags=some.tags)
    def create_unsoundly(self, lane: str, policy: Any, tags: dict[str, str]) -> None:
        execution_id = self.new_id(lane)
        self.do("create_execution", execution_id=execution_id, lane_id=lane, policy=policy, idempotency_key="k")
        self.do("create_execution", execution_id=execution_id, lane_id=lane, tags={**tags, "Bad Key": "v"})

    @rule(lane=some.lanes, count=st.integers(1, 4), keys=st.lists(some.keys, min_size=4, max_size=4), seat=some.seats)
    def create_many(self, lane: str, count: int, keys: list[str | None], seat: int) -> None:
        asks = [
            CreateExecution(
                execution_id=self.new_id(lane),
                partition=0,
                namespace="n1",
                lane_id=lane,
                execution_kind="task",
                priority=number,
                idempotency_key=keys[number],
            )
            for number in range(count)
        ]
        self.do("create_executions", seat=seat, asks=[*asks, asks[0]])

    def new_id(self, lane: str) -> str:
        execution_id = f"{{fp:{some.partition(lane)}}}:{self.minter.uuid()}"
        self.known.append(execution_id)
        self.lane[execution_id] = lane
        return execution_id

    def instant(self, from_now: int | None) -> int | None:
        return None if from_now is None else self.clock.now + from_now

    # -- claims -------------------------------------------------------------------------------------------------------

    @rule(lane=some.lanes, worker=some.workers, instance=some.instances, offer=some.offers, ttl=some.ttls)
    def claim(self, lane: str, worker: str, instance: str, offer: tuple[str, ...], ttl: int) -> None:
        self.do(
            "claim",
            seat=self.claimer(instance),
            lane_id=lane,
            **self.who(worker, instance),
            capabilities=offer,
            lease_ttl_ms=ttl,
        )

    @rule(lane=some.lanes, worker=some.workers, offer=some.offers, limit=st.integers(1, 4), ttl=some.ttls)
    def claim_many(self, lane: str, worker: str, offer: tuple[str, ...], limit: int, ttl: int) -> None:
        self.do("claim_many", lane_id=lane, limit=limit, **self.who(worker), capabilities=offer, lease_ttl_ms=ttl)

    @rule(lane=some.lanes, worker=some.workers, offer=some.offers, ttl=some.ttls, redeem=st.booleans())
    def claim_for_worker(self, lane: str, worker: str, offer: tuple[str, ...], ttl: int, redeem: bool) -> None:
        grant = self.do("claim_for_worker", lane_id=lane, **self.who(worker), capabilities=offer, grant_ttl_ms=ttl)
        if redeem and isinstance(grant, answers.ClaimGrant):
            self.do("claim_execution", execution_id=grant.execution_id, **self.who(worker), lane_id=lane)
        if redeem and isinstance(grant, answers.ReclaimGrant):
            self.do("reclaim_execution", execution_id=grant.execution_id, **self.who(worker), lane_id=lane)

    @rule(
        pick=some.picks,
        lane=st.sampled_from((None, None, None, "mail")),
        worker=some.workers,
        offer=some.offers,
        ttl=some.ttls,
        seat=some.seats,
    )
    def issue_claim_grant(
        self, pick: int, lane: str | None, worker: str, offer: tuple[str, ...], ttl: int, seat: int
    ) -> None:
        execution_id = self.pick(pick)
        self.do(
            "issue_claim_grant",
            seat=seat,
            execution_id=execution_id,
            lane_id=lane or self.lane.get(execution_id, "default"),
            **self.who(worker),
            worker_capabilities=offer,
            grant_ttl_ms=ttl,
        )

    @rule(
        pick=some.picks,
        worker=some.workers,
        ttl=some.ttls,
        timeout=some.lengths,
        deadline=some.instants,
        seat=some.seats,
    )
    def claim_execution(
        self, pick: int, worker: str, ttl: int, timeout: int | None, deadline: int | None, seat: int
    ) -> None:
        self.do(
            "claim_execution",
            seat=seat,
            execution_id=self.pick(pick),
            **self.who(worker),
            lease_ttl_ms=ttl,
            attempt_timeout_ms=timeout,
            execution_deadline_at=self.instant(deadline),
        )

    @rule(pick=some.picks, worker=some.workers, ttl=some.ttls, remaining=some.lengths, seat=some.seats)
    def claim_resumed_execution(self, pick: int, worker: str, ttl: int, remaining: int | None, seat: int) -> None:
        self.do(
            "claim_resumed_execution",
            seat=seat,
            execution_id=self.pick(pick),
            **self.who(worker),
            lease_ttl_ms=ttl,
            remaining_attempt_timeout_ms=remaining,
        )

    @precondition(lambda self: bool(self.grants))
    @rule(pick=some.picks, worker=some.workers, ttl=some.ttls)
    def claim_from_resume_grant(self, pick: int, worker: str, ttl: int) -> None:
        grant = self.grants[-1 - pick % len(self.grants)]
        self.do("claim_from_resume_grant", grant=grant, **self.who(worker), lease_ttl_ms=ttl)

    @rule(pick=some.picks, lane=st.sampled_from((None, None, "mail")), ttl=some.ttls, seat=some.seats)
    def issue_grant_and_claim(self, pick: int, lane: str | None, ttl: int, seat: int) -> None:
        execution_id = self.pick(pick)
        self.do(
            "issue_grant_and_claim",
            seat=seat,
            execution_id=execution_id,
            lane_id=lane or self.lane.get(execution_id, "default"),
            lease_duration_ms=ttl,
        )

    @rule(pick=some.picks, worker=some.workers, offer=some.offers, ttl=some.ttls, seat=some.seats)
    def issue_reclaim_grant(self, pick: int, worker: str, offer: tuple[str, ...], ttl: int, seat: int) -> None:
        execution_id = self.pick(pick)
        self.do(
            "issue_reclaim_grant",
            seat=seat,
            execution_id=execution_id,
            lane_id=self.lane.get(execution_id, "default"),
            **self.who(worker),
            worker_capabilities=offer,
            grant_ttl_ms=ttl,
        )

    @rule(
        pick=some.picks,
        worker=some.workers,
        ttl=some.ttls,
        cap=st.sampled_from((None, None, None, 0, 1, 2)),
        seat=some.seats,
    )
    def reclaim_execution(self, pick: int, worker: str, ttl: int, cap: int | None, seat: int) -> None:
        self.do(
            "reclaim_execution",
            seat=seat,
            execution_id=self.pick(pick),
            **self.who(worker),
            lease_ttl_ms=ttl,
            max_reclaim_count=cap,
        )

    def who(self, worker: str, instance: str = "1") -> dict[str, Any]:
        return {"worker_id": worker, "worker_instance_id": f"{worker}-{instance}"}

    def claimer(self, instance: str) -> int:
        """Which engine an instance pulls through."""
        return int(instance) - 1

    # -- the holder ---------------------------------------------------------------------------------------------------

    @precondition(has_handles)
    @rule(pick=some.picks, ttl=st.sampled_from((None, None, 1, 100, 60_000)), seat=some.seats)
    def renew(self, pick: int, ttl: int | None, seat: int) -> None:
        self.do("renew", seat=seat, handle=self.handle(pick), lease_ttl_ms=ttl)

    @precondition(has_handles)
    @rule(picked=st.lists(some.picks, min_size=1, max_size=3, unique=True), ttl=some.ttls)
    def renew_many(self, picked: list[int], ttl: int) -> None:
        held = {held.fields.lease_id: held for held in map(self.handle, picked)}
        self.do("renew_many", handles=list(held.values()), lease_ttl_ms=ttl)

    @precondition(has_handles)
    @rule(pick=some.picks, parts=st.integers(0, 3), index=st.sampled_from((None, None, 0, 7)), lost=st.booleans())
    def renew_by_name(self, pick: int, parts: int, index: int | None, lost: bool) -> None:
        fields = self.handle(pick).fields
        self.do(
            "renew",
            execution_id=some.MISSING if lost else fields.execution_id,
            attempt_index=fields.attempt_index if index is None else index,
            fence=self.fence(pick, parts) if parts else Fence(),
            lease_ttl_ms=1000,
        )

    @precondition(has_handles)
    @rule(
        pick=some.picks,
        pct=st.sampled_from((None, 0, 40, 100, 101)),
        message=st.sampled_from((None, "half", "later")),
        seat=some.seats,
    )
    def progress(self, pick: int, pct: int | None, message: str | None, seat: int) -> None:
        self.do("progress", seat=seat, handle=self.handle(pick), pct=pct, message=message)

    @precondition(has_handles)
    @rule(pick=some.picks, result=some.results, seat=some.seats)
    def complete(self, pick: int, result: bytes | None, seat: int) -> None:
        self.do("complete", seat=seat, handle=self.handle(pick), result=result)

    @precondition(has_handles)
    @rule(pick=some.picks, reason=some.reasons, category=some.categories, seat=some.seats)
    def fail(self, pick: int, reason: str, category: str, seat: int) -> None:
        self.do("fail", seat=seat, handle=self.handle(pick), reason=reason, category=category)

    @precondition(has_handles)
    @rule(pick=some.picks, until=st.sampled_from((-5, 0, 1, 500, 2000)), seat=some.seats)
    def delay(self, pick: int, until: int, seat: int) -> None:
        self.do("delay", seat=seat, handle=self.handle(pick), delay_until=self.clock.now + until)

    @precondition(has_handles)
    @rule(pick=some.picks, seat=some.seats)
    def wait_children(self, pick: int, seat: int) -> None:
        self.do("wait_children", seat=seat, handle=self.handle(pick))

    @precondition(has_handles)
    @rule(
        verb=st.sampled_from(("complete", "fail", "delay", "wait_children", "update_progress")),
        pick=some.picks,
        parts=st.integers(0, 3),
        source=some.sources,
        lost=st.sampled_from((False, False, True)),
    )
    def finish_by_name(self, verb: str, pick: int, parts: int, source: str | None, lost: bool) -> None:
        execution_id = some.MISSING if lost else self.handle(pick).fields.execution_id
        given: dict[str, Any] = {"execution_id": execution_id, "fence": self.fence(pick, parts) if parts else Fence()}
        match verb:
            case "complete":
                given |= {"source": source, "result": b"by name"}
            case "fail":
                given |= {"source": source, "reason": "by name", "retry_policy": '{"max_retries": 1}'}
            case "delay":
                given |= {"source": source, "delay_until": self.clock.now + 100}
            case "wait_children":
                given |= {"source": source}
            case _:
                given |= {"pct": 7}
        self.do(verb, **given)

    @precondition(has_handles)
    @rule(pick=some.picks, reason=some.reasons, seat=some.seats)
    def cancel(self, pick: int, reason: str, seat: int) -> None:
        self.do("cancel", seat=seat, handle=self.handle(pick), reason=reason)

    @precondition(has_handles)
    @rule(verb=st.sampled_from(("renew", "complete", "wait_children", "progress", "cancel")), pick=some.picks)
    def use_a_foreign_handle(self, verb: str, pick: int) -> None:
        self.do(verb, handle=msgspec.structs.replace(self.handle(pick), foreign=True))

    # -- operators, schedulers and time -------------------------------------------------------------------------------

    @rule(
        pick=some.picks,
        source=some.cancel_sources,
        reason=some.reasons,
        fenced=st.booleans(),
        parts=st.integers(1, 3),
        seat=some.seats,
    )
    def cancel_execution(self, pick: int, source: str, reason: str, fenced: bool, parts: int, seat: int) -> None:
        fence = self.fence(pick, parts) if fenced and self.held else Fence()
        execution_id = self.handle(pick).fields.execution_id if fenced and self.held else self.pick(pick)
        self.do("cancel_execution", seat=seat, execution_id=execution_id, reason=reason, source=source, fence=fence)

    @rule(pick=some.picks, seat=some.seats)
    def replay_execution(self, pick: int, seat: int) -> None:
        self.do("replay_execution", seat=seat, execution_id=self.pick(pick))

    @rule(
        verb=st.sampled_from(("expire_execution", "expire_if_due")),
        pick=some.picks,
        reason=some.expiries,
        seat=some.seats,
    )
    def expire(self, verb: str, pick: int, reason: str, seat: int) -> None:
        self.do(verb, seat=seat, execution_id=self.pick(pick), reason=reason)

    @rule(
        verb=st.sampled_from(("promote_delayed", "promote_delayed", "mark_lease_expired_if_due", "purge_execution")),
        pick=some.picks,
        seat=some.seats,
    )
    def sweep_one(self, verb: str, pick: int, seat: int) -> None:
        self.do(verb, seat=seat, execution_id=self.pick(pick))

    @rule(name=some.sweeps, seat=some.seats)
    def sweep(self, name: str, seat: int) -> None:
        self.do("sweep_once", seat=seat, name=name)

    @rule(
        pick=some.picks,
        lease=st.sampled_from(("", "", "mine", "00000000-0000-4000-8000-000000000001")),
        instance=st.sampled_from(("", "", "wa-1", "wb-1")),
        seat=some.seats,
    )
    def revoke_lease(self, pick: int, lease: str, instance: str, seat: int) -> None:
        execution_id, expected = self.pick(pick), lease
        if lease == "mine":
            expected = self.handle(pick).fields.lease_id if self.held else ""
            execution_id = self.handle(pick).fields.execution_id if self.held else execution_id
        self.do(
            "revoke_lease",
            seat=seat,
            execution_id=execution_id,
            expected_lease_id=expected,
            worker_instance_id=instance,
            reason="bad node",
        )

    @rule(pick=some.picks, priority=some.priorities, seat=some.seats)
    def change_priority(self, pick: int, priority: int, seat: int) -> None:
        self.do("change_priority", seat=seat, execution_id=self.pick(pick), new_priority=priority)

    @rule(pick=some.picks, reason=st.one_of(some.blockings, st.just("foo")), seat=some.seats)
    def block(self, pick: int, reason: str, seat: int) -> None:
        self.do("block_execution_for_admission", seat=seat, execution_id=self.pick(pick), reason=reason, detail="why")

    @rule(pick=some.picks, seat=some.seats)
    def block_route(self, pick: int, seat: int) -> None:
        self.do("block_route", seat=seat, execution_id=self.pick(pick))

    @rule(pick=some.picks, expected=some.expectations, seat=some.seats)
    def unblock(self, pick: int, expected: str | None, seat: int) -> None:
        self.do("unblock_execution", seat=seat, execution_id=self.pick(pick), expected_reason=expected)

    @rule(
        pick=some.picks, key=st.sampled_from(("a.b", "cairn.instance_id", "Bad")), value=some.reasons, seat=some.seats
    )
    def tag(self, pick: int, key: str, value: str, seat: int) -> None:
        self.do("set_execution_tag", seat=seat, execution_id=self.pick(pick), key=key, value=value)
        self.do("set_execution_tags", seat=seat, execution_id=self.pick(pick), pairs={"x.y": value, key: "v"})

    @rule(ms=st.sampled_from((1, 10, 100, 999, 1000, 5000, 60_000)))
    def pass_time(self, ms: int) -> None:
        self.clock.pass_ms(ms)

    @rule(pick=st.integers(0, 20), offset=some.around)
    def meet_an_instant(self, pick: int, offset: int) -> None:
        """Go to just before, onto or just after an instant at which something ends."""
        known = sorted(self.run(self._instants()))
        ahead = [instant + offset for instant in known if instant + offset > self.clock.now]
        if ahead:
            self.clock.now = ahead[pick % len(ahead)]

    async def _instants(self) -> set[int]:
        rows = await every(self.players[0].store, Execution)
        found = {getattr(row, name) for row in rows for name in INSTANTS}
        found |= {entry.expires_at for entry in await every(self.players[0].store, IdempotencyKey)}
        return {instant for instant in found if instant is not None}

    @rule(ms=st.sampled_from((-60_000, -1, 1, 1000, 60_000)), seat=some.seats)
    def mistake_the_time(self, ms: int, seat: int) -> None:
        """Let an engine believe that it is earlier or later: it may cost a second look, and nothing else."""
        for player in self.players:
            player.engines[seat].estimate.hear(self.clock.now + ms)
