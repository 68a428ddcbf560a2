"""`Fabric`: the tasks of an application, and the store or server that keeps their runs."""

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
from flowfabric.errors import InvalidInput
from flowfabric.ids import Minter
from flowfabric.model.scheduling.schedule import Calendar, Overlap
from flowfabric.sdk import validation
from flowfabric.sdk.call import Call, TaskOptions, validate_submit_options
from flowfabric.sdk.context import Context
from flowfabric.sdk.durable.code_mismatch import DEFAULT_ON_MISMATCH, ON_MISMATCH
from flowfabric.sdk.durable.inbox import message_codecs
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.engine_provider import EngineProvider
from flowfabric.sdk.flows import Flow
from flowfabric.sdk.keys.key import BatchKey, Key, RunKey
from flowfabric.sdk.limits import Budget, CallLimits, Limit, ScopeSelector
from flowfabric.sdk.retry import Retry
from flowfabric.sdk.run import Run
from flowfabric.sdk.schedules import DeclaredSchedule, ScheduleHandle, Schedules, declare_schedule, defining_module
from flowfabric.sdk.serialization.values import ValueCodec
from flowfabric.sdk.task import AsyncTask, BatchTaskDecorator, PlainTask, Task, TaskDecorator
from flowfabric.sdk.versions import source_digest, validate_version
from flowfabric.sdk.worker.threads import Portal, ThreadScheduler
from flowfabric.settings import Settings

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.sdk.sync import SyncFabric

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_STORE = "sqlite:///flowfabric.db"


