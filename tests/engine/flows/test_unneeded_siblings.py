"""Siblings that are cancelled in bulk record no outcome on their edges: their outcomes are counted in every case.

Each test has a join of four that the first success satisfies; the other three are untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.flows import bulk_cancel
from flowfabric.engine.flows.join_resolver import Downstream
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.execution import Execution
from flowfabric.model.flow import PendingSiblingCancel
from flowfabric.stores.queries import Loaded, Read, Scan
from flowfabric.testing.flaky_store import Loss, SyncPoint
from flowfabric.testing.flow_invariants import check_flow_invariants
from tests.engine.flow_harness import FIRST_OF_ALL, FlowHarness

ALL_OF_THEM = {"kind": "quorum", "k": 4, "on_satisfied": "cancel_remaining"}
CANCEL, COUNT, DRAIN = 3, 4, 5  # The commits after the one of the outcome and the one that fires the join.
DAY_MS = 24 * 60 * 60 * 1000
ALL_COUNTED = (1, 3, 4)


@pytest.fixture(autouse=True)
def _bulk_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel few siblings by the path that serves many."""
    monkeypatch.setattr(bulk_cancel, "MIN_UNLOADED_CANCELS", 1)


async def create_join(harness: FlowHarness, policy: dict[str, Any] = FIRST_OF_ALL) -> Claimed:
    """Create a join of four, one of which is claimed."""
    await harness.graph([*"abcdj"], [(parent, "j") for parent in "abcd"], policies={"j": policy})
    [held] = await harness.claim(1)
    return held


def hold_call(harness: FlowHarness, verb: str, number: int) -> SyncPoint:
    """Hold the n-th of the following calls."""
    for _ in range(number - 1):
        harness.store.stop_before(verb).release()
    return harness.store.stop_before(verb)


async def cancel_siblings_and_die(harness: FlowHarness) -> list[str]:
    """Cancel the siblings and kill the process before it counts them; return their names."""
    held = await create_join(harness)
    counting = hold_call(harness, "commit", COUNT)
    await harness.engine.complete(held.handle)
    await counting.reached()
    await kill_process(harness, counting)
    siblings = [name for name in "abcd" if harness.names[name] != held.execution_id]
    assert await harness.states(*siblings) == "cancelled cancelled cancelled"
    assert await group_counts(harness) == (1, 0, 4)
    return siblings


