"""The flow of the demo: one branch fails, two of three are enough, and the last step needs an approval.

extract ─┬─ clean ──┬───────────── publish   two of three are enough; waits for approval
         ├─ rank ───┤
         └─ enrich ─┴─ archive               needs clean and enrich: skipped, for enrich fails
              └─────── alert                 runs because enrich fails
"""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import CreateExecution, Engine
from flowfabric.demo.orders import LANE, DemoOrder
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.ids import FlowId, mint_for_flow

APPROVE = "approve"
FAILING, PUBLISH, ARCHIVE, ALERT = "enrich", "publish", "archive", "alert"
BRANCHES = ("clean", "rank", FAILING)
MEMBERS = (
    DemoOrder("extract", steps=2),
    DemoOrder("clean", steps=2),
    DemoOrder("rank", steps=2),
    DemoOrder(FAILING, steps=2, fails=1),
    DemoOrder(PUBLISH, steps=2, needs_approval=True),
    DemoOrder(ARCHIVE, steps=2),
    DemoOrder(ALERT, steps=2),
)
EDGES = (
    *(("extract", branch, "success_only") for branch in BRANCHES),
    *((branch, PUBLISH, "success_only") for branch in BRANCHES),
    ("clean", ARCHIVE, "success_only"),
    (FAILING, ARCHIVE, "success_only"),
    (FAILING, ALERT, "failure_only"),
)
JOINS: dict[str, dict[str, Any]] = {PUBLISH: {"kind": "quorum", "k": 2, "on_satisfied": "let_run"}}
EXPECTED_STATES = {member.name: "completed" for member in MEMBERS} | {FAILING: "failed", ARCHIVE: "skipped"}


async def submit(engine: Engine) -> dict[str, str]:
    """Submit the flow as a whole; return the execution id of each member by name."""
    flow = FlowId(engine.minter.uuid())
    ids = {member.name: mint_for_flow(flow, engine.partitions, engine.minter) for member in MEMBERS}
    await engine.create_flow_graph(
        flow,
        [
            CreateExecution(
                execution_id=ids[member.name],
                partition=0,
                namespace="default",
                lane_id=LANE,
                execution_kind="order",
                input_payload=msgspec.json.encode(member),
                tags={"demo.order": member.name},
            )
            for member in MEMBERS
        ],
        [GraphEdge(ids[upstream], ids[downstream], kind) for upstream, downstream, kind in EDGES],
        policies={ids[name]: policy for name, policy in JOINS.items()},
    )
    return dict(ids)


async def approve(engine: Engine, execution_id: str) -> str:
    """Approve a suspended execution as an operator; return the effect of the signal."""
    [waitpoint] = (await engine.list_pending_waitpoints(execution_id)).entries
    answer = await engine.deliver_approval_signal(
        execution_id,
        lane_id=LANE,
        waitpoint_id=waitpoint.waitpoint_id,
        signal_name=APPROVE,
        idempotency_suffix="demo",
        signal_dedup_ttl_ms=60_000,
    )
    return getattr(answer, "effect", "duplicate")
