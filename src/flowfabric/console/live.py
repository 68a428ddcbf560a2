"""One event stream for each tab, which reports only that something has changed; the tab then requests the page again.

Events of the feed are the reason to look at once. Not every change is an event of the feed (a create is none), so the
stream also says it every few seconds; an unchanged page costs a 304.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from flowfabric import errors
from flowfabric.console.pages import PREFIX, enter, error_page, routes
from flowfabric.engine.streams.subscription import Subscription
from flowfabric.engine.types import Filter
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server import sse
from flowfabric.server.errors import HttpError
from flowfabric.server.request import Request
from flowfabric.server.routing import EVENT_STREAM, Response, StreamingResponse

DEBOUNCE_S: Final = 1.0
LOOK_AGAIN_S: Final = 3.0
CHANGED = sse.format_event(b"{}", name="changed")


@routes.get(f"{PREFIX}/live", {200: EVENT_STREAM}, scope=None, long=True, error_page=error_page)
async def follow_page(request: Request[None]) -> StreamingResponse:
    """Stream `changed` whenever the page that follows `about` may have changed."""
    ui = await enter(request, ApiScope.READ)
    if isinstance(ui, Response):
        raise HttpError(401, "no session")
    request.required_scope = ApiScope.READ
    about = request.query_param("about") or ""
    kind, _, execution_id = about.partition(":")
    chosen = Filter(ui.namespaces[0] if ui.namespaces and len(ui.namespaces) == 1 else None)
    feeds: list[Subscription[Any]] = [
        await ui.engine.subscribe_completion(b"", chosen),
        await ui.engine.subscribe_lease_history(b"", chosen),
        await ui.engine.subscribe_signal_delivery(b"", chosen),
    ]
    only = execution_id if kind == "run" else ""
    return StreamingResponse(sse.with_keep_alive(request, _changes(feeds, only)))


async def _changes(feeds: list[Subscription[Any]], execution_id: str) -> AsyncIterator[bytes]:
    changed = asyncio.Event()
    followers = [asyncio.create_task(_follow(feed, execution_id, changed)) for feed in feeds]
    try:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await changed.wait()
            changed.clear()
            yield CHANGED
            await asyncio.sleep(DEBOUNCE_S)
    finally:
        for follower in followers:
            follower.cancel()


async def _follow(feed: Subscription[Any], execution_id: str, changed: asyncio.Event) -> None:
    while True:
        try:
            event = await feed.next(timeout_s=60)
        except (errors.StreamBackpressure, errors.Corruption):
            event = None
            changed.set()
        except errors.FabricError:
            return
        if event is not None and execution_id in ("", event.execution_id):
            changed.set()
