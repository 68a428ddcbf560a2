"""Invariants of executions, which hold at every moment: checked against rows, ready queues and feeds.

    await check_invariants(engine)              # raises InvariantBroken with every violation

`I1` to `I11` are the invariants of the specification (execution.md 2.3); the others follow from how attempts, leases
and events belong together. Rows and feeds are read one after the other, so no operation may be in flight meanwhile.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from flowfabric.engine.engine import Engine
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Attempt, Execution, QueueKey
from flowfabric.model.gate import Fact, GateMemo, MailboxMessage
from flowfabric.model.states import (
    AttemptRecordState,
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
    public_state,
)
from flowfabric.rules.execution import grant as grant_rules
from flowfabric.rules.execution import lease
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.scheduling import queue
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Scan, Where

PAGE_SIZE = 1000

ENDED_STATES = frozenset(
    {
        AttemptRecordState.ENDED_SUCCESS,
        AttemptRecordState.ENDED_FAILURE,
        AttemptRecordState.ENDED_CANCELLED,
        AttemptRecordState.INTERRUPTED_RECLAIMED,
    }
)


class InvariantBroken(AssertionError):
    """An invariant does not hold; the message lists every violation."""


async def check_invariants(engine: Engine) -> None:
    """Check every row and event; raises `InvariantBroken`."""
    await InvariantChecker(engine).check()


class InvariantChecker:
    """Checks repeatedly, and also detects counters that decrease between two checks."""

    def __init__(self, engine: Engine) -> None:
        self._store: Store = engine.store
        self._rows: dict[str, Execution] = {}
        self._facts: dict[tuple[str, str], int] = {}  # their numbers at the last check
        self._events: dict[str, list[FeedEvent]] = defaultdict(list)
        self._position = 0
        self._complete_after = -1  # all events of executions created later were read

    async def check(self) -> None:
        """Raise `InvariantBroken` with every violation."""
        rows = {row.execution_id: row for row in await scan_all(self._store, Execution)}
        attempts: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in await scan_all(self._store, Attempt):
            attempts[attempt.execution_id].append(attempt)
        await self._read_feeds()
        for removed in self._rows.keys() - rows.keys():
            del self._events[removed]  # an execution that is created under this id again is another one
        broken = [
            f"{execution_id}: {violation}"
            for execution_id, row in rows.items()
            for violation in self._violations(row, attempts.pop(execution_id, []))
        ]
        broken += [f"{owner}: attempts without an execution" for owner in attempts]
        broken += [violation async for violation in _queue_violations(self._store, rows.values())]
        broken += await self._inbox_violations()
        self._rows = rows
        if broken:
            raise InvariantBroken("\n".join(broken))

    async def _inbox_violations(self) -> list[str]:
        """Return facts whose number fell since the last check, and messages that are both read and unread."""
        facts = {(fact.execution_id, fact.name): fact.number for fact in await scan_all(self._store, Fact)}
        broken = [
            f"{execution_id}: the number of the fact {name!r} fell from {before} to {facts[execution_id, name]}"
            for (execution_id, name), before in self._facts.items()
            if before > facts.get((execution_id, name), before)
        ]
        self._facts = facts
        unread = {(one.execution_id, one.number) for one in await scan_all(self._store, MailboxMessage)}
        read = {(one.execution_id, one.message_number) for one in await scan_all(self._store, GateMemo)}
        both = sorted((execution_id, number) for execution_id, number in unread & read if number is not None)
        broken += [f"{owner}: its message number {number} is both read and unread" for owner, number in both]
        return broken

    async def _read_feeds(self) -> None:
        new: dict[int, FeedEvent] = {}
        end, has_gap = self._position, False
        for topic in Topic:
            position = self._position
            while True:
                page = await self._store.feed(topic, position, PAGE_SIZE)
                has_gap = has_gap or page.has_gap
                new.update((event.position, event) for event in page.events)
                position = page.position
                if not page.events:
                    break
            end = max(end, position)
        if has_gap:  # retention has trimmed events of older executions
            kept_from = min((event.at for event in new.values()), default=await self._store.ping())
            self._complete_after = max(self._complete_after, kept_from)
        for position in sorted(new):
            self._events[new[position].event.execution_id].append(new[position])
        self._position = end

    def _violations(self, row: Execution, attempts: Sequence[Attempt]) -> Iterator[str]:
        events = [event for event in self._events[row.execution_id] if event.at >= row.created_at]
        yield from row_violations(row)
        yield from attempt_violations(row, attempts)
        if row.created_at > self._complete_after:
            yield from event_violations(row, events)
        before = self._rows.get(row.execution_id)
        if before is not None and before.created_at == row.created_at:
            yield from _change_violations(before, row)


def _change_violations(before: Execution, row: Execution) -> Iterator[str]:
    """Yield what must not have happened to an execution since the last check. Each life counts its own retries, and
    goes to the end of the queue once, when it begins."""
    lives = (before.life or 0, row.life or 0)
    counters = ["lease_epoch", "total_attempt_count", "replay_count", "lease_reclaim_count"]
    if lives[0] == lives[1]:
        counters.append("retry_count")
    for name in counters:
        if getattr(row, name) < getattr(before, name):
            yield f"I7 {name} went back from {getattr(before, name)} to {getattr(row, name)}"
    if lives[1] < lives[0]:
        yield f"life went back from {lives[0]} to {lives[1]}"
    was, now = (queue.queued_at(one, decode_terms(one.terms)) for one in (before, row))
    if now < was or (now != was and lives[0] == lives[1]):
        yield f"its place in the queue moved from {was} to {now} between lives {lives[0]} and {lives[1]}"


async def scan_all(store: Store, row: type[msgspec.Struct]) -> list[Any]:
    """Return all rows of a table, in key order."""
    key = TABLE[row].key
    rows: list[Any] = []
    after: tuple[Any, ...] | None = None
    while page := await store.scan(Scan(row, (), key, after, PAGE_SIZE)):
        rows += page
        after = tuple(getattr(page[-1], name) for name in key)
    return rows


def row_violations(row: Execution) -> Iterator[str]:
    """Yield violations in the execution's row alone."""
    terminal = row.lifecycle_phase is LifecyclePhase.TERMINAL
    active = row.lifecycle_phase is LifecyclePhase.ACTIVE
    leased = row.ownership_state is OwnershipState.LEASED
    if terminal:
        vector = (row.ownership_state, row.eligibility_state, row.blocking_reason)
        if vector != (OwnershipState.UNOWNED, EligibilityState.NOT_APPLICABLE, BlockingReason.NONE):
            yield f"I1 terminal with {vector}"
    if terminal != (row.terminal_outcome is not TerminalOutcome.NONE):
        yield f"I{1 if terminal else 2} {row.lifecycle_phase} with outcome {row.terminal_outcome}"
    if row.ownership_state is not OwnershipState.UNOWNED and not active:
        yield f"I3 {row.ownership_state} while {row.lifecycle_phase}"
    if active and row.eligibility_state is not EligibilityState.NOT_APPLICABLE:
        yield f"I4 active and {row.eligibility_state}"
    if leased and row.attempt_state is not AttemptState.RUNNING_ATTEMPT:
        yield f"I5 leased with {row.attempt_state}"
    if leased and None in (row.lease_id, row.attempt_id, row.attempt_index, row.worker_id, row.worker_instance_id):
        yield "I5 leased without a whole lease"
    if active and not leased and row.attempt_state is not AttemptState.ATTEMPT_INTERRUPTED:
        yield f"I6 active, not leased, with {row.attempt_state}"
    if row.public_state is not public_state(row.lifecycle_phase, row.eligibility_state, row.terminal_outcome):
        yield f"I10 public state {row.public_state} is not derived"
    if scheduling_indexes(row) != expected_indexes(row):
        yield f"I11 is in indexes {sorted(scheduling_indexes(row))}, expected {sorted(expected_indexes(row))}"
    yield from _detail_violations(row, terminal=terminal, active=active)


