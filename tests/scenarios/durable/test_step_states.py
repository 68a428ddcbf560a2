"""A step's result or failure is recorded once, whichever comes first; tries and starts are replaced by the next one."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.model.gate import StepMemo, StepState
from flowfabric.stores.port import Store
from flowfabric.testing import Loss
from tests.scenarios.durable_function import DurableFunction, opened
from tests.scenarios.env import Env
from tests.scenarios.lossy_engine import lossy_engine


async def record(
    function: DurableFunction, state: StepState = StepState.DONE, result: bytes = b"1", *, step: str = "pay"
) -> StepMemo:
    return await function.engine.record_step(function.claim.handle, step, 0, result, state=state)


@pytest.mark.parametrize(
    ("first", "second"), [(StepState.DONE, StepState.FAILED), (StepState.FAILED, StepState.DONE)], ids=str
)
async def test_of_a_result_and_a_failure_the_first_record_is_kept(
    function: DurableFunction, first: StepState, second: StepState
) -> None:
    stands = await record(function, first, b"first")

    assert await record(function, second, b"second") == stands
    assert await record(function, StepState.TRIES, b"late") == stands
    assert (stands.state, stands.step) == (first, "pay")
    assert await function.engine.read_steps(function.e) == [stands]


@pytest.mark.parametrize(
    ("first", "second"), [(StepState.DONE, StepState.FAILED), (StepState.FAILED, StepState.DONE)], ids=str
)
async def test_the_record_of_another_process_is_kept_although_the_row_is_cached_here(
    function: DurableFunction, store: Store, first: StepState, second: StepState
) -> None:
    handle, other = function.claim.handle, Engine(store)
    stands = await other.record_step(handle, "pay", 0, b"first", state=first)

    assert await record(function, second, b"second") == stands
    assert await function.engine.read_steps(function.e) == [stands]


@pytest.mark.parametrize("state", [StepState.DONE, StepState.FAILED], ids=str)
async def test_a_worker_that_lost_its_lease_records_nothing(function: DurableFunction, state: StepState) -> None:
    zombie = function.claim.handle
    await function.reclaim()
    for late in StepState:
        if late not in (StepState.LEFT, StepState.FACT):
            with pytest.raises(errors.StaleLease):
                await function.engine.record_step(zombie, "pay", 0, b"late", state=late)

    stands = await record(function, state, b"of the new holder")
    with pytest.raises(errors.StaleLease):
        await function.engine.record_step(zombie, "pay", 0, b"late")
    assert await function.engine.read_steps(function.e) == [stands]


async def test_the_new_holder_finds_the_failure_of_the_one_before(function: DurableFunction) -> None:
    failed = await record(function, StepState.FAILED, b"declined")
    await function.reclaim()

    assert (await function.engine.remembered(function.claim.handle)).steps == [failed]
    assert await record(function, StepState.DONE, b"paid") == failed


async def test_tries_and_starts_are_replaced_until_the_step_has_ended(function: DurableFunction) -> None:
    for number in (b"1", b"2"):
        await record(function, StepState.TRIES, number)
        await record(function, StepState.BEGAN, number)
    done = await record(function, result=b"receipt")

    left = {memo.name: memo.result for memo in await function.engine.read_steps(function.e)}
    assert left == {"pay": b"receipt", "tries:pay": b"2", "began:pay": b"2"}
    assert await record(function, StepState.TRIES, b"3") == done


@pytest.mark.parametrize("state", [StepState.DONE, StepState.FAILED, StepState.TRIES, StepState.BEGAN], ids=str)
@pytest.mark.parametrize("loss", list(Loss))
async def test_a_record_with_a_lost_message_is_made_once(
    function: DurableFunction, store: Store, loss: Loss, state: StepState
) -> None:
    memo = await lossy_engine(store, loss).record_step(function.claim.handle, "pay", 0, b"once", state=state, number=7)

    assert (memo.result, memo.number, memo.state) == (b"once", 7, state)
    assert await function.engine.read_steps(function.e) == [memo]


async def test_a_replay_of_a_failed_run_forgets_tries_and_starts_but_no_failure(
    function: DurableFunction, env: Env
) -> None:
    failed = await record(function, StepState.FAILED)
    for state in (StepState.TRIES, StepState.BEGAN):
        await record(function, state, step="other")
    await function.engine.fail(function.claim.handle, reason="no", category="permanent")

    await function.engine.replay_execution(function.e)

    assert await function.engine.read_steps(function.e) == [failed]


@pytest.mark.parametrize("name", ["failed:pay", "tries:pay", "began:pay", "left:pay"])
async def test_a_name_that_equals_the_state_of_another_step_is_refused(function: DurableFunction, name: str) -> None:
    async with function.env.unchanged():
        with pytest.raises(errors.InvalidInput, match="is reserved"):
            await record(function, step=name)


@pytest.mark.parametrize(
    ("state", "number"), [("x", None), (None, None), (StepState.LEFT, None), ("done", -1), ("done", "1")]
)
async def test_an_unknown_state_or_number_is_refused(function: DurableFunction, state: object, number: object) -> None:
    async with function.env.unchanged():
        with pytest.raises(errors.InvalidInput):
            await function.engine.record_step(
                function.claim.handle,
                "pay",
                0,
                b"1",
                state=state,  # type: ignore[arg-type]
                number=number,  # type: ignore[arg-type]
            )


async def test_everything_that_a_function_left_behind_is_remembered_with_its_numbers(function: DurableFunction) -> None:
    nothing = await function.engine.remembered(function.claim.handle)
    assert (nothing.steps, nothing.open, nothing.memos) == ([], {}, {})
    step = await function.engine.record_step(function.claim.handle, "pay", 0, b"1", number=0)
    await function.send(b"hello")
    await function.receive("r0", number=1)
    await function.timer("nap", 60_000)
    gate = opened(await function.approval(number=3))
    await function.reclaim()

    found = await function.engine.remembered(function.claim.handle)

    assert found.steps == [step]
    assert {name: (memo.payload, memo.number) for name, memo in found.memos.items()} == {"r0": (b"hello", 1)}
    assert {name: gate.number for name, gate in found.open.items()} == {"nap": None, "approve": 3}
    assert found.open["approve"] == gate.gate
