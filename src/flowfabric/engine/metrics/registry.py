"""What the engine counts and times, for whoever exports it. Names and labels are those of the specification."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import msgspec

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

OTHER_LANES = "other"

Labels = tuple[tuple[str, str], ...]


class Histogram(msgspec.Struct):
    """How long something took, by bucket: those up to each bound, and the longer ones."""

    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    count: int = 0
    total_s: float = 0.0

    def observe(self, seconds: float, often: int = 1) -> None:
        """Once more, or so often, and this long."""
        self.buckets[bisect_left(BUCKETS_S, seconds)] += often
        self.count += often
        self.total_s += seconds * often


class Metrics:
    """Counters, timings and levels of one engine."""

    max_lane_labels = 100  # that have a name here; callers make lanes up, and every name is kept for ever

    def __init__(self) -> None:
        self._lanes: set[str] = set()
        self.counters: Counter[tuple[str, Labels]] = Counter()
        self.histograms: dict[tuple[str, Labels], Histogram] = {}
        self.gauges: dict[tuple[str, Labels], float] = {}

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Something happened."""
        self.counters[name, tuple(sorted(labels.items()))] += amount

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Something took this long."""
        self.observe_labelled(name, tuple(sorted(labels.items())), seconds)

    def observe_labelled(self, name: str, labels: Labels, seconds: float) -> None:
        """The same for labels that stand ready, in order."""
        self.histogram(name, labels).observe(seconds)

    def histogram(self, name: str, labels: Labels) -> Histogram:
        """How long something took so far."""
        timing = self.histograms.get((name, labels))
        if timing is None:
            timing = self.histograms[name, labels] = Histogram()
        return timing

    def counter_value(self, name: str, **labels: str) -> int:
        """How often something happened."""
        return self.counters[name, tuple(sorted(labels.items()))]

    def lane_label(self, lane_id: str) -> str:
        """What a lane is called here: by its name, or `other` when too many have one."""
        if lane_id not in self._lanes:
            if len(self._lanes) >= self.max_lane_labels:
                return OTHER_LANES
            self._lanes.add(lane_id)
        return lane_id

    def add_to_gauge(self, name: str, level: float, **labels: str) -> None:
        """Something stands higher by this much."""
        key = (name, tuple(sorted(labels.items())))
        self.gauges[key] = self.gauges.get(key, 0) + level

    def set_gauge(self, name: str, level: float, **labels: str) -> None:
        """Something stands at this level now."""
        self.gauges[name, tuple(sorted(labels.items()))] = level
