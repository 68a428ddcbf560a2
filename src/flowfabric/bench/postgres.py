"""The scratch store on Postgres: a new database on the named server, and a bare table in it through the same driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from secrets import token_hex
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from flowfabric.bench.scratch_store import BATCH, ScratchStore, paced
from flowfabric.connector import parse_postgres_url
from flowfabric.errors import InvalidInput, StoreUnavailable

# A queue as one would write it by hand: with an index for claims, and one for expired leases.
_TABLE = """
create table job (
    id bigint generated always as identity primary key, queue text not null default 'q',
    status smallint not null default 0, priority integer not null default 0,
    created_at timestamptz not null default now(), payload bytea not null, result bytea,
    worker text, attempt integer not null default 0, lease_until timestamptz, done_at timestamptz
);
create index job_ready on job (queue, priority, id) where status = 0;
create index job_lease on job (lease_until) where status = 1;
create table step (
    id bigint generated always as identity primary key, chain bigint not null, place integer not null,
    status smallint not null, result bytea, worker text, lease_until timestamptz, done_at timestamptz,
    unique (chain, place)
);
"""
_INSERT = "insert into job (payload) select unnest($1::bytea[])"
_SUBMIT = "with new as (insert into job (payload) values ($1) returning id) select pg_notify('job', '') from new"
_CLAIM = """
update job set status = 1, worker = 'w', attempt = attempt + 1, lease_until = now() + interval '30 s'
 where id = any(array(
    select id from job where queue = 'q' and status = 0 order by priority, id limit $1 for update skip locked))
returning id, payload
"""
_FINISH = """
update job set status = 2, result = x.result, done_at = now(), lease_until = null
  from unnest($1::bigint[], $2::bytea[]) as x (id, result)
 where job.id = x.id and job.status = 1 and job.worker = 'w'
"""
# Chains as one would write them by hand: the first step runs at once, and each completion starts the next step.
_BEGIN = """
insert into step (chain, place, status)
select chain, place, case place when 1 then 1 else 0 end
  from generate_series($1::bigint, $2) as chain, generate_series(1, $3::int) as place
"""
_FIRST = "select id from step where chain between $1 and $2 and place = 1"
_GO_ON = """
with ended as (
    update step set status = 2, result = x.result, done_at = now(), lease_until = null
      from unnest($1::bigint[], $2::bytea[]) as x (id, result)
     where step.id = x.id and step.status = 1
 returning step.chain, step.place
)
update step set status = 1, worker = 'w', lease_until = now() + interval '30 s'
  from ended
 where step.chain = ended.chain and step.place = ended.place + 1 and step.status = 0
