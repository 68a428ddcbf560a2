"""The Postgres store: the operations of the port, each in one round trip wherever that is possible.

pool.py                connections and retries; errors.py translates driver errors
commit/                plans a batch of changes (plan.py, fragments.py, parameters.py) and composes its statement
                       (statement.py); claim.py claims the rows that a commit would enqueue
claim.py               claim and renew (claim.sql); claim_result.py decodes claimed rows
dead_entries.py        where a claim or a scan of an ordered index starts, so that it skips dead index entries
queue_reads.py         the first rows of ready queues, and which queues are nonempty
reads.py               load, due, scan and count, composed from the catalog
event_log.py           the feed and its positions (event_log.sql)
queue_ids.py           the ids of ready queues (queue_ids.sql)
notifier.py            notifications between processes
caller_transaction.py  the store inside a caller's transaction
snapshot_holders.sql   sessions that keep dead rows from being vacuumed
migrator.py            the schema and its migrations (migrations/)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from flowfabric.errors import StoreUnavailable
from flowfabric.handles import BackendTag
from flowfabric.ids import DEFAULT_PARTITIONS, PartitionCounts
from flowfabric.model.change import Change, RowTemplate
from flowfabric.model.deployment import SnapshotHolder
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.settings import Deadlines
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseIds, LeaseRef
from flowfabric.stores.codec import CODEC, decode_counts
from flowfabric.stores.port import SchemaVersion
from flowfabric.stores.postgres import claim, migrator, reads
from flowfabric.stores.postgres.caller_transaction import CallerTransaction, adapt_connection
from flowfabric.stores.postgres.claim_result import decode_claim_result
from flowfabric.stores.postgres.commit.claim import plan_claim
from flowfabric.stores.postgres.commit.fragments import CLOCK_SQL
from flowfabric.stores.postgres.commit.parameters import ParameterShapes
from flowfabric.stores.postgres.commit.plan import CommitPlan, queues_written
from flowfabric.stores.postgres.commit.statement import commit
from flowfabric.stores.postgres.dead_entries import DeadEntries, NextDueCache, floor_of_claim, floor_of_due
from flowfabric.stores.postgres.errors import BACKEND_FACTS
from flowfabric.stores.postgres.event_log import EventLog
from flowfabric.stores.postgres.notifier import PostgresNotifier
from flowfabric.stores.postgres.pool import ConnectionPool, in_transaction
from flowfabric.stores.postgres.queue_ids import PostgresQueueIds, UnknownQueue, queue_id
from flowfabric.stores.postgres.queue_reads import QueueReads, is_bounded
from flowfabric.stores.postgres.sql import load_statements, number_parameters
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
from flowfabric.stores.verdicts import Unstorable, Verdict, verdict_on


def _queue_order(claimed: tuple[Execution, Payload]) -> tuple[int, str]:
    return claimed[0].rank, claimed[0].execution_id


_KINDS = """
select p.execution_id, p.execution_kind
  from unnest($1::text[]) as i(execution_id)
  join ff_payload p using (execution_id)
