"""The agreement test with flows: graphs grow, outcomes are dispatched, members are cancelled and replayed.

Dispatch is disabled, as if every process died right after each commit; cascades and sweeps are moves like others.
"""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.clock import ManualClock, StoreClockEstimate
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import WaitIndefinite
from flowfabric.ids import FlowId, PartitionCounts, SeededMinter, flow_partition
from flowfabric.model.execution import Execution
from flowfabric.settings import Settings
from flowfabric.testing.flow_invariants import check_flow_invariants
from tests.stateful import choices as some
from tests.stateful.players import Player
from tests.stateful.predicates import is_active, is_over
from tests.stateful.state_machine import live, move, run_drawn_sequences
from tests.stateful.test_agreement import Agreement

SWEEPS = (
    "completion_dispatch",
    "dependency_reconciler",
    "flow_projector",
    "cancel_reconciler",
    "edge_cancel_dispatcher",
    "edge_cancel_reconciler",
)
KINDS = ("success_only", "success_only", "success_only", "failure_only", "any_outcome", "sometimes")
POLICIES: tuple[dict[str, Any], ...] = (
    {"kind": "all_of"},
    {"kind": "any_of", "on_satisfied": "let_run"},
    {"kind": "any_of", "on_satisfied": "cancel_remaining"},
    {"kind": "quorum", "k": 2, "on_satisfied": "cancel_remaining"},
    {"kind": "quorum", "k": 3, "on_satisfied": "let_run"},
    {"kind": "quorum", "k": 0, "on_satisfied": "let_run"},
)


def _flows() -> tuple[str, ...]:
    """Return two flows on the partition of lane `default`, and one elsewhere."""
    minter, counts, here, there = SeededMinter(3), PartitionCounts(), list[str](), list[str]()
    while len(here) < 2 or not there:
        flow = FlowId(minter.uuid())
        near = flow_partition(flow, counts) == some.partition("default")
        (here if near else there).append(flow)
    return (here[0], here[0], here[0], here[1], there[0])


FLOWS = _flows()


def in_flow(row: Execution) -> bool:
    return row.flow_id is not None


def is_open(row: Execution) -> bool:
    return row.flow_id is not None and not is_over(row)


def is_skipped(row: Execution) -> bool:
    return row.public_state.value in ("skipped", "failed")


class FlowPlayer(Player):
    """Two engines that dispatch nothing by themselves."""

    def _engine(self, clock: ManualClock, seat: int) -> Engine:
        engine = super()._engine(clock, seat)
        quiet = Engine(self.store, minter=engine.minter, settings=Settings(dispatch=False))
        quiet.runtime.random, quiet.runtime.estimate = (
            engine.runtime.random,
            StoreClockEstimate(monotonic_s=lambda: 0.0),
        )
        quiet.estimate.update(clock.now)
        return quiet


