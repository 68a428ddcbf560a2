"""Tags that begin with `ff.` are the engine's, the server's and the lease holder's; all tags are bounded in bytes."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.types import CreateExecution
from flowfabric.rules.execution.tags import MAX_TAG_BYTES, TRACE_TAG
from tests.executions import claim_one, create_request
from tests.scenarios.env import Env
from tests.scenarios.flow_env import FlowEnv

LARGE = "x" * (60 * 1024)


async def tags(env: Env, execution_id: str) -> dict[str, str]:
    snapshot = await env.engine.describe_execution(execution_id)
    assert snapshot is not None
    return dict(snapshot.tags)


def tagged(env: Env, tags: dict[str, str]) -> CreateExecution:
    return create_request(env.engine.new_execution_id(), tags=tags)


@pytest.mark.parametrize("key", ["ff.show", "ff.ask.11111111"])
async def test_a_reserved_tag_cannot_be_set_without_the_lease(env: Env, key: str) -> None:
    _, e = await env.create_claimed()
    calls: list[Any] = [
        lambda: env.engine.set_execution_tag(e, key, "v"),
        lambda: env.engine.set_execution_tags(e, {"a.b": "c", key: "v"}),
        lambda: env.engine.create(tagged(env, {key: "v"})),
    ]
    for call in calls:
        with pytest.raises(errors.InvalidTagKey, match=key):
            await call()
    refused, created = await env.engine.create_executions([tagged(env, {key: "v"}), tagged(env, {TRACE_TAG: "00-1"})])

    assert await tags(env, e) == {}
    assert isinstance(refused, errors.InvalidTagKey)
    assert not isinstance(created, errors.FabricError)
    assert await tags(env, created.execution_id) == {TRACE_TAG: "00-1"}


async def test_the_holder_sets_reserved_tags_while_it_holds_the_lease(env: Env) -> None:
    claim = await env.create_and_claim()

    assert await env.engine.set_tags(claim.handle, {"ff.show": "1", "a.b": "2"}) == 2
    assert await tags(env, claim.execution_id) == {"a.b": "2", "ff.show": "1"}
    env.clock.advance_ms(60_000)
    with pytest.raises(errors.LeaseExpired):
        await env.engine.set_tags(claim.handle, {"ff.show": "late"})
    assert await tags(env, claim.execution_id) == {"a.b": "2", "ff.show": "1"}


async def test_a_previous_lease_holder_cannot_set_tags(env: Env) -> None:
    claim = await env.create_and_claim()
    env.clock.advance_ms(60_000)
    successor = await claim_one(env.engine, worker_id="wb", worker_instance_id="wb-1")

    with pytest.raises(errors.StaleLease):
        await env.engine.set_tags(claim.handle, {"ff.show": "old"})
    await env.engine.set_tags(successor.handle, {"ff.show": "new"})
    assert await tags(env, claim.execution_id) == {"ff.show": "new"}


async def test_invalid_tags_from_the_lease_holder_change_nothing(env: Env) -> None:
    claim = await env.create_and_claim()
    with pytest.raises(errors.InvalidTagKey):
        await env.engine.set_tags(claim.handle, {"a.b": "c", "Bad": "d"})
    with pytest.raises(errors.InvalidInput):
        await env.engine.set_tags(claim.handle, {})
    assert await tags(env, claim.execution_id) == {}


async def test_the_tags_of_an_execution_are_bounded_in_bytes(env: Env) -> None:
    claim, e = await env.create_claimed()
    two = {"a.a": LARGE, "a.b": LARGE}
    await env.engine.set_execution_tags(e, two)
    too_many: list[Any] = [
        lambda: env.engine.set_execution_tag(e, "a.c", LARGE),
        lambda: env.engine.set_execution_tags(e, {"a.c": LARGE}),
        lambda: env.engine.set_tags(claim.handle, {"a.c": LARGE}),
        lambda: env.engine.create(tagged(env, two | {"a.c": LARGE})),
        lambda: env.engine.set_tags(claim.handle, {"ff.a": LARGE, "ff.b": LARGE, "ff.c": LARGE}),
    ]
    for call in too_many:
        with pytest.raises(errors.InvalidInput, match=f"the limit is {MAX_TAG_BYTES}"):
            await call()
    [refused] = await env.engine.create_executions([tagged(env, two | {"a.c": LARGE})])

    assert isinstance(refused, errors.InvalidInput)
    assert await tags(env, e) == two
    assert await env.engine.set_tags(claim.handle, {"ff.show": LARGE}) == 1, "reserved tags have their own limit"


async def test_the_tags_of_a_flow_are_bounded_and_reserved_tags_are_refused(flow: FlowEnv) -> None:
    flow_id = (await flow.begin()).id
    with pytest.raises(errors.InvalidTagKey):
        await flow.engine.set_flow_tag(flow_id, "ff.show", "v")
    await flow.engine.set_flow_tag(flow_id, "a.a", LARGE)
    await flow.engine.set_flow_tag(flow_id, "a.b", LARGE)
    with pytest.raises(errors.InvalidInput, match="the limit is"):
        await flow.engine.set_flow_tag(flow_id, "a.c", LARGE)

    assert await flow.engine.get_flow_tag(flow_id, "a.c") is None
