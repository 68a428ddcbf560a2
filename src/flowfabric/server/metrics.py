"""What the server and its engine count, as Prometheus reads it. The names are the reference's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from flowfabric.engine.meters import BUCKETS_S, Labels, Meters, Timing

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

HELP = {
    "ff_http_requests_total": "Requests by method, route and status.",
    "ff_http_request_duration_seconds": "How long requests took.",
    "ff_scanner_cycle_total": "Passes of the background sweeps.",
    "ff_scanner_cycle_duration_seconds": "How long a pass took.",
    "ff_claim_from_grant_duration_seconds": "How long the scheduler took to find work for a worker.",
    "ff_budget_hit_total": "Claims held up by a budget.",
    "ff_quota_hit_total": "Claims held up by a quota.",
    "ff_shutdown_timeout_total": "What had to be cut off at shutdown.",
    "ff_errors_total": "Refusals and faults by kind.",
}


class HttpMeters:
    """Requests by method, route template and status; never by anything that callers make up."""

    def __init__(self) -> None:
        self.meters = Meters()
        self._labels: dict[tuple[str, str, int], Labels] = {}

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        labels = self._labels.get((method, route, status))
        if labels is None:
            known = method if method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH") else "other"
            labels = (("method", known), ("path", route), ("status", str(status)))
            if len(self._labels) < 10_000:
                self._labels[method, route, status] = labels
        self.meters.counts["ff_http_requests", labels] += 1
        self.meters.took_by("ff_http_request_duration", labels, seconds)


def exposition(*meters: Meters) -> bytes:
    """Everything that was counted, as text."""
    counts: dict[str, list[tuple[Labels, int]]] = defaultdict(list)
    timings: dict[str, list[tuple[Labels, Timing]]] = defaultdict(list)
    for each in meters:
        for (name, labels), value in each.counts.items():
            counts[f"{name}_total"].append((labels, value))
        for (name, labels), timing in each.timings.items():
            timings[f"{name}_seconds"].append((labels, timing))
    lines: list[str] = []
    for name, values in sorted(counts.items()):
        lines += _head(name, "counter")
        lines += [f"{name}{_braces(labels)} {value}" for labels, value in sorted(values)]
    for name, timed in sorted(timings.items()):
        lines += _head(name, "histogram")
        for labels, timing in sorted(timed, key=lambda pair: pair[0]):
            lines += _histogram(name, labels, timing)
    return ("\n".join(lines) + "\n").encode()


def _head(name: str, kind: str) -> Iterable[str]:
    if name in HELP:
        yield f"# HELP {name} {HELP[name]}"
    yield f"# TYPE {name} {kind}"


def _histogram(name: str, labels: Labels, timing: Timing) -> Iterator[str]:
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
