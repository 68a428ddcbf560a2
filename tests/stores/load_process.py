"""One of several processes that write to one file: `python -m tests.stores.load_process FILE NAME SECONDS`.

It submits, claims and completes as fast as it can and prints what it did as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from flowfabric.model.change import Guard, Insert, LeaseCheck, LeaseRequirement, Patch
from flowfabric.model.execution import Execution, Result
from flowfabric.rules.execution.lease import RENEWAL
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.sqlite import SQLiteStore
from tests.stores.sample_rows import change, claim_request, event, payload, queued

BATCH = 20


async def run(path: str, name: str, seconds: float) -> dict[str, Any]:
    store = SQLiteStore(path)
    await store.open(migrate=True)
    print("ready", flush=True)
    sys.stdin.readline()
    claimed: list[str] = []
    rounds, longest, began = 0, 0.0, time.monotonic()
    while time.monotonic() - began < seconds:
        at = time.monotonic()
        names = [f"{name}-{rounds}-{number}" for number in range(BATCH)]
        await store.commit([change(Insert(queued(one)), Insert(payload(one))) for one in names])
        rows = [
            row for row, _ in (await store.claim_rows(claim_request(BATCH, prefix=f"{names[0]}-", ttl=60_000))).rows
        ]
        claimed += [row.execution_id for row in rows]
        await store.renew(
            [LeaseRef(row.execution_id, 0, row.attempt_id or "", row.lease_id or "", 1, 60_000) for row in rows],
            RENEWAL,
        )
        finished = await store.commit(
            [
                change(
                    Patch(Execution, (row.execution_id,), {"lease_expires_at": None}),
                    Insert(Result(row.execution_id, b"done")),
                    guards=[
                        Guard(
                            Execution,
                            (row.execution_id,),
                            row.revision,
                            LeaseCheck(LeaseRequirement.LIVE, row.lease_id or "", 1),
                        )
                    ],
                    events=[event(row.execution_id, outcome="success")],
                )
                for row in rows
            ]
        )
        assert None not in finished
        rounds += 1
        longest = max(longest, time.monotonic() - at)
    await store.close()
    return {"rounds": rounds, "claimed": claimed, "longest": longest}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2], float(sys.argv[3])))))
