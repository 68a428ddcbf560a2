"""Schedules: calls that are submitted at instants, by a cron expression, an interval or a calendar.

`app.schedule(…)` declares one in code; workers apply it when they start. `app.schedules` creates, finds and lists them
while the application runs. Both give a `ScheduleHandle`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric import errors
from flowfabric.engine.validation.schedule import validate_schedule_name, validate_spec
from flowfabric.model.scheduling.schedule import Calendar, Overlap, ScheduleSpec
from flowfabric.sdk.call import Call
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.run import Run
from flowfabric.sdk.serialization.values import ValueCodec
from flowfabric.sdk.worker.threads import Portal

if TYPE_CHECKING:
    from flowfabric.engine.types import Backfilled, ScheduleDescription, ScheduleStatus
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.sdk.fabric import Fabric

logger = logging.getLogger("flowfabric.schedules")

CONCURRENT_PUTS = 20
LEFT_THE_CODE = "it is no longer declared in the code"


class DeclaredSchedule(msgspec.Struct, frozen=True):
    """A schedule as it is declared in code."""

    name: str
    call: Call[Any]
    spec: ScheduleSpec


def declare_schedule(
    name: str,
    call: Call[Any],
    *,
    cron: str | None,
    every: Duration | None,
    offset: Duration,
    at: Calendar | None,
    tz: str,
    overlap: Overlap | str,
    catch_up: Duration,
    jitter: Duration,
    pause_on_failure: bool,
) -> DeclaredSchedule:
    """Check a schedule; nothing is sent yet."""
    label = validate_schedule_name(name)
    if not isinstance(call, Call):
        raise errors.InvalidInput(f"schedule {label}: {call!r} is no call of a task; write task.s(…)")
    if call.task.is_batch:
        raise errors.InvalidInput(f"schedule {label}: {call.task.name} is a batch of submits; schedule another task")
    try:
        policy = Overlap(overlap)
    except ValueError:
        raise errors.InvalidInput(f"overlap: {overlap!r} is not one of {', '.join(Overlap)}") from None
    spec = ScheduleSpec(
        cron=cron,
        every_ms=None if every is None else to_ms(every, "every"),
        offset_ms=to_ms(offset, "offset"),
        calendar=at,
        tz=tz,
        overlap=policy,
        catch_up_ms=to_ms(catch_up, "catch_up"),
        jitter_ms=to_ms(jitter, "jitter"),
        pause_on_failure=bool(pause_on_failure),
    )
    validate_spec(spec)
    options = call.options
    if options.key is not None or options.delay_ms is not None or options.deadline is not None:
        raise errors.InvalidInput(
            f"schedule {label}: key, delay and deadline belong to one run, not to each; leave them out of the options"
        )
    call.task.signature.to_json(call.task.signature.bind(call.args, call.kwargs))
    return DeclaredSchedule(label, call, spec)


async def put_schedule(engine: EngineAPI, declared: DeclaredSchedule, *, owner: str | None) -> str:
    """Put a schedule in place; one without an owner must not exist with another definition."""
    call = declared.call
    arguments = call.task.signature.bind(call.args, call.kwargs)
    ask = await call.task.build_create(engine, arguments, options=call.options)
    return await engine.put_schedule(declared.name, declared.spec, ask, owner=owner, only_new=owner is None)


async def apply_schedules(app: Fabric, engine: EngineAPI) -> None:
    """Put the schedules of the code in place, and pause or remove those that have left it. Safe to repeat."""
    slots = asyncio.Semaphore(CONCURRENT_PUTS)

    async def put(declared: DeclaredSchedule) -> None:
        async with slots:
            await put_schedule(engine, declared, owner=app.module)

    try:
        await asyncio.gather(*(put(declared) for declared in app.declared_schedules.values()))
        retired = await engine.retire_schedules(
            app.module,
            keep=list(app.declared_schedules),
            note=LEFT_THE_CODE,
            remove=app.prune_schedules,
            namespace=app.namespace,
        )
    except (errors.Unauthorized, errors.NotFound) as refused:  # without the scope, or a server of an older release
        if app.declared_schedules:
            logger.error(
                "the schedules of the code are not in place: the worker's token needs the scope operate, and the "
                "server this release or a later one (%s)",
                refused,
            )
        return
    for name in retired:
        logger.warning("schedule %s: %s; it is %s", name, LEFT_THE_CODE, "removed" if app.prune_schedules else "paused")


def defining_module(app: Fabric) -> str:
    """Return the name of the module that makes an app, also if it runs as `__main__`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_locals.get("self") is app:
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "")
    if name not in ("__main__", "__mp_main__"):
        return str(name)
    spec = frame.f_globals.get("__spec__")
    return str(spec.name) if spec is not None else inspect.getmodulename(frame.f_code.co_filename) or str(name)


