"""S-022 to S-026: the upstreams that a fired join no longer needs are cancelled, whatever happens in between."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flowfabric import errors
from flowfabric.engine.flows.bulk_cancel import Dispositions
from flowfabric.model.answers.flow import SiblingDrain, SiblingReconcile
from flowfabric.model.change import Change, Delete, Patch, Upsert
from flowfabric.model.event import Topic
from flowfabric.model.execution import Execution
from flowfabric.model.flow import EdgeGroup, PendingSiblingCancel
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.stores.queries import Loaded, Read
from tests.scenarios.flowing import WAITING, Flowing, any_of, quorum

RECONCILED = "ff_sibling_cancel_reconcile"
DISPOSITIONS = ("cancelled", "already_terminal", "not_found")


async def fired(flow: Flowing, upstreams: str = "123", policy: object = None) -> None:
    """A join with siblings to cancel: the first upstream has ended well, the second runs, the others wait."""
    await flow.begin(f"b{upstreams}")
    await flow.join(upstreams, "b", policy or any_of("cancel_remaining"))
    if len(upstreams) > 1:
        await flow.run(upstreams[1])
    await flow.succeed(upstreams[0])
    await flow.cascade(upstreams[0])


def actions(flow: Flowing) -> dict[str, float]:
    """What the reconciler has said that it did, and how often."""
    counted = {one.value: flow.engine.metrics.counter_value(RECONCILED, action=one.value) for one in SiblingReconcile}
    return {name: often for name, often in counted.items() if often}


@pytest.mark.spec("S-022")
async def test_dispatcher_terminates_losers(flow: Flowing) -> None:
    await fired(flow)

    assert await flow.sweep("edge_cancel_dispatcher") == [1]

    assert await flow.state("2", "3") == "cancelled cancelled"
    losers = [await flow.row(name) for name in "23"]
    assert {row.cancellation_reason for row in losers} == {"sibling_quorum_satisfied"}
    assert {row.cancelled_by for row in losers} == {"operator_override"}
    assert [row.ownership_state for row in losers] == ["unowned", "unowned"]
    group = await flow.group("b")
    assert (group.cancel_siblings_pending_flag, group.cancel_siblings_pending_members) == (False, None)
    assert group.cancel_siblings_reason == "sibling_quorum_satisfied"
    assert await flow.entry("b") is None
    assert await flow.vector("b") == WAITING


class Unlucky:
    """A store that cannot be reached for the next commit about one execution."""

    def __init__(self, flow: Flowing, name: str) -> None:
        self._store, self._engine = flow.engine.store, flow.engine
        self._execution, self.failures = flow.names[name], 1

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def commit(self, changes: list[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        if self.failures and any(guard.key == (self._execution,) for one in changes for guard in one.guards):
            self.failures -= 1
            raise errors.StoreUnavailable("unplugged", source="transport")
        return await self._store.commit(changes, hint)


@pytest.mark.spec("S-023")
async def test_transient_failure_keeps_the_group(flow: Flowing) -> None:
    await fired(flow)
    flagged, entry = await flow.group("b"), await flow.entry("b")
    flow.engine.runtime.commit_queue._store = Unlucky(flow, "3")  # type: ignore[assignment]

    first = await flow.engine.sweep_once("edge_cancel_dispatcher")
    assert (first.processed, first.errors) == (0, 1)
    assert (await flow.group("b"), await flow.entry("b")) == (flagged, entry)

    assert await flow.sweep("edge_cancel_dispatcher") == [1]
    assert await flow.state("2", "3") == "cancelled cancelled"
    assert (await flow.entry("b"), (await flow.group("b")).cancel_siblings_pending_flag) == (None, False)


@pytest.mark.spec("S-024")
async def test_reconciler_removes_a_stale_entry(flow: Flowing) -> None:
    await flow.begin("b12")
    await flow.join("12", "b", any_of("cancel_remaining"))
    await flow.write(Upsert(PendingSiblingCancel(*flow.child("b"), flow.clock.now)))

    assert await flow.sweep("edge_cancel_reconciler") == [1]

    assert actions(flow) == {"sremmed_stale": 1}
    assert await flow.entry("b") is None
    assert await flow.state("1", "2") == "waiting waiting"


@pytest.mark.spec("S-025")
async def test_reconciler_completes_an_interrupted_drain(flow: Flowing) -> None:
    await fired(flow)
    await flow.cancel("2")
    await flow.write(Delete(Execution, (flow.names["3"],)))

    assert await flow.sweep("edge_cancel_reconciler") == [1]

    assert actions(flow) == {"completed_drain": 1}
    group = await flow.group("b")
    assert (group.cancel_siblings_pending_flag, group.cancel_siblings_pending_members) == (False, None)
    assert await flow.entry("b") is None
    action = await flow.engine.reconcile_sibling_cancel_group(flow.id, flow.names["b"])
    assert action is SiblingReconcile.NO_OP


@pytest.mark.spec("S-026")
async def test_reconciler_leaves_running_members_to_the_dispatcher(flow: Flowing) -> None:
    await fired(flow)
    await flow.succeed("3")
    before = await flow.group("b"), await flow.entry("b")

    assert await flow.sweep("edge_cancel_reconciler", 10) == [0] * 10

    assert actions(flow) == {"no_op": 10}
    assert (await flow.group("b"), await flow.entry("b")) == before
    assert await flow.state("2") == "active"


async def test_an_impossible_join_cancels_the_remaining_too_and_says_so(flow: Flowing) -> None:
    await flow.begin("b1234")
    await flow.join("1234", "b", quorum(3, "cancel_remaining"))
    await flow.fail("1", "2")
    await flow.cascade("1", "2")

    assert await flow.state("b") == "skipped"
    await flow.sweep("edge_cancel_dispatcher")

    assert {(await flow.row(name)).cancellation_reason for name in "34"} == {"sibling_quorum_impossible"}


async def test_a_join_without_remaining_upstreams_is_flagged_and_drained_all_the_same(flow: Flowing) -> None:
    await fired(flow, "1", quorum(1, "cancel_remaining"))
    group = await flow.group("b")
    assert (group.cancel_siblings_pending_flag, group.cancel_siblings_pending_members) == (True, None)

    assert await flow.sweep("edge_cancel_dispatcher") == [1]

    assert await flow.entry("b") is None


async def test_draining_tells_what_it_found(flow: Flowing) -> None:
    await fired(flow)
    b = flow.names["b"]

    assert await flow.engine.drain_sibling_cancel_group(flow.id, b) is SiblingDrain.DRAINED
    assert await flow.engine.drain_sibling_cancel_group(flow.id, b) is SiblingDrain.ALREADY_DRAINED
    await flow.write(Upsert(PendingSiblingCancel(*flow.child("b"), 0)), Delete(EdgeGroup, flow.child("b")))
    assert await flow.engine.drain_sibling_cancel_group(flow.id, b) is SiblingDrain.DRAINED_SANS_GROUP
    assert await flow.entry("b") is None
    with pytest.raises(errors.InvalidInput):
        await flow.engine.drain_sibling_cancel_group(flow.id, "")


async def test_two_dispatchers_cancel_everybody_once(flow: Flowing) -> None:
    await fired(flow)
    await flow.write(Patch(EdgeGroup, flow.child("b"), {"last_flow_graph_revision": 1}))  # someone else was here

    await flow.sweep("edge_cancel_dispatcher", 2)

    for name in "23":
        history = await flow.engine.store.history(flow.names[name], Topic.COMPLETION, 10)
        assert [one.event.outcome for one in history] == ["cancelled"]


async def test_what_becomes_of_siblings_is_counted(flow: Flowing) -> None:
    await fired(flow, "1234")
    await flow.write(Delete(Execution, (flow.names["4"],)))
    await flow.succeed("3")
    meters = flow.engine.metrics

    await flow.sweep("edge_cancel_reconciler")
    await flow.sweep("edge_cancel_dispatcher")

    assert meters.counter_value("ff_edge_group_policy", policy="any_of") == 1
    assert meters.counter_value("ff_sibling_cancel_dispatched", reason="sibling_quorum_satisfied") == 3
    found = {name: meters.counter_value("ff_sibling_cancel_disposition", disposition=name) for name in DISPOSITIONS}
    assert found == {"cancelled": 1, "already_terminal": 1, "not_found": 1}
    assert actions(flow) == {"no_op": 1}


async def test_an_upstream_that_still_runs_when_its_edge_is_resolved_by_hand_is_a_sibling_too(flow: Flowing) -> None:
    await flow.begin("b123")
    await flow.join("123", "b", any_of("cancel_remaining"))
    await flow.run("1")

    assert await flow.resolve("1", "b", "success") == "satisfied"

    group = await flow.group("b")
    assert flow_cancel.siblings_to_cancel(group) == flow.ids("123")


async def test_an_upstream_whose_end_was_noted_nowhere_is_no_sibling_of_itself(flow: Flowing) -> None:
    await flow.begin("b123")
    await flow.join("123", "b", quorum(3, "cancel_remaining"))
    await flow.engine.cancel_execution(flow.names["1"], reason="r", source="flow_cascade")

    await flow.sweep("dependency_reconciler")

    assert await flow.counts("b") == "0/1/0 of 3 impossible"
    assert flow_cancel.siblings_to_cancel(await flow.group("b")) == flow.ids("23")


async def test_joins_that_fire_together_have_each_their_own_siblings(flow: Flowing) -> None:
    await flow.begin("bc12345")
    await flow.join("123", "b", quorum(2, "cancel_remaining"))
    await flow.join("45", "c", any_of("cancel_remaining"))
    await flow.fail("1")
    await flow.cascade("1")
    await flow.engine.replay_execution(flow.names["1"])
    await flow.succeed("2", "3", "4")

    assert await flow.sweep("completion_dispatch") == [3]

    flagged = {name: flow_cancel.siblings_to_cancel(await flow.group(name)) for name in "bc"}
    assert flagged == {"b": flow.ids("1"), "c": flow.ids("5")}


async def test_a_dispatcher_that_comes_late_leaves_what_was_flagged_since(flow: Flowing) -> None:
    """Its siblings are cancelled when the member is replayed and its join fires anew; those are not its own."""
    await flow.begin("b123")
    await flow.join("123", "b", quorum(2, "cancel_remaining"))
    await flow.fail("1", "2")
    await flow.cascade("1", "2")
    cancelling = flow.engine.bulk_canceller
    cancel_many = cancelling.cancel_many

    async def and_then_others_act(
        names: Sequence[str], reason: str, *, backlog_flow_id: str | None = None
    ) -> Dispositions:
        done = await cancel_many(names, reason, backlog_flow_id=backlog_flow_id)
        for name in "123b":
            await flow.engine.replay_execution(flow.names[name])
        await flow.run("3")
        await flow.succeed("1", "2")
        await flow.cascade("1", "2")
        return done

    cancelling.cancel_many = and_then_others_act  # type: ignore[method-assign]
    await cancelling.cancel_siblings(flow.child("b"))
    cancelling.cancel_many = cancel_many  # type: ignore[method-assign]
    assert (await flow.state("b", "3"), await flow.counts("b")) == ("waiting active", "2/0/0 of 3 satisfied")

    await flow.sweep("edge_cancel_dispatcher")
    assert await flow.state("b", "3") == "waiting cancelled"
    assert (await flow.row("3")).cancellation_reason == "sibling_quorum_satisfied"
    assert await flow.entry("b") is None


async def test_a_dispatcher_that_finds_nothing_to_do_leaves_what_is_flagged_meanwhile(flow: Flowing) -> None:
    """Others have drained the entry that it was told of, and the join of another life fires while it looks."""
    await flow.begin("b123")
    await flow.join("123", "b", quorum(2, "cancel_remaining"))
    await flow.fail("1", "2")
    await flow.cascade("1", "2")
    cancelling = flow.engine.bulk_canceller
    await cancelling.cancel_siblings(flow.child("b"))
    for name in "123b":
        await flow.engine.replay_execution(flow.names[name])
    await flow.run("3")
    load = flow.engine.runtime.load

    async def and_then_the_join_fires(wants: Sequence[Read]) -> Loaded:
        found = await load(wants)
        flow.engine.runtime.load = load  # type: ignore[method-assign]
        await flow.succeed("1", "2")
        await flow.cascade("1", "2")
        return found

    flow.engine.runtime.load = and_then_the_join_fires  # type: ignore[method-assign]
    assert await cancelling.cancel_siblings(flow.child("b")) == {}

    assert await flow.entry("b") is not None
    await flow.sweep("edge_cancel_dispatcher")
    assert await flow.state("b", "3") == "waiting cancelled"