"""
_SNAPSHOT_HOLDERS = number_parameters(load_statements("snapshot_holders.sql")["snapshot_holders"], ("limit",))
_TIME = f"select {CLOCK_SQL.format(given='$1::bigint')}"


class PostgresStore:
    """A store in a PostgreSQL database, shared by any number of processes."""

    tag = BackendTag.POSTGRES
    concurrent_commits = 2
    batch_limit = 1000
    deletes_in_pages = False
    claim_parts = 1
    executes_in_order = False

    def __init__(
        self,
        dsn: str,
        clock: Callable[[], int] | None = None,
        *,
        pool_size: int = 8,
        statement_cache: bool | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Prepared statements are cached unless a pooler is detected.

        Pass `statement_cache=False` for a transaction pooler that is not detected, True for a pooler that pins sessions
        or supports prepared statements.
        """
        self.clock = self._clock = clock
        self._pool = ConnectionPool(
            dsn, size=pool_size, statement_cache=statement_cache, deadlines=deadlines or Deadlines()
        )
        self._queue_ids = PostgresQueueIds(self._pool)
        self._shapes = ParameterShapes(self._queue_ids.checked_id)
        self._dead_entries = DeadEntries()
        self._queue_reads = QueueReads(self._pool, self._queue_ids, self._dead_entries, self._now)
        self._next_due = NextDueCache()
        self._event_log = EventLog(self._pool)
        self._notifier = PostgresNotifier(self._pool)

    async def open(self, *, migrate: bool, partitions: PartitionCounts = DEFAULT_PARTITIONS) -> SchemaVersion:
        found = await self._pool.write(
            lambda connection: in_transaction(
                connection, lambda transaction: migrator.ensure_schema(transaction, migrate=migrate)
            ),
            command_s=migrator.MIGRATION_TIMEOUT_S if migrate else None,
        )
        self._pool.schema_watch = migrator.SchemaWatch()
        return found

    async def close(self) -> None:
        await self._notifier.close()
        await self._pool.close()

    async def ping(self) -> int:
        now: int = await self._pool.read(lambda connection: connection.fetchval(_TIME, self._now()))
        return now

    async def load(self, requested: Sequence[Read]) -> Loaded:
        result = await self._pool.read(lambda connection: reads.fetch_rows(connection, requested, self._now()))
        return await self._queue_ids.decode(lambda decode_queue: reads.decode_rows(result, requested, decode_queue))

    def try_load_now(self, reads: Sequence[Read]) -> Loaded | None:
        return None

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        if not changes:
            return []
        try:
            verdicts, _ = await self._commit(await self._plan(changes), topics)
        except Unstorable as fault:
            return await self._commit_in_halves(changes, topics, fault)
        return verdicts

    async def _commit_in_halves(
        self, changes: Sequence[Change], topics: frozenset[str], fault: Unstorable
    ) -> list[Verdict]:
        """Commit a batch that failed with `fault` in halves, until each change at fault is alone."""
        if len(changes) == 1:
            return [verdict_on(fault)]
        half = len(changes) // 2
        verdicts = await self.commit(changes[:half], topics)
        try:
            return verdicts + await self.commit(changes[half:], topics)
        except StoreUnavailable as error:
            if int not in map(type, verdicts):
                raise
            # The first half was written, so the caller has to find out about each change.
            raise StoreUnavailable(error.detail, **BACKEND_FACTS, source=error.source, in_doubt=True) from error

    async def commit_and_claim(
        self, changes: Sequence[Change], topics: frozenset[str], request: ClaimRequest
    ) -> CommitAndClaimResult:
        if not changes:
            return CommitAndClaimResult([], [])
        queue_ids = [queue_id(queue) for queue in request.queues]
        try:
            plan = await self._plan(changes)
            if not plan.is_multi_statement and not self._dead_entries.may_hide_rows(queue_ids):
                plan.claim = plan_claim(changes, plan.rounds[0], request, queue_ids)
            verdicts, result = await self._commit(plan, topics)
        except Unstorable as fault:
            return CommitAndClaimResult(await self._commit_in_halves(changes, topics, fault), [])
        if plan.claim is None:
            return CommitAndClaimResult(verdicts, [])
        rows = await self._queue_ids.decode(
            lambda decode_queue: decode_claim_result(result, 3, request, request.lease_ids, decode_queue)
        )
        # Rows are claimed only if the queues were empty, so nothing is left in them.
        return CommitAndClaimResult(verdicts, sorted(rows, key=_queue_order), drained=bool(rows))

    async def _plan(self, changes: Sequence[Change]) -> CommitPlan:
        queues = {queue for change in changes for queue in change.queues}
        while True:
            await self._queue_ids.register(queues)
            try:
                plan = CommitPlan(changes, self._shapes)
            except UnknownQueue:  # also after a lost connection, when every queue has to be registered again
                queues |= queues_written(changes)
                continue
            plan.queues = self._queue_ids.drain_written(queues)
            return plan

    async def _commit(self, plan: CommitPlan, topics: frozenset[str]) -> tuple[list[Verdict], list[Any]]:
        """Return the verdicts and the statement's result."""
        with self._notifier.attach_to_commit(topics) as message:
            result = await self._pool.write(lambda connection: self._commit_on(connection, plan, message))
        now, verdicts, *_ = result[0]
        if topics and message is None and True in verdicts:
            self._notifier.notify(topics)
        return [now if accepted else None for accepted in verdicts], result

    async def _commit_on(self, connection: Any, plan: CommitPlan, message: str | None) -> list[Any]:
        ensure = plan.queues is not None and not self._queue_ids.is_ensured(connection, plan.queues[0])
        result = await commit(connection, plan, self._now(), message, ensure_queues=ensure)
        if ensure and plan.queues is not None:
            self._queue_ids.mark_ensured(connection, plan.queues[0])
        return result

    async def join_transaction(self, connection: Any) -> CallerTransaction:
        """Join the open transaction of a caller's connection."""
        return CallerTransaction(await adapt_connection(connection), self._queue_ids, self._now)

    async def claim_rows(self, request: ClaimRequest) -> ClaimedRows:
        queue_ids = [queue_id(queue) for queue in request.queues]
        if not queue_ids or not request.lease_ids:
            return ClaimedRows(await self.ping(), [])
        heads_per_row = claim.HEADS_PER_ROW
        claimed, more = await self._claim(request, request.lease_ids, queue_ids, heads_per_row)
        has_locked = claimed.has_locked
        while not claimed.rows:  # concurrent transactions had locked the heads, or a slice had no rows: read further
            if more and heads_per_row < claim.MAX_HEADS_PER_ROW:
                heads_per_row *= claim.HEADS_FACTOR
            elif not self._dead_entries.may_read_more(queue_ids):
                break
            claimed, more = await self._claim(request, request.lease_ids, queue_ids, heads_per_row)
            has_locked |= claimed.has_locked
        if not claimed.rows:
            return ClaimedRows(claimed.now, [], has_locked)
        if more and len(claimed.rows) < len(request.lease_ids):
            used = {row.lease_id for row, _ in claimed.rows}
            unused = [ids for ids in request.lease_ids if ids.lease_id not in used]
            try:
                again, _ = await self._claim(request, unused, queue_ids, heads_per_row * claim.HEADS_FACTOR)
            except StoreUnavailable as error:
                if error.in_doubt:
                    raise  # the caller finds all rows, those of the first claim included, by their lease ids
                return claimed  # the second claim wrote nothing
            rows = sorted(claimed.rows + again.rows, key=_queue_order)
            claimed = ClaimedRows(again.now, rows)
        return claimed

    async def _claim(
        self, request: ClaimRequest, lease_ids: Sequence[LeaseIds], queue_ids: list[int], heads_per_row: int
    ) -> tuple[ClaimedRows, bool]:
        """Return the claimed rows, and whether a second claim might find more."""
        max_heads = heads_per_row * len(request.lease_ids)
        ranges, index_slice = (
            self._dead_entries.ranges_to_read(queue_ids) if self._dead_entries.may_hide_rows(queue_ids) else ([], None)
        )
        result = await self._pool.write(
            lambda connection: claim.claim_rows(
                connection, request, lease_ids, queue_ids, max_heads, self._now(), ranges
            )
        )
        now, more, entries, has_locked = result[0][:4]
        statement = claim.claim_statement(request, queue_ids, ranged=bool(ranges))
        rows = await self._queue_ids.decode(
            lambda decode_queue: statement.decode(result, request, lease_ids, decode_queue)
        )
        found = [row for row, _ in rows]
        is_drained = not (more or has_locked) and len(rows) < len(lease_ids)
        floor = floor_of_claim(found, drained=is_drained, now=now)
        is_slice_wanted = index_slice is not None and (
            more or any((row.rank, row.execution_id) <= index_slice[1].high for row in found)
        )
        self._dead_entries.record_scan(
            queue_ids, index_slice, entries, len(rows), floor, is_slice_wanted=is_slice_wanted
        )
        return ClaimedRows(now, rows, has_locked), more

    async def renew(self, leases: Sequence[LeaseRef], template: RowTemplate) -> list[int | None]:
        if not leases:
            return []
        return await self._pool.write(lambda connection: claim.renew(connection, leases, template, self._now()))

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        key = [(row, column, where)]
        ranges, index_slice = (
            self._dead_entries.ranges_to_read(key) if self._dead_entries.may_hide_rows(key) else ([], None)
        )
        is_cached = self._next_due.has(key[0])
        statement, values = reads.due_statement(
            row, column, limit, where, self._now(), queue_id, ranges=ranges, include_next=not is_cached
        )
        result = await self._pool.read(lambda connection: connection.fetchrow(statement, *values))
        due = await self._queue_ids.decode(lambda decode_queue: reads.decode_due(result, row, decode_queue))
        began, ended, last = result["began"], result["ended"], result["last"]
        count = len(due.rows)
        floor = floor_of_due(due.rows, column, due.now, full=count >= limit, dead=ended - began - count)
        self._dead_entries.record_scan(key, index_slice, ended - began, count, floor)
        if is_cached:
            return Due(due.now, due.rows, self._next_due.get(key[0]))
        self._next_due.put(key[0], due.next_at, last - ended)
        return due

    async def scan(self, scan: Scan) -> list[Any]:
        if is_bounded(scan):
            return await self._queue_reads.scan(scan)
        statement, values = reads.scan_statement(scan, queue_id)
        result = await self._pool.read(lambda connection: connection.fetch(statement, *values))
        decode = CODEC[scan.row].decode_scanned
        return await self._queue_ids.decode(lambda decode_queue: [decode(scan, row, decode_queue) for row in result])

    async def search(self, search: Search) -> SearchPage:
        # The end is found first and bounds the rows, so that a row which is created or deleted meanwhile moves nothing.
        end_statement, end_values = reads.search_end_statement(search, queue_id)
        end = await self._pool.read(lambda connection: connection.fetchrow(end_statement, *end_values))
        end = end and tuple(end)
        statement, values = reads.search_statement(search, end, queue_id)
        result = await self._pool.read(lambda connection: connection.fetch(statement, *values))
        decode = CODEC[Execution].decode
        found = await self._queue_ids.decode(
            lambda decode_queue: [FoundExecution(decode(row[:-1], decode_queue), row["kind"]) for row in result]
        )
        return SearchPage(found, found[-1].position if len(found) >= search.limit else end)

    async def kinds(self, execution_ids: Sequence[str]) -> dict[str, str]:
        result = await self._pool.read(lambda connection: connection.fetch(_KINDS, list(execution_ids)))
        return {row["execution_id"]: row["execution_kind"] for row in result}

    async def count_grouped(self, query: GroupedCount) -> dict[tuple[Any, ...], int]:
        statement, values = reads.count_statement(query, queue_id)
        result = await self._pool.read(lambda connection: connection.fetch(statement, *values))
        return decode_counts(query.group_by, result)

    async def queues(self, lane_id: str | None = None) -> list[QueueKey]:
        return await self._queue_ids.load_keys(lane_id)

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        return await self._queue_reads.nonempty_queues(lane_id)

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        return await self._queue_ids.executions_in_missing_queues(limit)

    async def snapshot_holders(self, limit: int) -> list[SnapshotHolder]:
        result = await self._pool.read(lambda connection: connection.fetch(_SNAPSHOT_HOLDERS, limit))
        return [SnapshotHolder(*row) for row in result]

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        return await self._queue_ids.lanes(after, limit)

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        return await self._event_log.read(topic, after, limit)

    async def feed_end(self) -> int:
        return await self._event_log.end()

    async def trim_feed(self, before: int, limit: int) -> int:
        return await self._event_log.trim(before, limit)

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        return await self._event_log.history(execution_id, topic, limit, without)

    def notify(self, topics: frozenset[str]) -> None:
        self._notifier.notify(topics)

    def limit_commands(self, command_s: float) -> None:
        self._pool.deadlines = self._pool.deadlines.limited(command_s)

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        self._notifier.on_notify(callback)

    def _now(self) -> int | None:
        return None if self._clock is None else self._clock()
