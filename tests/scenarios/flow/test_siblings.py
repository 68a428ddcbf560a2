"""S-022 to S-026: the siblings that a fired join no longer needs are cancelled despite crashes."""

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
from flowfabric.stores.verdicts import Verdict
from tests.scenarios.flow_env import WAITING, FlowEnv, any_of, quorum

RECONCILED = "ff_sibling_cancel_reconcile"
DISPOSITIONS = ("cancelled", "already_terminal", "not_found")


async def begin_fired_join(flow: FlowEnv, upstreams: str = "123", policy: object = None) -> None:
    """Begin a flow whose join has fired: the first upstream completed, the second runs, the others wait."""
    await flow.begin(f"b{upstreams}")
    await flow.join(upstreams, "b", policy or any_of("cancel_remaining"))
    if len(upstreams) > 1:
        await flow.claim(upstreams[1])
    await flow.succeed(upstreams[0])
    await flow.cascade(upstreams[0])


def reconcile_actions(flow: FlowEnv) -> dict[str, float]:
    """Return how often the reconciler reported each action."""
    counted = {one.value: flow.engine.metrics.counter_value(RECONCILED, action=one.value) for one in SiblingReconcile}
    return {name: often for name, often in counted.items() if often}


@pytest.mark.spec("S-022")
async def test_the_dispatcher_cancels_the_remaining_siblings(flow: FlowEnv) -> None:
    await begin_fired_join(flow)

    assert await flow.sweep("edge_cancel_dispatcher") == [1]

    assert await flow.state("2", "3") == "cancelled cancelled"
    losers = [await flow.row(name) for name in "23"]
    assert {row.cancellation_reason for row in losers} == {"sibling_quorum_satisfied"}
    assert {row.cancelled_by for row in losers} == {"operator_override"}
    assert [row.ownership_state for row in losers] == ["unowned", "unowned"]
    group = await flow.group("b")
    assert (group.cancel_siblings_pending_flag, group.cancel_siblings_pending_members) == (False, None)
    assert group.cancel_siblings_reason == "sibling_quorum_satisfied"
    assert await flow.pending_sibling_cancel("b") is None
    assert await flow.vector("b") == WAITING


class FailingOnceStore:
    """A store that fails the next commit about one execution."""

    def __init__(self, flow: FlowEnv, name: str) -> None:
        self._store, self._engine = flow.engine.store, flow.engine
        self._execution, self.failures = flow.names[name], 1

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def commit(self, changes: list[Change], hint: frozenset[str] = frozenset()) -> list[Verdict]:
        if self.failures and any(guard.key == (self._execution,) for one in changes for guard in one.guards):
            self.failures -= 1
            raise errors.StoreUnavailable("unplugged", source="transport")
        return await self._store.commit(changes, hint)


@pytest.mark.spec("S-023")
async def test_a_transient_failure_keeps_the_group_flagged(flow: FlowEnv) -> None:
    await begin_fired_join(flow)
    flagged, entry = await flow.group("b"), await flow.pending_sibling_cancel("b")
    flow.engine.runtime.commit_queue._store = FailingOnceStore(flow, "3")  # type: ignore[assignment]

    first = await flow.engine.sweep_once("edge_cancel_dispatcher")
    assert (first.processed, first.errors) == (0, 1)
    assert (await flow.group("b"), await flow.pending_sibling_cancel("b")) == (flagged, entry)

    assert await flow.sweep("edge_cancel_dispatcher") == [1]
    assert await flow.state("2", "3") == "cancelled cancelled"
    assert (await flow.pending_sibling_cancel("b"), (await flow.group("b")).cancel_siblings_pending_flag) == (
        None,
        False,
    )


@pytest.mark.spec("S-024")
async def test_the_reconciler_removes_a_stale_entry(flow: FlowEnv) -> None:
    await flow.begin_join("12", "b", any_of("cancel_remaining"))
    await flow.write(Upsert(PendingSiblingCancel(*flow.downstream("b"), flow.clock.now)))

    assert await flow.sweep("edge_cancel_reconciler") == [1]

    assert reconcile_actions(flow) == {"sremmed_stale": 1}
    assert await flow.pending_sibling_cancel("b") is None
    assert await flow.state("1", "2") == "waiting waiting"


