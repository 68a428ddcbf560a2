"""AfterCommit: the hooks that run after a commit.

A process caches the rows it has leased and the queues it knows, wakes its own tasks that wait for the written rows, and
calls its write listeners. Other processes are notified with the commit (`CommitQueue`), or from here if that
notification may be lost. Correctness does not depend on any of this: a process that misses a notification polls within
an interval.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from flowfabric.clock import StoreClockEstimate
from flowfabric.engine.metrics.completions import CompletionMetrics
from flowfabric.engine.metrics.recorder import Metrics
from flowfabric.engine.runtime.commit_queue import CommitQueue
from flowfabric.engine.runtime.wakeups import AWAITED_ROWS, Wakeups, due_topic, lane_topic, queues_written, topics_of
from flowfabric.model.change import Change, Delete, Insert, Patch, RowTemplate
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.instant import FromNow
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.rules.execution.transitions import affects_others
from flowfabric.stores.port import Store

RowClass = type[msgspec.Struct]
Rows = list[list[Any]]
WriteListener = Callable[[Change, Rows], None]  # gets a committed change and the rows it was decided on

MAX_CACHED_LEASES = 20_000
NOTIFY_DELAY_S = 0.02  # for notifications that are not urgent
MAX_NOTIFIED_CHANGES = 10_000  # changes that are not published yet; forgetting one costs a useless poll
NOTHING: dict[str, int] = {}

# Hot path: a module constant is found faster than an enum member.
_ACTIVE, _LEASED = LifecyclePhase.ACTIVE, OwnershipState.LEASED


class AfterCommit:
    """Caches, wakeups and listeners that follow the commits of one process."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.estimate = StoreClockEstimate(store.clock)
        self.wakeups = Wakeups()
        self.commit_queue = CommitQueue(store, self._wake_claims)
        self.metrics = Metrics()
        self.completion_metrics = CompletionMetrics(self.metrics)
        self.next_sweep_at: dict[RowClass, dict[str, int]] = {}  # by row and column: when its sweep runs next
        self.write_listeners: dict[RowClass, list[WriteListener]] = {}
        self._lease_cache: dict[str, Execution] = {}
        self._queues: dict[str, set[QueueKey]] = {}
        self._notifying_soon = False
        self._delayed_notify: asyncio.TimerHandle | None = None
        self._guarded_lanes: set[str] = set()  # where this process enqueued work that needs a guarded claim
        self._takeover_lanes: set[str] = set()  # where this process enqueued work whose lease has expired
        self._namespace_filtered_lanes: set[str] = set()  # where this process claimed for some namespaces only

    def on_write(self, listener: WriteListener, *rows: RowClass) -> None:
        """Call a listener for every change of this process that writes one of these kinds of rows."""
        for row in rows:
            self.write_listeners.setdefault(row, []).append(listener)

    def publish_commit(self, change: Change, rows: Rows, committed_at: int) -> None:
        """Update the caches, wake waiting tasks and call the listeners for a committed change."""
        if self._is_unobserved(change):
            self.estimate.update(committed_at)
        else:
            self.publish_commits(((change, rows),), committed_at)

    def publish_commits(self, written: Sequence[tuple[Change, Rows]], committed_at: int) -> None:
        """Do the same for changes that were committed together."""
        self.estimate.update(committed_at)
        for change, rows in written:
            self._update_caches(change, rows, committed_at)
        if completed := [(change, first_row(rows)) for change, rows in written if change.template is not None]:
            self._record_templates(completed, committed_at)
        self._wake_waiters([change for change, _ in written])
        for change, rows in written:
            for listener in self._listeners_of(change):
                listener(change, rows)

    def _is_unobserved(self, change: Change) -> bool:
        """True for a change that only inserts a row for which nobody waits, as the record of a step does."""
        if change.events or change.template is not None or change.queues or self.commit_queue.in_doubt_changes:
            return False
        if len(change.writes) != 1 or type(insert := change.writes[0]) is not Insert:
            return False
        row = type(insert.row)
        return not (row in AWAITED_ROWS or row in self.next_sweep_at or row in self.write_listeners)

    def _update_caches(self, change: Change, rows: Rows, committed_at: int) -> None:
        """Update caches and metrics from the writes and events of a change, its template aside."""
        if self.next_sweep_at:
            self._wake_earlier_sweeps(change, committed_at)
        for queue in change.queues:
            self.add_queue(queue)
        for queue in queues_written(change):
            self.add_queue(queue)
            if queue.guarded:
                self._guarded_lanes.add(queue.lane_id)
        for write in change.writes:  # hot path: types are compared, not matched
            if type(write) is Patch and write.row is Execution:
                self._update_lease_cache(write.key[0], write.fields, change.id, rows, committed_at)
        for event in change.events:
            if event.outcome is not None or event.lease == "released":
                self.completion_metrics.record(event, change, execution_among(event.execution_id, rows), committed_at)

    def _wake_waiters(self, changes: Sequence[Change]) -> None:
        """Wake the tasks of this process that wait for these changes."""
        self._notify_after_lost_reply(changes)
        commits = self.commit_queue
        if not self.wakeups and not commits.notified_changes:
            return
        topics = topics_of(changes)
        if notified := {change.id for change in changes} & commits.notified_changes:
            # Their lanes were woken when they were sent. Lanes of the other changes are woken now.
            commits.notified_changes -= notified
            lanes = {is_notified: set[str]() for is_notified in (True, False)}
            for change in changes:
                lanes[change.id in notified].update(lane_topic(queue.lane_id) for queue in queues_written(change))
            topics -= lanes[True] - lanes[False]
        self.wakeups.notify(topics)

    def _notify_after_lost_reply(self, changes: Iterable[Change]) -> None:
        """Notify other processes of changes whose commits lost their reply, and perhaps their notification."""
        in_doubt = self.commit_queue.in_doubt_changes
        for change in changes if in_doubt else ():
            if change.id in in_doubt:
                in_doubt.discard(change.id)
                self.notify(topics_of((change,)))

    def _listeners_of(self, change: Change) -> Iterable[WriteListener]:
        """Return the listeners of the rows that a change writes, each once."""
        by_row = self.write_listeners
        if not by_row:
            return ()
        kinds: dict[Any, None] = {} if change.template is None else {change.template.row: None}
        for write in change.writes:
            kinds[write.row if type(write) is Patch or type(write) is Delete else type(write.row)] = None
        if not (groups := [by_row[kind] for kind in kinds if kind in by_row]):
            return ()
        return tuple(groups[0]) if len(groups) == 1 else dict.fromkeys(one for group in groups for one in group)

    def publish_completions(self, completions: Sequence[tuple[Change, Execution]], committed_at: int) -> None:
        """Do the same for completions that consist of a template only."""
        if Execution in self.write_listeners:
            self.publish_commits([(change, [[row]]) for change, row in completions], committed_at)
            return
        self.estimate.update(committed_at)
        self._record_templates(completions, committed_at)
        self._notify_after_lost_reply(change for change, _ in completions)
        self.wakeups.notify_completions([row.execution_id for _, row in completions])

    def _record_templates(self, completions: Sequence[tuple[Change, Execution]], committed_at: int) -> None:
        cached, by_template = self._lease_cache, defaultdict[RowTemplate, list[Execution]](list)
        for change, row in completions:
            assert change.template is not None
            cached.pop(row.execution_id, None)
            by_template[change.template].append(row)
        for template, rows in by_template.items():
            self.completion_metrics.record_many(rows, template.event["outcome"], committed_at)
        for column, planned_at in self.next_sweep_at.get(Execution, NOTHING).items():
            for template in by_template:
                if isinstance(instant := template.fields.get(column), FromNow):
                    self._wake_sweep_before(Execution, column, committed_at + instant.offset, planned_at)

    def _wake_claims(self, changes: Sequence[Change]) -> None:
        """Wake the claims of this process that wait for lanes where these changes enqueue work.

        If the store executes operations in order, the claims are sent after the changes and mostly join the same
        transaction; otherwise the changes have just been written. A claim that reads the queues first may find nothing
        yet, so it is woken when the changes are published.
        """
        if not self.wakeups:
            return
        if len(self.commit_queue.notified_changes) > MAX_NOTIFIED_CHANGES:  # their callers were cancelled
            self.commit_queue.notified_changes.clear()
        notified: set[str] = set()
        for change in changes:
            if not (queues := queues_written(change)):
                continue
            topics = {lane_topic(queue.lane_id) for queue in queues}
            if not (topics <= notified or any(map(self.wakeups.subscriber_count, topics))):
                continue
            if all(self._is_claimed_blindly(queue) for queue in queues):
                self.commit_queue.notified_changes.add(change.id)
                self.wakeups.notify(topics)
                notified |= topics

    def _is_claimed_blindly(self, queue: QueueKey) -> bool:
        """Return whether every claim of this process claims from this lane without reading its queues first."""
        lane, known = queue.lane_id, self._queues.get(queue.lane_id, ())
        if lane in self._guarded_lanes or lane in self._takeover_lanes or lane in self._namespace_filtered_lanes:
            return False
        return not queue.guarded and queue in known and len({one.fairness_key for one in known}) == 1

    def notify(self, topics: Collection[str], *, at_once: bool = True) -> None:
        """Wake the tasks that wait for these topics, here and (unless `at_once`, a little later) in other processes."""
        self.wakeups.notify(topics)
        if self._delayed_notify is not None and not self.commit_queue.pending_topics:  # a commit has sent its topics
            self._delayed_notify.cancel()
            self._delayed_notify = None
        self.commit_queue.pending_topics.update(topics)
        if at_once and not self._notifying_soon:
            self._notifying_soon = True
            asyncio.get_running_loop().call_soon(self._notify_others)
        elif not at_once and not self._notifying_soon and self._delayed_notify is None:
            self._delayed_notify = asyncio.get_running_loop().call_later(NOTIFY_DELAY_S, self._notify_others)

    def _notify_others(self) -> None:
        """Send one notification for all topics of a loop iteration that no commit has sent meanwhile."""
        if self._delayed_notify is not None:
            self._delayed_notify.cancel()
        topics = frozenset(self.commit_queue.pending_topics)
        self._notifying_soon, self._delayed_notify = False, None
        self.commit_queue.pending_topics.clear()
        if topics:
            self.store.notify(topics)

    def add_queue(self, queue: QueueKey) -> bool:
        """Remember a queue; return whether it was unknown."""
        known = self._queues.setdefault(queue.lane_id, set())
        if queue in known:
            return False
        known.add(queue)
        return True

    def _wake_earlier_sweeps(self, change: Change, committed_at: int) -> None:
        """Wake a sweep of this process that is planned for later than an instant which has just been written."""
        for write in change.writes:
            if type(write) is Delete:
                continue
            row: Any = write.row if type(write) is Patch else type(write.row)
            for column, planned_at in self.next_sweep_at.get(row, NOTHING).items():
                instant = write.fields.get(column) if type(write) is Patch else getattr(write.row, column)
                if type(instant) is FromNow:
                    instant = committed_at + instant.offset
                if instant is not None:
                    self._wake_sweep_before(row, column, instant, planned_at)

    def _wake_sweep_before(self, row: RowClass, column: str, instant: int | None, planned_at: int) -> None:
        if instant is not None and instant < planned_at:
            self.wakeups.notify((due_topic(row, column),))

    def wake_sweeps_for(self, rows: Sequence[Execution]) -> None:
        """Do the same for rows that the store claimed without a decision."""
        for column, planned_at in self.next_sweep_at.get(Execution, NOTHING).items():
            for instant in set(map(attrgetter(column), rows)):
                self._wake_sweep_before(Execution, column, instant, planned_at)

    def _update_lease_cache(
        self, execution_id: str, fields: dict[str, Any], revision: int, rows: Rows, committed_at: int
    ) -> None:
        ownership = fields.get("ownership_state")
        if ownership is not None and ownership is not OwnershipState.LEASED:
            if ownership is not OwnershipState.UNOWNED and (queue := fields.get("line")):
                self._takeover_lanes.add(queue.lane_id)
            self._lease_cache.pop(execution_id, None)
            return
        if ownership is None and execution_id not in self._lease_cache:
            return  # it was not leased here before, and is not now
        if (row := execution_among(execution_id, rows)) is not None:
            self.cache_leased_row(apply_patch(row, fields, revision, committed_at))

    def cache_leased_row(self, row: Execution) -> None:
        """Cache a leased row: while the lease is live, every change of it by another process is noticed."""
        if row.lifecycle_phase is not _ACTIVE or row.ownership_state is not _LEASED:
            return
        cached = self._lease_cache
        cached[row.execution_id] = row
        if len(cached) > MAX_CACHED_LEASES:
            del cached[next(iter(cached))]

    def may_unblock_others(self) -> bool:
        """Return whether the completion of an execution leased here may unblock others."""
        return any(map(affects_others, self._lease_cache.values()))


def first_row(rows: Rows) -> Any:
    """Return the row that a decision is about: the first one that was loaded for it; None if there is none."""
    return rows[0][0] if rows and rows[0] else None


def execution_among(execution_id: str, rows: Rows) -> Execution | None:
    """Return the execution with this id among loaded rows; None if it is not there."""
    for found in rows:
        for row in found:
            if type(row) is Execution and row.execution_id == execution_id:
                return row
    return None


def apply_patch(row: Execution, fields: dict[str, Any], revision: int, committed_at: int) -> Execution:
    """Return the row as a patch committed at this time leaves it."""
    values = {
        name: committed_at + value.offset if isinstance(value, FromNow) else value for name, value in fields.items()
    }
    return msgspec.structs.replace(row, **values, revision=revision)
