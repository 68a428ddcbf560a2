"""The engine: every operation of the specification by its name, on a store."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import msgspec

from flowfabric.engine.claiming.late_claims import LateClaims
from flowfabric.engine.claiming.poller import Pulling
from flowfabric.engine.flows.bulk_cancel import Cancelling
from flowfabric.engine.flows.completion_dispatcher import Dispatcher
from flowfabric.engine.flows.join_resolver import Folding
from flowfabric.engine.limits.budget_suspension import Sleeping
from flowfabric.engine.metrics.queue_depth import Levels
from flowfabric.engine.operations.api_tokens import ApiTokens
from flowfabric.engine.operations.deployment import Deployments
from flowfabric.engine.operations.flow_cancels import FlowCancels
from flowfabric.engine.operations.flow_reads import FlowReads
from flowfabric.engine.operations.holder import Holder
from flowfabric.engine.operations.leases import Finishing
from flowfabric.engine.operations.reads import Reads
from flowfabric.engine.operations.redeeming import Redeeming
from flowfabric.engine.operations.retention import Retention
from flowfabric.engine.operations.signals import Signals
from flowfabric.engine.operations.streams import StreamOps, Streams
from flowfabric.engine.operations.subscriptions import Subscriptions
from flowfabric.engine.runtime.pending_rows import Together
from flowfabric.engine.runtime.secret_box import Vault
from flowfabric.engine.runtime.wakeups import stream_topic
from flowfabric.engine.surface import operations
from flowfabric.engine.sweeps import suspensions
from flowfabric.engine.sweeps.flows import FlowSweeps
from flowfabric.engine.sweeps.limits import admission_sweeps
from flowfabric.engine.sweeps.sweeper import Pass, Places, Sweeper
from flowfabric.engine.sweeps.unblock import Unblocking
from flowfabric.engine.validation import execution as validate
from flowfabric.handles import BackendTag
from flowfabric.ids import ExecutionId, Minter, RandomMinter, mint_solo
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.flow import Dependency, Dispatch, PendingCancelGroup
from flowfabric.model.gate import ChildEnd
from flowfabric.model.outbox import Message
from flowfabric.rules.feed import Filter
from flowfabric.settings import Settings
from flowfabric.stores.port import Schema as Schema  # part of the engine's own vocabulary
from flowfabric.stores.port import Store


class Capabilities(msgspec.Struct, frozen=True):
    """What this engine can do; every store can do the same."""

    backend: str
    operations: tuple[str, ...]


class Engine(
    Finishing,
    Holder,
    FlowCancels,
    FlowReads,
    Sleeping,
    Signals,
    Streams,
    Pulling,
    Redeeming,
    Reads,
    Retention,
    Subscriptions,
    ApiTokens,
    Deployments,
    Levels,
):
    """A durable execution engine on one store. Use it as an async context manager, or call `close`."""

    def __init__(
        self,
        store: Store,
        *,
        settings: Settings | None = None,
        minter: Minter | None = None,
        schema: Schema | None = None,
    ) -> None:
        """`schema` is what opening the store answered."""
        super().__init__(store, minter=minter or RandomMinter(), settings=settings or Settings())
        self.schema = schema or Schema(0, 0)
        self._sweeper: Sweeper | None = None
        self._places: Places = {}
        self.accepting = validate.Accepting()
        self.vault = Vault(self.settings.secret_key)
        self.together = Together(self)
        self.stream_ops = StreamOps(self.settings.max_concurrent_stream_ops)
        self.writers, self.taking_in, self.folds = {}, {}, set()
        self.follow(self.follow_children, ChildEnd)
        self._turns = {}
        self._background = set()
        dispatch = self.settings.dispatch
        self.late_claims = LateClaims(self._find_taken, self._give_back)
        self.folding = Folding(self)
        self.cancelling = Cancelling(self, self.folding)
        self.dispatcher = Dispatcher(self, self.folding, self.cancelling.cancel_siblings, enabled=dispatch)
        self.carrier = self.dispatcher
        self.follow(self.dispatcher.follow, Dependency, Dispatch, PendingCancelGroup)
        self._flow_sweeps = FlowSweeps(self, self)
        self.follow(self.follow_messages, Message)
        self._unblocking = Unblocking(self)
        if self.settings.hears:
            store.on_wake(self._woken)

    async def _give_back(self, claimed: Claimed) -> None:
        """Make what was claimed claimable again, at once: the attempt has not begun."""
        await self.delay_for(claimed.handle, 0)
        await self.promote_delayed(claimed.execution_id)

    def _woken(self, topics: frozenset[str]) -> None:
        """Another process says what happened; one that cannot say wakes everybody."""
        if topics:
            self.wakes.fire(topics)
        else:
            self.wakes.fire_all("")

    @property
    def is_shared(self) -> bool:
        """Whether other processes, threads and loops can open the same store."""
        return self.store.tag is not BackendTag.MEMORY

    def limit_commands(self, command_s: float) -> None:
        """Give up on a silent connection after this long, or sooner; a worker stays below the length of its leases."""
        self.store.limit_commands(command_s)

    async def ping(self) -> int:
        """The store's time, in milliseconds since the epoch."""
        return await self.store.ping()

    def capabilities(self) -> Capabilities:
        """Which operations there are."""
        return Capabilities(self.store.tag.title, operations(type(self)))

    def new_execution_id(self, lane_id: str = "default") -> ExecutionId:
        """A fresh id for an execution of its own, on the partition of its lane."""
        return mint_solo(validate.lane(lane_id), self.partitions, self.minter)

    def start_sweeps(self) -> None:
        """Run the background sweeps in this process too; any number of processes may."""
        if self._sweeper is None:
            self._sweeper = self.sweeper()
            self._sweeper.start()

    async def stop_sweeps(self) -> int:
        """Stop them; how many had to be cut off."""
        sweeper, self._sweeper = self._sweeper, None
        return 0 if sweeper is None else await sweeper.stop()

    async def sweep_once(self, name: str, chosen: Filter | None = None, *, batch: int | None = None) -> Pass:
        """One pass of a sweep, now; `chosen` restricts the sweeps over executions."""
        return await self.sweeper(chosen).sweep_once(name, batch)

    def sweeper(self, chosen: Filter | None = None) -> Sweeper:
        """All sweeps, not yet running."""
        more = (
            *suspensions.sweeps(self),
            *self._flow_sweeps.sweeps(chosen),
            *admission_sweeps(self, self._unblocking, chosen),
        )
        return Sweeper(self, self.settings.sweeps, more, chosen, self._places)

    async def close(self) -> None:
        """Stop sweeping, let what is on its way arrive, and let go of the store. A second call does nothing."""
        await self.stop_sweeps()
        await self.late_claims.close()
        self.stream_ops.closing.set()
        self.wakes.fire_all(stream_topic(""))
        await self.frames_written()
        await self.folds_done()
        await self.finish_background()
        await self.dispatcher.close()
        self.stop_timers()
        await self.delivered()
        await self.commits.drained()
        await self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
