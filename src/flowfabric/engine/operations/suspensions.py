"""Suspend and resume: how work waits without a worker, and how it comes back."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.operations.signing_keys import KEYSTORE, SigningKeyOperations
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
from flowfabric.rules.suspension import arguments, resume, views
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.rules.suspension.arguments import FreshWaitpoint, SuspendArgs, UsePendingWaitpoint
from flowfabric.rules.suspension.resume import Resumed, SuspensionExpiry
from flowfabric.rules.suspension.suspend import SuspendOutcome, SuspendRows
from flowfabric.rules.suspension.views import SuspensionRecord
from flowfabric.stores.queries import Read, Scan, Where

MAX_PAGE = 1000
TRIGGERS = ("signal", "operator", "auto_resume")


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


class SuspendedEntry(msgspec.Struct, frozen=True):
    """A suspended execution in a list; the time is that of its timeout."""

    execution_id: str
    suspended_at_ms: int
    reason: str


class SuspendedPage(msgspec.Struct, frozen=True):
    entries: list[SuspendedEntry]
    next_cursor: str | None = None


class SuspensionOperations(SigningKeyOperations):
    """What can be done to waiting work."""

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
        fence = Fence(fields.lease_id, fields.lease_epoch, fields.attempt_id)
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
            signers[:] = self.unseal_loaded_keys(rows[3]) if rows is not trusting else self.unseal_keys(rows[3])
            found = [one for some in rows[4:] for one in some if isinstance(one, Waitpoint)]
            found.sort(key=lambda one: one.partition == partition)  # that of its own partition is the one that is meant
            scene = SuspendRows(
                row=_first(rows[0]),
                root=_first(rows[1]),
                remembered=None if remembers is None else _first(rows[remembers]),
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
        seen, keys = self.runtime._lease_cache.get(execution_id), self.cached_keys()
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
            lambda rows, now: decide(_first(rows[0]), _first(rows[1]), now),
        )

    async def describe_suspension(self, execution_id: str) -> SuspensionRecord | None:
        """The open suspension of an execution, or the last one; None when it never waited."""
        execution = validate.validate_execution_id(execution_id)
        root: Suspension | None = _first((await self.runtime.load((Read(Suspension, (execution,)),))).rows[0])
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
        root: Suspension | None = _first(loaded.rows[0])
        if root is not None and root.suspension_id is not None:
            return (NO_TIMEOUT if root.timeout_at is None else root.timeout_at), cursor
        where = (*scan.where, Where("execution_id", ">", cursor))
        first = await self.runtime.scan(msgspec.structs.replace(scan, where=where, limit=1))
        return (first[0].due_at, cursor) if first else None


def _acceptable(args: SuspendArgs) -> SuspendArgs:
    args = validate_suspension.validate_suspend(args)
    if refused := arguments.check_arguments(args):
        raise refused
    return args


def _first(rows: list[Any]) -> Any:
    return rows[0] if rows else None
