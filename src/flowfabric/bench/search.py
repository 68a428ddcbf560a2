"""Search at depth: how long the first page of a list takes in a store with many executions.

    ./dev py -m flowfabric.bench.search sqlite:///deep.db 1000000
    ./dev py -m flowfabric.bench.search postgresql://…/scratch 1000000

The store must be empty: the rows are copies of one ended execution, made by SQL.
"""

from __future__ import annotations

import asyncio
import sys
from statistics import median
from time import perf_counter
from typing import Any

from flowfabric import Engine
from flowfabric.connector import open_engine
from flowfabric.model.execution import Execution, Payload

CASES: dict[str, dict[str, Any]] = {
    "no filter": {},
    "a task that no run has": {"kind": "none"},
    "a state that no run has": {"public_state": "failed"},
    "a tag that no run has": {"tag": ("app.none", "x")},
    "an error that no run has": {"error": "nothing"},
    "a namespace that no run has": {"namespace": "none"},
    "a lane and a worker that no run has": {"lane_id": "none", "worker_instance_id": "none"},
}
ROUNDS = 9
TABLES: dict[type[Any], str] = {Execution: "ff_exec_core", Payload: "ff_payload"}


def copies(row: type[Any], numbers: str, id_sql: str) -> str:
    """Return the statement that copies the first row of a table under the ids of these numbers."""
    table, names = TABLES[row], row.__struct_fields__
    changed = {"execution_id": id_sql, "created_at": "t.created_at - n.n"}
    values = [changed.get(name, f't."{name}"') for name in names]
    columns = ", ".join(f'"{name}"' for name in names)
    return f"insert into {table} ({columns}) select {', '.join(values)} from {table} t, ({numbers}) n"


async def fill(engine: Engine, url: str, count: int, *, ended: bool = True) -> None:
    """Make `count` copies of one execution, which has ended or waits."""
    execution_id = engine.new_execution_id("bench")
    await engine.create_execution(execution_id=execution_id, lane_id="bench", execution_kind="noop")
    if ended:
        await engine.cancel_execution(execution_id)
    if url.startswith("postgresql:"):
        import asyncpg

        connection = await asyncpg.connect(url)
        numbers = f"select n from generate_series(1, {count}) as s(n)"
        digits = "'{fp:' || (n.n % 256) || '}:00000000-0000-4000-8000-' || lpad(n.n::text, 12, '0')"
        for row in (Execution, Payload):
            await connection.execute(copies(row, numbers, digits), timeout=600)
        await connection.execute("vacuum analyze ff_exec_core, ff_payload", timeout=600)
        await connection.close()
        return
    import apsw

    numbers = f"with recursive c(n) as (select 1 union all select n + 1 from c where n < {count}) select n from c"
    digits = "printf('{fp:%d}:00000000-0000-4000-8000-%012d', n.n % 256, n.n)"
    with apsw.Connection(url.removeprefix("sqlite:///")) as database:
        for row in (Execution, Payload):
            database.execute(copies(row, numbers, digits))


async def measure(engine: Engine) -> None:
    """Print the median of each case."""
    for name, filters in CASES.items():
        page, times = await engine.search_executions(**filters), list[float]()
        for _ in range(ROUNDS):
            started = perf_counter()
            page = await engine.search_executions(**filters)
            times.append((perf_counter() - started) * 1000)
        verdict = "incomplete" if page.incomplete else "complete"
        print(f"{name:<28} {median(times):7.1f} ms  worst {max(times):7.1f} ms  {len(page.executions)} rows, {verdict}")


async def main(url: str, count: int) -> None:
    """Fill the store and measure."""
    async with await open_engine(url) as engine:
        await fill(engine, url, count)
        await measure(engine)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
