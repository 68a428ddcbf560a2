"""A store claim is the batched form of a rule: it makes of every row what the rule makes of it."""

from __future__ import annotations

import random

import msgspec
import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.runtime.after_commit import apply_patch
from flowfabric.ids import SeededMinter
from flowfabric.model.change import Change, Insert, Patch, absent
from flowfabric.model.event import Event, Topic
from flowfabric.model.execution import Execution, Grant, Lineage, Payload
from flowfabric.model.states import (
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import claim, lease
from flowfabric.rules.execution.lease import LeaseHolder
from flowfabric.rules.execution.policy import Terms, encode_terms
from flowfabric.rules.scheduling import queue
from flowfabric.stores.claims import ClaimRequest, LeaseIds
from flowfabric.stores.port import Store

ROWS = 60
WAITING = (
    AttemptState.PENDING_FIRST_ATTEMPT,
    AttemptState.PENDING_RETRY_ATTEMPT,
    AttemptState.PENDING_REPLAY_ATTEMPT,
    AttemptState.ATTEMPT_INTERRUPTED,
)


def waiting_row(chance: random.Random, minter: SeededMinter, now: int) -> Execution:
    """Return any queued row: claimed before or not, with and without tags, limits and grants."""
    state = chance.choice(WAITING)
    began = state is not AttemptState.PENDING_FIRST_ATTEMPT
    terms = Terms(attempt_timeout_ms=chance.choice((None, 700)), fairness_key=chance.choice((None, "tenant")))
    limit = chance.choice((None, 1, 300)) if state is AttemptState.ATTEMPT_INTERRUPTED else terms.attempt_timeout_ms
    required = chance.choice((None, "gpu"))
    created_at, priority = now - chance.randrange(5000), chance.choice((0, 0, 7))
    granted_until = chance.choice((None, None, now, now + 1, now + 60_000))
    grant = Grant("claim", "wx", "wx-1", "mail", 0, granted_until or 0)
    count = chance.randrange(1, 4) if began else 0
    is_route_blocked = chance.random() < 0.2
    return Execution(
        execution_id=f"{{fp:3}}:{minter.uuid()}",
        partition=3,
        namespace=chance.choice(("n1", "n2")),
        lane_id="mail",
        priority=priority,
        created_at=created_at,
        last_transition_at=now - 3,
        last_mutation_at=now - 2,
        lifecycle_phase=LifecyclePhase.RUNNABLE,
        ownership_state=OwnershipState.UNOWNED,
        eligibility_state=(EligibilityState.BLOCKED_BY_ROUTE if is_route_blocked else EligibilityState.ELIGIBLE_NOW),
        blocking_reason=(
            BlockingReason.WAITING_FOR_CAPABLE_WORKER if is_route_blocked else BlockingReason.WAITING_FOR_WORKER
        ),
        terminal_outcome=TerminalOutcome.NONE,
        attempt_state=state,
        public_state=PublicState.WAITING,
        tags=chance.choice((None, '{"cairn.instance_id":"i1"}')),
        flow_id=chance.choice((None, minter.uuid())),
        required_capabilities=required,
        terms=encode_terms(terms),
        blocking_text="nobody" if is_route_blocked else None,
        total_attempt_count=count,
        retry_count=chance.randrange(3),
        started_at=now - 900 if began else None,
        attempt_index=count - 1 if began else None,
        attempt_id=minter.uuid() if began and state is not AttemptState.PENDING_RETRY_ATTEMPT else None,
        attempt_type=AttemptType.INITIAL if began else None,
        attempt_started_at=now - 900 if began else None,
        attempt_suspended_at=now - 500 if state is AttemptState.ATTEMPT_INTERRUPTED else None,
        attempt_suspension="worker_delay" if state is AttemptState.ATTEMPT_INTERRUPTED else None,
        attempt_resumed_at=chance.choice((None, now - 600)) if began else None,
        lineage=lease.encode_lineage(Lineage(previous_attempt_index=0, retry_reason="flaky")) if began else None,
        lease_epoch=count + chance.randrange(2) if began else 0,
        lease_id=minter.uuid() if began else None,
        worker_id="old" if began else None,
        worker_instance_id="old-1" if began else None,
        current_lane="elsewhere" if began else "mail",
        lease_acquired_at=now - 900 if began else None,
        lease_renewed_at=now - 700 if began else None,
        deadline_at=chance.choice((None, now + 9)),
        line=queue.queue_for("mail", required, terms),
        rank=created_at + queue.position_offset(priority, terms),
        next_type=queue.NEXT_ATTEMPT_TYPE.get(state),
        next_timeout_ms=limit,
        granted_until=granted_until,
        grant=msgspec.json.encode(grant).decode() if granted_until else None,
        failure_reason=chance.choice((None, "flaky")),
        progress_pct=chance.choice((None, 40)),
    )


def by_the_rule(row: Execution, request: ClaimRequest, ids: LeaseIds, now: int) -> tuple[Execution, Event]:
    """Return the row and the event that the rule makes of it."""
    holder = LeaseHolder(
        request.worker_id, request.worker_instance_id, "", ids.lease_id, ids.attempt_id, request.lease_ttl_ms
    )
    decision: Decision[lease.AcquiredLease]
    if row.attempt_state is AttemptState.ATTEMPT_INTERRUPTED:
        decision = claim.continue_attempt(row, holder, "claim_resumed", None)
    else:
        decision = claim.begin_attempt(row, holder)
    assert decision.change is not None
    (patch,) = decision.change.writes
    (event,) = decision.change.events
    assert isinstance(patch, Patch)
    return apply_patch(row, patch.fields, ids.revision, now), event


@pytest.mark.parametrize("seed", range(4))
async def test_a_store_claim_writes_the_same_row_as_the_rule(store: Store, clock: ManualClock, seed: int) -> None:
    chance, minter = random.Random(seed), SeededMinter(seed)
    rows = [waiting_row(chance, minter, clock.now) for _ in range(ROWS)]
    payloads = [Payload(row.execution_id, "task", "me", b"\x00" * number) for number, row in enumerate(rows)]
    for row, payload in zip(rows, payloads, strict=True):
        change = Change((absent(Execution, row.execution_id),), (Insert(row), Insert(payload)), id=minter.change_id())
        assert await store.commit([change]) == [clock.now]
    clock.advance_ms(1)
    free = [row for row in rows if row.granted_until is None or row.granted_until <= clock.now]
    expected = sorted(free, key=lambda row: (row.rank, row.execution_id))
    lines = tuple(sorted({row.line for row in rows if row.line is not None}))
    before = await store.feed_end()

    taken: list[tuple[Execution, Payload]] = []
    emitted: list[Event] = []
    while len(taken) < len(expected):
        clock.advance_ms(1)
        lease_ids = tuple(LeaseIds(minter.uuid(), minter.uuid(), minter.change_id()) for _ in range(7))
        request = ClaimRequest(lines, lease_ids, "wa", "wa-1", 1000, lease.CLAIM)
        batch = expected[len(taken) : len(taken) + len(lease_ids)]
        ruled = [by_the_rule(row, request, ids, clock.now) for row, ids in zip(batch, lease_ids, strict=False)]
        found = await store.claim_rows(request)
        assert [row for row, _ in found.rows] == [row for row, _ in ruled]
        taken += found.rows
        emitted += [event for _, event in ruled]

    by_id = {payload.execution_id: payload for payload in payloads}
    assert all(payload == by_id[row.execution_id] for row, payload in taken)
    assert [one.event for one in (await store.feed(Topic.LEASE, before, 1000)).events] == emitted
