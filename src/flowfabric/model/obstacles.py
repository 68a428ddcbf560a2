"""Why an execution is not running: one obstacle, named with its facts."""

from __future__ import annotations

import msgspec

from flowfabric.model.states import PublicState, TerminalOutcome


class Obstacle(msgspec.Struct, frozen=True):
    """What stands between an execution and a worker, or that nothing does."""

    def sentence(self) -> str:
        """The same for people."""
        raise NotImplementedError


class Ended(Obstacle, frozen=True):
    outcome: TerminalOutcome
    at: int
    reason: str | None = None

    def sentence(self) -> str:
        return f"It ended: {self.outcome.value}" + (f" ({self.reason})." if self.reason else ".")


class Running(Obstacle, frozen=True):
    worker_id: str
    worker_instance_id: str
    since: int
    lease_expires_at: int

    def sentence(self) -> str:
        return f"It is running on {self.worker_instance_id}."


class LeaseLost(Obstacle, frozen=True):
    """Its worker is gone; any capable worker of the lane takes it over with its next claim."""

    worker_instance_id: str
    how: str  # expired or revoked
    at: int
    reason: str | None = None

    def sentence(self) -> str:
        return f"The lease of {self.worker_instance_id} was lost ({self.how}); it waits to be taken over."


class Delayed(Obstacle, frozen=True):
    until: int
    why: str  # the blocking reason
    last_failure: str | None = None
    detail: str | None = None  # what the worker said that put it away

    def sentence(self) -> str:
        failed = f", after a failure: {self.last_failure}" if self.last_failure else ""
        said = f": {self.detail}" if self.detail else ""
        return f"It is delayed until {self.until} ({self.why}{failed}{said})."


class Dependencies(Obstacle, frozen=True):
    """It waits for these executions."""

    execution_ids: tuple[str, ...]

    def sentence(self) -> str:
        return f"It waits for other executions: {', '.join(self.execution_ids)}."


PASSING = "time to pass"


class Suspended(Obstacle, frozen=True):
    reason: str
    waits_on: tuple[str, ...] = ()  # the keys of its waitpoints, or the names of its gates
    until: int | None = None  # when it stops waiting
    waits_for: tuple[str, ...] = ()  # what each of its gates is about, in words

    def sentence(self) -> str:
        until = f" until {self.until}" if self.until else ""
        if self.waits_for == (PASSING,):
            return f"It sleeps{until}."
        if self.waits_for:
            return f"It waits{until} for {' or '.join(self.waits_for)}."
        named = f" on {', '.join(self.waits_on)}" if self.waits_on else ""
        return f"It is suspended{named}{until}: {self.reason}."


class BudgetExhausted(Obstacle, frozen=True):
    budget_id: str
    dimension: str
    usage: int
    reserved: int
    hard_limit: int
    resets_at: int | None = None
    needed: int = 0  # by an execution that sleeps until there is room for so much

    def sentence(self) -> str:
        needs = f"; {self.needed} more are needed" if self.needed else ""
        resets = f"; it is reset at {self.resets_at}" if self.resets_at else ""
        return (
            f"Budget {self.budget_id} is exhausted: {self.dimension} {self.usage + self.reserved}/{self.hard_limit}"
            f" ({self.reserved} of it reserved){needs}{resets}."
        )


class QuotaFull(Obstacle, frozen=True):
    quota_policy_id: str
    what: str  # rate or concurrency
    used: int
    limit: int
    retry_at: int | None = None  # when time alone makes room

    def sentence(self) -> str:
        if self.what == "rate":
            return (
                f"Quota {self.quota_policy_id} admits {self.limit} per window; there is room again at {self.retry_at}."
            )
        return f"Quota {self.quota_policy_id}: all {self.limit} slots are taken ({self.used})."


class Lacking(msgspec.Struct, frozen=True):
    """A live worker of the lane, and what it is missing."""

    worker_instance_id: str
    capabilities: str


class NoCapableWorker(Obstacle, frozen=True):
    required: str
    lane_id: str
    workers: tuple[Lacking, ...]

    def sentence(self) -> str:
        lacks = "; ".join(f"{one.worker_instance_id} lacks {one.capabilities}" for one in self.workers)
        return f"No live worker of lane {self.lane_id} has {self.required}: {lacks}."


class NoWorker(Obstacle, frozen=True):
    lane_id: str
    namespace: str

    def sentence(self) -> str:
        return f"No live worker of namespace {self.namespace} is registered for lane {self.lane_id}."


class Offered(Obstacle, frozen=True):
    """It is granted to a worker that has not claimed it yet."""

    worker_id: str
    until: int

    def sentence(self) -> str:
        return f"It is offered to {self.worker_id} until {self.until}."


class Paused(Obstacle, frozen=True):
    reason: str
    detail: str
    since: int | None

    def sentence(self) -> str:
        return f"It is held up: {self.reason}" + (f" ({self.detail})." if self.detail else ".")


class QueueMissing(Obstacle, frozen=True):
    """The store has lost its ready queue; the sweep `queue_reconciler` restores it within seconds."""

    lane_id: str

    def sentence(self) -> str:
        return (
            f"Its ready queue on lane {self.lane_id} is missing from the store, as after a failover that lost writes. "
            "The sweeps of any worker or server restore it; `ff doctor` names all such executions."
        )


class Queued(Obstacle, frozen=True):
    """Nothing is in its way but others: every capable worker is busy, or has not come by yet."""

    ahead: int  # how many stand before it, counted up to a thousand
    workers: tuple[str, ...]  # the live ones that could run it
    running: int  # how much they run at the moment

    def sentence(self) -> str:
        workers = ", ".join(self.workers)
        return f"It waits for a free slot: {self.ahead} stand before it; {workers} could run it and run {self.running}."


class Explanation(msgspec.Struct, frozen=True):
    """Why an execution is not running, in one answer."""

    execution_id: str
    public_state: PublicState
    obstacle: Obstacle

    @property
    def sentence(self) -> str:
        return self.obstacle.sentence()
