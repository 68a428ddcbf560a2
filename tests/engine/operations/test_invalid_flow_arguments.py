"""Flow operations answer invalid arguments with typed errors and write nothing."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import FlowOperations, GraphEdge
from flowfabric.engine.operations.reads import ReadOperations
from flowfabric.ids import FlowId, SeededMinter, mint_for_flow
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from tests.engine.invalid_arguments import A_UUID, COUNT, EXECUTION_ID, NAME, REQUIRED, TEXT, UUID, OperationCase
from tests.executions import create_request
from tests.scenarios.checked_store import dump

FLOW = FlowId("550e8400-e29b-41d4-a716-446655440000")
MEMBERS = [mint_for_flow(FLOW, Settings().partitions, SeededMinter(number)) for number in range(3)]
STRANGER = "22222222-2222-4222-8222-222222222222"

FLOW_ID: list[Any] = [*REQUIRED, *A_UUID]
A_TEXT = [bad for bad in TEXT if bad is not None]
ON_PARTITION = [*EXECUTION_ID, "{fp:1}:" + UUID]
POLICY: list[Any] = [None, 5, "all_of", [], {}, {"kind": None}, {"kind": "any_of", "on_satisfied": 5}, {"kind": []}]
KIND: list[Any] = [5, True, "", "success", b"success_only", ["success_only"], "nul\0"]
REVISION = [*(bad for bad in COUNT if bad not in (None, 2**63)), 2**64]
KEY: list[Any] = [None, 5, b"a.b", "", "nodot", "A.b", "a.b\0", "\ud800.x"]
NODE: list[Any] = [None, 5, "node", {"execution_id": MEMBERS[0]}]

flow: dict[str, Any] = {"flow_id": FLOW}
bad_flow: dict[str, Any] = {"flow_id": FLOW_ID}
ends = {"upstream": MEMBERS[0], "downstream": MEMBERS[1]}
bad_ends = {"upstream": EXECUTION_ID, "downstream": EXECUTION_ID}

OPERATIONS: dict[str, OperationCase] = {
    "create_flow": OperationCase(
        {"flow_id": STRANGER}, {**bad_flow, "flow_kind": [*REQUIRED, "", *NAME], "namespace": NAME}
    ),
    "create_flow_graph": OperationCase(
        {"flow_id": STRANGER, "nodes": []},
        {
            **bad_flow,
            "nodes": [None, 5, "nodes", *([bad] for bad in NODE)],
            "edges": [5, "edges", [5], [("a", "b")], [GraphEdge(5, 6)]],  # type: ignore[arg-type]
            "policies": [5, "policies", {5: {}}, {MEMBERS[0]: 5}],
            "flow_kind": [*REQUIRED, "", *NAME],
            "namespace": NAME,
        },
    ),
    "add_execution_to_flow": OperationCase(
        {**flow, "execution_id": MEMBERS[2]}, {**bad_flow, "execution_id": ON_PARTITION}
    ),
    "stage_dependency_edge": OperationCase(
        {**flow, **ends, "edge_id": UUID},
        {
            **bad_flow,
            **bad_ends,
            "edge_id": FLOW_ID,
            "dependency_kind": [*REQUIRED, *KIND],
            "data_passing_ref": A_TEXT,
            "expected_graph_revision": REVISION,
        },
    ),
    "apply_dependency_to_child": OperationCase(
        {**flow, **ends, "edge_id": UUID},
        {
            **bad_flow,
            **bad_ends,
            "edge_id": FLOW_ID,
            "dependency_kind": KIND,
            "data_passing_ref": A_TEXT,
            "graph_revision": REVISION,
        },
    ),
    "set_edge_group_policy": OperationCase(
        {**flow, "downstream": MEMBERS[2], "policy": {"kind": "all_of"}},
        {**bad_flow, "downstream": ON_PARTITION, "policy": POLICY},
    ),
    "set_flow_tag": OperationCase(
        {**flow, "key": "a.b", "value": "v"}, {**bad_flow, "key": KEY, "value": [None, *A_TEXT]}
    ),
    "purge_flow": OperationCase(flow, bad_flow),
    "get_flow_tag": OperationCase({**flow, "key": "a.b"}, {**bad_flow, "key": KEY}),
    "resolve_dependency": OperationCase(
        {**flow, "edge_id": UUID, "downstream": MEMBERS[1], "outcome": "success"},
        {**bad_flow, "edge_id": FLOW_ID, "downstream": EXECUTION_ID, "outcome": [None, 5, "", "none", "completed"]},
    ),
    "cascade_completion": OperationCase({"execution_id": MEMBERS[0]}, {"execution_id": EXECUTION_ID}),
    "promote_blocked_to_eligible": OperationCase({"execution_id": MEMBERS[0]}, {"execution_id": EXECUTION_ID}),
    "evaluate_flow_eligibility": OperationCase({"execution_id": MEMBERS[0]}, {"execution_id": EXECUTION_ID}),
    "resolve_execution_flow_id": OperationCase({"execution_id": MEMBERS[0]}, {"execution_id": EXECUTION_ID}),
    "cancel_flow": OperationCase(
        flow, {**bad_flow, "policy": [None, 5, "", "all"], "reason": [None, *A_TEXT], "wait": [None, 5, "wait"]}
    ),
    "cancel_flow_header": OperationCase(
        flow, {**bad_flow, "policy": [None, 5, "all"], "reason": [None, *A_TEXT], "grace_ms": [*COUNT, 2**53]}
    ),
    "ack_cancel_member": OperationCase(
        {**flow, "execution_id": MEMBERS[0]}, {**bad_flow, "execution_id": EXECUTION_ID}
    ),
    "drain_sibling_cancel_group": OperationCase(
        {**flow, "downstream": MEMBERS[1]}, {**bad_flow, "downstream": EXECUTION_ID}
    ),
    "reconcile_sibling_cancel_group": OperationCase(
        {**flow, "downstream": MEMBERS[1]}, {**bad_flow, "downstream": EXECUTION_ID}
    ),
    "describe_flow": OperationCase(flow, bad_flow),
    "describe_edge": OperationCase({**flow, "edge_id": UUID}, {**bad_flow, "edge_id": FLOW_ID}),
    "get_flow_summary": OperationCase(flow, bad_flow),
    "project_flow_summary": OperationCase(flow, bad_flow),
    "list_flow_members": OperationCase(flow, bad_flow),
    "list_outgoing_edges": OperationCase(
        {**flow, "execution_id": MEMBERS[0]}, {**bad_flow, "execution_id": EXECUTION_ID}
    ),
    "list_incoming_edges": OperationCase(
        {**flow, "execution_id": MEMBERS[0]}, {**bad_flow, "execution_id": EXECUTION_ID}
    ),
    "list_edges": OperationCase({**flow, "outgoing": MEMBERS[0]}, {**bad_flow, "outgoing": EXECUTION_ID}),
    "list_flows": OperationCase(
        {"partition": 1}, {"partition": [*COUNT, "x", "{b:1}", 65_536], "cursor": A_UUID, "limit": COUNT}
    ),
}
ELSEWHERE = {"purge_flow"}  # an operation of an administrator
IN_THE_OTHER_TABLE = {"search_flows", "read_flow_graph"}  # of invalid_arguments.py


@pytest.fixture
async def engine(store: Store) -> Engine:
    engine = Engine(store, minter=SeededMinter(1), settings=Settings(dispatch=False))
    asks = [create_request(name) for name in MEMBERS[:2]]
    await engine.create_flow_graph(FLOW, asks)
    await engine.create_execution(execution_id=MEMBERS[2])
    return engine


def test_every_flow_operation_is_in_the_table() -> None:
    changes = {name for name in vars(FlowOperations) if not name.startswith("_")}
    reads = {name for name in vars(ReadOperations) if "flow" in name or "edge" in name}

    assert (changes | reads) - IN_THE_OTHER_TABLE == set(OPERATIONS) - ELSEWHERE


@pytest.mark.parametrize("verb", OPERATIONS)
async def test_every_invalid_flow_argument_is_refused_and_nothing_is_written(engine: Engine, verb: str) -> None:
    before = await dump(engine.store)
    for argument, values in OPERATIONS[verb].bad.items():
        for value in values:
            with pytest.raises(errors.FabricError) as caught:
                await getattr(engine, verb)(**(OPERATIONS[verb].good | {argument: value}))
            assert caught.value.family == "validation", f"{argument}={value!r} gave {caught.value!r}"
            assert caught.value.detail or type(caught.value) is not errors.InvalidInput, "say what is wrong"
        assert await dump(engine.store) == before, f"{verb} wrote something for a wrong {argument}"


@pytest.mark.parametrize("verb", OPERATIONS)
async def test_the_same_flow_call_with_valid_arguments_is_not_refused_as_invalid(engine: Engine, verb: str) -> None:
    try:
        await getattr(engine, verb)(**OPERATIONS[verb].good)
    except errors.InvalidDependency:
        assert verb in ("apply_dependency_to_child", "resolve_dependency")  # No such edge was staged.
    except errors.NotBlockedByDeps:
        assert verb == "promote_blocked_to_eligible"
    await engine.bulk_canceller.close()
