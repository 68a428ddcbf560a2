"""The two servers that `ff bench http` compares, each in a separate process: FlowFabric's, and a bare FastAPI route."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from flowfabric import event_loop


class ControlCreateBody(BaseModel):
    """The body of a create, as a FastAPI application would declare it."""

    execution_id: str
    namespace: str
    lane_id: str
    execution_kind: str
    input_payload: list[int]
    priority: int
    creator_identity: str
    partition_id: int
    now: int


async def create(body: ControlCreateBody) -> dict[str, Any]:
    """Validate the body and answer as if an execution was created."""
    return {"Created": {"execution_id": body.execution_id, "public_state": "waiting"}}


def control_server() -> uvicorn.Server:
    """Return a FastAPI application with that one route."""
    app = FastAPI()
    app.post("/v1/executions", status_code=201)(create)
    return uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="off"))


async def run_server(url: str) -> None:
    """Run FlowFabric's server on a store."""
    from flowfabric.server.app import create_app
    from flowfabric.server.lifecycle import Server, engine_lifespan
    from flowfabric.server.settings import ServerSettings

    settings = ServerSettings(port=0)
    async with engine_lifespan(url, settings) as engine:
        await _run(Server(create_app(engine, settings)))


async def _run(server: uvicorn.Server) -> None:
    """Serve, and print the port once it is known."""
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving


def main() -> None:
    """Run `control` or `fabric URL` until SIGTERM."""
    event_loop.run(_run(control_server()) if sys.argv[1] == "control" else run_server(sys.argv[2]))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() > 1:
        main()
