"""Events: what happened. One row carries everything that one change means to the feeds."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Topic(StrEnum):
    """The feeds that can be subscribed to."""

    LEASE = "lease"
    COMPLETION = "completion"
    OPERATOR = "operator"
    SIGNAL = "signal"


class Event(msgspec.Struct, frozen=True, gc=False):
    """A committed fact about one execution.

    `lease`, `outcome`, `operator` and `signal` say to which feeds it belongs; a completion is one row that both
    releases a lease and ends the execution. Namespace and tags are those at the time of the event.
    """

    execution_id: str
    namespace: str
    tags: str | None = None
    flow_id: str | None = None
    lease: str | None = None  # the name in the per-execution history: acquired, renewed, released, …
    lease_id: str | None = None
    lease_epoch: int | None = None
    attempt_id: str | None = None
    attempt_index: int | None = None
    worker_id: str | None = None
    worker_instance_id: str | None = None
    reason: str | None = None
    outcome: str | None = None
    operator: str | None = None
    signal: str | None = None
    details: str | None = None  # a JSON object with fields of this kind of event


class FeedEvent(msgspec.Struct, frozen=True, gc=False):
    """An event as a subscriber reads it, with its position and its time."""

    position: int
    at: int
    event: Event


TOPIC_FIELDS = {
    Topic.LEASE: "lease",
    Topic.COMPLETION: "outcome",
    Topic.OPERATOR: "operator",
    Topic.SIGNAL: "signal",
}
