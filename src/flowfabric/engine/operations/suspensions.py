"""Suspension operations: suspend and resume executions, create waitpoints, deliver signals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.durable.approvals import ApprovalInbox, ApprovalPage
from flowfabric.engine.operations.pages import SuspendedEntry, SuspendedPage, WaitpointPage
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.pending_rows import RootQueues
from flowfabric.engine.runtime.read_set import Many, One, ReadSet, load_each, load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.signing_keys import SigningKeys
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle, HandleFields, HandleKind
from flowfabric.model.execution import Execution
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.suspension import NO_TIMEOUT, IdempotencyRecord, Signal, Suspension, Waitpoint
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.suspension import arguments, resume, signals, views
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from flowfabric.rules.suspension.arguments import FreshWaitpoint, SuspendArgs, UsePendingWaitpoint
from flowfabric.rules.suspension.encoding import SignalRef
from flowfabric.rules.suspension.resume import Resumed, SuspensionExpiry
from flowfabric.rules.suspension.signals import (
    LOG_LENGTH,
    SIGNAL_CAP,
    Accepted,
    DuplicateDelivery,
    SignalArgs,
    SignalRows,
)
from flowfabric.rules.suspension.state import ObservedSignal
from flowfabric.rules.suspension.suspend import SuspendOutcome, SuspendRows
from flowfabric.rules.suspension.views import SuspensionRecord
from flowfabric.rules.suspension.waitpoints import PROACTIVE, PendingWaitpoint, WaitpointRecord, WaitpointView
from flowfabric.stores.queries import Scan, Where

DEFAULT_PAGE, MAX_PAGE = 100, 1000
TRIGGERS = ("signal", "operator", "auto_resume")

WaitpointRule = Callable[[Execution | None, Suspension | None, Waitpoint | None, int], Decision[bool]]


class WaitpointDetails(msgspec.Struct, frozen=True):
    """A waitpoint and its token."""

    waitpoint_id: str
    waitpoint_key: str
    waitpoint_token: waitpoint_tokens.WaitpointToken


class SuspendDetails(msgspec.Struct, frozen=True):
    """The waitpoints of a suspension, and the tokens to give to those who may signal them."""

    suspension_id: str
    waitpoint_id: str
    waitpoint_key: str
    waitpoint_token: waitpoint_tokens.WaitpointToken
    additional_waitpoints: list[WaitpointDetails]


class Suspended(msgspec.Struct, frozen=True):
    """The execution is suspended and its lease released; the handle only permits reads."""

    details: SuspendDetails
    handle: Handle


class ConditionAlreadySatisfied(msgspec.Struct, frozen=True):
    """The condition was met before the suspension; the lease and the caller's handle stay valid."""

    details: SuspendDetails


