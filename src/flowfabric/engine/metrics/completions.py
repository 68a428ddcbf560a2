"""Metrics of ended attempts and executions: outcomes and durations, recorded as this process commits them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

import msgspec

from flowfabric.engine.metrics.recorder import Histogram, Labels, Metrics
from flowfabric.model.change import Change, Insert
from flowfabric.model.event import Event
from flowfabric.model.execution import Attempt, Execution
from flowfabric.rules.execution.views import attempt_outcome

ATTEMPTS, COMPLETIONS, DURATION = "ff_attempt_outcome", "ff_completions", "ff_execution_e2e_duration"
_LANE_AND_CREATED_AT = attrgetter("lane_id", "created_at")


class CompletionSeries(msgspec.Struct, frozen=True):
    """The series of one outcome in one lane, looked up once, because every execution is recorded."""

    attempts: tuple[str, Labels] | None  # None if this outcome ends no attempt
    completions: tuple[str, Labels]
    durations: Histogram


class CompletionMetrics:
    """Records ended attempts and executions by lane."""

    def __init__(self, meters: Metrics) -> None:
        self._meters = meters
        self._series: dict[tuple[str, str], CompletionSeries] = {}

    def record_many(self, rows: Iterable[Execution], outcome: str, at: int) -> None:
        """Record executions that ended with the same outcome, grouped by lane and creation time."""
        counts = self._meters.counters
        for (lane_id, created_at), ended in Counter(map(_LANE_AND_CREATED_AT, rows)).items():
            series = self._series.get((lane_id, outcome)) or self._of(lane_id, outcome)
            if series.attempts is not None:
                counts[series.attempts] += ended
            counts[series.completions] += ended
            series.durations.observe((at - created_at) / 1000, ended)

    def record(self, event: Event, change: Change, row: Execution | None, at: int) -> None:
        """Record the end of an attempt or a life; `row` is the execution before the change, None if it is unknown."""
        if row is None:
            return
        lane = self._meters.lane_label(row.lane_id)
        attempts = (write.row for write in change.writes if type(write) is Insert and type(write.row) is Attempt)
        ended = next((one for one in attempts if one.execution_id == event.execution_id), None)
        if result := attempt_outcome(event.outcome, ended):
            self._meters.count(ATTEMPTS, lane=lane, outcome=result.value)
        if event.outcome is not None:
            self._meters.count(COMPLETIONS, lane=lane, outcome=event.outcome)
            self._meters.observe(DURATION, (at - row.created_at) / 1000, lane=lane)

    def _of(self, lane_id: str, outcome: str) -> CompletionSeries:
        lane = ("lane", self._meters.lane_label(lane_id))
        result = attempt_outcome(outcome, None)
        series = CompletionSeries(
            None if result is None else (ATTEMPTS, (lane, ("outcome", result.value))),
            (COMPLETIONS, (lane, ("outcome", outcome))),
            self._meters.histogram(DURATION, (lane,)),
        )
        if lane[1] == lane_id:  # lanes that share the label `other` are not cached
            self._series[lane_id, outcome] = series
        return series
