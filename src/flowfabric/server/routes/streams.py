"""Routes for output streams: read, tail, follow."""

from __future__ import annotations

from collections.abc import AsyncIterator

from msgspec import UNSET

from flowfabric import errors
from flowfabric.api.streams import MAX_BLOCK_MS, MAX_FRAMES_PER_READ, ReadStreamResponse, StreamFrame
from flowfabric.engine.types import StreamPage, SummaryView
from flowfabric.server import sse
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request, encode, json_response, require_found
from flowfabric.server.routing import EVENT_STREAM, QueryParam, Response, RouteGroup, StreamingResponse, Subject

routes = RouteGroup("streams", subject=Subject.EXECUTION)

STREAM_PATH = "/v1/executions/{id}/attempts/{idx}/stream"
PAGE_SIZE = 500

_LIMIT = QueryParam("limit", {"type": "integer", "minimum": 1, "maximum": MAX_FRAMES_PER_READ})
_AFTER = QueryParam("after", {"type": "string"})


def _attempt_index(request: Request[None]) -> int:
    text = request.path_params[1]
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or int(text) > 2**32 - 1:
        raise bad_request(f"attempt index: {text[:40]!r} is not a whole number")
    return int(text)


def _limit(request: Request[None], default: int, hint: str) -> int:
    limit = request.int_param("limit", default)
    if limit < 1:
        raise bad_request("limit must be >= 1")
    if limit > MAX_FRAMES_PER_READ:
        raise bad_request(f"limit exceeds REST ceiling {MAX_FRAMES_PER_READ}; paginate via {hint} for larger spans")
    return limit


def _after(request: Request[None], text: str) -> str:
    if text in ("start", "end"):
        raise bad_request("after: XREAD cursor must be a concrete entry id; pass '0-0' to start from the beginning")
    return text


def _page(page: StreamPage) -> Response:
    frames = [StreamFrame(frame.id, frame.fields) for frame in page.frames]
    return json_response(
        ReadStreamResponse(
            frames,
            len(frames),
            UNSET if page.closed_at is None else page.closed_at,
            UNSET if page.closed_reason is None else page.closed_reason,
        )
    )


@routes.get(
    STREAM_PATH,
    {200: ReadStreamResponse},
    query=(QueryParam("from", {"type": "string"}), QueryParam("to", {"type": "string"}), _LIMIT),
)
async def read_stream(request: Request[None]) -> Response:
    """Return the frames between two cursors, both included; a stream that was never written is empty."""
    execution_id, index = request.execution_id, _attempt_index(request)
    limit = _limit(request, 100, "from/to")
    first, last = request.query_param("from"), request.query_param("to")
    return _page(
        await request.engine.read_stream(
            execution_id, index, "start" if first is None else first, "end" if last is None else last, limit
        )
    )


@routes.get(
    f"{STREAM_PATH}/tail",
    {200: ReadStreamResponse},
    query=(_AFTER, QueryParam("block_ms", {"type": "integer", "minimum": 0, "maximum": MAX_BLOCK_MS}), _LIMIT),
    long=True,
)
async def tail_stream(request: Request[None]) -> Response:
    """Return frames after a cursor, waiting for the first; the end of the stream ends the wait."""
    execution_id, index = request.execution_id, _attempt_index(request)
    limit, block_ms = _limit(request, 50, "after"), request.int_param("block_ms", 0)
    if block_ms > MAX_BLOCK_MS:
        raise bad_request(f"block_ms exceeds {MAX_BLOCK_MS}ms ceiling")
    after = request.query_param("after")
    cursor = _after(request, "0-0" if after is None else after)
    tail = request.engine.tail_stream(execution_id, index, cursor, block_ms, limit)
    page = await request.wait_while_connected(tail) if block_ms else await tail
    return _page(page or StreamPage([], None, None))


@routes.get(f"{STREAM_PATH}/summary", {200: SummaryView})
async def read_summary(request: Request[None]) -> SummaryView:
    """Return the document that the summary frames of an attempt amount to."""
    summary = await request.engine.read_summary(request.execution_id, _attempt_index(request))
    return require_found(summary, "not found: stream")


@routes.get(f"{STREAM_PATH}/events", {200: EVENT_STREAM}, query=(_AFTER,), long=True)
async def follow_stream(request: Request[None]) -> StreamingResponse:
    """Stream frames as server-sent events; `Last-Event-ID` or `after` resumes."""
    execution_id, index = request.execution_id, _attempt_index(request)
    after = _after(request, sse.last_event_id(request) or request.query_param("after") or "0-0")
    # An error here becomes the status of the response.
    first = await request.engine.tail_stream(execution_id, index, after, 0, PAGE_SIZE)
    return StreamingResponse(sse.with_keep_alive(request, _events(request, execution_id, index, after, first)))


async def _events(
    request: Request[None], execution_id: str, index: int, after: str, page: StreamPage
) -> AsyncIterator[bytes]:
    while True:
        for frame in page.frames:
            after = frame.id
            yield sse.format_event(encode(frame.fields), name="frame", cursor=frame.id)
        if page.closed_at is not None and not page.frames:
            yield sse.format_event(
                encode({"closed_at": page.closed_at, "closed_reason": page.closed_reason}), name="closed"
            )
            return
        try:
            page = await request.engine.tail_stream(execution_id, index, after, sse.POLL_WAIT_MS, PAGE_SIZE)
        except errors.ResourceExhausted:
            yield sse.format_event(b'{"reason":"resource_exhausted"}', name="end")
            return