class FlowAgreement(Agreement):
    """Several stores at once, with flows."""

    player = FlowPlayer

    def __init__(self) -> None:
        self.edges: list[tuple[str, str, str, str]] = []
        super().__init__()

    async def _compare(self) -> None:
        await super()._compare()
        for player in self.players:
            await check_flow_invariants(player.engines[0])

    @move(weight=0, seeded=(True, False), one=some.policies, other=some.policies)
    def begin(self, seeded: bool, one: Any, other: Any) -> None:
        super().begin(seeded, one, other)
        for flow in dict.fromkeys(FLOWS):
            self.do("create_flow", flow_id=flow)
        for _ in range(5):
            name = self.new_id("default")
            self.do("create_execution", execution_id=name, policy=None)
            self.do("add_execution_to_flow", flow_id=FLOWS[0], execution_id=name)
        members = self.known[-5:]
        for upstream, downstream in ((0, 2), (1, 2), (2, 3)):
            self._stage(FLOWS[0], members[upstream], members[downstream], "success_only", "r")
            self._apply(*self.edges[-1])

    # -- graphs -------------------------------------------------------------------------------------------------------

    @move(flow=FLOWS, kind=("dag", "", "other"), seat=some.seats)
    def create_flow(self, flow: str, kind: str, seat: int) -> None:
        self.do("create_flow", seat=seat, flow_id=flow, flow_kind=kind)

    @move(weight=3, flow=FLOWS, pick=some.picks, seat=some.seats)
    def add(self, flow: str, pick: int, seat: int) -> None:
        self.do("add_execution_to_flow", seat=seat, flow_id=flow, execution_id=self.pick(pick))

    @move(weight=2, flow=FLOWS)
    def grow(self, flow: str) -> None:
        name = self.new_id("default")
        self.do("create_execution", execution_id=name)
        self.do("add_execution_to_flow", flow_id=flow, execution_id=name)

    @move(weight=6, flow=FLOWS, up=some.picks, down=some.picks, kind=KINDS, ref=(None, None, "r"), applied=some.mostly)
    def connect(self, flow: str, up: int, down: int, kind: str, ref: str | None, applied: bool) -> None:
        if self._stage(flow, self.pick(up, in_flow), self.pick(down, is_open), kind, ref) and applied:
            self._apply(*self.edges[-1])

    def _stage(self, flow: str, upstream: str, downstream: str, kind: str, ref: str | None) -> bool:
        edge = self.minter.uuid()
        answer = self.do(
            "stage_dependency_edge",
            flow_id=flow,
            edge_id=edge,
            upstream=upstream,
            downstream=downstream,
            dependency_kind=kind,
            data_passing_ref=ref,
        )
        if isinstance(answer, Exception):
            return False
        self.edges.append((flow, edge, upstream, downstream))
        return True

    def _apply(self, flow: str, edge: str, upstream: str, downstream: str) -> None:
        self.do("apply_dependency_to_child", flow_id=flow, edge_id=edge, downstream=downstream, upstream=upstream)

    @move(edge=some.picks, revision=(None, 0, 7))
    def stage_again(self, edge: int, revision: int | None) -> None:
        if self.edges:
            flow, known, upstream, downstream = self.edges[-1 - edge % len(self.edges)]
            self.do(
                "stage_dependency_edge",
                flow_id=flow,
                edge_id=known,
                upstream=upstream,
                downstream=downstream,
                expected_graph_revision=revision,
            )

    @move(weight=2, edge=some.picks)
    def apply(self, edge: int) -> None:
        if self.edges:
            self._apply(*self.edges[-1 - edge % len(self.edges)])

    @move(weight=2, flow=FLOWS, pick=some.picks, policy=POLICIES)
    def choose_policy(self, flow: str, pick: int, policy: dict[str, Any]) -> None:
        self.do("set_edge_group_policy", flow_id=flow, downstream=self.pick(pick, is_open), policy=policy)

    # -- outcomes -----------------------------------------------------------------------------------------------------

    @move(weight=8, handle=some.picks, well=some.mostly, result=some.results)
    def finish(self, handle: int, well: bool, result: bytes | None) -> None:
        claimed = self.do("claim", lane_id="default", **self.who("wa"), lease_ttl_ms=30_000)
        if claimed is not None and not isinstance(claimed, Exception):
            held = self.held[-1]
            if well:
                self.do("complete", handle=held, result=result)
            else:
                self.do("fail", handle=held, reason="boom", category="permanent")

    @move(weight=3, pick=some.picks, seat=some.seats)
    def cascade(self, pick: int, seat: int) -> None:
        self.do("cascade_completion", seat=seat, execution_id=self.pick(pick, is_over))

    @move(weight=5, name=SWEEPS, seat=some.seats)
    def sweep(self, name: str, seat: int) -> None:
        self.do("sweep_once", seat=seat, name=name)

    @move(pick=some.picks)
    def park(self, pick: int) -> None:
        name = self.pick(pick, is_active)
        for held in self.held[::-1]:
            if held.fields.execution_id == name:
                self.do("wait_children", handle=held)
                return

    @move(weight=2, pick=some.picks)
    def replay_member(self, pick: int) -> None:
        self.do("replay_execution", execution_id=self.pick(pick, is_skipped))

    @move(pick=some.picks)
    def promote(self, pick: int) -> None:
        self.do("promote_blocked_to_eligible", execution_id=self.pick(pick, in_flow))

    # -- cancels ------------------------------------------------------------------------------------------------------

    @move(flow=FLOWS[2:], policy=("cancel_all", "cancel_pending", "flow_only", "none"), headed=some.mostly)
    def cancel_flow(self, flow: str, policy: str, headed: bool) -> None:
        if headed:
            self.do("cancel_flow_header", flow_id=flow, policy=policy, reason="stop", grace_ms=500)
        else:
            self.do("cancel_flow", flow_id=flow, policy=policy, wait=WaitIndefinite())

    @move(flow=FLOWS, pick=some.picks)
    def acknowledge(self, flow: str, pick: int) -> None:
        self.do("ack_cancel_member", flow_id=flow, execution_id=self.pick(pick, is_over))

    @move(flow=FLOWS, pick=some.picks)
    def reconcile_siblings(self, flow: str, pick: int) -> None:
        self.do("reconcile_sibling_cancel_group", flow_id=flow, downstream=self.pick(pick, in_flow))

    # -- reads --------------------------------------------------------------------------------------------------------

    @move(flow=FLOWS, pick=some.picks)
    def look(self, flow: str, pick: int) -> None:
        name = self.pick(pick, in_flow)
        self.do("describe_flow", flow_id=flow)
        self.do("get_flow_summary", flow_id=flow)
        self.do("list_edges", flow_id=flow, outgoing=name)
        self.do("list_edges", flow_id=flow, incoming=name)
        self.do("evaluate_flow_eligibility", execution_id=name)
        self.do("resolve_execution_flow_id", execution_id=name)

    @move(flow=FLOWS, key=("a.b", "x.y", "Bad"), value=("v", "ß"))
    def tag_flow(self, flow: str, key: str, value: str) -> None:
        self.do("set_flow_tag", flow_id=flow, key=key, value=value)
        self.do("get_flow_tag", flow_id=flow, key="a.b")


@pytest.fixture
def table(own_database: str) -> type[FlowAgreement]:
    """The state machine, with the database of this process."""
    return type("FlowAgreementHere", (FlowAgreement,), {"database": own_database})


@pytest.mark.timeout(600)
def test_flows_are_the_same_on_every_store(table: type[FlowAgreement]) -> None:
    run_drawn_sequences(table, examples=6, steps=40)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_a_long_sequence_of_flow_operations_is_the_same_on_every_store(table: type[FlowAgreement], seed: int) -> None:
    live(table, seed, steps=150)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_long_sequences_of_flow_operations_are_the_same_on_every_store(table: type[FlowAgreement]) -> None:
    for seed in range(1000, 1300):
        live(table, seed, steps=250)
