"""Feeds: how subscribers see an event. One committed event row may appear in several feeds."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.cursors import encode_cursor
from flowfabric.model.event import Event, FeedEvent
from flowfabric.model.execution import Execution
from flowfabric.rules.execution import tags as tag_rules

DIVERGED = "the cursor is not in this feed: the store was restored, or failed over and lost its newest events"
REVOKED_BY_RECONCILER = frozenset({"max_reclaims_exceeded", "dependency_impossible"})


class FeedEntry(msgspec.Struct, frozen=True):
    """An entry of a feed: its position, its time, and the execution."""

    position: int
    at: int
    execution_id: str

    @property
    def cursor(self) -> bytes:
        """The cursor that continues after this entry."""
        return encode_cursor(self.position)


class LeaseFeedEntry(FeedEntry, frozen=True):
    """An entry of the lease feed: Acquired, Renewed, Expired, Reclaimed or Revoked."""

    variant: str
    lease_id: str | None
    worker_instance_id: str | None
    revoked_by: str | None = None


class CompletionFeedEntry(FeedEntry, frozen=True):
    """An entry of the completion feed: one for each completion."""

    outcome: str
    flow_id: str | None
    namespace: str
    instance_tag: str | None
    unread: dict[str, int] = {}  # messages that nobody has read, by name

    @property
    def variant(self) -> str:
        """Success, Failure, Cancelled, or Other with the stored word."""
        return OUTCOMES.get(self.outcome, f"Other({self.outcome})")


class OperatorFeedEntry(FeedEntry, frozen=True):
    """An entry of the operator feed."""

    event_type: str
    details: dict[str, Any]


class SignalFeedEntry(FeedEntry, frozen=True):
    """An entry of the signal feed: Satisfied, Buffered, Deduped, or another effect by its name."""

    signal_id: str
    waitpoint_id: str | None
    source_identity: str | None
    effect: str


SIGNAL_EFFECTS = {
    "resume_condition_satisfied": "Satisfied",
    "buffered_for_pending_waitpoint": "Buffered",
    "deduped": "Deduped",
}

# By name of the lease event: the variant, and who revoked the lease.
LEASE_VARIANTS: dict[str | None, tuple[str, str | None]] = {
    "acquired": ("Acquired", None),
    "renewed": ("Renewed", None),
    "expired": ("Expired", None),
    "reclaimed": ("Reclaimed", None),
    "revoked": ("Revoked", "operator"),
}

OUTCOMES = {"success": "Success", "failed": "Failure", "failure": "Failure", "cancelled": "Cancelled"}


class Filter(msgspec.Struct, frozen=True):
    """A filter for the events of a subscriber, or the executions of a sweep; unset parts match everything."""

    namespace: str | None = None
    instance_tag: tuple[str, str] | None = None

    def accepts(self, event: Event | Execution) -> bool:
        """True if namespace and tag match, as they were at the event. Unreadable tags never match."""
        if self.namespace is not None and event.namespace != self.namespace:
            return False
        if self.instance_tag is None:
            return True
        key, value = self.instance_tag
        try:
            return tag_rules.decode_tags(event.tags).get(key) == value
        except errors.Corruption:
            return False


def check_gap(*, has_gap: bool, diverged: bool) -> errors.StreamBackpressure | None:
    """Return the error for a reader that missed events: they were trimmed, or its cursor is not in this feed."""
    if diverged:
        return errors.StreamBackpressure(DIVERGED)
    return errors.StreamBackpressure("") if has_gap else None


def lease_entry(entry: FeedEvent) -> LeaseFeedEntry | None:
    """Return the entry of the lease feed; None if the event is part of the history only."""
    event = entry.event
    variant, revoked_by = _lease_variant(event)
    if variant is None:
        return None
    return LeaseFeedEntry(
        entry.position, entry.at, event.execution_id, variant, event.lease_id, event.worker_instance_id, revoked_by
    )


def completion_entry(entry: FeedEvent) -> CompletionFeedEntry:
    """Return the entry of the completion feed."""
    event = entry.event
    return CompletionFeedEntry(
        entry.position,
        entry.at,
        event.execution_id,
        event.outcome or "",
        event.flow_id,
        event.namespace,
        tag_rules.decode_tags(event.tags).get(tag_rules.INSTANCE_TAG),
        _unread(event),
    )


def _unread(event: Event) -> dict[str, int]:
    unread: dict[str, int] = msgspec.json.decode(event.details).get("unread", {}) if event.details else {}
    return unread


def signal_entry(entry: FeedEvent) -> SignalFeedEntry:
    """Return the entry of the signal feed."""
    event = entry.event
    details = msgspec.json.decode(event.details or "{}", type=dict[str, str])
    effect = event.signal or ""
    return SignalFeedEntry(
        entry.position,
        entry.at,
        event.execution_id,
        details.get("signal_id", ""),
        details.get("waitpoint_id"),
        details.get("source_identity"),
        SIGNAL_EFFECTS.get(effect, f"Other({effect})"),
    )


def operator_entry(entry: FeedEvent) -> OperatorFeedEntry:
    """Return the entry of the operator feed, without details that only the history shows."""
    event = entry.event
    details = msgspec.json.decode(event.details, type=dict[str, Any]) if event.details else {}
    if event.operator == "replayed":
        details = {name: value for name, value in details.items() if name in ("branch", "groups_reset")}
    return OperatorFeedEntry(entry.position, entry.at, event.execution_id, event.operator or "", details)


def _lease_variant(event: Event) -> tuple[str | None, str | None]:
    return _release_variant(event) if event.lease == "released" else LEASE_VARIANTS.get(event.lease, (None, None))


def _release_variant(event: Event) -> tuple[str, str | None]:
    reason = event.reason or ""
    if reason.startswith("expired:"):
        return "Expired", None
    if reason in REVOKED_BY_RECONCILER:
        return "Revoked", "reconciler"
    details = msgspec.json.decode(event.details, type=dict[str, Any]) if event.details else {}
    return "Revoked", str(details.get("revoked_by", "backend"))
