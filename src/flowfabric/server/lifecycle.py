"""Start and stop of the server: engine, sweeps and listener, in order."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn

from flowfabric import errors
from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.server import logging
from flowfabric.server.app import App, create_app
from flowfabric.server.connection_limits import protocol_class
from flowfabric.server.security.handle_signer import seed_signing_key as seed_signing_key
from flowfabric.server.settings import ConfigError, ServerSettings

KEEP_ALIVE_S = 75
SCHEMA_CHECK_S = 5.0


class Server(uvicorn.Server):
    """uvicorn's server; at shutdown it ends long polls and feeds first, then waits for other requests."""

    def __init__(self, app: App) -> None:
        settings = app.settings
        grace_s = max(1, settings.shutdown_grace_ms // 1000)
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                log_config=None,
                log_level="warning",  # this module logs start and stop itself
                access_log=False,
                lifespan="off",
                server_header=False,
                date_header=True,
                http=protocol_class(settings.max_connections, app.closing),
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=grace_s,
                ws="none",
            )
        )
        self.app = app
        self.app.on_schema_too_new = self._stop_for_newer_schema
        self.listening = asyncio.Event()

    def _stop_for_newer_schema(self) -> None:
        """Stop because a newer release has migrated the schema beyond what this one knows."""
        newer = self.app.schema_too_new
        versions = {} if newer is None else {"found": newer.found, "known": newer.known}
        logging.logger.error(
            "the schema of the store is newer than this release knows: the server stops", extra={"fields": versions}
        )
        self.should_exit = True

    async def watch_schema(self) -> None:
        """Poll for a newer schema, so that an idle server stops too."""
        while self.app.schema_too_new is None:
            await asyncio.sleep(SCHEMA_CHECK_S)
            try:
                with suppress(errors.StoreUnavailable):
                    await self.app.engine.ping()
            except errors.SchemaTooNew as newer:
                self.app.note_newer_schema(newer)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen; raise ConfigError if the address is not available."""
        try:
            await super().startup(sockets)
        except SystemExit as gone:  # uvicorn would end the process here, with an exit code of its own
            config = self.config
            raise ConfigError(f"cannot listen on {config.host}:{config.port}: {gone.__context__}") from None
        if self.started:
            host = self.config.host
            url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
            logging.logger.info("listening", extra={"fields": {"host": host, "port": self.port, "url": url}})
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Shut down in order on SIGTERM and SIGINT; uvicorn would raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    @property
    def port(self) -> int:
        """The port of the first socket, once the server listens."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests; end feeds and long polls at once and finish other requests."""
        logging.logger.info("stopping: requests in flight are finished")
        self.app.begin_closing()
        engine = self.app.engine
        try:
            await asyncio.gather(
                super().shutdown(sockets), engine.shutdown_prepare(self.app.settings.shutdown_grace_ms)
            )
        except errors.OperationTimeout:
            engine.metrics.count("ff_shutdown_timeout")
            logging.logger.warning("some stream reads were cancelled")


@asynccontextmanager
async def engine_lifespan(url: str, settings: ServerSettings) -> AsyncIterator[Engine]:
    """Open an engine with a signing key and running sweeps; close it at exit."""
    async with await open_engine(url, settings=settings.engine) as engine:
        await engine.ensure_partitions()
        await seed_signing_key(engine, settings)
        if settings.run_sweeps:
            engine.start_sweeps()
        yield engine


async def serve(url: str, settings: ServerSettings) -> None:
    """Serve until stopped, then finish requests in flight."""
    settings.check()
    async with engine_lifespan(url, settings) as engine:
        if settings.is_open:
            logging.logger.warning("no FF_API_TOKEN is set: anyone who can reach this address may do anything")
        else:
            logging.logger.info("bearer tokens are required")
        server = Server(create_app(engine, settings))
        watching = asyncio.create_task(server.watch_schema())
        try:
            await server.serve()
        finally:
            watching.cancel()
        if server.app.schema_too_new is not None:
            raise server.app.schema_too_new
