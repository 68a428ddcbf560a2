"""Traces, when OpenTelemetry is installed and set up.

A span a request, below the caller's own. A submit leaves its place with the execution, as the tag `ff.traceparent`;
each claim of it, the first, a retry or a takeover, is a span that links back there, and the worker is told the place.
When the attempt is over, a span below its claim tells how long it took and what became of it, and the claim of the next
attempt links to it. Which span belongs to an attempt is remembered in this process, of the latest ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import time_ns
from typing import Any, Protocol

import msgspec

from flowfabric.engine.types import TRACE_TAG
from flowfabric.handles import HandleFields

TRACEPARENT_TAG = TRACE_TAG
MAX_REMEMBERED_SPANS = 10_000


class Tracing(Protocol):
    """Makes spans."""

    is_on: bool

    def request_span(self, method: str, route: str, headers: dict[bytes, bytes]) -> AbstractContextManager[Any]:
        """The span of one request."""
        ...

    def current_traceparent(self) -> str | None:
        """Where the present request stands, for others to link to."""
        ...

    def record_claim(self, execution_id: str, attempt_index: int, attempt_type: str, submitted: str | None) -> None:
        """An attempt began; `submitted` is the place of its submit."""
        ...

    def record_attempt_end(self, attempt: HandleFields, outcome: str) -> None:
        """An attempt is over, or put away."""
        ...


class NoTracing:
    """Nobody looks."""

    is_on = False
    _none = nullcontext()

    def request_span(self, method: str, route: str, headers: dict[bytes, bytes]) -> AbstractContextManager[Any]:
        return self._none

    def current_traceparent(self) -> str | None:
        return None

    def record_claim(self, execution_id: str, attempt_index: int, attempt_type: str, submitted: str | None) -> None:
        pass

    def record_attempt_end(self, attempt: HandleFields, outcome: str) -> None:
        pass


class LatestSpan(msgspec.Struct, frozen=True):
    """The latest span of an execution: of a claim, or of the attempt that it began."""

    span: Any
    attempt_index: int
    is_over: bool
    began_ns: int
    submit: Any


class OtelTracing:
    """Spans of OpenTelemetry."""

    is_on = True

    def __init__(self, provider: Any = None) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._context = TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("flowfabric.server", tracer_provider=provider)
        self._latest: OrderedDict[str, LatestSpan] = OrderedDict()  # by execution

    @contextmanager
    def request_span(self, method: str, route: str, headers: dict[bytes, bytes]) -> Iterator[None]:
        carried = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        with self._tracer.start_as_current_span(
            f"{method} {route}",
            context=self._context.extract(carried),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": route},
        ):
            yield

    def current_traceparent(self) -> str | None:
        carried: dict[str, str] = {}
        self._context.inject(carried)
        return carried.get("traceparent")

    def record_claim(self, execution_id: str, attempt_index: int, attempt_type: str, submitted: str | None) -> None:
        submit, before = self._place_of(submitted), self._latest.get(execution_id)
        span = self._tracer.start_span(
            "claim",
            links=self._links(submit, None if before is None else before.span),
            attributes={"execution_id": execution_id, "attempt_index": attempt_index, "attempt_type": attempt_type},
        )
        span.end()
        self._remember(execution_id, LatestSpan(span.get_span_context(), attempt_index, False, time_ns(), submit))

    def record_attempt_end(self, attempt: HandleFields, outcome: str) -> None:
        claim = self._latest.get(attempt.execution_id)
        if claim is None or claim.is_over or claim.attempt_index != attempt.attempt_index:
            return  # it was claimed elsewhere, or told before
        span = self._tracer.start_span(
            "attempt",
            context=self._trace.set_span_in_context(self._trace.NonRecordingSpan(claim.span)),
            start_time=claim.began_ns,
            links=self._links(claim.submit),
            attributes={
                "execution_id": attempt.execution_id,
                "attempt_index": attempt.attempt_index,
                "lane": attempt.lane_id,
                "outcome": outcome,
            },
        )
        span.end()
        over = msgspec.structs.replace(claim, span=span.get_span_context(), is_over=True)
        self._remember(attempt.execution_id, over)

    def _place_of(self, submitted: str | None) -> Any:
        came_from = self._context.extract({"traceparent": submitted} if submitted else {})
        place = self._trace.get_current_span(came_from).get_span_context()
        return place if submitted and place.is_valid else None

    def _links(self, *places: Any) -> list[Any]:
        return [self._trace.Link(place) for place in places if place is not None]

    def _remember(self, execution_id: str, latest: LatestSpan) -> None:
        self._latest[execution_id] = latest
        self._latest.move_to_end(execution_id)
        if len(self._latest) > MAX_REMEMBERED_SPANS:
            self._latest.popitem(last=False)


def make_tracing() -> Tracing:
    """Spans that are exported when a tracer provider is set up, else none."""
    try:
        from opentelemetry import trace
    except ImportError:
        return NoTracing()
    # Without a provider every span would be made for nothing.
    provider = type(trace.get_tracer_provider()).__name__
    return NoTracing() if provider in ("ProxyTracerProvider", "NoOpTracerProvider") else OtelTracing()
