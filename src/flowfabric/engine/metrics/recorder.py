"""The values of the metrics of one engine. `server/metrics.py` declares them, with the names of the specification."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import msgspec

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

OTHER = "other"  # the label of lanes, or tasks, beyond the limit

Labels = tuple[tuple[str, str], ...]


class Histogram(msgspec.Struct):
    """Durations by bucket: one bucket per bound, and one for longer durations."""

    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    count: int = 0
    total_s: float = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Record a duration, `times` times."""
        self.buckets[bisect_left(BUCKETS_S, seconds)] += times
        self.count += times
        self.total_s += seconds * times


class Metrics:
    """Counters, histograms and gauges of one engine."""

    max_lane_labels = 100  # callers choose lane names, and every label is kept until the process ends
    max_task_labels = 100  # callers choose the names of tasks, too

    def __init__(self) -> None:
        self._lanes: set[str] = set()
        self._tasks: set[str] = set()
        self.counters: Counter[tuple[str, Labels]] = Counter()
        self.histograms: dict[tuple[str, Labels], Histogram] = {}
        self.gauges: dict[tuple[str, Labels], float] = {}

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Increment a counter."""
        self.counters[name, tuple(sorted(labels.items()))] += amount

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Record a duration in a histogram."""
        self.observe_labelled(name, tuple(sorted(labels.items())), seconds)

    def observe_labelled(self, name: str, labels: Labels, seconds: float) -> None:
        """Record a duration under labels that are already sorted."""
        self.histogram(name, labels).observe(seconds)

    def histogram(self, name: str, labels: Labels) -> Histogram:
        """Return a histogram, created on first use."""
        timing = self.histograms.get((name, labels))
        if timing is None:
            timing = self.histograms[name, labels] = Histogram()
        return timing

    def counter_value(self, name: str, **labels: str) -> int:
        """Return the value of a counter."""
        return self.counters[name, tuple(sorted(labels.items()))]

    def lane_label(self, lane_id: str) -> str:
        """Return the label of a lane: its name, or `other` once `max_lane_labels` names are in use."""
        return _label(lane_id, self._lanes, self.max_lane_labels)

    def task_label(self, task: str) -> str:
        """Return the label of a task: its name, or `other` once `max_task_labels` names are in use."""
        return _label(task, self._tasks, self.max_task_labels)

    def add_to_gauge(self, name: str, level: float, **labels: str) -> None:
        """Add to a gauge."""
        key = (name, tuple(sorted(labels.items())))
        self.gauges[key] = self.gauges.get(key, 0) + level

    def set_gauge(self, name: str, level: float, **labels: str) -> None:
        """Set a gauge."""
        self.gauges[name, tuple(sorted(labels.items()))] = level


def _label(name: str, used: set[str], most: int) -> str:
    if name not in used:
        if len(used) >= most:
            return OTHER
        used.add(name)
    return name
