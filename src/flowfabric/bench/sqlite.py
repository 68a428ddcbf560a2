"""The control on SQLite: one connection, WAL and FULL like the store, whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import apsw

from flowfabric.bench.scratch_store import BATCH, paced

# A queue as one would write it by hand: with an index for claims, and one for expired leases.
_TABLE = """
create table job (
    id integer primary key, queue text not null default 'q', status integer not null default 0,
    priority integer not null default 0, created_at integer not null default 0, payload blob not null, result blob,
    worker text, attempt integer not null default 0, lease_until integer, done_at integer
) strict;
create index job_ready on job (queue, priority, id) where status = 0;
create index job_lease on job (lease_until) where status = 1;
create table step (
    id integer primary key, chain integer not null, place integer not null, status integer not null, result blob,
    worker text, lease_until integer, done_at integer, unique (chain, place)
) strict;
"""
_INSERT = "insert into job (payload) values (?)"
_CLAIM = """
update job set status = 1, worker = 'w', attempt = attempt + 1, lease_until = 30000
 where id in (select id from job where queue = 'q' and status = 0 order by priority, id limit ?)
returning id, payload
"""
_FINISH = """
update job set status = 2, result = ?, done_at = 1, lease_until = null where id = ? and status = 1 and worker = 'w'
"""
# Chains as one would write them by hand: the first step runs at once, and each completion starts the next step.
_BEGIN = "insert into step (chain, place, status) values (?, ?, ?) returning id"
_END = """
update step set status = 2, result = ?, done_at = 1, lease_until = null where id = ? and status = 1
returning chain, place + 1
"""
_START = """
update step set status = 1, worker = 'w', lease_until = 30000 where chain = ? and place = ? and status = 0 returning id
"""
_CANCEL = "update step set status = 3, done_at = 1 where chain = ? and status = 0"


class SQLiteControl:
    """A bare table in a separate file."""

    def __init__(self, path: Path) -> None:
        self._db = apsw.Connection(str(path))
        self._db.pragma("journal_mode", "wal")
        self._db.pragma("synchronous", "FULL")
        for _ in self._db.execute(_TABLE):
            pass
        self._chains = 0  # chains created so far

    async def insert(self, payloads: Sequence[bytes]) -> None:
        for begin in range(0, len(payloads), BATCH):
            self._db.execute("begin immediate")
            self._db.executemany(_INSERT, [(payload,) for payload in payloads[begin : begin + BATCH]])
            self._db.execute("commit")

    async def drain(self) -> int:
        done = 0
        while True:
            self._db.execute("begin immediate")
            claimed = list(self._db.execute(_CLAIM, (BATCH,)))
            self._db.execute("commit")
            if not claimed:
                return done
            self._db.execute("begin immediate")
            self._db.executemany(_FINISH, [(b"done", row[0]) for row in claimed])
            self._db.execute("commit")
            done += len(claimed)

    async def latencies(self, payload: bytes, *, count: int, per_second: int) -> list[float]:
        latencies_ms: list[float] = []
        async for _ in paced(count, per_second):
            started = perf_counter()
            self._db.execute(_INSERT, (payload,))
            [row] = self._db.execute(_CLAIM, (1,))
            latencies_ms.append((perf_counter() - started) * 1000)
            self._db.execute(_FINISH, (b"done", row[0]))
        return latencies_ms

    async def chains(self, chains: int, steps: int, in_flight: int) -> int:
        ended = 0
        for begun in range(0, chains, in_flight):
            running = self._create_chains(min(in_flight, chains - begun), steps)
            while running:
                self._db.execute("begin immediate")
                behind = list(self._db.executemany(_END, [(b"done", row) for row in running]))
                running = [row for (row,) in self._db.executemany(_START, behind)]
                self._db.execute("commit")
                ended += len(behind)
        return ended

    async def cancel(self, rows: int) -> float:
        self._create_chains(1, rows + 1)
        started = perf_counter()
        self._db.execute(_CANCEL, (self._chains,))
        return perf_counter() - started

    def _create_chains(self, chains: int, steps: int) -> list[int]:
        """Create chains; return the ids of their first steps."""
        new = range(self._chains + 1, self._chains + chains + 1)
        self._chains += chains
        rows = [(chain, place, int(place == 1)) for chain in new for place in range(1, steps + 1)]
        self._db.execute("begin immediate")
        ids = [row for (row,) in self._db.executemany(_BEGIN, rows)]
        self._db.execute("commit")
        return ids[::steps]

    async def vacuum(self) -> None:
        """Do nothing: SQLite updates rows in place."""

    def close(self) -> None:
        self._db.close()


def sqlite_versions() -> dict[str, str]:
    """Return the versions of library and driver."""
    return {"sqlite": apsw.sqlite_lib_version(), "apsw": apsw.apsw_version()}
