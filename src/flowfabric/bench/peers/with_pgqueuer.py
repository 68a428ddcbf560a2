"""pgqueuer on Postgres: `with_pgqueuer.py submit DSN JOBS`, then `with_pgqueuer.py work DSN`.

The fastest setup that its documentation shows: batched submits and claims, a connection pool, uvloop.
"""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from starts import body, note

BATCH = 1000
SLOTS = 100


async def submit(dsn: str, jobs: int) -> None:
    """Create its tables and submit the jobs."""
    connection = await asyncpg.connect(dsn)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    payload = json.dumps(body()).encode()
    for begin in range(0, jobs, BATCH):
        size = min(BATCH, jobs - begin)
        await queries.enqueue(["noop"] * size, [payload] * size, [0] * size)
    await connection.close()


async def work(dsn: str) -> None:
    """Process jobs until SIGTERM."""
    queue = PgQueuer(AsyncpgPoolDriver(await asyncpg.create_pool(dsn, min_size=4, max_size=8)))

    @queue.entrypoint("noop")  # type: ignore[untyped-decorator]
    async def noop(job: Job) -> None:
        json.loads(job.payload)
        note()

    await queue.run(batch_size=SLOTS, dequeue_timeout=timedelta(seconds=30))


if __name__ == "__main__":
    if sys.argv[1] == "submit":
        asyncio.run(submit(sys.argv[2], int(sys.argv[3])))
    else:
        uvloop.run(work(sys.argv[2]))
