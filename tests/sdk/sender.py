"""A process that sends messages to a run: python -m tests.sdk.sender URL RUN NAME COUNT"""

from __future__ import annotations

import asyncio
import sys

from flowfabric import Fabric


async def send(url: str, run_id: str, name: str, count: int) -> None:
    async with Fabric(url) as app:
        run = app.find(run_id)
        for number in range(count):
            await run.signal(name, number)


if __name__ == "__main__":
    asyncio.run(send(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
