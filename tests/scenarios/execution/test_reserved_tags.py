"""Tags that begin with `ff.` are the engine's, the server's and the lease holder's; all tags are bounded in bytes."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.types import CreateExecution
from flowfabric.rules.execution.tags import MAX_TAG_BYTES, TRACE_TAG
from tests.scenarios.flowing import Flowing
from tests.scenarios.play import Play

LARGE = "x" * (60 * 1024)


async def tags(play: Play, execution_id: str) -> dict[str, str]:
    snapshot = await play.engine.describe_execution(execution_id)
    assert snapshot is not None
    return dict(snapshot.tags)


def creation(play: Play, given: dict[str, str]) -> CreateExecution:
    execution_id = play.engine.new_execution_id()
    return CreateExecution(
        execution_id=execution_id, partition=0, namespace="ns", lane_id="default", execution_kind="k", tags=given
    )


@pytest.mark.parametrize("key", ["ff.show", "ff.ask.11111111"])
async def test_nobody_sets_a_reserved_tag_without_the_lease(play: Play, key: str) -> None:
    held = await play.claimed()
    e = held.execution_id
    calls: list[Any] = [
        lambda: play.engine.set_execution_tag(e, key, "v"),
        lambda: play.engine.set_execution_tags(e, {"a.b": "c", key: "v"}),
        lambda: play.engine.create(creation(play, {key: "v"})),
    ]
    for call in calls:
        with pytest.raises(errors.InvalidTagKey, match=key):
            await call()
    refused, created = await play.engine.create_executions(
        [creation(play, {key: "v"}), creation(play, {TRACE_TAG: "00-1"})]
    )

    assert await tags(play, e) == {}
    assert isinstance(refused, errors.InvalidTagKey)
    assert not isinstance(created, errors.FabricError)
    assert await tags(play, created.execution_id) == {TRACE_TAG: "00-1"}


async def test_the_holder_sets_reserved_tags_while_it_holds_the_lease(play: Play) -> None:
    held = await play.claimed()

    assert await play.engine.set_tags(held.handle, {"ff.show": "1", "a.b": "2"}) == 2
    assert await tags(play, held.execution_id) == {"a.b": "2", "ff.show": "1"}
    play.clock.advance_ms(60_000)
    with pytest.raises(errors.LeaseExpired):
        await play.engine.set_tags(held.handle, {"ff.show": "late"})
    assert await tags(play, held.execution_id) == {"a.b": "2", "ff.show": "1"}


async def test_a_holder_whose_work_was_taken_over_sets_nothing(play: Play) -> None:
    held = await play.claimed()
    play.clock.advance_ms(60_000)
    heir = await play.engine.claim("default", worker_id="wb", worker_instance_id="wb-1")
    assert heir is not None

    with pytest.raises(errors.StaleLease):
        await play.engine.set_tags(held.handle, {"ff.show": "old"})
    await play.engine.set_tags(heir.handle, {"ff.show": "new"})
    assert await tags(play, held.execution_id) == {"ff.show": "new"}


async def test_bad_tags_of_a_holder_change_nothing(play: Play) -> None:
    held = await play.claimed()
    with pytest.raises(errors.InvalidTagKey):
        await play.engine.set_tags(held.handle, {"a.b": "c", "Bad": "d"})
    with pytest.raises(errors.InvalidInput):
        await play.engine.set_tags(held.handle, {})
    assert await tags(play, held.execution_id) == {}


async def test_the_tags_of_an_execution_do_not_grow_beyond_their_bound(play: Play) -> None:
    held = await play.claimed()
    e = held.execution_id
    two = {"a.a": LARGE, "a.b": LARGE}
    await play.engine.set_execution_tags(e, two)
    too_many: list[Any] = [
        lambda: play.engine.set_execution_tag(e, "a.c", LARGE),
        lambda: play.engine.set_execution_tags(e, {"a.c": LARGE}),
        lambda: play.engine.set_tags(held.handle, {"a.c": LARGE}),
        lambda: play.engine.create(creation(play, two | {"a.c": LARGE})),
        lambda: play.engine.set_tags(held.handle, {"ff.a": LARGE, "ff.b": LARGE, "ff.c": LARGE}),
    ]
    for call in too_many:
        with pytest.raises(errors.InvalidInput, match=f"the limit is {MAX_TAG_BYTES}"):
            await call()
    [refused] = await play.engine.create_executions([creation(play, two | {"a.c": LARGE})])

    assert isinstance(refused, errors.InvalidInput)
    assert await tags(play, e) == two
    assert await play.engine.set_tags(held.handle, {"ff.show": LARGE}) == 1, "reserved tags have room of their own"


async def test_the_tags_of_a_flow_are_bounded_and_its_reserved_ones_are_not_set(flow: Flowing) -> None:
    flow_id = (await flow.begin()).id
    with pytest.raises(errors.InvalidTagKey):
        await flow.engine.set_flow_tag(flow_id, "ff.show", "v")
    await flow.engine.set_flow_tag(flow_id, "a.a", LARGE)
    await flow.engine.set_flow_tag(flow_id, "a.b", LARGE)
    with pytest.raises(errors.InvalidInput, match="the limit is"):
        await flow.engine.set_flow_tag(flow_id, "a.c", LARGE)

    assert await flow.engine.get_flow_tag(flow_id, "a.c") is None
