"""A store that checks the invariants of the specification (execution.md 2.3) on every row after each write."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from flowfabric.model.change import Change, RowTemplate
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Attempt, Execution
from flowfabric.model.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
    public_state,
)
from flowfabric.rules.execution import operator, views
from flowfabric.rules.scheduling import queue
from flowfabric.stores.catalog import TABLES
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseRef
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Due, Loaded, Read, Scan, Where
from flowfabric.stores.verdicts import Verdict

EVERYTHING = 1_000_000

BLOCKED_ON = {operator.ELIGIBILITY_OF_REASON[reason]: start for reason, start in queue.BLOCKED_ON_PREFIX.items()}


class CheckedStore:
    """Delegates to a store, counts the calls, and checks all rows after each write."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()
        self.after_due: Callable[[], Awaitable[Any]] | None = None
        self._epochs: dict[str, int] = {}
        self._checking = asyncio.Lock()  # one check at a time, or older rows would be compared with newer ones

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)

    def try_load_now(self, wants: Sequence[Read]) -> Loaded | None:
        return None  # every read is a load

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[Verdict]:
        self.calls["commit"] += 1
        assert all(change.id for change in changes), "every change has an id"
        verdicts = await self.store.commit(changes, hint)
        await self._check()
        return verdicts

    async def commit_and_claim(
        self, changes: Sequence[Change], hint: frozenset[str], request: ClaimRequest
    ) -> CommitAndClaimResult:
        self.calls["commit"] += 1
        result = await self.store.commit_and_claim(changes, hint, request)
        await self._check()
        return result

    async def claim_rows(self, request: ClaimRequest) -> ClaimedRows:
        self.calls["claim_rows"] += 1
        claimed = await self.store.claim_rows(request)
        await self._check()
        return claimed

    async def renew(self, leases: Sequence[LeaseRef], template: RowTemplate) -> list[int | None]:
        self.calls["renew"] += 1
        renewed = await self.store.renew(leases, template)
        await self._check()
        return renewed

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        """Return the due rows; `after_due` lets a test act between this scan and the writes that follow."""
        self.calls["due"] += 1
        due = await self.store.due(row, column, limit=limit, where=where)
        if where:  # the bound may disregard the conditions, so it does here
            every = await self.store.due(row, column, limit=0)
            bounds = [at for at in (due.next_at, every.next_at) if at is not None and at > due.now]
            due = msgspec.structs.replace(due, next_at=min(bounds, default=None))
        if self.after_due is not None:
            act, self.after_due = self.after_due, None
            await act()
        return due

    async def _check(self) -> None:
        async with self._checking:
            await self._compare()

    async def _compare(self) -> None:
        rows, attempts = await self._snapshot()
        ended: dict[str, list[Attempt]] = {}
        for attempt in attempts:
            ended.setdefault(attempt.execution_id, []).append(attempt)
        for row in rows:
            before = self._epochs.get(row.execution_id, row.lease_epoch)
            assert row.lease_epoch - before in (0, 1), "I7: an epoch grows by one per lease"
            assert_invariants(row, ended.get(row.execution_id, []))
        self._epochs = {row.execution_id: row.lease_epoch for row in rows}  # a purged id may be created again

    async def _snapshot(self) -> tuple[list[Execution], list[Attempt]]:
        """Return executions and attempts of one moment, although others may write between two scans."""
        rows: list[Execution] = await self.store.scan(Scan(Execution, limit=EVERYTHING))
        while True:
            attempts: list[Attempt] = await self.store.scan(Scan(Attempt, limit=EVERYTHING))
            again: list[Execution] = await self.store.scan(Scan(Execution, limit=EVERYTHING))
            if [row.revision for row in again] == [row.revision for row in rows]:
                return again, attempts
            rows = again


