"""The SQLite store: one file, one writer thread a process, whole batches in one transaction.

Three threads, each with a connection of its own: one writes, one loads by key, one makes lists, so that a long list
never stands before a claim. A few rows by key are read on the caller's own (`glance`). Processes take turns at a lock
file, ring each other's bell (`wake`) and share one clock (`file_clock`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apsw
import msgspec

from flowfabric.clock import Clock
from flowfabric.errors import InvalidInput, StoreFault
from flowfabric.handles import BackendTag
from flowfabric.model.change import Change
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import LineKey
from flowfabric.stores.claims import Handed, Held, Take, Taken
from flowfabric.stores.port import Schema
from flowfabric.stores.queries import Due, FeedPage, Loaded, Scan, Tally, Want, Where
from flowfabric.stores.sqlite import migrator, reads, writes
from flowfabric.stores.sqlite.connection_thread import Desk, WritingDesk
from flowfabric.stores.sqlite.errors import unavailable
from flowfabric.stores.sqlite.file_clock import FileClock, GivenClock
from flowfabric.stores.sqlite.file_lock import Spot, Turn, refuse_network
from flowfabric.stores.sqlite.inline_reader import Glance
from flowfabric.stores.sqlite.notifier import Wake
from flowfabric.stores.sqlite.permissions import create_database
from flowfabric.stores.sqlite.queue_ids import Lines, LinesOfWriter

BUSY_MS = 5_000  # how long a foreign writer is waited for
CACHE_KIB = 4 * 1024  # small: SQLite walks through the whole cache at the end of a transaction that split a page
STATEMENTS = 400
CHECKPOINT_PAGES = 1000  # a log that is written over costs half as much to sync as one that still grows


class SQLiteStore:
    """Rows in one file; a single writer, so every batch is one short transaction."""

    tag = BackendTag.SQLITE
    commit_lanes = 2
    batch_limit = 500
    in_order = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Clock | None = None,
        synchronous: str = "FULL",
    ) -> None:
        """`synchronous=NORMAL` may lose the last commits when the machine loses power, never the file."""
        if str(path) in ("", ":memory:"):
            raise InvalidInput("SQLite needs a file here; for rows in memory there is the memory store")
        if synchronous not in ("NORMAL", "FULL", "EXTRA"):
            raise InvalidInput(f"synchronous: {synchronous!r} is none of NORMAL, FULL, EXTRA")
        self._path = Path(path).absolute()
        self._clock = FileClock() if clock is None else GivenClock(clock)
        self.clock: Clock | None = clock or self._clock
        self._synchronous = synchronous
        self._lines = Lines()
        self._lines_of_writer = LinesOfWriter(self._lines)
        self._turn = Turn(self._path)
        self._wake = Wake(self._path)
        self._spot = Spot(self._path)
        self._writer = WritingDesk(
            "ff-sqlite-writer", self._connect, self._spot, migrator.check, self._turn, self._lines_of_writer
        )
        self._loader = Desk("ff-sqlite-loader", self._connect_reader, self._spot, migrator.check)
        self._lister = Desk("ff-sqlite-lister", self._connect_reader, self._spot, migrator.check)
        self._glance = Glance(self._connect_reader, self._spot)
        self._polls: list[asyncio.Task[None]] = []

    async def open(self, *, migrate: bool) -> Schema:
        refuse_network(self._path)
        for desk in (self._writer, self._loader, self._lister):
            desk.own()
        self._glance.own()
        prepared = await self._writer.do(lambda db: migrator.prepare(db, migrate=migrate, now=self._clock()))
        self._spot.keep()
        self._writer.raises_positions = True
        self._writer.before = self._clock.renew
        await self._writer.do(lambda db: None)  # whoever reads before anything is written needs the file's time, too
        return prepared

    async def close(self) -> None:
        for poll in self._polls:
            poll.cancel()
        self._polls.clear()
        self._wake.close()
        self._glance.close()
        for desk in (self._writer, self._loader, self._lister):
            await desk.close()
        self._turn.close()

    async def ping(self) -> int:
        return await self._loader.do(lambda db: reads.ping(db, self._clock.read(db)))

    async def load(self, wants: Sequence[Want]) -> Loaded:
        return await self._loader.do(lambda db: reads.load(db, self._lines, wants, self._clock.read(db)))

    def peek(self, wants: Sequence[Want]) -> Loaded | None:
        if not reads.is_short(wants):
            return None
        return self._glance(lambda db: reads.load(db, self._lines, wants, self._clock.read(db)))

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        done = await self._writer.do(lambda db: writes.commit(db, self._lines_of_writer, changes, self._clock()))
        if hint and any(at is not None for at in done):
            self.notify(hint)
        return done

    async def hand_over(self, changes: Sequence[Change], hint: frozenset[str], take: Take) -> Handed:
        return Handed(await self.commit(changes, hint), [])

    async def take(self, take: Take) -> Taken:
        return await self._writer.do(lambda db: writes.take(db, self._lines_of_writer, take, self._clock()))

    async def renew(self, leases: Sequence[Held]) -> list[int | None]:
        return await self._writer.do(lambda db: writes.renew(db, leases, self._clock()))

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        return await self._loader.do(
            lambda db: reads.due(db, self._lines, row, column, limit, where, self._clock.read(db))
        )

    async def scan(self, scan: Scan) -> list[Any]:
        return await self._lister.do(lambda db: reads.scan(db, self._lines, scan))

    async def tally(self, tally: Tally) -> dict[tuple[Any, ...], int]:
        return await self._lister.do(lambda db: reads.tally(db, self._lines, tally))

    async def lines(self, lane_id: str | None = None) -> list[LineKey]:
        return await self._loader.do(lambda db: reads.all_lines(db, lane_id))

    async def standing(self, lane_id: str) -> list[LineKey]:
        return await self._lister.do(lambda db: reads.standing(db, lane_id))

    async def unlisted(self, limit: int) -> list[str]:
        return await self._lister.do(lambda db: reads.unlisted(db, limit))

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        return await self._lister.do(lambda db: reads.lanes(db, after, limit))

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        return await self._lister.do(lambda db: reads.feed(db, topic, after, limit))

    async def feed_end(self) -> int:
        return await self._loader.do(reads.feed_end)

    async def trim_feed(self, before: int, limit: int) -> int:
        return await self._writer.do(lambda db: writes.trim_feed(db, before, limit))

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        return await self._lister.do(lambda db: reads.history(db, execution_id, topic, limit, without))

    def notify(self, topics: frozenset[str]) -> None:
        self._wake.ring(topics)

    def limit_commands(self, command_s: float) -> None:
        """There is no server."""

    def on_wake(self, callback: Callable[[frozenset[str]], None]) -> None:
        if not self._wake.listen(callback):
            self._polls.append(asyncio.get_running_loop().create_task(self._poll(callback)))

    async def _poll(self, callback: Callable[[frozenset[str]], None]) -> None:
        """Where no socket can be had: look whether the file has changed, ever less often while it has not."""
        seen, pause = await self._loader.do(reads.data_version), 0.005
        while True:
            await asyncio.sleep(pause)
            version = await self._loader.do(reads.data_version)
            pause = 0.005 if version != seen else min(0.05, pause * 1.5)
            if version != seen:
                seen = version
                callback(frozenset())

    def _connect(self) -> apsw.Connection:
        create_database(self._path)
        try:
            db = apsw.Connection(str(self._path), statementcachesize=STATEMENTS)
        except apsw.CantOpenError as shut:
            hint = "" if self._path.parent.is_dir() else ": its folder does not exist"
            raise unavailable(f"{shut} {self._path}{hint}", StoreFault.TRANSPORT) from shut
        db.set_busy_timeout(BUSY_MS)
        try:
            with self._turn:  # only one may turn a new file into one with a log
                db.pragma("journal_mode", "wal")
        except BaseException:
            db.close()  # the file may be locked for long, or none of ours: whoever tries again opens it again
            raise
        db.pragma("synchronous", self._synchronous)
        db.pragma("cache_size", -CACHE_KIB)
        db.pragma("temp_store", "memory")  # also for what a statement would have to take back
        db.config(
            apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1
        )  # no statement is prepared anew because of the values it is given
        db.wal_autocheckpoint(CHECKPOINT_PAGES)
        db.pragma("journal_size_limit", 64 * 1024 * 1024)
        return db

    def _connect_reader(self) -> apsw.Connection:
        db = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE, statementcachesize=STATEMENTS)
        db.set_busy_timeout(BUSY_MS)
        db.pragma("query_only", True)
        db.pragma("cache_size", -CACHE_KIB)
        db.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        return db
