"""Create one execution, in a commit of its own or in a transaction of the caller."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.commit_queue import result_of
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime, UnknownOutcome
from flowfabric.engine.runtime.wakeups import lane_topic
from flowfabric.model.answers import execution as answers
from flowfabric.model.change import Insert, Upsert
from flowfabric.model.execution import Execution, IdempotencyKey
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution.create import (
    CreateExecution,
    PolicyDefaults,
    create,
)
from flowfabric.stores.port import TransactionView

CreateAnswer = answers.Created | answers.Duplicate


async def create_one(
    runtime: Runtime,
    ask: CreateExecution,
    *,
    assume_absent: bool = False,
    unknown_outcomes: tuple[UnknownOutcome, ...] = (),
) -> CreateAnswer:
    """Create one execution; `assume_absent` skips the load of its id and key if this process knows the lane."""
    reads, decide = _create_decision(runtime, ask)
    assume_absent = assume_absent and runtime.knows_lane(ask.lane_id)
    return await runtime.decide_and_commit(
        reads,
        decide,
        assumed_rows=[[] for _ in reads] if assume_absent else None,
        unknown_outcomes=unknown_outcomes,
    )


async def create_in_transaction(runtime: Runtime, view: TransactionView, ask: CreateExecution) -> CreateAnswer:
    """Create one execution in a caller's transaction; it becomes visible when that commits."""
    reads, decide = _create_decision(runtime, ask)
    rows, now = None, runtime.estimate.now()
    while True:
        decision = decide([] if rows is None else rows, now)
        if decision.change is None:
            if rows is not None:
                return decision.unwrap(now)
        else:
            change = msgspec.structs.replace(decision.change, id=runtime.minter.change_id())
            committed = result_of(await view.commit(change))
            if isinstance(committed, errors.FabricError):
                raise committed
            if committed is not None:
                queues = {
                    write.row.line
                    for write in change.writes
                    if isinstance(write, Insert | Upsert) and isinstance(write.row, Execution)
                }
                await view.notify(frozenset(lane_topic(queue.lane_id) for queue in queues if queue is not None))
                return decision.unwrap(committed)
        loaded = await view.load(reads)
        rows, now = loaded.rows, loaded.now


def defaults_of(runtime: Runtime) -> PolicyDefaults:
    """Return the values for settings that a policy leaves out."""
    return PolicyDefaults(runtime.settings.retention_ms, runtime.settings.ageing_ms)


def _create_decision(
    runtime: Runtime, ask: CreateExecution
) -> tuple[ReadSet, Callable[[Rows, int], Decision[CreateAnswer]]]:
    """Return the rows that a create reads, and its decision on them."""
    reads = ReadSet()
    existing = reads.one(Execution, ask.execution_id)
    key = reads.one(IdempotencyKey, ask.partition, ask.digest) if ask.idempotency_key else None

    def decide(rows: Rows, now: int) -> Decision[CreateAnswer]:
        key_row = None if key is None else key(rows)
        return create(existing(rows), key_row, ask, now, defaults=defaults_of(runtime))

    return reads, decide
