"""Siblings that are cancelled unseen leave no note on their edges: whatever happens, their ends are counted.

Each test has a join of four that the first end satisfies; the other three have never been touched.
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
from flowfabric.testing.faults import Loss, SyncPoint
from flowfabric.testing.flow_invariants import check_flow_invariants
from tests.engine.crew import FIRST_OF_ALL, Crew

ALL_OF_THEM = {"kind": "quorum", "k": 4, "on_satisfied": "cancel_remaining"}
CANCEL, COUNT, DRAIN = 3, 4, 5  # commits, after that of the end and the one that fires the join
DAY_MS = 24 * 60 * 60 * 1000
ALL_COUNTED = (1, 3, 4)


@pytest.fixture(autouse=True)
def _unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few siblings are cancelled as many are."""
    monkeypatch.setattr(bulk_cancel, "MIN_UNSEEN_CANCELS", 1)


async def ready(crew: Crew, policy: dict[str, Any] = FIRST_OF_ALL) -> Claimed:
    """A join of four, one of which is being worked on."""
    await crew.graph([*"abcdj"], [(parent, "j") for parent in "abcd"], policies={"j": policy})
    [held] = await crew.claim(1)
    return held


def nth(crew: Crew, verb: str, number: int) -> SyncPoint:
    """Stop before a call that is still to come."""
    for _ in range(number - 1):
        crew.store.stop_before(verb).release()
    return crew.store.stop_before(verb)


async def dies_before_it_counts(crew: Crew) -> list[str]:
    """The siblings are cancelled, and the process that did it is gone; who they are."""
    held = await ready(crew)
    counting = nth(crew, "commit", COUNT)
    await crew.engine.complete(held.handle)
    await counting.reached()
    await dies(crew, counting)
    siblings = [name for name in "abcd" if crew.names[name] != held.execution_id]
    assert await crew.states(*siblings) == "cancelled cancelled cancelled"
    assert await counts(crew) == (1, 0, 4)
    return siblings