async def kill_process(harness: FlowHarness, commit: SyncPoint) -> None:
    """Kill the process; its pending commit is not written."""
    tasks = [*harness.engine.dispatcher._tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    harness.store.lose("commit", Loss.REQUEST)
    commit.release()
    await harness.engine.runtime.commit_queue.drain()


async def group_counts(harness: FlowHarness) -> tuple[int, int, int]:
    group = await harness.group("j")
    return group.succeeded, group.failed, group.n


async def is_drained(harness: FlowHarness) -> bool:
    entries = await harness.store.scan(Scan(PendingSiblingCancel, limit=10))
    return not entries and not (await harness.group("j")).cancel_siblings_pending_flag


def make_unreadable(harness: FlowHarness, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every load of this row fail as unreadable."""
    load = harness.store.load

    async def loads(wants: Sequence[Read]) -> Loaded:
        if Read(Execution, (harness.names[broken],)) in wants:
            raise errors.Corruption("exec_core: attempt_state: 99 is not a known code")
        return await load(wants)

    monkeypatch.setattr(harness.store, "load", loads)


@pytest.mark.parametrize("sweep", ["edge_cancel_dispatcher", "edge_cancel_reconciler"])
async def test_outcomes_that_a_dead_process_did_not_count_are_counted_by_a_sweep(
    harness: FlowHarness, sweep: str
) -> None:
    await cancel_siblings_and_die(harness)

    await harness.mortal.sweep_once(sweep)

    assert (await group_counts(harness), await is_drained(harness)) == (ALL_COUNTED, True)
    await check_flow_invariants(harness.mortal)


@pytest.mark.parametrize("loss", [*Loss])
@pytest.mark.parametrize("call", [CANCEL, COUNT, DRAIN])
async def test_a_lost_reply_to_any_commit_neither_loses_nor_doubles_an_outcome(
    harness: FlowHarness, loss: Loss, call: int
) -> None:
    held = await create_join(harness)
    harness.store.lose("commit", loss, after=call - 1)
    await harness.engine.complete(held.handle)
    await harness.engine.dispatcher.wait_idle()
    assert harness.store.losses == [("commit", loss)]

    await harness.sweep("completion_dispatch", "edge_cancel_dispatcher")
    await harness.engine.dispatcher.wait_idle()

    assert (await group_counts(harness), await is_drained(harness)) == (ALL_COUNTED, True)
    assert sorted((await harness.states(*"abcd")).split()) == ["cancelled"] * 3 + ["completed"]
    assert await harness.states("j") == "waiting"
    await check_flow_invariants(harness.mortal)


@pytest.mark.parametrize("verb", ["load", "commit"], ids=["before it is looked at", "after it was looked at"])
async def test_a_replayed_sibling_is_counted_only_when_its_new_life_has_finished(
    harness: FlowHarness, verb: str
) -> None:
    held = await create_join(harness)
    counting = hold_call(harness, verb, COUNT)
    await harness.engine.complete(held.handle)
    await counting.reached()
    again = next(name for name in "abcd" if harness.names[name] != held.execution_id)
    await harness.mortal.replay_execution(harness.names[again])
    counting.release()
    await harness.engine.dispatcher.wait_idle()

    assert await harness.states(again) == "waiting"
    assert await group_counts(harness) == (1, 2, 4)
    await check_flow_invariants(harness.mortal)
    one = next(one for one in await harness.claim() if one.execution_id == harness.names[again])
    await harness.engine.complete(one.handle)
    await harness.engine.dispatcher.wait_idle()
    assert (await group_counts(harness), await is_drained(harness)) == ((2, 2, 4), True)


async def test_a_sweep_does_not_count_a_sibling_that_was_replayed(harness: FlowHarness) -> None:
    again = (await cancel_siblings_and_die(harness))[0]
    child = Downstream(harness.flow, harness.names["j"])
    folding = harness.store.stop_before("commit")
    counting = asyncio.create_task(harness.mortal.bulk_canceller.resolve_unrecorded_outcomes(child))
    await folding.reached()
    await harness.engine.replay_execution(harness.names[again])
    folding.release()
    await counting

    assert (await group_counts(harness), await harness.states(again)) == ((1, 2, 4), "waiting")


async def test_uncounted_outcomes_are_recorded_when_the_siblings_are_purged(
    harness: FlowHarness, clock: ManualClock
) -> None:
    await cancel_siblings_and_die(harness)
    await harness.mortal.drain_sibling_cancel_group(harness.flow, harness.names["j"])
    clock.advance_ms(DAY_MS)

    for name in "abcd":
        assert await harness.mortal.purge_execution(harness.names[name])
    await harness.sweep("completion_dispatch")

    assert await group_counts(harness) == ALL_COUNTED


async def test_an_unreadable_sibling_does_not_delay_the_count_of_others(
    harness: FlowHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (await cancel_siblings_and_die(harness))[0]
    make_unreadable(harness, broken, monkeypatch)
    done = await harness.mortal.sweep_once("edge_cancel_dispatcher")

    assert (done.processed, done.errors) == (0, 1)
    assert await group_counts(harness) == (1, 2, 4)
    assert not await is_drained(harness)


@pytest.mark.parametrize("sweep", ["edge_cancel_dispatcher", "edge_cancel_reconciler"])
async def test_outcomes_that_cannot_be_counted_now_are_counted_later(
    harness: FlowHarness, sweep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cancel_siblings_and_die(harness)
    with monkeypatch.context() as broken:
        make_unreadable(harness, "j", broken)
        assert (await harness.mortal.sweep_once(sweep)).errors == 1
    assert not await is_drained(harness)

    await harness.mortal.sweep_once(sweep)

    assert (await group_counts(harness), await is_drained(harness)) == (ALL_COUNTED, True)


async def test_a_reconciler_does_not_drain_what_was_cancelled_after_its_count(harness: FlowHarness) -> None:
    held = await create_join(harness)
    cancelling = hold_call(harness, "commit", CANCEL)
    await harness.engine.complete(held.handle)
    await cancelling.reached()
    deciding = hold_call(harness, "load", 4)
    reconciling = asyncio.create_task(harness.mortal.sweep_once("edge_cancel_reconciler"))
    await deciding.reached()
    dying = harness.store.stop_before("commit")
    cancelling.release()
    await dying.reached()
    deciding.release()
    await reconciling
    await kill_process(harness, dying)
    await harness.sweep("edge_cancel_reconciler")

    assert (await group_counts(harness), await is_drained(harness)) == (ALL_COUNTED, True)


async def test_reconciling_a_group_without_flagged_siblings_counts_nothing(harness: FlowHarness) -> None:
    await harness.graph([*"abj"], [("a", "j"), ("b", "j")])
    await harness.mortal.cancel_execution(harness.names["a"], source="flow_cascade", reason="over")

    done = await harness.mortal.reconcile_sibling_cancel_group(harness.flow, harness.names["j"])

    assert done.value == "no_op"
    assert await harness.states("a", "b", "j") == "cancelled waiting waiting_children"


async def test_siblings_cancelled_for_a_former_life_of_the_join_are_counted_in_the_next(harness: FlowHarness) -> None:
    held = await create_join(harness, ALL_OF_THEM)
    cancelling = hold_call(harness, "commit", CANCEL)
    await harness.engine.fail(held.handle, reason="broken", category="permanent")
    await cancelling.reached()
    assert await harness.states("j") == "skipped"
    await harness.mortal.replay_execution(harness.names["j"])
    cancelling.release()
    await harness.engine.dispatcher.wait_idle()

    await harness.engine.sweep_once("completion_dispatch")
    await harness.engine.dispatcher.wait_idle()

    assert await harness.states("j") == "skipped"
    assert (await group_counts(harness), await is_drained(harness)) == ((0, 4, 4), True)
    await check_flow_invariants(harness.mortal)


async def test_siblings_made_unneeded_by_the_replay_of_the_join_are_counted(harness: FlowHarness) -> None:
    await harness.graph([*"abcdj"], [("a", "j")], policies={"j": FIRST_OF_ALL})
    await harness.engine.cancel_execution(harness.names["a"])
    await harness.engine.dispatcher.wait_idle()
    assert await harness.states("j") == "skipped"
    for name in "bcd":
        edge = harness.engine.minter.uuid()
        await harness.engine.stage_dependency_edge(harness.flow, edge, harness.names[name], harness.names["j"])
        await harness.engine.apply_dependency_to_child(harness.flow, edge, harness.names["j"], harness.names[name])
    [held] = await harness.claim(1)
    await harness.engine.complete(held.handle)
    await harness.engine.dispatcher.wait_idle()
    assert await group_counts(harness) == (1, 1, 4)

    await harness.engine.replay_execution(harness.names["j"])
    await harness.engine.dispatcher.wait_idle()
    assert await group_counts(harness) == (1, 2, 4)
    await harness.sweep("completion_dispatch")

    assert sorted((await harness.states(*"bcdj")).split()) == ["cancelled", "cancelled", "completed", "waiting"]
    assert (await group_counts(harness), await is_drained(harness)) == (ALL_COUNTED, True)
    await check_flow_invariants(harness.mortal)
