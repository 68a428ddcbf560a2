"""Lanes and workers: the work that waits, the workers that serve it, and the leases that each holds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from flowfabric.console.pages import Ui, View, action, page
from flowfabric.console.runs import Filters, RunRow, run_row, search
from flowfabric.model.scheduling.worker import WorkerEntry, WorkerEvent, WorkerEventKind
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.states import PublicState

MAX_EVENTS = 50
MAX_RUNS = 20
MAX_WORKERS = 200


class LaneRow(msgspec.Struct, frozen=True):
    """A lane with the number of its unfinished runs by state."""

    lane: str
    waiting: int = 0
    running: int = 0
    delayed: int = 0
    limited: int = 0
    suspended: int = 0
    workers: int = 0
    oldest_at: int | None = None
    at_least: list[str] = []  # the states of which more may exist than were counted


class LanesPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "lanes.html"
    lanes: list[LaneRow]
    workers: list[WorkerEntry]


class LanePage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "lane.html"
    lanes: list[LaneRow]
    workers: list[WorkerEntry]
    runs: list[RunRow]


class WorkerPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "worker.html"
    namespace: str
    worker: WorkerEntry | None
    held: list[RunRow]
    recent: list[RunRow]
    events: list[WorkerEvent]


async def lane_rows(ui: Ui) -> list[LaneRow]:
    """Return the lanes with their levels; they are of all namespaces, so a caller that is bound to some gets none."""
    if not ui.sees_all:
        return []
    return [
        LaneRow(
            lane.lane_id,
            lane.states.get(PublicState.WAITING, 0),
            lane.states.get(PublicState.ACTIVE, 0),
            lane.states.get(PublicState.DELAYED, 0),
            lane.states.get(PublicState.RATE_LIMITED, 0),
            lane.states.get(PublicState.SUSPENDED, 0),
            lane.workers,
            lane.waiting_since,
            lane.at_least,
        )
        for lane in (await ui.engine.read_levels()).lanes
    ]


async def live_workers(ui: Ui) -> list[WorkerEntry]:
    """Return the live workers that the caller may see."""
    if ui.sees_all and ui.given_namespace is None:
        return (await ui.engine.list_workers(limit=MAX_WORKERS, all_namespaces=True)).entries
    names = [ui.given_namespace] if ui.given_namespace is not None else ui.namespaces or []
    pages = await asyncio.gather(*(ui.engine.list_workers(name, limit=MAX_WORKERS) for name in names))
    return [worker for page in pages for worker in page.entries]


@page("/lanes", rows="lanes")
async def show_lanes(ui: Ui) -> LanesPage:
    """Show lanes and workers."""
    lanes, workers = await asyncio.gather(lane_rows(ui), live_workers(ui))
    return LanesPage(title="Lanes & workers", about="lanes", lanes=lanes, workers=workers)


@page("/lanes/{lane}")
async def show_lane(ui: Ui) -> LanePage:
    """Show one lane: its level, its workers and its newest runs."""
    name = ui.request.path_params[0].removesuffix(".json")
    lanes, workers, runs = await asyncio.gather(
        lane_rows(ui), live_workers(ui), search(ui, Filters(lane=name), None, MAX_RUNS)
    )
    return LanePage(
        title=name,
        about="lanes",
        lanes=[lane for lane in lanes if lane.lane == name],
        workers=[worker for worker in workers if name in worker.lanes],
        runs=[run_row(run) for run in runs.executions],
    )


@page("/workers/{id}")
async def show_worker(ui: Ui) -> WorkerPage:
    """Show one worker: what it serves, holds and has run, and its log."""
    instance, namespace = ui.request.path_params[0].removesuffix(".json"), ui.namespace
    found, held, recent, events = await asyncio.gather(
        ui.engine.list_workers(namespace, limit=1000),
        ui.engine.list_worker_executions(instance, namespaces=ui.namespaces, limit=MAX_RUNS),
        search(ui, Filters(worker=instance), None, MAX_RUNS),
        ui.engine.list_worker_events(namespace, instance),
    )
    return WorkerPage(
        title=instance,
        about="lanes",
        namespace=namespace,
        worker=next((worker for worker in found.entries if worker.worker_instance_id == instance), None),
        held=[run_row(run) for run in held.executions],
        recent=[run_row(run) for run in recent.executions if run.public_state is not PublicState.ACTIVE],
        events=[event for event in reversed(events) if event.event_kind != WorkerEventKind.HEARTBEAT][:MAX_EVENTS],
    )


@action("/workers/dead", scope=ApiScope.OPERATE)
async def mark_dead(ui: Ui, fields: Mapping[str, str]) -> str:
    """Remove a worker from the registry."""
    namespace = ui.request.resolve_namespace(fields.get("namespace") or None)
    await ui.engine.mark_worker_dead(
        namespace=namespace,
        worker_instance_id=fields.get("worker", ""),
        reason=fields.get("reason") or f"marked dead by {ui.name}",
    )
    return ui.url("/lanes", done="dead")
