"""Rows of a flow that make no sense, or cannot be read, are told of and hold up nobody else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import WaitIndefinite
from flowfabric.engine.sweeps.sweeper import SweepResult
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.flow import CascadeOutcome, FlowCancelled, PartiallyCancelled
from flowfabric.model.change import Patch
from flowfabric.model.execution import Execution
from flowfabric.model.flow import EdgeGroup, FlowSummary
from flowfabric.rules.feed import Filter
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Loaded, Read
from tests.scenarios.flowing import Flowing, any_of


@pytest.fixture
async def still(store: Store, clock: ManualClock) -> Flowing:
    """A flow that nobody watches: what is wrong with its rows is meant to be."""
    return Flowing(Engine(store, minter=SeededMinter(1), settings=Settings(dispatch=False)), clock)


@pytest.fixture
async def lively(store: Store, clock: ManualClock) -> Flowing:
    """The same, with its ends carried on at once."""
    return Flowing(Engine(store, minter=SeededMinter(1)), clock)


async def spoil(flow: Flowing, name: str, column: str = "terms") -> None:
    """Terms, or successors, that nobody could have written."""
    await flow.write(Patch(Execution, (flow.names[name],), {column: "[5]"}))


def unreadable(flow: Flowing, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A row with something in it that stands for nothing."""
    load = flow.engine.store.load

    async def loads(wants: Sequence[Read]) -> Loaded:
        if Read(Execution, (flow.names[name],)) in wants:
            raise errors.Corruption("exec_core: attempt_state: 99 is not a known code")
        return await load(wants)

    monkeypatch.setattr(flow.engine.store, "try_load_now", lambda _: None)
    monkeypatch.setattr(flow.engine.store, "load", loads)


async def join_with_too_many_ends(flow: Flowing) -> None:
    """Two joins of the ends of a and x, one of which claims to have counted both before a has ended."""
    await flow.begin("abcdx")
    for name in "bc":
        await flow.join("xa", name)
    await flow.edge("a", "d")
    await flow.succeed("x")
    await (flow.engine.dispatcher.wait_idle() if flow.engine.dispatcher._enabled else flow.cascade("x"))
    await flow.write(Patch(EdgeGroup, (flow.id, flow.names["b"]), {"succeeded": 2}))
    await flow.succeed("a")


async def test_a_cascade_goes_on_past_a_join_that_cannot_be_counted(still: Flowing) -> None:
    await join_with_too_many_ends(still)

    assert await still.cascade("a") == [CascadeOutcome(2, 0)]

    assert await still.state("b", "c", "d") == "waiting_children waiting waiting"
    assert await still.counts("b") == "2/0/0 of 2 pending"
    with pytest.raises(errors.BugError, match="invariant_violation"):
        await still.resolve("a", "b", "success")


@pytest.mark.parametrize("sweep", ["completion_dispatch", "dependency_reconciler"])
async def test_a_sweep_goes_on_past_a_join_that_cannot_be_counted(still: Flowing, sweep: str) -> None:
    await join_with_too_many_ends(still)

    done = await still.engine.sweep_once(sweep)

    assert (done.processed, done.errors) == (2, 1)
    assert await still.state("b", "c", "d") == "waiting_children waiting waiting"


async def test_a_sweep_of_few_edges_comes_to_those_behind_a_join_that_cannot_be_counted(still: Flowing) -> None:
    await join_with_too_many_ends(still)

    passes = [await still.engine.sweep_once("completion_dispatch", batch=1) for _ in range(3)]

    assert sorted((one.processed, one.errors) for one in passes) == [(0, 1), (1, 0), (1, 0)]
    assert await still.state("b", "c", "d") == "waiting_children waiting waiting"


@pytest.mark.parametrize(
    ("sweep", "unread", "chosen"),
    [
        ("completion_dispatch", "x", None),
        ("dependency_reconciler", "x", None),
        ("dependency_reconciler", "b", Filter(namespace="default")),
    ],
)
async def test_a_sweep_goes_on_past_an_execution_that_cannot_be_read(
    still: Flowing, monkeypatch: pytest.MonkeyPatch, sweep: str, unread: str, chosen: Filter | None
) -> None:
    await still.begin("abcdx")
    for upstream, downstream in ("xb", "ac", "ad"):
        await still.edge(upstream, downstream)
    await still.cancel("a", "x")
    unreadable(still, monkeypatch, unread)

    assert await still.engine.sweep_once(sweep, chosen) == SweepResult(2, 1)
    assert await still.state("c", "d") == "skipped skipped"


async def test_the_projector_goes_on_past_a_flow_with_a_member_that_cannot_be_read(
    still: Flowing, monkeypatch: pytest.MonkeyPatch
) -> None:
    await still.begin("a")
    others = [await Flowing(still.engine, still.clock).begin("b") for _ in range(3)]
    unreadable(still, monkeypatch, "a")

    swept = await still.engine.sweep_once("flow_projector")

    assert (swept.processed, swept.errors) == (3, 1)
    assert [await other.one(FlowSummary, other.id) is not None for other in (still, *others)] == [False] + [True] * 3


async def test_an_end_reaches_the_others_past_a_join_that_cannot_be_counted(lively: Flowing) -> None:
    await join_with_too_many_ends(lively)

    await lively.engine.dispatcher.wait_idle()

    assert await lively.state("b", "c", "d") == "waiting_children waiting waiting"


@pytest.mark.parametrize("few", [128, 1])
async def test_an_execution_ends_whatever_became_of_those_who_wait_for_it(
    lively: Flowing, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", few)
    await lively.begin("abc")
    await lively.join("a", "b", any_of("let_run"))
    await lively.join("a", "c", any_of("let_run"))
    await spoil(lively, "b")

    await lively.succeed("a")
    await lively.engine.dispatcher.wait_idle()

    assert await lively.state("a", "b", "c") == "completed waiting_children waiting"


@pytest.mark.parametrize("column", ["terms", "successors"])
async def test_a_member_that_cannot_be_cancelled_is_told_and_given_up(still: Flowing, column: str) -> None:
    await still.begin("abc")
    await spoil(still, "b", column)

    answer = await still.engine.cancel_flow(still.id, reason="r", wait=WaitIndefinite())

    assert answer == PartiallyCancelled("cancel_all", still.ids("abc"), still.ids("b"))  # type: ignore[arg-type]
    assert await still.state("a", "b", "c") == "cancelled waiting cancelled"
    assert (await still.backlog())[1] == ["b"]
    still.clock.advance_ms(30_000)
    assert (await still.engine.sweep_once("cancel_reconciler")).errors == 1
    assert await still.backlog() == (None, [])


@pytest.mark.parametrize(("policy", "failed"), [("cancel_all", "b"), ("cancel_pending", ""), ("flow_only", "")])
async def test_a_flow_with_a_member_that_cannot_be_read_is_cancelled(
    still: Flowing, monkeypatch: pytest.MonkeyPatch, policy: str, failed: str
) -> None:
    await still.begin("abc")
    with monkeypatch.context() as meanwhile:
        unreadable(still, meanwhile, "b")
        answer = await still.engine.cancel_flow(still.id, policy=policy, wait=WaitIndefinite())

    told = (policy, still.ids("abc"))
    assert answer == (PartiallyCancelled(*told, still.ids(failed)) if failed else FlowCancelled(*told))  # type: ignore[arg-type]
    ended = "waiting waiting waiting" if policy == "flow_only" else "cancelled waiting cancelled"
    assert await still.state("a", "b", "c") == ended
    assert (await still.backlog())[1] == [*failed]
