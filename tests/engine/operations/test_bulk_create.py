"""Creating many in one call: batches overlap, answers keep their order, and nothing is made twice."""

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
from tests.engine.losing import LosingStore, Loss


class Narrow(MemoryStore):
    """A store of small batches that tells how many were under way at once, and can be away for a while."""

    concurrent_commits = 2
    batch_limit = 10

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.under_way = self.most = self.batches = self.away = 0

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        self.batches += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(5):  # a journey takes a few turns of the loop
            await asyncio.sleep(0)
        self.under_way -= 1
        if self.away:
            self.away -= 1
            raise StoreUnavailable("away", backend="memory", source="transport", in_doubt=False)
        return await super().commit(changes, hint)


def asks(engine: Engine, count: int, **more: str) -> list[CreateExecution]:
    return [
        CreateExecution(
            execution_id=engine.new_execution_id(),
            partition=0,
            namespace="n",
            lane_id="default",
            execution_kind="task",
            **more,  # type: ignore[arg-type]
        )
        for _ in range(count)
    ]


async def found(engine: Engine) -> int:
    return len((await engine.search_executions(limit=1000)).executions)


async def test_a_batch_is_decided_while_the_one_before_is_on_its_way(clock: ManualClock) -> None:
    store = Narrow(clock)
    engine = Engine(store)
    await engine.create(asks(engine, 1)[0])  # the first of its lane

    answers = await engine.create_executions(wanted := asks(engine, 55))

    assert [answer.execution_id for answer in answers] == [ask.execution_id for ask in wanted]
    assert store.batches == 1 + 6
    assert store.most == store.concurrent_commits + 1


async def test_the_first_of_a_lane_is_created_by_itself_and_the_rest_follows(clock: ManualClock) -> None:
    store = Narrow(clock)
    engine = Engine(store)

    answers = await engine.create_executions(wanted := asks(engine, 55))

    assert [answer.execution_id for answer in answers] == [ask.execution_id for ask in wanted]
    assert {type(answer) for answer in answers} == {Created}
    assert store.batches <= 6 + 2


@pytest.mark.parametrize("away", [1, 2, 6])
async def test_a_store_that_is_away_for_a_moment_costs_a_second_look(clock: ManualClock, away: int) -> None:
    store = Narrow(clock)
    engine = Engine(store)
    store.away = away

    answers = await engine.create_executions(asks(engine, 55))

    assert {type(answer) for answer in answers} == {Created}
    assert await found(engine) == 55
    assert store.batches < 6 + 60  # what failed together is written together again


async def test_of_two_with_one_key_the_first_wins(store: Store, clock: ManualClock) -> None:
    engine = Engine(store)
    first, second = asks(engine, 2, idempotency_key="k")

    assert await engine.create_executions([first, second, first]) == [
        Created(first.execution_id, "waiting"),  # type: ignore[arg-type]
        Duplicate(first.execution_id),
        Duplicate(first.execution_id),
    ]


async def test_the_first_wins_also_when_the_key_was_known_and_forgotten(store: Store, clock: ManualClock) -> None:
    engine = Engine(store)
    (old,) = asks(engine, 1, idempotency_key="k")
    await engine.create(old)
    clock.advance_ms(24 * 60 * 60 * 1000)
    first, second = asks(engine, 2, idempotency_key="k")

    answers = await engine.create_executions([first, second])

    assert answers[0] == Created(first.execution_id, "waiting")  # type: ignore[arg-type]
    assert answers[1] == Duplicate(first.execution_id)


async def test_one_that_has_to_wait_for_another_still_goes_before_those_behind_it(store: Store) -> None:
    engine = Engine(store)
    [first, second] = asks(engine, 2)
    keyed = msgspec.structs.replace(first, idempotency_key="k", policy='{"dedup_window_ms": 0}')
    follower = msgspec.structs.replace(second, idempotency_key="k", input_payload=b"the first of its id")

    answers = await engine.create_executions([keyed, follower, second])

    created = [Created(one.execution_id, PublicState.WAITING) for one in (first, second)]
    assert answers == [*created, Duplicate(second.execution_id)]
    assert (await engine.read_execution_context(second.execution_id)).input_payload == b"the first of its id"


