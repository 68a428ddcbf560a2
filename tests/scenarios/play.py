"""Words for scenarios: an engine, a clock that the test moves, and short forms of what scenarios keep saying.

A vector is written as in the specification: lifecycle / ownership / eligibility / blocking / outcome / attempt_state /
public.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.cursors import FROM_THE_START
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.pages import HistoryEntry
from flowfabric.engine.streams.subscription import Subscription
from flowfabric.handles import Handle
from flowfabric.ids import ExecutionId, partition_of
from flowfabric.model.answers.execution import (
    AttemptView,
    Claimed,
    Created,
    Delayed,
    MarkedExpired,
    Promotion,
    ReclaimGrant,
    Revoked,
)
from flowfabric.model.execution import Execution, Grant
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.feed import CompletionFeedEntry, LeaseFeedEntry, OperatorFeedEntry
from flowfabric.stores.queries import Read
from flowfabric.testing import SyncPoint
from tests.scenarios.watched import Watched, dump

N = TypeVar("N")

DEFAULT_PARTITION = 86  # of lane `default`
LEASE_MS = 30_000
GRANT_MS = 5_000

WAITING = "runnable/unowned/eligible_now/waiting_for_worker/none/pending_first_attempt/waiting"
ACTIVE = "active/leased/not_applicable/none/none/running_attempt/active"
EXPIRED_LEASE = "active/lease_expired_reclaimable/not_applicable/waiting_for_worker/none/attempt_interrupted/active"
REVOKED_LEASE = "active/lease_revoked/not_applicable/waiting_for_worker/none/attempt_interrupted/active"
DELAYED = "runnable/unowned/not_eligible_until_time/waiting_for_delay/none/attempt_interrupted/delayed"
RESUMABLE = "runnable/unowned/eligible_now/waiting_for_worker/none/attempt_interrupted/waiting"

ABOUT_ONE_EXECUTION = {
    *("execution_not_active", "execution_not_leaseable", "execution_not_eligible", "execution_not_in_eligible_set"),
    *("lease_conflict", "invalid_claim_grant", "claim_grant_expired", "use_claim_resumed_execution"),
    *("not_a_resumed_execution", "no_active_lease", "active_attempt_exists", "grant_already_exists", "stale_lease"),
    *("lease_expired", "lease_revoked", "execution_not_terminal", "max_replays_exhausted"),
}

CORE_FIELDS = (
    *("execution_id", "namespace", "lane_id", "execution_kind", "partition_id", "priority", "creator_identity"),
    *("lifecycle_phase", "ownership_state", "eligibility_state", "blocking_reason", "terminal_outcome"),
    *("attempt_state", "public_state", "blocking_detail"),
    *("total_attempt_count", "retry_count", "replay_count", "lease_reclaim_count"),
    *("current_attempt_index", "current_attempt_id", "current_lease_id", "current_lease_epoch"),
    *("current_worker_id", "current_worker_instance_id", "current_lane"),
    *("created_at", "started_at", "completed_at", "last_transition_at", "last_mutation_at"),
    *("lease_acquired_at", "lease_expires_at", "lease_last_renewed_at", "lease_renewal_deadline"),
    *("lease_expired_at", "lease_revoked_at", "lease_revoke_reason", "delay_until"),
    *("execution_deadline_at", "attempt_timeout_at"),
    *("pending_retry_reason", "pending_replay_reason", "pending_replay_requested_by"),
    *("pending_previous_attempt_index", "progress_pct", "progress_message", "progress_updated_at", "flow_id"),
    *("required_capabilities", "failure_reason", "cancellation_reason", "cancelled_by"),
    *("last_capability_mismatch_at", "budget_ids", "quota_policy_id"),
)


def terminal(outcome: str, attempt_state: str = "attempt_terminal") -> str:
    """The vector of an ended execution."""
    public = "completed" if outcome == "success" else outcome
    return f"terminal/unowned/not_applicable/none/{outcome}/{attempt_state}/{public}"


def fence_of(claimed: Claimed) -> Fence:
    """The triple that a claim gave out."""
    return Fence(claimed.lease_id, claimed.lease_epoch, claimed.attempt_id)


class Play:
    """One engine on one store, and what a scenario does with them."""

    def __init__(self, engine: Engine, clock: ManualClock) -> None:
        self.engine = engine
        self.clock = clock

    @property
    def store(self) -> Watched:
        """The store under watch."""
        store = self.engine.store
        assert isinstance(store, Watched)
        return store

    @property
    def now(self) -> int:
        """The store's time."""
        return self.clock.now

    def slowed(self, verb: str) -> SyncPoint:
        """Stop the next call of a verb of the store until the test lets it go on."""
        gate, inner = SyncPoint(), getattr(self.store, verb)

        async def passing(*given: Any, **named: Any) -> Any:
            delattr(self.store, verb)
            await gate.pause()
            return await inner(*given, **named)

        setattr(self.store, verb, passing)
        return gate

    async def late(self, asking: Awaitable[N], by_ms: int) -> N:
        """What comes of a call that was decided now and reaches the store so much later."""
        gate = self.slowed("commit")
        asked = asyncio.ensure_future(asking)
        async with asyncio.timeout(20):
            await gate.reached()
            self.clock.advance_ms(by_ms)
            gate.release()
            return await asked

    # -- doing --------------------------------------------------------------------------------------------------

    async def create(self, *, lane: str = "default", execution_id: str | None = None, **given: Any) -> ExecutionId:
        """A new execution."""
        e = ExecutionId(execution_id) if execution_id else self.engine.new_execution_id(lane)
        assert isinstance(await self.engine.create_execution(execution_id=e, lane_id=lane, **given), Created)
        return e

    async def grant(
        self, e: str, worker: str = "wa", *, can: Iterable[str] = (), ttl: int = GRANT_MS, lane: str = "default"
    ) -> None:
        """A claim grant for a worker."""
        granted = await self.engine.issue_claim_grant(
            e,
            lane_id=lane,
            worker_id=worker,
            worker_instance_id=f"{worker}-1",
            worker_capabilities=can,
            grant_ttl_ms=ttl,
        )
        assert granted.execution_id == e

    async def claim(
        self, e: str, worker: str = "wa", *, instance: str = "", ttl: int = LEASE_MS, **more: Any
    ) -> Claimed:
        """Redeem a claim grant with a fresh attempt."""
        return await self.engine.claim_execution(
            e, worker_id=worker, worker_instance_id=instance or f"{worker}-1", lease_ttl_ms=ttl, **more
        )

    async def claimed(self, worker: str = "wa", *, ttl: int = LEASE_MS, claim: Any = None, **given: Any) -> Claimed:
        """A new execution, granted to and claimed by a worker."""
        e = await self.create(**given)
        await self.grant(e, worker, lane=given.get("lane", "default"))
        return await self.claim(e, worker, ttl=ttl, **(claim or {}))

    async def claimed_again(self, e: str, worker: str = "wb", **more: Any) -> Claimed:
        """A grant and a fresh claim for an execution that exists."""
        await self.grant(e, worker)
        return await self.claim(e, worker, **more)

    async def resume(
        self, e: str, worker: str = "wa", *, instance: str = "", ttl: int = LEASE_MS, **more: Any
    ) -> Claimed:
        """Redeem a claim grant by going on with the interrupted attempt."""
        return await self.engine.claim_resumed_execution(
            e, worker_id=worker, worker_instance_id=instance or f"{worker}-1", lease_ttl_ms=ttl, **more
        )

    async def resumed(self, e: str, worker: str = "wb", **more: Any) -> Claimed:
        """A grant and a resumed claim."""
        await self.grant(e, worker)
        return await self.resume(e, worker, **more)

    async def delayed(self, held: Claimed, length: int = 1000) -> None:
        """The holder puts its work away for a while."""
        answer = await self.engine.delay(held.handle, delay_until=self.now + length)
        assert isinstance(answer, Delayed)

    async def promoted(self, e: str) -> None:
        """Time passes until the delay is over, and the promoter comes by."""
        until = (await self.core(e))["delay_until"]
        self.clock.now = max(self.now, until)
        assert await self.engine.promote_delayed(e) is Promotion.PROMOTED

    async def expired(self, held: Claimed) -> None:
        """The lease lapses and is marked."""
        self.clock.now = (await self.core(held.execution_id))["lease_expires_at"]
        assert isinstance(await self.engine.mark_lease_expired_if_due(held.execution_id), MarkedExpired)

    async def revoked(self, held: Claimed, reason: str = "operator_revoke") -> None:
        """An operator takes the lease away."""
        answer = await self.engine.revoke_lease(held.execution_id, reason=reason)
        assert answer == Revoked(held.lease_id, held.lease_epoch)

    async def reclaim_grant(
        self, e: str, worker: str = "wb", *, can: Iterable[str] = (), ttl: int = GRANT_MS, lane: str = "default"
    ) -> Any:
        """What a worker that asks for a reclaim grant hears."""
        return await self.engine.issue_reclaim_grant(
            e,
            lane_id=lane,
            worker_id=worker,
            worker_instance_id=f"{worker}-1",
            worker_capabilities=can,
            grant_ttl_ms=ttl,
        )

    async def reclaim(self, e: str, worker: str = "wb", *, instance: str = "", ttl: int = LEASE_MS, **more: Any) -> Any:
        """What a worker that reclaims hears."""
        return await self.engine.reclaim_execution(
            e, worker_id=worker, worker_instance_id=instance or f"{worker}-1", lease_ttl_ms=ttl, **more
        )

    async def reclaimed(self, e: str, worker: str = "wb", **more: Any) -> Claimed:
        """A reclaim grant, redeemed."""
        assert isinstance(await self.reclaim_grant(e, worker), ReclaimGrant)
        claimed = await self.reclaim(e, worker, **more)
        assert isinstance(claimed, Claimed)
        return claimed

    async def next_for(self, worker: str = "wa", *, can: Iterable[str] = (), lane: str = "default") -> Any:
        """What the scheduler grants to a worker next."""
        return await self.engine.claim_for_worker(
            lane, worker_id=worker, worker_instance_id=f"{worker}-1", capabilities=can, grant_ttl_ms=GRANT_MS
        )

    async def pull(self, worker: str = "wa", *, can: Iterable[str] = (), lane: str = "default") -> Claimed | None:
        """What a worker that pulls gets."""
        return await self.engine.claim(
            lane, worker_id=worker, worker_instance_id=f"{worker}-1", capabilities=can, lease_ttl_ms=LEASE_MS
        )

    # -- looking ------------------------------------------------------------------------------------------------

    async def sheet(self, e: str) -> Execution:
        """The execution's row as it is kept."""
        loaded = await self.engine.runtime.load((Read(Execution, (e,)),))
        [row] = loaded.rows[0]
        assert isinstance(row, Execution)
        return row

    async def core(self, e: str) -> dict[str, Any]:
        """Every field of the core record that is set."""
        return await self.engine.read_exec_core_fields(partition_of(ExecutionId(e)), e, CORE_FIELDS)

    async def vector(self, e: str) -> str:
        """The seven dimensions."""
        vector = await self.engine.read_state_vector(e)
        assert vector is not None
        return "/".join(msgspec.structs.astuple(vector))

    async def live_grant(self, e: str) -> Grant | None:
        """The grant in the execution's slot, if its time is not over."""
        row = await self.sheet(e)
        grant = None if row.grant is None else msgspec.json.decode(row.grant, type=Grant)
        return grant if grant and grant.expires_at > self.now else None

    async def eligible(self, lane: str = "default", partition: int = DEFAULT_PARTITION) -> list[str]:
        """The lane's eligible order."""
        return await self.engine.scan_eligible_executions(lane, partition, 100)

    async def attempt(self, e: str, index: int) -> AttemptView:
        """One attempt record."""
        return (await self.engine.attempt_history(e))[index]

    async def history(self, e: str) -> list[HistoryEntry]:
        """The lease history."""
        return await self.engine.lease_history(e)

    async def told(self, e: str) -> list[str]:
        """The lease history in short: each entry's name, and its reason when it has one."""
        entries = await self.history(e)
        return [" ".join(filter(None, (entry.event, entry.fields.get("reason")))) for entry in entries]

    async def completions(self, *executions: str) -> list[CompletionFeedEntry]:
        """The completion feed from its start, of these executions or of all."""
        return _of(executions, await _all(await self.engine.subscribe_completion(FROM_THE_START)))

    async def outcomes(self, *executions: str) -> list[str]:
        """The completion feed in short."""
        return [completion.outcome for completion in await self.completions(*executions)]

    async def operator_events(self, *executions: str) -> list[OperatorFeedEntry]:
        """The operator feed from its start."""
        return _of(executions, await _all(await self.engine.subscribe_operator_event(FROM_THE_START)))

    async def lease_feed(self, *executions: str) -> list[LeaseFeedEntry]:
        """The lease feed from its start."""
        return _of(executions, await _all(await self.engine.subscribe_lease_history(FROM_THE_START)))

    async def everything(self) -> dict[str, list[Any]]:
        """All rows and events of the store."""
        return await dump(self.store.store)

    @asynccontextmanager
    async def untouched(self) -> AsyncIterator[None]:
        """What is done here leaves no trace in the store, nor does what follows from it."""
        await self.at_rest()
        before = await self.everything()
        yield
        await self.at_rest()
        assert await self.everything() == before

    async def at_rest(self) -> None:
        """Wait until the engine has done what follows from what was asked of it."""
        await self.engine.child_completions.drain()
        await self.engine.outbox.wait_for_deliveries()

    @asynccontextmanager
    async def refused(
        self, error: type[errors.FabricError], detail: str | None = None, **facts: Any
    ) -> AsyncIterator[None]:
        """What is asked here is refused with this error, and leaves no trace."""
        async with self.untouched():
            with pytest.raises(error) as caught:
                yield
        assert type(caught.value) is error
        if caught.value.kind in ABOUT_ONE_EXECUTION:
            assert caught.value.execution_id, "say which execution"
        assert detail is None or caught.value.detail == detail
        assert {name: getattr(caught.value, name) for name in facts} == facts


def lease_bound(engine: Engine, handle: Handle, now: int) -> dict[str, Callable[[], Awaitable[Any]]]:
    """The calls that only the holder of a live lease may make."""
    return {
        "renew": lambda: engine.renew(handle, lease_ttl_ms=LEASE_MS),
        "progress": lambda: engine.progress(handle, pct=1),
        "complete": lambda: engine.complete(handle, result=b"late"),
        "fail": lambda: engine.fail(handle, reason="late"),
        "delay": lambda: engine.delay(handle, delay_until=now + 1000),
        "wait_children": lambda: engine.wait_children(handle),
        "cancel": lambda: engine.cancel(handle, reason="late"),
    }


async def _all(subscription: Subscription[N]) -> list[N]:
    found: list[N] = []
    while (event := await subscription.next(timeout_s=0)) is not None:
        found.append(event)
    return found


def _of(executions: tuple[str, ...], events: list[Any]) -> list[Any]:
    return [event for event in events if not executions or event.execution_id in executions]
