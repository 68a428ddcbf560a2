"""Ends, counted as this process writes them: what became of attempts and executions, and how long those took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

import msgspec

from flowfabric.engine.metrics.registry import Histogram, Labels, Metrics
from flowfabric.model.change import Change, Insert
from flowfabric.model.event import Event
from flowfabric.model.execution import Attempt, Execution
from flowfabric.rules.execution.views import attempt_outcome

ATTEMPTS, COMPLETIONS, DURATION = "ff_attempt_outcome", "ff_completions", "ff_execution_e2e_duration"
_BEGAN = attrgetter("lane_id", "created_at")


class CompletionSeries(msgspec.Struct, frozen=True):
    """Where one end of the work of one lane is counted: found once, since this happens for every piece of work."""

    attempts: tuple[str, Labels] | None  # None where no attempt ends with it
    completions: tuple[str, Labels]
    durations: Histogram


class CompletionMetrics:
    """Counts ends by lane."""

    def __init__(self, meters: Metrics) -> None:
        self._meters = meters
        self._ordinary: dict[tuple[str, str], CompletionSeries] = {}

    def record_many(self, rows: Iterable[Execution], outcome: str, at: int) -> None:
        """Work ended in one of the ways that are alike for all of it; what began together is counted together."""
        counts = self._meters.counters
        for (lane_id, created_at), ended in Counter(map(_BEGAN, rows)).items():
            ordinary = self._ordinary.get((lane_id, outcome)) or self._of(lane_id, outcome)
            if ordinary.attempts is not None:
                counts[ordinary.attempts] += ended
            counts[ordinary.completions] += ended
            ordinary.durations.observe((at - created_at) / 1000, ended)

    def record(self, event: Event, change: Change, row: Execution | None, at: int) -> None:
        """A change told of the end of a life, or of an attempt; `row` is its execution as it was, if that is known."""
        if row is None:
            return
        lane = self._meters.lane_label(row.lane_id)
        attempts = (write.row for write in change.writes if type(write) is Insert and type(write.row) is Attempt)
        ended = next((one for one in attempts if one.execution_id == event.execution_id), None)
        if word := attempt_outcome(event.outcome, ended):
            self._meters.count(ATTEMPTS, lane=lane, outcome=word.value)
        if event.outcome is not None:
            self._meters.count(COMPLETIONS, lane=lane, outcome=event.outcome)
            self._meters.observe(DURATION, (at - row.created_at) / 1000, lane=lane)

    def _of(self, lane_id: str, outcome: str) -> CompletionSeries:
        lane = ("lane", self._meters.lane_label(lane_id))
        word = attempt_outcome(outcome, None)
        ordinary = CompletionSeries(
            None if word is None else (ATTEMPTS, (lane, ("outcome", word.value))),
            (COMPLETIONS, (lane, ("outcome", outcome))),
            self._meters.histogram(DURATION, (lane,)),
        )
        if lane[1] == lane_id:  # not one of very many
            self._ordinary[lane_id, outcome] = ordinary
        return ordinary
