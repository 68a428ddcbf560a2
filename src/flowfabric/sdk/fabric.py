"""The fabric: an application's tasks and the store that keeps their runs."""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import socket
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, overload

import msgspec

from flowfabric import event_loop
from flowfabric.clock import Clock
from flowfabric.connector import connect, public_base_url
from flowfabric.engine.engine import Engine
from flowfabric.engine_api import EngineAPI
from flowfabric.errors import InvalidInput
from flowfabric.ids import Minter
from flowfabric.sdk import validation
from flowfabric.sdk.context import Context
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.engine_provider import EngineProvider
from flowfabric.sdk.flows import Flow
from flowfabric.sdk.limits import Budget, CallLimits, Limit, ScopeSelector
from flowfabric.sdk.retry import Retry
from flowfabric.sdk.run import Run
from flowfabric.sdk.serialization.values import ValueCodec
from flowfabric.sdk.task import AsyncTask, PlainTask, Task, TaskDecorator, TaskOptions, validate_submit_options
from flowfabric.sdk.worker.threads import Portal, ThreadScheduler
from flowfabric.settings import Settings

if TYPE_CHECKING:
    from flowfabric.sdk.sync import SyncFabric

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_STORE = "sqlite:///flowfabric.db"


class Fabric:
    """Tasks on a store. `Fabric()` reads FLOWFABRIC_URL, else keeps everything in flowfabric.db here.

    Apps of several namespaces may share a store: keys, budgets and limits are told apart, and workers take the runs of
    their own app's namespace only.
    """

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
        token: str | None = None,
    ) -> None:
        """`url` is a store's address, or a server's, which is shown `token` (else FLOWFABRIC_TOKEN or FF_API_TOKEN)."""
        if url is not None and not isinstance(url, str):
            raise InvalidInput(f"url: {url!r} is not a text, as in sqlite:///app.db")
        self.url = url or os.environ.get("FLOWFABRIC_URL") or DEFAULT_STORE
        self.namespace = namespace
        self._public_url = public_url
        self.on_point: Callable[[Context, str, str], Awaitable[None]] | None = None  # for tests: crash points
        self.thread_turns: ThreadScheduler | None = None  # for tests: when threads that asked the loop go on
        self.on_ask: Callable[[Context, str, Any], None] | None = None  # for tests: approvals and their shapes
        self.stubs: dict[Any, Callable[..., Any]] = {}  # for tests: what runs instead of a step's function or a task
        self.isolates = True  # False in tests: what should run in a process of its own runs in a thread
        self.identity = f"{socket.gethostname()}:{os.getpid()}"
        self.tasks: dict[str, Task[..., Any]] = {}
        self._settings = settings
        self._migrate = migrate
        self._clock = clock
        self._minter = minter
        self._token = token
        self._made: weakref.WeakKeyDictionary[EngineAPI, set[str]] = weakref.WeakKeyDictionary()
        self._connections = EngineProvider(self._connect, is_shared=lambda: not self.url.startswith("memory:"))

    @property
    def public_url(self) -> str:
        """Where the links of approvals lead: as told, else FF_PUBLIC_URL, else to the server that this app is on."""
        return public_base_url(self.url, self._public_url)

    # -- tasks ----------------------------------------------------------------------------------------------------

    # In this order: what is awaited is also something that is called, and the first that fits is taken.
    @overload
    def task(self, handler: Callable[Concatenate[Context, P], Awaitable[R]]) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(self, handler: Callable[P, Awaitable[R]]) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(self, handler: Callable[Concatenate[Context, P], R]) -> PlainTask[P, R]: ...
    @overload
    def task(self, handler: Callable[P, R]) -> PlainTask[P, R]: ...
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
        budgets: Iterable[Budget] = (),
        limits: Iterable[Limit] = (),
        fair: ScopeSelector | None = None,
        weight: int = 1,
        isolation: Literal["auto", "process"] = "auto",
        on_mismatch: Literal["warn", "error"] = "warn",
    ) -> TaskDecorator: ...
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
        budgets: Iterable[Budget] = (),
        limits: Iterable[Limit] = (),
        fair: ScopeSelector | None = None,
        weight: int = 1,
        isolation: Literal["auto", "process"] = "auto",
        on_mismatch: Literal["warn", "error"] = "warn",
    ) -> Any:
        """Make a function a task. Its name (by default where it stands) is what its runs are kept under.

        `fair` says whose work a call is: whoever has much waiting does not keep the others from their turns, of which
        each gets `weight`. `on_mismatch` is what happens when a durable function takes another way than it is
        remembered to have taken, because it was changed meanwhile.
        """
        if isolation not in ("auto", "process"):
            raise InvalidInput(f'isolation: {isolation!r} is neither "auto" nor "process"')
        if on_mismatch not in ("warn", "error"):
            raise InvalidInput(f'on_mismatch: {on_mismatch!r} is neither "warn" nor "error"')
        options = TaskOptions(
            needs=validation.validate_capabilities("needs", needs),
            timeout_ms=None if timeout is None else to_ms(timeout, "timeout", minimum_ms=1),
            budgets=validation.validate_each("budgets", Budget, budgets, "[Budget(…)]"),
            limits=validation.validate_each("limits", Limit, limits, "[Limit(…)]"),
            **validate_submit_options(
                lane=lane, priority=priority, retry=retry, tags=tags or {}, fair=fair, weight=weight
            ),
        )
        if name is not None:
            validation.validate_name(name)

        def make(given: Callable[..., Any]) -> Task[..., Any]:
            function = validation.validate_handler(given)
            known_as = name or f"{_home(function)}.{function.__qualname__}"
            if known_as in self.tasks:
                raise InvalidInput(f"task {known_as!r} exists already; give one of them another name=")
            kind = AsyncTask if inspect.iscoroutinefunction(function) else PlainTask
            made: Task[..., Any] = kind(
                self, function, name=known_as, isolation=isolation, on_mismatch=on_mismatch, options=options
            )
            self.tasks[known_as] = made
            return made

        return TaskDecorator(make) if handler is None else make(handler)

    # -- the engine -----------------------------------------------------------------------------------------------

    async def engine(self) -> EngineAPI:
        """The engine, opened when first asked for: one per process, on a loop of its own unless a loop claims it.

        On the loop that has it this is the engine itself; elsewhere its verbs hop to that loop.
        """
        return await self._connections.engine()

    async def claim(self) -> EngineAPI:
        """The engine on this event loop, for whoever stays here: calls need no hop, and other loops come here.

        `async with app` does this, and closes it in the end; so do workers.
        """
        return await self._connections.open_on_this_loop()

    async def _connect(self) -> EngineAPI:
        engine = await self.connect(migrate=self._migrate)
        if not isinstance(engine, Engine):  # a server has its own signing keys
            return engine
        try:
            kids = await engine.list_waitpoint_hmac_kids()
            if kids.current_kid is None:  # whoever is first; the others find it
                await engine.ensure_signing_key(secrets.token_hex(32))
        except BaseException:
            await engine.close()
            raise
        return engine

    async def connect(self, *, migrate: bool = False, hears: bool = True, command_s: float | None = None) -> EngineAPI:
        """An engine of the caller's own, to be closed by it; one that waits for nothing need not hear of anything.

        `command_s` is how long a command may take before its connection is given up, if that is not long already.
        """
        settings = self._settings or Settings()
        if not hears:
            settings = msgspec.structs.replace(settings, hears=False)
        if command_s is not None:
            settings = msgspec.structs.replace(settings, deadlines=settings.deadlines.limited(command_s))
        engine = await connect(
            self.url,
            migrate=migrate,
            settings=settings,
            minter=self._minter,
            clock=self._clock,
            token=self._token,
        )
        if command_s is not None:
            engine.limit_commands(command_s)  # a URL may have set more
        return engine

    def bind(self, engine: EngineAPI) -> asyncio.Task[EngineAPI] | None:
        """Use this engine in this event loop from now on; what was used before, for `unbind`."""
        return self._connections.bind(engine)

    def unbind(self, before: asyncio.Task[EngineAPI] | None) -> None:
        """Use what was used before `bind`."""
        self._connections.unbind(before)

    async def close(self) -> None:
        """Let go of the store: what this event loop has claimed, else what the loops without a claim share."""
        await self._connections.close()

    async def declare(self, engine: EngineAPI) -> None:
        """Let the budgets and limits exist that are the same for every call of a task."""
        for task in self.tasks.values():
            own = task.own
            same = msgspec.structs.replace(
                own,
                budgets=tuple(one for one in own.budgets if one.per is None),
                limits=tuple(one for one in own.limits if one.per is None),
                fair=None,
            )
            await self.declare_bound(engine, task.bound(same, {}))

    async def declare_bound(self, engine: EngineAPI, bound: CallLimits) -> None:
        """Let these exist; asked for once in the life of an engine."""
        await bound.declare(engine, self._made.setdefault(engine, set()), self.namespace)

    async def declared(self, engine: EngineAPI, budget: Budget) -> str:
        """The id of a budget that is everybody's."""
        budget_id = budget.id(self.namespace)
        await self.declare_bound(engine, CallLimits({budget.name: (budget, budget_id, "")}))
        return budget_id

    def flow(self, name: str) -> Flow:
        """A flow whose shape is known beforehand, still without nodes."""
        return Flow(self, name)

    def find(self, run_id: str) -> Run[Any]:
        """A run by its id, of whichever task; its result is what JSON says."""
        return Run(run_id, "run", ValueCodec(Any), self)

    # -- without await --------------------------------------------------------------------------------------------

    @property
    def sync(self) -> SyncFabric:
        """The same for code that cannot await."""
        from flowfabric.sdk.sync import SyncFabric

        return SyncFabric(self)

    def portal(self) -> Portal:
        """The way from this thread to the event loop that has the engine."""
        return self._connections.portal(self.thread_turns)

    def stop_own_loop(self) -> None:
        """Close what threads, and loops without a claim, share; happens by itself when the program ends."""
        self._connections.stop_own_loop()

    async def __aenter__(self) -> Self:
        await self.claim()
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
        stall_limit: Duration = "5m",
        worker_id: str | None = None,
    ) -> None:
        """Work until told to stop: SIGTERM or Ctrl-C drains, a second one hurries.

        `stall_limit` is how long the event loop may be blocked before its work is left to others.
        """
        from flowfabric.sdk.worker.worker import Worker

        if _in_a_loop():
            raise RuntimeError(
                "app.run() takes the whole process: start the worker in one of its own, as `ff worker` does"
            )
        worker = Worker(
            self,
            slots=slots,
            lanes=lanes,
            capabilities=capabilities,
            lease_ttl=lease_ttl,
            grace=grace,
            stall_limit=stall_limit,
            worker_id=worker_id,
        )
        event_loop.run(worker.run_until_told())

    def __repr__(self) -> str:
        return f"<Fabric of {len(self.tasks)} tasks, namespace {self.namespace!r}>"


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _home(function: Callable[..., Any]) -> str:
    """The module of a function by the name under which others import it, also when it is the program that runs."""
    module: str = function.__module__
    if module not in ("__main__", "__mp_main__"):
        return module
    known = getattr(function, "__globals__", {})
    spec, file = known.get("__spec__"), known.get("__file__")
    return str(spec.name) if spec is not None else Path(file).stem if file else module
