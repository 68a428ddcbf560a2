"""Traces link each attempt to its submit."""

from __future__ import annotations

import httpx2
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flowfabric.client import RemoteEngine
from flowfabric.clock import ManualClock
from flowfabric.server.tracing import OtelTracing
from tests.server.api_client import ApiClient

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
on_valkey_too = pytest.mark.parametrize("store", ["sqlite", "postgres", "valkey"], indirect=True)
CLAIM = {"worker_instance_id": "w-1", "lanes": ["L"]}


@pytest.fixture
def exported(api: ApiClient) -> InMemorySpanExporter:
    """The spans of the requests of a test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    api.app.tracing = OtelTracing(provider)
    return exporter


@on_valkey_too
async def test_every_attempt_links_to_its_submit(api: ApiClient, exported: InMemorySpanExporter) -> None:
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    await api.post("/v1/executions", api.create_body(policy=retry), headers={"traceparent": PARENT})
    [first] = (await api.post("/v1/workers/w/claims", CLAIM)).json()["claimed"]
    await api.post("/v1/leases/fail", {"handle": first["handle"], "reason": "boom"})
    await api.engine.sweep_once("delayed_promoter")
    [second] = (await api.post("/v1/workers/w/claims", CLAIM)).json()["claimed"]

    spans = exported.get_finished_spans()
    [submit] = [span for span in spans if span.name == "POST /v1/executions"]
    assert submit.parent is not None
    assert f"{submit.context.trace_id:032x}" == PARENT.split("-")[1]
    claims = [span for span in spans if span.name == "claim"]
    assert [span.attributes["attempt_type"] for span in claims if span.attributes] == ["initial", "retry"]
    assert [span.links[0].context.span_id for span in claims] == [submit.context.span_id] * 2
    assert first["traceparent"] == second["traceparent"]
    assert first["traceparent"].split("-")[2] == f"{submit.context.span_id:016x}"


async def test_an_attempt_is_a_span_below_its_claim_and_the_retry_links_to_it(
    api: ApiClient, exported: InMemorySpanExporter
) -> None:
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    await api.post("/v1/executions", api.create_body(policy=retry))
    [first] = (await api.post("/v1/workers/w/claims", CLAIM)).json()["claimed"]
    for _ in range(2):  # a retry after a lost reply
        await api.post("/v1/leases/fail", {"handle": first["handle"], "reason": "boom"})
    await api.engine.sweep_once("delayed_promoter")
    [second] = (await api.post("/v1/workers/w/claims", CLAIM)).json()["claimed"]
    await api.post("/v1/leases/complete", {"handle": second["handle"]})

    spans = exported.get_finished_spans()
    [submit] = [span for span in spans if span.name == "POST /v1/executions"]
    claims, attempts = ([span for span in spans if span.name == name] for name in ("claim", "attempt"))
    assert [(span.attributes or {})["outcome"] for span in attempts] == ["retry", "ok"]
    for claim, attempt in zip(claims, attempts, strict=True):
        assert attempt.parent is not None
        assert (attempt.parent.span_id, attempt.context.trace_id) == (claim.context.span_id, claim.context.trace_id)
        assert [link.context.span_id for link in attempt.links] == [submit.context.span_id]
        assert attempt.start_time is not None
        assert attempt.end_time is not None
        assert attempt.start_time <= attempt.end_time
    [retried_submit, failed] = claims[1].links
    assert retried_submit.context.span_id == submit.context.span_id
    assert failed.context.span_id == attempts[0].context.span_id


@on_valkey_too
async def test_a_takeover_links_to_the_claim_that_was_lost(
    api: ApiClient, exported: InMemorySpanExporter, clock: ManualClock
) -> None:
    await api.create()
    [lost] = (await api.post("/v1/workers/w/claims", CLAIM | {"lease_ttl_ms": 100})).json()["claimed"]
    clock.advance_ms(100)
    [successor] = (await api.post("/v1/workers/w/claims", CLAIM)).json()["claimed"]
    await api.post("/v1/leases/complete", {"handle": lost["handle"]})  # too late: refused, without a span
    await api.post("/v1/leases/delay", {"handle": successor["handle"], "delay_ms": 0})

    spans = exported.get_finished_spans()
    first, second = (span for span in spans if span.name == "claim")
    assert second.links[-1].context.span_id == first.context.span_id
    [attempt] = [span for span in spans if span.name == "attempt"]
    assert dict(attempt.attributes or {}) == {
        "execution_id": successor["execution_id"],
        "attempt_index": 1,
        "lane": "L",
        "outcome": "delayed",
    }


async def test_an_attempt_that_was_claimed_elsewhere_has_no_span(
    api: ApiClient, exported: InMemorySpanExporter
) -> None:
    held = await api.create_claimed()
    answer = await api.post("/v1/leases/complete", {"handle": await api.app.handle_signer.sign(held.handle)})

    assert answer.status_code == 200
    assert [span.name for span in exported.get_finished_spans() if span.name == "attempt"] == []


async def test_a_client_propagates_its_trace_context(api: ApiClient, exported: InMemorySpanExporter) -> None:
    tracer = TracerProvider().get_tracer("app")
    transport = httpx2.ASGITransport(app=api.app)
    async with RemoteEngine("http://ff", transport=transport) as remote:
        with tracer.start_as_current_span("checkout") as checkout:
            await remote.create_execution(execution_id=remote.new_execution_id())

    [submit] = [span for span in exported.get_finished_spans() if span.name == "POST /v1/executions"]
    assert submit.parent is not None
    assert submit.parent.span_id == checkout.get_span_context().span_id


async def test_there_is_no_tracing_without_a_provider(api: ApiClient) -> None:
    assert not isinstance(api.app.tracing, OtelTracing)
    await api.create()
    [work] = (await api.post("/v1/workers/w/claims", CLAIM)).json()["claimed"]
    assert work["traceparent"] is None