@pytest.mark.spec("S-025")
async def test_the_reconciler_completes_an_interrupted_drain(flow: FlowEnv) -> None:
    await begin_fired_join(flow)
    await flow.cancel("2")
    await flow.write(Delete(Execution, (flow.names["3"],)))

    assert await flow.sweep("edge_cancel_reconciler") == [1]

    assert reconcile_actions(flow) == {"completed_drain": 1}
    group = await flow.group("b")
    assert (group.cancel_siblings_pending_flag, group.cancel_siblings_pending_members) == (False, None)
    assert await flow.pending_sibling_cancel("b") is None
    action = await flow.engine.reconcile_sibling_cancel_group(flow.id, flow.names["b"])
    assert action is SiblingReconcile.NO_OP


@pytest.mark.spec("S-026")
async def test_the_reconciler_leaves_running_members_to_the_dispatcher(flow: FlowEnv) -> None:
    await begin_fired_join(flow)
    await flow.succeed("3")
    before = await flow.group("b"), await flow.pending_sibling_cancel("b")

    assert await flow.sweep("edge_cancel_reconciler", 10) == [0] * 10

    assert reconcile_actions(flow) == {"no_op": 10}
    assert (await flow.group("b"), await flow.pending_sibling_cancel("b")) == before
    assert await flow.state("2") == "active"


async def test_an_impossible_join_cancels_the_remaining_siblings_with_its_reason(flow: FlowEnv) -> None:
    await flow.begin_join("1234", "b", quorum(3, "cancel_remaining"))
    await flow.fail_and_cascade("1", "2")

    assert await flow.state("b") == "skipped"
    await flow.sweep("edge_cancel_dispatcher")

    assert {(await flow.row(name)).cancellation_reason for name in "34"} == {"sibling_quorum_impossible"}


async def test_a_join_without_remaining_siblings_is_flagged_and_drained(flow: FlowEnv) -> None:
    await begin_fired_join(flow, "1", quorum(1, "cancel_remaining"))
    group = await flow.group("b")
    assert (group.cancel_siblings_pending_flag, group.cancel_siblings_pending_members) == (True, None)

    assert await flow.sweep("edge_cancel_dispatcher") == [1]

    assert await flow.pending_sibling_cancel("b") is None


async def test_draining_reports_what_it_did(flow: FlowEnv) -> None:
    await begin_fired_join(flow)
    b = flow.names["b"]

    assert await flow.engine.drain_sibling_cancel_group(flow.id, b) is SiblingDrain.DRAINED
    assert await flow.engine.drain_sibling_cancel_group(flow.id, b) is SiblingDrain.ALREADY_DRAINED
    await flow.write(Upsert(PendingSiblingCancel(*flow.downstream("b"), 0)), Delete(EdgeGroup, flow.downstream("b")))
    assert await flow.engine.drain_sibling_cancel_group(flow.id, b) is SiblingDrain.DRAINED_SANS_GROUP
    assert await flow.pending_sibling_cancel("b") is None
    with pytest.raises(errors.InvalidInput):
        await flow.engine.drain_sibling_cancel_group(flow.id, "")


async def test_two_dispatchers_cancel_each_sibling_once(flow: FlowEnv) -> None:
    await begin_fired_join(flow)
    # Another dispatcher was here.
    await flow.write(Patch(EdgeGroup, flow.downstream("b"), {"last_flow_graph_revision": 1}))

    await flow.sweep("edge_cancel_dispatcher", 2)

    for name in "23":
        history = await flow.engine.store.history(flow.names[name], Topic.COMPLETION, 10)
        assert [one.event.outcome for one in history] == ["cancelled"]


async def test_sibling_cancels_are_counted_by_disposition(flow: FlowEnv) -> None:
    await begin_fired_join(flow, "1234")
    await flow.write(Delete(Execution, (flow.names["4"],)))
    await flow.succeed("3")
    meters = flow.engine.metrics

    await flow.sweep("edge_cancel_reconciler")
    await flow.sweep("edge_cancel_dispatcher")

    assert meters.counter_value("ff_edge_group_policy", policy="any_of") == 1
    assert meters.counter_value("ff_sibling_cancel_dispatched", reason="sibling_quorum_satisfied") == 3
    found = {name: meters.counter_value("ff_sibling_cancel_disposition", disposition=name) for name in DISPOSITIONS}
    assert found == {"cancelled": 1, "already_terminal": 1, "not_found": 1}
    assert reconcile_actions(flow) == {"no_op": 1}


