"""Schedules: their instants and runs, and forms to pause, resume and trigger them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from flowfabric.console import show
from flowfabric.console.pages import Ui, View, action, page
from flowfabric.engine.types import ScheduleDescription, ScheduleStatus
from flowfabric.ids import parse_uuid
from flowfabric.model.security.api_token import ApiScope

MAX_SCHEDULES = 200


class SchedulesPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "schedules.html"
    schedules: list[ScheduleStatus]
    next_cursor: str | None


class SchedulePageView(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "schedule.html"
    namespace: str
    schedule: ScheduleDescription
    input: show.Shown | None


@page("/schedules")
async def show_schedules(ui: Ui) -> SchedulesPage:
    """List schedules; on a page the next one to fire comes first, and paused ones last."""
    found = await ui.engine.list_schedules(
        namespace=ui.given_namespace,
        namespaces=ui.namespaces,
        cursor=ui.request.cursor,
        limit=MAX_SCHEDULES,
    )
    ordered = sorted(found.schedules, key=lambda one: (one.next_instant is None, one.next_instant or 0, one.name))
    return SchedulesPage(title="Schedules", about="schedules", schedules=ordered, next_cursor=found.next_cursor)


@page("/schedules/{name}")
async def show_schedule(ui: Ui) -> SchedulePageView:
    """Show one schedule, with its last runs and its next instants."""
    name, namespace = ui.request.path_params[0].removesuffix(".json"), ui.namespace
    found = await ui.engine.describe_schedule(name, namespace=namespace)
    return SchedulePageView(
        title=name,
        about="schedules",
        namespace=namespace,
        schedule=found,
        input=ui.payload("input", found.input_payload),
    )


def _schedule(ui: Ui, fields: Mapping[str, str]) -> tuple[str, str]:
    return ui.request.path_params[0], ui.request.resolve_namespace(fields.get("namespace") or None)


@action("/schedules/{name}/pause", scope=ApiScope.OPERATE)
async def pause(ui: Ui, fields: Mapping[str, str]) -> str:
    """Pause a schedule, with a note that is shown with it."""
    name, namespace = _schedule(ui, fields)
    await ui.engine.pause_schedule(name, note=fields.get("note", ""), namespace=namespace)
    return ui.url(f"/schedules/{name}", namespace=namespace, done="schedule-paused")


@action("/schedules/{name}/resume", scope=ApiScope.OPERATE)
async def resume(ui: Ui, fields: Mapping[str, str]) -> str:
    """Resume a schedule with its next instant."""
    name, namespace = _schedule(ui, fields)
    await ui.engine.resume_schedule(name, namespace=namespace)
    return ui.url(f"/schedules/{name}", namespace=namespace, done="schedule-resumed")


@action("/schedules/{name}/trigger", scope=ApiScope.OPERATE)
async def trigger(ui: Ui, fields: Mapping[str, str]) -> str:
    """Create a run now; the id in the form makes one run of a form that is sent twice."""
    name, namespace = _schedule(ui, fields)
    trigger_id = parse_uuid(fields["trigger_id"], "trigger_id") if fields.get("trigger_id") else None
    made = await ui.engine.trigger_schedule(name, trigger_id=trigger_id, namespace=namespace)
    return ui.url(f"/runs/{made.execution_id}")
