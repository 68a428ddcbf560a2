"""The engine: builds the components on a store and offers every operation of the specification."""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import Self

import msgspec

from flowfabric import errors
from flowfabric.clock import StoreClockEstimate
from flowfabric.engine.claiming.admission import AdmissionControl
from flowfabric.engine.claiming.claim_on_commit import ClaimOnCommit
from flowfabric.engine.claiming.claimer import Claimer
from flowfabric.engine.claiming.fair_turns import FairTurns
from flowfabric.engine.claiming.fast_claims import FastClaims
from flowfabric.engine.claiming.grant_scheduler import GrantScheduler
from flowfabric.engine.claiming.guarded_claims import GuardedClaims
from flowfabric.engine.claiming.ready_queues import ReadyQueues
from flowfabric.engine.claiming.worker_routes import WorkerRoutes
from flowfabric.engine.durable.approvals import ApprovalInbox
from flowfabric.engine.durable.child_cancels import ChildCancels
from flowfabric.engine.durable.child_completions import ChildCompletions
from flowfabric.engine.durable.children import ChildSpawner
from flowfabric.engine.durable.facts import Facts
from flowfabric.engine.durable.held_runs import HeldRuns
from flowfabric.engine.durable.keyed_runs import KeyedRuns
from flowfabric.engine.durable.lives import Lives
from flowfabric.engine.durable.messages import Messages
from flowfabric.engine.flows.bulk_cancel import BulkCanceller
from flowfabric.engine.flows.completion_dispatcher import CompletionDispatcher
from flowfabric.engine.flows.join_resolver import JoinResolver
from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.limits.budget_suspension import BudgetSuspender
from flowfabric.engine.limits.quota_slots import QuotaSlots
from flowfabric.engine.limits.unblocker import Unblocker
from flowfabric.engine.metrics.queue_depth import GaugeReader
from flowfabric.engine.metrics.recorder import Metrics
from flowfabric.engine.operations.admin import AdminOperations
from flowfabric.engine.operations.bulk import BulkOperator
from flowfabric.engine.operations.claims import ClaimOperations
from flowfabric.engine.operations.durable import DurableOperations
from flowfabric.engine.operations.executions import ExecutionOperations
from flowfabric.engine.operations.explainer import Explainer
from flowfabric.engine.operations.flow_lists import FlowLists
from flowfabric.engine.operations.flows import FlowOperations
from flowfabric.engine.operations.leases import LeaseOperations
from flowfabric.engine.operations.limits import LimitOperations
from flowfabric.engine.operations.overview import Overview
from flowfabric.engine.operations.reads import ReadOperations
from flowfabric.engine.operations.search import ExecutionSearch
from flowfabric.engine.operations.streams import StreamOperations
from flowfabric.engine.operations.suspensions import SuspensionOperations
from flowfabric.engine.retention.purger import Purger
from flowfabric.engine.runtime.after_commit import MAX_CACHED_LEASES
from flowfabric.engine.runtime.keyed_lock import KeyedLock
from flowfabric.engine.runtime.lane_spread_cache import LaneSpreads
from flowfabric.engine.runtime.outbox_relay import OutboxRelay
from flowfabric.engine.runtime.pending_rows import RootQueues
from flowfabric.engine.runtime.recent_creates import RecentCreates
from flowfabric.engine.runtime.recent_keys import RecentKeys
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.secret_box import SecretBox
from flowfabric.engine.runtime.signing_keys import SigningKeys
from flowfabric.engine.runtime.wakeups import stream_topic
from flowfabric.engine.schedules.operator import ScheduleOperator
from flowfabric.engine.schedules.scheduler import Scheduler
from flowfabric.engine.streams.frame_batches import FrameWriter
from flowfabric.engine.streams.read_limiter import StreamReadLimiter
from flowfabric.engine.sweeps.catalog import all_sweeps
from flowfabric.engine.sweeps.flows import FlowSweeps
from flowfabric.engine.sweeps.sweeper import SweepCursors, Sweeper, SweepResult
from flowfabric.engine.sweeps.unblock import UnblockSweep
from flowfabric.engine.validation import execution as validate
from flowfabric.handles import BackendTag
from flowfabric.ids import ExecutionId, Minter, PartitionCounts, RandomMinter, mint_solo
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.flow import CompletionDispatch, Dependency, PendingSiblingCancel
from flowfabric.model.gate import ChildCancel, ChildCompletion
from flowfabric.model.outbox import OutboxMessage
from flowfabric.rules import validation
from flowfabric.rules.feed import Filter
from flowfabric.settings import Settings
from flowfabric.stores.port import SchemaVersion as SchemaVersion  # part of the engine's interface
from flowfabric.stores.port import Store


