"""The next life of a run: one fenced change, which keeps its mail and forgets its past."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.model.answers.execution import Continued
from flowfabric.model.change import Change
from flowfabric.model.states import AttemptState, PublicState
from flowfabric.model.suspension import Waitpoint
from flowfabric.rules.durable.lives import WENT_ON
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Scan, Where
from flowfabric.stores.verdicts import Verdict
from flowfabric.testing import Loss
from flowfabric.testing.invariants import check_invariants
from tests.scenarios.durable_function import DurableFunction, closed, opened
from tests.scenarios.env import Env
from tests.scenarios.lossy_engine import lossy_engine


async def go_on(function: DurableFunction, text: bytes = b"2", unmet: tuple[str, ...] = ()) -> Continued:
    return await function.engine.continue_as_new(function.claim.handle, text, encoding="json", unmet=unmet)


async def step(function: DurableFunction, name: str) -> None:
    await function.engine.record_step(function.claim.handle, name, 0, b"1")


async def memos(function: DurableFunction) -> list[str]:
    waits = await function.engine.read_waits(function.e)
    return [memo.name for memo in await function.engine.read_steps(function.e)] + [*waits.open, *waits.memos]


async def claim_again(function: DurableFunction, env: Env) -> None:
    function.claim = await env.grant_and_claim(function.e, "wb")


async def test_the_next_life_has_another_input_and_remembers_nothing(function: DurableFunction, env: Env) -> None:
    await step(function, "charge")
    await function.receive("r0")
    await function.send(b"one")
    await function.receive("r1")

    assert await go_on(function, b"[7]") == Continued(function.e, 1)

    assert await memos(function) == []
    row = await env.row(function.e)
    assert (row.life, row.retry_count, row.public_state) == (1, 0, PublicState.WAITING)
    assert row.attempt_state is AttemptState.PENDING_FIRST_ATTEMPT
    assert (await function.engine.read_input(function.e)).payload == b"[7]"
    await claim_again(function, env)
    assert (function.claim.life, function.claim.attempt_index) == (1, 1)
    assert (await env.attempt(function.e, 0)).attempt_state == "ended_success"


async def test_it_goes_to_the_end_of_its_queue(function: DurableFunction, env: Env) -> None:
    before = await env.row(function.e)
    env.clock.advance_ms(50)
    await go_on(function)
    row = await env.row(function.e)
    assert row.rank > before.rank

    for priority in (row.priority + 1, row.priority):
        await function.engine.change_priority(function.e, priority)
        await check_invariants(function.engine)
    assert (await env.row(function.e)).rank == row.rank, "a changed priority does not bring the age of the run back"


@pytest.mark.parametrize("loss", list(Loss))
async def test_continue_as_new_loses_its_reply(function: DurableFunction, env: Env, store: Store, loss: Loss) -> None:
    await step(function, "charge")

    continued = await lossy_engine(store, loss).continue_as_new(function.claim.handle, b"2")

    assert continued == Continued(function.e, 1)
    assert await memos(function) == []
    assert (await env.row(function.e)).life == 1


async def test_the_same_holder_asks_again_and_changes_nothing(function: DurableFunction, env: Env) -> None:
    await go_on(function)
    async with env.unchanged():
        assert await go_on(function, b"3") == Continued(function.e, 1)


async def test_a_zombie_continues(function: DurableFunction, env: Env) -> None:
    zombie = function.claim
    await step(function, "charge")
    await function.reclaim()

    async with env.unchanged():
        with pytest.raises(errors.StaleLease):
            await function.engine.continue_as_new(zombie.handle, b"2")
    await go_on(function)
    await claim_again(function, env)
    async with env.unchanged():
        with pytest.raises(errors.StaleLease):
            await function.engine.continue_as_new(zombie.handle, b"2")


async def test_a_former_life_records_nothing_in_the_next_one(function: DurableFunction, env: Env) -> None:
    former = function.claim
    await go_on(function)
    for late in (
        lambda: function.engine.record_step(former.handle, "late", 0, b"1"),
        lambda: function.engine.complete(former.handle),
    ):
        async with env.unchanged():
            with pytest.raises(errors.ExecutionNotActive):
                await late()


async def test_ten_thousand_messages_move_nowhere(
    function: DurableFunction, env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is as large with a full mailbox as with an empty one."""
    sizes: list[int] = []
    changes: list[Change] = []
    commit = env.store.commit

    async def record(written: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[Verdict]:
        changes.extend(written)
        return await commit(written, hint)

    monkeypatch.setattr(env.store, "commit", record)
    for count in (0, 1, 200):
        await asyncio.gather(*(function.send(str(number).encode()) for number in range(count)))
        await step(function, "charge")
        changes.clear()
        await go_on(function)
        [change] = changes
        sizes.append(len(change.writes))
        await claim_again(function, env)

    assert sizes[1] == sizes[2]
    texts = [closed(await function.receive(f"r{number}")).payload or b"" for number in range(201)]
    assert sorted(texts) == sorted([b"0", *(str(number).encode() for number in range(200))])


async def test_a_message_of_a_gate_that_the_function_did_not_see_stays_unread(function: DurableFunction) -> None:
    await function.receive("seen")
    await function.send(b"one")
    await function.receive("unseen")
    await function.send(b"two")
    await function.send(b"three")

    await go_on(function, unmet=("unseen",))

    await claim_again(function, function.env)
    assert [closed(await function.receive(name)).payload for name in ("r0", "r1")] == [b"two", b"three"]


async def test_a_message_that_comes_during_the_change_is_kept(
    function: DurableFunction, env: Env, store: Store
) -> None:
    await function.send(b"earlier", "other")  # the row is marked: the message below changes the suspension only
    await function.receive("r0")
    sent: list[object] = []

    async def send() -> None:
        message = MessageArgs(
            execution_id=function.e, mailbox="steer", message_id=function.waits.new_id(), payload=b"late"
        )
        sent.append(await Engine(store).send_message(message))

    await env.race(go_on(function, unmet=("r0",)), send)

    assert len(sent) == 1
    await claim_again(function, env)
    assert await memos(function) == []
    assert closed(await function.receive("r1")).payload == b"late"


async def test_open_approvals_are_closed(function: DurableFunction, env: Env) -> None:
    gate = opened(await function.approval())

    await go_on(function)

    with pytest.raises(errors.FabricError):
        await function.vote(gate, "ana")
    where = (Where("execution_id", "=", function.e),)
    rows = await env.engine.runtime.scan(Scan(Waitpoint, where, ("execution_id", "waitpoint_id"), limit=9))
    assert {row.close_reason for row in rows} == {WENT_ON}


async def test_children_continue_without_a_waiting_parent(function: DurableFunction, env: Env) -> None:
    child = await function.create_child()
    await function.children("c0", child.execution_id)
    await go_on(function)

    await function.complete_child(child)

    await claim_again(function, env)
    assert await memos(function) == []


async def test_a_process_dies_while_it_forgets(
    function: DurableFunction, env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is not claimable before the past is gone, and a sweep of any process goes on."""
    monkeypatch.setattr("flowfabric.engine.durable.lives.MAX_FORGOTTEN", 3)
    for number in range(8):
        await step(function, f"step{number}")

    async def die(_: str) -> bool:
        return False

    monkeypatch.setattr(env.engine.lives, "forget", die)
    assert await go_on(function) == Continued(function.e, 1, is_forgotten=False)
    assert len(await memos(function)) == 5
    assert (await env.row(function.e)).line is None
    monkeypatch.undo()
    monkeypatch.setattr("flowfabric.engine.durable.lives.MAX_FORGOTTEN", 3)

    await env.engine.sweep_once("delayed_promoter")

    assert await memos(function) == []
    row = await env.row(function.e)
    assert (row.past_life, row.public_state) == (None, PublicState.WAITING)


async def test_a_run_that_is_cancelled_while_it_forgets_is_replayed_without_its_past(
    function: DurableFunction, env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.durable.lives.MAX_FORGOTTEN", 3)
    for number in range(8):
        await step(function, f"step{number}")
    forget = env.engine.lives.forget

    async def die(_: str) -> bool:
        return False

    monkeypatch.setattr(env.engine.lives, "forget", die)
    await go_on(function)
    await env.engine.cancel_execution(function.e)
    await env.engine.replay_execution(function.e)
    assert (await env.row(function.e)).line is None

    assert await forget(function.e)
    assert await memos(function) == []
    assert (await env.row(function.e)).public_state is PublicState.WAITING


async def test_bad_input_begins_no_life(function: DurableFunction, env: Env) -> None:
    for text in ("text", None, b"x" * (64 * 1024 * 1024 + 1)):
        async with env.unchanged():
            with pytest.raises(errors.ValidationError):
                await function.engine.continue_as_new(function.claim.handle, text)  # type: ignore[arg-type]
