"""Traces link what belongs together: the submit, and each attempt of it."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flowfabric.server.traces import NoSpans, OtelSpans
from tests.server.asking import Asking

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WISH = {"worker_instance_id": "w-1", "lanes": ["L"]}


@pytest.fixture
def exported(ask: Asking) -> InMemorySpanExporter:
    """What is told of the requests of a test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    ask.app.spans = OtelSpans(provider)
    return exporter


async def test_every_attempt_links_to_its_submit(ask: Asking, exported: InMemorySpanExporter) -> None:
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    await ask.post("/v1/executions", ask.creation(policy=retry), headers={"traceparent": PARENT})
    [first] = (await ask.post("/v1/workers/w/claims", WISH)).json()["claimed"]
    await ask.post("/v1/leases/fail", {"handle": first["handle"], "reason": "boom"})
    await ask.engine.sweep_once("delayed_promoter")
    [second] = (await ask.post("/v1/workers/w/claims", WISH)).json()["claimed"]

    spans = exported.get_finished_spans()
    [submit] = [span for span in spans if span.name == "POST /v1/executions"]
    assert submit.parent is not None
    assert f"{submit.context.trace_id:032x}" == PARENT.split("-")[1]
    claims = [span for span in spans if span.name == "claim"]
    assert [span.attributes["attempt_type"] for span in claims if span.attributes] == ["initial", "retry"]
    assert [span.links[0].context.span_id for span in claims] == [submit.context.span_id] * 2
    assert first["traceparent"] == second["traceparent"]
    assert first["traceparent"].split("-")[2] == f"{submit.context.span_id:016x}"


async def test_without_a_provider_nothing_is_traced(ask: Asking) -> None:
    assert isinstance(ask.app.spans, NoSpans)
    await ask.created()
    [work] = (await ask.post("/v1/workers/w/claims", WISH)).json()["claimed"]
    assert work["traceparent"] is None
