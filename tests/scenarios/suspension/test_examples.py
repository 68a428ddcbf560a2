"""SS-070 to SS-072, as far as the engine goes: strict and lenient suspends, the bridge, the privileged token read."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.operations.suspensions import ConditionAlreadySatisfied, TokenMismatch, UnknownWaitpoint
from flowfabric.model.answers.execution import Completed, Renewed
from flowfabric.model.condition import Single
from flowfabric.rules.suspension.arguments import UsePendingWaitpoint
from flowfabric.rules.suspension.signals import Accepted
from tests.scenarios.play import Play
from tests.scenarios.waits import SATISFIED, Waits, partition


@pytest.mark.spec("SS-070")
async def test_strict_vs_try(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "kp", 60_000)
    await waits.send(held.execution_id, "go", pending)
    strict = await play.claimed()
    other = await play.engine.create_waitpoint(strict.handle, "kp", 60_000)
    await waits.send(strict.execution_id, "go", other)

    assert isinstance(await waits.on_pending(held, pending, Single("kp")), ConditionAlreadySatisfied)
    assert isinstance(await play.engine.renew(held.handle), Renewed)
    assert await play.engine.complete(held.handle) == Completed(held.execution_id)

    with pytest.raises(errors.AlreadySatisfied):
        await play.engine.suspend_strict(
            strict.handle, waits.args(Single("kp"), UsePendingWaitpoint(other.waitpoint_id))
        )
    assert isinstance(await play.engine.renew(strict.handle), Renewed)

    third, _ = await waits.suspended()
    with pytest.raises(errors.ExecutionNotActive):
        await play.engine.renew(third.handle)


@pytest.mark.spec("SS-071")
async def test_signal_through_the_engine(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended()
    e, good = held.execution_id, p.waitpoint_token.reveal()
    with pytest.raises(errors.InvalidToken, match="invalid_token"):
        await play.engine.deliver_signal(waits.signal(e, "go", p.waitpoint_id, good[:-4] + "beef"))
    assert await waits.effect(e, "go", p) == SATISFIED
    with pytest.raises(errors.TargetNotSignalable):
        await waits.send(e, "go", p)
    with pytest.raises(errors.NotFound):
        await play.engine.deliver_signal(waits.signal(play.engine.new_execution_id(), "go", p.waitpoint_id, good))


@pytest.mark.spec("SS-071")
async def test_the_bridge_compares_before_it_delivers(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended()
    e = held.execution_id
    ignored = waits.signal(e, "go", p.waitpoint_id, "k1:" + "0" * 64)

    async with play.refused(TokenMismatch):
        await play.engine.verify_and_deliver(ignored, "k1:" + "f" * 64)
    async with play.refused(UnknownWaitpoint):
        await play.engine.verify_and_deliver(waits.signal(e, "go", waits.id(), ""), p.waitpoint_token)
    asked = []
    for target, token in ((p.waitpoint_id, "k1:" + "f" * 64), (p.waitpoint_id, ""), (waits.id(), p.waitpoint_token)):
        play.store.calls.clear()
        with pytest.raises(errors.InvalidToken):
            await play.engine.verify_and_deliver(waits.signal(e, "go", target, ""), token)
        asked.append(dict(play.store.calls))
    assert asked == [{"load": 1}] * 3
    delivered = await play.engine.verify_and_deliver(ignored, p.waitpoint_token)

    assert isinstance(delivered, Accepted)
    assert delivered.effect == SATISFIED


@pytest.mark.spec("SS-072")
async def test_token_read(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended()
    where = partition(held.execution_id)

    assert await play.engine.read_waitpoint_token(where, p.waitpoint_id) == p.waitpoint_token
    assert await play.engine.read_waitpoint_token("{fp:86}", p.waitpoint_id) == p.waitpoint_token
    assert await play.engine.read_waitpoint_token(where + 1, p.waitpoint_id) is None
    assert await play.engine.read_waitpoint_token(where, waits.id()) is None
    with pytest.raises(errors.InvalidInput):
        await play.engine.read_waitpoint_token(where, "not-a-uuid")
    await waits.send(held.execution_id, "go", p)
    assert await play.engine.read_waitpoint_token(where, p.waitpoint_id) is None