async def dies(crew: Crew, commit: SyncPoint) -> None:
    """The process is gone, and what it was about to write is not written."""
    tasks = [*crew.engine.dispatcher._tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    crew.store.lose("commit", Loss.REQUEST)
    commit.release()
    await crew.engine.runtime.commit_queue.drain()


async def counts(crew: Crew) -> tuple[int, int, int]:
    group = await crew.group("j")
    return group.succeeded, group.failed, group.n


async def is_drained(crew: Crew) -> bool:
    entries = await crew.store.scan(Scan(PendingSiblingCancel, limit=10))
    return not entries and not (await crew.group("j")).cancel_siblings_pending_flag


def cannot_be_read(crew: Crew, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks at this one is told that it makes no sense."""
    load = crew.store.load

    async def loads(wants: Sequence[Read]) -> Loaded:
        if Read(Execution, (crew.names[broken],)) in wants:
            raise errors.Corruption("exec_core: attempt_state: 99 is not a known code")
        return await load(wants)

    monkeypatch.setattr(crew.store, "load", loads)


@pytest.mark.parametrize("sweep", ["edge_cancel_dispatcher", "edge_cancel_reconciler"])
async def test_ends_that_a_dead_process_did_not_count_are_counted_by_a_sweep(crew: Crew, sweep: str) -> None:
    await dies_before_it_counts(crew)

    await crew.mortal.sweep_once(sweep)

    assert (await counts(crew), await is_drained(crew)) == (ALL_COUNTED, True)
    await check_flow_invariants(crew.mortal)


@pytest.mark.parametrize("loss", [*Loss])
@pytest.mark.parametrize("call", [CANCEL, COUNT, DRAIN])
async def test_a_lost_answer_at_any_commit_does_not_lose_or_double_an_end(crew: Crew, loss: Loss, call: int) -> None:
    held = await ready(crew)
    crew.store.lose("commit", loss, after=call - 1)
    await crew.engine.complete(held.handle)
    await crew.engine.dispatcher.wait_idle()
    assert crew.store.losses == [("commit", loss)]

    await crew.sweep("completion_dispatch", "edge_cancel_dispatcher")
    await crew.engine.dispatcher.wait_idle()

    assert (await counts(crew), await is_drained(crew)) == (ALL_COUNTED, True)
    assert sorted((await crew.states(*"abcd")).split()) == ["cancelled"] * 3 + ["completed"]
    assert await crew.states("j") == "waiting"
    await check_flow_invariants(crew.mortal)


@pytest.mark.parametrize("verb", ["load", "commit"], ids=["before it is looked at", "after it was looked at"])
async def test_a_sibling_with_another_life_is_not_counted_until_that_ends(crew: Crew, verb: str) -> None:
    held = await ready(crew)
    counting = nth(crew, verb, COUNT)
    await crew.engine.complete(held.handle)
    await counting.reached()
    again = next(name for name in "abcd" if crew.names[name] != held.execution_id)
    await crew.mortal.replay_execution(crew.names[again])
    counting.release()
    await crew.engine.dispatcher.wait_idle()

    assert await crew.states(again) == "waiting"
    assert await counts(crew) == (1, 2, 4)
    await check_flow_invariants(crew.mortal)
    one = next(one for one in await crew.claim() if one.execution_id == crew.names[again])
    await crew.engine.complete(one.handle)
    await crew.engine.dispatcher.wait_idle()
    assert (await counts(crew), await is_drained(crew)) == ((2, 2, 4), True)


async def test_a_sweep_does_not_count_a_sibling_that_lives_again(crew: Crew) -> None:
    again = (await dies_before_it_counts(crew))[0]
    child = Downstream(crew.flow, crew.names["j"])
    folding = crew.store.stop_before("commit")
    counting = asyncio.create_task(crew.mortal.bulk_canceller.resolve_unrecorded_outcomes(child))
    await folding.reached()
    await crew.engine.replay_execution(crew.names[again])
    folding.release()
    await counting

    assert (await counts(crew), await crew.states(again)) == ((1, 2, 4), "waiting")


async def test_ends_that_nobody_counted_are_noted_when_the_siblings_go(crew: Crew, clock: ManualClock) -> None:
    await dies_before_it_counts(crew)
    await crew.mortal.drain_sibling_cancel_group(crew.flow, crew.names["j"])
    clock.advance_ms(DAY_MS)

    for name in "abcd":
        assert await crew.mortal.purge_execution(crew.names[name])
    await crew.sweep("completion_dispatch")

    assert await counts(crew) == ALL_COUNTED


async def test_a_sibling_that_cannot_be_read_holds_up_the_count_of_no_other(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (await dies_before_it_counts(crew))[0]
    cannot_be_read(crew, broken, monkeypatch)
    done = await crew.mortal.sweep_once("edge_cancel_dispatcher")

    assert (done.processed, done.errors) == (0, 1)
    assert await counts(crew) == (1, 2, 4)
    assert not await is_drained(crew)


@pytest.mark.parametrize("sweep", ["edge_cancel_dispatcher", "edge_cancel_reconciler"])
async def test_ends_that_cannot_be_counted_now_are_counted_later(
    crew: Crew, sweep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await dies_before_it_counts(crew)
    with monkeypatch.context() as broken:
        cannot_be_read(crew, "j", broken)
        assert (await crew.mortal.sweep_once(sweep)).errors == 1
    assert not await is_drained(crew)

    await crew.mortal.sweep_once(sweep)

    assert (await counts(crew), await is_drained(crew)) == (ALL_COUNTED, True)


async def test_a_reconciler_does_not_drain_what_was_cancelled_after_it_had_counted(crew: Crew) -> None:
    held = await ready(crew)
    cancelling = nth(crew, "commit", CANCEL)
    await crew.engine.complete(held.handle)
    await cancelling.reached()
    deciding = nth(crew, "load", 4)
    reconciling = asyncio.create_task(crew.mortal.sweep_once("edge_cancel_reconciler"))
    await deciding.reached()
    dying = crew.store.stop_before("commit")
    cancelling.release()
    await dying.reached()
    deciding.release()
    await reconciling
    await dies(crew, dying)
    await crew.sweep("edge_cancel_reconciler")

    assert (await counts(crew), await is_drained(crew)) == (ALL_COUNTED, True)


async def test_to_reconcile_a_group_that_has_flagged_nobody_counts_nothing(crew: Crew) -> None:
    await crew.graph([*"abj"], [("a", "j"), ("b", "j")])
    await crew.mortal.cancel_execution(crew.names["a"], source="flow_cascade", reason="over")

    done = await crew.mortal.reconcile_sibling_cancel_group(crew.flow, crew.names["j"])

    assert done.value == "no_op"
    assert await crew.states("a", "b", "j") == "cancelled waiting waiting_children"


async def test_siblings_that_were_cancelled_for_a_former_life_of_the_join_are_counted_in_the_next(crew: Crew) -> None:
    held = await ready(crew, ALL_OF_THEM)
    cancelling = nth(crew, "commit", CANCEL)
    await crew.engine.fail(held.handle, reason="broken", category="permanent")
    await cancelling.reached()
    assert await crew.states("j") == "skipped"
    await crew.mortal.replay_execution(crew.names["j"])
    cancelling.release()
    await crew.engine.dispatcher.wait_idle()

    await crew.engine.sweep_once("completion_dispatch")
    await crew.engine.dispatcher.wait_idle()

    assert await crew.states("j") == "skipped"
    assert (await counts(crew), await is_drained(crew)) == ((0, 4, 4), True)
    await check_flow_invariants(crew.mortal)


async def test_siblings_that_the_replay_of_the_join_makes_unneeded_are_counted(crew: Crew) -> None:
    await crew.graph([*"abcdj"], [("a", "j")], policies={"j": FIRST_OF_ALL})
    await crew.engine.cancel_execution(crew.names["a"])
    await crew.engine.dispatcher.wait_idle()
    assert await crew.states("j") == "skipped"
    for name in "bcd":
        edge = crew.engine.minter.uuid()
        await crew.engine.stage_dependency_edge(crew.flow, edge, crew.names[name], crew.names["j"])
        await crew.engine.apply_dependency_to_child(crew.flow, edge, crew.names["j"], crew.names[name])
    [held] = await crew.claim(1)
    await crew.engine.complete(held.handle)
    await crew.engine.dispatcher.wait_idle()
    assert await counts(crew) == (1, 1, 4)

    await crew.engine.replay_execution(crew.names["j"])
    await crew.engine.dispatcher.wait_idle()
    assert await counts(crew) == (1, 2, 4)
    await crew.sweep("completion_dispatch")

    assert sorted((await crew.states(*"bcdj")).split()) == ["cancelled", "cancelled", "completed", "waiting"]
    assert (await counts(crew), await is_drained(crew)) == (ALL_COUNTED, True)
    await check_flow_invariants(crew.mortal)