async def test_a_running_upstream_of_a_manually_resolved_edge_is_a_sibling(flow: FlowEnv) -> None:
    await flow.begin_join("123", "b", any_of("cancel_remaining"))
    await flow.claim("1")

    assert await flow.resolve("1", "b", "success") == "satisfied"

    group = await flow.group("b")
    assert flow_cancel.siblings_to_cancel(group) == flow.ids("123")


async def test_an_upstream_with_an_unrecorded_completion_is_not_its_own_sibling(flow: FlowEnv) -> None:
    await flow.begin_join("123", "b", quorum(3, "cancel_remaining"))
    await flow.engine.cancel_execution(flow.names["1"], reason="r", source="flow_cascade")

    await flow.sweep("dependency_reconciler")

    assert await flow.counts("b") == "0/1/0 of 3 impossible"
    assert flow_cancel.siblings_to_cancel(await flow.group("b")) == flow.ids("23")


async def test_joins_that_fire_in_one_batch_have_their_own_siblings(flow: FlowEnv) -> None:
    await flow.begin("bc12345")
    await flow.join("123", "b", quorum(2, "cancel_remaining"))
    await flow.join("45", "c", any_of("cancel_remaining"))
    await flow.fail_and_cascade("1")
    await flow.engine.replay_execution(flow.names["1"])
    await flow.succeed("2", "3", "4")

    assert await flow.sweep("completion_dispatch") == [3]

    flagged = {name: flow_cancel.siblings_to_cancel(await flow.group(name)) for name in "bc"}
    assert flagged == {"b": flow.ids("1"), "c": flow.ids("5")}


async def test_a_late_dispatcher_keeps_siblings_flagged_after_its_scan(flow: FlowEnv) -> None:
    """The member is replayed and its join fires again after the dispatcher cancelled the first siblings."""
    await flow.begin_join("123", "b", quorum(2, "cancel_remaining"))
    await flow.fail_and_cascade("1", "2")
    cancelling = flow.engine.bulk_canceller
    cancel_many = cancelling.cancel_many

    async def and_then_others_act(
        execution_ids: Sequence[str], reason: str, *, backlog_flow_id: str | None = None
    ) -> Dispositions:
        done = await cancel_many(execution_ids, reason, backlog_flow_id=backlog_flow_id)
        for name in "123b":
            await flow.engine.replay_execution(flow.names[name])
        await flow.claim("3")
        await flow.succeed_and_cascade("1", "2")
        return done

    cancelling.cancel_many = and_then_others_act  # type: ignore[method-assign]
    await cancelling.cancel_siblings(flow.downstream("b"))
    cancelling.cancel_many = cancel_many  # type: ignore[method-assign]
    assert (await flow.state("b", "3"), await flow.counts("b")) == ("waiting active", "2/0/0 of 3 satisfied")

    await flow.sweep("edge_cancel_dispatcher")
    assert await flow.state("b", "3") == "waiting cancelled"
    assert (await flow.row("3")).cancellation_reason == "sibling_quorum_satisfied"
    assert await flow.pending_sibling_cancel("b") is None


async def test_an_idle_dispatcher_keeps_siblings_flagged_concurrently(flow: FlowEnv) -> None:
    """Another dispatcher drained the entry, and the join of the replayed member fires during the load."""
    await flow.begin_join("123", "b", quorum(2, "cancel_remaining"))
    await flow.fail_and_cascade("1", "2")
    cancelling = flow.engine.bulk_canceller
    await cancelling.cancel_siblings(flow.downstream("b"))
    for name in "123b":
        await flow.engine.replay_execution(flow.names[name])
    await flow.claim("3")
    load = flow.engine.runtime.load

    async def and_then_the_join_fires(reads: Sequence[Read]) -> Loaded:
        found = await load(reads)
        flow.engine.runtime.load = load  # type: ignore[method-assign]
        await flow.succeed_and_cascade("1", "2")
        return found

    flow.engine.runtime.load = and_then_the_join_fires  # type: ignore[method-assign]
    assert await cancelling.cancel_siblings(flow.downstream("b")) == {}

    assert await flow.pending_sibling_cancel("b") is not None
    await flow.sweep("edge_cancel_dispatcher")
    assert await flow.state("b", "3") == "waiting cancelled"
