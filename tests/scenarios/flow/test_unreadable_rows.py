"""Inconsistent or unreadable rows of a flow are reported and do not stop other work."""

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
from tests.scenarios.flow_env import FlowEnv, any_of


@pytest.fixture
async def flow(store: Store, clock: ManualClock) -> FlowEnv:
    """A flow without the checked store: its rows are broken on purpose."""
    return FlowEnv(Engine(store, minter=SeededMinter(1), settings=Settings(dispatch=False)), clock)


@pytest.fixture
async def dispatching(store: Store, clock: ManualClock) -> FlowEnv:
    """The same, with dispatch."""
    return FlowEnv(Engine(store, minter=SeededMinter(1)), clock)


async def corrupt(flow: FlowEnv, name: str, column: str = "terms") -> None:
    """Write unreadable terms or successors."""
    await flow.write(Patch(Execution, (flow.names[name],), {column: "[5]"}))


def make_unreadable(flow: FlowEnv, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make every load of a row fail as corrupt."""
    load = flow.engine.store.load

    async def loads(wants: Sequence[Read]) -> Loaded:
        if Read(Execution, (flow.names[name],)) in wants:
            raise errors.Corruption("exec_core: attempt_state: 99 is not a known code")
        return await load(wants)

    monkeypatch.setattr(flow.engine.store, "try_load_now", lambda _: None)
    monkeypatch.setattr(flow.engine.store, "load", loads)


async def begin_inconsistent_join(flow: FlowEnv) -> None:
    """Begin a flow with two joins of a and x, one of which has counted both before a completes."""
    await flow.begin("abcdx")
    for name in "bc":
        await flow.join("xa", name)
    await flow.edge("a", "d")
    await flow.succeed("x")
    await (flow.engine.dispatcher.wait_idle() if flow.engine.dispatcher._enabled else flow.cascade("x"))
    await flow.write(Patch(EdgeGroup, (flow.id, flow.names["b"]), {"succeeded": 2}))
    await flow.succeed("a")


async def test_a_cascade_continues_past_an_inconsistent_join(flow: FlowEnv) -> None:
    await begin_inconsistent_join(flow)

    assert await flow.cascade("a") == [CascadeOutcome(2, 0)]

    assert await flow.state("b", "c", "d") == "waiting_children waiting waiting"
    assert await flow.counts("b") == "2/0/0 of 2 pending"
    with pytest.raises(errors.BugError, match="invariant_violation"):
        await flow.resolve("a", "b", "success")


@pytest.mark.parametrize("sweep", ["completion_dispatch", "dependency_reconciler"])
async def test_a_sweep_continues_past_an_inconsistent_join(flow: FlowEnv, sweep: str) -> None:
    await begin_inconsistent_join(flow)

    done = await flow.engine.sweep_once(sweep)

    assert (done.processed, done.errors) == (2, 1)
    assert await flow.state("b", "c", "d") == "waiting_children waiting waiting"


async def test_a_small_sweep_batch_continues_past_an_inconsistent_join(flow: FlowEnv) -> None:
    await begin_inconsistent_join(flow)

    passes = [await flow.engine.sweep_once("completion_dispatch", batch=1) for _ in range(3)]

    assert sorted((one.processed, one.errors) for one in passes) == [(0, 1), (1, 0), (1, 0)]
    assert await flow.state("b", "c", "d") == "waiting_children waiting waiting"


@pytest.mark.parametrize(
    ("sweep", "unread", "chosen"),
    [
        ("completion_dispatch", "x", None),
        ("dependency_reconciler", "x", None),
        ("dependency_reconciler", "b", Filter(namespace="default")),
    ],
)
async def test_a_sweep_continues_past_an_unreadable_execution(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch, sweep: str, unread: str, chosen: Filter | None
) -> None:
    await flow.begin("abcdx", edges=("xb", "ac", "ad"))
    await flow.cancel("a", "x")
    make_unreadable(flow, monkeypatch, unread)

    assert await flow.engine.sweep_once(sweep, chosen) == SweepResult(2, 1)
    assert await flow.state("c", "d") == "skipped skipped"


async def test_the_projector_continues_past_a_flow_with_an_unreadable_member(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    await flow.begin("a")
    others = [await FlowEnv(flow.engine, flow.clock).begin("b") for _ in range(3)]
    make_unreadable(flow, monkeypatch, "a")

    swept = await flow.engine.sweep_once("flow_projector")

    assert (swept.processed, swept.errors) == (3, 1)
    assert [await other.load(FlowSummary, other.id) is not None for other in (flow, *others)] == [False] + [True] * 3


async def test_a_completion_reaches_other_members_past_an_inconsistent_join(dispatching: FlowEnv) -> None:
    await begin_inconsistent_join(dispatching)

    await dispatching.engine.dispatcher.wait_idle()

    assert await dispatching.state("b", "c", "d") == "waiting_children waiting waiting"


@pytest.mark.parametrize("max_named", [128, 1])
async def test_an_execution_completes_despite_an_unreadable_dependent(
    dispatching: FlowEnv, monkeypatch: pytest.MonkeyPatch, max_named: int
) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", max_named)
    await dispatching.begin("abc")
    await dispatching.join("a", "b", any_of("let_run"))
    await dispatching.join("a", "c", any_of("let_run"))
    await corrupt(dispatching, "b")

    await dispatching.succeed("a")
    await dispatching.engine.dispatcher.wait_idle()

    assert await dispatching.state("a", "b", "c") == "completed waiting_children waiting"


@pytest.mark.parametrize("column", ["terms", "successors"])
async def test_an_unreadable_member_is_reported_and_dropped_from_the_backlog(flow: FlowEnv, column: str) -> None:
    await flow.begin("abc")
    await corrupt(flow, "b", column)

    answer = await flow.engine.cancel_flow(flow.id, reason="r", wait=WaitIndefinite())

    assert answer == PartiallyCancelled("cancel_all", flow.ids("abc"), flow.ids("b"))  # type: ignore[arg-type]
    assert await flow.state("a", "b", "c") == "cancelled waiting cancelled"
    assert (await flow.backlog())[1] == ["b"]
    flow.clock.advance_ms(30_000)
    assert (await flow.engine.sweep_once("cancel_reconciler")).errors == 1
    assert await flow.backlog() == (None, [])


@pytest.mark.parametrize(("policy", "failed"), [("cancel_all", "b"), ("cancel_pending", ""), ("flow_only", "")])
async def test_a_flow_with_an_unreadable_member_is_cancelled(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch, policy: str, failed: str
) -> None:
    await flow.begin("abc")
    with monkeypatch.context() as patched:
        make_unreadable(flow, patched, "b")
        answer = await flow.engine.cancel_flow(flow.id, policy=policy, wait=WaitIndefinite())

    members = (policy, flow.ids("abc"))
    assert answer == (PartiallyCancelled(*members, flow.ids(failed)) if failed else FlowCancelled(*members))  # type: ignore[arg-type]
    ended = "waiting waiting waiting" if policy == "flow_only" else "cancelled waiting cancelled"
    assert await flow.state("a", "b", "c") == ended
    assert (await flow.backlog())[1] == [*failed]