returning step.id
"""
_CANCEL = "update step set status = 3, done_at = now() where chain = $1 and status = 0"

TIMEOUT_S = 10.0  # time to wait for a notification


class PostgresControl:
    """A bare table, on one connection."""

    def __init__(self, connection: Any, url: str) -> None:
        self._connection = connection
        self._url = url
        self._chains = 0  # chains created so far

    async def insert(self, payloads: Sequence[bytes]) -> None:
        statement = await self._connection.prepare(_INSERT)
        for begin in range(0, len(payloads), BATCH):
            await statement.fetch(payloads[begin : begin + BATCH])

    async def drain(self) -> int:
        claim, finish = await self._connection.prepare(_CLAIM), await self._connection.prepare(_FINISH)
        done = 0
        while claimed := await claim.fetch(BATCH):
            await finish.fetch([row[0] for row in claimed], [b"done"] * len(claimed))
            done += len(claimed)
        return done

    async def latencies(self, payload: bytes, *, count: int, per_second: int) -> list[float]:
        worker = await _connect(self._url)
        try:
            notified = asyncio.Event()
            await worker.add_listener("job", lambda *_: notified.set())
            submit = await self._connection.prepare(_SUBMIT)
            claim, finish = await worker.prepare(_CLAIM), await worker.prepare(_FINISH)
            latencies_ms: list[float] = []
            async for _ in paced(count, per_second):
                notified.clear()
                started = perf_counter()
                submitted = asyncio.create_task(submit.fetch(payload))
                await asyncio.wait_for(notified.wait(), TIMEOUT_S)
                [row] = await claim.fetch(1)
                latencies_ms.append((perf_counter() - started) * 1000)
                await finish.fetch([row[0]], [b"done"])
                await submitted
            return latencies_ms
        finally:
            await worker.close()

    async def chains(self, chains: int, steps: int, in_flight: int) -> int:
        first, go_on = await self._connection.prepare(_FIRST), await self._connection.prepare(_GO_ON)
        ended = 0
        for begun in range(0, chains, in_flight):
            numbers = await self._create_chains(min(in_flight, chains - begun), steps)
            running = await first.fetch(*numbers)
            while running:
                ended += len(running)
                running = await go_on.fetch([row[0] for row in running], [b"done"] * len(running))
        return ended

    async def cancel(self, rows: int) -> float:
        chain, _ = await self._create_chains(1, rows + 1)
        started = perf_counter()
        await self._connection.execute(_CANCEL, chain)
        return perf_counter() - started

    async def _create_chains(self, chains: int, steps: int) -> tuple[int, int]:
        """Create chains; return the numbers of the first and the last one."""
        numbers = self._chains + 1, self._chains + chains
        self._chains += chains
        await self._connection.execute(_BEGIN, *numbers, steps)
        return numbers

    async def vacuum(self) -> None:
        await self._connection.execute("vacuum")


@asynccontextmanager
async def postgres_scratch_store(url: str) -> AsyncIterator[ScratchStore]:
    """Create a database on the named server, dropped at the end; behind a pooler there is no control."""
    name = f"ff_bench_{token_hex(4)}"
    is_pooled = await _is_pooled(url)
    server = await _connect(url, is_pooled=is_pooled)
    try:
        try:
            await server.execute(f'create database "{name}"')
        except asyncpg.InsufficientPrivilegeError as refused:
            raise InvalidInput(
                "store: the benchmark needs its scratch_url database, and this user may not create one"
            ) from refused
        try:
            scratch_url = urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
            connection = await _connect(scratch_url, is_pooled=is_pooled)
            try:
                control = None
                if not is_pooled:
                    await connection.execute(_TABLE)
                    control = PostgresControl(connection, scratch_url)
                yield ScratchStore(scratch_url, await _durability(connection), _versions(connection), control)
            finally:
                await connection.close()
        finally:
            await server.execute(f'drop database "{name}" with (force)')
    finally:
        await server.close()


async def _is_pooled(url: str) -> bool:
    """True if a pooler refuses settings: the notifications of the control would not pass through it."""
    try:
        connection = await _connect(url, server_settings={"plan_cache_mode": "auto"})
    except StoreUnavailable as refused:
        if isinstance(refused.__cause__, asyncpg.ProtocolViolationError):
            return True
        raise
    await connection.close()
    return False


async def _connect(url: str, *, is_pooled: bool = False, **options: Any) -> Any:
    dsn, _ = parse_postgres_url(url)
    if is_pooled:
        options["statement_cache_size"] = 0
    try:
        return await asyncpg.connect(dsn, **options)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError, ValueError) as error:
        raise StoreUnavailable(str(error), backend="postgres", in_doubt=False) from error


async def _durability(connection: Any) -> str:
    names = ("fsync", "synchronous_commit", "full_page_writes")
    async with connection.transaction():  # behind a pooler only a transaction stays on one server connection
        settings = [f"{name}={await connection.fetchval('select current_setting($1)', name)}" for name in names]
    return f"{', '.join(settings)}; acknowledged after the shared commit"


def _versions(connection: Any) -> dict[str, str]:
    server = connection.get_server_version()
    return {"postgres": f"{server.major}.{server.minor}", "asyncpg": asyncpg.__version__}
