"""A process whose wall clock is wrong: it reads commands and prints answers as lines of JSON.

python -m tests.stores.shifted_clock_process FILE SHIFT_MS NAME
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from tests.executions import new_execution

REAL = time.time_ns
SHIFT = {"ms": int(sys.argv[2])}
time.time_ns = lambda: REAL() + SHIFT["ms"] * 1_000_000
time.time = lambda: time.time_ns() / 1e9

from flowfabric import FabricError  # noqa: E402 - only now, so that it sees no other clock
from flowfabric.connector import open_engine  # noqa: E402


async def main() -> None:
    name = sys.argv[3]
    held: Any = None
    async with await open_engine(f"sqlite:///{sys.argv[1]}") as engine:
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer: Any = None
            match json.loads(line):
                case ["shift", shift]:
                    SHIFT["ms"] = shift
                case ["now"]:
                    answer = await engine.ping()
                case ["create"]:
                    answer = await new_execution(engine, "jobs", execution_kind="job", input_payload=b"", policy={})
                case ["claim", ttl]:
                    await engine.sweep_once("lease_expiry")
                    await engine.sweep_once("delayed_promoter")
                    claimed = await engine.claim("jobs", worker_id=name, worker_instance_id=name, lease_ttl_ms=ttl)
                    held = claimed or held
                    answer = claimed and claimed.execution_id
                case ["delay", length]:
                    await engine.delay_for(held.handle, length)
                    held = None
                case ["complete"]:
                    try:
                        await engine.complete(held.handle, result=b"1")
                        answer = "completed"
                    except FabricError as refused:
                        answer = refused.kind
            print(json.dumps(answer), flush=True)


asyncio.run(main())
