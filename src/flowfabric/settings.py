"""Settings of an engine, each with the default that suits most."""

from __future__ import annotations

import msgspec

from flowfabric.ids import PartitionCounts


class Sweeps(msgspec.Struct, frozen=True):
    """How often the background sweeps look, in milliseconds; 0 switches one off."""

    lease_expiry_ms: int = 1500
    delayed_promoter_ms: int = 750
    attempt_timeout_ms: int = 2000
    execution_deadline_ms: int = 5000
    retention_trimmer_ms: int = 60_000
    flow_retention_ms: int = 60_000
    suspension_timeout_ms: int = 2000
    pending_wp_expiry_ms: int = 5000
    child_ends_ms: int = 2000
    feed_trimmer_ms: int = 60_000
    completion_dispatch_ms: int = 1000
    dependency_reconciler_ms: int = 15_000
    flow_projector_ms: int = 15_000
    cancel_reconciler_ms: int = 15_000
    edge_cancel_dispatcher_ms: int = 1000
    edge_cancel_reconciler_ms: int = 10_000
    budget_reset_ms: int = 15_000
    budget_reservations_ms: int = 5000
    budget_reconciler_ms: int = 30_000
    quota_reconciler_ms: int = 30_000
    unblock_ms: int = 5000
    worker_registry_ttl_sweep_ms: int = 30_000
    outbox_relay_ms: int = 2000
    idempotency_keys_ms: int = 60_000
    usage_keys_ms: int = 60_000
    worker_events_ms: int = 60_000
    batch: int = 200
    batches: dict[str, int] = {}  # how many items a pass of one sweep takes, where that is not `batch`
    jitter: float = 0.1  # by how much of its length a pause may be longer
    namespace: str | None = None  # sweep only over executions of this namespace
    instance_tag: tuple[str, str] | None = None  # and with this tag


class Secret:
    """A text that shows itself only when asked to, so that no log or traceback gives it away."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself."""
        return self._text

    def __repr__(self) -> str:
        return "<Secret>"


class Settings(msgspec.Struct, frozen=True):
    """What an engine can be told."""

    partitions: PartitionCounts = PartitionCounts()
    poll_ms: int = 1000  # how long a waiting claim, reader or caller trusts that no hint got lost
    retention_ms: int | None = None  # how long what ended is kept when its policy does not say; unset is a day
    ageing_ms: dict[str, int] = {}  # by lane: the ageing of executions whose policies name none
    sweeps: Sweeps = Sweeps()
    max_concurrent_stream_ops: int = 64
    feed_retention_ms: int = 7 * 24 * 60 * 60 * 1000  # how long events are kept; of all that sweep, the shortest holds
    secret_key: Secret | None = None  # encrypts signing keys at rest; without one they are kept as they are
    postgres_pool_size: int | None = None  # connections to Postgres; unset is 8
    hears: bool = True  # whether this process listens for hints of others; without them its waits end by polling
    dispatch: bool = True  # whether this process carries ends to those who wait for them, at once


FEED_RETENTION_MS = Settings().feed_retention_ms  # unless a process is told another time
