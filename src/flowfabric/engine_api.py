"""The operations that applications, workers and the command line need of an engine.

Three classes fit `EngineAPI`: `Engine` on a store, `RemoteEngine` on a server, and `CrossLoopEngine` for an engine on
another event loop. The server and the maintenance commands need more than this: they work on `Engine` itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Any, Self

    from flowfabric import errors
    from flowfabric.clock import StoreClockEstimate
    from flowfabric.engine.engine import Capabilities, SchemaVersion
    from flowfabric.engine.metrics.registry import Metrics
    from flowfabric.engine.operations.durable import OpenedGate, ParkResult, Waits
    from flowfabric.engine.operations.flows import FlowCancel, GraphEdge, Wait
    from flowfabric.engine.operations.pages import (
        ExecutionOutcome,
        HistoryEntry,
        IdMatches,
        SnapshotPage,
        WaitpointPage,
    )
    from flowfabric.engine.operations.streams import Visibility
    from flowfabric.engine.types import (
        Accepted,
        Appended,
        BestEffort,
        CreateExecution,
        DuplicateDelivery,
        ExecutionSnapshot,
        Fence,
        GateArgs,
        GatesReady,
        KeyIds,
        MessageArgs,
        ObservedSignal,
        SignalArgs,
        StateVector,
        StreamPage,
        WaitpointRecord,
        WaitpointToken,
    )
    from flowfabric.handles import Handle
    from flowfabric.ids import (
        ExecutionId,
        Minter,
        PartitionCounts,
    )
    from flowfabric.model.answers import execution as answers
    from flowfabric.model.answers import flow as flow_answers
    from flowfabric.model.answers import limits as limit_answers
    from flowfabric.model.answers.execution import AttemptView
    from flowfabric.model.flow import CancellationPolicy
    from flowfabric.model.gate import GateMemo, StepMemo
    from flowfabric.model.obstacles import Explanation
    from flowfabric.model.states import PublicState
    from flowfabric.model.stream import FrameKind, FrameMode
    from flowfabric.model.worker import (
        MarkedDead,
        NotRegistered,
        WorkerPage,
        WorkerRefreshed,
        WorkerRegistered,
    )
    from flowfabric.settings import Settings


class LanePollerAPI(Protocol):
    """Claims from a fixed set of lanes, for one worker."""

    async def claim(
        self, limit: int, *, max_wait_ms: int = 0, go_on: Callable[[], bool] = ...
    ) -> list[answers.Claimed]:
        """Claim up to `limit` executions; wait up to `max_wait_ms` for the first one, while `go_on` returns True."""

    def close(self) -> None:
        """Release what the poller holds."""


class EngineAPI(Protocol):
    """An engine, wherever it runs."""

    @property
    def minter(self) -> Minter:
        """Mints ids."""

    @property
    def partitions(self) -> PartitionCounts:
        """The partition counts of the store."""

    @property
    def estimate(self) -> StoreClockEstimate:
        """An estimate of the clock of the store."""

    @property
    def settings(self) -> Settings:
        """The settings of this engine."""

    @property
    def schema(self) -> SchemaVersion:
        """The schema versions of the store and of this release."""

    @property
    def metrics(self) -> Metrics:
        """The metrics of this process."""

    @property
    def is_shared(self) -> bool:
        """True if other processes, threads and loops can open the same store."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    # -- the engine itself --------------------------------------------------------------------------------------

    async def ping(self) -> int:
        """Return the clock of the store, in milliseconds since the epoch."""

    def capabilities(self) -> Capabilities:
        """Return the kind of the store and the operations that this engine offers."""

    def new_execution_id(self, lane_id: str = "default") -> ExecutionId:
        """Mint the id of an execution outside a flow, on the partition of its lane."""

    def limit_commands(self, command_s: float) -> None:
        """Give up on a silent connection after `command_s`, unless a shorter limit is set."""

    def start_sweeps(self) -> None:
        """Run the background sweeps in this process too. A remote engine does nothing: its server sweeps."""

    async def close(self) -> None:
        """Finish what is in flight and close the connections. A second call does nothing."""

    # -- executions and flows -----------------------------------------------------------------------------------

    async def create(self, ask: CreateExecution) -> answers.Created | answers.Duplicate:
        """Create an execution under its own id; a repeated call returns Duplicate."""

    async def create_execution(
        self,
        *,
        execution_id: str,
        namespace: str = "default",
        lane_id: str = "default",
        execution_kind: str = "task",
        input_payload: bytes = b"",
        payload_encoding: str | None = None,
        priority: int = 0,
        creator_identity: str = "",
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
        policy: str | Mapping[str, Any] | None = None,
        delay_until: int | None = None,
        execution_deadline_at: int | None = None,
        parent_id: str | None = None,
    ) -> answers.Created | answers.Duplicate:
        """Create an execution; return Duplicate if its id or its idempotency key exists."""

    async def create_executions(
        self, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate | errors.FabricError]:
        """Create many executions in few round trips; each gets its own result or error."""

    async def create_within(
        self, connection: Any, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate]:
        """Create executions inside the caller's own Postgres transaction. A remote engine refuses this."""

    async def create_flow_graph(
        self,
        flow_id: str,
        nodes: Iterable[CreateExecution],
        edges: Iterable[GraphEdge] = ...,
        *,
        policies: Mapping[str, Mapping[str, Any]] | None = None,
        flow_kind: str = "dag",
        namespace: str = "default",
    ) -> flow_answers.GraphCreated | flow_answers.FlowExists:
        """Create a whole flow atomically."""

    async def cancel_execution(
        self, execution_id: str, *, reason: str = "", source: str = "operator_override", fence: Fence = ...
    ) -> answers.Cancelled:
        """Cancel an execution in any state."""

    async def cancel_flow(
        self, flow_id: str, *, policy: CancellationPolicy | str = ..., reason: str = "", wait: Wait = ...
    ) -> FlowCancel:
        """Cancel a flow and the members that the policy selects."""

    async def replay_execution(self, execution_id: str) -> answers.Replayed:
        """Start another life of an ended execution."""

    async def revoke_lease(
        self,
        execution_id: str,
        *,
        expected_lease_id: str = "",
        worker_instance_id: str = "",
        reason: str = "operator_revoke",
    ) -> answers.Revoked | answers.NothingToDo:
        """Revoke the current lease at once; the next claim on the lane takes the work over."""

    # -- workers and holders of leases --------------------------------------------------------------------------

    def pulling(
        self,
        lanes: Sequence[str],
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15000,
        namespaces: Collection[str] | None = None,
    ) -> LanePollerAPI:
        """Open a poller that claims from these lanes."""

    def wake_claims(self, lanes: Sequence[str]) -> None:
        """Make the waiting claims of this process on these lanes return."""

    async def renew_many(
        self, handles: Sequence[Handle], *, lease_ttl_ms: int | None = None
    ) -> list[answers.Renewed | errors.FabricError]:
        """Renew many leases; each gets its own result or error."""

    async def complete(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = ...,
        source: str | None = None,
        result: bytes | None = None,
        encoding: str | None = None,
    ) -> answers.Completed:
        """Complete the execution, as the holder of its lease."""

    async def complete_many(
        self,
        results: Sequence[tuple[Handle, bytes | None]],
        *,
        encoding: str | None = None,
        answered: Callable[[], None] | None = None,
    ) -> list[answers.Completed | errors.FabricError]:
        """Complete many executions; return one result or error each, in order. `answered` runs after the last."""

    async def fail(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = ...,
        source: str | None = None,
        reason: str,
        category: str = "transient",
        retry_policy: str | None = None,
    ) -> answers.RetryScheduled | answers.TerminalFailed:
        """Fail the attempt, as the holder of its lease; the retry policy decides whether another one follows."""

    async def cancel_children(
        self, handle: Handle, execution_ids: Sequence[str], *, reason: str = ""
    ) -> answers.ChildrenCancelled:
        """Cancel children of the held execution."""

    async def delay_for(self, handle: Handle, length_ms: int, *, reason: str = "") -> answers.Delayed:
        """Release the work for a length of time; the same attempt continues afterwards."""

    async def progress(
        self, handle: Handle, *, pct: int | None = None, message: str | None = None
    ) -> answers.ProgressNoted:
        """Report the progress of the attempt."""

    async def register_worker(
        self,
        *,
        namespace: str = "default",
        worker_instance_id: str,
        worker_id: str,
        lanes: Collection[str],
        capabilities: Iterable[str] = (),
        liveness_ttl_ms: int,
    ) -> WorkerRegistered | WorkerRefreshed:
        """Enter a worker into the registry."""

    async def heartbeat_worker(
        self, *, namespace: str = "default", worker_instance_id: str
    ) -> WorkerRefreshed | NotRegistered:
        """Refresh a worker in the registry."""

    async def mark_worker_dead(
        self, *, namespace: str = "default", worker_instance_id: str, reason: str = ""
    ) -> MarkedDead | NotRegistered:
        """Remove a worker from the registry."""

    async def list_workers(
        self, namespace: str | None = None, *, after: str | None = None, limit: int = 1000
    ) -> WorkerPage:
        """List the live workers of a namespace by instance id."""

    # -- durable functions --------------------------------------------------------------------------------------

    async def record_step(
        self,
        handle: Handle,
        name: str,
        occurrence: int,
        result: bytes,
        *,
        encoding: str | None = None,
        digest: str | None = None,
    ) -> StepMemo:
        """Record the result of a step; if one is recorded, return that one."""

    async def read_steps(self, execution_id: str) -> list[StepMemo]:
        """Return the recorded steps of an execution, by name and occurrence."""

    async def read_steps_as_holder(self, handle: Handle) -> list[StepMemo]:
        """Return the recorded steps of the held execution."""

    async def set_tags(self, handle: Handle, pairs: Mapping[str, str]) -> int:
        """Set tags of the held execution, all or none; return how many were given."""

    async def open_gate(self, handle: Handle, args: GateArgs) -> OpenedGate | GateMemo:
        """Open a gate by name, or return the open one with the same links, or the memo of a closed one."""

    async def park(
        self, handle: Handle, gates: tuple[str, ...], *, reason_code: str = "waiting_for_signal"
    ) -> ParkResult | GatesReady:
        """Release the lease until one of these gates closes; keep it if one is closed already."""

    async def read_waits(self, execution_id: str) -> Waits:
        """Return the open gates of a durable function and the memos of closed ones."""

    async def read_votes(self, memo: GateMemo) -> list[ObservedSignal]:
        """Return the signals that closed a gate."""

    async def list_pending_waitpoints(
        self, execution_id: str, *, after: str | None = None, limit: int | None = None
    ) -> WaitpointPage:
        """List the open waitpoints of an execution by id, without their tokens."""

    async def describe_waitpoint(self, execution_id: str, waitpoint_id: str) -> WaitpointRecord | None:
        """Return a waitpoint of an execution, open or closed."""

    async def read_token_of(self, execution_id: str, waitpoint_id: str) -> WaitpointToken | None:
        """Return the token of an open waitpoint."""

    async def list_waitpoint_hmac_kids(self) -> KeyIds:
        """Return which keys sign waitpoint tokens and which still verify."""

    async def send_message(self, args: MessageArgs) -> Accepted | DuplicateDelivery:
        """Send a message to the mailbox of an execution, under the id that the sender minted."""

    async def deliver_signal(self, args: SignalArgs) -> Accepted | DuplicateDelivery:
        """Deliver a signal to a waitpoint; the token is required."""

    # -- output -------------------------------------------------------------------------------------------------

    async def append_frame(
        self,
        handle: Handle,
        payload: bytes,
        *,
        kind: FrameKind | str = ...,
        frame_type: str = "",
        mode: FrameMode | str = ...,
        best_effort: BestEffort = ...,
        correlation_id: str | None = None,
        seq: int | None = None,
    ) -> Appended:
        """Append a frame to the output of the attempt, in the order of the calls."""

    # -- outcomes -----------------------------------------------------------------------------------------------

    async def await_end(self, execution_id: str, *, max_wait_ms: int = 0) -> ExecutionOutcome | None:
        """Wait for the outcome of an execution; return None if it has not ended within `max_wait_ms`."""

    # -- reads --------------------------------------------------------------------------------------------------

    async def read_execution_state(self, execution_id: str) -> PublicState | None:
        """Return the public state of an execution."""

    async def describe_execution(self, execution_id: str) -> ExecutionSnapshot | None:
        """Return an execution with its lease, waitpoint and tags."""

    async def read_total_attempt_count(self, execution_id: str) -> int:
        """Return how many attempts an execution has had."""

    async def read_current_attempt_index(self, execution_id: str) -> int:
        """Return the index of the current attempt."""

    async def read_kinds(self, execution_ids: Iterable[str]) -> dict[str, str]:
        """Return the kinds of executions by id."""

    async def read_state_vector(self, execution_id: str) -> StateVector | None:
        """Return the full state vector of an execution."""

    async def lease_history(self, execution_id: str) -> list[HistoryEntry]:
        """Return the lease events of an execution, oldest first."""

    async def attempt_history(self, execution_id: str) -> list[AttemptView]:
        """Return every attempt by index."""

    async def read_progress(self, execution_id: str) -> tuple[int | None, str | None]:
        """Return the last reported progress as percentage and message."""

    async def explain(self, execution_id: str) -> Explanation:
        """Explain why an execution is not running."""

    async def search_executions(
        self,
        *,
        namespace: str | None = None,
        lane_id: str | None = None,
        public_state: PublicState | str | None = None,
        flow_id: str | None = None,
        created_from: int | None = None,
        created_before: int | None = None,
        tag: tuple[str, str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> SnapshotPage:
        """Return executions of all partitions that match every filter, by id."""

    async def find_executions(
        self, prefix: str, *, namespaces: Sequence[str] | None = None, limit: int = 10
    ) -> IdMatches:
        """Return executions whose id begins with a prefix."""

    async def get_execution_result(self, execution_id: str) -> bytes | None:
        """Return the result of an execution; None if there is none."""

    async def read_results(
        self, execution_ids: Sequence[str], *, namespace: str | None = None
    ) -> dict[str, bytes | None]:
        """Return the results of many executions by id."""

    async def tail_stream(
        self,
        execution_id: str,
        attempt_index: int,
        after: str = "0-0",
        block_ms: int = 0,
        count_limit: int = 50,
        visibility: Visibility | str = ...,
    ) -> StreamPage:
        """Return frames after a cursor; wait up to `block_ms` for the first one."""

    # -- budgets and quotas -------------------------------------------------------------------------------------

    async def create_budget(
        self,
        budget_id: str,
        *,
        dimensions: Sequence[str],
        hard_limits: Sequence[int],
        soft_limits: Sequence[int],
        scope_type: str = "",
        scope_id: str = "",
        enforcement_mode: str = "",
        on_hard_limit: str = "",
        on_soft_limit: str = "",
        reset_interval_ms: int = 0,
        namespace: str = ...,
        declaration: str | None = None,
    ) -> limit_answers.BudgetDefined:
        """Define a budget; a second definition changes nothing unless its `declaration` differs."""

    async def change_budget_limits(
        self,
        budget_id: str,
        *,
        dimensions: Sequence[str],
        hard_limits: Sequence[int],
        soft_limits: Sequence[int],
        namespace: str = ...,
    ) -> limit_answers.LimitsChanged:
        """Change the limits of a budget."""

    async def list_budgets(self, *, cursor: str | None = None, limit: int = 50, namespace: str = ...) -> list[str]:
        """List the ids of the budgets of a namespace, ascending."""

    async def get_budget_status(self, budget_id: str, *, namespace: str = ...) -> limit_answers.BudgetStatus:
        """Return the limits and the usage of a budget."""

    async def create_quota_policy(
        self,
        quota_policy_id: str,
        *,
        window_seconds: int,
        max_requests_per_window: int,
        max_concurrent: int,
        jitter_ms: int = 0,
        namespace: str = ...,
    ) -> limit_answers.QuotaPolicyCreated | limit_answers.QuotaPolicyExists:
        """Define a quota policy; a second definition changes nothing."""

    async def record_spend(
        self,
        budget_id: str,
        execution_id: str,
        deltas: Mapping[str, int],
        *,
        idempotency_key: str | None = None,
        handle: Handle | None = None,
        namespace: str | None = None,
        shared: bool = True,
    ) -> limit_answers.UsageResult:
        """Report usage for the ledger of an execution, once for each key."""

    async def reserve_budget(
        self,
        budget_id: str,
        execution_id: str,
        amounts: Mapping[str, int],
        *,
        ttl_ms: int,
        reservation_id: str | None = None,
        handle: Handle | None = None,
        namespace: str | None = None,
        shared: bool = True,
    ) -> limit_answers.Reserved | limit_answers.HardBreach | limit_answers.AlreadyApplied:
        """Reserve capacity for an execution."""

    async def settle_budget(
        self,
        budget_id: str,
        execution_id: str,
        reservation_id: str,
        amounts: Mapping[str, int],
        *,
        namespace: str | None = None,
        shared: bool = True,
    ) -> limit_answers.UsageResult:
        """End a reservation with the amounts that were used."""

    async def refund_budget(
        self,
        budget_id: str,
        reservation_id: str,
        *,
        execution_id: str | None = None,
        namespace: str = ...,
        shared: bool = True,
    ) -> limit_answers.Refunded:
        """Release a reservation unused."""

    async def unblock_budget_waiters(self, budget_id: str, *, namespace: str = ...) -> bool:
        """Let executions that wait for capacity check again; return True if some still wait."""
