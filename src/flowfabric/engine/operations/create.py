"""Create one execution, in a commit of its own or in a transaction of the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.commit_queue import result_of
from flowfabric.engine.runtime.lane_spread_cache import LaneSpreads
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.unknown_outcomes import UnknownOutcome
from flowfabric.engine.runtime.wakeups import lane_topic
from flowfabric.engine.validation import execution as validate
from flowfabric.model.answers import execution as answers
from flowfabric.model.change import Insert, Upsert
from flowfabric.model.execution import Execution, IdempotencyKey
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution.create import (
    CreateExecution,
    PolicyDefaults,
    create,
)
from flowfabric.rules.scheduling.lane_spread import KeyPlace
from flowfabric.stores.port import TransactionView

LATE_CREATE_PAUSE_S = 0.05

CreateAnswer = answers.Created | answers.Duplicate


class ExecutionCreator(Protocol):
    """The part of an engine that creates single executions, in the store or on a server."""

    async def create(self, ask: CreateExecution) -> answers.Created | answers.Duplicate: ...

    async def create_execution(
        self,
        *,
        execution_id: str,
        namespace: str = "default",
        lane_id: str = "default",
        execution_kind: str = "task",
        input_payload: bytes = b"",
        payload_encoding: str | None = None,
        priority: int = 0,
        creator_identity: str = "",
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
        policy: str | Mapping[str, Any] | None = None,
        delay_until: int | None = None,
        execution_deadline_at: int | None = None,
        parent_id: str | None = None,
        key_lane: str | None = None,
    ) -> answers.Created | answers.Duplicate:
        """Create an execution; return Duplicate if its id or its idempotency key exists.

        Mint the id of a run with a key with that key (`new_execution_id`); `KeyElsewhere` says that the spread of the
        lane has changed since. `key_lane` is the lane that the id was minted for, if not `lane_id`. A child is created
        on the partition of its parent, which its completion is delivered to.
        """
        return await self.create(
            CreateExecution(
                execution_id=execution_id,
                partition=0,
                namespace=namespace,
                lane_id=lane_id,
                execution_kind=execution_kind,
                input_payload=input_payload,
                payload_encoding=payload_encoding,
                priority=priority,
                creator_identity=creator_identity,
                idempotency_key=idempotency_key,
                tags={} if tags is None else tags,  # type: ignore[arg-type]
                policy=validate.policy_text(policy),
                delay_until=delay_until,
                execution_deadline_at=execution_deadline_at,
                parent_id=parent_id,
                key_lane=key_lane,
            )
        )


async def create_one(
    runtime: Runtime,
    lanes: LaneSpreads,
    ask: CreateExecution,
    *,
    assume_absent: bool = False,
    unknown_outcomes: tuple[UnknownOutcome, ...] = (),
) -> CreateAnswer:
    """Create one execution; `assume_absent` skips the load of its id and key if this process knows the lane."""

    async def attempt(place: KeyPlace | None) -> CreateAnswer:
        reads, decide = _create_decision(runtime, ask, place)
        is_absent = assume_absent and runtime.knows_lane(ask.lane_id)
        return await runtime.decide_and_commit(
            reads,
            decide,
            assumed_rows=[[] for _ in reads] if is_absent else None,
            unknown_outcomes=unknown_outcomes,
        )

    return await _create_at_key_place(lanes, ask, attempt)


async def create_in_transaction(
    runtime: Runtime, lanes: LaneSpreads, view: TransactionView, ask: CreateExecution
) -> CreateAnswer:
    """Create one execution in a caller's transaction; it becomes visible when that commits."""
    return await _create_at_key_place(lanes, ask, lambda place: _create_in_transaction(runtime, view, ask, place))


async def _create_at_key_place(
    lanes: LaneSpreads, ask: CreateExecution, attempt: Callable[[KeyPlace | None], Awaitable[CreateAnswer]]
) -> CreateAnswer:
    """Attempt a create on the partition of its key, again if the spread of the lane has changed meanwhile."""
    place = None
    while True:
        if ask.idempotency_key:
            await lanes.prepare()
            place = lanes.place(ask)
            if place is not None and (known := await lanes.find_key(ask, place)) is not None:
                return answers.Duplicate(known)
        try:
            return await attempt(place)
        except errors.KeyElsewhere:
            if place is None or not place.is_here:
                raise
        await _read_lanes_again(lanes)


async def _read_lanes_again(lanes: LaneSpreads) -> None:
    """Read the lanes after a create came too late for the rows that it relied on; clocks of servers may differ."""
    await asyncio.sleep(LATE_CREATE_PAUSE_S)
    await lanes.refresh()


async def _create_in_transaction(
    runtime: Runtime, view: TransactionView, ask: CreateExecution, place: KeyPlace | None
) -> CreateAnswer:
    reads, decide = _create_decision(runtime, ask, place)
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
    runtime: Runtime, ask: CreateExecution, place: KeyPlace | None
) -> tuple[ReadSet, Callable[[Rows, int], Decision[CreateAnswer]]]:
    """Return the rows that a create reads, and its decision on them."""
    reads = ReadSet()
    existing = reads.one(Execution, ask.execution_id)
    key = reads.one(IdempotencyKey, ask.partition, ask.digest) if ask.idempotency_key else None

    def decide(rows: Rows, now: int) -> Decision[CreateAnswer]:
        key_row = None if key is None else key(rows)
        return create(existing(rows), key_row, ask, now, defaults=defaults_of(runtime), place=place)

    return reads, decide
