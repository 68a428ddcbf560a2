"""Obstacles: why an execution is not running, with the facts, and a sentence for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec

from flowfabric.model.states import BlockingReason, PublicState, TerminalOutcome
from flowfabric.model.text import (
    end_sentence,
    first_line,
    format_amount,
    format_instant,
    humanize,
    join_some,
    pluralize,
    split_dimension,
)

ShowInstant = Callable[[int], str]


class Obstacle(msgspec.Struct, frozen=True):
    """The thing that keeps an execution from running, or that nothing does."""

    def sentence(self, show: ShowInstant = format_instant) -> str:
        """Describe the obstacle to a person; `show` formats the instants."""
        raise NotImplementedError

    def remedies(self, execution_id: str) -> tuple[str, ...]:
        """Return what a person can do about it, if it does not pass by itself."""
        return ()


class EndedObstacle(Obstacle, frozen=True):
    variant: ClassVar[str] = "Ended"
    outcome: TerminalOutcome
    at: int
    reason: str | None = None

    def sentence(self, show: ShowInstant = format_instant) -> str:
        reason = first_line(self.reason)
        if self.outcome is TerminalOutcome.SUCCESS:
            reason = ""  # the failure of an earlier attempt
        return end_sentence(f"{_ENDS[self.outcome]} at {show(self.at)}" + (f": {reason}" if reason else ""))


_ENDS = {
    TerminalOutcome.NONE: "It ended",
    TerminalOutcome.SUCCESS: "It succeeded",
    TerminalOutcome.FAILED: "It failed",
    TerminalOutcome.CANCELLED: "It was cancelled",
    TerminalOutcome.EXPIRED: "It expired",
    TerminalOutcome.SKIPPED: "It was skipped",
}


class Running(Obstacle, frozen=True):
    worker_id: str
    worker_instance_id: str
    since: int
    lease_expires_at: int

    def sentence(self, show: ShowInstant = format_instant) -> str:
        return f"It is running on {self.worker_instance_id}."


class LeaseLost(Obstacle, frozen=True):
    """Its worker lost the lease; any capable worker of the lane takes it over with its next claim."""

    worker_instance_id: str
    how: str  # expired or revoked
    at: int
    reason: str | None = None

    def sentence(self, show: ShowInstant = format_instant) -> str:
        return f"The lease of {self.worker_instance_id} was lost ({self.how}); it waits to be taken over."


class DelayedObstacle(Obstacle, frozen=True):
    variant: ClassVar[str] = "Delayed"
    until: int
    why: str  # the blocking reason
    last_failure: str | None = None
    detail: str | None = None  # the reason given by the worker that delayed it

    def sentence(self, show: ShowInstant = format_instant) -> str:
        until = show(self.until)
        if self.why == BlockingReason.WAITING_FOR_RETRY_BACKOFF:
            failed = f": {first_line(self.last_failure)}" if self.last_failure else ""
            return end_sentence(f"It failed and is tried again at {until}{failed}")
        return end_sentence(f"It is delayed until {until}" + (f": {first_line(self.detail)}" if self.detail else ""))


class Dependencies(Obstacle, frozen=True):
    """It waits for these executions."""

    execution_ids: tuple[str, ...]

    def sentence(self, show: ShowInstant = format_instant) -> str:
        return f"It waits for other executions: {join_some(self.execution_ids)}."


TIMER_WAIT = "time to pass"


class SuspendedObstacle(Obstacle, frozen=True):
    variant: ClassVar[str] = "Suspended"
    reason: str
    waits_on: tuple[str, ...] = ()  # the keys of its waitpoints, or the names of its gates
    until: int | None = None  # when it stops waiting
    waits_for: tuple[str, ...] = ()  # descriptions of its gates

    def sentence(self, show: ShowInstant = format_instant) -> str:
        until = f" until {show(self.until)}" if self.until else ""
        if self.waits_for == (TIMER_WAIT,):
            return f"It sleeps{until}."
        if self.waits_for:
            return f"It waits{until} for {' or '.join(self.waits_for)}."
        named = f" on {join_some(self.waits_on)}" if self.waits_on else ""
        return f"It is suspended{named}{until}: {humanize(self.reason)}."


class Held(Obstacle, frozen=True):
    """Its function has changed: what it would do next does not fit what it remembers."""

    task: str
    version: str
    since: int
    why: str

    def sentence(self, show: ShowInstant = format_instant) -> str:
        by = f" by version {self.version}" if self.version else ""
        held = end_sentence(f"It is held since {show(self.since)}{by}: {self.why}")
        return f"{held} It continues with a version that fits, or when it is released."

    def remedies(self, execution_id: str) -> tuple[str, ...]:
        return (
            f"deploy a version where it has its old name (name=) or asks ctx.patched(…): {self.task} then continues",
            f"ff release {execution_id} --accept   takes the new way, once",
            f"ff cancel {execution_id}",
        )


class BudgetExhausted(Obstacle, frozen=True):
    budget_id: str
    dimension: str
    usage: int
    reserved: int
    hard_limit: int
    resets_at: int | None = None
    needed: int = 0  # amount that a suspended execution waits for
    name: str = ""  # its declared name with what it is per: `llm:acme`

    def sentence(self, show: ShowInstant = format_instant) -> str:
        dimension, _ = split_dimension(self.dimension)
        total, limit, reserved, needed = (
            format_amount(amount, self.dimension)
            for amount in (self.usage + self.reserved, self.hard_limit, self.reserved, self.needed)
        )
        used = f"{total} of {limit} {dimension} are used"
        reserved = f", {reserved} of them reserved" if self.reserved else ""
        needs = f"; {needed} more {_are(self.needed)} needed" if self.needed else ""
        resets = f"; it is reset at {show(self.resets_at)}" if self.resets_at else ""
        return f"Budget {self.name or self.budget_id} is exhausted: {used}{reserved}{needs}{resets}."


class QuotaFull(Obstacle, frozen=True):
    quota_policy_id: str
    what: str  # rate or concurrency
    used: int
    limit: int
    retry_at: int | None = None  # when the window has capacity again

    def sentence(self, show: ShowInstant = format_instant) -> str:
        if self.what == "rate":
            again = f"; there is room again at {show(self.retry_at)}" if self.retry_at else ""
            return f"Quota {self.quota_policy_id} admits {self.limit:,} per window, and as many have begun{again}."
        most = f"at most {pluralize(self.limit, 'execution')} at once"
        return f"Quota {self.quota_policy_id} lets {most} run, and {self.used:,} {_are(self.used)} running."


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


class IncapableWorker(msgspec.Struct, frozen=True):
    """A live worker of the lane and the capabilities it lacks."""

    worker_instance_id: str
    capabilities: str


class NoCapableWorker(Obstacle, frozen=True):
    required: str
    lane_id: str
    workers: tuple[IncapableWorker, ...]

    def sentence(self, show: ShowInstant = format_instant) -> str:
        lacks = join_some([f"{worker.worker_instance_id} lacks {worker.capabilities}" for worker in self.workers])
        return f"No live worker of lane {self.lane_id} has {self.required}: {lacks}."


class Pinned(Obstacle, frozen=True):
    """It ends with the version of the code it began with, and no worker has that version."""

    version: str
    lane_id: str

    def sentence(self, show: ShowInstant = format_instant) -> str:
        return f"It is pinned to {self.version}, which no worker of lane {self.lane_id} has; start one, or ff unpin."

    def remedies(self, execution_id: str) -> tuple[str, ...]:
        return (
            f"start a worker of version {self.version}",
            f"ff unpin {execution_id}   lets workers of any version continue it; --to V those of V",
        )


class NoWorker(Obstacle, frozen=True):
    lane_id: str
    namespace: str

    def sentence(self, show: ShowInstant = format_instant) -> str:
        return f"No live worker serves lane {self.lane_id} of namespace {self.namespace}: start one with `ff worker`."


class Offered(Obstacle, frozen=True):
    """It is granted to a worker that has not claimed it yet."""

    worker_id: str
    until: int

    def sentence(self, show: ShowInstant = format_instant) -> str:
        return f"It is offered to {self.worker_id} until {show(self.until)}."


class Paused(Obstacle, frozen=True):
    reason: str
    detail: str
    since: int | None

    def sentence(self, show: ShowInstant = format_instant) -> str:
        return f"It is {humanize(self.reason)}" + (f" ({first_line(self.detail)})." if self.detail else ".")


class QueueMissing(Obstacle, frozen=True):
    """The store has lost its ready queue; the sweep `queue_reconciler` restores it within seconds."""

    lane_id: str

    def sentence(self, show: ShowInstant = format_instant) -> str:
        return (
            f"Its ready queue on lane {self.lane_id} is missing from the store, as after a failover that lost writes. "
            "The sweeps of any worker or server restore it; `ff doctor` names all such executions."
        )


class Queued(Obstacle, frozen=True):
    """It is ready and waits its turn: every capable worker is busy or has not claimed yet."""

    ahead: int  # executions before it, counted up to a thousand
    workers: tuple[str, ...]  # live workers that could run it
    running: int  # executions that they run now

    def sentence(self, show: ShowInstant = format_instant) -> str:
        behind = f" behind {pluralize(self.ahead, 'other')}" if self.ahead else ""
        busy = f"{'runs' if len(self.workers) == 1 else 'run'} {self.running:,} now"
        return f"It waits for a free slot{behind}; {join_some(self.workers)} could run it and {busy}."


class Explanation(msgspec.Struct, frozen=True):
    """Why an execution is not running."""

    execution_id: str
    public_state: PublicState
    obstacle: Obstacle

    @property
    def sentence(self) -> str:
        return self.obstacle.sentence()

    @property
    def parts(self) -> list[str | int]:
        """The sentence in parts: texts, and between them its instants in milliseconds, to be shown in local time."""
        instants: list[int] = []

        def mark(at: int) -> str:
            instants.append(at)
            return "\0"  # no stored text contains it

        first, *texts = self.obstacle.sentence(mark).split("\0")
        parts: list[str | int] = [first] if first else []
        for at, text in zip(instants, texts, strict=True):
            parts += [at, text] if text else [at]
        return parts
