"""A store under watch: after every write the invariants of the specification (execution.md 2.3) hold for every row."""

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

EVERYTHING = 1_000_000

BLOCKED_ON = {operator.ELIGIBILITY_OF_REASON[reason]: start for reason, start in queue.BLOCKED_ON_PREFIX.items()}


class Watched:
    """Hands everything on to a store, counts what is asked of it, and looks at the rows after each write."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()
        self.after_due: Callable[[], Awaitable[Any]] | None = None
        self._epochs: dict[str, int] = {}
        self._looking = asyncio.Lock()  # one look after the other, or an older one would be compared with a newer

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)

    def try_load_now(self, wants: Sequence[Read]) -> Loaded | None:
        return None  # every look is a load

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        self.calls["commit"] += 1
        assert all(change.id for change in changes), "what a change writes bears its mark"
        verdicts = await self.store.commit(changes, hint)
        await self._look()
        return verdicts

    async def commit_and_claim(
        self, changes: Sequence[Change], hint: frozenset[str], take: ClaimRequest
    ) -> CommitAndClaimResult:
        self.calls["commit"] += 1
        handed = await self.store.commit_and_claim(changes, hint, take)
        await self._look()
        return handed

    async def claim_rows(self, take: ClaimRequest) -> ClaimedRows:
        self.calls["take"] += 1
        taken = await self.store.claim_rows(take)
        await self._look()
        return taken

    async def renew(self, leases: Sequence[LeaseRef], template: RowTemplate) -> list[int | None]:
        self.calls["renew"] += 1
        ends = await self.store.renew(leases, template)
        await self._look()
        return ends

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        """What is due; `after_due` lets a test act between this look and whatever is done about it."""
        self.calls["due"] += 1
        due = await self.store.due(row, column, limit=limit, where=where)
        if self.after_due is not None:
            act, self.after_due = self.after_due, None
            await act()
        return due

    async def _look(self) -> None:
        async with self._looking:
            await self._compare()

    async def _compare(self) -> None:
        rows, attempts = await self._still()
        ended: dict[str, list[Attempt]] = {}
        for attempt in attempts:
            ended.setdefault(attempt.execution_id, []).append(attempt)
        for row in rows:
            before = self._epochs.get(row.execution_id, row.lease_epoch)
            assert row.lease_epoch - before in (0, 1), "I7: an epoch grows by one per lease"
            assert_invariants(row, ended.get(row.execution_id, []))
        self._epochs = {row.execution_id: row.lease_epoch for row in rows}  # one that was purged may come again

    async def _still(self) -> tuple[list[Execution], list[Attempt]]:
        """Sheets and attempts of one moment: others may write between two looks."""
        rows: list[Execution] = await self.store.scan(Scan(Execution, limit=EVERYTHING))
        while True:
            attempts: list[Attempt] = await self.store.scan(Scan(Attempt, limit=EVERYTHING))
            again: list[Execution] = await self.store.scan(Scan(Execution, limit=EVERYTHING))
            if [row.revision for row in again] == [row.revision for row in rows]:
                return again, attempts
            rows = again


async def dump(store: Store) -> dict[str, list[Any]]:
    """Every row and every event that a store keeps."""
    kept: dict[str, list[Any]] = {}
    for table in TABLES:
        kept[table.name] = await store.scan(Scan(table.row, limit=EVERYTHING))
    events: dict[int, FeedEvent] = {}  # by position: one event may belong to several feeds
    for topic in Topic:
        events |= {told.position: told for told in (await store.feed(topic, 0, EVERYTHING)).events}
    kept["events"] = [events[position] for position in sorted(events)]
    kept["lines"] = list(await store.queues())
    return kept


def assert_invariants(row: Execution, ended: list[Attempt]) -> None:
    """I1 to I11, as far as one execution tells."""
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
        assert row.line == queue.takeover_queue(row), "I11: it waits to be taken over"
        revoked = row.ownership_state is OwnershipState.LEASE_REVOKED
        assert revoked == (row.lease_expires_at is None) == (row.lease_revoked_at is not None)
        assert revoked == (row.lease_expired_at is None)


def _assert_runnable(row: Execution) -> None:
    in_line = row.eligibility_state in (EligibilityState.ELIGIBLE_NOW, EligibilityState.BLOCKED_BY_ROUTE)
    assert row.line == (queue.queue_of(row) if in_line else None), "I11: only what may be claimed stands in line"
    waits_for = BLOCKED_ON.get(row.eligibility_state)
    assert waits_for is None or (row.blocked_on or "").startswith(waits_for)
    assert (row.blocked_at is not None) == (row.eligibility_state in operator.ELIGIBILITY_OF_REASON.values())
    assert (row.blocked_on is not None) == (waits_for is not None)
    delayed = row.eligibility_state is EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
    assert delayed == (row.delay_until is not None), "I11"
    assert row.lease_expires_at is row.attempt_timeout_at is None, "I11"
    assert row.next_type is queue.NEXT_ATTEMPT_TYPE.get(row.attempt_state)
