"""The latest events of all feeds, newest first."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from flowfabric.console.pages import PAGE_SIZE, Ui, View, page
from flowfabric.engine.operations.overview import PastEvent
from flowfabric.model.event import Topic
from flowfabric.model.text import humanize
from flowfabric.server.errors import bad_request

TOPICS = tuple(topic.value for topic in Topic)
MAX_DETAIL_CHARS = 300


class EventRow(msgspec.Struct, frozen=True):
    """An event of the feed in words."""

    at: int
    topic: str
    what: str
    execution_id: str
    details: str


class EventsPage(View, frozen=True, kw_only=True):
    template: ClassVar[str] = "events.html"
    events: list[EventRow]
    topic: str
    namespace: str
    next_cursor: str | None
    topics: tuple[str, ...] = TOPICS


@page("/events", rows="events")
async def show_events(ui: Ui) -> EventsPage:
    """List past events."""
    topic, before = ui.request.query_param("topic") or "", ui.request.query_param("cursor") or ""
    if topic not in ("", *TOPICS):
        raise bad_request(f"topic: none of {', '.join(TOPICS)}")
    found = await ui.engine.list_events(
        topics=[topic] if topic else TOPICS,
        namespaces=ui.namespaces if ui.given_namespace is None else [ui.given_namespace],
        before=ui.request.int_param("cursor") if before else None,
        limit=PAGE_SIZE,
    )
    return EventsPage(
        title="Events",
        about="" if before else "events",
        events=[_row(event) for event in found.events],
        topic=topic,
        namespace=ui.given_namespace or "",
        next_cursor=None if found.next_before is None else str(found.next_before),
    )


def _row(past: PastEvent) -> EventRow:
    event = past.event
    what = event.outcome or event.operator or event.signal or event.lease or ""
    who = event.worker_instance_id or ""
    reason = event.reason or ""
    if reason.isidentifier():  # set by the engine, not typed by a person
        reason = humanize(reason)
    details = "; ".join(part for part in (who, reason, event.details or "") if part)
    topic = past.topics[-1].value if past.topics else ""
    if event.outcome:
        topic = Topic.COMPLETION.value
    return EventRow(past.at, topic, humanize(what), event.execution_id, details[:MAX_DETAIL_CHARS])
