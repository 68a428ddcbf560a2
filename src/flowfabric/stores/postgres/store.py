"""The Postgres store: the verbs of the port, each one trip wherever that is possible.

links.py     connections, and what their errors mean (faults.py)
batch.py     changes as shapes and arrays; pieces.py has the words for a shape, commit.py the statement
take.py      claiming and renewing (take.sql); claimed.py has what is said of claimed rows
dead_entries.py where a claim or another read of an ordered index begins
queue_reads.py the first rows of ready queues, and which of them have work
hand.py      a commit that claims what it would put into lines
read.py      load, due and scan, composed from the catalogue
feed.py      how events get their places (feed.sql)
lines.py     which number stands for which line (lines.sql)
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
from flowfabric.model.execution import Execution, LineKey, Payload
from flowfabric.settings import Deadlines
from flowfabric.stores.claims import Handed, Held, Stamp, Take, Taken
from flowfabric.stores.codec import CODEC, tallied
from flowfabric.stores.port import Schema
from flowfabric.stores.postgres import claim as taking
from flowfabric.stores.postgres import migrator, reads
from flowfabric.stores.postgres.caller_transaction import Within, link_to
from flowfabric.stores.postgres.claim_result import rows_told
from flowfabric.stores.postgres.commit.claim import handing
from flowfabric.stores.postgres.commit.fragments import CLOCK
from flowfabric.stores.postgres.commit.parameters import Habits
from flowfabric.stores.postgres.commit.plan import Batch, lines_of
from flowfabric.stores.postgres.commit.statement import commit
from flowfabric.stores.postgres.dead_entries import DeadEntries, NextInstants, floor_of_claim, floor_of_due
from flowfabric.stores.postgres.event_log import Feed
from flowfabric.stores.postgres.notifier import Wake
from flowfabric.stores.postgres.pool import Links, in_transaction
from flowfabric.stores.postgres.queue_ids import Lines, UnknownLine, number_of
from flowfabric.stores.postgres.queue_reads import QueueReads, is_bounded
from flowfabric.stores.postgres.sql import numbered, pieces
from flowfabric.stores.queries import Due, FeedPage, Loaded, Scan, Tally, Want, Where


def _by_rank(taken: tuple[Execution, Payload]) -> tuple[int, str]:
    return taken[0].rank, taken[0].execution_id


_HOLDERS = numbered(pieces("horizon.sql")["holders"], ("limit",))
_TIME = f"select {CLOCK.format(given='$1::bigint')}"


class PostgresStore:
    """Rows in a PostgreSQL database, shared by any number of processes."""

    tag = BackendTag.POSTGRES
    commit_lanes = 2
    batch_limit = 1000
    in_order = False

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
        self._links = Links(dsn, size=pool_size, statement_cache=statement_cache, deadlines=deadlines or Deadlines())
        self._lines = Lines(self._links)
        self._habits = Habits(self._lines.number)
        self._dead_entries = DeadEntries()
        self._queue_reads = QueueReads(self._links, self._lines, self._dead_entries, self._now)
        self._next_instants = NextInstants()
        self._feed = Feed(self._links)
        self._wake = Wake(self._links)

    async def open(self, *, migrate: bool) -> Schema:
        found = await self._links.write(
            lambda connection: in_transaction(connection, lambda inside: migrator.bring_up(inside, migrate=migrate)),
            command_s=migrator.MIGRATION_S if migrate else None,
        )
        self._links.watch = migrator.Watch()
        return found

    async def close(self) -> None:
        await self._wake.close()
        await self._links.close()

    async def ping(self) -> int:
        now: int = await self._links.read(lambda connection: connection.fetchval(_TIME, self._now()))
        return now

    async def load(self, wants: Sequence[Want]) -> Loaded:
        answer = await self._links.read(lambda connection: reads.load(connection, wants, self._now()))
        return await self._lines.decoded(lambda line_at: reads.loaded(answer, wants, line_at))

    def peek(self, wants: Sequence[Want]) -> Loaded | None:
        return None

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        if not changes:
            return []
        verdicts, _ = await self._commit(await self._batch(changes), hint)
        return verdicts

    async def hand_over(self, changes: Sequence[Change], hint: frozenset[str], take: Take) -> Handed:
        if not changes:
            return Handed([], [])
        batch = await self._batch(changes)
        lines = [number_of(line) for line in take.lines]
        if not batch.in_steps and not self._dead_entries.hide(lines):
            batch.handing = handing(changes, batch.rounds[0], take, lines, number_of)
        verdicts, answer = await self._commit(batch, hint)
        if batch.handing is None:
            return Handed(verdicts, [])
        rows = await self._lines.decoded(lambda line_at: rows_told(answer, 3, take, take.stamps, line_at))
        return Handed(verdicts, sorted(rows, key=_by_rank), emptied=bool(rows))  # nobody else stood there

    async def _batch(self, changes: Sequence[Change]) -> Batch:
        listed = {line for change in changes for line in change.lines}
        while True:
            await self._lines.add(listed)
            try:
                batch = Batch(changes, self._habits)
            except UnknownLine:  # also when a connection broke since, and every queue is to be checked again
                listed |= lines_of(changes)
                continue
            batch.queues = self._lines.written(listed)
            return batch

    async def _commit(self, batch: Batch, hint: frozenset[str]) -> tuple[list[int | None], list[Any]]:
        """The verdicts, and the server's answer."""
        with self._wake.along(hint) as carried:
            answer = await self._links.write(lambda connection: self._commit_on(connection, batch, carried))
        now, yes, *_ = answer[0]
        if hint and carried is None and True in yes:
            self._wake.send(hint)
        return [now if accepted else None for accepted in yes], answer

    async def _commit_on(self, connection: Any, batch: Batch, hint: str | None) -> list[Any]:
        ensures = batch.queues is not None and not self._lines.ensured(connection, batch.queues[0])
        answer = await commit(connection, batch, self._now(), hint, ensures=ensures)
        if ensures and batch.queues is not None:
            self._lines.note_ensured(connection, batch.queues[0])
        return answer

    async def within(self, connection: Any) -> Within:
        """The store as seen from inside the transaction of a connection that is not ours."""
        return Within(await link_to(connection), self._lines, self._now)

    async def take(self, take: Take) -> Taken:
        lines = [number_of(line) for line in take.lines]
        if not lines or not take.stamps:
            return Taken(await self.ping(), [])
        await self._lines.add(reads.lines_in([*take.becomes.values()]))
        taken, more = await self._take(take, take.stamps, lines, taking.REACH)
        while not taken.rows and self._dead_entries.affords(lines):
            taken, more = await self._take(take, take.stamps, lines, taking.REACH)
        if more and len(taken.rows) < len(take.stamps):
            # Others held so many of the heads that were looked at, or changed some of them meanwhile: look further.
            used = {row.lease_id for row, _ in taken.rows}
            missing = [stamp for stamp in take.stamps if stamp.lease_id not in used]
            try:
                again, _ = await self._take(take, missing, lines, taking.LONG_REACH)
            except StoreUnavailable as lost:
                if lost.in_doubt or not taken.rows:
                    raise  # all rows, those of the first look among them, can be found by their stamps
                return taken  # these are claimed, and nothing else is
            rows = sorted(taken.rows + again.rows, key=_by_rank)
            taken = Taken(again.now, rows)
        return taken

    async def _take(self, take: Take, stamps: Sequence[Stamp], lines: list[int], reach: int) -> tuple[Taken, bool]:
        """The rows that were taken, and whether a second look might find more."""
        limit = reach * len(take.stamps)
        ranges, part = self._dead_entries.ranges(lines) if self._dead_entries.hide(lines) else ([], None)
        answer = await self._links.write(
            lambda connection: taking.take(connection, take, stamps, lines, limit, self._now(), number_of, ranges)
        )
        now, more, entries = answer[0][:3]
        claim = taking.claim(take, lines, ranged=bool(ranges))
        rows = await self._lines.decoded(lambda line_at: claim.rows(answer, take, stamps, line_at))
        floor = floor_of_claim([row for row, _ in rows], full=len(rows) == len(stamps), now=now)
        self._dead_entries.note(lines, part, entries, len(rows), floor)
        return Taken(now, rows), more

    async def renew(self, leases: Sequence[Held]) -> list[int | None]:
        if not leases:
            return []
        return await self._links.write(lambda connection: taking.renew(connection, leases, self._now()))

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        key = [(row, column, where)]
        ranges, part = self._dead_entries.ranges(key) if self._dead_entries.hide(key) else ([], None)
        known = self._next_instants.knows(key[0])
        words, values = reads.due_words(
            row, column, limit, where, self._now(), number_of, ranges=ranges, looks_ahead=not known
        )
        answer = await self._links.read(lambda connection: connection.fetchrow(words, *values))
        found = await self._lines.decoded(lambda line_at: reads.due(answer, row, line_at))
        began, ended, last = answer["began"], answer["ended"], answer["last"]
        count = len(found.rows)
        floor = floor_of_due(found.rows, column, found.now, full=count >= limit, dead=ended - began - count)
        self._dead_entries.note(key, part, ended - began, count, floor)
        if known:
            return Due(found.now, found.rows, self._next_instants.get(key[0]))
        self._next_instants.keep(key[0], found.next_at, last - ended)
        return found

    async def scan(self, scan: Scan) -> list[Any]:
        if is_bounded(scan):
            return await self._queue_reads.scan(scan)
        words, values = reads.scan_words(scan, number_of)
        found = await self._links.read(lambda connection: connection.fetch(words, *values))
        decode = CODEC[scan.row].decode_of
        return await self._lines.decoded(lambda line_at: [decode(scan, row, line_at) for row in found])

    async def tally(self, tally: Tally) -> dict[tuple[Any, ...], int]:
        words, values = reads.tally_words(tally, number_of)
        return tallied(tally.by, await self._links.read(lambda connection: connection.fetch(words, *values)))

    async def lines(self, lane_id: str | None = None) -> list[LineKey]:
        return await self._lines.read(lane_id)

    async def standing(self, lane_id: str) -> list[LineKey]:
        return await self._queue_reads.standing(lane_id)

    async def unlisted(self, limit: int) -> list[str]:
        return await self._lines.unlisted(limit)

    async def snapshot_holders(self, limit: int) -> list[SnapshotHolder]:
        found = await self._links.read(lambda connection: connection.fetch(_HOLDERS, limit))
        return [SnapshotHolder(*row) for row in found]

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        return await self._lines.lanes(after, limit)

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        return await self._feed.read(topic, after, limit)

    async def feed_end(self) -> int:
        return await self._feed.end()

    async def trim_feed(self, before: int, limit: int) -> int:
        return await self._feed.trim(before, limit)

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        return await self._feed.history(execution_id, topic, limit, without)

    def notify(self, topics: frozenset[str]) -> None:
        self._wake.send(topics)

    def limit_commands(self, command_s: float) -> None:
        self._links.deadlines = self._links.deadlines.limited(command_s)

    def on_wake(self, callback: Callable[[frozenset[str]], None]) -> None:
        self._wake.on_wake(callback)

    def _now(self) -> int | None:
        return None if self._clock is None else self._clock()
