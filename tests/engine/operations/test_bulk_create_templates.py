"""Similar executions of a bulk create share one decision; the result equals separate decisions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric import CreateExecution, errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.validation import execution as validate
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Created
from flowfabric.model.change import BulkInsert
from flowfabric.model.execution import Execution, Payload
from flowfabric.rules.execution.create import PolicyDefaults, create, create_each, template_of
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read

ONE, OTHER = "{fp:3}:11111111-1111-4111-8111-111111111111", "{fp:3}:22222222-2222-4222-8222-222222222222"
ELSEWHERE = "{fp:4}:22222222-2222-4222-8222-222222222222"

asks = st.builds(
    CreateExecution,
    execution_id=st.just(ONE),
    partition=st.just(3),
    namespace=st.sampled_from(["", "shop"]),
    lane_id=st.sampled_from(["default", "slow"]),
    execution_kind=st.just("mail"),
    input_payload=st.sampled_from([b"", b"first"]),
    priority=st.integers(-1, 9001),
    idempotency_key=st.sampled_from([None, "", "key"]),
    tags=st.sampled_from([{}, {"app.team": "blue"}]),
    policy=st.sampled_from([None, '{"delay_until": 5}', '{"execution_deadline_ms": 7}', '{"priority": 3}', "{"]),
    delay_until=st.sampled_from([None, 5, 5000]),
    execution_deadline_at=st.sampled_from([None, 9000]),
)


@given(first=asks, payload=st.sampled_from([b"", b"second"]), now=st.sampled_from([0, 5, 6]))
def test_a_shared_decision_equals_the_decision_of_the_rule(first: CreateExecution, payload: bytes, now: int) -> None:
    shared = template_of(create(None, None, first, now, defaults=PolicyDefaults(1000)))
    by_itself = create(
        None,
        None,
        msgspec.structs.replace(first, execution_id=OTHER, input_payload=payload),
        now,
        defaults=PolicyDefaults(1000),
    )

    if shared is not None:
        assert shared.create(OTHER, payload) == by_itself
        assert by_itself.change is not None
        together = shared.create_many([OTHER], [payload]).writes
        assert tuple(one for copies in together if isinstance(copies, BulkInsert) for one in copies.inserts()) == (
            by_itself.change.writes
        )
    else:
        assert first.idempotency_key or first.policy or first.delay_until is not None, "only for a reason"


@given(first=asks, second=asks, now=st.sampled_from([0, 5, 6]))
def test_decisions_in_sequence_equal_separate_decisions(
    first: CreateExecution, second: CreateExecution, now: int
) -> None:
    together = [first, msgspec.structs.replace(first, execution_id=OTHER, input_payload=b"second"), second, first]

    decisions = list(create_each(together, now, defaults=PolicyDefaults(1000)))

    assert decisions == [create(None, None, one, now, defaults=PolicyDefaults(1000)) for one in together]


def ask(execution_id: Any = ONE, **fields: Any) -> CreateExecution:
    return CreateExecution(
        **{"partition": 0, "namespace": "shop", "lane_id": "default", "execution_kind": "mail", **fields},
        execution_id=execution_id,
    )


GOOD = [
    ask(OTHER),
    ask(OTHER, input_payload=b"{}"),
    ask(ELSEWHERE),
    ask(OTHER, lane_id="slow"),
    ask(OTHER, namespace="other"),
    ask(OTHER, tags={"app.team": "blue"}),
    ask(OTHER, priority=1),
    ask(OTHER, policy='{"execution_deadline_ms": 7000}'),
    ask(OTHER, delay_until=10**12),
    ask(OTHER, idempotency_key="key"),
]
BAD = [
    (ask("mail"), "execution_id"),
    (ask(7), "execution_id"),
    (ask(OTHER, input_payload="text"), "input_payload"),
    (ask(OTHER, priority=True), "priority"),
    (ask(OTHER, priority=0.0), "priority"),
    (ask(OTHER, execution_deadline_at=0.0), "execution_deadline_at"),
    (ask(OTHER, namespace=["shop"]), "namespace"),
]


@pytest.mark.parametrize("second", GOOD)
async def test_the_second_of_two_similar_executions_is_stored_as_if_created_alone(
    store: Store, clock: ManualClock, second: CreateExecution
) -> None:
    engine = Engine(store, minter=SeededMinter(1))

    answers = await engine.create_executions([ask(), second])

    assert all(isinstance(answer, Created) for answer in answers)
    twin = msgspec.structs.replace(
        second,
        execution_id=second.execution_id.replace("2", "5"),
        idempotency_key=second.idempotency_key and "another",
    )
    await engine.create_execution(
        **{name: value for name, value in msgspec.structs.asdict(twin).items() if name != "partition"}
    )
    assert await stored_rows(store, second) == await stored_rows(store, twin)


async def stored_rows(store: Store, one: CreateExecution) -> tuple[Execution, Payload]:
    """Return the rows of an execution, which has its own key, without the fields that differ between any two."""
    wants = (Read(Execution, (one.execution_id,)), Read(Payload, (one.execution_id,)))
    (row,), (payload,) = (await store.load(wants)).rows
    assert row.idempotency_key == one.idempotency_key
    row = msgspec.structs.replace(row, execution_id="", idempotency_key=None, revision=0)
    return row, msgspec.structs.replace(payload, execution_id="")


@pytest.mark.parametrize(("second", "refusal"), BAD)
async def test_an_invalid_request_that_resembles_the_first_is_refused(
    store: Store, second: CreateExecution, refusal: str
) -> None:
    engine = Engine(store, minter=SeededMinter(1))

    first, refused, third = await engine.create_executions([ask(), second, ask(ELSEWHERE)])

    assert isinstance(first, Created)
    assert isinstance(refused, errors.InvalidInput)
    assert refusal in str(refused)
    assert isinstance(third, Created)


@pytest.mark.parametrize("first", [ask(), ask(delay_until=1), ask(execution_deadline_at=1), ask(priority=1)])
@pytest.mark.parametrize("second", GOOD)
def test_a_graph_node_is_accepted_as_it_would_be_alone(first: CreateExecution, second: CreateExecution) -> None:
    assert validate.validate_creates([first, second, first]) == [*map(validate.validate_create, (first, second, first))]


@pytest.mark.parametrize(
    ("first", "second", "refusal"),
    [
        *((ask(), second, refusal) for second, refusal in BAD),
        (ask(delay_until=1), ask(OTHER, delay_until=True), "delay_until"),
        (ask(execution_deadline_at=1), ask(OTHER, execution_deadline_at=1.0), "execution_deadline_at"),
        (ask(), "a node", "CreateExecution"),
    ],
)
def test_an_invalid_node_that_resembles_the_first_is_refused(first: Any, second: Any, refusal: str) -> None:
    with pytest.raises(errors.InvalidInput, match=refusal):
        validate.validate_creates([first, second])


async def test_a_caller_may_reuse_its_tags_afterwards(store: Store) -> None:
    engine = Engine(store, minter=SeededMinter(1))
    tags: dict[str, str] = {"app.team": "blue"}

    await engine.create(ask(tags=tags))
    tags["app.team"] = "red"
    await engine.create(ask(OTHER, tags=tags))

    assert await engine.get_execution_tag(ONE, "app.team") == "blue"
    assert await engine.get_execution_tag(OTHER, "app.team") == "red"


def test_a_changed_policy_is_validated_again() -> None:
    accept, policy = validate.CreateValidator(), {"priority": 3}
    first = accept(ask(policy=policy))
    policy["priority"] = 4

    assert accept(ask(OTHER, policy=policy)).policy != first.policy
