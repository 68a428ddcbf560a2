"""Submits with a key: races with claims, ends and timers, lost replies, and how long a key is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.types import BATCH_MAILBOX, CreateExecution, KeyMode, KeyPolicy, KeyUntil, MessageArgs
from flowfabric.model.answers.execution import Submitted
from flowfabric.model.execution import IdempotencyKey
from flowfabric.model.states import PublicState
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Scan
from flowfabric.testing import Loss
from tests.executions import create_request
from tests.scenarios.checked_store import CheckedStore
from tests.scenarios.env import Env
from tests.scenarios.lossy_engine import lossy_engine

DAY = 24 * 60 * 60 * 1000
SINGLE = KeyPolicy(until=KeyUntil.ENDED)
LATEST = KeyPolicy(mode=KeyMode.LATEST, until=KeyUntil.ENDED)
DEBOUNCE = KeyPolicy(mode=KeyMode.DEBOUNCE, until=KeyUntil.STARTED, wait_ms=5_000, latest_ms=60_000)
BATCH = KeyPolicy(mode=KeyMode.BATCH, until=KeyUntil.STARTED, wait_ms=2_000, most=3)
REFUSE = KeyPolicy(mode=KeyMode.REFUSE, until=KeyUntil.ENDED)
LIMIT = KeyPolicy(ttl_ms=60_000)
EVERY = [KeyPolicy(), LIMIT, SINGLE, LATEST, DEBOUNCE, BATCH]


def name_of(policy: KeyPolicy) -> str:
    return f"{policy.mode.value}-{policy.until.value if policy.ttl_ms is None else 'ttl'}"


async def submit(
    env: Env, policy: KeyPolicy, text: bytes = b"1", *, engine: Engine | None = None, mailbox: str | None = None
) -> Submitted:
    if mailbox is None and policy.mode is KeyMode.BATCH:
        mailbox = BATCH_MAILBOX
    message = None if mailbox is None else new_message(env, mailbox, text)
    return await (engine or env.engine).start_by_key(request(env.engine, text), policy, message=message)


def request(engine: Engine, text: bytes = b"1", **fields: Any) -> CreateExecution:
    return create_request(
        engine.new_execution_id("default", "task|k"), input_payload=text, idempotency_key="task|k", **fields
    )


def new_message(env: Env, mailbox: str, text: bytes) -> MessageArgs:
    return MessageArgs(execution_id="", mailbox=mailbox, message_id=env.engine.minter.uuid(), payload=text)


async def input_of(env: Env, e: str) -> bytes:
    return (await env.engine.read_input(e)).payload


async def inputs_of(env: Env, e: str) -> list[bytes | None]:
    claim = await env.grant_and_claim(e, "wa")
    return [one.payload for one in await env.engine.read_batch(claim.handle)]


async def test_the_debounced_run_is_claimed_as_it_is_pushed(env: Env, store: Store) -> None:
    """The claim was faster: the run keeps its input, and the submit creates the next one."""
    first = await submit(env, DEBOUNCE, b"1")
    env.clock.advance_ms(5_000)
    await env.promote(first.execution_id)
    other = Env(Engine(CheckedStore(store)), env.clock)

    pushed, claimed = await env.race(submit(env, DEBOUNCE, b"2"), lambda: other.claim_existing("wb"))

    assert claimed.execution_id == first.execution_id
    assert pushed.is_new
    assert await input_of(env, first.execution_id) == b"1"
    assert await input_of(env, pushed.execution_id) == b"2"


async def test_a_push_wins_over_a_start_that_comes_later(env: Env) -> None:
    first = await submit(env, DEBOUNCE, b"1")
    env.clock.advance_ms(5_000)
    await env.promote(first.execution_id)
    pushed = await submit(env, DEBOUNCE, b"2")
    assert (pushed.execution_id, pushed.is_new) == (first.execution_id, False)
    row = await env.row(first.execution_id)
    assert (row.public_state, row.delay_until, row.line) == (PublicState.DELAYED, env.now + 5_000, None)
    assert await input_of(env, first.execution_id) == b"2"


async def test_two_processes_push(env: Env, store: Store) -> None:
    first = await submit(env, DEBOUNCE, b"1")
    other = Engine(store)

    one, two = await env.race(submit(env, DEBOUNCE, b"2"), lambda: submit(env, DEBOUNCE, b"3", engine=other))

    assert {one.execution_id, two.execution_id} == {first.execution_id}
    assert await input_of(env, first.execution_id) == b"2"  # it was committed last


async def test_a_debounced_run_is_not_pushed_past_its_latest_start(env: Env) -> None:
    first = await submit(env, DEBOUNCE)
    created_at = env.now
    for _ in range(14):
        env.clock.advance_ms(4_000)
        assert (await submit(env, DEBOUNCE)).execution_id == first.execution_id
    assert (await env.row(first.execution_id)).delay_until == created_at + 60_000
    env.clock.advance_ms(4_000)
    assert (await submit(env, DEBOUNCE, b"last")).execution_id == first.execution_id
    assert (await env.row(first.execution_id)).public_state is PublicState.WAITING
    assert await input_of(env, first.execution_id) == b"last"


async def test_the_hundredth_and_the_timer(env: Env, store: Store) -> None:
    """The last input comes as the time is over: it is in this batch or in the next one, and starts one run."""
    first = await submit(env, BATCH, b"1")
    await submit(env, BATCH, b"2")
    env.clock.advance_ms(2_000)
    other = Engine(store)

    third, _ = await env.race(submit(env, BATCH, b"3"), lambda: other.promote_delayed(first.execution_id))

    assert (third.execution_id, third.item) == (first.execution_id, 2)
    assert (await env.row(first.execution_id)).public_state is PublicState.WAITING
    fourth = await submit(env, BATCH, b"4")
    assert (fourth.is_new, fourth.item) == (True, 0)
    assert await inputs_of(env, first.execution_id) == [b"1", b"2", b"3"]


async def test_an_input_that_comes_after_the_start_begins_the_next_batch(env: Env, store: Store) -> None:
    first = await submit(env, BATCH, b"1")
    env.clock.advance_ms(2_000)
    await env.promote(first.execution_id)
    other = Env(Engine(CheckedStore(store)), env.clock)

    second, claimed = await env.race(submit(env, BATCH, b"2"), lambda: other.claim_existing("wb"))

    assert claimed.execution_id == first.execution_id
    assert (second.is_new, second.item) == (True, 0)
    assert [one.payload for one in await env.engine.read_batch(claimed.handle)] == [b"1"]


async def test_a_batch_is_taken_over_with_its_inputs(env: Env) -> None:
    first, *_ = [await submit(env, BATCH, text) for text in (b"1", b"2", b"3")]
    zombie = await env.grant_and_claim(first.execution_id, "wa")
    inputs = await env.engine.read_batch(zombie.handle)
    await env.expire_lease(zombie)
    claim = await env.grant_and_reclaim(first.execution_id)

    assert await env.engine.read_batch(claim.handle) == inputs
    async with env.refused(errors.StaleLease):
        await env.engine.complete(zombie.handle, result=b"[1,2,3]")
    await env.engine.complete(claim.handle, result=b"[1,2,3]")


async def test_latest_cancels_what_completes_just_now(env: Env, store: Store) -> None:
    """Its result stands, and the new run is created all the same."""
    first = await submit(env, LATEST, b"1")
    claim = await env.grant_and_claim(first.execution_id, "wa")
    other = Engine(store)

    second, _ = await env.race(
        submit(env, LATEST, b"2"), lambda: other.complete(claim.handle, result=b"done", encoding="json")
    )

    assert second.is_new
    assert second.superseded is None
    assert (await env.row(first.execution_id)).public_state is PublicState.COMPLETED


async def test_latest_cancels_the_one_under_way_in_the_same_change(env: Env) -> None:
    first = await submit(env, LATEST)
    claim = await env.grant_and_claim(first.execution_id, "wa")
    second = await submit(env, LATEST)
    assert second.superseded == first.execution_id
    assert (await env.row(first.execution_id)).public_state is PublicState.CANCELLED
    with pytest.raises(errors.ExecutionNotActive):
        await env.engine.complete(claim.handle)
    assert await env.engine.find_by_key("task|k") == second.execution_id


async def test_a_key_is_free_the_moment_its_run_ended(env: Env, store: Store) -> None:
    first = await submit(env, SINGLE)
    claim = await env.grant_and_claim(first.execution_id, "wa")
    assert not (await submit(env, SINGLE)).is_new
    await env.engine.complete(claim.handle)
    second = await submit(env, SINGLE, engine=Engine(store))
    assert second.is_new
    assert second.execution_id != first.execution_id


async def test_a_refusal_names_the_run_that_has_the_key(env: Env) -> None:
    first = await submit(env, REFUSE)
    async with env.refused(errors.KeyTaken):
        await submit(env, REFUSE)
    assert (await env.engine.find_by_key("task|k")) == first.execution_id


async def test_or_start_from_two_processes_is_one_run_and_two_messages(env: Env, store: Store) -> None:
    other = Engine(store)

    one, two = await env.race(
        submit(env, SINGLE, b"1", mailbox="add"), lambda: submit(env, SINGLE, b"2", mailbox="add", engine=other)
    )

    assert one.execution_id == two.execution_id
    assert sorted([one.is_new, two.is_new]) == [False, True]
    row = await env.row(one.execution_id)
    assert row.has_waits
    suspension = (await env.dump())["ff_mail"]
    assert sorted(message.payload for message in suspension) == [b"1", b"2"]


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("policy", EVERY, ids=name_of)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
async def test_a_submit_that_loses_its_reply_happens_once(
    env: Env, store: Store, loss: Loss, policy: KeyPolicy, *, is_first: bool
) -> None:
    before = None if is_first else await submit(env, policy, b"1", mailbox="add" if policy is SINGLE else None)

    answer = await submit(
        env, policy, b"2", engine=lossy_engine(store, loss), mailbox="add" if policy is SINGLE else None
    )

    rows = [row for row in (await env.dump())["ff_exec_core"] if row.public_state is not PublicState.CANCELLED]
    assert len(rows) == 1
    assert rows[0].execution_id == answer.execution_id == await env.engine.find_by_key("task|k")
    assert answer.is_new is (is_first or policy is LATEST)
    assert before is None or (answer.execution_id == before.execution_id) is (policy is not LATEST)
    count = 0 if policy not in (SINGLE, BATCH) else 1 if is_first else 2
    assert len((await env.dump())["ff_mail"]) == count


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_submit_that_loses_its_reply_is_not_refused_for_its_own_run(env: Env, store: Store, loss: Loss) -> None:
    assert (await submit(env, REFUSE, engine=lossy_engine(store, loss))).is_new


@pytest.mark.parametrize("policy", [*EVERY, REFUSE], ids=name_of)
async def test_a_submit_that_is_sent_again_with_its_id_is_the_same_submit(env: Env, policy: KeyPolicy) -> None:
    """A client sends it again if the reply was lost, maybe to another server."""
    message = new_message(env, BATCH_MAILBOX, b"1") if policy is BATCH else None
    ask = request(env.engine)
    first = await env.engine.start_by_key(ask, policy, message=message)
    async with env.unchanged():
        again = await env.engine.start_by_key(ask, policy, message=message)
    assert first.is_new
    assert (again.execution_id, again.is_new, again.item) == (first.execution_id, False, first.item)


async def test_a_key_is_kept_as_long_as_its_run(env: Env) -> None:
    for policy in (KeyPolicy(), SINGLE):
        first = await submit(env, policy)
        claim = await env.grant_and_claim(first.execution_id, "wa", ttl=40 * DAY)
        for _ in range(3):
            await env.sweep("idempotency_keys", after_ms=DAY)
            assert await env.engine.find_by_key("task|k") == first.execution_id
            assert not (await submit(env, policy)).is_new
        await env.engine.complete(claim.handle)
        await env.sweep("retention_trimmer", after_ms=2 * DAY)
        await env.engine.sweep_once("idempotency_keys")
        assert await env.engine.find_by_key("task|k") is None
        assert await env.engine.runtime.scan(Scan(IdempotencyKey, (), ("partition", "digest"), limit=9)) == []


async def test_a_ttl_is_not_prolonged(env: Env) -> None:
    first = await submit(env, LIMIT)
    env.clock.advance_ms(59_000)
    assert not (await submit(env, LIMIT)).is_new
    env.clock.advance_ms(1_000)
    assert (await submit(env, LIMIT)).is_new
    assert (await env.row(first.execution_id)).public_state is PublicState.WAITING


async def test_a_key_stays_where_its_run_is_while_the_spread_of_its_lane_changes(env: Env, store: Store) -> None:
    first = await submit(env, SINGLE)
    await env.engine.set_lane_spread("default", 4)
    env.clock.advance_ms(60_000)
    other = Engine(store)
    await other.lane_spreads.refresh()
    again = await other.start_by_key(request(other), SINGLE)
    assert again.execution_id == first.execution_id
    assert await other.find_by_key("task|k") == first.execution_id


async def test_wrong_policies_change_nothing(env: Env) -> None:
    wrong: list[Any] = [
        KeyPolicy(mode=KeyMode.DEBOUNCE),
        KeyPolicy(until=KeyUntil.STARTED),
        KeyPolicy(mode=KeyMode.BATCH, until=KeyUntil.STARTED, wait_ms=1),
        KeyPolicy(ttl_ms=0),
        "single",
    ]
    for policy in wrong:
        async with env.unchanged():
            with pytest.raises(errors.InvalidInput):
                await env.engine.start_by_key(request(env.engine), policy)


@pytest.mark.parametrize("policy", [DEBOUNCE, BATCH], ids=["debounce", "batch"])
async def test_a_delay_beside_a_key_that_says_when_the_run_starts_is_refused(env: Env, policy: KeyPolicy) -> None:
    late = request(env.engine, delay_until=env.now + DAY)
    message = new_message(env, BATCH_MAILBOX, b"1") if policy is BATCH else None
    async with env.unchanged():
        with pytest.raises(errors.InvalidInput, match="leave the delay out"):
            await env.engine.start_by_key(late, policy, message=message)


async def test_many_submits_of_one_process_are_one_batch_each(env: Env) -> None:
    answers = await asyncio.gather(*(submit(env, BATCH, str(number).encode()) for number in range(9)))
    assert sorted((one.execution_id, one.item) for one in answers) == sorted(
        (run, item) for run in {one.execution_id for one in answers} for item in range(3)
    )
