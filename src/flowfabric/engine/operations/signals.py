"""Waitpoints and signals: how the world outside reaches waiting work."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.operations.signing_keys import KEYSTORE, SIGNING_KEYS, SigningKeyOperations
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle
from flowfabric.model.execution import Execution
from flowfabric.model.suspension import IdempotencyRecord, Signal, Suspension, Waitpoint
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import signals
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from flowfabric.rules.suspension.signals import (
    LOG_LENGTH,
    SIGNAL_CAP,
    Accepted,
    DuplicateDelivery,
    SignalArgs,
    SignalRows,
)
from flowfabric.rules.suspension.state import ObservedSignal
from flowfabric.rules.suspension.waitpoints import PROACTIVE, PendingWaitpoint, WaitpointRecord, WaitpointView
from flowfabric.stores.queries import Read, Scan, Where

DEFAULT_PAGE, MAX_PAGE = 100, 1000


class UnknownWaitpoint(errors.InvalidToken):
    """The bridge found no token for this waitpoint."""


class TokenMismatch(errors.InvalidToken):
    """The token that was presented is not the waitpoint's."""


class WaitpointPage(msgspec.Struct, frozen=True):
    """Open waitpoints, and the cursor of the next page when there is one."""

    entries: list[WaitpointView]
    next_cursor: str | None = None


class SignalOperations(SigningKeyOperations):
    """What can be done with waitpoints and signals."""

    # -- waitpoints -----------------------------------------------------------------------------------------------

    async def create_waitpoint(self, handle: Handle, waitpoint_key: str, expires_in: int) -> PendingWaitpoint:
        """A waitpoint to hand out before the wait; what is sent to it until `expires_in` ms from now is kept."""
        fields = self.runtime.handle_fields(handle)
        key = validation.text("waitpoint_key", waitpoint_key)
        length = validation.integer("expires_in", expires_in, least=0)
        fence, waitpoint_id = Fence(fields.lease_id, fields.lease_epoch, fields.attempt_id), self.runtime.minter.uuid()
        execution = fields.execution_id

        def decide(rows: list[list[Any]], now: int) -> Decision[PendingWaitpoint]:
            return waitpoint_rules.create_waitpoint(
                _first(rows[0]),
                _first(rows[1]),
                self.unseal_loaded_keys(rows[3]),
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
        return await self._close(
            found[0], lambda row, root, one, now: waitpoint_rules.close_waitpoint(row, root, one, why, now)
        )

    async def expire_pending_waitpoint(self, waitpoint: Waitpoint) -> bool:
        """The sweep's form: close a waitpoint that was not activated in time."""
        return await self._close(waitpoint, waitpoint_rules.expire_pending)

    async def _close(self, waitpoint: Waitpoint, decide: Any) -> bool:
        owner = waitpoint.execution_id
        wants = (
            Read(Execution, (owner,)),
            Read(Suspension, (owner,)),
            Read(Waitpoint, (waitpoint.waitpoint_id, waitpoint.partition)),
        )
        closed: bool = await self.runtime.decide_and_commit(
            wants, lambda rows, now: decide(_first(rows[0]), _first(rows[1]), _first(rows[2]), now)
        )
        return closed

    async def describe_waitpoint(self, execution_id: str, waitpoint_id: str) -> WaitpointRecord | None:
        """A waitpoint of an execution, open or closed; None when there is none."""
        execution = validate.validate_execution_id(execution_id)
        key = (validate_suspension.validate_waitpoint_id(waitpoint_id), ids.partition_of(execution))
        loaded = await self.runtime.load((Read(Waitpoint, key), Read(Suspension, (execution,))))
        found = _first(loaded.rows[0])
        if found is None or found.execution_id != execution:
            return None
        return waitpoint_rules.waitpoint_record(found, _first(loaded.rows[1]), loaded.now)

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
        root, entries = _first(loaded.rows[1]), list[WaitpointView]()
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
        found = _first((await self.runtime.load((Read(Waitpoint, (identity, index)),))).rows[0])
        if found is None:
            return None
        loaded = await self.runtime.load((Read(Suspension, (found.execution_id,)), SIGNING_KEYS))
        return waitpoint_rules.token_if_open(
            found, _first(loaded.rows[0]), self.unseal_loaded_keys(loaded.rows[1]), loaded.now
        )

    async def read_token_of(self, execution_id: str, waitpoint_id: str) -> waitpoint_tokens.WaitpointToken | None:
        """The same for a waitpoint of this very execution: one look at the same rows, whether it exists or not."""
        execution, identity = (
            validate.validate_execution_id(execution_id),
            validate_suspension.validate_waitpoint_id(waitpoint_id),
        )
        key = (identity, ids.partition_of(execution))
        loaded = await self.runtime.load((Read(Waitpoint, key), Read(Suspension, (execution,)), SIGNING_KEYS))
        found, keys = _first(loaded.rows[0]), self.unseal_loaded_keys(loaded.rows[2])
        if found is None or found.execution_id != execution:
            return None
        return waitpoint_rules.token_if_open(found, _first(loaded.rows[1]), keys, loaded.now)

    async def is_token_of(self, execution_id: str, waitpoint_id: str, token: waitpoint_tokens.WaitpointToken) -> bool:
        """True if a waitpoint of this execution, open or closed, was given this token; nothing is written."""
        execution, identity = (
            validate.validate_execution_id(execution_id),
            validate_suspension.validate_waitpoint_id(waitpoint_id),
        )
        loaded = await self.runtime.load((Read(Waitpoint, (identity, ids.partition_of(execution))), SIGNING_KEYS))
        found, keys, shown = _first(loaded.rows[0]), self.unseal_loaded_keys(loaded.rows[1]), token.reveal()
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

    # -- signals --------------------------------------------------------------------------------------------------

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
            row, root, waitpoint, _, *remembered = map(_first, rows)
            scene = SignalRows(row, root, waitpoint, _first(remembered), self.unseal_loaded_keys(rows[3]), call)
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
        row, found = _first(loaded.rows[0]), _first(loaded.rows[1])
        if row is None:
            raise errors.NotFound("execution")
        if lane_id != row.lane_id:
            raise errors.InvalidInput(f"lane_mismatch: the execution is in lane {row.lane_id}")
        if found is None or found.execution_id != execution:
            raise errors.NotFound("waitpoint")
        token = waitpoint_tokens.remint_token(
            self.unseal_loaded_keys(loaded.rows[3]), found.token_kid, execution, identity
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
        root = _first(loaded.rows[0])
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


def _first(rows: list[Any]) -> Any:
    return rows[0] if rows else None
