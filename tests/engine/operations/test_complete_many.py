"""Completing many executions in one call: each outcome is independent of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import Engine, errors
from flowfabric.clock import ManualClock
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.engine.runtime.wakeups import FEED_TOPIC, completion_topic
from flowfabric.handles import BackendTag, Handle
from flowfabric.ids import FlowId, mint_for_flow
from flowfabric.model.answers.execution import Claimed, Completed
from flowfabric.model.states import PublicState
from flowfabric.rules.validation import MAX_PAYLOAD_BYTES
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from flowfabric.testing.flaky_store import FlakyStore, Loss
from tests.executions import create_request
from tests.scenarios.checked_store import dump

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1", "lease_ttl_ms": 30_000}


async def claim_some(engine: Engine, count: int) -> list[Claimed]:
    for _ in range(count):
        await engine.create_execution(execution_id=engine.new_execution_id())
    return await engine.claim_many("default", count, **WORKER)


async def test_each_execution_is_completed_with_its_own_result(store: Store) -> None:
    engine = Engine(store)
    claimed = await claim_some(engine, 3)
    answers = await engine.complete_many([(one.handle, b"%d" % place) for place, one in enumerate(claimed)])
    assert answers == [Completed(one.execution_id) for one in claimed]
    assert [(await engine.get_execution_result(one.execution_id)) for one in claimed] == [b"0", b"1", b"2"]


async def test_complete_many_writes_the_same_rows_as_single_completions(store: Store, clock: ManualClock) -> None:
    alone = MemoryStore(clock)
    for place, completing in enumerate((store, alone)):
        engine = Engine(completing)
        await engine.create_execution(execution_id="{fp:86}:11111111-1111-4111-8111-111111111111")
        (claimed,) = await engine.claim_many("default", 1, **WORKER)
        if place:
            await engine.complete(claimed.handle, result=b"R", encoding="json")
        else:
            await engine.complete_many([(claimed.handle, b"R")], encoding="json")
    one, other = await dump(store), await dump(alone)
    assert {name: len(rows) for name, rows in one.items()} == {name: len(rows) for name, rows in other.items()}
    assert [row.encoding for row in one["ff_result"]] == ["json"]


async def test_a_waiter_for_one_of_the_results_is_woken(store: Store) -> None:
    engine = Engine(store)
    claimed = await claim_some(engine, 3)
    first, second, third = (engine.runtime.wakeups.subscribe(completion_topic(one.execution_id)) for one in claimed)
    feed = engine.runtime.wakeups.subscribe(FEED_TOPIC)
    await engine.complete_many([(one.handle, None) for one in claimed[:2]])
    assert [hint.done() for hint in (first, second, third, feed)] == [True, True, False, True]


async def test_completions_are_counted_although_no_caller_waits_for_them(store: Store) -> None:
    engine = Engine(store)
    claimed = await claim_some(engine, 2)
    before = engine.runtime.wakeups.completion_count
    feed = engine.runtime.wakeups.subscribe(FEED_TOPIC)
    await engine.complete_many([(one.handle, None) for one in claimed])
    assert engine.runtime.wakeups.completion_count - before == 2
    assert feed.done()


async def test_completing_no_executions_returns_no_answers(store: Store) -> None:
    assert await Engine(store).complete_many([]) == []


async def test_a_refusal_does_not_affect_the_other_answers(store: Store, clock: ManualClock) -> None:
    engine = Engine(store)
    good, late, big, again = await claim_some(engine, 4)
    await engine.revoke_lease(late.execution_id)
    foreign = Handle(
        BackendTag.SQLITE if store.tag is not BackendTag.SQLITE else BackendTag.MEMORY, good.handle.kind, b""
    )
    answers = await engine.complete_many(
        [
            (late.handle, b"no"),
            (good.handle, b"yes"),
            (big.handle, bytes(MAX_PAYLOAD_BYTES + 1)),
            (foreign, None),
            (again.handle, b"first"),
            (again.handle, b"second"),
        ]
    )
    assert [type(answer) for answer in answers] == [
        errors.LeaseRevoked,
        Completed,
        errors.PayloadTooLarge,
        errors.HandleFromOtherBackend,
        Completed,
        Completed,
    ]
    assert await engine.get_execution_result(again.execution_id) == b"first"
    assert await engine.read_execution_state(big.execution_id) is PublicState.ACTIVE
    assert await engine.read_execution_state(late.execution_id) is PublicState.ACTIVE


async def test_executions_claimed_by_another_process_are_completed(store: Store) -> None:
    claimed = await claim_some(Engine(store), 2)
    assert await Engine(store).complete_many([(one.handle, None) for one in claimed]) == [
        Completed(one.execution_id) for one in claimed
    ]


async def test_a_zombie_receives_the_reason_and_writes_nothing(store: Store, clock: ManualClock) -> None:
    zombie = Engine(store)
    (claimed,) = await claim_some(zombie, 1)
    clock.advance_ms(30_000)
    heir = Engine(store)
    (taken,) = await heir.claim_many("default", 1, **WORKER)
    (answer,) = await zombie.complete_many([(claimed.handle, b"late")])
    assert isinstance(answer, errors.StaleLease)
    await heir.complete(taken.handle, result=b"R")
    assert await heir.get_execution_result(claimed.execution_id) == b"R"


async def test_a_label_that_is_too_long_is_refused_before_anything_is_written(store: Store) -> None:
    engine = Engine(store)
    (claimed,) = await claim_some(engine, 1)
    with pytest.raises(errors.InvalidInput, match="result_encoding"):
        await engine.complete_many([(claimed.handle, b"R")], encoding="x" * 5000)
    assert await engine.read_execution_state(claimed.execution_id) is PublicState.ACTIVE


async def test_answers_are_built_after_the_unblocked_claims_are_sent(store: Store) -> None:
    engine = Engine(store)
    flow_id = FlowId("11111111-1111-4111-8111-111111111111")
    first, second = (mint_for_flow(flow_id, engine.partitions, engine.minter) for _ in range(2))
    nodes = [create_request(name) for name in (first, second)]
    await engine.create_flow_graph(flow_id, nodes, [GraphEdge(first, second)])
    (claimed,) = await engine.claim_many("default", 1, **WORKER)
    end = engine.runtime.wakeups.subscribe(completion_topic(first))
    seen: list[bool] = []

    def answered() -> None:
        seen.append(end.done())
        asyncio.get_running_loop().call_soon(lambda: seen.append(end.done()))

    assert await engine.complete_many([(claimed.handle, b"R")], answered=answered) == [Completed(first)]
    assert end.done()
    await asyncio.sleep(0)
    assert seen == [False, store.executes_in_order], (
        "where the store keeps the order, going on is part of the same commit"
    )
    assert [one.execution_id for one in await engine.claim_many("default", 2, **WORKER)] == [second]


@pytest.mark.parametrize("loss", [*Loss])
@pytest.mark.parametrize("known", [True, False])
async def test_the_first_result_for_two_handles_of_one_execution_wins_whatever_is_lost(
    store: Store, loss: Loss, known: bool
) -> None:
    flaky = FlakyStore(store)
    claiming = Engine(flaky)
    claimed = await claim_some(claiming, 3)
    engine = claiming if known else Engine(flaky)
    results = [(one.handle, b"%d of %d" % (turn, place)) for turn in range(3) for place, one in enumerate(claimed)]
    flaky.lose("commit", loss, times=2)

    answers = await engine.complete_many(results)

    assert flaky.losses
    assert answers == [Completed(one.execution_id) for _ in range(3) for one in claimed]
    for place, one in enumerate(claimed):
        assert await engine.get_execution_result(one.execution_id) == b"0 of %d" % place


async def test_handles_of_one_execution_are_answered_in_order(store: Store, clock: ManualClock) -> None:
    zombie = Engine(store)
    [stale] = await claim_some(zombie, 1)
    clock.advance_ms(30_000)
    heir = Engine(store)
    [current] = await heir.claim_many("default", 1, **WORKER)

    answers = await heir.complete_many([(stale.handle, b"late"), (current.handle, b"R"), (stale.handle, b"later")])

    one_by_one = [type(answer) for answer in answers]
    assert one_by_one == [errors.StaleLease, Completed, errors.ExecutionNotActive]
    assert await heir.get_execution_result(current.execution_id) == b"R"