def _detail_violations(row: Execution, *, terminal: bool, active: bool) -> Iterator[str]:
    grant = grant_rules.stored_grant(row)
    if (grant.expires_at if grant else None) != row.granted_until:
        yield f"I9 a grant until {grant.expires_at if grant else None} in a slot until {row.granted_until}"
    if grant is not None and terminal:
        yield "I9 a terminal execution has a grant"
    if row.line not in (None, queue.queue_of(row), queue.takeover_queue(row)):
        yield f"is in the ready queue {row.line}, which is not its own"
    queued_at = queue.queued_at(row, decode_terms(row.terms))
    if row.life is None and queued_at != row.created_at:
        yield f"rank {row.rank} does not follow from priority and age"
    if row.life is not None and not row.created_at <= queued_at <= row.last_transition_at:
        yield f"rank {row.rank} in life {row.life} follows from no instant since its creation"
    if (row.completed_at is not None) != terminal:
        yield f"completed at {row.completed_at} while {row.lifecycle_phase}"
    if (row.started_at is not None) != (row.lease_epoch > 0):
        yield f"started at {row.started_at} with epoch {row.lease_epoch}"
    if row.deadline_at is not None and terminal:
        yield "a deadline is armed for a terminal execution"
    if row.attempt_timeout_at is not None and not active:
        yield "an attempt timeout is armed for an execution that is not active"
    expired = row.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE
    if (row.lease_expired_at is not None) != expired:
        yield f"lease expired at {row.lease_expired_at} while {row.ownership_state}"
    if (row.lease_revoked_at is not None) != (row.ownership_state is OwnershipState.LEASE_REVOKED):
        yield f"lease revoked at {row.lease_revoked_at} while {row.ownership_state}"
    if not row.created_at <= row.last_transition_at <= row.last_mutation_at:
        yield "times are out of order"


