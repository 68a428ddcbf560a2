"""The Postgres store: the verbs of the port, each one trip wherever that is possible.

links.py     connections, and what their errors mean (faults.py)
batch.py     changes as shapes and arrays; pieces.py has the words for a shape, commit.py the statement
take.py      claiming and renewing (claim.sql); claimed.py has what is said of claimed rows
dead_entries.py where a claim or another read of an ordered index begins
queue_reads.py the first rows of ready queues, and which of them have work
hand.py      a commit that claims what it would put into lines
read.py      load, due and scan, composed from the catalogue
feed.py      how events get their places (event_log.sql)
lines.py     which number stands for which line (queue_ids.sql)
wake.py      hints between processes
within.py    a caller's own transaction
horizon.sql  who keeps dead rows from being removed
schema.py    the schema and how it grows (migrations/)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from flowfabric.errors import StoreUnavailable
from flowfabric.handles import BackendTag
from flowfabric.model.change import Change
from flowfabric.model.deployment import SnapshotHolder
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.settings import Deadlines
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseIds, LeaseRef
from flowfabric.stores.codec import CODEC, decode_counts
from flowfabric.stores.port import SchemaVersion
from flowfabric.stores.postgres import claim as taking
from flowfabric.stores.postgres import migrator, reads
from flowfabric.stores.postgres.caller_transaction import CallerTransaction, adapt_connection
from flowfabric.stores.postgres.claim_result import decode_claim_result
from flowfabric.stores.postgres.commit.claim import plan_claim
from flowfabric.stores.postgres.commit.fragments import CLOCK_SQL
from flowfabric.stores.postgres.commit.parameters import ParameterShapes
from flowfabric.stores.postgres.commit.plan import CommitPlan, queues_written
from flowfabric.stores.postgres.commit.statement import commit
from flowfabric.stores.postgres.dead_entries import DeadEntries, NextDueCache, floor_of_claim, floor_of_due
from flowfabric.stores.postgres.event_log import EventLog
from flowfabric.stores.postgres.notifier import PostgresNotifier
from flowfabric.stores.postgres.pool import ConnectionPool, in_transaction
from flowfabric.stores.postgres.queue_ids import PostgresQueueIds, UnknownQueue, queue_id
from flowfabric.stores.postgres.queue_reads import QueueReads, is_bounded
from flowfabric.stores.postgres.sql import load_statements, number_parameters
from flowfabric.stores.queries import Due, FeedPage, GroupedCount, Loaded, Read, Scan, Where


def _by_rank(taken: tuple[Execution, Payload]) -> tuple[int, str]:
    return taken[0].rank, taken[0].execution_id


_HOLDERS = number_parameters(load_statements("horizon.sql")["holders"], ("limit",))
_TIME = f"select {CLOCK_SQL.format(given='$1::bigint')}"


class PostgresStore:
    """Rows in a PostgreSQL database, shared by any number of processes."""

    tag = BackendTag.POSTGRES
    concurrent_commits = 2
    batch_limit = 1000
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
        """Statements are cached unless a pooler is noticed. `statement_cache=False` is for one in transaction mode that
        was not, True for one that keeps sessions apart or knows prepared statements."""
        self.clock = self._clock = clock
        self._pool = ConnectionPool(
            dsn, size=pool_size, statement_cache=statement_cache, deadlines=deadlines or Deadlines()
        )
        self._queue_ids = PostgresQueueIds(self._pool)
        self._habits = ParameterShapes(self._queue_ids.checked_id)
        self._dead_entries = DeadEntries()
        self._queue_reads = QueueReads(self._pool, self._queue_ids, self._dead_entries, self._now)
        self._next_instants = NextDueCache()
        self._feed = EventLog(self._pool)
        self._notifier = PostgresNotifier(self._pool)

    async def open(self, *, migrate: bool) -> SchemaVersion:
        found = await self._pool.write(
            lambda connection: in_transaction(
                connection, lambda inside: migrator.ensure_schema(inside, migrate=migrate)
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

    async def load(self, wants: Sequence[Read]) -> Loaded:
        answer = await self._pool.read(lambda connection: reads.fetch_rows(connection, wants, self._now()))
        return await self._queue_ids.decode(lambda line_at: reads.decode_rows(answer, wants, line_at))

    def try_load_now(self, wants: Sequence[Read]) -> Loaded | None:
        return None

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        if not changes:
            return []
        verdicts, _ = await self._commit(await self._batch(changes), hint)
        return verdicts

    async def commit_and_claim(
        self, changes: Sequence[Change], hint: frozenset[str], take: ClaimRequest
    ) -> CommitAndClaimResult:
        if not changes:
            return CommitAndClaimResult([], [])
        batch = await self._batch(changes)
        lines = [queue_id(line) for line in take.queues]
        if not batch.is_multi_statement and not self._dead_entries.may_hide_rows(lines):
            batch.claim = plan_claim(changes, batch.rounds[0], take, lines, queue_id)
        verdicts, answer = await self._commit(batch, hint)
        if batch.claim is None:
            return CommitAndClaimResult(verdicts, [])
        rows = await self._queue_ids.decode(
            lambda line_at: decode_claim_result(answer, 3, take, take.lease_ids, line_at)
        )
        return CommitAndClaimResult(verdicts, sorted(rows, key=_by_rank), drained=bool(rows))  # nobody else stood there

    async def _batch(self, changes: Sequence[Change]) -> CommitPlan:
        listed = {line for change in changes for line in change.queues}
        while True:
            await self._queue_ids.register(listed)
            try:
                batch = CommitPlan(changes, self._habits)
            except UnknownQueue:  # also when a connection broke since, and every queue is to be checked again
                listed |= queues_written(changes)
                continue
            batch.queues = self._queue_ids.drain_written(listed)
            return batch

    async def _commit(self, batch: CommitPlan, hint: frozenset[str]) -> tuple[list[int | None], list[Any]]:
        """The verdicts, and the server's answer."""
        with self._notifier.attach_to_commit(hint) as carried:
            answer = await self._pool.write(lambda connection: self._commit_on(connection, batch, carried))
        now, yes, *_ = answer[0]
        if hint and carried is None and True in yes:
            self._notifier.notify(hint)
        return [now if accepted else None for accepted in yes], answer

    async def _commit_on(self, connection: Any, batch: CommitPlan, hint: str | None) -> list[Any]:
        ensures = batch.queues is not None and not self._queue_ids.is_ensured(connection, batch.queues[0])
        answer = await commit(connection, batch, self._now(), hint, ensure_queues=ensures)
        if ensures and batch.queues is not None:
            self._queue_ids.mark_ensured(connection, batch.queues[0])
        return answer

    async def join_transaction(self, connection: Any) -> CallerTransaction:
        """The store as seen from inside the transaction of a connection that is not ours."""
        return CallerTransaction(await adapt_connection(connection), self._queue_ids, self._now)

    async def claim_rows(self, take: ClaimRequest) -> ClaimedRows:
        lines = [queue_id(line) for line in take.queues]
        if not lines or not take.lease_ids:
            return ClaimedRows(await self.ping(), [])
        await self._queue_ids.register(reads.queues_in([*take.shared_fields.values()]))
        taken, more = await self._take(take, take.lease_ids, lines, taking.HEADS_PER_ROW)
        while not taken.rows and self._dead_entries.may_read_more(lines):
            taken, more = await self._take(take, take.lease_ids, lines, taking.HEADS_PER_ROW)
        if more and len(taken.rows) < len(take.lease_ids):
            # Others held so many of the heads that were looked at, or changed some of them meanwhile: look further.
            used = {row.lease_id for row, _ in taken.rows}
            missing = [stamp for stamp in take.lease_ids if stamp.lease_id not in used]
            try:
                again, _ = await self._take(take, missing, lines, taking.HEADS_PER_ROW_ON_RETRY)
            except StoreUnavailable as lost:
                if lost.in_doubt or not taken.rows:
                    raise  # all rows, those of the first look among them, can be found by their stamps
                return taken  # these are claimed, and nothing else is
            rows = sorted(taken.rows + again.rows, key=_by_rank)
            taken = ClaimedRows(again.now, rows)
        return taken

    async def _take(
        self, take: ClaimRequest, stamps: Sequence[LeaseIds], lines: list[int], reach: int
    ) -> tuple[ClaimedRows, bool]:
        """The rows that were taken, and whether a second look might find more."""
        limit = reach * len(take.lease_ids)
        ranges, part = (
            self._dead_entries.ranges_to_read(lines) if self._dead_entries.may_hide_rows(lines) else ([], None)
        )
        answer = await self._pool.write(
            lambda connection: taking.claim_rows(connection, take, stamps, lines, limit, self._now(), queue_id, ranges)
        )
        now, more, entries = answer[0][:3]
        claim = taking.claim_statement(take, lines, ranged=bool(ranges))
        rows = await self._queue_ids.decode(lambda line_at: claim.decode(answer, take, stamps, line_at))
        floor = floor_of_claim([row for row, _ in rows], full=len(rows) == len(stamps), now=now)
        self._dead_entries.record_scan(lines, part, entries, len(rows), floor)
        return ClaimedRows(now, rows), more

    async def renew(self, leases: Sequence[LeaseRef]) -> list[int | None]:
        if not leases:
            return []
        return await self._pool.write(lambda connection: taking.renew(connection, leases, self._now()))

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        key = [(row, column, where)]
        ranges, part = self._dead_entries.ranges_to_read(key) if self._dead_entries.may_hide_rows(key) else ([], None)
        known = self._next_instants.has(key[0])
        words, values = reads.due_statement(
            row, column, limit, where, self._now(), queue_id, ranges=ranges, include_next=not known
        )
        answer = await self._pool.read(lambda connection: connection.fetchrow(words, *values))
        found = await self._queue_ids.decode(lambda line_at: reads.decode_due(answer, row, line_at))
        began, ended, last = answer["began"], answer["ended"], answer["last"]
        count = len(found.rows)
        floor = floor_of_due(found.rows, column, found.now, full=count >= limit, dead=ended - began - count)
        self._dead_entries.record_scan(key, part, ended - began, count, floor)
        if known:
            return Due(found.now, found.rows, self._next_instants.get(key[0]))
        self._next_instants.put(key[0], found.next_at, last - ended)
        return found

    async def scan(self, scan: Scan) -> list[Any]:
        if is_bounded(scan):
            return await self._queue_reads.scan(scan)
        words, values = reads.scan_statement(scan, queue_id)
        found = await self._pool.read(lambda connection: connection.fetch(words, *values))
        decode = CODEC[scan.row].decode_scanned
        return await self._queue_ids.decode(lambda line_at: [decode(scan, row, line_at) for row in found])

    async def count_grouped(self, tally: GroupedCount) -> dict[tuple[Any, ...], int]:
        words, values = reads.count_statement(tally, queue_id)
        return decode_counts(tally.group_by, await self._pool.read(lambda connection: connection.fetch(words, *values)))

    async def queues(self, lane_id: str | None = None) -> list[QueueKey]:
        return await self._queue_ids.load_keys(lane_id)

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        return await self._queue_reads.standing(lane_id)

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        return await self._queue_ids.executions_in_missing_queues(limit)

    async def snapshot_holders(self, limit: int) -> list[SnapshotHolder]:
        found = await self._pool.read(lambda connection: connection.fetch(_HOLDERS, limit))
        return [SnapshotHolder(*row) for row in found]

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        return await self._queue_ids.lanes(after, limit)

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        return await self._feed.read(topic, after, limit)

    async def feed_end(self) -> int:
        return await self._feed.end()

    async def trim_feed(self, before: int, limit: int) -> int:
        return await self._feed.trim(before, limit)

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        return await self._feed.history(execution_id, topic, limit, without)

    def notify(self, topics: frozenset[str]) -> None:
        self._notifier.notify(topics)

    def limit_commands(self, command_s: float) -> None:
        self._pool.deadlines = self._pool.deadlines.limited(command_s)

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        self._notifier.on_notify(callback)

    def _now(self) -> int | None:
        return None if self._clock is None else self._clock()
