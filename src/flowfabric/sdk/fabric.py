"""The fabric: an application's tasks and the store that keeps their runs."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

from flowfabric.clock import Clock
from flowfabric.connecting import connect
from flowfabric.engine.engine import Engine
from flowfabric.errors import InvalidInput
from flowfabric.ids import Minter
from flowfabric.sdk.context import Context
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.failing import Retry
from flowfabric.sdk.task import Decorator, Options, Task
from flowfabric.settings import Settings

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_STORE = "sqlite:///flowfabric.db"


class Fabric:
    """Tasks on a store. `Fabric()` reads FLOWFABRIC_URL, else keeps everything in flowfabric.db here."""

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str = "default",
        public_url: str | None = None,
        settings: Settings | None = None,
        migrate: bool = True,
        clock: Clock | None = None,
        minter: Minter | None = None,
    ) -> None:
        self.url = url or os.environ.get("FLOWFABRIC_URL") or DEFAULT_STORE
        self.namespace = namespace
        self.public_url = (public_url or os.environ.get("FF_PUBLIC_URL") or "http://127.0.0.1:9090").rstrip("/")
        self.on_point: Callable[[Context, str, str], Awaitable[None]] | None = None  # for tests: crash points
        self.identity = f"{socket.gethostname()}:{os.getpid()}"
        self.tasks: dict[str, Task[..., Any]] = {}
        self._settings = settings
        self._migrate = migrate
        self._clock = clock
        self._minter = minter
        self._engines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Engine]] = (
            weakref.WeakKeyDictionary()
        )

    # -- tasks ----------------------------------------------------------------------------------------------------

    @overload
    def task(self, handler: Callable[Concatenate[Context, P], Awaitable[R]]) -> Task[P, R]: ...
    @overload
    def task(self, handler: Callable[P, Awaitable[R]]) -> Task[P, R]: ...
    @overload
    def task(self, handler: Callable[Concatenate[Context, P], R]) -> Task[P, R]: ...
    @overload
    def task(self, handler: Callable[P, R]) -> Task[P, R]: ...
    @overload
    def task(
        self,
        *,
        name: str | None = None,
        lane: str = "default",
        retry: Retry | None = None,
        timeout: Duration | None = None,
        needs: Iterable[str] = (),
        priority: int = 0,
        tags: Mapping[str, str] | None = None,
        isolation: str = "auto",
    ) -> Decorator: ...
    def task(
        self,
        handler: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        lane: str = "default",
        retry: Retry | None = None,
        timeout: Duration | None = None,
        needs: Iterable[str] = (),
        priority: int = 0,
        tags: Mapping[str, str] | None = None,
        isolation: str = "auto",
    ) -> Any:
        """Make a function a task. Its name (by default where it stands) is what its runs are kept under."""
        if isolation not in ("auto", "process"):
            raise InvalidInput(f'isolation: {isolation!r} is neither "auto" nor "process"')
        options = Options(
            lane=lane,
            priority=priority,
            retry=retry,
            needs=frozenset(needs),
            timeout_ms=None if timeout is None else to_ms(timeout, "timeout"),
            tags=dict(tags or {}),
        )

        def make(function: Callable[..., Any]) -> Task[..., Any]:
            known_as = name or f"{function.__module__}.{function.__qualname__}"
            if known_as in self.tasks:
                raise InvalidInput(f"task {known_as!r} exists already; give one of them another name=")
            made: Task[..., Any] = Task(self, function, name=known_as, isolation=isolation, options=options)
            self.tasks[known_as] = made
            return made

        return Decorator(make) if handler is None else make(handler)

    # -- the engine -----------------------------------------------------------------------------------------------

    async def engine(self) -> Engine:
        """The engine of this event loop, connected when first asked for."""
        loop = asyncio.get_running_loop()
        connecting = self._engines.get(loop)
        if connecting is None or (connecting.done() and (connecting.cancelled() or connecting.exception())):
            connecting = self._engines[loop] = loop.create_task(self._connect())
        return await asyncio.shield(connecting)

    async def _connect(self) -> Engine:
        engine = await connect(
            self.url, migrate=self._migrate, settings=self._settings, minter=self._minter, clock=self._clock
        )
        kids = await engine.list_waitpoint_hmac_kids()
        if kids.current_kid is None:  # whoever is first; the others find it
            await engine.ensure_signing_key(secrets.token_hex(32))
        return engine

    def bind(self, engine: Engine) -> asyncio.Task[Engine] | None:
        """Use this engine in this event loop from now on; what was used before, for `unbind`."""
        loop = asyncio.get_running_loop()

        async def bound() -> Engine:
            return engine

        before = self._engines.get(loop)
        self._engines[loop] = loop.create_task(bound())
        return before

    def unbind(self, before: asyncio.Task[Engine] | None) -> None:
        """Use what was used before `bind`."""
        loop = asyncio.get_running_loop()
        if before is None:
            self._engines.pop(loop, None)
        else:
            self._engines[loop] = before

    async def close(self) -> None:
        """Let go of the store in this event loop."""
        connecting = self._engines.pop(asyncio.get_running_loop(), None)
        if connecting is not None:
            await (await connecting).close()

    async def __aenter__(self) -> Self:
        await self.engine()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- workers --------------------------------------------------------------------------------------------------

    def run(
        self,
        *,
        slots: int = 10,
        lanes: Iterable[str] | None = None,
        capabilities: Iterable[str] = (),
        lease_ttl: Duration = "15s",
        grace: Duration = "30s",
        worker_id: str | None = None,
    ) -> None:
        """Work until told to stop: SIGTERM or Ctrl-C drains, a second one hurries."""
        from flowfabric.sdk.worker import Worker

        worker = Worker(
            self,
            slots=slots,
            lanes=lanes,
            capabilities=capabilities,
            lease_ttl=lease_ttl,
            grace=grace,
            worker_id=worker_id,
        )
        asyncio.run(worker.run_until_told())

    def __repr__(self) -> str:
        return f"<Fabric of {len(self.tasks)} tasks, namespace {self.namespace!r}>"
