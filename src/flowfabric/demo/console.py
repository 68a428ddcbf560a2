"""The console on what the demo has done, until Ctrl-C."""

from __future__ import annotations

import asyncio

from flowfabric import Engine
from flowfabric.demo.screen import Screen
from flowfabric.server import ServerSettings, create_app
from flowfabric.server.lifecycle import Server


async def serve_console(engine: Engine, screen: Screen, port: int) -> None:
    """Serve the console on this machine, print its address, and return after Ctrl-C; port 0 is any free one."""
    server = Server(create_app(engine, ServerSettings(port=port)))
    serving, listening = asyncio.create_task(server.serve()), asyncio.create_task(server.listening.wait())
    try:
        await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            screen.print_event(f"the console is at http://127.0.0.1:{server.port}/ui until Ctrl-C", "bold")
        await serving
    finally:
        listening.cancel()
