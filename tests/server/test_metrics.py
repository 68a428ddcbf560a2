"""`/metrics`: names and labels of the specification, counters of this process, gauges of the store."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.model.states import PublicState
from flowfabric.server import ServerSettings
from flowfabric.server.metrics import METRIC_CATALOG
from tests.server.api_client import ApiClient, path

SPECIFIED = {
    "ff_http_requests_total": "counter",
    "ff_http_request_duration_seconds": "histogram",
    "ff_scanner_cycle_total": "counter",
    "ff_scanner_cycle_duration_seconds": "histogram",
    "ff_cancel_backlog_depth": "gauge",
    "ff_claim_from_grant_duration_seconds": "histogram",
    "ff_lease_renewal_total": "counter",
    "ff_attempt_outcome_total": "counter",
    "ff_worker_at_capacity_total": "counter",
    "ff_budget_hit_total": "counter",
    "ff_quota_hit_total": "counter",
    "ff_edge_group_policy_total": "counter",
    "ff_sibling_cancel_dispatched_total": "counter",
    "ff_sibling_cancel_disposition_total": "counter",
    "ff_sibling_cancel_reconcile_total": "counter",
    "ff_shutdown_timeout_total": "counter",
    "ff_pending_waitpoint_legacy_token_served_total": "counter",
    "ff_backend_unready_boot_total": "counter",
    "ff_queue_depth": "gauge",
    "ff_active_executions": "gauge",
    "ff_suspended_executions": "gauge",
    "ff_execution_e2e_duration_seconds": "histogram",
    "ff_errors_total": "counter",
    "ff_workers": "gauge",
    "ff_held_runs": "gauge",
    "ff_completions_total": "counter",
}
on_valkey_too = pytest.mark.parametrize("store", ["sqlite", "postgres", "valkey"], indirect=True)
METRIC = re.compile(r"\bff_\w+")
SERIES = re.compile(r"_(?:bucket|sum|count)$")  # the series of a histogram
SAMPLE = re.compile(r'(\w+)(?:\{((?:\w+="[^"]*",?)+)\})? ([0-9.]+)')


def samples(text: str) -> dict[tuple[str, str], float]:
    """Parse all samples by name and labels; every line has to be a sample or a comment."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert (match[1], match[2] or "") not in found, f"exposed twice: {line}"
            found[match[1], match[2] or ""] = float(match[3])
    return found


async def test_every_specified_metric_is_exposed_before_the_first_event(api: ApiClient) -> None:
    text = (await api.get("/metrics")).text

    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert types.items() >= SPECIFIED.items()
    assert set(re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE)) == set(types)
    assert samples(text)["ff_cancel_backlog_depth", ""] == 0
    assert samples(text)["ff_worker_at_capacity_total", ""] == 0


@on_valkey_too
async def test_metrics_have_the_specified_labels(api: ApiClient) -> None:
    await api.create_completed(b"r")
    await api.create_claimed()
    await api.create(lane_id="other lane")
    await api.post("/v1/workers/w/claim", {"lane_id": "L", "worker_instance_id": "i", "grant_ttl_ms": 5})
    await api.post("/v1/workers/w/register", {"worker_instance_id": "i", "lanes": ["L"], "liveness_ttl_ms": 60_000})
    await api.get(path("{fp:0}:00000000-0000-4000-8000-000000000000", "attempts", 0, "stream", "summary"))
    await api.post("/v1/budgets/00000000-0000-4000-8000-000000000000/reset")
    for name in ("delayed_promoter", "lease_expiry", "worker_registry_ttl_sweep"):
        await api.engine.sweeper().sweep_once(name)

    exposed = samples((await api.get("/metrics")).text)

    expected: dict[tuple[str, str], float] = {
        ("ff_attempt_outcome_total", 'lane="L",outcome="ok"'): 1,
        ("ff_completions_total", 'lane="L",outcome="success"'): 1,
        ("ff_execution_e2e_duration_seconds_count", 'lane="L"'): 1,
        ("ff_active_executions", 'lane="L"'): 1,
        ("ff_queue_depth", 'lane="L",state="waiting"'): 0,
        ("ff_queue_depth", 'lane="other lane",state="waiting"'): 1,
        ("ff_suspended_executions", 'lane="L"'): 0,
        ("ff_workers", 'lane="L"'): 1,
        ("ff_claim_from_grant_duration_seconds_count", 'lane="L"'): 1,
        ("ff_errors_total", 'kind="budget_not_found"'): 1,
    }
    assert {key: exposed.get(key) for key in expected} == expected
    buckets = [labels for name, labels in exposed if name == "ff_execution_e2e_duration_seconds_bucket"]
    bounds = [labels.partition('le="')[2][:-1] for labels in buckets]
    assert " ".join(bounds) == "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 30 +Inf"


@on_valkey_too
async def test_counters_are_exposed_while_the_store_is_unavailable(
    api: ApiClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(*given: Any) -> Any:
        raise errors.StoreUnavailable("gone", source="transport")

    await api.create_completed()
    monkeypatch.setattr(api.engine.store, "count_grouped", away)
    answer = await api.get("/metrics")

    assert answer.status_code == 200
    assert samples(answer.text)["ff_completions_total", 'lane="L",outcome="success"'] == 1
    assert not [name for name, _ in samples(answer.text) if name == "ff_queue_depth"]
    assert "gauges could not be read" in caplog.text


async def test_metrics_can_be_switched_off(engine: Engine) -> None:
    assert (await ApiClient(engine, ServerSettings(serve_metrics=False)).get("/metrics")).status_code == 404


@on_valkey_too
async def test_queue_depth_has_the_states_that_are_queues(api: ApiClient) -> None:
    await api.create(delay_until=await api.engine.ping() + 60_000)
    exposed = samples((await api.get("/metrics")).text)

    states = {labels.partition('state="')[2][:-1] for name, labels in exposed if name == "ff_queue_depth"}
    assert states == {PublicState.WAITING.value, PublicState.DELAYED.value}


# -- the dashboard ------------------------------------------------------------------------------------------------


def test_every_panel_of_the_dashboard_uses_exposed_metrics() -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "examples/grafana/flowfabric-ops.json").read_text())
    panels = dashboard["panels"]
    shown = {name for panel in panels for target in panel["targets"] for name in METRIC.findall(target["expr"])}

    assert (dashboard["uid"], dashboard["refresh"], dashboard["schemaVersion"]) == ("flowfabric-ops", "30s", 39)
    assert len(panels) == 11
    assert {
        name for name in shown if SERIES.sub("", name) not in METRIC_CATALOG and name not in METRIC_CATALOG
    } == set()
    sources = [one["datasource"]["uid"] for panel in panels for one in (panel, *panel["targets"])]
    assert set(sources) == {"${datasource}"}
    assert [one["name"] for one in dashboard["templating"]["list"]] == ["datasource"]
