"""Flows: each operation takes effect exactly once although a request or a reply is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import pairwise
from uuid import UUID

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import GraphEdge, WaitIndefinite
from flowfabric.ids import FlowId, SeededMinter, mint_for_flow
from flowfabric.model.answers.flow import CascadeOutcome, GraphCreated, HeaderCancelled, Resolution, Staged
from flowfabric.model.flow import CancellationPolicy, EdgeGroup
from flowfabric.settings import Settings
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Scan
from tests.engine.exactly_once import assert_exactly_once
from tests.engine.lossy_store import Loss, LossyStore
from tests.engine.runtime.test_lost_replies import LEASE_MS, WORKER, Act, Case, Scene, create_scene
from tests.executions import create_request

F = FlowId(str(UUID(int=7)))
EDGE, OTHER = str(UUID(int=8)), str(UUID(int=9))


async def flow_of(scene: Scene, count: int, *, edge: bool = False, applied: bool = False) -> list[str]:
    """Create a flow with members and optionally an edge from the first to the second."""
    await scene.engine.create_flow(F)
    members = []
    for _ in range(count):
        e = mint_for_flow(F, scene.engine.partitions, scene.engine.minter)
        await scene.engine.create_execution(execution_id=e)
        await scene.engine.add_execution_to_flow(F, e)
        members.append(e)
    if edge:
        await scene.engine.stage_dependency_edge(F, EDGE, *members[:2], expected_graph_revision=count)
    if applied:
        await scene.engine.apply_dependency_to_child(F, EDGE, members[1], members[0])
    return [str(one) for one in members]


async def create_flow(scene: Scene) -> Act:
    return lambda: scene.engine.create_flow(F)


async def add_a_member(scene: Scene) -> Act:
    await flow_of(scene, 1)
    e = mint_for_flow(F, scene.engine.partitions, scene.engine.minter)
    await scene.engine.create_execution(execution_id=e)
    return lambda: scene.engine.add_execution_to_flow(F, e)


async def stage_an_edge(scene: Scene) -> Act:
    a, b = await flow_of(scene, 2)
    return lambda: scene.engine.stage_dependency_edge(F, EDGE, a, b, expected_graph_revision=2)


async def apply_an_edge(scene: Scene) -> Act:
    a, b = await flow_of(scene, 2, edge=True)
    return lambda: scene.engine.apply_dependency_to_child(F, EDGE, b, a)


async def set_a_policy(scene: Scene) -> Act:
    [a] = await flow_of(scene, 1)
    return lambda: scene.engine.set_edge_group_policy(F, a, {"kind": "quorum", "k": 2, "on_satisfied": "let_run"})


async def tag_a_flow(scene: Scene) -> Act:
    await flow_of(scene, 1)
    return lambda: scene.engine.set_flow_tag(F, "a.b", "c")


async def create_a_graph(scene: Scene) -> Act:
    names = [mint_for_flow(F, scene.engine.partitions, scene.engine.minter) for _ in range(3)]
    nodes = [create_request(e) for e in names]
    edges = [GraphEdge(names[0], names[2], edge_id=EDGE), GraphEdge(names[1], names[2], edge_id=OTHER)]
    return lambda: scene.engine.create_flow_graph(F, nodes, edges)


async def cancel_the_header(scene: Scene) -> Act:
    await flow_of(scene, 2)
    return lambda: scene.engine.cancel_flow_header(F, reason="r")


async def cancel_and_wait(scene: Scene) -> Act:
    await flow_of(scene, 2)
    return lambda: scene.engine.cancel_flow(F, reason="r", wait=WaitIndefinite())


async def acknowledge(scene: Scene) -> Act:
    a, _ = await flow_of(scene, 2)
    await scene.engine.cancel_flow_header(F, reason="r")
    return lambda: scene.engine.ack_cancel_member(F, a)


async def acknowledge_the_last(scene: Scene) -> Act:
    [a] = await flow_of(scene, 1)
    await scene.engine.cancel_flow_header(F, reason="r")
    return lambda: scene.engine.ack_cancel_member(F, a)


async def resolve_an_edge(scene: Scene) -> Act:
    _, b = await flow_of(scene, 2, edge=True, applied=True)
    return lambda: scene.engine.resolve_dependency(F, EDGE, b, "success")


async def complete_an_upstream(scene: Scene) -> Act:
    a, _ = await flow_of(scene, 2, edge=True, applied=True)
    await scene.granted(a)
    held = await scene.engine.claim_execution(a, **WORKER, lease_ttl_ms=LEASE_MS)

    async def done() -> object:
        answer = await scene.engine.complete(held.handle, result=b"R")
        await scene.engine.dispatcher.wait_idle()
        return answer

    return done


async def replay_a_skipped_member(scene: Scene) -> Act:
    a, b = await flow_of(scene, 2, edge=True, applied=True)
    await scene.engine.cancel_execution(a)
    await scene.engine.dispatcher.wait_idle()
    return lambda: scene.engine.replay_execution(b)


async def project(scene: Scene) -> Act:
    await flow_of(scene, 2)
    return lambda: scene.engine.project_flow_summary(F)


CASES: tuple[Case, ...] = (
    *(create_flow, add_a_member, stage_an_edge, apply_an_edge, set_a_policy, tag_a_flow, create_a_graph),
    *(cancel_the_header, cancel_and_wait, acknowledge, acknowledge_the_last, complete_an_upstream),
    *(replay_a_skipped_member, project),
)


@pytest.mark.parametrize("loss", Loss, ids=lambda loss: loss.name.lower())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_flow_operation_that_was_lost_once_takes_effect_once(
    clock: ManualClock, case: Case, loss: Loss
) -> None:
    await assert_exactly_once(MemoryStore(clock), clock, case, loss)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_every_store_recovers_a_lost_reply_of_a_flow_operation(
    store: Store, clock: ManualClock, case: Case
) -> None:
    await assert_exactly_once(store, clock, case, Loss.ANSWER)


@pytest.mark.parametrize("loss", [Loss.REQUEST, Loss.DOUBT, Loss.ANSWER], ids=lambda loss: loss.name.lower())
async def test_an_edge_that_is_resolved_with_losses_is_counted_once(
    store: Store, clock: ManualClock, loss: Loss
) -> None:
    await assert_exactly_once(store, clock, resolve_an_edge, loss)


@pytest.mark.parametrize("loss", [Loss.REQUEST, Loss.DOUBT, Loss.ANSWER], ids=lambda loss: loss.name.lower())
async def test_a_cascade_with_losses_skips_and_counts_all_descendants(store: Store, loss: Loss) -> None:
    lossy = LossyStore(store)
    engine = Engine(lossy, minter=SeededMinter(1), settings=Settings(dispatch=False))
    minted = [mint_for_flow(F, engine.partitions, engine.minter) for _ in range(6)]
    names = sorted(minted, reverse=True)  # The first skipped member is not the first member of the flow.
    nodes = [create_request(name, "l") for name in names]
    await engine.create_flow_graph(F, nodes, [GraphEdge(*pair) for pair in pairwise(names)], namespace="n")
    await engine.cancel_execution(names[0])
    lossy.next_loss = loss

    assert await engine.cascade_completion(names[0]) == CascadeOutcome(5, 5)

    assert lossy.losses == 1
    assert {await engine.read_execution_state(name) for name in names[1:]} == {"skipped"}


async def test_an_edge_whose_resolution_is_written_late_is_counted_once_and_reported_as_resolved(
    store: Store, clock: ManualClock
) -> None:
    lossy = LossyStore(store)
    scene = await create_scene(lossy, clock)
    act = await resolve_an_edge(scene)
    lossy.next_loss = Loss.LATE

    assert await act() is Resolution.ALREADY_RESOLVED

    [group] = await store.scan(Scan(EdgeGroup))
    assert (group.succeeded, group.n, group.group_state) == (1, 1, "satisfied")


async def _add_upstream(rival: Engine, downstream: str) -> None:
    """As another process, add a member and an edge from it to the same downstream."""
    e = mint_for_flow(F, rival.partitions, rival.minter)
    await rival.create_execution(execution_id=e)
    await rival.add_execution_to_flow(F, e)
    await rival.stage_dependency_edge(F, OTHER, e, downstream)
    await rival.apply_dependency_to_child(F, OTHER, downstream, e)


async def stage_while_others_build(scene: Scene, rival: Engine) -> tuple[Act, Act, object]:
    a, b = await flow_of(scene, 2)
    act = lambda: scene.engine.stage_dependency_edge(F, EDGE, a, b, expected_graph_revision=2)  # noqa: E731
    return act, lambda: _add_upstream(rival, b), Staged(EDGE, 3)


async def cancel_while_others_tag(scene: Scene, rival: Engine) -> tuple[Act, Act, object]:
    members = await flow_of(scene, 2)
    act = lambda: scene.engine.cancel_flow_header(F, reason="r")  # noqa: E731
    everyone = sorted(members)
    answer = HeaderCancelled(CancellationPolicy.CANCEL_ALL, everyone, everyone)
    return act, lambda: rival.set_flow_tag(F, "a.b", "c"), answer


async def create_a_graph_while_others_build(scene: Scene, rival: Engine) -> tuple[Act, Act, object]:
    act, tag = await create_a_graph(scene), lambda: rival.set_flow_tag(F, "a.b", "c")
    return act, tag, GraphCreated(F, 5, 3, 2)


@pytest.mark.parametrize(
    "case",
    [
        stage_while_others_build,
        cancel_while_others_tag,
        create_a_graph_while_others_build,
    ],
    ids=lambda case: case.__name__,
)
async def test_a_lost_reply_is_recovered_after_others_have_written_the_same_rows(
    store: Store, clock: ManualClock, case: Callable[[Scene, Engine], Awaitable[tuple[Act, Act, object]]]
) -> None:
    lossy = LossyStore(store)
    scene = await create_scene(lossy, clock)
    act, lossy.after_loss, answer = await case(scene, Engine(store, minter=SeededMinter(77)))
    lossy.next_loss = Loss.ANSWER

    assert await act() == answer
    assert lossy.losses == 1


async def test_a_lost_replay_is_not_inferred_from_what_others_removed(store: Store, clock: ManualClock) -> None:
    """The replay removes the last member from the pending cancels of its flow; meanwhile it is acknowledged."""
    lossy, elsewhere = LossyStore(store), Engine(store, minter=SeededMinter(77))
    scene = await create_scene(lossy, clock)
    [a] = await flow_of(scene, 1)
    await scene.engine.cancel_flow_header(F, reason="enough")
    await scene.engine.cancel_execution(a, reason="enough")

    async def acknowledged() -> None:
        await elsewhere.ack_cancel_member(F, a)
        await elsewhere.set_execution_tag(a, "a.b", "c")

    lossy.next_loss, lossy.after_loss = Loss.DOUBT, acknowledged
    await scene.engine.replay_execution(a)

    assert await scene.engine.read_execution_state(a) == "waiting"
