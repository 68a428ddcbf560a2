"""SS-070 to SS-072 on the engine: strict suspends, verify-and-deliver, and the privileged token read."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.operations.suspensions import ConditionAlreadySatisfied
from flowfabric.model.answers.execution import Completed, Renewed
from flowfabric.model.condition import Single
from flowfabric.rules.security.waitpoint_token import TokenMismatch, UnknownWaitpoint
from flowfabric.rules.suspension.arguments import UsePendingWaitpoint
from flowfabric.rules.suspension.signals import Accepted
from tests.scenarios.env import Env
from tests.scenarios.waits import SATISFIED, Waits, partition


@pytest.mark.spec("SS-070")
async def test_suspend_reports_and_suspend_strict_refuses_a_condition_already_satisfied(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 60_000)
    await waits.send(claim.execution_id, "go", pending)
    strict = await env.create_and_claim()
    other = await env.engine.create_waitpoint(strict.handle, "kp", 60_000)
    await waits.send(strict.execution_id, "go", other)

    assert isinstance(await waits.suspend_on_pending(claim, pending, Single("kp")), ConditionAlreadySatisfied)
    assert isinstance(await env.engine.renew(claim.handle), Renewed)
    assert await env.engine.complete(claim.handle) == Completed(claim.execution_id)

    with pytest.raises(errors.AlreadySatisfied):
        await env.engine.suspend_strict(
            strict.handle, waits.args(Single("kp"), UsePendingWaitpoint(other.waitpoint_id))
        )
    assert isinstance(await env.engine.renew(strict.handle), Renewed)

    third, _ = await waits.create_suspended()
    with pytest.raises(errors.ExecutionNotActive):
        await env.engine.renew(third.handle)


@pytest.mark.spec("SS-071")
async def test_deliver_signal_refuses_bad_tokens_and_closed_targets(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    e, good = claim.execution_id, p.waitpoint_token.reveal()
    with pytest.raises(errors.InvalidToken, match="invalid_token"):
        await env.engine.deliver_signal(waits.signal_args(e, "go", p.waitpoint_id, good[:-4] + "beef"))
    assert await waits.effect(e, "go", p) == SATISFIED
    with pytest.raises(errors.TargetNotSignalable):
        await waits.send(e, "go", p)
    with pytest.raises(errors.NotFound):
        await env.engine.deliver_signal(waits.signal_args(env.engine.new_execution_id(), "go", p.waitpoint_id, good))


@pytest.mark.spec("SS-071")
async def test_verify_and_deliver_compares_tokens_before_it_delivers(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    e = claim.execution_id
    ignored = waits.signal_args(e, "go", p.waitpoint_id, "k1:" + "0" * 64)

    async with env.refused(TokenMismatch):
        await env.engine.verify_and_deliver(ignored, "k1:" + "f" * 64)
    async with env.refused(UnknownWaitpoint):
        await env.engine.verify_and_deliver(waits.signal_args(e, "go", waits.new_id(), ""), p.waitpoint_token)
    calls = []
    for target, token in (
        (p.waitpoint_id, "k1:" + "f" * 64),
        (p.waitpoint_id, ""),
        (waits.new_id(), p.waitpoint_token),
    ):
        env.store.calls.clear()
        with pytest.raises(errors.InvalidToken):
            await env.engine.verify_and_deliver(waits.signal_args(e, "go", target, ""), token)
        calls.append(dict(env.store.calls))
    assert calls == [{"load": 1}] * 3
    delivered = await env.engine.verify_and_deliver(ignored, p.waitpoint_token)

    assert isinstance(delivered, Accepted)
    assert delivered.effect == SATISFIED


@pytest.mark.spec("SS-072")
async def test_a_waitpoint_token_is_readable_until_its_waitpoint_closes(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    where = partition(claim.execution_id)

    assert await env.engine.read_waitpoint_token(where, p.waitpoint_id) == p.waitpoint_token
    assert await env.engine.read_waitpoint_token("{fp:86}", p.waitpoint_id) == p.waitpoint_token
    assert await env.engine.read_waitpoint_token(where + 1, p.waitpoint_id) is None
    assert await env.engine.read_waitpoint_token(where, waits.new_id()) is None
    with pytest.raises(errors.InvalidInput):
        await env.engine.read_waitpoint_token(where, "not-a-uuid")
    await waits.send(claim.execution_id, "go", p)
    assert await env.engine.read_waitpoint_token(where, p.waitpoint_id) is None
