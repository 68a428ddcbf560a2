"""Rows in dictionaries under one lock: for tests, for trying out, and as the plainest telling of the port."""

from __future__ import annotations

import operator
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from heapq import merge, nsmallest
from itertools import islice, takewhile
from typing import Any

import msgspec
from msgspec.structs import astuple, replace

from flowfabric.clock import SteadyClock
from flowfabric.handles import BackendTag
from flowfabric.model.change import (
    Change,
    Delete,
    FromNow,
    Guard,
    Insert,
    LeaseCheck,
    LeaseRequirement,
    Patch,
    Upsert,
    expand,
    lease_event,
)
from flowfabric.model.event import TOPIC_FIELDS, Event, FeedEvent, Topic
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.stores.catalog import TABLES
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseRef
from flowfabric.stores.codec import CODEC, check_events, check_value, encode, expand_bulk_inserts
from flowfabric.stores.memory.index import Key, MemoryTable
from flowfabric.stores.port import Collision, SchemaVersion, Unstorable
from flowfabric.stores.queries import Due, FeedPage, GroupedCount, Loaded, Read, Scan, Where


class MemoryStore:
    """Rows of one process; they are gone when it ends."""

    tag = BackendTag.MEMORY
    concurrent_commits = 1
    executes_in_order = False
    batch_limit = 500

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock or SteadyClock()
        self.clock: Callable[[], int] | None = self._clock
        self._lock = threading.Lock()
        self._queue_ids: dict[QueueKey, int] = {}
        self._tables = {table.row: MemoryTable(CODEC[table.row], self._line_id) for table in TABLES}
        self._feed: list[FeedEvent] = []
        self._trimmed = 0  # how many events are no longer kept
        self._lost: dict[Topic, int] = dict.fromkeys(Topic, 0)  # the last of each topic that is no longer kept
        self._history: dict[str, list[FeedEvent]] = defaultdict(list)

    async def open(self, *, migrate: bool) -> SchemaVersion:
        """Nothing to connect to, and no schema."""
        return SchemaVersion(0, 0)

    async def close(self) -> None:
        """Nothing to let go of."""

    async def ping(self) -> int:
        return self._clock()

    async def load(self, wants: Sequence[Read]) -> Loaded:
        with self._lock:
            return Loaded(self._clock(), [self._starting(want.row, want.key) for want in wants])

    def try_load_now(self, wants: Sequence[Read]) -> Loaded | None:
        return None

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        with self._lock:
            now = self._clock()
            lines = len(self._queue_ids)
            undo: list[tuple[MemoryTable, Key, Any]] = []
            # Judged before anything is written, like everywhere: no two changes of one call meet in a root.
            verdicts = [self._judge(change, now) for change in changes]
            changes = [
                expand(change, self._tables[change.template.row].rows[change.guards[0].key])
                if change.template is not None and accepted
                else change
                for change, accepted in zip(changes, verdicts, strict=True)
            ]
            try:
                for change, accepted in zip(changes, verdicts, strict=True):
                    if accepted:
                        self._write(change, now, undo)
                        check_events(change.events)
            except Unstorable:
                for shelf, key, row in reversed(undo):
                    shelf.set_row(key, row)
                self._queue_ids = dict(islice(self._queue_ids.items(), lines))
                raise
            for change, accepted in zip(changes, verdicts, strict=True):
                if accepted:
                    self._tell(change.events, now)
            if hint and any(verdicts):
                self.notify(hint)
            return [now if accepted else None for accepted in verdicts]

    async def commit_and_claim(
        self, changes: Sequence[Change], hint: frozenset[str], take: ClaimRequest
    ) -> CommitAndClaimResult:
        verdicts, taken = await self.commit(changes, hint), await self.claim_rows(take)
        with self._lock:
            left = any(True for line in take.queues for _ in self._free(line, taken.now))
        return CommitAndClaimResult(verdicts, taken.rows, drained=not left)

    async def claim_rows(self, take: ClaimRequest) -> ClaimedRows:
        with self._lock:
            now = self._clock()
            shelf, payloads = self._tables[Execution], self._tables[Payload]
            heads = merge(*(self._free(line, now) for line in set(take.queues)))
            chosen = [(shelf.rows[key,], stamp) for (_, key), stamp in zip(heads, take.lease_ids, strict=False)]
            rows = []
            for row, stamp in chosen:
                taken = replace(row, **take.fields_for(row, stamp, now))
                shelf.set_row((row.execution_id,), taken)
                reason = "claim_resumed" if row.next_type is None else None
                self._tell([lease_event(taken, "acquired", reason=reason)], now)
                rows.append((taken, payloads.rows[row.execution_id,]))
            return ClaimedRows(now, rows)

    async def renew(self, leases: Sequence[LeaseRef]) -> list[int | None]:
        with self._lock:
            now = self._clock()
            return [self._renew(held, now) for held in leases]

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        with self._lock:
            now, rows, next_at = self._clock(), list[Any](), None
            shelf = self._tables[row]
            entries = shelf.indexes[column]
            width = len(shelf.codec.table.key)
            for entry in entries:
                if entry[0] <= now and len(rows) == limit:
                    continue
                one = shelf.rows[entry[-width:]]
                if not shelf.matches(one, where):
                    continue
                if entry[0] > now:
                    next_at = entry[0]
                    break
                rows.append(one)
            return Due(now, rows, next_at)

    async def scan(self, scan: Scan) -> list[Any]:
        with self._lock:
            shelf = self._tables[scan.row]
            order = scan.order + tuple(name for name in shelf.codec.table.key if name not in scan.order)
            if scan.max_values is not None:
                values = shelf.distinct_values(
                    scan.limit_by_condition.column, scan.limit_by_condition.value, scan.values_after
                )
                scan = scan.with_values(islice(values, scan.max_values))
            found = [self._listed(shelf, one, order) for one in (scan.split_by_value() if scan.limit_by else [scan])]
            return [row for _, row in merge(*found, key=operator.itemgetter(0))]

    def _listed(self, shelf: MemoryTable, scan: Scan, order: tuple[str, ...]) -> list[tuple[Key, Any]]:
        after = scan.after and tuple(encode(value, self._line_id) for value in scan.after)
        found = []
        for row in shelf.candidates(scan):
            if not shelf.matches(row, scan.where):
                continue  # before its place is looked at: only a row that meets the conditions has to have one
            place = tuple(shelf.encoded_value(row, column) for column in order)
            if after is None or place[: len(after)] > after:
                found.append((place, row))
        return nsmallest(scan.limit, found, key=operator.itemgetter(0))

    async def count_grouped(self, tally: GroupedCount) -> dict[tuple[Any, ...], int]:
        with self._lock:
            shelf, executions = self._tables[tally.row], self._tables[Execution].rows
            if tally.values is None:
                width = len(shelf.codec.table.key)
                found = [shelf.rows[entry[-width:]] for entry in shelf.indexes[tally.column][: tally.limit]]
            else:
                codes = {encode(value, self._line_id) for value in tally.values}
                found = [row for code in codes for row in islice(shelf.rows_by_index(tally.column, code), tally.limit)]
            names = [(getattr(row, tally.execution_column),) for row in found]
            rows = [executions[name] for name in names if name in executions]
            return Counter(tuple(getattr(row, column) for column in tally.group_by) for row in rows)

    async def queues(self, lane_id: str | None = None) -> list[QueueKey]:
        with self._lock:
            return sorted(line for line in self._queue_ids if lane_id in (None, line.lane_id))

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        with self._lock:
            entries = self._tables[Execution].indexes["line"]
            taken = {number for number, *_ in entries}
            return sorted(
                line for line, number in self._queue_ids.items() if number in taken and line.lane_id == lane_id
            )

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        return []  # a process loses its memory as a whole

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        with self._lock:
            lanes = sorted({line.lane_id for line in self._queue_ids})
            return [lane for lane in lanes if after is None or lane > after][:limit]

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        with self._lock:
            field = TOPIC_FIELDS[topic]
            # Positions count from 1, so the entry after a position stands at that index.
            news = islice(self._feed, max(0, after - self._trimmed), None)
            lost, end = after < self._lost[topic], self._trimmed + len(self._feed)
            if after > end:
                return FeedPage([], end, lost, diverged=True)
            events = list(islice((one for one in news if getattr(one.event, field) is not None), limit))
            if len(events) < limit:
                return FeedPage(events, max(after, end), lost)
            return FeedPage(events, events[-1].position if events else after, lost)

    async def feed_end(self) -> int:
        with self._lock:
            return self._trimmed + len(self._feed)

    async def trim_feed(self, before: int, limit: int) -> int:
        with self._lock:
            old = [*takewhile(lambda told: told.at < before, islice(self._feed, limit))]
            del self._feed[: len(old)]
            self._trimmed += len(old)
            for told in old:
                self._forget(told)
                for topic, field in TOPIC_FIELDS.items():
                    if getattr(told.event, field) is not None:
                        self._lost[topic] = told.position
            return len(old)

    def _forget(self, told: FeedEvent) -> None:
        """Take an event out of its execution's history, and the history away with the last one."""
        history = self._history[told.event.execution_id]
        history.remove(told)
        if not history:
            del self._history[told.event.execution_id]

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        with self._lock:
            field = TOPIC_FIELDS[topic]
            told = self._history.get(execution_id, ())
            newest = (one for one in reversed(told) if getattr(one.event, field) not in (None, without))
            return list(islice(newest, limit))[::-1]

    def notify(self, topics: frozenset[str]) -> None:
        """There is no other process."""

    def limit_commands(self, command_s: float) -> None:
        """There is no server."""

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        """There is no other process."""

    def _line_id(self, line: QueueKey) -> int:
        return self._queue_ids.setdefault(line, len(self._queue_ids) + 1)

    def _starting(self, row: type[msgspec.Struct], key: Key) -> list[Any]:
        shelf = self._tables[row]
        return [shelf.rows[found] for found in shelf.keys_with_prefix(key)]

    def _judge(self, change: Change, now: int) -> bool:
        if change.not_before is not None and now < change.not_before:
            return False
        if change.not_after is not None and now > change.not_after:
            return False
        return all(self._holds(guard, now) for guard in change.guards)

    def _holds(self, guard: Guard, now: int) -> bool:
        row = self._tables[guard.row].rows.get(guard.key)
        if guard.expected is not None:
            looks = guard.expected.fields | dict(zip(guard.expected.per_row, guard.expected_values, strict=True))
            return row is not None and all(getattr(row, name) == value for name, value in looks.items())
        if row is None or guard.revision is None:
            return row is None and guard.revision is None
        return row.revision == guard.revision and (guard.lease is None or _has_lease(row, guard.lease, now))

    def _write(self, change: Change, now: int, undo: list[tuple[MemoryTable, Key, Any]]) -> None:
        for line in change.queues:
            self._line_id(line)
        for write in expand_bulk_inserts(change.writes):
            if isinstance(write, Insert | Upsert):
                shelf = self._tables[type(write.row)]
                key = shelf.codec.key(write.row)
                if isinstance(write, Insert) and key in shelf.rows:
                    raise Collision(f"{shelf.codec.table.name} {key}")
                self._set(shelf, key, write.row, {}, change.id, now, undo)
            else:
                shelf = self._tables[write.row]
                if isinstance(write, Delete):
                    undo += [(shelf, key, shelf.set_row(key, None)) for key in shelf.keys_with_prefix(write.key)]
                else:
                    self._patch(shelf, write, change.id, now, undo)

    def _patch(
        self, shelf: MemoryTable, patch: Patch, change_id: int, now: int, undo: list[tuple[MemoryTable, Key, Any]]
    ) -> None:
        if unknown := set(patch.fields) - set(shelf.codec.columns):
            raise Unstorable(f"{shelf.codec.table.name} has no column {sorted(unknown)}")
        row = shelf.rows.get(patch.key)
        if row is None or (patch.unless_set is not None and getattr(row, patch.unless_set) is not None):
            return
        self._set(shelf, patch.key, row, patch.fields, change_id, now, undo)

    def _set(
        self,
        shelf: MemoryTable,
        key: Key,
        row: Any,
        fields: dict[str, Any],
        change_id: int,
        now: int,
        undo: list[tuple[MemoryTable, Key, Any]],
    ) -> None:
        values = dict(zip(shelf.codec.columns, astuple(row), strict=True)) | fields
        if shelf.codec.revision_ordinal is not None:
            values["revision"] = change_id
        for name, value in values.items():
            if type(value) is FromNow:
                values[name] = now + value.offset
            check_value(shelf.codec.column[name], values[name])
        undo.append((shelf, key, shelf.set_row(key, type(row)(**values))))

    def _tell(self, events: Sequence[Event], now: int) -> None:
        for event in events:
            told = FeedEvent(self._trimmed + len(self._feed) + 1, now, event)
            self._feed.append(told)
            self._history[event.execution_id].append(told)

    def _free(self, line: QueueKey, now: int) -> Iterator[tuple[int, str]]:
        """Rank and id of the rows of a line without a grant in force, best first."""
        shelf = self._tables[Execution]
        entries, number = shelf.indexes["line"], self._queue_ids.get(line, 0)
        for entry in islice(entries, bisect_left(entries, (number,)), bisect_right(entries, (number + 1,))):
            granted_until = shelf.rows[entry[2],].granted_until
            if granted_until is None or granted_until <= now:
                yield entry[1], entry[2]

    def _renew(self, held: LeaseRef, now: int) -> int | None:
        shelf = self._tables[Execution]
        row = shelf.rows.get((held.execution_id,))
        if row is None or (row.attempt_index, row.attempt_id) != (held.attempt_index, held.attempt_id):
            return None
        if not _has_lease(row, LeaseCheck(LeaseRequirement.LIVE, held.lease_id, held.lease_epoch), now):
            return None
        if row.lease_expired_at is not None:
            return None
        until = now + held.lease_ttl_ms
        shelf.set_row((held.execution_id,), replace(row, lease_expires_at=until, lease_renewed_at=now))
        self._tell([lease_event(row, "renewed")], now)
        return until


def _has_lease(row: Any, check: LeaseCheck, now: int) -> bool:
    if row.lease_id != check.lease_id or row.lease_epoch != check.lease_epoch or row.lease_expires_at is None:
        return False
    return bool((row.lease_expires_at > now) == (check.requires is LeaseRequirement.LIVE))
