"""Traces, when OpenTelemetry is installed and set up.

A span a request, below the caller's own. A submit leaves its place with the execution, as the tag `ff.traceparent`;
each claim of it, the first, a retry or a takeover, is a span that links back there, and the worker is told the place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

TAG = "ff.traceparent"


class Spans(Protocol):
    """Makes spans."""

    is_on: bool

    def request(self, method: str, route: str, headers: dict[bytes, bytes]) -> AbstractContextManager[Any]:
        """The span of one request."""
        ...

    def place(self) -> str | None:
        """Where the present request stands, for others to link to."""
        ...

    def claimed(self, execution_id: str, attempt_index: int, attempt_type: str, submitted: str | None) -> None:
        """An attempt began; `submitted` is the place of its submit."""
        ...


class NoSpans:
    """Nobody looks."""

    is_on = False
    _none = nullcontext()

    def request(self, method: str, route: str, headers: dict[bytes, bytes]) -> AbstractContextManager[Any]:
        return self._none

    def place(self) -> str | None:
        return None

    def claimed(self, execution_id: str, attempt_index: int, attempt_type: str, submitted: str | None) -> None:
        pass


class OtelSpans:
    """Spans of OpenTelemetry."""

    is_on = True

    def __init__(self, provider: Any = None) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._context = TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("flowfabric.server", tracer_provider=provider)

    @contextmanager
    def request(self, method: str, route: str, headers: dict[bytes, bytes]) -> Iterator[None]:
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

    def place(self) -> str | None:
        carried: dict[str, str] = {}
        self._context.inject(carried)
        return carried.get("traceparent")

    def claimed(self, execution_id: str, attempt_index: int, attempt_type: str, submitted: str | None) -> None:
        came_from = self._context.extract({"traceparent": submitted} if submitted else {})
        submit = self._trace.get_current_span(came_from).get_span_context()
        self._tracer.start_span(
            "claim",
            links=[self._trace.Link(submit)] if submitted and submit.is_valid else [],
            attributes={"execution_id": execution_id, "attempt_index": attempt_index, "attempt_type": attempt_type},
        ).end()


def spans() -> Spans:
    """Spans that are exported when a tracer provider is set up, else none."""
    try:
        from opentelemetry import trace
    except ImportError:
        return NoSpans()
    # Without a provider every span would be made for nothing.
    provider = type(trace.get_tracer_provider()).__name__
    return NoSpans() if provider in ("ProxyTracerProvider", "NoOpTracerProvider") else OtelSpans()
