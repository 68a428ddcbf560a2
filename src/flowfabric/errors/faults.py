"""Faults: bugs, unavailable stores, exhausted resources, timeouts and ended subscriptions."""

from __future__ import annotations

from enum import StrEnum

from flowfabric.errors.base import Classification, FabricError


class StoreFault(StrEnum):
    """What failed between the engine and its store."""

    TRANSPORT = "transport"
    PROTOCOL = "protocol"
    TIMEOUT = "timeout"
    AUTH = "auth"
    CLUSTER = "cluster"
    BUSY_LOADING = "busy_loading"
    SCRIPT_NOT_LOADED = "script_not_loaded"
    OTHER = "other"

    @property
    def is_transient(self) -> bool:
        """True if this usually resolves by itself."""
        return self in _TRANSIENT_FAULTS


_TRANSIENT_FAULTS = frozenset({StoreFault.TRANSPORT, StoreFault.TIMEOUT, StoreFault.CLUSTER, StoreFault.BUSY_LOADING})


class BugError(FabricError):
    """Something happened that FlowFabric believes impossible; please report it."""

    family = "bug"
    kind = "bug"
    classification = Classification.BUG


class AttemptNotInCreatedState(BugError):
    """An attempt was started twice; please report it."""


class StoreUnavailable(FabricError):
    """The store could not be reached or did not answer properly."""

    family = "transport"
    kind = "transport"

    backend: str
    source: StoreFault
    in_doubt: bool  # the outcome is unknown: the write may have been committed

    def __init__(
        self,
        detail: str = "",
        *,
        backend: str = "",
        source: StoreFault | str = StoreFault.OTHER,
        in_doubt: bool = False,
        **facts: object,
    ) -> None:
        """Raise it `from` the driver's error, so that the cause stays visible."""
        fault = StoreFault(source)
        super().__init__(detail, backend=backend, source=fault, in_doubt=in_doubt, **facts)
        self.classification = Classification.RETRYABLE if fault.is_transient else Classification.TERMINAL

    def with_unknown_outcome(self) -> StoreUnavailable:
        """Return this error for an operation of which an earlier write may have been committed."""
        return StoreUnavailable(self.detail, backend=self.backend, source=self.source, in_doubt=True)

    @property
    def sentence(self) -> str:
        """What happened, and whether the outcome is unknown."""
        unknown = "; the operation may have been committed nevertheless" if self.in_doubt else ""
        return f"The store could not be reached or did not answer properly{unknown}."


class Unavailable(FabricError):
    """This operation cannot be served now."""

    family = "unavailable"
    explained_by_detail = True

    op: str

    def __init__(self, op: str = "", detail: str = "", **facts: object) -> None:
        super().__init__(detail, op=op, **facts)

    @property
    def sentence(self) -> str:
        """What cannot be served."""
        named = type(self) is Unavailable and self.op
        return f"`{self.op}` cannot be served now." if named else super().sentence


class SchemaTooNew(Unavailable):
    """The store was written by a newer release; update this one before it touches anything."""

    found: int
    known: int

    def __init__(self, op: str = "open", detail: str = "", *, found: int, known: int, **facts: object) -> None:
        super().__init__(op, detail, found=found, known=known, **facts)

    @property
    def sentence(self) -> str:
        """Which version is stored, and which is known."""
        versions = f"The store has schema version {self.found} and this release knows {self.known}"
        return f"{versions}: update this one before it touches anything."


class PartitionMismatch(Unavailable):
    """The store was created with other partition counts; existing ids would not be found with these."""

    stored: int
    config: int


class ForkedProcess(Unavailable):
    """The engine was opened before this process forked; open a new one in the child."""


class ResourceExhausted(FabricError):
    """Too many calls of this kind are in flight; try again in a moment."""

    family = "resource_exhausted"
    classification = Classification.RETRYABLE

    pool: str
    max: int
    retry_after_ms: int | None

    def __init__(
        self,
        pool: str,
        max: int = 0,  # noqa: A002 - the field's name on the wire
        retry_after_ms: int | None = None,
        detail: str = "",
        **facts: object,
    ) -> None:
        super().__init__(detail, pool=pool, max=max, retry_after_ms=retry_after_ms, **facts)

    @property
    def sentence(self) -> str:
        """What is full, and when to try again."""
        if type(self) is not ResourceExhausted:
            return super().sentence
        most = f" (at most {self.max})" if self.max else ""
        again = "a moment" if self.retry_after_ms is None else f"{self.retry_after_ms} ms"
        return f"Too many {self.pool} calls are under way{most}; try again in {again}."


class WorkerAtCapacity(ResourceExhausted):
    """The worker runs as many tasks as it may; the grant stays valid."""


class OperationTimeout(FabricError):
    """The operation exceeded its time limit."""

    family = "timeout"
    kind = "timeout"

    op: str
    elapsed_ms: int

    def __init__(self, op: str, elapsed_ms: int = 0, detail: str = "", **facts: object) -> None:
        super().__init__(detail, op=op, elapsed_ms=elapsed_ms, **facts)

    @property
    def sentence(self) -> str:
        """What took too long."""
        return f"`{self.op}` did not finish within {self.elapsed_ms} ms."


class StreamDisconnected(FabricError):
    """The subscription ended; subscribing again with its cursor loses nothing."""

    family = "stream_disconnected"

    cursor: bytes

    def __init__(self, cursor: bytes, detail: str = "", **facts: object) -> None:
        super().__init__(detail, cursor=cursor, **facts)


class StreamBackpressure(FabricError):
    """Events after the cursor were deleted, or the store lost what it points to; delivery continues."""

    family = "stream_backpressure"
    classification = Classification.INFORMATIONAL
