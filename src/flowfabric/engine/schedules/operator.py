"""Operations on schedules: define, list, describe, pause, resume, trigger, backfill, delete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.operations.create import defaults_of
from flowfabric.engine.runtime.read_set import load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.schedules.scheduler import Scheduler
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation.execution_filter import validate_namespaces
from flowfabric.engine.validation.schedule import validate_schedule_name, validate_scheduled_run, validate_spec
from flowfabric.model.answers.execution import Created, Duplicate
from flowfabric.model.execution import Execution
from flowfabric.model.scheduling.schedule import Overlap, RunTemplate, Schedule, ScheduleSpec
from flowfabric.model.view import view_of
from flowfabric.rules import validation
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.schedules import define, views
from flowfabric.rules.schedules.define import Backfilled, PutOutcome, ScheduleRequest
from flowfabric.rules.schedules.fire import MAX_INSTANTS, due_instants
from flowfabric.rules.schedules.identity import schedule_id, triggered_run_id
from flowfabric.rules.schedules.views import ScheduleDescription, ScheduleStatus
from flowfabric.stores.queries import Scan, Where

MAX_NOTE_BYTES = 4096
MAX_PAGE = 1000
ORDER = ("name", "schedule_id")


class SchedulePage(msgspec.Struct, frozen=True):
    """Schedules by name, and the cursor of the next page."""

    schedules: list[ScheduleStatus]
    next_cursor: str | None = None


class ScheduleOperator:
    """Operations of people and applications on schedules."""

    def __init__(self, runtime: Runtime, scheduler: Scheduler) -> None:
        self.runtime = runtime
        self.scheduler = scheduler
        self._known: dict[tuple[str, str], str] = {}  # ids by namespace and name; checked when they are used

    async def put_schedule(
        self, name: str, spec: ScheduleSpec, run: CreateExecution, *, owner: str | None, only_new: bool
    ) -> PutOutcome:
        """Put a schedule in place; the same definition again changes nothing."""
        label, checked = validate_schedule_name(name), validate_scheduled_run(run)
        known = await self._keep_one(checked.namespace, label)
        lane = ids.LaneId(checked.lane_id)
        request = ScheduleRequest(
            schedule_id=known or schedule_id(checked.namespace, label, lane, self.runtime.partitions),
            namespace=checked.namespace,
            name=label,
            spec=validate_spec(spec),
            template=_template(checked),
            input_payload=checked.input_payload,
            owner=validation.optional_name("owner", owner),
            only_new=bool(only_new),
        )
        outcome: PutOutcome | None = None
        while outcome is None:
            outcome = await self.scheduler.decide(
                request.schedule_id,
                lambda row, runs, now: define.put(row, runs, request, now, defaults=defaults_of(self.runtime)),
                lambda row, now: due_instants(row, now, early=True).instants,
            )
        if outcome == "created" and await self._keep_one(checked.namespace, label) != request.schedule_id:
            return await self.put_schedule(name, spec, run, owner=owner, only_new=only_new)
        return outcome

    async def list_schedules(
        self, *, namespace: str | None, namespaces: Sequence[str] | None, cursor: str | None, limit: int
    ) -> SchedulePage:
        """List schedules by name, after the cursor."""
        size = validation.integer("limit", limit, least=1, most=MAX_PAGE)
        names = validate_namespaces(namespace, namespaces)
        where = () if names is None else (Where("namespace", "in", names),)
        after = None if cursor is None else _parse_cursor(cursor)
        rows: list[Schedule] = await self.runtime.scan(Scan(Schedule, where, ORDER, after, size + 1))
        last = rows[size - 1] if len(rows) > size else None
        return SchedulePage(
            [views.status(row) for row in rows[:size]],
            None if last is None else msgspec.json.encode([getattr(last, name) for name in ORDER]).decode(),
        )

    async def describe_schedule(self, name: str, namespace: str) -> ScheduleDescription:
        """Return a schedule with its newest runs and its next instants."""
        row = await load_one(self.runtime, Schedule, await self._id(name, namespace))
        if row is None:
            raise errors.NotFound("schedule")
        runs: list[Execution] = await self.runtime.scan(
            Scan(
                Execution,
                (Where("parent_id", "=", row.schedule_id),),
                ("parent_id", "created_at", "execution_id"),
                limit=views.SHOWN,
                descending=True,
            )
        )
        return views.description(row, runs, self.runtime.estimate.now())

    async def pause_schedule(self, name: str, note: str, namespace: str) -> bool:
        """Pause a schedule; False if it was paused with this note already."""
        why = validation.text("note", note, limit=MAX_NOTE_BYTES)
        key = await self._id(name, namespace)
        return await self.scheduler.decide(key, lambda row, runs, now: define.pause(row, why))

    async def resume_schedule(self, name: str, namespace: str) -> bool:
        """Resume a schedule; False if it was not paused."""
        key = await self._id(name, namespace)
        return await self.scheduler.decide(
            key, lambda row, runs, now: define.resume(row, runs, now, defaults=defaults_of(self.runtime))
        )

    async def trigger_schedule(self, name: str, trigger_id: str | None, namespace: str) -> Created | Duplicate:
        """Create a run now. The same `trigger_id` again changes nothing."""
        key = await self._id(name, namespace)
        trigger = (
            self.runtime.minter.ordered_uuid() if trigger_id is None else validate.parse_uuid("trigger_id", trigger_id)
        )
        run = triggered_run_id(key, trigger)
        return await self.scheduler.decide(
            key,
            lambda row, runs, now: define.trigger(row, runs, run, now, defaults=defaults_of(self.runtime)),
            others=(run,),
        )

    async def backfill_schedule(
        self, name: str, start: int, end: int, overlap: Overlap | str, namespace: str
    ) -> Backfilled:
        """Create the runs of instants from `start` to before `end`; an instant that has its run is skipped."""
        first, last = validation.instant_ms("start", start), validation.instant_ms("end", end)
        how = validation.choice(Overlap, "overlap", overlap)
        key = await self._id(name, namespace)
        row = await load_one(self.runtime, Schedule, key)
        if row is None:
            raise errors.NotFound("schedule")
        instants = define.backfill_instants(row, first, last, await self.runtime.store.ping())
        total = Backfilled()
        page = MAX_INSTANTS if how is Overlap.ALLOW else define.MAX_BACKFILL
        for begin in range(0, len(instants), page):
            part = instants[begin : begin + page]
            done = await self.scheduler.decide(
                key,
                lambda row, runs, now, part=part: define.backfill(  # type: ignore[misc]
                    row, runs, part, how, now, defaults=defaults_of(self.runtime)
                ),
                lambda row, now, part=part: part,  # type: ignore[misc]
            )
            total = Backfilled(*(was + more for was, more in zip(_counts(total), _counts(done), strict=True)))
        return total

    async def delete_schedule(self, name: str, namespace: str) -> bool:
        """Delete a schedule; its runs continue. False if there is none."""
        label, owner = validate_schedule_name(name), validation.name("namespace", namespace)
        key = await self._find(owner, label)
        if key is None:
            return False
        self._known.pop((owner, label), None)
        return await self.scheduler.decide(key, lambda row, runs, now: define.delete(row))

    async def retire_schedules(
        self, owner: str, keep: Iterable[str], note: str, remove: bool, namespace: str
    ) -> list[str]:
        """Pause the schedules that an application no longer declares, or remove them; return their names."""
        app = validation.name("owner", owner)
        kept = {validate_schedule_name(name) for name in validate.validate_iterable("keep", keep)}
        why = validation.text("note", note, limit=MAX_NOTE_BYTES)
        retired: list[str] = []
        where = (Where("namespace", "=", validation.name("namespace", namespace)),)
        after: tuple[Any, ...] | None = None
        while True:
            rows: list[Schedule] = await self.runtime.scan(Scan(Schedule, where, ORDER, after, MAX_PAGE))
            gone = [row for row in rows if row.owner == app and row.name not in kept]
            retired += [row.name for row in gone if await self._retire(row, app, why, remove)]
            if len(rows) < MAX_PAGE:
                return retired
            after = tuple(getattr(rows[-1], name) for name in ORDER)

    async def _retire(self, row: Schedule, owner: str, note: str, remove: bool) -> bool:
        return await self.scheduler.decide(
            row.schedule_id, lambda row, runs, now: define.retire(row, owner, note, remove=remove)
        )

    async def _id(self, name: object, namespace: object) -> str:
        key = await self._find(validation.name("namespace", namespace), validate_schedule_name(name))
        if key is None:
            raise errors.NotFound("schedule", f"{name} in namespace {namespace}")
        return key

    async def _find(self, namespace: str, name: str) -> str | None:
        """Return the id of a schedule; its partition is that of the lane that it was created for."""
        if (known := self._known.get((namespace, name))) is not None:
            if await load_one(self.runtime, Schedule, known) is not None:
                return known
            del self._known[namespace, name]
        rows = await self._named(namespace, name)
        if not rows:
            return None
        self._known[namespace, name] = rows[0].schedule_id
        return rows[0].schedule_id

    async def _keep_one(self, namespace: str, name: str) -> str | None:
        """Return the id of a schedule, and delete others of its name.

        Two processes that create one at the same moment, for tasks of different lanes, insert two rows on two
        partitions. Each scans after its insert, so the last scan finds both.
        """
        rows = await self._named(namespace, name)
        for row in rows[1:]:
            await self.scheduler.decide(row.schedule_id, lambda row, runs, now: define.delete(row))
        if not rows:
            return None
        self._known[namespace, name] = rows[0].schedule_id
        return rows[0].schedule_id

    async def _named(self, namespace: str, name: str) -> list[Schedule]:
        """Return the schedules of this name: the one that counts comes first."""
        where = (Where("namespace", "=", namespace), Where("name", "=", name))
        rows: list[Schedule] = await self.runtime.scan(Scan(Schedule, where, ORDER, limit=MAX_PAGE))
        return define.in_order_of_creation(rows)


def _template(run: CreateExecution) -> RunTemplate:
    return view_of(RunTemplate, run, tags=dict(run.tags))


def _parse_cursor(cursor: object) -> tuple[str, str]:
    try:
        found: tuple[str, str] = msgspec.json.decode(validation.text("cursor", cursor), type=tuple[str, str])
    except msgspec.DecodeError:
        raise errors.InvalidInput("cursor: not one of a list of schedules") from None
    return found


def _counts(done: Backfilled) -> tuple[int, int, int, int]:
    return done.created, done.queued, done.skipped, done.known
