"""A valid request for every operation of the server, about rows of a given tenant.

An example is a function of two tenants: the first owns the resource of the path, the namespace or the handle, the
second the other resources of the request. An operation may have several examples, which differ by the text after the
colon of their name.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import msgspec

from flowfabric.server.routing import Route
from tests.security.client import Request
from tests.security.tenants import PARTITION, SHARED_LANE, Tenant, creation, execution, flow, segment


class Example(msgspec.Struct, frozen=True):
    """The variable parts of a request, and the expected response."""

    params: tuple[str, ...] = ()
    query: dict[str, str] = {}
    body: Any = None
    until: str = ""  # the text that ends the reading of a feed
    shows: bool = False  # the owner's answer contains the owner's secret
    works: bool = True  # the owner's request succeeds
    tells_lanes: bool = False  # the response contains lane names, which belong to no namespace
    taken: str = ""  # the error if the id of the other tenant is in use
    positional: bool = False  # the other tenant's id is only a cursor, which reveals nothing

    def request(self, operation: Route) -> Request:
        """Return the request of this operation."""
        params = iter(self.params)
        parts = (segment(next(params)) if part.startswith("{") else part for part in operation.path.split("/"))
        return Request(operation.method, "/".join(parts), self.query, self.body, self.until)


E = Example
Maker = Callable[[Tenant, Tenant], Example]
WAIT = {"wait_ms": "20"}
DIM = {"tokens": 1}


def new() -> str:
    return str(uuid.uuid4())


def schedule(p: Tenant) -> Any:
    """Return the body that puts a schedule in place."""
    run = {"namespace": p.namespace, "lane_id": "quiet", "execution_kind": "task", "input_payload": []}
    return {"spec": {"every_ms": 3_600_000}, "run": run}


def held(p: Tenant, **body: Any) -> Example:
    """Return a request of the holder of the active execution."""
    return E(body={"handle": p.handle} | body)


def of(execution_id: str, shows: bool = False, query: dict[str, str] | None = None) -> Example:
    """Return a request with this execution in its path."""
    return E((execution_id,), query or {}, shows=shows)


def signal(p: Tenant, r: Tenant) -> Example:
    body = {
        "execution_id": p.suspended,
        "waitpoint_id": r.waitpoint,
        "waitpoint_token": r.link,
        "signal_name": "go",
        "signal_category": "c",
        "source_type": "user",
        "source_identity": "me",
    }
    return E((p.suspended,), body=body)


def edge(p: Tenant, upstream: str, downstream: str, edge_id: str) -> Example:
    ends = {"upstream_execution_id": upstream, "downstream_execution_id": downstream}
    return E((p.flow,), body={"flow_id": p.flow, "edge_id": edge_id, **ends})


def graph(p: Tenant, flow_id: str, *nodes: str, edges: list[dict[str, str]] | None = None, **given: Any) -> Example:
    made = [creation(p.namespace, execution_id=node) for node in nodes]
    return E(body={"flow_id": flow_id, "nodes": made, "edges": edges or [], "namespace": p.namespace}, **given)


def bulk(p: Tenant, *given: dict[str, Any]) -> dict[str, Any]:
    return {"executions": [creation(p.namespace, **one) for one in given]}


def suspend(p: Tenant, binding: dict[str, dict[str, str]], **given: Any) -> Example:
    condition = {"Single": {"waitpoint_key": "k", "matcher": "Wildcard"}}
    return E(body={"handle": p.handle, "waitpoints": [binding], "resume_condition": condition}, **given)


def gate(p: Tenant, **body: Any) -> dict[str, Any]:
    return {"handle": p.handle, "name": new(), "expires_in_ms": 60_000} | body


def budget(p: Tenant, budget_id: str) -> dict[str, Any]:
    actions = {"enforcement_mode": "strict", "on_hard_limit": "fail", "on_soft_limit": "warn"}
    numbers = {"reset_interval_ms": 0, "dimensions": ["tokens"], "hard_limits": [9], "soft_limits": [0]}
    where = {"scope_type": "lane", "scope_id": "L", "namespace": p.namespace}
    return {"budget_id": budget_id, **where, **actions, **numbers}


def worker(p: Tenant, r: Tenant, **body: Any) -> Example:
    return E(("w",), body={"namespace": p.namespace, "worker_instance_id": r.instance} | body)


def feed(p: Tenant) -> Example:
    return E(query={"namespace": p.namespace, "from": "start"}, until=p.last)


IN_USE, WAITPOINT_IN_USE = "id_in_other_namespace", "waitpoint_already_exists"
ANY_VOTE = {"Single": {"waitpoint_key": "k", "matcher": "Wildcard"}}
LIMITS = {"dimensions": ["tokens"], "hard_limits": [7], "soft_limits": [0]}
QUOTA = {"window_seconds": 60, "max_requests_per_window": 0, "max_concurrent": 1}
GRANT = {"worker_instance_id": "i", "grant_ttl_ms": 5000}
NEW_KEY = {"new_kid": "k2", "new_secret_hex": "ab" * 32}
AT = {"partition": str(PARTITION)}

EXAMPLES: dict[str, Maker] = {
    # -- health, capabilities
    "healthz": lambda p, r: E(),
    "readyz": lambda p, r: E(),
    "metrics": lambda p, r: E(tells_lanes=True),
    "openapi_document": lambda p, r: E(),
    "store_info": lambda p, r: E(),
    "capabilities": lambda p, r: E(),
    "whoami": lambda p, r: E(),
    # -- executions
    "create_execution": lambda p, r: E(body=creation(p.namespace)),
    "create_execution: known id": lambda p, r: E(body=creation(p.namespace, execution_id=r.waiting), taken=IN_USE),
    "create_execution: known key": lambda p, r: E(
        body=creation(p.namespace, lane_id=SHARED_LANE, idempotency_key=r.key)
    ),
    "create_execution: parent": lambda p, r: E(body=creation(p.namespace, parent_id=r.active)),
    "create_execution: limits": lambda p, r: E(
        body=creation(p.namespace, policy={"budget_ids": [r.own_budget, r.budget], "quota_policy_ids": [r.quota]})
    ),
    "create_executions": lambda p, r: E(body=bulk(p, {}, {"idempotency_key": r.key})),
    "start_by_key": lambda p, r: E(("task", "a/b"), body={"execution": creation(p.namespace, execution_kind="task")}),
    "start_by_key: known id": lambda p, r: E(
        ("task", "a/b"),
        body={"execution": creation(p.namespace, execution_kind="task", execution_id=r.waiting)},
        taken=IN_USE,
    ),
    "start_by_key: parent": lambda p, r: E(
        ("task", "a/b"), body={"execution": creation(p.namespace, execution_kind="task", parent_id=r.active)}
    ),
    "find_by_key": lambda p, r: E(("task", "none"), {"namespace": p.namespace}, works=False),
    "create_executions: known id": lambda p, r: E(body=bulk(p, {}, {"execution_id": r.waiting}), taken=IN_USE),
    "create_executions: parent": lambda p, r: E(body=bulk(p, {}, {"parent_id": r.active})),
    "list_executions": lambda p, r: E(query=AT),
    "get_execution": lambda p, r: of(p.active, shows=True),
    "get_state": lambda p, r: of(p.active),
    "get_result": lambda p, r: of(p.ended, shows=True),
    "get_result: wait": lambda p, r: of(p.ended, True, WAIT),
    "cancel_execution": lambda p, r: E((p.active,), body={"execution_id": p.active, "reason": "r"}),
    "cancel_execution: path": lambda p, r: E((p.active,), body={"execution_id": r.active, "reason": "r"}, works=p is r),
    "change_priority": lambda p, r: E((p.waiting,), body={"new_priority": 5}),
    "replay_execution": lambda p, r: of(p.ended),
    "revoke_lease": lambda p, r: of(p.active),
    "set_execution_tags": lambda p, r: E((p.active,), body={"tags": {"a.b": "c"}}),
    "resume_execution": lambda p, r: E((p.suspended,), body={}),
    # -- lookups
    "search_executions": lambda p, r: E(query={"namespace": p.namespace}, shows=True),
    "search_executions: flow": lambda p, r: E(query={"namespace": p.namespace, "flow_id": r.flow}),
    "search_executions: cursor": lambda p, r: E(
        query={"namespace": p.namespace, "cursor": f"{2**47}/{r.active}"}, positional=True
    ),
    "search_executions: unnamed": lambda p, r: E(query={"parent_id": r.active}),
    "search_executions: worker": lambda p, r: E(query={"worker": r.instance, "error": "x", "kind": "k"}),
    "list_children": lambda p, r: of(p.active),
    "list_children: cursor": lambda p, r: E((p.active,), {"cursor": f"1/{r.active}"}, positional=True),
    "read_input": lambda p, r: of(p.active, shows=True),
    "list_approvals": lambda p, r: E(query={"namespace": p.namespace}),
    "list_approvals: unnamed": lambda p, r: E(),
    "list_approvals: cursor": lambda p, r: E(query={"cursor": f"1/{r.suspended}"}, positional=True),
    "find_executions": lambda p, r: E(query={"prefix": r.active[:-1]}),
    "find_executions: partition": lambda p, r: E(query={"prefix": f"{{fp:{PARTITION}}}:"}),
    "describe_execution": lambda p, r: of(p.active, shows=True),
    "attempt_history": lambda p, r: of(p.active),
    "lease_history": lambda p, r: of(p.active),
    "read_progress": lambda p, r: of(p.active, shows=True),
    "explain": lambda p, r: of(p.limited),
    "explain: member": lambda p, r: of(p.target),
    "await_end": lambda p, r: of(p.ended, True, {"result": "true"}),
    "await_end: wait": lambda p, r: of(p.active, query=WAIT),
    "read_results": lambda p, r: E(body={"execution_ids": [r.ended]}, shows=True),
    "read_results: both": lambda p, r: E(body={"execution_ids": [p.ended, r.ended]}, shows=True),
    "read_results: namespace": lambda p, r: E(body={"execution_ids": [r.ended], "namespace": p.namespace}),
    "list_lanes": lambda p, r: E(),
    "read_lane": lambda p, r: E((SHARED_LANE,)),
    "set_lane_spread": lambda p, r: E((SHARED_LANE,), body={"spread": 1}),
    "list_suspended": lambda p, r: E(query=AT),
    # -- signals
    "list_pending_waitpoints": lambda p, r: of(p.suspended, shows=True),
    "list_pending_waitpoints: after": lambda p, r: E((p.suspended,), {"after": r.waitpoint}, positional=True),
    "describe_waitpoint": lambda p, r: E((p.suspended, r.waitpoint), shows=True),
    "read_waitpoint_token": lambda p, r: E((p.suspended, r.waitpoint)),
    "deliver_signal": signal,
    "deliver_signal: other token": lambda p, r: E(
        (p.suspended,), body=signal(p, p).body | {"waitpoint_token": r.link}, works=p is r
    ),
    "send_message": lambda p, r: E((p.active,), body={"mailbox": "m", "payload": [1]}),
    "ask": lambda p, r: E((p.active,), body={"mailbox": "m", "payload": [1], "wait_ms": 20}),
    "read_reply": lambda p, r: E((p.active, r.asked), WAIT, shows=True, works=p is r),
    "list_facts": lambda p, r: of(p.active, shows=True),
    "read_fact": lambda p, r: E((p.active, r.fact), WAIT, shows=True),
    # -- streams
    "read_stream": lambda p, r: E((p.active, "0"), shows=True),
    "tail_stream": lambda p, r: E((p.active, "0"), {"block_ms": "20"}, shows=True),
    "read_summary": lambda p, r: E((p.active, "0"), works=False),
    "follow_stream": lambda p, r: E((p.ended, "0"), until="event: closed", shows=True),
    # -- claims and workers
    "claim_for_worker": lambda p, r: E(("w",), body=GRANT | {"lane_id": SHARED_LANE}),
    "claim_for_worker: lane": lambda p, r: E(("w",), body=GRANT | {"lane_id": f"granted-{r.namespace}"}),
    "issue_reclaim_grant": lambda p, r: E((p.revoked,), body=GRANT | {"worker_id": "w", "lane_id": "any"}),
    "claim": lambda p, r: E(
        ("w",), body={"worker_instance_id": "i", "lanes": [SHARED_LANE], "limit": 100, "wait_ms": 20}, shows=True
    ),
    "claim: namespace": lambda p, r: E(
        ("w",), body={"worker_instance_id": "i", "lanes": [SHARED_LANE], "namespaces": [r.namespace]}
    ),
    "end_claims": lambda p, r: E(("w",), body={"worker_instance_id": r.instance}),
    "redeem": lambda p, r: E(
        (p.granted,),
        body={
            "grant_kind": "claim",
            "worker_id": "w",
            "worker_instance_id": "i",
            "grant_key": r.grant_key,
            "lane_id": f"granted-{p.namespace}",
        },
        shows=True,
    ),
    "register_worker": lambda p, r: worker(p, r, lanes=["L"], liveness_ttl_ms=1000),
    "heartbeat_worker": worker,
    "mark_worker_dead": worker,
    "leave": worker,
    "list_workers": lambda p, r: E(query={"namespace": p.namespace}, shows=True),
    "list_workers: unnamed": lambda p, r: E(works=False),
    "list_tasks": lambda p, r: E(query={"namespace": p.namespace}),
    "list_tasks: unnamed": lambda p, r: E(),
    "list_worker_executions": lambda p, r: E((r.instance,)),
    "list_worker_events": lambda p, r: E((r.instance,), {"namespace": p.namespace}),
    "list_workers: cursor": lambda p, r: E(query={"namespace": p.namespace, "cursor": r.instance}, positional=True),
    # -- flows
    "create_flow": lambda p, r: E(body={"flow_id": flow(), "flow_kind": "dag", "namespace": p.namespace}),
    "create_flow: known id": lambda p, r: E(
        body={"flow_id": r.flow, "flow_kind": "dag", "namespace": p.namespace}, taken=IN_USE, works=False
    ),
    "create_flow_graph": lambda p, r: graph(p, flow(), execution()),
    "create_flow_graph: known id": lambda p, r: graph(p, r.flow, execution(), taken=IN_USE, works=False),
    "create_flow_graph: known node": lambda p, r: graph(p, flow(), r.spare, taken=IN_USE, works=False),
    "create_flow_graph: edge": lambda p, r: graph(
        p,
        flow(),
        node := execution(),
        edges=[{"upstream_execution_id": r.source, "downstream_execution_id": node}],
        works=False,
    ),
    "add_execution_to_flow": lambda p, r: E((p.flow,), body={"flow_id": p.flow, "execution_id": r.spare}),
    "stage_dependency_edge": lambda p, r: edge(p, p.other, r.sink, new()),
    "stage_dependency_edge: upstream": lambda p, r: edge(p, r.other, p.sink, new()),
    "apply_dependency_to_child": lambda p, r: edge(p, p.source, r.sink, p.edge),
    "apply_dependency_to_child: upstream": lambda p, r: edge(p, r.source, p.sink, r.edge),
    "cancel_flow": lambda p, r: E(
        (p.flow,),
        {"wait": "true", "timeout_ms": "1000"},
        {"flow_id": p.flow, "reason": "r", "cancellation_policy": "cancel_all"},
    ),
    "list_flows": lambda p, r: E(query=AT),
    "describe_flow": lambda p, r: of(p.flow, shows=True),
    "get_flow_summary": lambda p, r: E((p.flow,), works=False),
    "list_flow_members": lambda p, r: of(p.flow),
    "read_flow_graph": lambda p, r: of(p.flow),
    "list_edges": lambda p, r: E((p.flow,), {"outgoing": r.source}, shows=True),
    "list_edges: incoming": lambda p, r: E((p.flow,), {"incoming": r.target}, shows=True),
    "set_edge_group_policy": lambda p, r: E((p.flow, r.other), body={"policy": {"kind": "all_of"}}),
    # -- budgets and quotas
    "create_budget": lambda p, r: E(body=budget(p, new())),
    "create_budget: known id": lambda p, r: E(body=budget(p, r.own_budget)),
    "list_spenders": lambda p, r: E((r.own_budget,), {"namespace": p.namespace}),
    "list_spenders: cursor": lambda p, r: E(
        (p.own_budget,), {"namespace": p.namespace, "cursor": r.active}, positional=True
    ),
    "read_spending": lambda p, r: of(p.active),
    "list_quotas": lambda p, r: E(query={"namespace": p.namespace}),
    "list_quotas: cursor": lambda p, r: E(query={"namespace": p.namespace, "cursor": r.quota}, positional=True),
    "list_events": lambda p, r: E(),
    "list_events: page": lambda p, r: E(query={"topics": "completion,lease", "before": "5", "limit": "3"}),
    "read_levels": lambda p, r: E(tells_lanes=True),
    "search_flows": lambda p, r: E(query={"namespace": p.namespace}),
    "search_flows: unnamed": lambda p, r: E(query={"cursor": f"{2**47}/{r.flow}"}, positional=True),
    "preview_operation": lambda p, r: E(
        body={"verb": "cancel", "criteria": {"namespace": p.namespace, "parent_id": r.active}}
    ),
    "preview_operation: unnamed": lambda p, r: E(
        body={"verb": "cancel", "criteria": {"worker_instance_id": r.instance}}
    ),
    "start_operation": lambda p, r: E(
        body={"verb": "cancel", "criteria": {"namespace": p.namespace, "parent_id": r.active}, "reason": "r"}
    ),
    "list_operations": lambda p, r: E(),
    "read_operation": lambda p, r: E((new(),), works=False),
    "cancel_operation": lambda p, r: E((new(),), works=False),
    "put_schedule": lambda p, r: E((f"new-{p.namespace}",), body=schedule(p)),
    "list_schedules": lambda p, r: E(query={"namespace": p.namespace}, shows=True),
    "list_schedules: unnamed": lambda p, r: E(),
    "describe_schedule": lambda p, r: E((r.schedule,), {"namespace": p.namespace}, shows=True),
    "describe_schedule: unnamed": lambda p, r: E((r.schedule,), works=False),
    "pause_schedule": lambda p, r: E((r.schedule,), {"namespace": p.namespace}, body={"note": "n"}),
    "resume_schedule": lambda p, r: E((r.schedule,), {"namespace": p.namespace}),
    "trigger_schedule": lambda p, r: E((r.schedule,), {"namespace": p.namespace}, body={"trigger_id": new()}),
    "backfill_schedule": lambda p, r: E((r.schedule,), {"namespace": p.namespace}, body={"start": 1, "end": 2}),
    "delete_schedule": lambda p, r: E((r.schedule,), {"namespace": p.namespace}),
    "retire_schedules": lambda p, r: E(body={"owner": "app", "keep": [], "namespace": p.namespace}),
    "list_budgets": lambda p, r: E(query={"namespace": p.namespace}),
    "list_budgets: cursor": lambda p, r: E(query={"namespace": p.namespace, "cursor": r.own_budget}, positional=True),
    "get_budget_status": lambda p, r: E((r.own_budget,), {"namespace": p.namespace}, shows=True),
    "get_budget_status: unnamed": lambda p, r: E((r.own_budget,), works=False),
    "report_usage": lambda p, r: E((r.own_budget,), body={"dimensions": DIM, "namespace": p.namespace}),
    "report_usage: unnamed": lambda p, r: E((r.own_budget,), body={"dimensions": DIM}),
    "reset_budget": lambda p, r: E((r.own_budget,), {"namespace": p.namespace}),
    "change_budget_limits": lambda p, r: E((r.own_budget,), body=LIMITS | {"namespace": p.namespace}),
    "release_budget": lambda p, r: E((p.budget,), body={"execution_id": r.active, "namespace": p.namespace}),
    "create_quota_policy": lambda p, r: E(body=QUOTA | {"quota_policy_id": r.quota, "namespace": p.namespace}),
    "read_quota_policy_limits": lambda p, r: E((r.quota,), {"namespace": p.namespace}),
    "refund_reservation": lambda p, r: E((p.budget,), body={"reservation_id": r.reservation, "namespace": p.namespace}),
    "refund_reservation: unnamed": lambda p, r: E((r.budget,), body={"reservation_id": r.reservation}),
    "refund_reservation: execution": lambda p, r: E(
        (p.budget,),
        body={"reservation_id": p.reservation, "namespace": p.namespace, "execution_id": r.active},
    ),
    "wake_budget": lambda p, r: E((r.own_budget,), {"namespace": p.namespace}),
    # -- requests of the lease holder
    "renew": lambda p, r: E(body={"handles": [p.handle, r.handle]}),
    "progress": lambda p, r: held(p, pct=50),
    "complete": lambda p, r: held(p),
    "fail": lambda p, r: held(p, reason="r"),
    "cancel": lambda p, r: held(p),
    "set_tags": lambda p, r: held(p, tags={"ff.show": "1"}),
    "cancel_children": lambda p, r: held(p, execution_ids=[r.child]),
    "delay": lambda p, r: held(p, delay_ms=0),
    "wait_children": lambda p, r: E(body={"handle": p.handle}, works=False),
    "suspend": lambda p, r: suspend(p, {"Fresh": {"waitpoint_key": "k"}}),
    "suspend: known waitpoint": lambda p, r: suspend(
        p, {"Fresh": {"waitpoint_key": "k", "waitpoint_id": r.waitpoint}}, works=False, taken=WAITPOINT_IN_USE
    ),
    "suspend: pending": lambda p, r: suspend(
        p, {"UsePending": {"waitpoint_id": r.pending}}, works=False, taken="invalid_waitpoint_for_execution"
    ),
    "create_waitpoint": lambda p, r: held(p, waitpoint_key="k", expires_in_ms=1000),
    "observe_signals": lambda p, r: held(p),
    "append_frames": lambda p, r: held(p, frames=[{"payload": [1], "frame_type": "t"}]),
    "report_usage_as_holder": lambda p, r: held(p, budget_id=r.own_budget, dimensions=DIM),
    "record_spend": lambda p, r: held(p, budget_id=r.own_budget, dimensions=DIM),
    "reserve_budget": lambda p, r: held(p, budget_id=r.own_budget, amounts=DIM, ttl_ms=1000),
    "reserve_budget: known id": lambda p, r: held(
        p, budget_id=p.budget, amounts=DIM, ttl_ms=1000, reservation_id=r.reservation
    ),
    "settle_budget": lambda p, r: held(p, budget_id=p.budget, reservation_id=r.reservation, amounts=DIM),
    "refund_budget": lambda p, r: held(p, budget_id=p.budget, reservation_id=r.reservation),
    # -- durable functions
    "record_step": lambda p, r: held(p, name="s", occurrence=0, result=[1]),
    "set_fact": lambda p, r: held(p, name="f", place="f", count=1, value=[1]),
    "reply": lambda p, r: E(
        body={"handle": p.handle, "message_id": r.question, "memo": {"name": "reply:m"}}, works=p is r
    ),
    "close_inbox": lambda p, r: held(p, memo={"name": "close:inbox"}),
    "read_steps": lambda p, r: of(p.active, shows=True),
    "open_gate": lambda p, r: E(body=gate(p, kind="mailbox", mailbox="m")),
    "open_gate: children": lambda p, r: E(body=gate(p, kind="children", children=[r.child, r.ended], need=1)),
    "open_gate: known waitpoint": lambda p, r: E(
        body=gate(p, kind="signals", condition=ANY_VOTE, waitpoints=[[r.waitpoint, "k"]]),
        works=False,
        taken=WAITPOINT_IN_USE,
    ),
    "park": lambda p, r: held(p, gates=[r.timer]),
    "remembered": lambda p, r: held(p),
    "record_patch": lambda p, r: held(p, patch="p", is_new=False),
    "release_held": lambda p, r: E((p.active,), body={"accept": True}),
    "pin_version": lambda p, r: held(p, version="1"),
    "unpin": lambda p, r: E((p.active,), body={}),
    "count_held": lambda p, r: E(),
    "count_old_ways": lambda p, r: E(),
    "list_held": lambda p, r: E(body={"tasks": ["t"], "namespace": r.namespace}),
    "spawn": lambda p, r: held(p, children=[]),
    "open_gates": lambda p, r: held(p, gates=[{"name": "g", "kind": "mailbox", "mailbox": "m"}]),
    "continue_as_new": lambda p, r: held(p),
    "read_batch": lambda p, r: held(p),
    "leave_gates": lambda p, r: held(p, operations=[{"name": r.timer}], memo={"name": "race:first"}),
    "open_gates_and_park": lambda p, r: held(
        p, gates=[{"name": "n", "kind": "children", "children": [r.child], "need": 1}], names=[r.timer]
    ),
    "read_waits": lambda p, r: of(p.active, shows=True),
    "read_votes": lambda p, r: E((p.active, r.voted), shows=True),
    "spend_for": lambda p, r: E(
        (p.active,), body={"budget_id": r.own_budget, "dimensions": DIM, "namespace": r.namespace}
    ),
    "reserve_for": lambda p, r: E(
        (p.active,),
        body={
            "budget_id": r.own_budget,
            "reservation_id": new(),
            "amounts": DIM,
            "ttl_ms": 1000,
            "namespace": r.namespace,
        },
    ),
    "settle_for": lambda p, r: E(
        (p.active,),
        body={
            "budget_id": p.budget,
            "reservation_id": r.reservation,
            "amounts": DIM,
            "namespace": r.namespace,
        },
    ),
    "await_ends": lambda p, r: E(body={"execution_ids": [r.ended, p.active], "wait_ms": 20}, shows=True),
    # -- feeds
    "follow_completions": lambda p, r: feed(p),
    "follow_leases": lambda p, r: feed(p),
    "follow_signals": lambda p, r: feed(p),
    "follow_operators": lambda p, r: feed(p),
    "follow_events": lambda p, r: feed(p),
    # -- pages behind links
    "show_waitpoint": lambda p, r: E((p.suspended, r.waitpoint), {"token": r.link}, shows=True),
    "show_waitpoint: other token": lambda p, r: E((p.suspended, p.waitpoint), {"token": r.link}, works=p is r),
    "answer_waitpoint": lambda p, r: E((p.suspended, r.waitpoint), {"token": r.link}, b"true"),
    "answer_waitpoint: form": lambda p, r: E(
        (p.suspended, r.waitpoint), {}, urlencode({"token": r.link, "value": "true"}).encode(), works=False
    ),
    # -- administration
    "rotate_waitpoint_secret": lambda p, r: E(body=NEW_KEY),
    "list_signing_keys": lambda p, r: E(),
    "make_api_token": lambda p, r: E(body={"name": "t", "scopes": ["read"], "namespaces": [p.namespace]}),
    "list_api_tokens": lambda p, r: E(shows=True),
    "rotate_api_token": lambda p, r: E((p.api_token,), body={}),
    "revoke_api_token": lambda p, r: of(p.api_token),
}


def examples_of(operation: Route) -> list[Maker]:
    """Return the examples of an operation."""
    return [make for name, make in EXAMPLES.items() if name.partition(":")[0] == operation.name]
