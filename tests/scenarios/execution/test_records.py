"""The fields of the core record and the attempt record that each operation changes, and no others.

execution.md 2.4, 2.5 and 2.6. Time passes before every operation, so each instant shows which operation wrote it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.model.answers.execution import Claimed, Created
from flowfabric.model.states import PublicState
from flowfabric.rules.execution.policy import Terms
from flowfabric.rules.scheduling import queue
from tests.scenarios.env import DEFAULT_PARTITION, GRANT_MS, LEASE_MS, Env

GONE = "gone"
BUDGET, QUOTA = "44444444-4444-4444-8444-444444444444", "55555555-5555-4555-8555-555555555555"
A, L = "22222222-2222-4222-8222-222222222222", "33333333-3333-4333-8333-333333333333"
RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}}

UNOWNED = {
    "ownership_state": "unowned",
    **dict.fromkeys(("current_lease_id", "current_worker_id", "current_worker_instance_id"), GONE),
    **dict.fromkeys(("lease_expires_at", "lease_last_renewed_at", "lease_renewal_deadline"), GONE),
}
ENDED = {**UNOWNED, "lifecycle_phase": "terminal", "attempt_state": "attempt_terminal"}


class Record:
    """The core record of one execution and its changes since the last read."""

    def __init__(self, env: Env, e: str) -> None:
        self.env, self.e = env, e
        self.seen: dict[str, Any] = {}

    async def changes(self) -> dict[str, Any]:
        """Return the changed fields; `GONE` for removed ones."""
        before, self.seen = self.seen, await self.env.core(self.e)
        changed = {name: value for name, value in self.seen.items() if before.get(name, GONE) != value}
        return changed | dict.fromkeys(before.keys() - self.seen.keys(), GONE)

    def later(self) -> dict[str, int]:
        """Advance the clock; return the two instants that a transition writes."""
        now = self.env.clock.advance_ms(10)
        return {"last_transition_at": now, "last_mutation_at": now}

    def touched(self) -> dict[str, int]:
        """Advance the clock; return the instant that any other write sets."""
        return {"last_mutation_at": self.env.clock.advance_ms(10)}


def acquired(env: Env, *, lease: str = L, epoch: int = 1, worker: str = "wa") -> dict[str, Any]:
    """Return the lease fields that a claim writes."""
    return {
        "lifecycle_phase": "active",
        "ownership_state": "leased",
        "eligibility_state": "not_applicable",
        "blocking_reason": "none",
        "attempt_state": "running_attempt",
        "public_state": "active",
        "current_lease_id": lease,
        "current_lease_epoch": epoch,
        "current_worker_id": worker,
        "current_worker_instance_id": f"{worker}-1",
        "lease_acquired_at": env.now,
        "lease_last_renewed_at": env.now,
        "lease_expires_at": env.now + LEASE_MS,
        "lease_renewal_deadline": env.now + 20_000,
    }


async def create_running(env: Env, **options: Any) -> tuple[Record, Claimed]:
    """Create and claim an execution; return its record and claim."""
    e = await env.create(**options)
    claim = await env.grant_and_claim(e, "wa", lease_id=L, attempt_id=A)
    record = Record(env, e)
    await record.changes()
    return record, claim


async def test_a_new_core_record_contains_only_the_requested_fields(env: Env) -> None:
    e = env.engine.new_execution_id()
    policy = {
        "budget_ids": [BUDGET],
        "quota_policy_id": QUOTA,
        "routing_requirements": {"required_capabilities": ["b", "a"]},
        "timeout_policy": {"execution_deadline_ms": 5000, "attempt_timeout_ms": 7},
    }

    answer = await env.engine.create_execution(
        execution_id=e, namespace="n1", execution_kind="mail", creator_identity="me", priority=3, policy=policy
    )

    assert answer == Created(e, PublicState.WAITING)
    assert await env.core(e) == {
        "execution_id": e,
        "namespace": "n1",
        "lane_id": "default",
        "execution_kind": "mail",
        "partition_id": DEFAULT_PARTITION,
        "priority": 3,
        "creator_identity": "me",
        "lifecycle_phase": "runnable",
        "ownership_state": "unowned",
        "eligibility_state": "eligible_now",
        "blocking_reason": "waiting_for_worker",
        "terminal_outcome": "none",
        "attempt_state": "pending_first_attempt",
        "public_state": "waiting",
        "total_attempt_count": 0,
        "retry_count": 0,
        "replay_count": 0,
        "lease_reclaim_count": 0,
        "current_lease_epoch": 0,
        "current_lane": "default",
        "created_at": env.now,
        "last_transition_at": env.now,
        "last_mutation_at": env.now,
        "execution_deadline_at": env.now + 5000,
        "required_capabilities": "a,b",
        "budget_ids": BUDGET,
        "quota_policy_id": QUOTA,
    }


async def test_a_grant_changes_only_the_mutation_time_and_a_claim_starts_an_attempt(env: Env) -> None:
    e = await env.create()
    record = Record(env, e)
    await record.changes()

    touched = record.touched()
    await env.grant(e)
    assert await record.changes() == touched
    grant = await env.existing_grant(e)
    assert (grant.kind, grant.worker_id, grant.worker_instance_id, grant.lane_id) == ("claim", "wa", "wa-1", "default")
    assert (grant.created_at, grant.expires_at) == (env.now, env.now + GRANT_MS)

    moved = record.later()
    await env.claim(e, lease_id=L, attempt_id=A)
    assert await record.changes() == moved | acquired(env) | {
        "total_attempt_count": 1,
        "current_attempt_index": 0,
        "current_attempt_id": A,
        "started_at": env.now,
    }


async def test_the_lane_named_by_a_claim_is_recorded_and_has_no_effect(env: Env) -> None:
    e = await env.create()
    await env.grant(e)

    claim = await env.claim(e, lane_id="elsewhere")

    core = await env.core(e)
    assert (core["lane_id"], core["current_lane"]) == ("default", "elsewhere")
    assert claim.handle.fields.lane_id == "elsewhere"


async def test_renewals_progress_and_tags_change_only_their_own_fields(env: Env) -> None:
    record, claim = await create_running(env)

    touched = record.touched()
    await env.engine.renew(claim.handle, lease_ttl_ms=1000)
    assert await record.changes() == touched | {
        "lease_last_renewed_at": env.now,
        "lease_expires_at": env.now + 1000,
        "lease_renewal_deadline": env.now + 666,
    }
    touched = record.touched()
    await env.engine.progress(claim.handle, pct=7, message="m")
    progress = {"progress_pct": 7, "progress_message": "m", "progress_updated_at": env.now}
    assert await record.changes() == touched | progress
    touched = record.touched()
    await env.engine.progress(claim.handle)
    assert await record.changes() == touched | {"progress_updated_at": env.now}
    touched = record.touched()
    assert await env.engine.set_execution_tags(record.e, {"a.b": "c", "a.c": "d"}) == 2
    assert await record.changes() == touched
    touched = record.touched()
    await env.engine.set_execution_tag(record.e, "a.b", "e")
    assert await record.changes() == touched


@pytest.mark.parametrize(
    ("lease", "state", "detail"),
    [
        ("expired", "lease_expired_reclaimable", "lease expired, awaiting reclaim"),
        ("revoked", "lease_revoked", "lease revoked: bad node"),
    ],
)
async def test_a_lost_lease_is_marked_without_a_transition_and_reclaimed_with_one(
    env: Env, lease: str, state: str, detail: str
) -> None:
    record, claim = await create_running(env)
    e = record.e

    lost: dict[str, Any] = {
        "ownership_state": state,
        "blocking_reason": "waiting_for_worker",
        "blocking_detail": detail,
        "attempt_state": "attempt_interrupted",
    }
    if lease == "expired":
        env.clock.advance_ms(LEASE_MS)
        touched = record.touched()
        await env.engine.mark_lease_expired_if_due(e)
        lost |= {"lease_expired_at": env.now}
    else:
        touched = record.touched()
        await env.engine.revoke_lease(e, reason="bad node")
        lost |= {
            "lease_revoked_at": env.now,
            "lease_revoke_reason": "bad node",
            "lease_expires_at": GONE,
            "lease_renewal_deadline": GONE,
        }
    assert await record.changes() == touched | lost

    touched = record.touched()
    await env.issue_reclaim_grant(e, "wb")
    assert await record.changes() == touched

    moved = record.later()
    other = "99999999-9999-4999-8999-999999999999"
    claimed = await env.reclaim(e, "wb", lease_id=other, attempt_id=other)
    assert isinstance(claimed, Claimed)
    kept = {"lifecycle_phase", "public_state", "eligibility_state"}
    fresh = {
        name: value for name, value in acquired(env, lease=other, epoch=2, worker="wb").items() if name not in kept
    }
    markers = dict.fromkeys(("lease_expired_at", "lease_revoked_at", "lease_revoke_reason"), GONE)
    assert await record.changes() == moved | fresh | {
        "blocking_detail": GONE,
        "total_attempt_count": 2,
        "lease_reclaim_count": 1,
        "current_attempt_index": 1,
        "current_attempt_id": other,
        **{name: GONE for name in markers if name in lost},
    }
    first, second = await env.engine.attempt_history(e)
    assert (first.lease_id, first.lease_epoch, first.worker_id) == (claim.lease_id, 1, "wa")
    assert (second.lease_id, second.lease_epoch, second.worker_id) == (other, 2, "wb")
    assert (second.created_at, second.started_at, second.resumed_at) == (env.now, env.now, None)


async def test_fail_retry_and_complete_write_these_fields(env: Env) -> None:
    record, claim = await create_running(env, policy=RETRY)

    moved = record.later()
    await env.engine.fail(claim.handle, reason="flaky", category="odd")
    until = env.now + 500
    assert await record.changes() == moved | UNOWNED | {
        "lifecycle_phase": "runnable",
        "eligibility_state": "not_eligible_until_time",
        "blocking_reason": "waiting_for_retry_backoff",
        "blocking_detail": f"retry backoff until {until} (attempt 0 failed: flaky)",
        "attempt_state": "pending_retry_attempt",
        "public_state": "delayed",
        "retry_count": 1,
        "current_attempt_id": GONE,
        "delay_until": until,
        "failure_reason": "flaky",
        "pending_retry_reason": "flaky",
        "pending_previous_attempt_index": 0,
    }
    env.clock.advance_ms(500)
    moved = record.later()
    await env.engine.promote_delayed(record.e)
    assert await record.changes() == moved | {
        "eligibility_state": "eligible_now",
        "blocking_reason": "waiting_for_worker",
        "blocking_detail": GONE,
        "public_state": "waiting",
        "delay_until": GONE,
    }
    await env.grant(record.e)
    again = await env.claim(record.e)
    assert (await record.changes()).keys() >= {"pending_retry_reason", "pending_previous_attempt_index"}
    moved = record.later()
    await env.engine.complete(again.handle, result=b"r")
    assert await record.changes() == moved | ENDED | {
        "terminal_outcome": "success",
        "public_state": "completed",
        "completed_at": env.now,
    }


@pytest.mark.parametrize("wait", ["delay", "children"])
async def test_a_delayed_or_waiting_execution_resumes_the_same_attempt(env: Env, wait: str) -> None:
    record, claim = await create_running(env)
    moved = record.later()
    until = env.now + 40
    waiting: dict[str, Any]
    if wait == "delay":
        await env.engine.delay(claim.handle, delay_until=until)
        waiting = {
            "eligibility_state": "not_eligible_until_time",
            "blocking_reason": "waiting_for_delay",
            "blocking_detail": f"delayed until {until}",
            "public_state": "delayed",
            "delay_until": until,
        }
    else:
        await env.engine.wait_children(claim.handle)
        waiting = {
            "eligibility_state": "eligible_now",
            "blocking_reason": "waiting_for_worker",
            "public_state": "waiting",
        }
    assert await record.changes() == moved | UNOWNED | waiting | {
        "lifecycle_phase": "runnable",
        "attempt_state": "attempt_interrupted",
    }
    parked = await env.attempt(record.e, 0)
    reason = "worker_delay" if wait == "delay" else "waiting_children"
    assert (parked.attempt_state, parked.suspended_at, parked.suspension_id) == ("suspended", env.now, reason)
    if wait == "delay":
        env.clock.advance_ms(40)
        await env.engine.promote_delayed(record.e)
    await env.grant(record.e)
    await record.changes()
    moved = record.later()
    resumed = await env.engine.claim_resumed_execution(
        record.e, worker_id="wa", worker_instance_id="wa-1", lease_id=L, lease_ttl_ms=LEASE_MS
    )
    assert await record.changes() == moved | acquired(env, epoch=2)
    assert (resumed.attempt_id, resumed.attempt_index) == (A, 0)
    started = await env.attempt(record.e, 0)
    assert msgspec.structs.asdict(started) == msgspec.structs.asdict(parked) | {
        "attempt_state": "started",
        "lease_epoch": 2,
        "resumed_at": env.now,
        "suspended_at": None,
        "suspension_id": None,
    }


async def test_cancel_expire_and_replay_write_these_fields(env: Env) -> None:
    record, claim = await create_running(env)
    await env.engine.progress(claim.handle, pct=5, message="m")
    await record.changes()

    moved = record.later()
    await env.engine.cancel_execution(record.e, reason="stop", source="flow_cascade")
    assert await record.changes() == moved | ENDED | {
        "terminal_outcome": "cancelled",
        "public_state": "cancelled",
        "completed_at": env.now,
        "cancellation_reason": "stop",
        "cancelled_by": "flow_cascade",
    }
    moved = record.later()
    await env.engine.replay_execution(record.e)
    left = ("completed_at", "cancellation_reason", "cancelled_by")
    progress = ("progress_pct", "progress_message", "progress_updated_at")
    assert await record.changes() == moved | dict.fromkeys((*left, *progress), GONE) | {
        "lifecycle_phase": "runnable",
        "eligibility_state": "eligible_now",
        "blocking_reason": "waiting_for_worker",
        "terminal_outcome": "none",
        "attempt_state": "pending_replay_attempt",
        "public_state": "waiting",
        "replay_count": 1,
        "pending_previous_attempt_index": 0,
    }
    moved = record.later()
    await env.engine.expire_execution(record.e, "execution_deadline")
    assert await record.changes() == moved | {
        "lifecycle_phase": "terminal",
        "eligibility_state": "not_applicable",
        "blocking_reason": "none",
        "terminal_outcome": "expired",
        "attempt_state": "attempt_terminal",
        "public_state": "expired",
        "completed_at": env.now,
        "failure_reason": "execution_deadline",
        "pending_previous_attempt_index": GONE,
    }


async def test_a_blank_cancel_source_is_the_execution_itself(env: Env) -> None:
    e = await env.create()

    await env.engine.cancel_execution(e, source="")

    assert (await env.core(e))["cancelled_by"] == e


async def test_change_priority_block_and_unblock_write_these_fields(env: Env) -> None:
    e = await env.create(priority=5)
    record = Record(env, e)
    await record.changes()

    touched = record.touched()
    await env.engine.change_priority(e, 9)
    assert await record.changes() == touched | {"priority": 9}
    moved = record.later()
    await env.engine.block_execution_for_admission(e, reason="waiting_for_budget", detail="d")
    assert await record.changes() == moved | {
        "eligibility_state": "blocked_by_budget",
        "blocking_reason": "waiting_for_budget",
        "blocking_detail": "d",
        "public_state": "rate_limited",
    }
    moved = record.later()
    await env.engine.unblock_execution(e)
    assert await record.changes() == moved | {
        "eligibility_state": "eligible_now",
        "blocking_reason": "waiting_for_worker",
        "blocking_detail": GONE,
        "public_state": "waiting",
    }


async def test_the_queue_position_is_priority_then_age(env: Env) -> None:
    assert queue.position_offset(1, Terms()) == -(10**12)
    e = await env.create(priority=9000)

    assert (await env.row(e)).rank == -9000 * 10**12 + env.now
    env.clock.advance_ms(10)
    await env.engine.change_priority(e, 2)
    assert (await env.row(e)).rank == -2 * 10**12 + env.now - 10
