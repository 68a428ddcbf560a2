"""Declares the metrics of the server and its engine, and renders them in the text format of Prometheus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from flowfabric.engine.metrics.recorder import BUCKETS_S, Histogram, Labels, Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTER, HISTOGRAM, GAUGE = "counter", "histogram", "gauge"

METRIC_CATALOG = {
    "ff_http_requests_total": (COUNTER, "Requests by method, route and status."),
    "ff_http_request_duration_seconds": (HISTOGRAM, "Duration of requests."),
    "ff_scanner_cycle_total": (COUNTER, "Passes of background sweeps, by sweep."),
    "ff_scanner_cycle_duration_seconds": (HISTOGRAM, "Duration of a pass of a sweep."),
    "ff_scanner_restart_total": (COUNTER, "Sweeps that were restarted after an error."),
    "ff_cancel_backlog_depth": (GAUGE, "Cancelled flows with members that are not cancelled yet."),
    "ff_claim_from_grant_duration_seconds": (HISTOGRAM, "Duration of claims by a worker."),
    "ff_lease_renewal_total": (COUNTER, "Lease renewals."),
    "ff_attempt_outcome_total": (COUNTER, "Ended attempts, by lane and outcome."),
    "ff_schedule_instants_total": (COUNTER, "Instants of schedules that were decided, by outcome."),
    "ff_worker_at_capacity_total": (
        COUNTER,
        "Claims that a worker of this process did not make because it had no free slot.",
    ),
    "ff_lease_expired_before_start_total": (
        COUNTER,
        "Claimed executions that a worker of this process did not begin because their lease had expired.",
    ),
    "ff_budget_hit_total": (COUNTER, "Claims blocked by a budget."),
    "ff_quota_hit_total": (COUNTER, "Claims blocked by a quota."),
    "ff_edge_group_policy_total": (COUNTER, "Join groups, by policy."),
    "ff_sibling_cancel_dispatched_total": (COUNTER, "Cancels of siblings that a decided join no longer needs."),
    "ff_sibling_cancel_disposition_total": (COUNTER, "Results of these cancels, by disposition."),
    "ff_sibling_cancel_reconcile_total": (COUNTER, "Cancels of siblings that the reconciler checked, by action."),
    "ff_shutdown_timeout_total": (COUNTER, "Shutdowns that cut off work at the timeout."),
    "ff_pending_waitpoint_legacy_token_served_total": (COUNTER, "Always 0: legacy tokens are not supported."),
    "ff_backend_unready_boot_total": (COUNTER, "Starts at which the store was unavailable."),
    "ff_queue_depth": (GAUGE, "Waiting executions, by lane and state."),
    "ff_active_executions": (GAUGE, "Active executions, including those with an expired lease."),
    "ff_suspended_executions": (GAUGE, "Suspended executions."),
    "ff_held_runs": (GAUGE, "Executions that wait for other code, by task."),
    "ff_execution_e2e_duration_seconds": (HISTOGRAM, "Time from the submit of an execution to its end."),
    "ff_errors_total": (COUNTER, "Errors, by kind."),
    "ff_workers": (GAUGE, "Live workers, by lane; a worker that serves several lanes is counted in each."),
    "ff_completions_total": (COUNTER, "Ended executions, by lane and outcome."),
}
UNLABELLED = (  # without labels: exposed as 0 before the first event
    "ff_worker_at_capacity_total",
    "ff_lease_expired_before_start_total",
    "ff_shutdown_timeout_total",
    "ff_pending_waitpoint_legacy_token_served_total",
)


class HttpMetrics:
    """Counts requests by method, route template and status, so that callers cannot create labels."""

    def __init__(self) -> None:
        self.registry = Metrics()
        self._labels: dict[tuple[str, str, int], Labels] = {}

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        labels = self._labels.get((method, route, status))
        if labels is None:
            known = method if method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH") else "other"
            labels = (("method", known), ("path", route), ("status", str(status)))
            if len(self._labels) < 10_000:
                self._labels[method, route, status] = labels
        self.registry.counters["ff_http_requests", labels] += 1
        self.registry.observe_labelled("ff_http_request_duration", labels, seconds)


def exposition(*registries: Metrics) -> bytes:
    """Render all metrics as text; metrics without samples are listed with HELP and TYPE."""
    counts: dict[str, dict[Labels, float]] = defaultdict(dict, {name: {(): 0} for name in UNLABELLED})
    timings: dict[str, dict[Labels, Histogram]] = defaultdict(dict)
    for each in registries:
        for (name, labels), value in each.counters.items():
            counts[f"{name}_total"][labels] = value
        for (name, labels), level in each.gauges.items():
            counts[name][labels] = level
        for (name, labels), timing in each.histograms.items():
            timings[f"{name}_seconds"][labels] = timing
    lines: list[str] = []
    for name in sorted({*METRIC_CATALOG, *counts, *timings}):
        kind, help_text = METRIC_CATALOG.get(name, (HISTOGRAM if name in timings else COUNTER, ""))
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_braces(labels)} {value}" for labels, value in sorted(counts[name].items())]
        for labels, timing in sorted(timings[name].items(), key=lambda pair: pair[0]):
            lines += _histogram(name, labels, timing)
    return ("\n".join(lines) + "\n").encode()


def _histogram(name: str, labels: Labels, timing: Histogram) -> Iterator[str]:
    total = 0
    for bound, count in zip(BUCKETS_S, timing.buckets, strict=False):
        total += count
        yield f"{name}_bucket{_braces((*labels, ('le', f'{bound:g}')))} {total}"
    yield f"{name}_bucket{_braces((*labels, ('le', '+Inf')))} {timing.count}"
    yield f"{name}_sum{_braces(labels)} {timing.total_s:.6f}"
    yield f"{name}_count{_braces(labels)} {timing.count}"


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
