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
    from flowfabric.model.gate import Fact, GateMemo, MailboxMessage, Reply, StepMemo, StepState
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

    def new_execution_id(self, lane_id: str = "default", idempotency_key: str | None = None) -> ExecutionId:
        """Mint the id of an execution outside a flow, on the partition of its key or of its lane."""

    async def refresh_lanes(self) -> None:
        """Read the spreads of all lanes now; otherwise it is done every few seconds while this process creates."""

    async def list_lanes(self, *, cursor: str | None = None, limit: int = 50) -> LanePage:
        """List the lanes that ever had an execution, ascending."""

    async def read_lane(self, lane_id: str) -> LaneSpread:
        """Return the spread of a lane, and the one that follows if a change is not yet in effect."""

    async def set_lane_spread(self, lane_id: str, spread: int) -> LaneSpread:
        """Spread the new executions of a lane over this many partitions; it takes effect some seconds later."""

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
        key_lane: str | None = None,
    ) -> answers.Created | answers.Duplicate:
        """Create an execution; return Duplicate if its id or its idempotency key exists."""

    async def start_by_key(
        self, ask: CreateExecution, policy: KeyPolicy, *, message: MessageArgs | None = None
    ) -> answers.Submitted:
        """Create an execution under its key, or handle the one that has the key as the policy says."""

    async def find_by_key(
        self, idempotency_key: str, *, namespace: str = "default", lane_id: str = "default"
    ) -> str | None:
        """Return the execution that has a key of this lane: one that has not ended, or else the last one."""

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

    async def change_priority(self, execution_id: str, new_priority: int, *, lane_id: str = "") -> answers.Changed:
        """Change the priority of a claimable execution. `lane_id` is a hint that nothing depends on."""

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
        failure: bytes | None = None,
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
        self,
        handle: Handle,
        *,
        pct: int | None = None,
        message: str | None = None,
        counts: Mapping[str, int] | None = None,
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
        tasks: Sequence[ServedTask] = (),
    ) -> WorkerRegistered | WorkerRefreshed:
        """Enter a worker into the registry, with the tasks that it runs."""

    async def heartbeat_worker(
        self, *, namespace: str = "default", worker_instance_id: str
    ) -> WorkerRefreshed | NotRegistered:
        """Refresh a worker in the registry."""

    async def mark_worker_dead(
        self, *, namespace: str = "default", worker_instance_id: str, reason: str = ""
    ) -> MarkedDead | NotRegistered:
        """Remove a worker from the registry."""

    async def list_workers(
        self,
        namespace: str | None = None,
        *,
        after: str | None = None,
        limit: int = 1000,
        all_namespaces: bool = False,
    ) -> WorkerPage:
        """List the live workers of a namespace by instance id, or those of all namespaces."""

    async def list_tasks(self, *, namespace: str | None = None, namespaces: Sequence[str] | None = None) -> TaskList:
        """Return the tasks that live workers run, with the schemas of their input and result."""

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
        state: StepState = ...,
        number: int | None = None,
        started_at: int | None = None,
    ) -> StepMemo:
        """Record the result of a step, or another state of it; a result or failure recorded before is the answer."""

    async def remembered(self, handle: Handle) -> Remembered:
        """Return what earlier attempts of the held execution left behind: step memos, open gates, gate memos."""

    async def leave_gates(
        self, handle: Handle, operations: Sequence[LeftOperation], *, memo: MemoArgs | None = None
    ) -> StepMemo | None:
        """Record that the function left these operations, and close their gates; with `memo`, record that as well."""

    async def spawn(
        self, handle: Handle, asks: Sequence[CreateExecution], memos: Sequence[MemoArgs]
    ) -> list[answers.Created | answers.Duplicate]:
        """Create children of the held execution, each recorded under its memo in the change that creates it."""

    async def read_batch(self, handle: Handle) -> list[MailboxMessage]:
        """Return the inputs of a batch, in the order of their submits."""

    async def continue_as_new(
        self, handle: Handle, input_payload: bytes, *, encoding: str | None = None, unmet: Sequence[str] = ()
    ) -> answers.Continued:
        """Release the lease and begin the run's next life; messages that `unmet` gates received stay unread."""

    async def read_steps(self, execution_id: str) -> list[StepMemo]:
        """Return the recorded steps of an execution in the order in which they began."""

    async def set_tags(self, handle: Handle, pairs: Mapping[str, str]) -> int:
        """Set tags of the held execution, all or none; return how many were given."""

    async def open_gate(self, handle: Handle, args: GateArgs) -> OpenedGate | GateMemo:
        """Open a gate by name, or return the open one with the same links, or the memo of a closed one."""

    async def park(
        self, handle: Handle, gates: tuple[str, ...], *, reason_code: str = "waiting_for_signal"
    ) -> ParkResult | GatesReady:
        """Release the lease until one of these gates closes; keep it if one is closed already."""

    async def open_gates_and_park(
        self,
        handle: Handle,
        gates: tuple[GateArgs, ...],
        *,
        names: tuple[str, ...] = (),
        reason_code: str = "waiting_for_signal",
    ) -> ParkResult | GatesClosed:
        """Open gates and release the lease until one of all these gates closes; keep it if one closes at once."""

    async def open_gates(self, handle: Handle, gates: tuple[GateArgs, ...]) -> GatesClosed:
        """Open gates without links; return the memos of those that have closed, or close at once."""

    async def record_patch(self, handle: Handle, patch: str, *, is_new: bool, number: int | None = None) -> StepMemo:
        """Record the run's answer to a patch; if one was recorded before, it stays and is the answer."""

    async def release_held(
        self, execution_id: str, *, accept: bool = False, version: str | None = None, sender: str = ""
    ) -> bool:
        """Resume a run that waits for other code; False if it does not, or if this version has held it before."""

    async def list_held(self, tasks: Sequence[str], *, namespace: str = "default", limit: int = ...) -> list[str]:
        """Return runs of these tasks that wait for other code."""

    async def pin_version(self, handle: Handle, version: str, *, number: int | None = None) -> StepMemo:
        """Require this version of the code for the held execution; one that was recorded before stays."""

    async def unpin(self, execution_id: str, *, version: str | None = None) -> bool:
        """Let workers of any version continue a pinned run, or those of `version`; False if nothing changes."""

    async def count_held(self, *, namespaces: Sequence[str] | None = None) -> dict[str, int]:
        """Count the runs that wait for other code, by task; all of them together up to 10,000."""

    async def count_old_ways(self, *, namespaces: Sequence[str] | None = None, cursor: str | None = None) -> OldWays:
        """Count unfinished runs that go the old way of a patch or are pinned, after the cursor."""

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

    async def ask(self, args: MessageArgs, *, max_wait_ms: int = 0) -> Reply:
        """Send a message that wants a reply, unless it was sent before, and wait for the reply."""

    async def reply(self, handle: Handle, args: ReplyArgs, memo: MemoArgs) -> Reply:
        """Reply to a message, and record that; the first reply stays and is the answer."""

    async def close_inbox(self, handle: Handle, memo: MemoArgs) -> bool:
        """Close the inbox of the held execution if nothing is unread; what is recorded first stays the answer."""

    async def read_reply(self, execution_id: str, message_id: str, *, max_wait_ms: int = 0) -> Reply:
        """Return the reply to a message that wants one; wait up to `max_wait_ms` while it is open."""

    async def deliver_signal(self, args: SignalArgs) -> Accepted | DuplicateDelivery:
        """Deliver a signal to a waitpoint; the token is required."""

    # -- facts --------------------------------------------------------------------------------------------------

    async def set_fact(self, handle: Handle, args: FactArgs) -> Fact:
        """Set a fact; a set that was counted before changes nothing."""

    async def read_fact(self, execution_id: str, name: str, *, after: int = 0, max_wait_ms: int = 0) -> FactReading:
        """Return a fact whose number is greater than `after`; wait for it, or for the end, up to `max_wait_ms`."""

    async def list_facts(self, execution_id: str) -> list[Fact]:
        """Return the facts of an execution by name."""

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

    async def read_input(self, execution_id: str) -> ExecutionInput:
        """Return the input of an execution, its kind and its policy."""

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
    ) -> ExecutionListPage:
        """Return executions of all partitions that match every filter, newest first."""

    async def list_children(
        self, execution_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> ExecutionListPage:
        """Return the executions whose parent this is, oldest first."""

    async def list_approvals(
        self,
        *,
        execution_id: str | None = None,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> ApprovalPage:
        """Return what executions, or this one, ask people, the first to time out first."""

    async def read_flow_graph(self, flow_id: str) -> FlowGraph:
        """Return a whole flow: nodes with their states, edges and joins."""

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

    # -- across executions --------------------------------------------------------------------------------------

    async def read_levels(self) -> Levels:
        """Return how many executions of each lane wait, run, sleep and are blocked, and how many workers serve it."""

    async def list_worker_executions(
        self, worker_instance_id: str, *, namespaces: Sequence[str] | None = None, limit: int = 100
    ) -> ExecutionListPage:
        """Return the executions whose lease a worker instance holds, the first to expire first."""

    async def read_spending(self, execution_id: str) -> list[Spending]:
        """Return what an execution has spent and reserved, by budget and dimension."""

    async def list_spenders(
        self, budget_id: str, *, namespace: str = ..., cursor: str | None = None, limit: int = 100
    ) -> SpendingPage:
        """Return who has spent from a budget since its last reset, by execution and dimension."""

    async def list_quotas(self, *, namespace: str = ..., cursor: str | None = None, limit: int = 50) -> QuotaPage:
        """Return the quota policies of a namespace by id, with what they admit and who holds their slots."""

    async def list_events(
        self,
        *,
        topics: Sequence[Topic | str] = ...,
        namespaces: Sequence[str] | None = None,
        before: int | None = None,
        limit: int = 50,
    ) -> EventPage:
        """Return past events, newest first, before a position; renewals of leases are left out."""

    async def search_flows(
        self,
        *,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> FlowListPage:
        """Return flows of all partitions, newest first, with the counts of the last projection."""

    async def list_worker_events(self, namespace: str, worker_instance_id: str) -> list[WorkerEvent]:
        """Return the registrations and ends of one worker instance, oldest first."""

    # -- many at once -------------------------------------------------------------------------------------------

    async def preview_operation(self, verb: BulkVerb | str, criteria: dict[str, Any]) -> BulkPreview:
        """Count what a bulk operation would act on, and show some of it; nothing is changed."""

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
    ) -> BulkStatus:
        """Start a bulk operation on the executions that a filter finds; the same request again changes nothing."""

    async def read_operation(self, operation_id: str) -> BulkStatus:
        """Return a bulk operation and its progress."""

    async def list_operations(self, *, cursor: str | None = None, limit: int = 50) -> BulkPage:
        """Return bulk operations, newest first."""

    async def cancel_operation(self, operation_id: str) -> BulkStatus:
        """Cancel a bulk operation: what was done stays done, and no further page is begun."""

    # -- schedules ----------------------------------------------------------------------------------------------

    async def put_schedule(
        self,
        name: str,
        spec: ScheduleSpec,
        run: CreateExecution,
        *,
        owner: str | None = None,
        only_new: bool = False,
    ) -> PutOutcome:
        """Put a schedule in place, whose runs are like `run`; the same definition again changes nothing."""

    async def list_schedules(
        self,
        *,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> SchedulePage:
        """List schedules by name, after the cursor."""

    async def describe_schedule(self, name: str, *, namespace: str = ...) -> ScheduleDescription:
        """Return a schedule with its last ten runs and its next ten instants."""

    async def pause_schedule(self, name: str, *, note: str = "", namespace: str = ...) -> bool:
        """Pause a schedule until it is resumed, also through deploys; False if nothing changes."""

    async def resume_schedule(self, name: str, *, namespace: str = ...) -> bool:
        """Resume a schedule with its next instant; False if it is not paused."""

    async def trigger_schedule(
        self, name: str, *, trigger_id: str | None = None, namespace: str = ...
    ) -> answers.Created | answers.Duplicate:
        """Create a run of a schedule now; the same `trigger_id` again changes nothing."""

    async def backfill_schedule(
        self, name: str, start: int, end: int, *, overlap: Overlap | str = ..., namespace: str = ...
    ) -> Backfilled:
        """Create the runs of instants from `start` to before `end`; an instant that has its run is skipped."""

    async def delete_schedule(self, name: str, *, namespace: str = ...) -> bool:
        """Delete a schedule; its runs continue. False if there is none."""

    async def retire_schedules(
        self,
        owner: str,
        *,
        keep: Sequence[str],
        note: str = "",
        remove: bool = False,
        namespace: str = ...,
    ) -> list[str]:
        """Pause the schedules that an application no longer declares, or remove them; return their names."""

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
        reservation_id: str | None = None,
        acknowledged: Sequence[str] | None = None,
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
        drawn: Mapping[str, int] | None = None,
        epoch: int = 0,
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
        epoch: int | None = None,
        acknowledged: Sequence[str] = (),
    ) -> limit_answers.Refunded:
        """Release what is left of a reservation."""

    async def unblock_budget_waiters(self, budget_id: str, *, namespace: str = ...) -> bool:
        """Let executions that wait for capacity check again; return True if some still wait."""