async def test_one_that_is_refused_is_not_taken_for_a_later_one_of_its_id(store: Store) -> None:
    engine = Engine(store)
    [good] = asks(engine, 1)
    bad = msgspec.structs.replace(good, policy="{not json")

    refused, created = await engine.create_executions([bad, good])

    assert isinstance(refused, InvalidPolicyJson)
    assert created == Created(good.execution_id, PublicState.WAITING)


async def test_a_refusal_stands_between_its_neighbours(store: Store) -> None:
    engine = Engine(store)
    good, bad, fine = asks(engine, 1), asks(engine, 1, policy="{"), asks(engine, 1)

    answers = await engine.create_executions([*good, *bad, *fine])

    assert isinstance(answers[1], FabricError)
    assert answers[1].kind == "invalid_policy_json"
    assert [type(answer) for answer in (answers[0], answers[2])] == [Created, Created]
    assert await found(engine) == 2


MANY = MIN_TEMPLATE_BATCH + 50


class Watching(LosingStore):
    """A store that tells how many changes each commit had."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.sent: list[int] = []

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        self.sent.append(len(changes))
        return await super().commit(changes, hint)


async def test_what_is_alike_is_written_as_one_change(store: Store, clock: ManualClock) -> None:
    engine = Engine(watching := Watching(store))
    await engine.create(asks(engine, 1)[0])

    answers = await engine.create_executions(wanted := asks(engine, MANY))

    assert answers == [Created(ask.execution_id, PublicState.WAITING) for ask in wanted]
    assert watching.sent[1:] == [2]  # the first by itself, and all that are like it
    assert await found(engine) == MANY + 1


async def test_each_of_many_that_are_written_as_one_change_keeps_its_own_input(store: Store) -> None:
    engine = Engine(watching := Watching(store))
    await engine.create(asks(engine, 1)[0])
    inputs = [b"" if number % 7 == 3 else b"%d" % number for number in range(MANY)]
    wanted = [replace(ask, input_payload=given) for ask, given in zip(asks(engine, MANY), inputs, strict=True)]

    await engine.create_executions(wanted)

    assert watching.sent[1:] == [2]
    kept = [await engine.read_execution_context(ask.execution_id) for ask in wanted]
    assert [one.input_payload for one in kept] == inputs


async def test_a_few_of_them_are_a_change_each(store: Store) -> None:
    engine = Engine(watching := Watching(store))
    await engine.create(asks(engine, 1)[0])

    await engine.create_executions(asks(engine, MIN_TEMPLATE_BATCH))

    assert watching.sent[1:] == [MIN_TEMPLATE_BATCH]


@pytest.mark.parametrize("place", [1, 70, MANY - 1])
async def test_a_known_one_among_many_is_a_duplicate_and_the_others_are_created(store: Store, place: int) -> None:
    engine = Engine(store)
    wanted = asks(engine, MANY)
    await engine.create(wanted[place])

    answers = await engine.create_executions(wanted)

    assert answers.pop(place) == Duplicate(wanted.pop(place).execution_id)
    assert answers == [Created(ask.execution_id, PublicState.WAITING) for ask in wanted]
    assert await found(engine) == MANY


async def test_one_that_is_named_twice_among_many_is_created_once(store: Store) -> None:
    engine = Engine(store)
    wanted = asks(engine, MANY)

    answers = await engine.create_executions([*wanted, wanted[60]])

    assert answers[:-1] == [Created(ask.execution_id, PublicState.WAITING) for ask in wanted]
    assert answers[-1] == Duplicate(wanted[60].execution_id)


async def test_many_that_were_all_created_before_are_all_duplicates(store: Store) -> None:
    engine = Engine(store)
    wanted = asks(engine, MANY)
    await engine.create_executions(wanted)

    answers = await engine.create_executions(wanted)

    assert answers == [Duplicate(ask.execution_id) for ask in wanted]
    assert await found(engine) == MANY


@pytest.mark.parametrize("loss", Loss)
async def test_many_whose_answer_got_lost_are_created_once(store: Store, loss: Loss) -> None:
    engine = Engine(losing := LosingStore(store))
    await engine.create(asks(engine, 1)[0])
    losing.next_loss = loss

    answers = await engine.create_executions(wanted := asks(engine, MANY))

    assert answers == [Created(ask.execution_id, PublicState.WAITING) for ask in wanted]
    assert await found(engine) == MANY + 1
