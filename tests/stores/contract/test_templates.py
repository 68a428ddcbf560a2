"""Templates: a store expands them from the roots, with the same rows as the full change."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.clock import ManualClock
from flowfabric.model.change import Change, Guard, Insert, LeaseCheck, LeaseRequirement, Upsert
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Execution, Result
from flowfabric.model.states import LifecyclePhase
from flowfabric.rules.execution.cancel import QUORUM_SATISFIED, cancel
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.execution.lease import CLAIMED_FIELDS
from flowfabric.rules.execution.transitions import success_template
from flowfabric.stores.port import Store
from tests.stores.sample_rows import change, claim_request, event, insert_queued, one, queued

TAGS = '{"it\'s":"a \\"tag\\""}'


async def claimed(store: Store, *names: str, **fields: Any) -> list[Execution]:
    await insert_queued(store, *(queued(name, rank, **fields) for rank, name in enumerate(names)))
    return [
        row for row, _ in (await store.claim_rows(claim_request(len(names), prefix=names[0], **CLAIMED_FIELDS))).rows
    ]


def finished(row: Execution, revision: int | None = None) -> Change:
    held = LeaseCheck(LeaseRequirement.LIVE, row.lease_id or "", row.lease_epoch)
    seen = Guard(Execution, (row.execution_id,), revision or row.revision, held)
    result = Upsert(Result(row.execution_id, b"R"))
    return msgspec.structs.replace(change(result, guards=[seen]), template=success_template(row))


async def leases_since(store: Store, after: int) -> list[FeedEvent]:
    return (await store.feed(Topic.COMPLETION, after, 100)).events


async def test_a_template_finishes_its_root_and_emits_an_event(store: Store, clock: ManualClock) -> None:
    (row,) = await claimed(store, "a", tags=TAGS, lineage='{"retry_reason":"it\'s"}', next_timeout_ms=50)
    clock.advance_ms(5)
    made = finished(row)
    assert made.template is not None

    assert await store.commit([made]) == [clock.now]

    ended = await one(store, Execution, "a")
    assert (ended.lifecycle_phase, ended.revision) == (LifecyclePhase.TERMINAL, made.id)
    assert (ended.completed_at, ended.lease_expires_at, ended.attempt_timeout_at) == (clock.now, None, None)
    assert (ended.attempt_id, ended.lease_id, ended.lineage) == (row.attempt_id, row.lease_id, row.lineage)
    assert (await one(store, Result, "a")).payload == b"R"
    (fed,) = await leases_since(store, 0)
    assert (fed.at, fed.event.tags, fed.event.lease_id, fed.event.outcome) == (clock.now, TAGS, row.lease_id, "success")


async def test_a_template_finishes_a_root_that_was_never_claimed(store: Store, clock: ManualClock) -> None:
    await insert_queued(store, queued("a"), queued("b"))
    row = await one(store, Execution, "a")
    cancelled = cancel(row, Fence(), "operator_override", QUORUM_SATISFIED).change
    assert cancelled is not None
    assert cancelled.template is not None

    assert await store.commit([msgspec.structs.replace(cancelled, id=77)]) == [clock.now]

    ended = await one(store, Execution, "a")
    assert (ended.lifecycle_phase, ended.line, ended.revision) == (LifecyclePhase.TERMINAL, None, 77)
    assert (ended.cancellation_reason, ended.cancelled_by) == (QUORUM_SATISFIED, "operator_override")
    (fed,) = await leases_since(store, 0)
    assert (fed.event.outcome, fed.event.lease_id, fed.event.details) == (
        "cancelled",
        None,
        '{"revoked_by":"operator"}',
    )
    assert [row.execution_id for row, _ in (await store.claim_rows(claim_request(2, **CLAIMED_FIELDS))).rows] == ["b"]


async def test_templates_share_a_batch_with_refused_and_with_ordinary_changes(store: Store) -> None:
    first, stale, second = await claimed(store, "a", "b", "c")
    (timed,) = await claimed(store, "d", next_timeout_ms=50)
    other = change(Insert(queued("x")), events=[event("x", outcome="failed"), event("x", outcome="skipped")])
    batch = [finished(first), finished(stale, revision=1), other, finished(timed), finished(second)]
    assert len({made.template for made in batch if made.template is not None}) == 2

    verdicts = await store.commit(batch)

    assert [verdict is not None for verdict in verdicts] == [True, False, True, True, True]
    assert await one(store, Execution, "b") == stale
    assert await one(store, Result, "b") is None
    fed = await leases_since(store, 0)
    assert sorted(one.event.execution_id for one in fed) == ["a", "c", "d", "x", "x"]
    assert len({one.position for one in fed}) == 5


async def test_a_template_with_an_expired_lease_is_refused(store: Store, clock: ManualClock) -> None:
    (row,) = await claimed(store, "a")
    clock.advance_ms(row.lease_expires_at - clock.now)  # type: ignore[operator]
    assert await store.commit([finished(row)]) == [None]
    assert await one(store, Execution, "a") == row
    assert await leases_since(store, 0) == []
