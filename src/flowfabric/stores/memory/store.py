"""The memory store: rows in dictionaries under one lock; the simplest implementation of the port."""

from __future__ import annotations

import operator
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from heapq import merge, nlargest, nsmallest
from itertools import islice, takewhile
from typing import Any

import msgspec
from msgspec.structs import asdict, astuple, replace

from flowfabric.clock import SteadyClock
from flowfabric.handles import BackendTag
from flowfabric.ids import DEFAULT_PARTITIONS, PartitionCounts
from flowfabric.model.change import (
    Change,
    Delete,
    Guard,
    Insert,
    LeaseCheck,
    LeaseRequirement,
    Patch,
    RowTemplate,
    Upsert,
    at,
    expand,
    holds,
    template_event,
    template_fields,
)
from flowfabric.model.event import TOPIC_FIELDS, Event, FeedEvent, Topic
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.model.instant import FromNow
from flowfabric.stores.catalog import TABLES
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseRef
from flowfabric.stores.codec import CODEC, check_change, encode, expand_bulk_inserts
from flowfabric.stores.memory.index import Key, MemoryTable
from flowfabric.stores.port import SchemaVersion
from flowfabric.stores.queries import (
    Due,
    FeedPage,
    FoundExecution,
    GroupedCount,
    Loaded,
    Read,
    Scan,
    Search,
    SearchPage,
    Where,
)
from flowfabric.stores.verdicts import Collision, Unstorable, Verdict, verdict_on


