"""Settings of an engine, each with the default that suits most."""

from __future__ import annotations

import socket
from math import ceil

import msgspec

from flowfabric.ids import PartitionCounts

LEAST_COMMAND_S = 1.0  # a shorter limit would give up on servers that are merely busy


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
    queue_reconciler_ms: int = 15_000
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


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """How soon a connection that has gone silent is given up: one to Postgres, or to a server of ours. 0 is never.

    The kernel notices a network that swallows packets (keepalives, the user timeout). Only `command_s` notices a proxy
    that still acknowledges what it no longer forwards. Workers keep it below the length of their leases.
    """

    connect_s: float = 5.0  # to connect
    command_s: float = 10.0  # for one statement, or for one request beyond what it waits on purpose
    keepalives_idle_s: int = 5  # of silence before the kernel asks whether the other side is there
    keepalives_interval_s: int = 2  # between two such questions
    keepalives_count: int = 3  # unanswered ones that end the connection
    tcp_user_timeout_ms: int = 8000  # for which what was sent may stay unacknowledged

    def limited(self, command_s: float) -> Deadlines:
        """The same with a limit for commands that is no longer than this."""
        most = max(LEAST_COMMAND_S, command_s)
        return self if 0 < self.command_s <= most else msgspec.structs.replace(self, command_s=most)

    def socket_options(self) -> list[tuple[int, int, int]]:
        """What `setsockopt` is to be told, as far as this system knows it."""
        wanted = (
            ("TCP_KEEPIDLE", self.keepalives_idle_s),
            ("TCP_KEEPINTVL", self.keepalives_interval_s),
            ("TCP_KEEPCNT", self.keepalives_count),
            ("TCP_USER_TIMEOUT", self.tcp_user_timeout_ms),
        )
        options = [
            (socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in wanted if hasattr(socket, name)
        ]
        on = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] if self.keepalives_idle_s else []
        return on + [option for option in options if option[2]]

    def server_settings(self) -> dict[str, str]:
        """The same for the other end of a connection to Postgres."""
        told = {
            "tcp_keepalives_idle": self.keepalives_idle_s,
            "tcp_keepalives_interval": self.keepalives_interval_s,
            "tcp_keepalives_count": self.keepalives_count,
            "tcp_user_timeout": self.tcp_user_timeout_ms,
        }
        return {name: str(value) for name, value in told.items() if value}

    def server_limits(self) -> dict[str, int]:
        """How many milliseconds the server may work on a statement, or wait for the next one of a transaction.

        It gives up a little earlier than we do, so that a slow statement has a known outcome, and none goes on working
        or holding locks for a client that has left.
        """
        limit = ceil(self.command_s * 900)
        return {"statement_timeout": limit, "idle_in_transaction_session_timeout": limit} if limit else {}


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
    deadlines: Deadlines = Deadlines()  # of connections to Postgres or to a server; a Postgres URL may set its own
    hears: bool = True  # whether this process listens for hints of others; without them its waits end by polling
    dispatch: bool = True  # whether this process carries ends to those who wait for them, at once


FEED_RETENTION_MS = Settings().feed_retention_ms  # unless a process is told another time
