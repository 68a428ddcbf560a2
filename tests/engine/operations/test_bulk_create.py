"""Bulk create: batches overlap, answers keep their order, and no execution is created twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from flowfabric import CreateExecution, Engine, FabricError, StoreUnavailable
from flowfabric.clock import ManualClock
from flowfabric.engine.operations.bulk_create import MIN_TEMPLATE_BATCH
from flowfabric.errors import InvalidPolicyJson
from flowfabric.model.answers.execution import Created, Duplicate
from flowfabric.model.change import Change
from flowfabric.model.states import PublicState
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from flowfabric.stores.verdicts import Verdict
from tests.engine.lossy_store import Loss, LossyStore
from tests.executions import create_request


class SmallBatchStore(MemoryStore):
    """A store with small batches that records how many are in flight and can be unavailable for a while."""

    concurrent_commits = 2
    batch_limit = 10

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.under_way = self.most = self.batches = self.away = 0

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        self.batches += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(5):  # A round trip takes a few iterations of the loop.
            await asyncio.sleep(0)
        self.under_way -= 1
        if self.away:
            self.away -= 1
            raise StoreUnavailable("away", backend="memory", source="transport", in_doubt=False)
        return await super().commit(changes, topics)


def create_requests(engine: Engine, count: int, **more: str) -> list[CreateExecution]:
    return [create_request(engine.new_execution_id(), **more) for _ in range(count)]


async def stored_ids(engine: Engine) -> int:
    return len((await engine.search_executions(limit=1000)).executions)


async def test_a_batch_is_decided_while_the_previous_one_is_in_flight(clock: ManualClock) -> None:
    store = SmallBatchStore(clock)
    engine = Engine(store)
    await engine.create(create_requests(engine, 1)[0])  # the first of its lane

    answers = await engine.create_executions(wanted := create_requests(engine, 55))

    assert [answer.execution_id for answer in answers] == [ask.execution_id for ask in wanted]
    assert store.batches == 1 + 6
    assert store.most == store.concurrent_commits + 1


async def test_the_first_execution_of_a_lane_is_created_alone_before_the_rest(clock: ManualClock) -> None:
    store = SmallBatchStore(clock)
    engine = Engine(store)

    answers = await engine.create_executions(wanted := create_requests(engine, 55))

    assert [answer.execution_id for answer in answers] == [ask.execution_id for ask in wanted]
    assert {type(answer) for answer in answers} == {Created}
    assert store.batches <= 6 + 2


@pytest.mark.parametrize("away", [1, 2, 6])
async def test_a_store_that_is_unavailable_for_a_moment_costs_a_second_load(clock: ManualClock, away: int) -> None:
    store = SmallBatchStore(clock)
    engine = Engine(store)
    store.away = away

    answers = await engine.create_executions(create_requests(engine, 55))

    assert {type(answer) for answer in answers} == {Created}
    assert await stored_ids(engine) == 55
    assert store.batches < 6 + 60  # Changes that failed together are written together again.


async def test_the_first_of_two_with_one_key_wins(store: Store, clock: ManualClock) -> None:
    engine = Engine(store)
    first, second = create_requests(engine, 2, idempotency_key="k")

    assert await engine.create_executions([first, second, first]) == [
        Created(first.execution_id, "waiting"),  # type: ignore[arg-type]
        Duplicate(first.execution_id),
        Duplicate(first.execution_id),
    ]


async def test_the_first_of_two_wins_if_the_key_was_known_and_has_expired(store: Store, clock: ManualClock) -> None:
    engine = Engine(store)
    (old,) = create_requests(engine, 1, idempotency_key="k")
    await engine.create(old)
    clock.advance_ms(24 * 60 * 60 * 1000)
    first, second = create_requests(engine, 2, idempotency_key="k")

    answers = await engine.create_executions([first, second])

    assert answers[0] == Created(first.execution_id, "waiting")  # type: ignore[arg-type]
    assert answers[1] == Duplicate(first.execution_id)


async def test_a_change_that_waits_for_another_still_precedes_the_changes_behind_it(store: Store) -> None:
    engine = Engine(store)
    [first, second] = create_requests(engine, 2)
    keyed = msgspec.structs.replace(first, idempotency_key="k", policy='{"dedup_window_ms": 0}')
    follower = msgspec.structs.replace(second, idempotency_key="k", input_payload=b"the first of its id")

    answers = await engine.create_executions([keyed, follower, second])

    created = [Created(one.execution_id, PublicState.WAITING) for one in (first, second)]
    assert answers == [*created, Duplicate(second.execution_id)]
    assert (await engine.read_execution_context(second.execution_id)).input_payload == b"the first of its id"


async def test_a_refused_request_is_not_confused_with_a_later_one_of_the_same_id(store: Store) -> None:
    engine = Engine(store)
    [good] = create_requests(engine, 1)
    bad = msgspec.structs.replace(good, policy="{not json")

    refused, created = await engine.create_executions([bad, good])

    assert isinstance(refused, InvalidPolicyJson)
    assert created == Created(good.execution_id, PublicState.WAITING)


async def test_a_refusal_keeps_its_position_among_the_answers(store: Store) -> None:
    engine = Engine(store)
    good, bad, fine = create_requests(engine, 1), create_requests(engine, 1, policy="{"), create_requests(engine, 1)

    answers = await engine.create_executions([*good, *bad, *fine])

    assert isinstance(answers[1], FabricError)
    assert answers[1].kind == "invalid_policy_json"
    assert [type(answer) for answer in (answers[0], answers[2])] == [Created, Created]
    assert await stored_ids(engine) == 2


MANY = MIN_TEMPLATE_BATCH + 50


class RecordingStore(LossyStore):
    """A store that records how many changes each commit had."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.sent: list[int] = []

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        self.sent.append(len(changes))
        return await super().commit(changes, topics)


