"""The engine: every operation of the specification by its name, on a store."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import msgspec

from flowfabric.clock import StoreClockEstimate
from flowfabric.engine.claiming.late_claims import LateClaims
from flowfabric.engine.claiming.poller import PollingOperations
from flowfabric.engine.flows.bulk_cancel import BulkCanceller
from flowfabric.engine.flows.completion_dispatcher import CompletionDispatcher
from flowfabric.engine.flows.join_resolver import JoinResolver
from flowfabric.engine.limits.budget_suspension import BudgetSuspender
from flowfabric.engine.metrics.queue_depth import GaugeReader
from flowfabric.engine.metrics.registry import Metrics
from flowfabric.engine.operations.api_tokens import ApiTokenOperations
from flowfabric.engine.operations.deployment import DeploymentOperations
from flowfabric.engine.operations.flow_cancels import FlowCancelOperations
from flowfabric.engine.operations.flow_reads import FlowReadOperations
from flowfabric.engine.operations.holder import HolderOperations
from flowfabric.engine.operations.leases import LeaseOperations
from flowfabric.engine.operations.reads import ReadOperations
from flowfabric.engine.operations.redeeming import RedeemerOperations
from flowfabric.engine.operations.retention import RetentionOperations
from flowfabric.engine.operations.signals import SignalOperations
from flowfabric.engine.operations.streams import StreamOperations, StreamReadLimiter
from flowfabric.engine.operations.subscriptions import SubscriptionOperations
from flowfabric.engine.runtime.pending_rows import RootQueues
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.secret_box import SecretBox
from flowfabric.engine.runtime.wakeups import stream_topic
from flowfabric.engine.surface import operations
from flowfabric.engine.sweeps import suspensions
from flowfabric.engine.sweeps.flows import FlowSweeps
from flowfabric.engine.sweeps.limits import limit_sweeps
from flowfabric.engine.sweeps.sweeper import SweepCursors, Sweeper, SweepResult
from flowfabric.engine.sweeps.unblock import UnblockSweep
from flowfabric.engine.validation import execution as validate
from flowfabric.handles import BackendTag
from flowfabric.ids import ExecutionId, Minter, PartitionCounts, RandomMinter, mint_solo
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.flow import CompletionDispatch, Dependency, PendingSiblingCancel
from flowfabric.model.gate import ChildCompletion
from flowfabric.model.outbox import OutboxMessage
from flowfabric.rules.feed import Filter
from flowfabric.settings import Settings
from flowfabric.stores.port import SchemaVersion as SchemaVersion  # part of the engine's own vocabulary
from flowfabric.stores.port import Store


class Capabilities(msgspec.Struct, frozen=True):
    """What this engine can do; every store can do the same."""

    backend: str
    operations: tuple[str, ...]


class Engine(
    LeaseOperations,
    HolderOperations,
    FlowCancelOperations,
    FlowReadOperations,
    BudgetSuspender,
    SignalOperations,
    StreamOperations,
    PollingOperations,
    RedeemerOperations,
    ReadOperations,
    RetentionOperations,
    SubscriptionOperations,
    ApiTokenOperations,
    DeploymentOperations,
    GaugeReader,
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
        """`schema` is what opening the store answered."""
        self.runtime = Runtime(store, minter=minter or RandomMinter(), settings=settings or Settings())
        self.schema = schema or SchemaVersion(0, 0)
        self._sweeper: Sweeper | None = None
        self._places: SweepCursors = {}
        self.create_validator = validate.CreateValidator()
        self.secret_box = SecretBox(self.runtime.settings.secret_key)
        self.root_queues = RootQueues(self.runtime)
        self.stream_reads = StreamReadLimiter(self.runtime.settings.max_concurrent_stream_ops)
        self.frame_writers, self.parents_in_progress, self.child_completion_tasks = {}, {}, set()
        self.runtime.on_write(self.deliver_written_child_completions, ChildCompletion)
        self._flow_locks = {}
        self._background = set()
        dispatch = self.runtime.settings.dispatch
        self.late_claims = LateClaims(self._find_claimed, self._give_back)
        self.join_resolver = JoinResolver(self.runtime)
        self.bulk_canceller = BulkCanceller(self.runtime, self.join_resolver)
        self.dispatcher = CompletionDispatcher(
            self.runtime, self.join_resolver, self.bulk_canceller.cancel_siblings, enabled=dispatch
        )
        self.runtime.release_inliner = self.dispatcher
        self.runtime.on_write(self.dispatcher.dispatch_written, Dependency, CompletionDispatch, PendingSiblingCancel)
        self._flow_sweeps = FlowSweeps(self, self)
        self.runtime.on_write(self.deliver_written_messages, OutboxMessage)
        self._unblocking = UnblockSweep(self)
        if self.runtime.settings.hears:
            store.on_notify(self._woken)

    async def _give_back(self, claimed: Claimed) -> None:
        """Make what was claimed claimable again, at once: the attempt has not begun."""
        await self.delay_for(claimed.handle, 0)
        await self.promote_delayed(claimed.execution_id)

    def _woken(self, topics: frozenset[str]) -> None:
        """Another process says what happened; one that cannot say wakes everybody."""
        if topics:
            self.runtime.wakeups.notify(topics)
        else:
            self.runtime.wakeups.notify_prefix("")

    @property
    def store(self) -> Store:
        """The store that keeps everything."""
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
        """How many partitions the store has, by kind."""
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
        """Whether other processes, threads and loops can open the same store."""
        return self.runtime.store.tag is not BackendTag.MEMORY

    def limit_commands(self, command_s: float) -> None:
        """Give up on a silent connection after this long, or sooner; a worker stays below the length of its leases."""
        self.runtime.store.limit_commands(command_s)

    async def ping(self) -> int:
        """The store's time, in milliseconds since the epoch."""
        return await self.runtime.store.ping()

    def capabilities(self) -> Capabilities:
        """Which operations there are."""
        return Capabilities(self.runtime.store.tag.title, operations(type(self)))

    def new_execution_id(self, lane_id: str = "default") -> ExecutionId:
        """A fresh id for an execution of its own, on the partition of its lane."""
        return mint_solo(validate.validate_lane_id(lane_id), self.runtime.partitions, self.runtime.minter)

    def start_sweeps(self) -> None:
        """Run the background sweeps in this process too; any number of processes may."""
        if self._sweeper is None:
            self._sweeper = self.sweeper()
            self._sweeper.start()

    async def stop_sweeps(self) -> int:
        """Stop them; how many had to be cut off."""
        sweeper, self._sweeper = self._sweeper, None
        return 0 if sweeper is None else await sweeper.stop()

    async def sweep_once(self, name: str, chosen: Filter | None = None, *, batch: int | None = None) -> SweepResult:
        """One pass of a sweep, now; `chosen` restricts the sweeps over executions."""
        return await self.sweeper(chosen).sweep_once(name, batch)

    def sweeper(self, chosen: Filter | None = None) -> Sweeper:
        """All sweeps, not yet running."""
        more = (
            *suspensions.suspension_sweeps(self),
            *self._flow_sweeps.sweeps(chosen),
            *limit_sweeps(self, self._unblocking, chosen),
        )
        return Sweeper(self, self.runtime.settings.sweeps, more, chosen, self._places)

    async def close(self) -> None:
        """Stop sweeping, let what is on its way arrive, and let go of the store. A second call does nothing."""
        await self.stop_sweeps()
        await self.late_claims.close()
        self.stream_reads.closing.set()
        self.runtime.wakeups.notify_prefix(stream_topic(""))
        await self.flush_frames()
        await self.wait_for_child_completions()
        await self.finish_background_cancels()
        await self.dispatcher.close()
        self.cancel_window_timers()
        await self.wait_for_deliveries()
        await self.runtime.commit_queue.drain()
        await self.runtime.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