class Fabric:
    """An application: its tasks, and the store that keeps their runs.

    `Fabric()` connects to FLOWFABRIC_URL, or by default to the SQLite file flowfabric.db in the working directory.

    Applications of several namespaces may share a store. Each namespace has its own keys, budgets and limits, and a
    worker claims only runs of its application's namespace.
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
        version: str | None = None,
        prune_schedules: bool = False,
    ) -> None:
        """Take the URL of a store or of a server; nothing is opened yet.

        A server is sent `token`, or by default FLOWFABRIC_TOKEN or FF_API_TOKEN. `version` names the code that this
        process runs: by default FLOWFABRIC_VERSION, or a digest of a task's module and the modules it imports.
        `prune_schedules` removes schedules that have left the code, instead of pausing them.
        """
        if url is not None and not isinstance(url, str):
            raise InvalidInput(f"url: {url!r} is not a text, as in sqlite:///app.db")
        self.url = url or os.environ.get("FLOWFABRIC_URL") or DEFAULT_STORE
        self.namespace = namespace
        self._public_url = public_url
        # Hooks for tests, set by `flowfabric.testing.World`.
        self.on_fault_point: Callable[[Context, str, str], Awaitable[None]] | None = None  # may raise a crash
        # Sees every try of a step by its place and label; returns an exception that the try raises instead of running.
        self.on_step: Callable[[Context, tuple[str, int], str], Exception | None] | None = None
        self.thread_scheduler: ThreadScheduler | None = None  # decides when a thread gets the result of its call
        self.on_approval: Callable[[Context, str, Any], None] | None = None  # sees the name and type of an approval
        self.stubs: dict[Any, Callable[..., Any]] = {}  # replacement for a step function or a task
        self.use_subprocesses = True  # if False, handlers with isolation="process" run in a thread
        self.identity = f"{socket.gethostname()}:{os.getpid()}"
        self.tasks: dict[str, Task[..., Any]] = {}
        self.version = validate_version(version or os.environ.get("FLOWFABRIC_VERSION"))
        self.module = defining_module(self)  # owns the schedules that are declared here
        self.declared_schedules: dict[str, DeclaredSchedule] = {}
        self.prune_schedules = bool(prune_schedules)
        self._settings = settings
        self._migrate = migrate
        self._clock = clock
        self._minter = minter
        self._token = token
        self._declared: weakref.WeakKeyDictionary[EngineAPI, set[str]] = weakref.WeakKeyDictionary()
        self._provider = EngineProvider(self._connect, is_shared=lambda: not self.url.startswith("memory:"))

    @property
    def public_url(self) -> str:
        """The base URL of approval links: `public_url`, or FF_PUBLIC_URL, or the server that this app connects to."""
        return public_base_url(self.url, self._public_url)

    # -- tasks ----------------------------------------------------------------------------------------------------

    # The order matters: a coroutine function is also a callable, and the first overload that fits is chosen.
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
        on_mismatch: Literal["hold", "warn", "error"] = DEFAULT_ON_MISMATCH,
        pin: bool = False,
        key: BatchKey,
    ) -> BatchTaskDecorator: ...
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
        on_mismatch: Literal["hold", "warn", "error"] = DEFAULT_ON_MISMATCH,
        pin: bool = False,
        inbox: Mapping[str, Any] | None = None,
        key: Key | None = None,
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
        on_mismatch: Literal["hold", "warn", "error"] = DEFAULT_ON_MISMATCH,
        pin: bool = False,
        inbox: Mapping[str, Any] | None = None,
        key: RunKey | None = None,
    ) -> Any:
        """Make a function a task. Runs refer to it by `name`, which defaults to the function's module and name.

        `fair` names the parameter, or is the function of the arguments, that names the owner of a call. Work of
        different owners is claimed in turn, in proportion to `weight`, so that a long backlog of one does not delay
        the others. `on_mismatch` decides what a durable function does that no longer fits what its run remembers: it is
        held until other code or a person releases it, logs a warning, or fails. With `pin` a run ends with the version
        it began with: only workers of that version continue it. The app needs a `version` then. `inbox` declares the
        messages that a run takes, by name and type (None for one without a value); every sender is checked against it.
        `key` is a function of the arguments that names a run, and says what a submit does whose key is taken; it is for
        submits, not for children and nodes of flows.
        """
        if isolation not in ("auto", "process"):
            raise InvalidInput(f'isolation: {isolation!r} is neither "auto" nor "process"')
        if on_mismatch not in ON_MISMATCH:
            raise InvalidInput(f'on_mismatch: {on_mismatch!r} is not one of "hold", "warn" and "error"')
        if key is not None and not isinstance(key, RunKey):
            raise InvalidInput(f'key: {key!r} is no Key; write key=Key("parameter")')
        if pin and self.version is None:
            raise InvalidInput("pin: the app has no version; write Fabric(version=…) or set FLOWFABRIC_VERSION")
        codecs = message_codecs(inbox or {})
        options = TaskOptions(
            inbox={name: msgspec.json.decode(codec.schema() or "{}") for name, codec in codecs.items()},
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

        def register(candidate: Callable[..., Any]) -> Task[..., Any]:
            function = validation.validate_handler(candidate)
            task_name = name or f"{_importable_module(function)}.{function.__qualname__}"
            if task_name in self.tasks:
                raise InvalidInput(f"task {task_name!r} exists already; give one of them another name=")
            task_type = AsyncTask if inspect.iscoroutinefunction(function) else PlainTask
            task: Task[..., Any] = task_type(
                self,
                function,
                name=task_name,
                isolation=isolation,
                on_mismatch=on_mismatch,
                pin=bool(pin),
                inbox=codecs,
                options=options,
                key=key,
            )
            self.tasks[task_name] = task
            return task

        return TaskDecorator(register) if handler is None else register(handler)

    def version_of(self, task: Task[..., Any]) -> str:
        """Return the version of a task's code: the app's, or a digest of its source."""
        return self.version or source_digest(task.handler)

    # -- the engine -----------------------------------------------------------------------------------------------

    async def engine(self) -> EngineAPI:
        """Return the engine, opened on first use: one per process, on a background loop unless a loop has claimed it.

        On the loop that owns the engine this is the engine itself. On any other loop it is a proxy whose operations run
        on the owning loop.
        """
        return await self._provider.engine()

    async def claim(self) -> EngineAPI:
        """Open the engine on this event loop, which then owns it: calls from here do not change loops.

        `async with app` and workers do this, and close the engine at the end.
        """
        return await self._provider.open_on_this_loop()

    async def _connect(self) -> EngineAPI:
        engine = await self.connect(migrate=self._migrate)
        if not isinstance(engine, Engine):  # a server has its own signing keys
            return engine
        try:
            kids = await engine.list_waitpoint_hmac_kids()
            if kids.current_kid is None:  # the first process creates the key; ensure_signing_key is safe in a race
                await engine.ensure_signing_key(secrets.token_hex(32))
        except BaseException:
            await engine.close()
            raise
        return engine

    async def connect(self, *, migrate: bool = False, hears: bool = True, command_s: float | None = None) -> EngineAPI:
        """Open a separate engine, which the caller closes. `hears=False` saves the subscription to wakeups.

        `command_s` lowers the time after which a store command times out; it never raises it.
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
            engine.limit_commands(command_s)  # the URL may have set a longer timeout
        return engine

    def bind(self, engine: EngineAPI) -> asyncio.Task[EngineAPI] | None:
        """Use this engine on this event loop from now on; return the previous one, for `unbind`."""
        return self._provider.bind(engine)

    def unbind(self, before: asyncio.Task[EngineAPI] | None) -> None:
        """Restore the engine that `bind` replaced."""
        self._provider.unbind(before)

    async def close(self) -> None:
        """Close the engine of this event loop, or if it has claimed none, the engine shared in the background."""
        await self._provider.close()

    async def declare(self, engine: EngineAPI) -> None:
        """Create the budgets and limits of all tasks that do not depend on the arguments of a call."""
        for task in self.tasks.values():
            defaults = task.default_options
            shared = msgspec.structs.replace(
                defaults,
                budgets=tuple(budget for budget in defaults.budgets if budget.per is None),
                limits=tuple(limit for limit in defaults.limits if limit.per is None),
                fair=None,
            )
            await self.declare_limits(engine, task.resolve_limits(shared, {}))

    async def declare_limits(self, engine: EngineAPI, limits: CallLimits) -> None:
        """Create the budgets and limits of a call; each is sent once per engine."""
        await limits.declare(engine, self._declared.setdefault(engine, set()), self.namespace)

    async def declare_budget(self, engine: EngineAPI, budget: Budget) -> str:
        """Create a budget that is shared by all callers; return its id."""
        budget_id = budget.id(self.namespace)
        await self.declare_limits(engine, CallLimits({budget.name: (budget, budget_id, "")}))
        return budget_id

    def flow(self, name: str) -> Flow:
        """Start a flow, a graph of calls that is submitted as a whole; it has no nodes yet."""
        return Flow(self, name)

    # -- schedules ------------------------------------------------------------------------------------------------

    def schedule(
        self,
        name: str,
        call: Call[Any],
        *,
        cron: str | None = None,
        every: Duration | None = None,
        offset: Duration = 0,
        at: Calendar | None = None,
        tz: str = "UTC",
        overlap: Overlap | Literal["skip", "queue_one", "queue", "cancel", "allow"] = Overlap.SKIP,
        catch_up: Duration = "10m",
        jitter: Duration = 0,
        pause_on_failure: bool = False,
    ) -> ScheduleHandle:
        """Declare a schedule of a call, made with `task.s(…)`; workers of this app create it when they start.

        It fires by one of `cron`, `every` (counted from the epoch, moved by `offset`) and `at`. `overlap` says what
        happens while its last run is under way. Instants that were missed by at most `catch_up` still get their runs.
        `jitter` delays each run by up to this long. With `pause_on_failure` a run that fails pauses the schedule.
        """
        declared = declare_schedule(
            name,
            call,
            cron=cron,
            every=every,
            offset=offset,
            at=at,
            tz=tz,
            overlap=overlap,
            catch_up=catch_up,
            jitter=jitter,
            pause_on_failure=pause_on_failure,
        )
        if declared.name in self.declared_schedules:
            raise InvalidInput(f"schedule {declared.name!r} is declared twice; give one of them another name")
        self.declared_schedules[declared.name] = declared
        return ScheduleHandle(self, declared.name)

    @property
    def schedules(self) -> Schedules:
        """The schedules of this app's namespace: create, get, list."""
        return Schedules(self)

    def find(self, run_id: str) -> Run[Any]:
        """Return the handle of a run of any task, by its id. Its result is plain JSON data."""
        return Run(run_id, "run", ValueCodec(Any), self)

    # -- without await --------------------------------------------------------------------------------------------

    @property
    def sync(self) -> SyncFabric:
        """The blocking twin of this object, for code that cannot await."""
        from flowfabric.sdk.sync import SyncFabric

        return SyncFabric(self)

    def portal(self) -> Portal:
        """Return a portal, through which this thread calls the event loop that owns the engine."""
        return self._provider.portal(self.thread_scheduler)

    def stop_own_loop(self) -> None:
        """Close the engine and the loop shared in the background; happens by itself at the end of the process."""
        self._provider.stop_own_loop()

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
        """Run a worker until SIGTERM or Ctrl-C, which drains it; a second one releases the running work at once.

        A drain waits up to `grace` for running handlers. If the event loop is blocked for longer than `stall_limit`,
        the worker's leases are no longer renewed.
        """
        from flowfabric.sdk.worker.worker import Worker

        if _is_loop_running():
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


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _importable_module(function: Callable[..., Any]) -> str:
    """Return the name under which others import a function's module, even if it runs as `__main__`."""
    module: str = function.__module__
    if module not in ("__main__", "__mp_main__"):
        return module
    module_globals = getattr(function, "__globals__", {})
    spec, file = module_globals.get("__spec__"), module_globals.get("__file__")
    return str(spec.name) if spec is not None else Path(file).stem if file else module
