"""A server in a thread with its own event loop, on a free port that it keeps over restarts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from flowfabric.server import App, ServerSettings, create_app
from flowfabric.server.lifecycle import Server, engine_lifespan
from tests.processes import free_port


class ServerThread:
    """One server on one store."""

    def __init__(self, store_url: str, settings: ServerSettings | None = None) -> None:
        self.store_url = store_url
        self.settings = msgspec.structs.replace(settings or ServerSettings(), host="127.0.0.1", port=free_port())
        self.app: App | None = None
        self._server: Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    def start(self) -> None:
        """Start the server; return when it listens."""
        ready = threading.Event()

        async def run() -> None:
            async with engine_lifespan(self.store_url, self.settings) as engine:
                self.app = create_app(engine, self.settings)
                self._loop = asyncio.get_running_loop()
                self._server = Server(self.app)
                serving = asyncio.create_task(self._server.serve())
                await self._server.listening.wait()
                ready.set()
                await serving

        self._thread = threading.Thread(target=lambda: asyncio.run(run()), name="server", daemon=True)
        self._thread.start()
        assert ready.wait(30), "the server does not listen"

    def stop(self) -> None:
        """Shut down as SIGTERM would; return when the thread has ended."""
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server does not end"

    def restart(self) -> None:
        """Stop, and start again on the same store and port."""
        self.stop()
        self.start()

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function on the server's loop."""

        async def called() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(10)


@contextmanager
def run_server(store_url: str, settings: ServerSettings | None = None) -> Iterator[ServerThread]:
    """Run a server during the block."""
    server = ServerThread(store_url, settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()
