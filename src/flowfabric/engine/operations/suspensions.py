"""Waitpoints and signals: how the world outside reaches waiting work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.operations.pages import SuspendedEntry, SuspendedPage, WaitpointPage
from flowfabric.engine.runtime.after_commit import first
from flowfabric.engine.runtime.pending_rows import RootQueues
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.signing_keys import KEYSTORE, SIGNING_KEYS, SigningKeys
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle, HandleFields, HandleKind
from flowfabric.model.execution import Execution
from flowfabric.model.signing_key import SigningKey
from flowfabric.model.suspension import NO_TIMEOUT, IdempotencyRecord, Signal, Suspension, Waitpoint
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.suspension import arguments, resume, signals, views
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from flowfabric.rules.suspension.arguments import FreshWaitpoint, SuspendArgs, UsePendingWaitpoint
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
from flowfabric.stores.queries import Read, Scan, Where

DEFAULT_PAGE, MAX_PAGE = 100, 1000
MAX_PAGE = 1000
TRIGGERS = ("signal", "operator", "auto_resume")

WaitpointRule = Callable[[Execution | None, Suspension | None, Waitpoint | None, int], Decision[bool]]


class UnknownWaitpoint(errors.InvalidToken):
    """The bridge found no token for this waitpoint."""


class TokenMismatch(errors.InvalidToken):
    """The token that was presented is not the waitpoint's."""


class WaitpointDetails(msgspec.Struct, frozen=True):
    """A waitpoint and its token."""

    waitpoint_id: str
    waitpoint_key: str
    waitpoint_token: waitpoint_tokens.WaitpointToken


class SuspendDetails(msgspec.Struct, frozen=True):
    """What to wait on, and what to hand to those who may signal."""

    suspension_id: str
    waitpoint_id: str
    waitpoint_key: str
    waitpoint_token: waitpoint_tokens.WaitpointToken
    additional_waitpoints: list[WaitpointDetails]


class Suspended(msgspec.Struct, frozen=True):
    """The execution waits; the lease is gone, and the handle can do nothing but ask."""

    details: SuspendDetails
    handle: Handle


class ConditionAlreadySatisfied(msgspec.Struct, frozen=True):
    """What was to be waited for has happened; the lease and the caller's handle are as they were."""

    details: SuspendDetails


