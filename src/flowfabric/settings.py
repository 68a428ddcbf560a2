"""Settings of an engine, with defaults that suit most deployments."""

from __future__ import annotations

import socket
from math import ceil

import msgspec

from flowfabric.ids import DEFAULT_PARTITIONS, PartitionCounts

MIN_COMMAND_S = 1.0  # a shorter limit would abort commands on servers that are merely busy


class Sweeps(msgspec.Struct, frozen=True):
    """The intervals of the background sweeps in milliseconds; 0 switches one off."""

    lease_expiry_ms: int = 1500
    delayed_promoter_ms: int = 750
    attempt_timeout_ms: int = 2000
    execution_deadline_ms: int = 5000
    retention_trimmer_ms: int = 60_000
    flow_retention_ms: int = 60_000
    suspension_timeout_ms: int = 2000
    pending_wp_expiry_ms: int = 5000
    child_ends_ms: int = 2000
    child_cancels_ms: int = 2000
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
    quota_windows_ms: int = 5000
    unblock_ms: int = 5000
    queue_reconciler_ms: int = 15_000
    worker_registry_ttl_sweep_ms: int = 30_000
    outbox_relay_ms: int = 2000
    idempotency_keys_ms: int = 60_000
    usage_keys_ms: int = 60_000
    worker_events_ms: int = 60_000
    bulk_operations_ms: int = 1000
    schedules_ms: int = 1000
    batch: int = 200
    batches: dict[str, int] = {}  # items per pass of one sweep, where it differs from `batch`
    jitter: float = 0.1  # an interval may be longer by up to this fraction
    namespace: str | None = None  # sweep only over executions of this namespace
    instance_tag: tuple[str, str] | None = None  # an execution has to have this tag, too


class Secret:
    """A text that is redacted when printed, so that no log or traceback reveals it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text itself."""
        return self._text

    def __repr__(self) -> str:
        return "<Secret>"


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """When a silent connection to Postgres or to a FlowFabric server is given up. 0 is never.

    The kernel detects a network that drops packets (keepalives, the user timeout). Only `command_s` detects a proxy
    that still acknowledges what it no longer forwards. Workers keep it below their lease duration.
    """

    connect_s: float = 5.0  # time for a connection to be established
    command_s: float = 10.0  # time of one statement, or of one request beyond its long-poll time
    keepalives_idle_s: int = 5  # silence before the first keepalive probe
    keepalives_interval_s: int = 2  # between two probes
    keepalives_count: int = 3  # unanswered probes that end the connection
    tcp_user_timeout_ms: int = 8000  # time for which sent data may stay unacknowledged

    def limited(self, command_s: float) -> Deadlines:
        """Return the same deadlines with `command_s` capped."""
        most = max(MIN_COMMAND_S, command_s)
        return self if 0 < self.command_s <= most else msgspec.structs.replace(self, command_s=most)

    def socket_options(self) -> list[tuple[int, int, int]]:
        """Return the arguments for `setsockopt` that this system supports."""
        wanted = (
            ("TCP_KEEPIDLE", self.keepalives_idle_s),
            ("TCP_KEEPINTVL", self.keepalives_interval_s),
            ("TCP_KEEPCNT", self.keepalives_count),
            ("TCP_USER_TIMEOUT", self.tcp_user_timeout_ms),
        )
        options = [
            (socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in wanted if hasattr(socket, name)
        ]
        keepalive = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] if self.keepalives_idle_s else []
        return keepalive + [option for option in options if option[2]]

    def server_settings(self) -> dict[str, str]:
        """Return the same settings for the Postgres server's end of the connection."""
        parameters = {
            "tcp_keepalives_idle": self.keepalives_idle_s,
            "tcp_keepalives_interval": self.keepalives_interval_s,
            "tcp_keepalives_count": self.keepalives_count,
            "tcp_user_timeout": self.tcp_user_timeout_ms,
        }
        return {name: str(value) for name, value in parameters.items() if value}

    def server_limits(self) -> dict[str, int]:
        """Return how many milliseconds the server may spend on a statement or wait for the next one of a transaction.

        The server gives up a little earlier than the client, so that a slow statement has a known outcome and none
        keeps running or holding locks after its client has left.
        """
        limit = ceil(self.command_s * 900)
        return {"statement_timeout": limit, "idle_in_transaction_session_timeout": limit} if limit else {}


class Settings(msgspec.Struct, frozen=True):
    """The settings of an engine."""

    partitions: PartitionCounts = DEFAULT_PARTITIONS
    poll_ms: int = 1000  # how often a waiting claim, reader or caller polls in case a wakeup was lost
    retention_ms: int | None = None  # retention of finished executions without a policy; unset is a day
    ageing_ms: dict[str, int] = {}  # by lane: ageing of executions without a policy for it
    sweeps: Sweeps = Sweeps()
    max_concurrent_stream_ops: int = 64
    # How long events are kept; the shortest time of all sweeping processes wins.
    feed_retention_ms: int = 7 * 24 * 60 * 60 * 1000
    secret_key: Secret | None = None  # encrypts signing keys at rest; without it they are stored in plain text
    postgres_pool_size: int | None = None  # connections to Postgres; unset is 8
    deadlines: Deadlines = Deadlines()  # a Postgres URL may set its own
    hears: bool = True  # listen for wakeups of other processes; otherwise waits end by polling
    dispatch: bool = True  # dispatch completions to successors at once


FEED_RETENTION_MS = Settings().feed_retention_ms  # default of the setting