class ScheduleHandle:
    """A schedule, by its name."""

    def __init__(self, app: Fabric, name: str) -> None:
        self._app = app
        self.name = validate_schedule_name(name)

    @property
    def sync(self) -> SyncSchedule:
        """The blocking twin of this object, for code that cannot await."""
        return SyncSchedule(self, self._app.portal())

    async def describe(self) -> ScheduleDescription:
        """Return its state, its last ten runs and its next ten instants, in milliseconds since the epoch."""
        engine = await self._app.engine()
        return await engine.describe_schedule(self.name, namespace=self._app.namespace)

    async def pause(self, note: str = "") -> bool:
        """Pause it until it is resumed, also through deploys; False if nothing changes."""
        engine = await self._app.engine()
        return await engine.pause_schedule(self.name, note=note, namespace=self._app.namespace)

    async def resume(self) -> bool:
        """Continue with the next instant; those of the pause are skipped. False if it is not paused."""
        engine = await self._app.engine()
        return await engine.resume_schedule(self.name, namespace=self._app.namespace)

    async def trigger(self) -> Run[Any]:
        """Create a run now, whatever is under way; also while it is paused."""
        engine = await self._app.engine()
        trigger_id = engine.minter.ordered_uuid()  # a call that is repeated after a lost reply is the same run
        answer = await engine.trigger_schedule(self.name, trigger_id=trigger_id, namespace=self._app.namespace)
        return await self._run(engine, answer.execution_id)

    async def backfill(self, start: datetime, end: datetime, *, overlap: Overlap | str = Overlap.QUEUE) -> Backfilled:
        """Create the runs of instants from `start` to before `end`; an instant that has its run is skipped."""
        engine = await self._app.engine()
        return await engine.backfill_schedule(
            self.name,
            _epoch_ms("start", start),
            _epoch_ms("end", end),
            overlap=overlap,
            namespace=self._app.namespace,
        )

    async def delete(self) -> bool:
        """Delete it; its runs continue. One that is declared in code comes back with the next start of a worker."""
        engine = await self._app.engine()
        return await engine.delete_schedule(self.name, namespace=self._app.namespace)

    async def _run(self, engine: EngineAPI, run_id: str) -> Run[Any]:
        described = await engine.describe_schedule(self.name, namespace=self._app.namespace)
        task = self._app.tasks.get(described.status.task)
        return Run(run_id, "run", ValueCodec(Any), self._app) if task is None else task.own_run(run_id)

    def __repr__(self) -> str:
        return f"<ScheduleHandle {self.name}>"


class Schedules:
    """The schedules of an app's namespace."""

    def __init__(self, app: Fabric) -> None:
        self._app = app

    @property
    def sync(self) -> SyncSchedules:
        """The blocking twin of this object, for code that cannot await."""
        return SyncSchedules(self, self._app)

    async def create(
        self,
        name: str,
        call: Call[Any],
        *,
        cron: str | None = None,
        every: Duration | None = None,
        offset: Duration = 0,
        at: Calendar | None = None,
        tz: str = "UTC",
        overlap: Overlap | str = Overlap.SKIP,
        catch_up: Duration = "10m",
        jitter: Duration = 0,
        pause_on_failure: bool = False,
    ) -> ScheduleHandle:
        """Create a schedule that no code declares; the same definition again changes nothing.

        Raises `ScheduleExists` if one of this name has another definition.
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
        await put_schedule(await self._app.engine(), declared, owner=None)
        return ScheduleHandle(self._app, declared.name)

    def get(self, name: str) -> ScheduleHandle:
        """Return the handle of a schedule; nothing is sent."""
        return ScheduleHandle(self._app, name)

    async def list(self) -> Sequence[ScheduleStatus]:
        """Return all schedules of the namespace, by name."""
        return [status async for status in self._pages()]

    async def _pages(self) -> AsyncIterator[ScheduleStatus]:
        engine, cursor = await self._app.engine(), None
        while True:
            page = await engine.list_schedules(namespace=self._app.namespace, cursor=cursor, limit=1000)
            for status in page.schedules:
                yield status
            cursor = page.next_cursor
            if cursor is None:
                return


class SyncSchedule:
    """The blocking twin of `ScheduleHandle`."""

    def __init__(self, handle: ScheduleHandle, portal: Portal) -> None:
        self._handle = handle
        self._portal = portal

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self._handle.name

    def describe(self) -> ScheduleDescription:
        """Return its state, its last ten runs and its next ten instants."""
        return self._portal.call(self._handle.describe())

    def pause(self, note: str = "") -> bool:
        """Pause it until it is resumed; False if nothing changes."""
        return self._portal.call(self._handle.pause(note))

    def resume(self) -> bool:
        """Continue with the next instant; False if it is not paused."""
        return self._portal.call(self._handle.resume())

    def trigger(self) -> Run[Any]:
        """Create a run now, whatever is under way."""
        return self._portal.call(self._handle.trigger())

    def backfill(self, start: datetime, end: datetime, *, overlap: Overlap | str = Overlap.QUEUE) -> Backfilled:
        """Make up for the instants from `start` to before `end`."""
        return self._portal.call(self._handle.backfill(start, end, overlap=overlap))

    def delete(self) -> bool:
        """Delete it; its runs continue."""
        return self._portal.call(self._handle.delete())


class SyncSchedules:
    """The blocking twin of `Schedules`."""

    def __init__(self, schedules: Schedules, app: Fabric) -> None:
        self._schedules = schedules
        self._app = app

    def create(self, name: str, call: Call[Any], **options: Any) -> SyncSchedule:
        """Create a schedule, with the options of `Schedules.create`."""
        portal = self._app.portal()
        return SyncSchedule(portal.call(self._schedules.create(name, call, **options)), portal)

    def get(self, name: str) -> SyncSchedule:
        """Return the handle of a schedule; nothing is sent."""
        return SyncSchedule(self._schedules.get(name), self._app.portal())

    def list(self) -> Sequence[ScheduleStatus]:
        """Return all schedules of the namespace, by name."""
        return self._app.portal().call(self._schedules.list())


def _epoch_ms(name: str, instant: object) -> int:
    if not isinstance(instant, datetime) or instant.tzinfo is None:
        raise errors.InvalidInput(f"{name}: {instant!r} is no datetime with a zone; write datetime(…, tzinfo=UTC)")
    return int(instant.astimezone(UTC).timestamp() * 1000)
