"""The operations that applications, workers and the command line need of an engine.

Three classes fit `EngineAPI`: `Engine` on a store, `RemoteEngine` on a server, and `CrossLoopEngine` for an engine on
another event loop. The server and the maintenance commands need more than this: they work on `Engine` itself.

The methods of `Engine` say what the operations do, and `docs/reference.md` lists them. Where an operation of
`RemoteEngine` differs, its own docstring says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

from flowfabric.engine.operations.create import ExecutionCreator
from flowfabric.engine.operations.durable import StepRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from types import TracebackType

    from flowfabric import errors
    from flowfabric.clock import StoreClockEstimate
    from flowfabric.engine.durable.approval_inbox import ApprovalPage
    from flowfabric.engine.durable.facts import FactReading
    from flowfabric.engine.durable.held_runs import OldWays
    from flowfabric.engine.engine import Capabilities, SchemaVersion
    from flowfabric.engine.metrics.recorder import Metrics
    from flowfabric.engine.operations.bulk import BulkPage, BulkPreview
    from flowfabric.engine.operations.durable import OpenedGate, ParkResult, Remembered, Waits
    from flowfabric.engine.operations.flows import FlowCancel, GraphEdge, Wait
    from flowfabric.engine.operations.overview import EventPage, Levels, QuotaPage, Spending, SpendingPage
    from flowfabric.engine.operations.pages import (
        ExecutionListPage,
        ExecutionOutcome,
        FlowListPage,
        HistoryEntry,
        IdMatches,
        LanePage,
        WaitpointPage,
    )
    from flowfabric.engine.operations.streams import Visibility
    from flowfabric.engine.schedules.operator import SchedulePage
    from flowfabric.engine.types import (
        Accepted,
        Appended,
        Backfilled,
        BestEffort,
        BulkStatus,
        CreateExecution,
        DuplicateDelivery,
        ExecutionInput,
        ExecutionSnapshot,
        FactArgs,
        Fence,
        FlowGraph,
        GateArgs,
        GatesClosed,
        GatesReady,
        KeyIds,
        KeyPolicy,
        LeftOperation,
        MemoArgs,
        MessageArgs,
        ObservedSignal,
        PutOutcome,
        ReplyArgs,
        ScheduleDescription,
        SignalArgs,
        StateVector,
        StreamPage,
        WaitpointRecord,
        WaitpointToken,
    )
    from flowfabric.handles import Handle
    from flowfabric.ids import ExecutionId, Minter, PartitionCounts
    from flowfabric.model.answers import execution as answers
    from flowfabric.model.answers import flow as flow_answers
    from flowfabric.model.answers import limits as limit_answers
    from flowfabric.model.answers.execution import AttemptView
    from flowfabric.model.bulk_operation import BulkVerb
    from flowfabric.model.event import Topic
    from flowfabric.model.flow import CancellationPolicy
    from flowfabric.model.gate import Fact, GateMemo, MailboxMessage, Reply, StepMemo
    from flowfabric.model.obstacles import Explanation
    from flowfabric.model.scheduling.lane import LaneSpread
    from flowfabric.model.scheduling.schedule import Overlap, ScheduleSpec
    from flowfabric.model.scheduling.worker import (
        MarkedDead,
        NotRegistered,
        ServedTask,
        TaskList,
        WorkerEvent,
        WorkerPage,
        WorkerRefreshed,
        WorkerRegistered,
    )
    from flowfabric.model.states import PublicState
    from flowfabric.model.stream import FrameKind, FrameMode
    from flowfabric.settings import Settings


class LanePollerAPI(Protocol):
    """Claims from a fixed set of lanes, for one worker."""

    def max_claim(self, slots: int) -> int:
        """Return how many executions a worker of so many slots should claim at once, at most."""

    async def claim(
        self, limit: int, *, max_wait_ms: int = 0, go_on: Callable[[], bool] = ...
    ) -> list[answers.Claimed]:
        """Claim up to `limit` executions; wait up to `max_wait_ms` for the first one, while `go_on` returns True."""

    def close(self) -> None:
        """Release what the poller holds."""


class EngineAPI(ExecutionCreator, StepRecorder, Protocol):
    """An engine, wherever it runs."""

    @property
    def minter(self) -> Minter: ...
    @property
    def partitions(self) -> PartitionCounts: ...
    @property
    def estimate(self) -> StoreClockEstimate: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def schema(self) -> SchemaVersion: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def is_shared(self) -> bool: ...
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    # -- the engine itself --------------------------------------------------------------------------------------

    async def ping(self) -> int: ...
    def capabilities(self) -> Capabilities: ...
    def new_execution_id(self, lane_id: str = "default", idempotency_key: str | None = None) -> ExecutionId: ...
    async def refresh_lanes(self) -> None: ...
    async def list_lanes(self, *, cursor: str | None = None, limit: int = 50) -> LanePage: ...
    async def read_lane(self, lane_id: str) -> LaneSpread: ...
    async def set_lane_spread(self, lane_id: str, spread: int) -> LaneSpread: ...
    def limit_commands(self, command_s: float) -> None: ...
    def start_sweeps(self) -> None: ...
    async def close(self) -> None: ...

    # -- executions and flows -----------------------------------------------------------------------------------

    async def start_by_key(
        self, ask: CreateExecution, policy: KeyPolicy, *, message: MessageArgs | None = None
    ) -> answers.Submitted: ...
    async def find_by_key(
        self, idempotency_key: str, *, namespace: str = "default", lane_id: str = "default"
    ) -> str | None: ...
    async def create_executions(
        self, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate | errors.FabricError]: ...
    async def create_within(
        self, connection: Any, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate]: ...
    async def create_flow_graph(
        self,
        flow_id: str,
        nodes: Iterable[CreateExecution],
        edges: Iterable[GraphEdge] = ...,
        *,
        policies: Mapping[str, Mapping[str, Any]] | None = None,
        flow_kind: str = "dag",
        namespace: str = "default",
    ) -> flow_answers.GraphCreated | flow_answers.FlowExists: ...
    async def cancel_execution(
        self, execution_id: str, *, reason: str = "", source: str = "operator_override", fence: Fence = ...
    ) -> answers.Cancelled: ...
    async def cancel_flow(
        self, flow_id: str, *, policy: CancellationPolicy | str = ..., reason: str = "", wait: Wait = ...
    ) -> FlowCancel: ...
    async def replay_execution(self, execution_id: str) -> answers.Replayed: ...
    async def change_priority(self, execution_id: str, new_priority: int, *, lane_id: str = "") -> answers.Changed: ...
    async def revoke_lease(
        self,
        execution_id: str,
        *,
        expected_lease_id: str = "",
        worker_instance_id: str = "",
        reason: str = "operator_revoke",
    ) -> answers.Revoked | answers.NothingToDo: ...

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
    ) -> LanePollerAPI: ...
    def wake_claims(self, lanes: Sequence[str]) -> None: ...
    async def renew_many(
        self, handles: Sequence[Handle], *, lease_ttl_ms: int | None = None
    ) -> list[answers.Renewed | errors.FabricError]: ...
    async def complete(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = ...,
        source: str | None = None,
        result: bytes | None = None,
        encoding: str | None = None,
    ) -> answers.Completed: ...
    async def complete_many(
        self,
        results: Sequence[tuple[Handle, bytes | None]],
        *,
        encoding: str | None = None,
        answered: Callable[[], None] | None = None,
    ) -> list[answers.Completed | errors.FabricError]: ...
    async def fail(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = ...,
        source: str | None = None,
        reason: str,
        category: str = "transient",
        failure: bytes | None = None,
        retry_policy: str | None = None,
    ) -> answers.RetryScheduled | answers.TerminalFailed: ...
    async def cancel_children(
        self, handle: Handle, execution_ids: Sequence[str], *, reason: str = ""
    ) -> answers.ChildrenCancelled: ...
    async def delay_for(self, handle: Handle, length_ms: int, *, reason: str = "") -> answers.Delayed: ...
    async def progress(
        self,
        handle: Handle,
        *,
        pct: int | None = None,
        message: str | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> answers.ProgressNoted: ...
    async def register_worker(
        self,
        *,
        namespace: str = "default",
        worker_instance_id: str,
        worker_id: str,
        lanes: Collection[str],
        capabilities: Iterable[str] = (),
        liveness_ttl_ms: int,
        tasks: Sequence[ServedTask] = (),
    ) -> WorkerRegistered | WorkerRefreshed: ...
    async def heartbeat_worker(
        self, *, namespace: str = "default", worker_instance_id: str
    ) -> WorkerRefreshed | NotRegistered: ...
    async def mark_worker_dead(
        self, *, namespace: str = "default", worker_instance_id: str, reason: str = ""
    ) -> MarkedDead | NotRegistered: ...
    async def list_workers(
        self,
        namespace: str | None = None,
        *,
        after: str | None = None,
        limit: int = 1000,
        all_namespaces: bool = False,
    ) -> WorkerPage: ...
    async def list_tasks(
        self, *, namespace: str | None = None, namespaces: Sequence[str] | None = None
    ) -> TaskList: ...

    # -- durable functions --------------------------------------------------------------------------------------

    async def remembered(self, handle: Handle) -> Remembered: ...
    async def leave_gates(
        self, handle: Handle, operations: Sequence[LeftOperation], *, memo: MemoArgs | None = None
    ) -> StepMemo | None: ...
    async def spawn(
        self, handle: Handle, asks: Sequence[CreateExecution], memos: Sequence[MemoArgs]
    ) -> list[answers.Created | answers.Duplicate]: ...
    async def read_batch(self, handle: Handle) -> list[MailboxMessage]: ...
    async def continue_as_new(
        self, handle: Handle, input_payload: bytes, *, encoding: str | None = None, unmet: Sequence[str] = ()
    ) -> answers.Continued: ...
    async def read_steps(self, execution_id: str) -> list[StepMemo]: ...
    async def set_tags(self, handle: Handle, pairs: Mapping[str, str]) -> int: ...
    async def open_gate(self, handle: Handle, args: GateArgs) -> OpenedGate | GateMemo: ...
    async def park(
        self, handle: Handle, gates: tuple[str, ...], *, reason_code: str = "waiting_for_signal"
    ) -> ParkResult | GatesReady: ...
    async def open_gates_and_park(
        self,
        handle: Handle,
        gates: tuple[GateArgs, ...],
        *,
        names: tuple[str, ...] = (),
        reason_code: str = "waiting_for_signal",
    ) -> ParkResult | GatesClosed: ...
    async def open_gates(self, handle: Handle, gates: tuple[GateArgs, ...]) -> GatesClosed: ...
    async def record_patch(
        self, handle: Handle, patch: str, *, is_new: bool, number: int | None = None
    ) -> StepMemo: ...
    async def release_held(
        self, execution_id: str, *, accept: bool = False, version: str | None = None, sender: str = ""
    ) -> bool: ...
    async def list_held(self, tasks: Sequence[str], *, namespace: str = "default", limit: int = ...) -> list[str]: ...
    async def pin_version(self, handle: Handle, version: str, *, number: int | None = None) -> StepMemo: ...
    async def unpin(self, execution_id: str, *, version: str | None = None) -> bool: ...
    async def count_held(self, *, namespaces: Sequence[str] | None = None) -> dict[str, int]: ...
    async def count_old_ways(
        self, *, namespaces: Sequence[str] | None = None, cursor: str | None = None
    ) -> OldWays: ...
    async def read_waits(self, execution_id: str) -> Waits: ...
    async def read_votes(self, memo: GateMemo) -> list[ObservedSignal]: ...
    async def list_pending_waitpoints(
        self, execution_id: str, *, after: str | None = None, limit: int | None = None
    ) -> WaitpointPage: ...
    async def describe_waitpoint(self, execution_id: str, waitpoint_id: str) -> WaitpointRecord | None: ...
    async def read_token_of(self, execution_id: str, waitpoint_id: str) -> WaitpointToken | None: ...
    async def list_waitpoint_hmac_kids(self) -> KeyIds: ...
    async def send_message(self, args: MessageArgs) -> Accepted | DuplicateDelivery: ...
    async def ask(self, args: MessageArgs, *, max_wait_ms: int = 0) -> Reply: ...
    async def reply(self, handle: Handle, args: ReplyArgs, memo: MemoArgs) -> Reply: ...
    async def close_inbox(self, handle: Handle, memo: MemoArgs) -> bool: ...
    async def read_reply(self, execution_id: str, message_id: str, *, max_wait_ms: int = 0) -> Reply: ...
    async def deliver_signal(self, args: SignalArgs) -> Accepted | DuplicateDelivery: ...

    # -- facts --------------------------------------------------------------------------------------------------

    async def set_fact(self, handle: Handle, args: FactArgs) -> Fact: ...
    async def read_fact(self, execution_id: str, name: str, *, after: int = 0, max_wait_ms: int = 0) -> FactReading: ...
    async def list_facts(self, execution_id: str) -> list[Fact]: ...

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
    ) -> Appended: ...

    # -- outcomes -----------------------------------------------------------------------------------------------

    async def await_end(self, execution_id: str, *, max_wait_ms: int = 0) -> ExecutionOutcome | None: ...

    # -- reads --------------------------------------------------------------------------------------------------

    async def read_execution_state(self, execution_id: str) -> PublicState | None: ...
    async def describe_execution(self, execution_id: str) -> ExecutionSnapshot | None: ...
    async def read_total_attempt_count(self, execution_id: str) -> int: ...
    async def read_current_attempt_index(self, execution_id: str) -> int: ...
    async def read_input(self, execution_id: str) -> ExecutionInput: ...
    async def read_kinds(self, execution_ids: Iterable[str]) -> dict[str, str]: ...
    async def read_state_vector(self, execution_id: str) -> StateVector | None: ...
    async def lease_history(self, execution_id: str) -> list[HistoryEntry]: ...
    async def attempt_history(self, execution_id: str) -> list[AttemptView]: ...
    async def read_progress(self, execution_id: str) -> tuple[int | None, str | None]: ...
    async def explain(self, execution_id: str) -> Explanation: ...
    async def search_executions(
        self,
        *,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        kind: str | None = None,
        public_state: PublicState | str | Sequence[PublicState | str] | None = None,
        lane_id: str | None = None,
        tag: tuple[str, str] | None = None,
        flow_id: str | None = None,
        parent_id: str | None = None,
        worker_instance_id: str | None = None,
        error: str | None = None,
        created_from: int | None = None,
        created_before: int | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> ExecutionListPage: ...
    async def list_children(
        self, execution_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> ExecutionListPage: ...
    async def list_approvals(
        self,
        *,
        execution_id: str | None = None,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> ApprovalPage: ...
    async def read_flow_graph(self, flow_id: str) -> FlowGraph: ...
    async def find_executions(
        self, prefix: str, *, namespaces: Sequence[str] | None = None, limit: int = 10
    ) -> IdMatches: ...
    async def get_execution_result(self, execution_id: str) -> bytes | None: ...
    async def read_results(
        self, execution_ids: Sequence[str], *, namespace: str | None = None
    ) -> dict[str, bytes | None]: ...
    async def tail_stream(
        self,
        execution_id: str,
        attempt_index: int,
        after: str = "0-0",
        block_ms: int = 0,
        count_limit: int = 50,
        visibility: Visibility | str = ...,
    ) -> StreamPage: ...

    # -- across executions --------------------------------------------------------------------------------------

    async def read_levels(self) -> Levels: ...
    async def list_worker_executions(
        self, worker_instance_id: str, *, namespaces: Sequence[str] | None = None, limit: int = 100
    ) -> ExecutionListPage: ...
    async def read_spending(self, execution_id: str) -> list[Spending]: ...
    async def list_spenders(
        self, budget_id: str, *, namespace: str = ..., cursor: str | None = None, limit: int = 100
    ) -> SpendingPage: ...
    async def list_quotas(self, *, namespace: str = ..., cursor: str | None = None, limit: int = 50) -> QuotaPage: ...
    async def list_events(
        self,
        *,
        topics: Sequence[Topic | str] = ...,
        namespaces: Sequence[str] | None = None,
        before: int | None = None,
        limit: int = 50,
    ) -> EventPage: ...
    async def search_flows(
        self,
        *,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> FlowListPage: ...
    async def list_worker_events(self, namespace: str, worker_instance_id: str) -> list[WorkerEvent]: ...

    # -- many at once -------------------------------------------------------------------------------------------

    async def preview_operation(self, verb: BulkVerb | str, criteria: dict[str, Any]) -> BulkPreview: ...
    async def start_operation(
        self,
        verb: BulkVerb | str,
        criteria: dict[str, Any],
        *,
        reason: str,
        ceiling: int = ...,
        priority: int | None = None,
        requested_by: str = "",
        operation_id: str | None = None,
    ) -> BulkStatus: ...
    async def read_operation(self, operation_id: str) -> BulkStatus: ...
    async def list_operations(self, *, cursor: str | None = None, limit: int = 50) -> BulkPage: ...
    async def cancel_operation(self, operation_id: str) -> BulkStatus: ...

    # -- schedules ----------------------------------------------------------------------------------------------

    async def put_schedule(
        self,
        name: str,
        spec: ScheduleSpec,
        run: CreateExecution,
        *,
        owner: str | None = None,
        only_new: bool = False,
    ) -> PutOutcome: ...
    async def list_schedules(
        self,
        *,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> SchedulePage: ...
    async def describe_schedule(self, name: str, *, namespace: str = ...) -> ScheduleDescription: ...
    async def pause_schedule(self, name: str, *, note: str = "", namespace: str = ...) -> bool: ...
    async def resume_schedule(self, name: str, *, namespace: str = ...) -> bool: ...
    async def trigger_schedule(
        self, name: str, *, trigger_id: str | None = None, namespace: str = ...
    ) -> answers.Created | answers.Duplicate: ...
    async def backfill_schedule(
        self, name: str, start: int, end: int, *, overlap: Overlap | str = ..., namespace: str = ...
    ) -> Backfilled: ...
    async def delete_schedule(self, name: str, *, namespace: str = ...) -> bool: ...
    async def retire_schedules(
        self,
        owner: str,
        *,
        keep: Sequence[str],
        note: str = "",
        remove: bool = False,
        namespace: str = ...,
    ) -> list[str]: ...

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
    ) -> limit_answers.BudgetDefined: ...
    async def change_budget_limits(
        self,
        budget_id: str,
        *,
        dimensions: Sequence[str],
        hard_limits: Sequence[int],
        soft_limits: Sequence[int],
        namespace: str = ...,
    ) -> limit_answers.LimitsChanged: ...
    async def list_budgets(self, *, cursor: str | None = None, limit: int = 50, namespace: str = ...) -> list[str]: ...
    async def get_budget_status(self, budget_id: str, *, namespace: str = ...) -> limit_answers.BudgetStatus: ...
    async def create_quota_policy(
        self,
        quota_policy_id: str,
        *,
        window_seconds: int,
        max_requests_per_window: int,
        max_concurrent: int,
        jitter_ms: int = 0,
        namespace: str = ...,
    ) -> limit_answers.QuotaPolicyCreated | limit_answers.QuotaPolicyExists: ...
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
        reservation_id: str | None = None,
        acknowledged: Sequence[str] | None = None,
    ) -> limit_answers.UsageResult: ...
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
        drawn: Mapping[str, int] | None = None,
        epoch: int = 0,
    ) -> limit_answers.Reserved | limit_answers.HardBreach | limit_answers.AlreadyApplied: ...
    async def settle_budget(
        self,
        budget_id: str,
        execution_id: str,
        reservation_id: str,
        amounts: Mapping[str, int],
        *,
        namespace: str | None = None,
        shared: bool = True,
    ) -> limit_answers.UsageResult: ...
    async def refund_budget(
        self,
        budget_id: str,
        reservation_id: str,
        *,
        execution_id: str | None = None,
        namespace: str = ...,
        shared: bool = True,
        epoch: int | None = None,
        acknowledged: Sequence[str] = (),
    ) -> limit_answers.Refunded: ...
    async def unblock_budget_waiters(self, budget_id: str, *, namespace: str = ...) -> bool: ...
