"""The exception that ended an attempt: kept with the attempt, and with the execution once that has failed."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.model.failure import MAX_FAILURE_BYTES, StoredFailure, encode_stored
from flowfabric.testing.flaky_store import Loss
from tests.scenarios.env import Env
from tests.scenarios.execution.test_finish import retries
from tests.scenarios.flow_env import FlowEnv
from tests.scenarios.lossy_engine import lossy_engine

DECLINED = StoredFailure("shop.Declined", "card 4242", "Declined", {"args": ["card 4242"], "fields": {"code": 7}})
FAILURE = encode_stored(DECLINED)


async def test_the_failure_of_the_last_attempt_is_part_of_the_outcome(env: Env) -> None:
    claim, e = await env.create_claimed()

    await env.engine.fail(claim.handle, reason="it failed", failure=FAILURE)

    ended = await env.engine.await_end(e)
    assert ended is not None
    assert (ended.failure, ended.reason, ended.result, ended.encoding) == (DECLINED, "it failed", None, None)
    assert [attempt.error for attempt in await env.engine.attempt_history(e)] == [DECLINED]


async def test_the_failure_is_no_result(env: Env) -> None:
    claim, e = await env.create_claimed()

    await env.engine.fail(claim.handle, reason="it failed", failure=FAILURE)

    assert await env.engine.get_execution_result(e) is None
    assert await env.engine.read_results([e]) == {e: None}


async def test_a_failed_attempt_that_is_retried_keeps_its_failure_and_the_execution_has_none(env: Env) -> None:
    claim, e = await env.create_claimed(policy=retries(1))
    await env.engine.fail(claim.handle, reason="it failed", failure=FAILURE)
    await env.sweep("delayed_promoter", after_ms=500)

    again = await env.grant_and_claim(e)
    await env.engine.complete(again.handle, result=b"1")

    assert [attempt.error for attempt in await env.engine.attempt_history(e)] == [DECLINED, None]
    ended = await env.engine.await_end(e)
    assert ended is not None
    assert (ended.failure, ended.result) == (None, b"1")


async def test_a_replay_forgets_the_failure(env: Env) -> None:
    claim, e = await env.create_claimed()
    await env.engine.fail(claim.handle, reason="it failed", failure=FAILURE)

    await env.engine.replay_execution(e)
    again = await env.grant_and_claim(e)
    await env.engine.fail(again.handle, reason="again")

    ended = await env.engine.await_end(e)
    assert ended is not None
    assert (ended.failure, ended.reason) == (None, "again")
    assert [attempt.error for attempt in await env.engine.attempt_history(e)] == [DECLINED, None]


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_failure_whose_reply_is_lost_is_kept_once(env: Env, loss: Loss) -> None:
    claim, e = await env.create_claimed()
    holder = lossy_engine(env.engine.runtime.store, loss)

    await holder.fail(claim.handle, reason="it failed", failure=FAILURE)
    await holder.fail(claim.handle, reason="it failed", failure=encode_stored(StoredFailure("Other", "later")))

    ended = await env.engine.await_end(e)
    assert ended is not None
    assert ended.failure == DECLINED


async def test_a_holder_whose_lease_was_lost_stores_no_failure(env: Env) -> None:
    claim, e = await env.create_claimed()
    await env.engine.revoke_lease(e, reason="test")

    with pytest.raises(errors.FabricError):
        await env.engine.fail(claim.handle, reason="late", failure=FAILURE)

    assert [attempt.error for attempt in await env.engine.attempt_history(e)] == [None]


@pytest.mark.parametrize(
    "failure",
    [
        b"",
        b"[]",
        b"{}",
        b'{"type": "x"}',
        b'{"type": 1, "text": "x"}',
        b'{"type": "x", "text": "y", "data": []}',
        encode_stored(StoredFailure("x", "y" * MAX_FAILURE_BYTES)),
        "text",
    ],
)
async def test_a_malformed_failure_is_refused_and_changes_nothing(env: Env, failure: bytes) -> None:
    claim, e = await env.create_claimed()
    before = await env.core(e)

    with pytest.raises(errors.InvalidInput, match="failure"):
        await env.engine.fail(claim.handle, reason="it failed", failure=failure)

    assert await env.core(e) == before


async def test_a_result_with_the_encoding_of_failures_is_refused(env: Env) -> None:
    claim = await env.create_and_claim()

    with pytest.raises(errors.InvalidInput, match="reserved for failures"):
        await env.engine.complete(claim.handle, result=FAILURE, encoding="ff.failure")
    with pytest.raises(errors.InvalidInput, match="reserved for failures"):
        await env.engine.complete_many([(claim.handle, FAILURE)], encoding="ff.failure")


@pytest.mark.parametrize("kind", ["failure_only", "any_outcome"])
@pytest.mark.parametrize("dispatch", [False, True])
async def test_an_edge_does_not_pass_a_failure_on_as_a_result(flow: FlowEnv, kind: str, dispatch: bool) -> None:
    flow.engine.dispatcher._enabled = dispatch
    await flow.begin("ab", input_payload=b"orig")
    await flow.edge("a", "b", dependency_kind=kind, data_passing_ref="r")

    await flow.engine.fail((await flow.claim("a")).handle, reason="it failed", failure=FAILURE)
    await (flow.engine.dispatcher.wait_idle() if dispatch else flow.cascade("a"))

    assert (await flow.state("b"), await flow.payload("b")) == ("waiting", b"orig")
