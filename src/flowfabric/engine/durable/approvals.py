"""The inbox of approvals: what durable functions ask people, suspended or not, in one read."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric.engine.runtime.read_set import ReadSet, load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation.execution_filter import validate_namespaces
from flowfabric.model.execution import Execution
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.suspension import Signal, Suspension
from flowfabric.rules import validation
from flowfabric.rules.durable import approvals
from flowfabric.rules.durable.approvals import Approval
from flowfabric.rules.suspension import state as wait_state
from flowfabric.stores.queries import Scan, Where

MAX_SKEW_MS = 60_000
MAX_APPROVALS = 200  # executions that one call reads


class ApprovalPage(msgspec.Struct, frozen=True):
    """Open approvals, and the cursor of the next page.

    A page may hold fewer than were asked for, or none, and still have a cursor: some of what was read has ended.
    """

    approvals: list[Approval]
    next_cursor: str | None = None


class ApprovalInbox:
    """Operations that list approvals."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def list_approvals(
        self,
        *,
        execution_id: str | None = None,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> ApprovalPage:
        """List what executions, or this one, ask people, the first to time out first, after the cursor."""
        wanted = validate_namespaces(namespace, namespaces)
        # Expired gates ask nobody and are skipped. The estimate of the store's time may be early or late.
        after = (max(0, self.runtime.estimate.now() - MAX_SKEW_MS), "") if cursor is None else _parse_cursor(cursor)
        size = min(validation.integer("limit", limit, least=0), MAX_APPROVALS)
        if not size:
            return ApprovalPage([])
        if execution_id is not None:
            asking = await load_one(self.runtime, Suspension, validate.validate_execution_id(execution_id))
            return ApprovalPage(await self._describe([] if asking is None else [asking], wanted))
        scan = Scan(Suspension, (Where("asks_until", "set"),), ("asks_until", "execution_id"), after, size + 1)
        found: list[Suspension] = await self.runtime.scan(scan)
        last = found[size - 1] if len(found) > size else None
        return ApprovalPage(
            await self._describe(found[:size], wanted),
            None if last is None else f"{last.asks_until}/{last.execution_id}",
        )

    async def _describe(self, asking: Sequence[Suspension], wanted: tuple[str, ...] | None) -> list[Approval]:
        if not asking:
            return []
        ids = [suspension.execution_id for suspension in asking]
        waitpoints = {
            waitpoint: suspension.execution_id
            for suspension in asking
            for gate in wait_state.open_gates(suspension).values()
            for waitpoint, _ in gate.waitpoints
        }
        reads = ReadSet()
        rows = reads.each(Execution, ((name,) for name in ids))
        signals = {
            waitpoint: reads.many(Signal, execution_id, waitpoint) for waitpoint, execution_id in waitpoints.items()
        }
        found = await self.runtime.load(reads)
        loaded, now = found.rows, found.now
        kinds = await self.runtime.kinds(ids)
        votes = {waitpoint: of_waitpoint(loaded) for waitpoint, of_waitpoint in signals.items()}
        return [
            approvals.describe_approval(row, kinds.get(row.execution_id, ""), name, gate, votes)
            for row, suspension in zip(rows(loaded), asking, strict=True)
            if row is not None and row.lifecycle_phase is not LifecyclePhase.TERMINAL
            if wanted is None or row.namespace in wanted
            for name, gate in approvals.approval_gates(suspension, now).items()
        ]


def _parse_cursor(cursor: object) -> tuple[int, str]:
    instant, execution_id = validate.parse_cursor(cursor, "approvals")
    return instant, validate.validate_execution_id(execution_id)
