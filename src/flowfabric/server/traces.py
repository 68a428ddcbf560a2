"""Traces, when OpenTelemetry is installed and set up: a span a request, below the caller's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol


class Spans(Protocol):
    """Makes spans."""

    def request(self, method: str, route: str, headers: dict[bytes, bytes]) -> AbstractContextManager[Any]:
        """The span of one request."""
        ...


class _NoSpans:
    _none = nullcontext()

    def request(self, method: str, route: str, headers: dict[bytes, bytes]) -> AbstractContextManager[Any]:
        return self._none


class _OtelSpans:
    def __init__(self) -> None:
        from opentelemetry import propagate, trace

        self._extract = propagate.extract
        self._tracer = trace.get_tracer("flowfabric.server")
        self._kind = trace.SpanKind.SERVER

    @contextmanager
    def request(self, method: str, route: str, headers: dict[bytes, bytes]) -> Iterator[None]:
        carried = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        with self._tracer.start_as_current_span(
            f"{method} {route}",
            context=self._extract({name: carried[name] for name in ("traceparent", "tracestate") if name in carried}),
            kind=self._kind,
            attributes={"http.request.method": method, "http.route": route},
        ):
            yield


def spans() -> Spans:
    """Spans that are exported when a tracer provider is set up, else none."""
    try:
        from opentelemetry import trace
    except ImportError:
        return _NoSpans()
    # Without a provider every span would be made for nothing.
    provider = type(trace.get_tracer_provider()).__name__
    return _NoSpans() if provider in ("ProxyTracerProvider", "NoOpTracerProvider") else _OtelSpans()