class SuspensionOperations:
    """Operations on suspensions, waitpoints and signals."""

    runtime: Runtime
    signing_keys: SigningKeys
    root_queues: RootQueues

    async def create_waitpoint(self, handle: Handle, waitpoint_key: str, expires_in: int) -> PendingWaitpoint:
        """A waitpoint to hand out before the wait; what is sent to it until `expires_in` ms from now is kept."""
        fields = self.runtime.handle_fields(handle)
        key = validation.text("waitpoint_key", waitpoint_key)
        length = validation.integer("expires_in", expires_in, least=0)
        fence, waitpoint_id = Fence.of(fields), self.runtime.minter.uuid()
        execution = fields.execution_id

        def decide(rows: list[list[Any]], now: int) -> Decision[PendingWaitpoint]:
            return waitpoint_rules.create_waitpoint(
                first(rows[0]),
                first(rows[1]),
                self.signing_keys.unseal_loaded_keys(rows[3]),
                fence,
                fields.attempt_index,
                waitpoint_id=waitpoint_id,
                waitpoint_key=key,
                expires_in_ms=length,
                now=now,
            )

        return await self.runtime.decide_and_commit(
            (Read(Execution, (execution,)), Read(Suspension, (execution,)), *KEYSTORE), decide
        )

    async def close_waitpoint(self, waitpoint_id: str, reason: str = PROACTIVE) -> bool:
        """Close a waitpoint without waking what waits on it; True when it was open."""
        identity = validate_suspension.validate_waitpoint_id(waitpoint_id)
        why = validation.text("reason", reason) or PROACTIVE
        found = (await self.runtime.load((Read(Waitpoint, (identity,)),))).rows[0]
        if not found:
            raise errors.WaitpointNotFound()
        return await decide_on_waitpoint(
            self.runtime,
            found[0],
            lambda row, root, one, now: waitpoint_rules.close_waitpoint(row, root, one, why, now),
        )

    async def describe_waitpoint(self, execution_id: str, waitpoint_id: str) -> WaitpointRecord | None:
        """A waitpoint of an execution, open or closed; None when there is none."""
        execution = validate.validate_execution_id(execution_id)
        key = (validate_suspension.validate_waitpoint_id(waitpoint_id), ids.partition_of(execution))
        loaded = await self.runtime.load((Read(Waitpoint, key), Read(Suspension, (execution,))))
        found = first(loaded.rows[0])
        if found is None or found.execution_id != execution:
            return None
        return waitpoint_rules.waitpoint_record(found, first(loaded.rows[1]), loaded.now)

    async def list_pending_waitpoints(
        self, execution_id: str, *, after: str | None = None, limit: int | None = None
    ) -> WaitpointPage:
        """The open waitpoints of an execution by id, without their tokens."""
        execution = validate.validate_execution_id(execution_id)
        wanted = DEFAULT_PAGE if limit is None else max(1, min(validation.integer("limit", limit), MAX_PAGE))
        place = (execution, "" if after is None else validate_suspension.validate_waitpoint_id(after))
        loaded = await self.runtime.load((Read(Execution, (execution,)), Read(Suspension, (execution,))))
        if not loaded.rows[0]:
            raise errors.NotFound("execution")
        root, entries = first(loaded.rows[1]), list[WaitpointView]()
        where = (Where("execution_id", "=", execution), Where("closed_at", "unset"))
        while len(entries) <= wanted:  # closed ones are passed over, so a page may take several looks
            rows = await self.runtime.scan(Scan(Waitpoint, where, ("execution_id", "waitpoint_id"), place, wanted + 1))
            views = [waitpoint_rules.waitpoint_view(row, root, loaded.now) for row in rows]
            entries += [view for view in views if view is not None]
            if len(rows) <= wanted:
                break
            place = (execution, rows[-1].waitpoint_id)
        return WaitpointPage(entries[:wanted], entries[wanted - 1].waitpoint_id if len(entries) > wanted else None)

    async def read_waitpoint_token(
        self, partition: int | str, waitpoint_id: str
    ) -> waitpoint_tokens.WaitpointToken | None:
        """The token of an open waitpoint, for those who may have it; None when there is no such waitpoint."""
        index, identity = (
            validate.validate_flow_partition(partition, self.runtime.partitions),
            validate_suspension.validate_waitpoint_id(waitpoint_id),
        )
        found = first((await self.runtime.load((Read(Waitpoint, (identity, index)),))).rows[0])
        if found is None:
            return None
        loaded = await self.runtime.load((Read(Suspension, (found.execution_id,)), SIGNING_KEYS))
        return waitpoint_rules.token_if_open(
            found, first(loaded.rows[0]), self.signing_keys.unseal_loaded_keys(loaded.rows[1]), loaded.now
        )

    async def read_token_of(self, execution_id: str, waitpoint_id: str) -> waitpoint_tokens.WaitpointToken | None:
        """The same for a waitpoint of this very execution: one look at the same rows, whether it exists or not."""
        execution, identity = (
            validate.validate_execution_id(execution_id),
            validate_suspension.validate_waitpoint_id(waitpoint_id),
        )
        key = (identity, ids.partition_of(execution))
        loaded = await self.runtime.load((Read(Waitpoint, key), Read(Suspension, (execution,)), SIGNING_KEYS))
        found, keys = first(loaded.rows[0]), self.signing_keys.unseal_loaded_keys(loaded.rows[2])
        if found is None or found.execution_id != execution:
            return None
        return waitpoint_rules.token_if_open(found, first(loaded.rows[1]), keys, loaded.now)

    async def is_token_of(self, execution_id: str, waitpoint_id: str, token: waitpoint_tokens.WaitpointToken) -> bool:
        """True if a waitpoint of this execution, open or closed, was given this token; nothing is written."""
        execution, identity = (
            validate.validate_execution_id(execution_id),
            validate_suspension.validate_waitpoint_id(waitpoint_id),
        )
        shown = validate_suspension.validate_waitpoint_token(token).reveal()
        loaded = await self.runtime.load((Read(Waitpoint, (identity, ids.partition_of(execution))), SIGNING_KEYS))
        found, keys = first(loaded.rows[0]), self.signing_keys.unseal_loaded_keys(loaded.rows[1])
        is_its = found is not None and waitpoint_tokens.matches_stored(shown, found.token_kid, found.token_fingerprint)
        refused = waitpoint_tokens.verify_token(
            shown,
            keys,
            execution_id=execution,
            waitpoint_id=identity,
            owner=None if found is None else found.execution_id,
            stored=shown if is_its else None,
            now=loaded.now,
        )
        return refused is None

    async def deliver_signal(self, args: SignalArgs) -> Accepted | DuplicateDelivery:
        """Send a signal to a waitpoint, with the token that allows it."""
        ask = validate_suspension.validate_signal(args)
        return await self._deliver(ask)

    async def _deliver(self, ask: SignalArgs) -> Accepted | DuplicateDelivery:
        partition = ids.partition_of(ids.ExecutionId(ask.execution_id))
        # Whatever is wrong with a token, the same rows are asked for: how long an answer takes tells nothing.
        wants = [
            Read(Execution, (ask.execution_id,)),
            Read(Suspension, (ask.execution_id,)),
            Read(Waitpoint, (ask.waitpoint_id, partition)),
            SIGNING_KEYS,
        ]
        if ask.is_deduplicated:
            wants.append(
                Read(
                    IdempotencyRecord,
                    (ask.execution_id, ask.waitpoint_id, wait_encoding.key_digest(ask.idempotency_key or "")),
                )
            )

        call = str(self.runtime.minter.change_id())

        def decide(rows: list[list[Any]], now: int) -> Decision[Accepted | DuplicateDelivery]:
            row, root, waitpoint, _, *remembered = map(first, rows)
            scene = SignalRows(
                row, root, waitpoint, first(remembered), self.signing_keys.unseal_loaded_keys(rows[3]), call
            )
            return signals.deliver_signal(scene, ask, now)

        return await self.root_queues.decide_and_commit(ask.execution_id, wants, decide)

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
        """An operator's word on a waitpoint, without a token."""
        execution, identity = (
            validate.validate_execution_id(execution_id),
            validate_suspension.validate_waitpoint_id(waitpoint_id),
        )
        suffix = validation.text("idempotency_suffix", idempotency_suffix)
        partition = ids.partition_of(execution)
        loaded = await self.runtime.load(
            (Read(Execution, (execution,)), Read(Waitpoint, (identity, partition)), *KEYSTORE)
        )
        row, found = first(loaded.rows[0]), first(loaded.rows[1])
        if row is None:
            raise errors.NotFound("execution")
        if lane_id != row.lane_id:
            raise errors.InvalidInput(f"lane_mismatch: the execution is in lane {row.lane_id}")
        if found is None or found.execution_id != execution:
            raise errors.NotFound("waitpoint")
        token = waitpoint_tokens.remint_token(
            self.signing_keys.unseal_loaded_keys(loaded.rows[3]), found.token_kid, execution, identity
        )
        return await self.deliver_signal(
            SignalArgs(
                execution_id=execution,
                waitpoint_id=identity,
                signal_id=self.runtime.minter.uuid(),
                signal_name=signal_name,
                signal_category="approval",
                source_type="operator",
                target_scope="execution",
                waitpoint_token=waitpoint_tokens.WaitpointToken(token),
                idempotency_key=f"approval:{signal_name}:{suffix}",
                dedup_ttl_ms=signal_dedup_ttl_ms,
                signal_maxlen=LOG_LENGTH if maxlen is None else maxlen,
                max_signals_per_execution=SIGNAL_CAP
                if max_signals_per_execution is None
                else max_signals_per_execution,
            )
        )

    async def observe_signals(self, handle: Handle) -> list[ObservedSignal]:
        """The signals that resumed this attempt, in the order in which they were accepted; none otherwise."""
        fields = self.runtime.handle_fields(handle)
        loaded = await self.runtime.load((Read(Suspension, (fields.execution_id,)),))
        root = first(loaded.rows[0])
        places = signals.resuming_signals(root, fields.attempt_index)
        if not places:
            return []
        execution = fields.execution_id
        loaded = await self.runtime.load([Read(Signal, (execution, place.waitpoint_id, place.seq)) for place in places])
        return [wait_state.observed_signal(found[0]) for found in loaded.rows if found]

    async def verify_and_deliver(
        self, args: SignalArgs, presented_token: str | waitpoint_tokens.WaitpointToken
    ) -> Accepted | DuplicateDelivery:
        """The bridge of a webhook: compare the presented token with the waitpoint's own, then deliver with it."""
        if not isinstance(args, SignalArgs):
            raise errors.InvalidInput("args: not the arguments of a signal")
        ask = msgspec.structs.replace(
            args, waitpoint_token=validate_suspension.validate_waitpoint_token(presented_token)
        )
        kept = await self.read_token_of(ask.execution_id, ask.waitpoint_id)
        if kept is None:
            raise UnknownWaitpoint()
        if kept != ask.waitpoint_token:
            raise TokenMismatch()
        return await self.deliver_signal(ask)

    def fresh_waitpoint(self, waitpoint_key: str | None = None) -> FreshWaitpoint:
        """A waitpoint for a suspend to make, under an id of its own; without a key it is called after that."""
        waitpoint_id = self.runtime.minter.uuid()
        key = f"wpk:{waitpoint_id}" if waitpoint_key is None else waitpoint_key
        return FreshWaitpoint(waitpoint_id, validation.text("waitpoint_key", key))

    async def suspend(self, handle: Handle, args: SuspendArgs) -> Suspended | ConditionAlreadySatisfied:
        """Give the lease back and wait for the condition; signals that came early may have met it already."""
        if not isinstance(handle, Handle):
            raise errors.InvalidInput("handle: not a handle")
        if handle.kind is HandleKind.SUSPENDED:
            raise errors.AlreadySuspended()
        args = _acceptable(args)
        fields = self.runtime.handle_fields(handle)
        fence = Fence.of(fields)
        return await self._suspend(fields.execution_id, fence, fields, args)

    async def suspend_strict(self, handle: Handle, args: SuspendArgs) -> Suspended:
        """The same for callers who have nothing to go on with: a condition that is met already is an error."""
        outcome = await self.suspend(handle, args)
        if isinstance(outcome, ConditionAlreadySatisfied):
            raise errors.AlreadySatisfied(suspension_id=outcome.details.suspension_id)
        return outcome

    async def suspend_by_triple(
        self, execution_id: str, fence: Fence, args: SuspendArgs
    ) -> Suspended | ConditionAlreadySatisfied:
        """Suspend for a caller without a handle, which names its lease."""
        args = _acceptable(args)
        return await self._suspend(
            validate.validate_execution_id(execution_id), validate.validate_fence(fence), None, args
        )

    async def _suspend(
        self, execution_id: str, fence: Fence, holder: HandleFields | None, args: SuspendArgs
    ) -> Suspended | ConditionAlreadySatisfied:
        partition = ids.partition_of(ids.ExecutionId(execution_id))
        bound = {binding.waitpoint_id: binding for binding in args.waitpoints}
        wants = [
            Read(Execution, (execution_id,)),
            Read(Suspension, (execution_id,)),
            *KEYSTORE,
            # One that was made before is looked for everywhere: another execution's is not one that is missing.
            *(
                Read(Waitpoint, (one, partition) if isinstance(to, FreshWaitpoint) else (one,))
                for one, to in bound.items()
            ),
        ]
        remembers = pends = None
        if args.idempotency_key:
            remembers = len(wants)
            wants.append(
                Read(
                    IdempotencyRecord,
                    (execution_id, suspend_rules.SCOPE, wait_encoding.key_digest(args.idempotency_key)),
                )
            )
        if isinstance(args.waitpoints[0], UsePendingWaitpoint):
            pends = len(wants)
            wants.append(Read(Signal, (execution_id, args.waitpoints[0].waitpoint_id)))
        signers: list[SigningKey] = []
        trusting = self._trusted(execution_id, args, len(wants))

        def decide(rows: list[list[Any]], now: int) -> Decision[SuspendOutcome]:
            signers[:] = (
                self.signing_keys.unseal_loaded_keys(rows[3])
                if rows is not trusting
                else self.signing_keys.unseal_keys(rows[3])
            )
            found = [one for some in rows[4:] for one in some if isinstance(one, Waitpoint)]
            found.sort(key=lambda one: one.partition == partition)  # that of its own partition is the one that is meant
            scene = SuspendRows(
                row=first(rows[0]),
                root=first(rows[1]),
                remembered=None if remembers is None else first(rows[remembers]),
                waitpoints={one.waitpoint_id: one for one in found},
                buffered=() if pends is None else rows[pends],
                keys=signers,
            )
            return suspend_rules.suspend(scene, args, fence, holder, now)

        return self._handed_out(
            execution_id, await self.runtime.decide_and_commit(wants, decide, assumed_rows=trusting), signers
        )

    def _trusted(self, execution_id: str, args: SuspendArgs, wants: int) -> list[list[Any]] | None:
        """What the holder's own sheet tells of a first wait: that there is nothing else to look at.

        The time that an attempt has left is reckoned from a fresh look only.
        """
        seen, keys = self.runtime._lease_cache.get(execution_id), self.signing_keys.cached_keys()
        if seen is None or keys is None or seen.has_waits or seen.attempt_timeout_at is not None:
            return None
        if any(isinstance(binding, UsePendingWaitpoint) for binding in args.waitpoints):
            return None
        return [[seen], [], [], keys, *([] for _ in range(wants - 4))]

    def _handed_out(
        self, execution_id: str, outcome: SuspendOutcome, keys: list[SigningKey]
    ) -> Suspended | ConditionAlreadySatisfied:
        made = [
            WaitpointDetails(
                one.waitpoint_id,
                one.waitpoint_key,
                waitpoint_tokens.WaitpointToken(
                    waitpoint_tokens.remint_token(keys, one.kid, execution_id, one.waitpoint_id)
                ),
            )
            for one in outcome.waitpoints
        ]
        first = made[0]
        details = SuspendDetails(
            outcome.suspension_id, first.waitpoint_id, first.waitpoint_key, first.waitpoint_token, made[1:]
        )
        if not outcome.suspended:
            return ConditionAlreadySatisfied(details)
        return Suspended(details, Handle.mint(self.runtime.store.tag, HandleKind.SUSPENDED, outcome.holder))

    async def resume_execution(
        self, execution_id: str, *, trigger_type: str = "signal", resume_delay_ms: int = 0
    ) -> Resumed:
        """Let a suspended execution go on, whatever it waits for."""
        execution, call_id = validate.validate_execution_id(execution_id), self.runtime.minter.uuid()
        if trigger_type not in TRIGGERS:
            raise errors.InvalidInput(f"trigger_type: none of {', '.join(TRIGGERS)}")
        delay_ms = validation.duration_ms("resume_delay_ms", resume_delay_ms, least=0)
        resumed: Resumed = await self._about(
            execution, lambda row, root, _: resume.resume_execution(row, root, delay_ms, call_id)
        )
        return resumed

    async def expire_suspension(self, execution_id: str) -> SuspensionExpiry:
        """Do what a suspension wants done when its time is over; nothing when it is not."""
        execution, signal_id = validate.validate_execution_id(execution_id), self.runtime.minter.uuid()
        expiry: SuspensionExpiry = await self._about(
            execution, lambda row, root, now: resume.expire_suspension(row, root, signal_id, now)
        )
        return expiry

    async def _about(self, execution_id: str, decide: Any) -> Any:
        return await self.runtime.decide_and_commit(
            (Read(Execution, (execution_id,)), Read(Suspension, (execution_id,))),
            lambda rows, now: decide(first(rows[0]), first(rows[1]), now),
        )

    async def describe_suspension(self, execution_id: str) -> SuspensionRecord | None:
        """The open suspension of an execution, or the last one; None when it never waited."""
        execution = validate.validate_execution_id(execution_id)
        root: Suspension | None = first((await self.runtime.load((Read(Suspension, (execution,)),))).rows[0])
        if root is None:
            return None
        wants = [
            Read(Signal, (execution, place.waitpoint_id, place.seq)) for place in wait_encoding.closing_signals(root)
        ]
        signals = [one for found in (await self.runtime.load(wants)).rows for one in found] if wants else []
        return views.suspension_record(root, signals)

    async def list_suspended(
        self, partition: int | str, *, cursor: str | None = None, limit: int = 50
    ) -> SuspendedPage:
        """Suspended executions of a partition, those that time out first in front."""
        index = validate.validate_flow_partition(partition, self.runtime.partitions)
        wanted = min(validation.integer("limit", limit, least=0), MAX_PAGE)
        where = (Where("partition", "=", index), Where("due_at", "set"))
        scan = Scan(Suspension, where, ("due_at", "execution_id"), limit=wanted + 1)
        if cursor is not None:
            after = await self._place(scan, validate.validate_execution_id(cursor))
            if after is None:
                return SuspendedPage([])
            scan = msgspec.structs.replace(scan, after=after)
        rows = await self.runtime.scan(scan) if wanted else []
        entries = [SuspendedEntry(row.execution_id, row.due_at, row.reason_code or "") for row in rows[:wanted]]
        return SuspendedPage(entries, entries[-1].execution_id if len(rows) > wanted else None)

    async def _place(self, scan: Scan, cursor: str) -> tuple[int, str] | None:
        """Where to go on after an execution, suspended or not; one that is gone is passed by its id alone."""
        loaded = await self.runtime.load((Read(Suspension, (cursor,)),))
        root: Suspension | None = first(loaded.rows[0])
        if root is not None and root.suspension_id is not None:
            return (NO_TIMEOUT if root.timeout_at is None else root.timeout_at), cursor
        where = (*scan.where, Where("execution_id", ">", cursor))
        following = await self.runtime.scan(msgspec.structs.replace(scan, where=where, limit=1))
        return (following[0].due_at, cursor) if following else None


def _acceptable(args: SuspendArgs) -> SuspendArgs:
    args = validate_suspension.validate_suspend(args)
    if refused := arguments.check_arguments(args):
        raise refused
    return args


async def decide_on_waitpoint(runtime: Runtime, waitpoint: Waitpoint, decide: WaitpointRule) -> bool:
    """Decide on a waitpoint together with its execution and suspension."""
    owner = waitpoint.execution_id
    reads = (
        Read(Execution, (owner,)),
        Read(Suspension, (owner,)),
        Read(Waitpoint, (waitpoint.waitpoint_id, waitpoint.partition)),
    )
    return await runtime.decide_and_commit(
        reads, lambda rows, now: decide(first(rows[0]), first(rows[1]), first(rows[2]), now)
    )