async def dump(store: Store) -> dict[str, list[Any]]:
    """Return every row and every event of a store."""
    rows_by_table: dict[str, list[Any]] = {}
    for table in TABLES:
        rows_by_table[table.name] = await store.scan(Scan(table.row, limit=EVERYTHING))
    events: dict[int, FeedEvent] = {}  # by position: an event may belong to several feeds
    for topic in Topic:
        events |= {event.position: event for event in (await store.feed(topic, 0, EVERYTHING)).events}
    rows_by_table["events"] = [events[position] for position in sorted(events)]
    rows_by_table["queues"] = list(await store.queues())
    return rows_by_table


def assert_invariants(row: Execution, ended: list[Attempt]) -> None:
    """Assert I1 to I11 for one execution."""
    derived = public_state(row.lifecycle_phase, row.eligibility_state, row.terminal_outcome)
    assert row.public_state is derived, "I10: public_state is derived"
    if row.lifecycle_phase is LifecyclePhase.TERMINAL:
        _assert_terminal(row)
    else:
        assert row.terminal_outcome is TerminalOutcome.NONE, "I2"
        assert row.purge_at is row.completed_at is None
    if row.ownership_state is not OwnershipState.UNOWNED:
        assert row.lifecycle_phase is LifecyclePhase.ACTIVE, "I3"
    if row.lifecycle_phase is LifecyclePhase.ACTIVE:
        _assert_active(row)
    if row.lifecycle_phase is LifecyclePhase.RUNNABLE:
        _assert_runnable(row)
    attempts = views.attempt_views(row, ended)
    assert [attempt.attempt_index for attempt in attempts] == list(range(row.total_attempt_count)), "I8"
    assert (row.grant is None) == (row.granted_until is None), "I9: one slot"


def _assert_terminal(row: Execution) -> None:
    assert row.ownership_state is OwnershipState.UNOWNED, "I1"
    assert row.eligibility_state is EligibilityState.NOT_APPLICABLE, "I1"
    assert row.blocking_reason is BlockingReason.NONE, "I1"
    assert row.terminal_outcome is not TerminalOutcome.NONE, "I1"
    assert row.completed_at is not None
    assert row.purge_at is not None
    instants = {row.delay_until, row.lease_expires_at, row.deadline_at, row.attempt_timeout_at}
    assert row.line is None, "I11"
    assert instants == {None}, "I11"
    assert row.grant is None, "6.2: a terminal transition discards the grant"


def _assert_active(row: Execution) -> None:
    assert row.eligibility_state is EligibilityState.NOT_APPLICABLE, "I4"
    assert row.delay_until is None, "I11"
    if row.ownership_state is OwnershipState.LEASED:
        assert row.attempt_state is AttemptState.RUNNING_ATTEMPT, "I5"
        assert None not in (row.lease_id, row.lease_expires_at, row.attempt_id, row.worker_id), "I5"
        assert row.line is None, "I11"
        assert row.lease_expired_at is row.lease_revoked_at is None
    else:
        assert row.attempt_state is AttemptState.ATTEMPT_INTERRUPTED, "I6"
        assert row.line == queue.takeover_queue(row), "I11: it is in the takeover queue"
        revoked = row.ownership_state is OwnershipState.LEASE_REVOKED
        assert revoked == (row.lease_expires_at is None) == (row.lease_revoked_at is not None)
        assert revoked == (row.lease_expired_at is None)


def _assert_runnable(row: Execution) -> None:
    is_queued = row.eligibility_state in (EligibilityState.ELIGIBLE_NOW, EligibilityState.BLOCKED_BY_ROUTE)
    assert row.line == (queue.queue_of(row) if is_queued else None), "I11: only claimable executions are queued"
    blocked_on = BLOCKED_ON.get(row.eligibility_state)
    assert blocked_on is None or (row.blocked_on or "").startswith(blocked_on)
    assert (row.blocked_at is not None) == (row.eligibility_state in operator.ELIGIBILITY_OF_REASON.values())
    assert (row.blocked_on is not None) == (blocked_on is not None)
    delayed = row.eligibility_state is EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
    assert delayed == (row.delay_until is not None), "I11"
    assert row.lease_expires_at is row.attempt_timeout_at is None, "I11"
    assert row.next_type is queue.NEXT_ATTEMPT_TYPE.get(row.attempt_state)