class SuspensionOperations:
    """Operations on suspensions, waitpoints and signals."""

    approval_inbox: ApprovalInbox
    runtime: Runtime
    signing_keys: SigningKeys
    root_queues: RootQueues

    async def create_waitpoint(self, handle: Handle, waitpoint_key: str, expires_in: int) -> PendingWaitpoint:
        """Create a waitpoint before the wait; it buffers signals for `expires_in` ms."""
        fields = self.runtime.handle_fields(handle)
        key = validation.text("waitpoint_key", waitpoint_key)
        expires_in_ms = validation.integer("expires_in", expires_in, least=0)
        fence, waitpoint_id = Fence.of(fields), self.runtime.minter.uuid()
        reads = ReadSet()
        row, suspension = reads.one(Execution, fields.execution_id), reads.one(Suspension, fields.execution_id)
        keys = reads.many(SigningKey, 0)
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, now: waitpoint_rules.create_waitpoint(
                row(rows),
                suspension(rows),
                self.signing_keys.unseal_loaded_keys(keys(rows)),
                fence,
                fields.attempt_index,
                waitpoint_id=waitpoint_id,
                waitpoint_key=key,
                expires_in_ms=expires_in_ms,
                now=now,
            ),
        )

    async def close_waitpoint(self, waitpoint_id: str, reason: str = PROACTIVE) -> bool:
        """Close a waitpoint without resuming the execution that waits on it; True if it was open."""
        identity = validate.parse_uuid("waitpoint_id", waitpoint_id)
        reason = validation.text("reason", reason) or PROACTIVE
        found = await load_one(self.runtime, Waitpoint, identity)
        if found is None:
            raise errors.WaitpointNotFound()
        return await decide_on_waitpoint(
            self.runtime,
            found,
            lambda row, suspension, current, now: waitpoint_rules.close_waitpoint(
                row, suspension, current, reason, now
            ),
        )

    async def describe_waitpoint(self, execution_id: str, waitpoint_id: str) -> WaitpointRecord | None:
        """Return a waitpoint of an execution, open or closed; None if there is none."""
        execution = validate.validate_execution_id(execution_id)
        reads = ReadSet()
        waitpoint, suspension = _read_waitpoint(reads, execution, waitpoint_id), reads.one(Suspension, execution)
        loaded = await self.runtime.load(reads)
        found = waitpoint(loaded.rows)
        if found is None or found.execution_id != execution:
            return None
        return waitpoint_rules.waitpoint_record(found, suspension(loaded.rows), loaded.now)

    async def list_pending_waitpoints(
        self, execution_id: str, *, after: str | None = None, limit: int | None = None
    ) -> WaitpointPage:
        """List the open waitpoints of an execution by id, without their tokens."""
        execution = validate.validate_execution_id(execution_id)
        size = DEFAULT_PAGE if limit is None else max(1, min(validation.integer("limit", limit), MAX_PAGE))
        position = (execution, "" if after is None else validate.parse_uuid("waitpoint_id", after))
        reads = ReadSet()
        row, suspension = reads.one(Execution, execution), reads.one(Suspension, execution)
        loaded = await self.runtime.load(reads)
        if row(loaded.rows) is None:
            raise errors.NotFound("execution")
        entries: list[WaitpointView] = []
        where = (Where("execution_id", "=", execution), Where("closed_at", "unset"))
        while len(entries) <= size:  # some are closed without `closed_at`: a page may need several scans
            rows = await self.runtime.scan(Scan(Waitpoint, where, ("execution_id", "waitpoint_id"), position, size + 1))
            views = [waitpoint_rules.waitpoint_view(one, suspension(loaded.rows), loaded.now) for one in rows]
            entries += [view for view in views if view is not None]
            if len(rows) <= size:
                break
            position = (execution, rows[-1].waitpoint_id)
        return WaitpointPage(entries[:size], entries[size - 1].waitpoint_id if len(entries) > size else None)

    async def read_waitpoint_token(
        self, partition: int | str, waitpoint_id: str
    ) -> waitpoint_tokens.WaitpointToken | None:
        """Return the token of an open waitpoint; None if there is no such waitpoint."""
        index = validate.validate_flow_partition(partition, self.runtime.partitions)
        found = await load_one(self.runtime, Waitpoint, validate.parse_uuid("waitpoint_id", waitpoint_id), index)
        if found is None:
            return None
        reads = ReadSet()
        suspension, keys = reads.one(Suspension, found.execution_id), reads.many(SigningKey, 0)
        loaded = await self.runtime.load(reads)
        signing_keys = self.signing_keys.unseal_loaded_keys(keys(loaded.rows))
        return waitpoint_rules.token_if_open(
            found, found.execution_id, suspension(loaded.rows), signing_keys, loaded.now
        )

    async def read_token_of(self, execution_id: str, waitpoint_id: str) -> waitpoint_tokens.WaitpointToken | None:
        """Return the token of an open waitpoint of this execution. One load of the same rows, found or not."""
        execution = validate.validate_execution_id(execution_id)
        reads = ReadSet()
        waitpoint, suspension = _read_waitpoint(reads, execution, waitpoint_id), reads.one(Suspension, execution)
        keys = reads.many(SigningKey, 0)
        loaded = await self.runtime.load(reads)
        signing_keys = self.signing_keys.unseal_loaded_keys(keys(loaded.rows))
        return waitpoint_rules.token_if_open(
            waitpoint(loaded.rows), execution, suspension(loaded.rows), signing_keys, loaded.now
        )

    async def is_token_of(self, execution_id: str, waitpoint_id: str, token: waitpoint_tokens.WaitpointToken) -> bool:
        """True if a waitpoint of this execution, open or closed, was given this token; nothing is written."""
        execution = validate.validate_execution_id(execution_id)
        reads = ReadSet()
        waitpoint, keys = _read_waitpoint(reads, execution, waitpoint_id), reads.many(SigningKey, 0)
        presented = validate_suspension.validate_waitpoint_token(token).reveal()
        loaded = await self.runtime.load(reads)
        refused = signals.check_token(
            waitpoint(loaded.rows),
            self.signing_keys.unseal_loaded_keys(keys(loaded.rows)),
            presented,
            execution_id=execution,
            waitpoint_id=validate.parse_uuid("waitpoint_id", waitpoint_id),
            now=loaded.now,
        )
        return refused is None

    async def deliver_signal(self, args: SignalArgs) -> Accepted | DuplicateDelivery:
        """Deliver a signal to a waitpoint, with the token that permits it."""
        args = validate_suspension.validate_signal(args)
        # The same rows are loaded for every kind of invalid token, so the response time reveals nothing.
        reads = ReadSet()
        row, suspension = reads.one(Execution, args.execution_id), reads.one(Suspension, args.execution_id)
        waitpoint = reads.one(Waitpoint, args.waitpoint_id, ids.partition_of(ids.ExecutionId(args.execution_id)))
        keys = reads.many(SigningKey, 0)
        remembered: One[IdempotencyRecord] | None = None
        if args.is_deduplicated:
            digest = wait_encoding.key_digest(args.idempotency_key or "")
            remembered = reads.one(IdempotencyRecord, args.execution_id, args.waitpoint_id, digest)
        call = str(self.runtime.minter.change_id())

        def decide(rows: Rows, now: int) -> Decision[Accepted | DuplicateDelivery]:
            loaded = SignalRows(
                row(rows),
                suspension(rows),
                waitpoint(rows),
                None if remembered is None else remembered(rows),
                self.signing_keys.unseal_loaded_keys(keys(rows)),
                call,
            )
            return signals.deliver_signal(loaded, args, now)

        return await self.root_queues.decide_and_commit(args.execution_id, reads, decide)

    async def deliver_approval_signal(
        self,
        execution_id: str,
        *,
        lane_id: str,
        waitpoint_id: str,
        signal_name: str,
        idempotency_suffix: str,
        signal_dedup_ttl_ms: int,
        maxlen: int | None = None,
        max_signals_per_execution: int | None = None,
    ) -> Accepted | DuplicateDelivery:
        """Deliver an operator's approval to a waitpoint, without a token."""
        execution = validate.validate_execution_id(execution_id)
        reads = ReadSet()
        row, waitpoint = reads.one(Execution, execution), _read_waitpoint(reads, execution, waitpoint_id)
        keys = reads.many(SigningKey, 0)
        suffix = validation.text("idempotency_suffix", idempotency_suffix)
        rows = (await self.runtime.load(reads)).rows
        signing_keys = self.signing_keys.unseal_loaded_keys(keys(rows))
        token = validate.value_or_raise(signals.approval_token(row(rows), waitpoint(rows), signing_keys, lane_id))
        return await self.deliver_signal(
            SignalArgs(
                execution_id=execution,
                waitpoint_id=validate.parse_uuid("waitpoint_id", waitpoint_id),
                signal_id=self.runtime.minter.uuid(),
                signal_name=signal_name,
                signal_category="approval",
                source_type="operator",
                target_scope="execution",
                waitpoint_token=token,
                idempotency_key=f"approval:{signal_name}:{suffix}",
                dedup_ttl_ms=signal_dedup_ttl_ms,
                signal_maxlen=LOG_LENGTH if maxlen is None else maxlen,
                max_signals_per_execution=SIGNAL_CAP
                if max_signals_per_execution is None
                else max_signals_per_execution,
            )
        )

    async def observe_signals(self, handle: Handle) -> list[ObservedSignal]:
        """Return the signals that resumed this attempt, in the order in which they were accepted."""
        fields = self.runtime.handle_fields(handle)
        suspension = await load_one(self.runtime, Suspension, fields.execution_id)
        resuming = signals.resuming_signals(suspension, fields.attempt_index)
        found = await self._load_signals(fields.execution_id, resuming)
        return [wait_state.observed_signal(signal) for signal in found]

    async def verify_and_deliver(
        self, args: SignalArgs, presented_token: str | waitpoint_tokens.WaitpointToken
    ) -> Accepted | DuplicateDelivery:
        """Deliver a webhook's signal if the token that it presents is the waitpoint's."""
        if not isinstance(args, SignalArgs):
            raise errors.InvalidInput("args: not the arguments of a signal")
        presented = validate_suspension.validate_waitpoint_token(presented_token)
        issued = await self.read_token_of(args.execution_id, args.waitpoint_id)
        if refused := waitpoint_tokens.check_presented(issued, presented):
            raise refused
        return await self.deliver_signal(msgspec.structs.replace(args, waitpoint_token=presented))

    def fresh_waitpoint(self, waitpoint_key: str | None = None) -> FreshWaitpoint:
        """Return a waitpoint for `suspend` to create; without a key, the key is made from its id."""
        waitpoint_id = self.runtime.minter.uuid()
        key = f"wpk:{waitpoint_id}" if waitpoint_key is None else waitpoint_key
        return FreshWaitpoint(waitpoint_id, validation.text("waitpoint_key", key))

    async def suspend(self, handle: Handle, args: SuspendArgs) -> Suspended | ConditionAlreadySatisfied:
        """Release the lease and wait for the condition, unless buffered signals have met it already."""
        if not isinstance(handle, Handle):
            raise errors.InvalidInput("handle: not a handle")
        if handle.kind is HandleKind.SUSPENDED:
            raise errors.AlreadySuspended()
        args = _validate_suspend(args)
        fields = self.runtime.handle_fields(handle)
        return await self._suspend(fields.execution_id, Fence.of(fields), fields, args)

    async def suspend_strict(self, handle: Handle, args: SuspendArgs) -> Suspended:
        """Suspend like `suspend`, but raise `AlreadySatisfied` if the condition is met already."""
        outcome = await self.suspend(handle, args)
        if isinstance(outcome, ConditionAlreadySatisfied):
            raise errors.AlreadySatisfied(suspension_id=outcome.details.suspension_id)
        return outcome

    async def suspend_by_triple(
        self, execution_id: str, fence: Fence, args: SuspendArgs
    ) -> Suspended | ConditionAlreadySatisfied:
        """Suspend for a caller that has a fence instead of a handle."""
        args = _validate_suspend(args)
        return await self._suspend(
            validate.validate_execution_id(execution_id), validate.validate_fence(fence), None, args
        )

    async def _suspend(
        self, execution_id: str, fence: Fence, holder: HandleFields | None, args: SuspendArgs
    ) -> Suspended | ConditionAlreadySatisfied:
        partition = ids.partition_of(ids.ExecutionId(execution_id))
        reads = ReadSet()
        row, suspension = reads.one(Execution, execution_id), reads.one(Suspension, execution_id)
        keys = reads.many(SigningKey, 0)
        # A pending waitpoint is read in all partitions: one of another execution is refused as such, not as missing.
        waitpoints = [
            reads.many(Waitpoint, binding.waitpoint_id, partition)
            if isinstance(binding, FreshWaitpoint)
            else reads.many(Waitpoint, binding.waitpoint_id)
            for binding in {binding.waitpoint_id: binding for binding in args.waitpoints}.values()
        ]
        remembered: One[IdempotencyRecord] | None = None
        buffered: Many[Signal] | None = None
        if args.idempotency_key:
            digest = wait_encoding.key_digest(args.idempotency_key)
            remembered = reads.one(IdempotencyRecord, execution_id, suspend_rules.SCOPE, digest)
        if isinstance(args.waitpoints[0], UsePendingWaitpoint):
            buffered = reads.many(Signal, execution_id, args.waitpoints[0].waitpoint_id)
        assumed = self._assume_first_wait(execution_id, args, reads, row, keys)
        signing_keys: Sequence[SigningKey] = ()

        def decide(rows: Rows, now: int) -> Decision[SuspendOutcome]:
            nonlocal signing_keys
            unseal = self.signing_keys.unseal_keys if rows is assumed else self.signing_keys.unseal_loaded_keys
            signing_keys = unseal(keys(rows))
            found = [waitpoint for one in waitpoints for waitpoint in one(rows)]
            found.sort(key=lambda waitpoint: waitpoint.partition == partition)  # that of the own partition wins
            loaded = SuspendRows(
                row=row(rows),
                root=suspension(rows),
                remembered=None if remembered is None else remembered(rows),
                waitpoints={waitpoint.waitpoint_id: waitpoint for waitpoint in found},
                buffered=() if buffered is None else buffered(rows),
                keys=signing_keys,
            )
            return suspend_rules.suspend(loaded, args, fence, holder, now)

        outcome = await self.runtime.decide_and_commit(reads, decide, assumed_rows=assumed)
        return self._suspended(execution_id, outcome, signing_keys)

    def _assume_first_wait(
        self, execution_id: str, args: SuspendArgs, reads: ReadSet, row: One[Execution], keys: Many[SigningKey]
    ) -> Rows | None:
        """Return the rows of a first wait without a load: the cached execution and keys, and no others.

        An attempt timeout needs a load, because the time that is left is computed from the stored row.
        """
        seen, cached_keys = self.runtime._lease_cache.get(execution_id), self.signing_keys.cached_keys()
        if seen is None or cached_keys is None or seen.has_waits or seen.attempt_timeout_at is not None:
            return None
        if any(isinstance(binding, UsePendingWaitpoint) for binding in args.waitpoints):
            return None
        rows = reads.assume(row, seen)
        rows[keys.place] = cached_keys
        return rows

    def _suspended(
        self, execution_id: str, outcome: SuspendOutcome, keys: Sequence[SigningKey]
    ) -> Suspended | ConditionAlreadySatisfied:
        first, *others = [
            WaitpointDetails(
                waitpoint.waitpoint_id,
                waitpoint.waitpoint_key,
                waitpoint_tokens.WaitpointToken(
                    waitpoint_tokens.remint_token(keys, waitpoint.kid, execution_id, waitpoint.waitpoint_id)
                ),
            )
            for waitpoint in outcome.waitpoints
        ]
        details = SuspendDetails(
            outcome.suspension_id, first.waitpoint_id, first.waitpoint_key, first.waitpoint_token, others
        )
        if not outcome.suspended:
            return ConditionAlreadySatisfied(details)
        return Suspended(details, Handle.mint(self.runtime.store.tag, HandleKind.SUSPENDED, outcome.holder))

    async def resume_execution(
        self, execution_id: str, *, trigger_type: str = "signal", resume_delay_ms: int = 0
    ) -> Resumed:
        """Resume a suspended execution, whatever it waits for."""
        execution, call_id = validate.validate_execution_id(execution_id), self.runtime.minter.uuid()
        if trigger_type not in TRIGGERS:
            raise errors.InvalidInput(f"trigger_type: none of {', '.join(TRIGGERS)}")
        delay_ms = validation.duration_ms("resume_delay_ms", resume_delay_ms, least=0)
        reads = ReadSet()
        row, suspension = reads.one(Execution, execution), reads.one(Suspension, execution)
        return await self.runtime.decide_and_commit(
            reads, lambda rows, _: resume.resume_execution(row(rows), suspension(rows), delay_ms, call_id)
        )

    async def expire_suspension(self, execution_id: str) -> SuspensionExpiry:
        """Apply the timeout behavior of a suspension that has timed out; otherwise change nothing."""
        execution, signal_id = validate.validate_execution_id(execution_id), self.runtime.minter.uuid()
        reads = ReadSet()
        row, suspension = reads.one(Execution, execution), reads.one(Suspension, execution)
        return await self.runtime.decide_and_commit(
            reads, lambda rows, now: resume.expire_suspension(row(rows), suspension(rows), signal_id, now)
        )

    async def describe_suspension(self, execution_id: str) -> SuspensionRecord | None:
        """Return the open or the last suspension of an execution; None if it was never suspended."""
        execution = validate.validate_execution_id(execution_id)
        suspension = await load_one(self.runtime, Suspension, execution)
        if suspension is None:
            return None
        closing = await self._load_signals(execution, wait_encoding.closing_signals(suspension))
        return views.suspension_record(suspension, closing)

    async def _load_signals(self, execution_id: str, refs: Sequence[SignalRef]) -> list[Signal]:
        keys = ((execution_id, ref.waitpoint_id, ref.seq) for ref in refs)
        return [signal for signal in await load_each(self.runtime, Signal, keys) if signal is not None]

    async def list_suspended(
        self, partition: int | str, *, cursor: str | None = None, limit: int = 50
    ) -> SuspendedPage:
        """List the suspended executions of a partition, in the order in which they time out."""
        index = validate.validate_flow_partition(partition, self.runtime.partitions)
        size = min(validation.integer("limit", limit, least=0), MAX_PAGE)
        where = (Where("partition", "=", index), Where("due_at", "set"))
        scan = Scan(Suspension, where, ("due_at", "execution_id"), limit=size + 1)
        if cursor is not None:
            after = await self._position_after(scan, validate.validate_execution_id(cursor))
            if after is None:
                return SuspendedPage([])
            scan = msgspec.structs.replace(scan, after=after)
        rows = await self.runtime.scan(scan) if size else []
        entries = [SuspendedEntry(row.execution_id, row.due_at, row.reason_code or "") for row in rows[:size]]
        return SuspendedPage(entries, entries[-1].execution_id if len(rows) > size else None)

    async def _position_after(self, scan: Scan, cursor: str) -> tuple[int, str] | None:
        """Return the position after an execution, suspended or not; if it is gone, that of the next id."""
        suspension = await load_one(self.runtime, Suspension, cursor)
        if suspension is not None and suspension.suspension_id is not None:
            return (NO_TIMEOUT if suspension.timeout_at is None else suspension.timeout_at), cursor
        where = (*scan.where, Where("execution_id", ">", cursor))
        following = await self.runtime.scan(msgspec.structs.replace(scan, where=where, limit=1))
        return (following[0].due_at, cursor) if following else None

    async def list_approvals(
        self,
        *,
        execution_id: str | None = None,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> ApprovalPage:
        """List what executions, or this one, ask people, the first to time out first, after the cursor.

        `limit` is the number of executions that are read; some of them may have ended, and ask nobody.
        """
        return await self.approval_inbox.list_approvals(
            execution_id=execution_id, namespace=namespace, namespaces=namespaces, cursor=cursor, limit=limit
        )


def _validate_suspend(args: SuspendArgs) -> SuspendArgs:
    args = validate_suspension.validate_suspend(args)
    if refused := arguments.check_arguments(args):
        raise refused
    return args


def _read_waitpoint(reads: ReadSet, execution_id: ids.ExecutionId, waitpoint_id: str) -> One[Waitpoint]:
    identity = validate.parse_uuid("waitpoint_id", waitpoint_id)
    return reads.one(Waitpoint, identity, ids.partition_of(execution_id))


async def decide_on_waitpoint(runtime: Runtime, waitpoint: Waitpoint, decide: WaitpointRule) -> bool:
    """Decide on a waitpoint together with its execution and suspension."""
    reads = ReadSet()
    row, suspension = reads.one(Execution, waitpoint.execution_id), reads.one(Suspension, waitpoint.execution_id)
    current = reads.one(Waitpoint, waitpoint.waitpoint_id, waitpoint.partition)
    return await runtime.decide_and_commit(
        reads, lambda rows, now: decide(row(rows), suspension(rows), current(rows), now)
    )