class MemoryStore:
    """A store in the memory of one process; its rows are lost when the process ends."""

    tag = BackendTag.MEMORY
    concurrent_commits = 1
    claim_parts = 1
    executes_in_order = False
    batch_limit = 500
    deletes_in_pages = False

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock or SteadyClock()
        self.clock: Callable[[], int] | None = self._clock
        self._lock = threading.Lock()
        self._queue_ids: dict[QueueKey, int] = {}
        self._tables = {table.row: MemoryTable(CODEC[table.row], self._queue_id) for table in TABLES}
        self._feed: list[FeedEvent] = []
        self._trimmed = 0  # the number of trimmed events
        self._last_trimmed: dict[Topic, int] = dict.fromkeys(Topic, 0)  # last trimmed position by topic
        self._history: dict[str, list[FeedEvent]] = defaultdict(list)

    async def open(self, *, migrate: bool, partitions: PartitionCounts = DEFAULT_PARTITIONS) -> SchemaVersion:
        """Do nothing: there is no schema."""
        return SchemaVersion(0, 0)

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    async def ping(self) -> int:
        return self._clock()

    async def load(self, reads: Sequence[Read]) -> Loaded:
        with self._lock:
            return Loaded(self._clock(), [self._rows_by_prefix(read.row, read.key) for read in reads])

    def try_load_now(self, reads: Sequence[Read]) -> Loaded | None:
        return None

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        with self._lock:
            now = self._clock()
            # As in every store, all changes are judged before any is written.
            accepted = [self._expanded(change) if self._judge(change, now) else None for change in changes]
            verdicts = [None if change is None else self._write_or_undo(change, now) for change in accepted]
            if topics and int in map(type, verdicts):
                self.notify(topics)
            return verdicts

    def _expanded(self, change: Change) -> Change:
        if change.template is None:
            return change
        return expand(change, self._tables[change.template.row].rows[change.guards[0].key])

    def _write_or_undo(self, change: Change, now: int) -> Verdict:
        """Write an accepted change, or nothing of it."""
        undo: list[tuple[MemoryTable, Key, Any]] = []
        queue_count = len(self._queue_ids)
        try:
            check_change(change, now)
            self._write(change, now, undo)
        except Unstorable as fault:
            for table, key, row in reversed(undo):
                table.set_row(key, row)
            self._queue_ids = dict(islice(self._queue_ids.items(), queue_count))
            return verdict_on(fault)
        self._append_events(change.events, now)
        return now

    async def commit_and_claim(
        self, changes: Sequence[Change], topics: frozenset[str], request: ClaimRequest
    ) -> CommitAndClaimResult:
        verdicts, claimed = await self.commit(changes, topics), await self.claim_rows(request)
        with self._lock:
            has_more = any(True for queue in request.queues for _ in self._claimable(queue, claimed.now))
        return CommitAndClaimResult(verdicts, claimed.rows, drained=not has_more)

    async def claim_rows(self, request: ClaimRequest) -> ClaimedRows:
        with self._lock:
            now = self._clock()
            table, payloads = self._tables[Execution], self._tables[Payload]
            heads = merge(*(self._claimable(queue, now) for queue in set(request.queues)))
            chosen = [(table.rows[key,], ids) for (_, key), ids in zip(heads, request.lease_ids, strict=False)]
            template, shared = request.template, request.parameters
            rows = [self._apply(template, row, shared | asdict(ids), now) for row, ids in chosen]
            return ClaimedRows(now, [(row, payloads.rows[row.execution_id,]) for row in rows])

    async def renew(self, leases: Sequence[LeaseRef], template: RowTemplate) -> list[int | None]:
        with self._lock:
            now = self._clock()
            return [self._renew(lease, template, now) for lease in leases]

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        with self._lock:
            now, rows, next_at = self._clock(), list[Any](), None
            table = self._tables[row]
            entries = table.indexes[column]
            width = len(table.codec.table.key)
            for entry in entries:
                if entry[0] <= now and len(rows) == limit:
                    continue
                candidate = table.rows[entry[-width:]]
                if not table.matches(candidate, where):
                    continue
                if entry[0] > now:
                    next_at = entry[0]
                    break
                rows.append(candidate)
            return Due(now, rows, next_at)

    async def scan(self, scan: Scan) -> list[Any]:
        with self._lock:
            table = self._tables[scan.row]
            order = scan.order + tuple(name for name in table.codec.table.key if name not in scan.order)
            if scan.max_values is not None:
                values = table.distinct_values(
                    scan.limit_by_condition.column, scan.limit_by_condition.value, scan.values_after
                )
                scan = scan.with_values(islice(values, scan.max_values))
            scans = scan.split_by_value() if scan.limit_by else [scan]
            results = [self._scan_rows(table, part, order) for part in scans]
            return [row for _, row in merge(*results, key=operator.itemgetter(0), reverse=scan.descending)]

    def _scan_rows(self, table: MemoryTable, scan: Scan, order: tuple[str, ...]) -> list[tuple[Key, Any]]:
        after = scan.after and tuple(encode(value, self._queue_id) for value in scan.after)
        found = []
        for row in table.candidates(scan):
            if not table.matches(row, scan.where):
                continue  # checked first: only rows that meet the conditions have to have a sort key
            sort_key = tuple(table.encoded_value(row, column) for column in order)
            follows = operator.lt if scan.descending else operator.gt
            if after is None or follows(sort_key[: len(after)], after):
                found.append((sort_key, row))
        first = nlargest if scan.descending else nsmallest
        return first(scan.limit, found, key=operator.itemgetter(0))

    async def search(self, search: Search) -> SearchPage:
        with self._lock:
            table, kinds = self._tables[Execution], self._tables[Payload].rows
            entries = table.indexes["created_at"]
            end = len(entries) if search.after is None else bisect_left(entries, search.after)
            rows = (table.rows[entry[-1:]] for entry in reversed(entries[:end]))
            within = islice((row for row in rows if table.matches(row, search.bounds)), search.budget)
            found: list[FoundExecution] = []
            for read, row in enumerate(within, 1):
                payload = kinds.get((row.execution_id,))
                one = FoundExecution(row, payload.execution_kind if payload else "")
                if search.kind in (None, one.kind) and table.matches(row, search.filters):
                    found.append(one)
                if len(found) == search.limit or read == search.budget:
                    return SearchPage(found, one.position)
            return SearchPage(found, None)

    async def kinds(self, execution_ids: Sequence[str]) -> dict[str, str]:
        with self._lock:
            payloads = self._tables[Payload].rows
            return {name: payloads[name,].execution_kind for name in execution_ids if (name,) in payloads}

    async def count_grouped(self, query: GroupedCount) -> dict[tuple[Any, ...], int]:
        with self._lock:
            table, executions = self._tables[query.row], self._tables[Execution].rows
            if query.values is None:
                width = len(table.codec.table.key)
                found = [table.rows[entry[-width:]] for entry in table.indexes[query.column][: query.limit]]
            else:
                codes = {encode(value, self._queue_id) for value in query.values}
                found = [row for code in codes for row in islice(table.rows_by_index(query.column, code), query.limit)]
            keys = [(getattr(row, query.execution_column),) for row in found]
            rows = [executions[key] for key in keys if key in executions]
            return Counter(tuple(getattr(row, column) for column in query.group_by) for row in rows)

    async def queues(self, lane_id: str | None = None) -> list[QueueKey]:
        with self._lock:
            return sorted(queue for queue in self._queue_ids if lane_id in (None, queue.lane_id))

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        with self._lock:
            entries = self._tables[Execution].indexes["line"]
            nonempty = {queue_id for queue_id, *_ in entries}
            return sorted(
                queue for queue, id_ in self._queue_ids.items() if id_ in nonempty and queue.lane_id == lane_id
            )

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        return []  # a process loses all its memory at once

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        with self._lock:
            lanes = sorted({queue.lane_id for queue in self._queue_ids})
            return [lane for lane in lanes if after is None or lane > after][:limit]

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        with self._lock:
            field = TOPIC_FIELDS[topic]
            # Positions start at 1, so the entry after a position is at that index.
            newer = islice(self._feed, max(0, after - self._trimmed), None)
            has_gap, end = after < self._last_trimmed[topic], self._trimmed + len(self._feed)
            if after > end:
                return FeedPage([], end, has_gap, diverged=True)
            events = list(islice((entry for entry in newer if getattr(entry.event, field) is not None), limit))
            if len(events) < limit:
                return FeedPage(events, max(after, end), has_gap)
            return FeedPage(events, events[-1].position if events else after, has_gap)

    async def feed_end(self) -> int:
        with self._lock:
            return self._trimmed + len(self._feed)

    async def trim_feed(self, before: int, limit: int) -> int:
        with self._lock:
            old = [*takewhile(lambda entry: entry.at < before, islice(self._feed, limit))]
            del self._feed[: len(old)]
            self._trimmed += len(old)
            for entry in old:
                self._forget(entry)
                for topic, field in TOPIC_FIELDS.items():
                    if getattr(entry.event, field) is not None:
                        self._last_trimmed[topic] = entry.position
            return len(old)

    def _forget(self, entry: FeedEvent) -> None:
        """Remove an event from its execution's history, and an empty history altogether."""
        history = self._history[entry.event.execution_id]
        history.remove(entry)
        if not history:
            del self._history[entry.event.execution_id]

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        with self._lock:
            field = TOPIC_FIELDS[topic]
            entries = self._history.get(execution_id, ())
            newest = (entry for entry in reversed(entries) if getattr(entry.event, field) not in (None, without))
            return list(islice(newest, limit))[::-1]

    def notify(self, topics: frozenset[str]) -> None:
        """Do nothing: there is no other process."""

    def limit_commands(self, command_s: float) -> None:
        """Do nothing: there is no server."""

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        """Do nothing: there is no other process."""

    def _queue_id(self, queue: QueueKey) -> int:
        return self._queue_ids.setdefault(queue, len(self._queue_ids) + 1)

    def _rows_by_prefix(self, row: type[msgspec.Struct], prefix: Key) -> list[Any]:
        table = self._tables[row]
        if len(prefix) == len(table.codec.table.key):
            return [table.rows[prefix]] if prefix in table.rows else []
        return [table.rows[key] for key in table.keys_with_prefix(prefix)]

    def _judge(self, change: Change, now: int) -> bool:
        if change.not_before is not None and now < change.not_before:
            return False
        if change.not_after is not None and now > change.not_after:
            return False
        return all(self._holds(guard, now) for guard in change.guards)

    def _holds(self, guard: Guard, now: int) -> bool:
        row = self._tables[guard.row].rows.get(guard.key)
        if guard.expected is not None:
            expected = guard.expected.fields | dict(zip(guard.expected.per_row, guard.expected_values, strict=True))
            return row is not None and all(getattr(row, name) == value for name, value in expected.items())
        if row is None or guard.revision is None:
            return row is None and guard.revision is None
        return row.revision == guard.revision and (guard.lease is None or _has_lease(row, guard.lease, now))

    def _write(self, change: Change, now: int, undo: list[tuple[MemoryTable, Key, Any]]) -> None:
        for queue in change.queues:
            self._queue_id(queue)
        for write in expand_bulk_inserts(change.writes):
            if isinstance(write, Insert | Upsert):
                table = self._tables[type(write.row)]
                key = table.codec.key(write.row)
                if isinstance(write, Insert) and key in table.rows:
                    raise Collision(f"{table.codec.table.name} {key}")
                self._set(table, key, write.row, {}, change.id, now, undo)
            else:
                table = self._tables[write.row]
                if isinstance(write, Delete):
                    undo += [(table, key, table.set_row(key, None)) for key in table.keys_with_prefix(write.key)]
                else:
                    self._patch(table, write, change.id, now, undo)

    def _patch(
        self, table: MemoryTable, patch: Patch, change_id: int, now: int, undo: list[tuple[MemoryTable, Key, Any]]
    ) -> None:
        row = table.rows.get(patch.key)
        if row is None or (patch.unless_set is not None and getattr(row, patch.unless_set) is not None):
            return
        self._set(table, patch.key, row, patch.fields, change_id, now, undo)

    def _set(
        self,
        table: MemoryTable,
        key: Key,
        row: Any,
        fields: dict[str, Any],
        change_id: int,
        now: int,
        undo: list[tuple[MemoryTable, Key, Any]],
    ) -> None:
        values = dict(zip(table.codec.columns, astuple(row), strict=True)) | fields
        if table.codec.revision_ordinal is not None:
            values["revision"] = change_id
        values = {name: at(value, now) for name, value in values.items()}
        undo.append((table, key, table.set_row(key, type(row)(**values))))

    def _append_events(self, events: Sequence[Event], now: int) -> None:
        for event in events:
            entry = FeedEvent(self._trimmed + len(self._feed) + 1, now, event)
            self._feed.append(entry)
            self._history[event.execution_id].append(entry)

    def _claimable(self, queue: QueueKey, now: int) -> Iterator[tuple[int, str]]:
        """Yield position and id of the rows of a queue without an unexpired grant, in order."""
        table = self._tables[Execution]
        entries, queue_id = table.indexes["line"], self._queue_ids.get(queue, 0)
        for entry in islice(entries, bisect_left(entries, (queue_id,)), bisect_right(entries, (queue_id + 1,))):
            granted_until = table.rows[entry[2],].granted_until
            if granted_until is None or granted_until <= now:
                yield entry[1], entry[2]

    def _renew(self, lease: LeaseRef, template: RowTemplate, now: int) -> int | None:
        row, parameters = self._tables[Execution].rows.get((lease.execution_id,)), asdict(lease)
        if row is None or (template.condition and not holds(template.condition, row, parameters, now)):
            return None
        return self._apply(template, row, parameters, now).lease_expires_at

    def _apply(self, template: RowTemplate, row: Execution, parameters: dict[str, Any], now: int) -> Execution:
        """Apply a template to an execution; return the execution as it is then."""
        fields = template_fields(template, row, parameters)
        values = {name: now + value.offset if type(value) is FromNow else value for name, value in fields.items()}
        written = replace(row, revision=parameters.get("revision", row.revision), **values)
        self._tables[Execution].set_row((row.execution_id,), written)
        self._append_events([template_event(template, written)], now)
        return written


def _has_lease(row: Any, check: LeaseCheck, now: int) -> bool:
    if row.lease_id != check.lease_id or row.lease_epoch != check.lease_epoch or row.lease_expires_at is None:
        return False
    return bool((row.lease_expires_at > now) == (check.requires is LeaseRequirement.LIVE))
