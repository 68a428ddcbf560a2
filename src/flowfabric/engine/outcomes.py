"""Ends, counted as this process writes them: what became of attempts and executions, and how long those took."""

from __future__ import annotations

import msgspec

from flowfabric.engine.meters import Labels, Meters, Timing
from flowfabric.model.event import Event
from flowfabric.model.execution import Attempt, Execution
from flowfabric.model.states import TerminalOutcome
from flowfabric.rules.change import Change, Insert
from flowfabric.rules.outcomes import AttemptOutcome, attempt_outcome

ATTEMPTS, COMPLETIONS, DURATION = "ff_attempt_outcome", "ff_completions", "ff_execution_e2e_duration"


class Ordinary(msgspec.Struct, frozen=True):
    """Where the successes of one lane are counted: found once, since this happens for every piece of work."""

    attempts: tuple[str, Labels]
    completions: tuple[str, Labels]
    durations: Timing


class Outcomes:
    """Counts ends by lane."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._ordinary: dict[str, Ordinary] = {}

    def succeeded(self, row: Execution, at: int) -> None:
        """Ordinary work ended well."""
        ordinary = self._ordinary.get(row.lane_id) or self._of(row.lane_id)
        counts = self._meters.counts
        counts[ordinary.attempts] += 1
        counts[ordinary.completions] += 1
        ordinary.durations.add((at - row.created_at) / 1000)

    def note(self, event: Event, change: Change, row: Execution | None, at: int) -> None:
        """A change told of the end of a life, or of an attempt; `row` is its execution as it was, if that is known."""
        if row is None:
            return
        lane = self._meters.lane(row.lane_id)
        attempts = (write.row for write in change.writes if type(write) is Insert and type(write.row) is Attempt)
        ended = next((one for one in attempts if one.execution_id == event.execution_id), None)
        if word := attempt_outcome(event.outcome, ended):
            self._meters.count(ATTEMPTS, lane=lane, outcome=word.value)
        if event.outcome is not None:
            self._meters.count(COMPLETIONS, lane=lane, outcome=event.outcome)
            self._meters.took(DURATION, (at - row.created_at) / 1000, lane=lane)

    def _of(self, lane_id: str) -> Ordinary:
        lane = ("lane", self._meters.lane(lane_id))
        ordinary = Ordinary(
            (ATTEMPTS, (lane, ("outcome", AttemptOutcome.OK.value))),
            (COMPLETIONS, (lane, ("outcome", TerminalOutcome.SUCCESS.value))),
            self._meters.timing(DURATION, (lane,)),
        )
        if lane[1] == lane_id:  # not one of very many
            self._ordinary[lane_id] = ordinary
        return ordinary