def scheduling_indexes(row: Execution) -> set[str]:
    """Return the scheduling indexes that contain the row, by its columns.

    An execution with budgets or quotas has one ready queue for claims and for takeovers.
    """
    takes_over = row.lifecycle_phase is LifecyclePhase.ACTIVE or queue.queue_of(row) != queue.takeover_queue(row)
    indexes = {
        "line": row.line is not None and not (row.line.guarded and takes_over),
        "takeover": row.line is not None and row.line.guarded and takes_over,
        "delayed": row.delay_until is not None,
        "lease": row.lease_expires_at is not None,
        "kept": row.purge_at is not None,
    }
    return {name for name, present in indexes.items() if present}


def expected_indexes(row: Execution) -> set[str]:
    """Return the indexes that belong to the row's state; an expired lease is in two of them."""
    match row.lifecycle_phase, row.ownership_state, row.eligibility_state:
        case LifecyclePhase.TERMINAL, _, _:
            return {"kept"}
        case LifecyclePhase.ACTIVE, OwnershipState.LEASED, _:
            return {"lease"}
        case LifecyclePhase.ACTIVE, OwnershipState.LEASE_EXPIRED_RECLAIMABLE, _:
            return {"lease", "takeover"}
        case LifecyclePhase.ACTIVE, OwnershipState.LEASE_REVOKED, _:
            return {"takeover"}
        case LifecyclePhase.RUNNABLE, _, EligibilityState.NOT_ELIGIBLE_UNTIL_TIME:
            return {"delayed"}
        case LifecyclePhase.RUNNABLE, _, EligibilityState.ELIGIBLE_NOW | EligibilityState.BLOCKED_BY_ROUTE:
            return {"line"}
        case _:
            return set()


def attempt_violations(row: Execution, ended: Sequence[Attempt]) -> Iterator[str]:
    """Yield violations in the attempts: the ended ones, and the open one in the execution's row."""
    is_open = lease.has_open_attempt(row) or lease.holds_successful_attempt(row)
    indexes = [attempt.attempt_index for attempt in ended] + [row.attempt_index] * is_open
    if indexes != list(range(row.total_attempt_count)):
        yield f"I8 attempts {indexes} of {row.total_attempt_count}"
    if row.attempt_index != (row.total_attempt_count - 1 if row.total_attempt_count else None):
        yield f"I8 current attempt {row.attempt_index} of {row.total_attempt_count}"
    epochs = [attempt.lease_epoch for attempt in ended] + [row.lease_epoch] * is_open
    if any(later <= earlier for earlier, later in pairwise(epochs)):
        yield f"I7 attempts under epochs {epochs}"
    for attempt in ended:
        if attempt.attempt_state not in ENDED_STATES or attempt.ended_at is None:
            yield f"attempt {attempt.attempt_index} ended as {attempt.attempt_state} at {attempt.ended_at}"


def event_violations(row: Execution, feed_events: Sequence[FeedEvent]) -> Iterator[str]:
    """Yield violations in the events of the execution since it was created."""
    events = [feed_event.event for feed_event in feed_events]
    acquired = [event.lease_epoch for event in events if event.lease in ("acquired", "reclaimed")]
    if acquired != list(range(1, row.lease_epoch + 1)):
        yield f"I7 leases acquired under epochs {acquired}, current epoch {row.lease_epoch}"
    ended = Counter(event.lease_epoch for event in events if event.lease == "released")
    ended.update(
        msgspec.json.decode(event.details or "{}").get("old_lease_epoch")
        for event in events
        if event.lease == "reclaimed"
    )
    over = row.lease_epoch + (row.lifecycle_phase is not LifecyclePhase.ACTIVE)
    if ended != Counter(range(1, over)):
        yield f"leases ended under epochs {list(ended.elements())}, current epoch {row.lease_epoch}"
    marks = Counter(event.lease_epoch for event in events if event.lease in ("expired", "revoked"))
    if any(count > 1 for count in marks.values()):
        yield f"a lease was interrupted twice: {dict(marks)}"
    outcomes = [event.outcome for event in events if event.outcome is not None]
    lives = row.replay_count + (row.lifecycle_phase is LifecyclePhase.TERMINAL)
    if len(outcomes) != lives:
        yield f"{len(outcomes)} completion events for {lives} ended lives"
    if row.lifecycle_phase is LifecyclePhase.TERMINAL and outcomes[-1:] != [row.terminal_outcome.value]:
        yield f"ended as {row.terminal_outcome}, the feed says {outcomes[-1:]}"
    if sum(event.operator == "replayed" for event in events) != row.replay_count:
        yield "the replay count differs from the replay events"


async def _queue_violations(store: Store, rows: Iterable[Execution]) -> AsyncIterator[str]:
    """Yield ready queues that do not hold exactly the rows that name them, ordered by position and id."""
    queued: dict[QueueKey, list[tuple[int, str]]] = defaultdict(list)
    for row in rows:
        if row.line is not None:
            queued[row.line].append((row.rank, row.execution_id))
    known = set(await store.queues())
    for key in queued.keys() - known:
        yield f"rows are in an unknown queue {key}"
    for key in known:
        expected = sorted(queued[key])
        scan = Scan(Execution, (Where("line", "=", key),), ("rank", "execution_id"), limit=len(expected) + 1)
        if [(row.rank, row.execution_id) for row in await store.scan(scan)] != expected:
            yield f"{key} does not hold its rows in order"
