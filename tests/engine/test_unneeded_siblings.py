"""Siblings that are cancelled unseen leave no note on their edges: whatever happens, their ends are counted.

Each test has a join of four that the first end satisfies; the other three have never been touched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine import cancelling
from flowfabric.engine.folding import Child
from flowfabric.model.answers import Claimed
from flowfabric.model.execution import Execution
from flowfabric.model.flow import PendingCancelGroup
from flowfabric.stores.base import Loaded, Scan, Want
from flowfabric.testing.faults import Gate, Loss
from flowfabric.testing.flow_invariants import check_flow_invariants
from tests.engine.crew import FIRST_OF_ALL, Crew

CANCEL, COUNT, DRAIN = 3, 4, 5  # commits, after that of the end and the one that fires the join
DAY_MS = 24 * 60 * 60 * 1000
ALL_COUNTED = (1, 3, 4)


@pytest.fixture(autouse=True)
def _unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few siblings are cancelled as many are."""
    monkeypatch.setattr(cancelling, "MANY", 1)


async def ready(crew: Crew) -> Claimed:
    """A join of four, one of which is being worked on."""
    await crew.graph([*"abcdj"], [(parent, "j") for parent in "abcd"], policies={"j": FIRST_OF_ALL})
    [held] = await crew.claim(1)
    return held


def nth(crew: Crew, verb: str, number: int) -> Gate:
    """Stop before a call that is still to come."""
    for _ in range(number - 1):
        crew.store.stop_before(verb).open()
    return crew.store.stop_before(verb)


async def dies_before_it_counts(crew: Crew) -> list[str]:
    """The siblings are cancelled, and the process that did it is gone; who they are."""
    held = await ready(crew)
    counting = nth(crew, "commit", COUNT)
    await crew.engine.complete(held.handle)
    await counting.reached()
    tasks = [*crew.engine.dispatcher._tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    crew.store.lose("commit", Loss.REQUEST)
    counting.open()
    await crew.engine.commits.drained()
    siblings = [name for name in "abcd" if crew.names[name] != held.execution_id]
    assert await crew.states(*siblings) == "cancelled cancelled cancelled"
    assert await counts(crew) == (1, 0, 4)
    return siblings


async def counts(crew: Crew) -> tuple[int, int, int]:
    group = await crew.group("j")
    return group.succeeded, group.failed, group.n


async def is_drained(crew: Crew) -> bool:
    entries = await crew.store.scan(Scan(PendingCancelGroup, limit=10))
    return not entries and not (await crew.group("j")).cancel_siblings_pending_flag


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
    await crew.engine.dispatched()
    assert crew.store.lost == [("commit", loss)]

    await crew.sweep("completion_dispatch", "edge_cancel_dispatcher")
    await crew.engine.dispatched()

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
    counting.open()
    await crew.engine.dispatched()

    assert await crew.states(again) == "waiting"
    assert await counts(crew) == (1, 2, 4)
    await check_flow_invariants(crew.mortal)
    one = next(one for one in await crew.claim() if one.execution_id == crew.names[again])
    await crew.engine.complete(one.handle)
    await crew.engine.dispatched()
    assert (await counts(crew), await is_drained(crew)) == ((2, 2, 4), True)


async def test_a_sweep_does_not_count_a_sibling_that_lives_again(crew: Crew) -> None:
    again = (await dies_before_it_counts(crew))[0]
    child = Child(crew.flow, crew.names["j"])
    folding = crew.store.stop_before("commit")
    counting = asyncio.create_task(crew.mortal.cancelling.count_unnoted(child))
    await folding.reached()
    await crew.engine.replay_execution(crew.names[again])
    folding.open()
    await counting

    assert (await counts(crew), await crew.states(again)) == ((1, 2, 4), "waiting")


async def test_ends_that_nobody_counted_are_noted_when_the_siblings_go(crew: Crew, clock: ManualClock) -> None:
    await dies_before_it_counts(crew)
    await crew.mortal.drain_sibling_cancel_group(crew.flow, crew.names["j"])
    clock.pass_ms(DAY_MS)

    for name in "abcd":
        assert await crew.mortal.purge_execution(crew.names[name])
    await crew.sweep("completion_dispatch")

    assert await counts(crew) == ALL_COUNTED


async def test_a_sibling_that_cannot_be_read_holds_up_the_count_of_no_other(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (await dies_before_it_counts(crew))[0]
    load = crew.mortal.store.load

    async def loads(wants: Sequence[Want]) -> Loaded:
        if Want(Execution, (crew.names[broken],)) in wants:
            raise errors.Corruption("exec_core: attempt_state: 99 stands for nothing")
        return await load(wants)

    monkeypatch.setattr(crew.store, "load", loads)
    done = await crew.mortal.sweep_once("edge_cancel_dispatcher")

    assert (done.processed, done.errors) == (0, 1)
    assert await counts(crew) == (1, 2, 4)
    assert not await is_drained(crew)
