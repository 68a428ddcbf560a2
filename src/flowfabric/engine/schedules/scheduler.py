"""Scheduler: fires schedules that are due, and reports the ends of their runs to them.

Any process does both; there is no leader. A schedule that two processes fire at once is fired by one of them, because
both changes are guarded by its revision.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from flowfabric.engine.operations.create import defaults_of
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet, load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCompletion
from flowfabric.model.scheduling.schedule import Schedule
from flowfabric.rules.decision import Decision
from flowfabric.rules.schedules import fire as fire_rules
from flowfabric.rules.schedules.fire import Fired
from flowfabric.rules.schedules.overlap import Runs
from flowfabric.stores.queries import Read

A = TypeVar("A")
MAX_PAGES = 50  # changes of one call for one schedule; each decides many instants

FaultPoint = Callable[[str, str], Awaitable[None]]


class Scheduler:
    """Decides on schedules together with their runs."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.on_fault_point: FaultPoint | None = None  # set by `flowfabric.testing.World`; may raise a crash

    async def fire(self, schedule_id: str) -> bool:
        """Decide the instants of a schedule that have come; True if there were any."""
        decided = False
        for _ in range(MAX_PAGES):
            fired = await self._fire_page(schedule_id)
            decided = decided or fired.decided
            if len(fired.runs) + fired.queued + fired.skipped < fire_rules.MAX_INSTANTS and (
                fired.missed < fire_rules.MAX_MISSED
            ):
                break
        return decided

    async def _fire_page(self, schedule_id: str) -> Fired:
        row = None
        if self.on_fault_point is not None and (row := await load_one(self.runtime, Schedule, schedule_id)):
            await self.on_fault_point(row.name, "before_effect")

        def decide(row: Schedule | None, runs: Runs, now: int) -> Decision[Fired]:
            return fire_rules.fire(row, runs, now, defaults=defaults_of(self.runtime))

        fired = await self.decide(schedule_id, decide, lambda row, now: fire_rules.due_instants(row, now).instants)
        if self.on_fault_point is not None and row is not None and fired.decided:
            await self.on_fault_point(row.name, "after_commit")
        metrics = self.runtime.metrics
        for outcome in ("queued", "skipped", "missed"):
            if count := getattr(fired, outcome):
                metrics.count("ff_schedule_instants", count, outcome=outcome)
        if fired.runs:
            metrics.count("ff_schedule_instants", len(fired.runs), outcome="fired")
        return fired

    async def decide(
        self,
        schedule_id: str,
        rule: Callable[[Schedule | None, Runs, int], Decision[A]],
        instants: Callable[[Schedule, int], Sequence[int]] | None = None,
        *,
        others: Sequence[str] = (),
    ) -> A:
        """Decide on a schedule and its runs, those of `instants` and `others` included, and commit."""
        reads = ReadSet()
        schedule = reads.one(Schedule, schedule_id)
        runs = reads.more_each(Execution)

        async def load_runs(rows: Rows) -> Rows:
            row = schedule(rows)
            if row is None:
                return []
            coming = () if instants is None else instants(row, self.runtime.estimate.now())
            wanted = dict.fromkeys((*fire_rules.runs_to_load(row, coming), *others))
            more = [Read(Execution, (name,)) for name in wanted]
            return (await self.runtime.load(more)).rows if more else []

        def decide(rows: Rows, now: int) -> Decision[A]:
            found = {run.execution_id: run for run in runs(rows) if run is not None}
            return rule(schedule(rows), found, now)

        return await self.runtime.decide_and_commit(reads, decide, load_more=load_runs)

    async def end_runs(self, schedule_id: str, completions: Sequence[ChildCompletion]) -> int:
        """Take note of runs that have ended; return how many there were."""
        reads = ReadSet()
        schedule = reads.one(Schedule, schedule_id)
        written = reads.each(ChildCompletion, ((schedule_id, one.child_id, one.life) for one in completions))
        runs = reads.more_each(Execution)

        async def load_runs(rows: Rows) -> Rows:
            row = schedule(rows)
            if row is None:
                return []
            ended = [one.child_id for one in completions]
            wanted = dict.fromkeys((*fire_rules.runs_to_load(row), *ended))
            return (await self.runtime.load([Read(Execution, (name,)) for name in wanted])).rows

        def decide(rows: Rows, now: int) -> Decision[int]:
            found = {run.execution_id: run for run in runs(rows) if run is not None}
            ends = [end for end in written(rows) if end is not None]
            return fire_rules.end_runs(schedule(rows), ends, found, now, defaults=defaults_of(self.runtime))

        return await self.runtime.decide_and_commit(reads, decide, load_more=load_runs)
