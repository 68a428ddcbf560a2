"""The Postgres store: the verbs of the port, each one trip wherever that is possible.

links.py     connections, and what their errors mean (faults.py)
batch.py     changes as shapes and arrays; pieces.py has the words for a shape, commit.py the statement
take.py      claiming and renewing (take.sql); claimed.py has what is said of claimed rows
hand.py      a commit that claims what it would put into lines
read.py      load, due and scan, composed from the catalogue
feed.py      how events get their places (feed.sql)
lines.py     which number stands for which line (lines.sql)
wake.py      hints between processes
within.py    a caller's own transaction
schema.py    the schema and how it grows (migrations/)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from flowfabric.errors import StoreUnavailable
from flowfabric.handles import BackendTag
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Execution, LineKey, Payload
from flowfabric.rules.change import Change
from flowfabric.stores.base import (
    Due,
    FeedPage,
    Handed,
    Held,
    Loaded,
    Scan,
    Schema,
    Stamp,
    Take,
    Taken,
    Tally,
    Want,
    Where,
)
from flowfabric.stores.codec import CODEC, tallied
from flowfabric.stores.postgres import read, schema
from flowfabric.stores.postgres import take as taking
from flowfabric.stores.postgres.batch import Batch, lines_of
from flowfabric.stores.postgres.claimed import rows_told
from flowfabric.stores.postgres.commit import commit
from flowfabric.stores.postgres.feed import Feed
from flowfabric.stores.postgres.habits import Habits
from flowfabric.stores.postgres.hand import handing
from flowfabric.stores.postgres.lines import Lines, UnknownLine
from flowfabric.stores.postgres.links import Links, in_transaction
from flowfabric.stores.postgres.pieces import CLOCK
from flowfabric.stores.postgres.wake import Wake
from flowfabric.stores.postgres.within import Within, link_to


def _by_rank(taken: tuple[Execution, Payload]) -> tuple[int, str]:
    return taken[0].rank, taken[0].execution_id


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
    ) -> None:
        """Statements are cached unless a pooler is noticed. `statement_cache=False` is for one in transaction mode that
        was not, True for one that keeps sessions apart or knows prepared statements."""
        self.clock = self._clock = clock
        self._links = Links(dsn, size=pool_size, statement_cache=statement_cache)
        self._lines = Lines(self._links)
        self._habits = Habits(self._lines.number)
        self._feed = Feed(self._links)
        self._wake = Wake(self._links)

    async def open(self, *, migrate: bool) -> Schema:
        return await self._links.write(
            lambda connection: in_transaction(connection, lambda inside: schema.bring_up(inside, migrate=migrate))
        )

    async def close(self) -> None:
        await self._wake.close()
        await self._links.close()

    async def ping(self) -> int:
        now: int = await self._links.read(lambda connection: connection.fetchval(_TIME, self._now()))
        return now

    async def load(self, wants: Sequence[Want]) -> Loaded:
        answer = await self._links.read(lambda connection: read.load(connection, wants, self._now()))
        return await self._lines.decoded(lambda line_at: read.loaded(answer, wants, line_at))

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
        lines = await self._lines.known(take.lines)
        batch = await self._batch(changes)
        if not batch.in_steps:
            batch.handing = handing(changes, batch.rounds[0], take, lines, self._lines.number)
        verdicts, answer = await self._commit(batch, hint)
        if batch.handing is None:
            return Handed(verdicts, [])
        rows = await self._lines.decoded(lambda line_at: rows_told(answer, 3, take, take.stamps, line_at))
        return Handed(verdicts, sorted(rows, key=_by_rank), emptied=bool(rows))  # nobody else stood there

    async def _batch(self, changes: Sequence[Change]) -> Batch:
        await self._lines.add({line for change in changes for line in change.lines})
        try:
            return Batch(changes, self._habits)
        except UnknownLine:
            await self._lines.add(lines_of(changes))
            return Batch(changes, self._habits)

    async def _commit(self, batch: Batch, hint: frozenset[str]) -> tuple[list[int | None], list[Any]]:
        """The verdicts, and the server's answer."""
        with self._wake.along(hint) as carried:
            answer = await self._links.write(lambda connection: commit(connection, batch, self._now(), carried))
        now, yes, *_ = answer[0]
        if hint and carried is None and True in yes:
            self._wake.send(hint)
        return [now if accepted else None for accepted in yes], answer

    async def within(self, connection: Any) -> Within:
        """The store as seen from inside the transaction of a connection that is not ours."""
        return Within(await link_to(connection), self._lines, self._now)

    async def take(self, take: Take) -> Taken:
        lines = await self._lines.known(take.lines)
        if not lines or not take.stamps:
            return Taken(await self.ping(), [])
        await self._lines.add(read.lines_in([*take.becomes.values()]))
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
        answer = await self._links.write(
            lambda connection: taking.take(connection, take, stamps, lines, limit, self._now(), self._lines.number)
        )
        claim = taking.claim(take, lines)
        rows = await self._lines.decoded(lambda line_at: claim.rows(answer, take, stamps, line_at))
        return Taken(answer[0]["now"], rows), answer[0]["more"]

    async def renew(self, leases: Sequence[Held]) -> list[int | None]:
        if not leases:
            return []
        return await self._links.write(lambda connection: taking.renew(connection, leases, self._now()))

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        await self._seen(where)
        words, values = read.due_words(row, column, limit, where, self._now(), self._line_or_none)
        answer = await self._links.read(lambda connection: connection.fetchrow(words, *values))
        return await self._lines.decoded(lambda line_at: read.due(answer, row, line_at))

    async def scan(self, scan: Scan) -> list[Any]:
        await self._seen(scan.where)
        words, values = read.scan_words(scan, self._line_or_none)
        found = await self._links.read(lambda connection: connection.fetch(words, *values))
        decode = CODEC[scan.row].decode_of
        return await self._lines.decoded(lambda line_at: [decode(scan, row, line_at) for row in found])

    async def tally(self, tally: Tally) -> dict[tuple[Any, ...], int]:
        await self._lines.known(read.lines_in(tally.each or ()))
        words, values = read.tally_words(tally, self._line_or_none)
        return tallied(tally.by, await self._links.read(lambda connection: connection.fetch(words, *values)))

    async def lines(self, lane_id: str | None = None) -> list[LineKey]:
        return await self._lines.read(lane_id)

    async def standing(self, lane_id: str) -> list[LineKey]:
        return await self._lines.standing(lane_id)

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

    def on_wake(self, callback: Callable[[frozenset[str]], None]) -> None:
        self._wake.on_wake(callback)

    def _now(self) -> int | None:
        return None if self._clock is None else self._clock()

    def _line_or_none(self, line: LineKey) -> int:
        """The number of a line in a condition; no row stands in a line that does not exist."""
        try:
            return self._lines.number(line)
        except UnknownLine:
            return 0

    async def _seen(self, where: tuple[Where, ...]) -> None:
        """Look up the lines that conditions name."""
        named = [value for one in where for value in (one.value if one.op == "in" else (one.value,))]
        await self._lines.known(read.lines_in(named))
