"""Tracing, if OpenTelemetry is installed and configured.

Each request is a span below the span of the caller. A submit stores its traceparent with the execution, in the tag
`ff.traceparent`. Each claim (first, retry or takeover) is a span that links to the submit, and the worker gets that
traceparent. When the attempt ends, a span below its claim records duration and outcome, and the claim of the next
attempt links to it. This process remembers the spans of the latest MAX_REMEMBERED_SPANS executions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import time_ns
from typing import Any

import msgspec

from flowfabric.engine.types import TRACE_TAG
from flowfabric.handles import HandleFields

TRACEPARENT_TAG = TRACE_TAG
MAX_REMEMBERED_SPANS = 10_000


class Tracing:
    """Records nothing: the tracing of a server without OpenTelemetry."""

    is_on = False
    _none = nullcontext()

    def request_span(self, method: str, route: str, headers: dict[bytes, bytes]) -> AbstractContextManager[Any]:
        """Open the span of one request."""
        return self._none

    def current_traceparent(self) -> str | None:
        """Return the traceparent of the current span, or None."""
        return None

    def record_claim(self, execution_id: str, attempt_index: int, attempt_type: str, submitted: str | None) -> None:
        """Record a claim; `submitted` is the traceparent of the submit."""

    def record_attempt_end(self, attempt: HandleFields, outcome: str) -> None:
        """Record that an attempt ended or was suspended."""


class LatestSpan(msgspec.Struct, frozen=True):
    """The latest span of an execution: of a claim, or of the attempt that it began."""

    span: Any
    attempt_index: int
    is_over: bool
    began_ns: int
    submit: Any


class OtelTracing(Tracing):
    """Records spans with OpenTelemetry."""

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
        submit, before = self._submit_span(submitted), self._latest.get(execution_id)
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
            return  # claimed on another server, or recorded before
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
        ended = msgspec.structs.replace(claim, span=span.get_span_context(), is_over=True)
        self._remember(attempt.execution_id, ended)

    def _submit_span(self, submitted: str | None) -> Any:
        context = self._context.extract({"traceparent": submitted} if submitted else {})
        span_context = self._trace.get_current_span(context).get_span_context()
        return span_context if submitted and span_context.is_valid else None

    def _links(self, *span_contexts: Any) -> list[Any]:
        return [self._trace.Link(span_context) for span_context in span_contexts if span_context is not None]

    def _remember(self, execution_id: str, latest: LatestSpan) -> None:
        self._latest[execution_id] = latest
        self._latest.move_to_end(execution_id)
        if len(self._latest) > MAX_REMEMBERED_SPANS:
            self._latest.popitem(last=False)


def make_tracing() -> Tracing:
    """Return OpenTelemetry tracing if a tracer provider is configured, else no tracing."""
    try:
        from opentelemetry import trace
    except ImportError:
        return Tracing()
    # Without a provider every span would be created in vain.
    provider = type(trace.get_tracer_provider()).__name__
    return Tracing() if provider in ("ProxyTracerProvider", "NoOpTracerProvider") else OtelTracing()