async def test_similar_executions_are_written_as_one_change(store: Store, clock: ManualClock) -> None:
    engine = Engine(watching := RecordingStore(store))
    await engine.create(create_requests(engine, 1)[0])

    answers = await engine.create_executions(wanted := create_requests(engine, MANY))

    assert answers == [Created(ask.execution_id, PublicState.WAITING) for ask in wanted]
    assert watching.sent[1:] == [2]  # The first alone, and all that resemble it.
    assert await stored_ids(engine) == MANY + 1


async def test_each_execution_of_a_bulk_change_keeps_its_own_input(store: Store) -> None:
    engine = Engine(watching := RecordingStore(store))
    await engine.create(create_requests(engine, 1)[0])
    inputs = [b"" if number % 7 == 3 else b"%d" % number for number in range(MANY)]
    wanted = [
        replace(ask, input_payload=given) for ask, given in zip(create_requests(engine, MANY), inputs, strict=True)
    ]

    await engine.create_executions(wanted)

    assert watching.sent[1:] == [2]
    kept = [await engine.read_execution_context(ask.execution_id) for ask in wanted]
    assert [one.input_payload for one in kept] == inputs


async def test_a_few_similar_executions_are_one_change_each(store: Store) -> None:
    engine = Engine(watching := RecordingStore(store))
    await engine.create(create_requests(engine, 1)[0])

    await engine.create_executions(create_requests(engine, MIN_TEMPLATE_BATCH))

    assert watching.sent[1:] == [MIN_TEMPLATE_BATCH]


@pytest.mark.parametrize("place", [1, 70, MANY - 1])
async def test_an_existing_execution_among_many_is_a_duplicate_and_the_others_are_created(
    store: Store, place: int
) -> None:
    engine = Engine(store)
    wanted = create_requests(engine, MANY)
    await engine.create(wanted[place])

    answers = await engine.create_executions(wanted)

    assert answers.pop(place) == Duplicate(wanted.pop(place).execution_id)
    assert answers == [Created(ask.execution_id, PublicState.WAITING) for ask in wanted]
    assert await stored_ids(engine) == MANY


async def test_an_execution_that_is_listed_twice_among_many_is_created_once(store: Store) -> None:
    engine = Engine(store)
    wanted = create_requests(engine, MANY)

    answers = await engine.create_executions([*wanted, wanted[60]])

    assert answers[:-1] == [Created(ask.execution_id, PublicState.WAITING) for ask in wanted]
    assert answers[-1] == Duplicate(wanted[60].execution_id)


async def test_executions_that_all_exist_are_all_duplicates(store: Store) -> None:
    engine = Engine(store)
    wanted = create_requests(engine, MANY)
    await engine.create_executions(wanted)

    answers = await engine.create_executions(wanted)

    assert answers == [Duplicate(ask.execution_id) for ask in wanted]
    assert await stored_ids(engine) == MANY


@pytest.mark.parametrize("loss", Loss)
async def test_many_executions_whose_reply_was_lost_are_created_once(store: Store, loss: Loss) -> None:
    engine = Engine(lossy := LossyStore(store))
    await engine.create(create_requests(engine, 1)[0])
    lossy.next_loss = loss

    answers = await engine.create_executions(wanted := create_requests(engine, MANY))

    assert answers == [Created(ask.execution_id, PublicState.WAITING) for ask in wanted]
    assert await stored_ids(engine) == MANY + 1