class Capabilities(msgspec.Struct, frozen=True):
    """The store and the operations of an engine; every store supports all operations."""

    backend: str
    operations: tuple[str, ...]


class Engine(
    ExecutionOperations,
    LeaseOperations,
    ClaimOperations,
    SuspensionOperations,
    DurableOperations,
    FlowOperations,
    LimitOperations,
    StreamOperations,
    ReadOperations,
    AdminOperations,
):
    """A durable execution engine on one store. Use it as an async context manager, or call `close`."""

    def __init__(
        self,
        store: Store,
        *,
        settings: Settings | None = None,
        minter: Minter | None = None,
        schema: SchemaVersion | None = None,
    ) -> None:
        """Build the components; `schema` is the version that opening the store returned."""
        self.schema = schema or SchemaVersion(0, 0)
        self.runtime = runtime = Runtime(store, minter=minter or RandomMinter(), settings=settings or Settings())
        self.signing_keys = SigningKeys(runtime, SecretBox(runtime.settings.secret_key))
        self.root_queues = RootQueues(runtime)
        self.recent_creates = RecentCreates(runtime.wakeups)
        self.first_leases = RecentKeys(MAX_CACHED_LEASES)
        self.create_validator = validate.CreateValidator()
        self.lane_spreads = LaneSpreads(runtime)
        self.flow_locks = KeyedLock()

        self.aggregates = LimitAggregates(runtime)
        self.turns = FairTurns()
        self.budget_suspender = BudgetSuspender(runtime, self.aggregates, self.signing_keys)
        self.unblocker = Unblocker(runtime, self.aggregates, self.turns, self.budget_suspender)
        self.quota_slots = QuotaSlots(runtime, self.aggregates, self.unblocker)
        self.outbox = OutboxRelay(runtime, {"release_admission": self.quota_slots.release_for_message})

        self.queues = ReadyQueues(runtime, self.turns)
        self.routes = WorkerRoutes(runtime, self.unblocker)
        self.admission = AdmissionControl(runtime, self.aggregates, self.quota_slots, self.unblocker)
        self.fast_claims = FastClaims(runtime, self.queues, self._return_claim)
        self.guarded_claims = GuardedClaims(runtime, self.queues, self.admission, self.unblocker)
        self.claimer = Claimer(runtime, self.queues, self.turns, self.fast_claims, self.guarded_claims, self.routes)
        self.claim_on_commit = ClaimOnCommit(runtime, self.queues, self.fast_claims)
        self.grant_scheduler = GrantScheduler(
            runtime, self.queues, self.turns, self.guarded_claims, self.admission, self.routes
        )

        self.join_resolver = JoinResolver(runtime)
        self.bulk_canceller = BulkCanceller(runtime, self.join_resolver)
        self.dispatcher = CompletionDispatcher(
            runtime, self.join_resolver, self.bulk_canceller.cancel_siblings, enabled=runtime.settings.dispatch
        )
        self.scheduler = Scheduler(runtime)
        self.schedule_operator = ScheduleOperator(runtime, self.scheduler)
        self.child_completions = ChildCompletions(runtime, self.scheduler)
        self.child_cancels = ChildCancels(runtime)
        self.frame_writer = FrameWriter(runtime)
        self.stream_reads = StreamReadLimiter(runtime.settings.max_concurrent_stream_ops)
        self.explainer = Explainer(runtime, self.queues, self.aggregates, self.routes)
        self.purger = Purger(runtime)
        self.gauges = GaugeReader(runtime)
        self.held_runs = HeldRuns(runtime, self.gauges)
        self.facts = Facts(runtime)
        self.messages = Messages(runtime, self.root_queues)
        self.child_spawner = ChildSpawner(runtime)
        self.lives = Lives(runtime)
        self.keyed_runs = KeyedRuns(runtime, self.lane_spreads)
        self.execution_search = ExecutionSearch(runtime)
        self.overview = Overview(runtime, self.gauges, self.aggregates)
        self.approval_inbox = ApprovalInbox(runtime)
        self.flow_lists = FlowLists(runtime)
        self.bulk_operator = BulkOperator(runtime)

        self._sweeper: Sweeper | None = None
        self._sweep_cursors: SweepCursors = {}
        self._flow_sweeps = FlowSweeps(self)
        self._unblock_sweep = UnblockSweep(self.unblocker, self.budget_suspender, self.routes)

        runtime.release_inliner = self.dispatcher
        runtime.on_write(self.dispatcher.dispatch_written, Dependency, CompletionDispatch, PendingSiblingCancel)
        runtime.on_write(self.child_completions.deliver_written, ChildCompletion)
        runtime.on_write(self.child_cancels.cancel_written, ChildCancel)
        runtime.on_write(self.outbox.deliver_written_messages, OutboxMessage)
        if runtime.settings.hears:
            store.on_notify(self._wake_topics)

    async def _return_claim(self, claimed: Claimed) -> None:
        """Make a claimed execution claimable again at once; no worker has received it."""
        await self.delay_for(claimed.handle, 0)
        await self.promote_delayed(claimed.execution_id)

    def _wake_topics(self, topics: frozenset[str]) -> None:
        """Wake the waiters of topics that another process notified; without topics, wake all."""
        if topics:
            self.runtime.wakeups.notify(topics)
        else:
            self.runtime.wakeups.notify_prefix("")

    @property
    def store(self) -> Store:
        """The store of this engine."""
        return self.runtime.store

    @property
    def settings(self) -> Settings:
        """The settings that this engine was opened with."""
        return self.runtime.settings

    @property
    def minter(self) -> Minter:
        """The source of new ids."""
        return self.runtime.minter

    @property
    def partitions(self) -> PartitionCounts:
        """The number of partitions of the store, by kind."""
        return self.runtime.partitions

    @property
    def estimate(self) -> StoreClockEstimate:
        """An estimate of the store's time that costs no round trip."""
        return self.runtime.estimate

    @property
    def metrics(self) -> Metrics:
        """The metrics of this process."""
        return self.runtime.metrics

    @property
    def is_shared(self) -> bool:
        """True if other processes, threads and event loops can open the same store."""
        return self.runtime.store.tag is not BackendTag.MEMORY

    def limit_commands(self, command_s: float) -> None:
        """Give up on a silent connection after `command_s`, unless a shorter limit is set."""
        if type(command_s) not in (int, float) or not command_s > 0:
            raise errors.InvalidInput("command_s: not a positive number of seconds")
        self.runtime.store.limit_commands(command_s)

    async def ping(self) -> int:
        """Return the store's time, in milliseconds since the epoch."""
        return await self.runtime.store.ping()

    def capabilities(self) -> Capabilities:
        """Return the store's name and the names of all operations."""
        return Capabilities(self.runtime.store.tag.title, operations())

    def new_execution_id(self, lane_id: str = "default", idempotency_key: str | None = None) -> ExecutionId:
        """Return a new id for an execution without a flow, on the partition of its key or of its lane."""
        lane = validate.validate_lane_id(lane_id)
        key = validation.optional_text("idempotency_key", idempotency_key)
        spread = self.lane_spreads.spread(lane)
        return mint_solo(lane, self.runtime.partitions, self.runtime.minter, spread=spread, key=key)

    def start_sweeps(self) -> None:
        """Start the background sweeps in this process; any number of processes may run them."""
        if self._sweeper is None:
            self._sweeper = self.sweeper()
            self._sweeper.start()

    async def stop_sweeps(self) -> int:
        """Stop the background sweeps; return how many had to be cancelled."""
        sweeper, self._sweeper = self._sweeper, None
        return 0 if sweeper is None else await sweeper.stop()

    async def sweep_once(self, name: str, chosen: Filter | None = None, *, batch: int | None = None) -> SweepResult:
        """Run one pass of a sweep; `chosen` restricts the sweeps over executions."""
        return await self.sweeper(chosen).sweep_once(name, batch)

    def sweeper(self, chosen: Filter | None = None) -> Sweeper:
        """Return a sweeper of all sweeps that is not running yet."""
        sweeps = all_sweeps(self, self._flow_sweeps, self._unblock_sweep, chosen)
        return Sweeper(self.runtime, self.runtime.settings.sweeps, sweeps, chosen, self._sweep_cursors)

    async def close(self) -> None:
        """Stop the sweeps, finish the work in flight, and close the store. A second call does nothing."""
        await self.stop_sweeps()
        await self.fast_claims.late_claims.close()
        self.stream_reads.closing.set()
        self.runtime.wakeups.notify_prefix(stream_topic(""))
        await self.frame_writer.drain()
        await self.child_cancels.drain()
        await self.child_completions.drain()
        await self.bulk_canceller.close()
        await self.dispatcher.close()
        self.unblocker.cancel_window_timers()
        await self.outbox.wait_for_deliveries()
        await self.lane_spreads.close()
        await self.runtime.commit_queue.drain()
        await self.runtime.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def operations() -> tuple[str, ...]:
    """Return the names of all operations: the public methods of the groups and of the engine itself."""
    groups = [group for group in Engine.__mro__ if group is not object]
    members = {name: member for group in groups for name, member in vars(group).items() if not name.startswith("_")}
    return tuple(sorted(name for name, member in members.items() if inspect.isfunction(member)))
