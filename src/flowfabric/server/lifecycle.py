"""Serving: the engine, the sweeps and the listener, started in order and stopped in order."""

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
from flowfabric.server.handle_signer import seed_signing_key as seed_signing_key  # what a server does before it listens
from flowfabric.server.settings import ConfigError, ServerSettings

KEEP_ALIVE_S = 75
SCHEMA_CHECK_S = 5.0


class Server(uvicorn.Server):
    """A listener that lets waiting requests go before it counts on their end."""

    def __init__(self, app: App) -> None:
        settings = app.settings
        grace_s = max(1, settings.shutdown_grace_ms // 1000)
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                log_config=None,
                log_level="warning",  # what it does is logged here, in our words
                access_log=False,
                lifespan="off",
                server_header=False,
                date_header=True,
                http=protocol_class(settings.max_connections),
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=grace_s,
                ws="none",
            )
        )
        self.app = app
        self.app.on_schema_too_new = self._stop_for_newer_schema
        self.listening = asyncio.Event()

    def _stop_for_newer_schema(self) -> None:
        """Stop: a newer release has changed the store in a way that this one does not understand."""
        newer = self.app.schema_too_new
        versions = {} if newer is None else {"found": newer.found, "known": newer.known}
        logging.logger.error(
            "the schema of the store is newer than this release knows: the server stops", extra={"fields": versions}
        )
        self.should_exit = True

    async def watch_schema(self) -> None:
        """Notice a newer schema although nobody asks this server anything."""
        while self.app.schema_too_new is None:
            await asyncio.sleep(SCHEMA_CHECK_S)
            try:
                with suppress(errors.StoreUnavailable):
                    await self.app.engine.ping()
            except errors.SchemaTooNew as newer:
                self.app.note_newer_schema(newer)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen; `ConfigError` when the address cannot be had."""
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
        """Hear SIGTERM and SIGINT and go on to an orderly end; uvicorn would let them kill the process afterwards."""
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
        """The port it listens on, once it does."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more; tails and long polls end at once, other requests come to their end."""
        logging.logger.info("stopping: requests under way are finished")
        self.app.begin_closing()
        engine = self.app.engine
        try:
            await asyncio.gather(
                super().shutdown(sockets), engine.shutdown_prepare(self.app.settings.shutdown_grace_ms)
            )
        except errors.OperationTimeout:
            engine.metrics.count("ff_shutdown_timeout")
            logging.logger.warning("some reads of streams were cut off")


@asynccontextmanager
async def engine_lifespan(url: str, settings: ServerSettings) -> AsyncIterator[Engine]:
    """An engine with a signing key and running sweeps; all of it is wound down in the end."""
    async with await open_engine(url, settings=settings.engine) as engine:
        await engine.ensure_partitions()
        await seed_signing_key(engine, settings)
        if settings.run_sweeps:
            engine.start_sweeps()
        yield engine


async def serve(url: str, settings: ServerSettings) -> None:
    """Serve until told to stop; then finish what is under way."""
    settings.check()
    async with engine_lifespan(url, settings) as engine:
        if settings.is_open:
            logging.logger.warning("no FF_API_TOKEN is set: whoever can reach this address may do anything")
        else:
            logging.logger.info("bearer tokens are asked for")
        server = Server(create_app(engine, settings))
        watching = asyncio.create_task(server.watch_schema())
        try:
            await server.serve()
        finally:
            watching.cancel()
        if server.app.schema_too_new is not None:
            raise server.app.schema_too_new
