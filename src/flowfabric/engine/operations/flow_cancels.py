"""Cancelling a flow: the header, the members, and the wait for them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.flows.bulk_cancel import load_readable
from flowfabric.engine.flows.join_resolver import Downstream
from flowfabric.engine.operations.flows import FlowOperations
from flowfabric.engine.runtime.after_commit import Rows, first
from flowfabric.engine.validation import execution as validate
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CancellationPolicy, Dependency, EdgeGroup, Flow, FlowMember, PendingSiblingCancel
from flowfabric.model.text import pluralize
from flowfabric.rules import validation
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.stores.queries import Read

logger = logging.getLogger("flowfabric.flows")

MAX_WAIT_MS = 300_000
MAX_LISTED_MEMBERS = 1000  # members that the answer to a repeated cancel lists
BACKGROUND_GRACE_S = 15.0

FlowCancel = flow_answers.FlowCancelled | flow_answers.CancellationScheduled | flow_answers.PartiallyCancelled


class NoWait(msgspec.Struct, frozen=True):
    """Answer when the flow is marked; members are cancelled in the background."""


class WaitTimeout(msgspec.Struct, frozen=True):
    """Answer when every member is dealt with, or raise when that takes longer."""

    timeout_ms: int


class WaitIndefinite(msgspec.Struct, frozen=True):
    """Answer when every member is dealt with; "for ever" ends after five minutes."""


Wait = NoWait | WaitTimeout | WaitIndefinite
NO_WAIT = NoWait()


class FlowCancelOperations(FlowOperations):
    """How a flow and its members are cancelled."""

    _background: set[asyncio.Task[None]]

    async def cancel_flow(
        self,
        flow_id: str,
        *,
        policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        reason: str = "",
        wait: Wait = NO_WAIT,
    ) -> FlowCancel:
        """Cancel a flow and those of its members that the policy selects; a repeated call changes nothing."""
        wanted = validate.value_or_raise(flow_cancel.parse_cancellation_policy(policy))
        longest_ms = max_wait_ms_of(wait)
        why = validation.text("reason", reason)
        answer = await self.cancel_flow_header(flow_id, reason=why, policy=wanted)
        if isinstance(answer, flow_answers.HeaderAlreadyTerminal):
            stored = answer.stored_cancellation_policy or wanted
            return flow_answers.FlowCancelled(stored, answer.member_execution_ids[:MAX_LISTED_MEMBERS])
        everyone, chosen = answer.member_execution_ids, answer.selected_execution_ids
        if not chosen:
            return flow_answers.FlowCancelled(wanted, everyone)
        flow = validate.validate_flow_id(flow_id)
        work = self.bulk_canceller.cancel_members(flow, chosen, why or flow_cancel.FALLBACK_REASON)
        if longest_ms is None:
            self._in_background(work)
            return flow_answers.CancellationScheduled(wanted, len(everyone), everyone)
        try:
            failed = await asyncio.wait_for(work, longest_ms / 1000)
        except TimeoutError:
            raise errors.OperationTimeout("cancel_flow", longest_ms) from None
        if failed:
            return flow_answers.PartiallyCancelled(wanted, everyone, failed)
        return flow_answers.FlowCancelled(wanted, everyone)

    async def cancel_flow_header(
        self,
        flow_id: str,
        *,
        reason: str = "",
        policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        grace_ms: Any = flow_cancel.GRACE_MS,
    ) -> flow_answers.HeaderCancelled | flow_answers.HeaderAlreadyTerminal:
        """Mark a flow as cancelled and list the members to cancel; a reconciler sees to them after the grace."""
        flow = validate.validate_flow_id(flow_id)
        wanted = validate.value_or_raise(flow_cancel.parse_cancellation_policy(policy))
        why = validation.text("reason", reason)
        if refused := flow_cancel.check_grace(grace_ms):
            raise refused

        async def members(rows: Rows) -> Rows:
            names = [member.execution_id for member in rows[1]]
            found = await load_readable(self.runtime, names)
            return [[row for row in found.values() if row is not None], [name for name in names if name not in found]]

        return await self.runtime.decide_and_commit(
            (Read(Flow, (flow,)), Read(FlowMember, (flow,))),
            lambda rows, _: flow_cancel.cancel_header(
                first(rows[0]),
                rows[1],
                {row.execution_id: row for row in rows[2]},
                unread=rows[3],
                reason=why,
                policy=wanted,
                grace_ms=grace_ms,
            ),
            load_more=members,
        )

    async def ack_cancel_member(self, flow_id: str, execution_id: str) -> None:
        """One member of a cancelled flow is done with; one that is not listed is done with already."""
        execution = validate.validate_execution_id(execution_id)
        await self.bulk_canceller.acknowledge(validate.validate_flow_id(flow_id), [execution])

    async def drain_sibling_cancel_group(self, flow_id: str, downstream: str) -> flow_answers.SiblingDrain:
        """Clear what a fired join had flagged for cancelling."""
        return await self.bulk_canceller.drain(_child(flow_id, downstream))

    async def reconcile_sibling_cancel_group(self, flow_id: str, downstream: str) -> flow_answers.SiblingReconcile:
        """Finish a drain that a crash interrupted; cancels nobody."""
        child = _child(flow_id, downstream)

        async def listed(rows: Rows) -> Rows:
            names = flow_cancel.siblings_to_cancel(rows[1][0]) if rows[1] else []
            return [[row for each in await self._rows_of(names) for row in each]]

        if (await self.runtime.load((Read(PendingSiblingCancel, child),))).rows[0]:
            await self.bulk_canceller.resolve_unrecorded_outcomes(child)
        return await self.runtime.decide_and_commit(
            (Read(PendingSiblingCancel, child), Read(EdgeGroup, child), Read(Dependency, (child.execution_id,))),
            lambda rows, _: flow_cancel.reconcile_siblings(
                first(rows[0]),
                first(rows[1]),
                {row.execution_id: row for row in rows[3]},
                rows[2],
            ),
            load_more=listed,
        )

    async def _rows_of(self, names: list[str]) -> Rows:
        if not names:
            return []
        return (await self.runtime.load([Read(Execution, (name,)) for name in names])).rows

    def _in_background(self, work: Any) -> None:
        async def run() -> None:
            try:
                failed = await work
            except errors.FabricError as fault:
                logger.warning("cancelling members was left to the reconciler: %s", fault)
            else:
                if failed:
                    logger.warning("the cancel of %s was left to the reconciler", pluralize(len(failed), "member"))

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def finish_background_cancels(self, grace_s: float = BACKGROUND_GRACE_S) -> int:
        """Let cancels that are under way come to their end; how many were cut off, for the reconciler to finish."""
        if not self._background:
            return 0
        _, late = await asyncio.wait(self._background, timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return len(late)


def max_wait_ms_of(wait: Wait) -> int | None:
    """How long a caller waits at most; None for one that does not."""
    match wait:
        case NoWait():
            return None
        case WaitTimeout(timeout_ms=timeout_ms):
            return validation.duration_ms("timeout_ms", timeout_ms, least=0)
        case WaitIndefinite():
            return MAX_WAIT_MS
        case _:
            raise errors.InvalidInput("wait: none of NoWait, WaitTimeout, WaitIndefinite")


def _child(flow_id: str, downstream: str) -> Downstream:
    return Downstream(validate.validate_flow_id(flow_id), validate.validate_member_id("downstream", downstream))
