"""The test environment: one engine on one store, a manual clock, and the operations that scenarios repeat.

A state vector is written as in the specification: lifecycle / ownership / eligibility / blocking / outcome /
attempt_state / public.
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
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.feed import CompletionFeedEntry, LeaseFeedEntry, OperatorFeedEntry
from flowfabric.rules.suspension.views import SuspensionRecord
from flowfabric.stores.queries import Read
from flowfabric.testing import SyncPoint
from tests.scenarios.checked_store import CheckedStore, dump

N = TypeVar("N")

DEFAULT_PARTITION = 86  # partition of lane `default`
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
    """Return the state vector of a terminal execution."""
    public = "completed" if outcome == "success" else outcome
    return f"terminal/unowned/not_applicable/none/{outcome}/{attempt_state}/{public}"


def fence_of(claimed: Claimed) -> Fence:
    """Return the fence triple of a claim."""
    return Fence(claimed.lease_id, claimed.lease_epoch, claimed.attempt_id)


def lease_fields(claim: Claimed) -> dict[str, Any]:
    """Return the lease fields of a history entry."""
    return {
        "lease_id": claim.lease_id,
        "lease_epoch": claim.lease_epoch,
        "attempt_id": claim.attempt_id,
        "attempt_index": claim.attempt_index,
        "worker_id": "wa",
        "worker_instance_id": "wa-1",
    }


class Env:
    """One engine on one store with a manual clock."""

    def __init__(self, engine: Engine, clock: ManualClock) -> None:
        self.engine = engine
        self.clock = clock

    @property
    def store(self) -> CheckedStore:
        """The store that checks invariants."""
        store = self.engine.store
        assert isinstance(store, CheckedStore)
        return store

    @property
    def now(self) -> int:
        """The time of the store."""
        return self.clock.now

    def pause_next(self, method: str) -> SyncPoint:
        """Pause the next call of a store method until the test releases it."""
        sync, inner = SyncPoint(), getattr(self.store, method)

        async def paused(*args: Any, **kwargs: Any) -> Any:
            delattr(self.store, method)
            await sync.pause()
            return await inner(*args, **kwargs)

        setattr(self.store, method, paused)
        return sync

    async def commit_late(self, call: Awaitable[N], by_ms: int) -> N:
        """Return the result of a call whose commit reaches the store `by_ms` after its decision."""
        sync = self.pause_next("commit")
        task = asyncio.ensure_future(call)
        async with asyncio.timeout(20):
            await sync.reached()
            self.clock.advance_ms(by_ms)
            sync.release()
            return await task

    async def race(self, slow: Awaitable[Any], fast: Callable[[], Awaitable[Any]]) -> tuple[Any, Any]:
        """Pause a call before its commit, run another to its end, and return both outcomes."""
        sync = self.pause_next("commit")
        task = asyncio.ensure_future(slow)
        async with asyncio.timeout(20):
            await sync.reached()
            second = await _outcome(fast())
            sync.release()
            return await _outcome(task), second

    # -- operations --------------------------------------------------------------------------------------------------

    async def create(self, *, lane: str = "default", execution_id: str | None = None, **options: Any) -> ExecutionId:
        """Create an execution."""
        e = ExecutionId(execution_id) if execution_id else self.engine.new_execution_id(lane)
        assert isinstance(await self.engine.create_execution(execution_id=e, lane_id=lane, **options), Created)
        return e

    async def create_each(self, options: Iterable[dict[str, Any]]) -> list[ExecutionId]:
        """Create an execution with each of these options, all at once; they are in the order of the options."""
        return await asyncio.gather(*(self.create(**one) for one in options))

    async def grant(
        self,
        e: str,
        worker: str = "wa",
        *,
        capabilities: Iterable[str] = (),
        ttl: int = GRANT_MS,
        lane: str = "default",
    ) -> None:
        """Issue a claim grant to a worker."""
        granted = await self.engine.issue_claim_grant(
            e,
            lane_id=lane,
            worker_id=worker,
            worker_instance_id=f"{worker}-1",
            worker_capabilities=capabilities,
            grant_ttl_ms=ttl,
        )
        assert granted.execution_id == e

    async def claim(
        self, e: str, worker: str = "wa", *, instance: str = "", ttl: int = LEASE_MS, **more: Any
    ) -> Claimed:
        """Redeem a claim grant; a new attempt starts."""
        return await self.engine.claim_execution(
            e, worker_id=worker, worker_instance_id=instance or f"{worker}-1", lease_ttl_ms=ttl, **more
        )

    async def create_and_claim(
        self, worker: str = "wa", *, ttl: int = LEASE_MS, claim: Any = None, **options: Any
    ) -> Claimed:
        """Create an execution, grant it to a worker and claim it."""
        e = await self.create(**options)
        await self.grant(e, worker, lane=options.get("lane", "default"))
        return await self.claim(e, worker, ttl=ttl, **(claim or {}))

    async def create_claimed(self, worker: str = "wa", **options: Any) -> tuple[Claimed, str]:
        """Create and claim an execution as `create_and_claim` does; return the claim and the id."""
        claim = await self.create_and_claim(worker, **options)
        return claim, claim.execution_id

    async def grant_and_claim(self, e: str, worker: str = "wb", **more: Any) -> Claimed:
        """Grant an execution to a worker and claim it; a new attempt starts."""
        await self.grant(e, worker)
        return await self.claim(e, worker, **more)

    async def resume(
        self, e: str, worker: str = "wa", *, instance: str = "", ttl: int = LEASE_MS, **more: Any
    ) -> Claimed:
        """Redeem a claim grant; the interrupted attempt continues."""
        return await self.engine.claim_resumed_execution(
            e, worker_id=worker, worker_instance_id=instance or f"{worker}-1", lease_ttl_ms=ttl, **more
        )

    async def grant_and_resume(self, e: str, worker: str = "wb", **more: Any) -> Claimed:
        """Grant an execution to a worker and resume its attempt."""
        await self.grant(e, worker)
        return await self.resume(e, worker, **more)

    async def delay(self, claim: Claimed, length: int = 1000) -> None:
        """Delay a claimed execution."""
        answer = await self.engine.delay(claim.handle, delay_until=self.now + length)
        assert isinstance(answer, Delayed)

    async def promote(self, e: str) -> None:
        """Advance the clock to the end of the delay and promote the execution."""
        until = (await self.core(e))["delay_until"]
        self.clock.now = max(self.now, until)
        assert await self.engine.promote_delayed(e) is Promotion.PROMOTED

    async def expire_lease(self, claim: Claimed) -> None:
        """Advance the clock to the expiry of the lease and mark it expired."""
        self.clock.now = (await self.core(claim.execution_id))["lease_expires_at"]
        assert isinstance(await self.engine.mark_lease_expired_if_due(claim.execution_id), MarkedExpired)

    async def revoke_lease(self, claim: Claimed, reason: str = "operator_revoke") -> None:
        """Revoke the lease as an operator."""
        answer = await self.engine.revoke_lease(claim.execution_id, reason=reason)
        assert answer == Revoked(claim.lease_id, claim.lease_epoch)

    async def issue_reclaim_grant(
        self,
        e: str,
        worker: str = "wb",
        *,
        capabilities: Iterable[str] = (),
        ttl: int = GRANT_MS,
        lane: str = "default",
    ) -> Any:
        """Request a reclaim grant for a worker."""
        return await self.engine.issue_reclaim_grant(
            e,
            lane_id=lane,
            worker_id=worker,
            worker_instance_id=f"{worker}-1",
            worker_capabilities=capabilities,
            grant_ttl_ms=ttl,
        )

    async def reclaim(self, e: str, worker: str = "wb", *, instance: str = "", ttl: int = LEASE_MS, **more: Any) -> Any:
        """Reclaim an execution for a worker."""
        return await self.engine.reclaim_execution(
            e, worker_id=worker, worker_instance_id=instance or f"{worker}-1", lease_ttl_ms=ttl, **more
        )

    async def grant_and_reclaim(self, e: str, worker: str = "wb", **more: Any) -> Claimed:
        """Issue a reclaim grant to a worker and redeem it."""
        assert isinstance(await self.issue_reclaim_grant(e, worker), ReclaimGrant)
        claimed = await self.reclaim(e, worker, **more)
        assert isinstance(claimed, Claimed)
        return claimed

    async def grant_next(self, worker: str = "wa", *, capabilities: Iterable[str] = ()) -> Any:
        """Grant the next execution to a worker, as the scheduler does."""
        who = {"worker_id": worker, "worker_instance_id": f"{worker}-1"}
        return await self.engine.claim_for_worker("default", **who, capabilities=capabilities, grant_ttl_ms=GRANT_MS)

    async def claim_next(
        self, worker: str = "wa", *, capabilities: Iterable[str] = (), lane: str = "default"
    ) -> Claimed | None:
        """Claim the next execution for a worker, or return None."""
        return await self.engine.claim(
            lane, worker_id=worker, worker_instance_id=f"{worker}-1", capabilities=capabilities, lease_ttl_ms=LEASE_MS
        )

    async def claim_existing(self, worker: str = "wa", **options: Any) -> Claimed:
        """Claim the next execution for a worker; there must be one."""
        claim = await self.claim_next(worker, **options)
        assert claim is not None
        return claim

    async def complete_and_deliver(self, claim: Claimed) -> None:
        """Complete an execution and wait until its outbox messages are delivered."""
        await self.engine.complete(claim.handle)
        await self.engine.outbox.wait_for_deliveries()

    async def sweep(self, name: str, *, after_ms: int = 0) -> int:
        """Advance the clock and run one pass of a sweep; return how many rows it processed."""
        self.clock.advance_ms(after_ms)
        return (await self.engine.sweep_once(name)).processed

    async def cancel_and_deliver(self, e: str) -> None:
        """Cancel an execution and wait until its outbox messages are delivered."""
        await self.engine.cancel_execution(e)
        await self.engine.outbox.wait_for_deliveries()

    # -- reads ---------------------------------------------------------------------------------------------------

    async def row(self, e: str) -> Execution:
        """Load the row of an execution."""
        loaded = await self.engine.runtime.load((Read(Execution, (e,)),))
        [row] = loaded.rows[0]
        assert isinstance(row, Execution)
        return row

    async def core(self, e: str) -> dict[str, Any]:
        """Read the fields of the core record that are set."""
        return await self.engine.read_exec_core_fields(partition_of(ExecutionId(e)), e, CORE_FIELDS)

    async def vector(self, e: str) -> str:
        """Read the state vector."""
        vector = await self.engine.read_state_vector(e)
        assert vector is not None
        return "/".join(msgspec.structs.astuple(vector))

    async def live_grant(self, e: str) -> Grant | None:
        """Return the grant of an execution unless it has expired."""
        row = await self.row(e)
        grant = None if row.grant is None else msgspec.json.decode(row.grant, type=Grant)
        return grant if grant and grant.expires_at > self.now else None

    async def existing_grant(self, e: str) -> Grant:
        """Return the live grant of an execution; there must be one."""
        grant = await self.live_grant(e)
        assert grant is not None
        return grant

    async def suspension(self, e: str) -> SuspensionRecord:
        """Read the suspension of an execution; there must be one."""
        suspension = await self.engine.describe_suspension(e)
        assert suspension is not None
        return suspension

    async def eligible(self) -> list[str]:
        """Read the eligible executions of lane `default` in queue order."""
        return await self.engine.scan_eligible_executions("default", DEFAULT_PARTITION, 100)

    async def attempt(self, e: str, index: int) -> AttemptView:
        """Read one attempt record."""
        return (await self.engine.attempt_history(e))[index]

    async def lease_history(self, e: str) -> list[HistoryEntry]:
        """Read the lease history."""
        return await self.engine.lease_history(e)

    async def lease_events(self, e: str) -> list[str]:
        """Return the lease history in short: the event of each entry and its reason, if any."""
        entries = await self.lease_history(e)
        return [" ".join(filter(None, (entry.event, entry.fields.get("reason")))) for entry in entries]

    async def completions(self, *executions: str) -> list[CompletionFeedEntry]:
        """Read the completion feed from its start, of these executions or of all."""
        return _of(executions, await drain(await self.engine.subscribe_completion(FROM_THE_START)))

    async def outcomes(self, *executions: str) -> list[str]:
        """Return the outcomes on the completion feed."""
        return [completion.outcome for completion in await self.completions(*executions)]

    async def operator_events(self, *executions: str) -> list[OperatorFeedEntry]:
        """Read the operator feed from its start."""
        return _of(executions, await drain(await self.engine.subscribe_operator_event(FROM_THE_START)))

    async def lease_feed(self, *executions: str) -> list[LeaseFeedEntry]:
        """Read the lease feed from its start."""
        return _of(executions, await drain(await self.engine.subscribe_lease_history(FROM_THE_START)))

    async def dump(self) -> dict[str, list[Any]]:
        """Return every row and event of the store."""
        return await dump(self.store.store)

    @asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """Assert that the block and its background work change nothing in the store."""
        await self.wait_until_idle()
        before = await self.dump()
        yield
        await self.wait_until_idle()
        assert await self.dump() == before

    async def wait_until_idle(self) -> None:
        """Wait until the engine has no background work."""
        await self.engine.child_completions.drain()
        await self.engine.child_cancels.drain()
        await self.engine.outbox.wait_for_deliveries()

    @asynccontextmanager
    async def refused(
        self, error: type[errors.FabricError], detail: str | None = None, **facts: Any
    ) -> AsyncIterator[None]:
        """Assert that the block raises this error and changes nothing in the store."""
        async with self.unchanged():
            with pytest.raises(error) as caught:
                yield
        assert type(caught.value) is error
        if caught.value.kind in ABOUT_ONE_EXECUTION:
            assert caught.value.execution_id, "the error names its execution"
        assert detail is None or caught.value.detail == detail
        assert {name: getattr(caught.value, name) for name in facts} == facts


async def _outcome(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except errors.FabricError as refused:
        return refused


def lease_operations(engine: Engine, handle: Handle, now: int) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return the operations that require a live lease."""
    return {
        "renew": lambda: engine.renew(handle, lease_ttl_ms=LEASE_MS),
        "progress": lambda: engine.progress(handle, pct=1),
        "complete": lambda: engine.complete(handle, result=b"late"),
        "fail": lambda: engine.fail(handle, reason="late"),
        "delay": lambda: engine.delay(handle, delay_until=now + 1000),
        "wait_children": lambda: engine.wait_children(handle),
        "cancel": lambda: engine.cancel(handle, reason="late"),
    }


async def drain(subscription: Subscription[N]) -> list[N]:
    """Return the events that a subscription has now."""
    events: list[N] = []
    while (event := await subscription.next(timeout_s=0)) is not None:
        events.append(event)
    return events


def _of(executions: tuple[str, ...], events: list[Any]) -> list[Any]:
    return [event for event in events if not executions or event.execution_id in executions]
