"""Noting: what a written change means to this process and to others.

A process remembers the sheets it holds and the lines it knows, wakes its own tasks that wait for what was written, and
has its followers act on it. The other processes get a hint: with the commit, which is given what there is to tell
(`Commits`), or from here when that may not have arrived. All of that is help, never truth: whoever hears nothing looks
again within a poll interval.
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
from flowfabric.engine.metrics.registry import Metrics
from flowfabric.engine.runtime.commit_queue import CommitQueue
from flowfabric.engine.runtime.wakeups import Wakeups, due_topic, lane_topic, queues_written, topics_of
from flowfabric.model.change import Change, Delete, Patch, RowTemplate
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.instant import FromNow
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.rules.execution.transitions import affects_others
from flowfabric.stores.port import Store

RowClass = type[msgspec.Struct]
Rows = list[list[Any]]
WriteListener = Callable[[Change, Rows], None]  # a change that was written, and the rows that it was decided on

MAX_CACHED_LEASES = 20_000
NOTIFY_DELAY_S = 0.02  # what nobody waits for is told to other processes by then
MAX_NOTIFIED_CHANGES = 10_000  # changes that are not noted yet; to forget some costs a look in vain
NOTHING: dict[str, int] = {}

# Asked of every claim. To find a member in its class takes ten times as long as to find a name here.
_ACTIVE, _LEASED = LifecyclePhase.ACTIVE, OwnershipState.LEASED


class AfterCommit:
    """What a process knows of what it wrote."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.estimate = StoreClockEstimate(store.clock)
        self.wakeups = Wakeups()
        self.commit_queue = CommitQueue(store, self._announce)
        self.metrics = Metrics()
        self.completion_metrics = CompletionMetrics(self.metrics)
        self.next_sweep_at: dict[RowClass, dict[str, int]] = {}  # by row and column: when we look at it next
        self.write_listeners: dict[RowClass, list[WriteListener]] = {}  # what to do when such a row was written
        self._lease_cache: dict[str, Execution] = {}
        self._queues: dict[str, set[QueueKey]] = {}
        self._telling = False
        self._late: asyncio.TimerHandle | None = None
        self._guarded_lanes: set[str] = set()  # lanes where this process put work that is claimed by decision
        self._takeover_lanes: set[str] = set()  # those where some of it is up for takeover
        self._namespace_filtered_lanes: set[str] = (
            set()
        )  # those of which this process has claimed the work of some namespaces only

    def on_write(self, act: WriteListener, *rows: RowClass) -> None:
        """Have something done about every change of this process that writes one of these rows."""
        for row in rows:
            self.write_listeners.setdefault(row, []).append(act)

    def publish_commit(self, change: Change, rows: Rows, committed_at: int) -> None:
        """Remember and tell what a written change means to this process and to others."""
        self.publish_commits(((change, rows),), committed_at)

    def publish_commits(self, written: Sequence[tuple[Change, Rows]], committed_at: int) -> None:
        """The same for changes that were written together."""
        self.estimate.update(committed_at)
        for change, rows in written:
            self._noted(change, rows, committed_at)
        if formed := [(change, first(first(rows))) for change, rows in written if change.template is not None]:
            self._note_forms(formed, committed_at)
        self._wake_here([change for change, _ in written])
        for change, rows in written:
            for follow in self._following(change):
                follow(change, rows)

    def _noted(self, change: Change, rows: Rows, committed_at: int) -> None:
        """Remember what a change writes and tells beyond its form."""
        if self.next_sweep_at:
            self._note_due(change, committed_at)
        for empty in change.queues:
            self.add_queue(empty)
        for line in queues_written(change):
            self.add_queue(line)
            if line.guarded:
                self._guarded_lanes.add(line.lane_id)
        for write in change.writes:  # compared by type: this runs for every change
            if type(write) is Patch and write.row is Execution:
                self._note_sheet(write.key[0], write.fields, change.id, rows, committed_at)
        for event in change.events:
            if event.outcome is not None or event.lease == "released":
                self.completion_metrics.record(event, change, execution_among(event.execution_id, rows), committed_at)

    def _wake_here(self, changes: Sequence[Change]) -> None:
        """Wake whoever waits in this process for what was written; the others were told with the commit, or are now."""
        self._tell_untold(changes)
        commits = self.commit_queue
        if not self.wakeups and not commits.notified_changes:
            return
        topics = topics_of(changes)
        if told := {change.id for change in changes} & commits.notified_changes:
            # Their lanes were told of them when they were on their way; those of the others are still to be told.
            commits.notified_changes -= told
            lanes = {is_told: set[str]() for is_told in (True, False)}
            for change in changes:
                lanes[change.id in told].update(lane_topic(line.lane_id) for line in queues_written(change))
            topics -= lanes[True] - lanes[False]
        self.wakeups.notify(topics)

    def _tell_untold(self, changes: Iterable[Change]) -> None:
        """Tell others of changes that are only now known to be written: the answers to their commits got lost."""
        untold = self.commit_queue.in_doubt_changes
        for change in changes if untold else ():
            if change.id in untold:
                untold.discard(change.id)
                self.notify(topics_of((change,)))

    def _following(self, change: Change) -> Iterable[WriteListener]:
        """What is to be done about a change, once each."""
        followers = self.write_listeners
        if not followers:
            return ()
        kinds: dict[Any, None] = {} if change.template is None else {change.template.row: None}
        for write in change.writes:
            kinds[write.row if type(write) is Patch or type(write) is Delete else type(write.row)] = None
        heard = [followers[kind] for kind in kinds if kind in followers]
        return tuple(heard[0]) if len(heard) == 1 else dict.fromkeys(act for acts in heard for act in acts)

    def publish_completions(self, ends: Sequence[tuple[Change, Execution]], committed_at: int) -> None:
        """The same for ends of ordinary work, of which the forms say it all."""
        if Execution in self.write_listeners:
            self.publish_commits([(change, [[row]]) for change, row in ends], committed_at)
            return
        self.estimate.update(committed_at)
        self._note_forms(ends, committed_at)
        self._tell_untold(change for change, _ in ends)
        self.wakeups.notify_completions([row.execution_id for _, row in ends])

    def _note_forms(self, ends: Sequence[tuple[Change, Execution]], committed_at: int) -> None:
        seen, alike = self._lease_cache, defaultdict[RowTemplate, list[Execution]](list)
        for change, row in ends:
            assert change.template is not None
            seen.pop(row.execution_id, None)
            alike[change.template].append(row)
        for form, rows in alike.items():
            self.completion_metrics.record_many(rows, form.event["outcome"], committed_at)
        for column, planned_at in self.next_sweep_at.get(Execution, NOTHING).items():
            for form in alike:
                if isinstance(instant := form.fields.get(column), FromNow):
                    self._note_instant(Execution, column, committed_at + instant.offset, planned_at)

    def _announce(self, changes: Sequence[Change]) -> None:
        """Wake the claims of this process that wait for lanes where these changes put work, so that they come along.

        Where the store keeps the order, their takes are handed over after the changes, and mostly join the same
        transaction; elsewhere the changes have just been written. A claim that reads the lines before it takes may see
        nothing yet: it is woken when what was written is noted.
        """
        if not self.wakeups:
            return
        if len(self.commit_queue.notified_changes) > MAX_NOTIFIED_CHANGES:  # whoever would have noted them went away
            self.commit_queue.notified_changes.clear()
        told: set[str] = set()
        for change in changes:
            lines = queues_written(change)
            topics = {lane_topic(line.lane_id) for line in lines}
            if not topics or not (topics <= told or any(map(self.wakeups.subscriber_count, topics))):
                continue
            if all(self._is_taken_unread(line) for line in lines):
                self.commit_queue.notified_changes.add(change.id)
                self.wakeups.notify(topics)
                told |= topics

    def _is_taken_unread(self, line: QueueKey) -> bool:
        """Whether every claim of this process takes from the lane of this line without reading first what is there."""
        lane, known = line.lane_id, self._queues.get(line.lane_id, ())
        if lane in self._guarded_lanes or lane in self._takeover_lanes or lane in self._namespace_filtered_lanes:
            return False
        return not line.guarded and line in known and len({one.fairness_key for one in known}) == 1

    def notify(self, topics: Collection[str], *, at_once: bool = True) -> None:
        """Wake whoever waits for these, here and in other processes; there with the next hint if that will do."""
        self.wakeups.notify(topics)
        if self._late is not None and not self.commit_queue.pending_topics:  # what it was for has been told meanwhile
            self._late.cancel()
            self._late = None
        self.commit_queue.pending_topics.update(topics)
        if at_once and not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell_others)
        elif not at_once and not self._telling and self._late is None:
            self._late = asyncio.get_running_loop().call_later(NOTIFY_DELAY_S, self._tell_others)

    def _tell_others(self) -> None:
        """One hint for everything that a turn of the loop brought about, unless a commit told it meanwhile."""
        if self._late is not None:
            self._late.cancel()
        topics, self._telling, self._late = frozenset(self.commit_queue.pending_topics), False, None
        self.commit_queue.pending_topics.clear()
        if topics:
            self.store.notify(topics)

    def add_queue(self, line: QueueKey) -> bool:
        """Know a line; True when it is news."""
        known = self._queues.setdefault(line.lane_id, set())
        if line in known:
            return False
        known.add(line)
        return True

    def _note_due(self, change: Change, committed_at: int) -> None:
        """Wake a sweep of this process that meant to look only after an instant that has just been written."""
        for write in change.writes:  # compared by type: this runs for every change
            if type(write) is Delete:
                continue
            row: Any = write.row if type(write) is Patch else type(write.row)
            for column, planned_at in self.next_sweep_at.get(row, NOTHING).items():
                instant = write.fields.get(column) if type(write) is Patch else getattr(write.row, column)
                if isinstance(instant, FromNow):
                    instant = committed_at + instant.offset
                self._note_instant(row, column, instant, planned_at)

    def _note_instant(self, row: RowClass, column: str, instant: int | None, planned_at: int) -> None:
        if instant is not None and instant < planned_at:
            self.wakeups.notify((due_topic(row, column),))

    def wake_sweeps_for(self, rows: Sequence[Execution]) -> None:
        """The same for rows that the store claimed by itself."""
        for column, planned_at in self.next_sweep_at.get(Execution, NOTHING).items():
            for instant in set(map(attrgetter(column), rows)):
                self._note_instant(Execution, column, instant, planned_at)

    def _note_sheet(
        self, execution_id: str, fields: dict[str, Any], revision: int, rows: Rows, committed_at: int
    ) -> None:
        owned = fields.get("ownership_state")
        if owned is not None and owned is not OwnershipState.LEASED:
            if owned is not OwnershipState.UNOWNED and (line := fields.get("line")):
                self._takeover_lanes.add(line.lane_id)
            self._lease_cache.pop(execution_id, None)
            return
        if owned is None and execution_id not in self._lease_cache:
            return  # it was not held before, and is not now
        if (row := execution_among(execution_id, rows)) is not None:
            self.cache_leased_row(apply_patch(row, fields, revision, committed_at))

    def cache_leased_row(self, row: Execution) -> None:
        """Keep a held sheet: its lease is the licence to trust it."""
        if row.lifecycle_phase is not _ACTIVE or row.ownership_state is not _LEASED:
            return
        seen = self._lease_cache
        seen[row.execution_id] = row
        if len(seen) > MAX_CACHED_LEASES:
            del seen[next(iter(seen))]

    def may_unblock_others(self) -> bool:
        """Whether others may go on because something ends that is held here."""
        return any(map(affects_others, self._lease_cache.values()))


def first(rows: Sequence[Any]) -> Any:
    """The row of a want that names one, or None."""
    return rows[0] if rows else None


def execution_among(execution_id: str, rows: Rows) -> Execution | None:
    """The execution of this name among some rows."""
    for found in rows:
        for row in found:
            if type(row) is Execution and row.execution_id == execution_id:
                return row
    return None


def apply_patch(row: Execution, fields: dict[str, Any], revision: int, committed_at: int) -> Execution:
    """The row as it is after a patch that was written at that time."""
    values = {
        name: committed_at + value.offset if isinstance(value, FromNow) else value for name, value in fields.items()
    }
    return msgspec.structs.replace(row, **values, revision=revision)
