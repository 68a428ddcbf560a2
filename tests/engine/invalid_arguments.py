"""Invalid values for each kind of argument, and every engine operation with arguments that it accepts."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from flowfabric.handles import BackendTag, Handle, HandleKind, encode_handle
from flowfabric.model.answers.execution import Claimed, ClaimGrant
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.feed import Filter
from flowfabric.rules.validation import MAX_DURATION_MS, MAX_INSTANT_MS, MAX_NAME_BYTES, MAX_TEXT_BYTES

UUID = "11111111-1111-4111-8111-111111111111"
SECRET = "00112233445566778899aabbccddeeff" * 2
NAN, INFINITE = float("nan"), float("inf")

NOT_TEXT: list[Any] = [5, True, NAN, b"bytes", ["list"], {"a": "b"}, object()]
NOT_KEPT: list[Any] = ["nul\0", "half \ud800 pair", "\udfff"]
TEXT = [*NOT_TEXT, *NOT_KEPT, "x" * (MAX_TEXT_BYTES + 1), "é" * (MAX_TEXT_BYTES // 2 + 1)]
NAME = [*NOT_TEXT, *NOT_KEPT, "x" * (MAX_NAME_BYTES + 1)]
REQUIRED: list[Any] = [None]

EXECUTION_ID: list[Any] = [
    *(None, 5, True, b"{fp:1}:" + UUID.encode(), [], "", UUID, "{fp:1}" + UUID, "{fp:70000}:" + UUID),
    *("{fp:}:" + UUID, "{fp:-1}:" + UUID, "{fp:+1}:" + UUID, "{fp:01}:" + UUID, "{fp:3}:not-a-uuid"),
    *("{fp:1}:" + UUID + "\0", "{fp:1}:\ud800", "{b:1}:" + UUID, " {fp:1}:" + UUID, "{fp:1}:" + UUID + "\n"),
    "{fp:1}:" + "1" * MAX_TEXT_BYTES,
]
SEARCH_CURSOR: list[Any] = [
    5,
    b"1/x",
    [],
    "",
    "5",
    "x/{fp:1}:" + UUID,
    "-1/{fp:1}:" + UUID,
    "5/{fp:1}",
    "9" * 16 + "/{fp:1}:" + UUID,
]
BULK_VERB: list[Any] = [None, 5, "", "purge", b"cancel", ["cancel"]]
CRITERIA: list[Any] = [None, 5, "kind", ["kind"], {"color": "a"}, {"kind": 5}, {"public_state": "x"}, {5: "a"}]
LANE: list[Any] = [None, 5, True, b"default", [], "", "x" * 65, "a\tb", "é", "nul\0", "\ud800"]
WORKER: list[Any] = [None, 5, True, b"wa", [], "", "x" * 257, "a b", "a\tb", "nul\0", "\ud800", "a\u2003b"]
A_UUID: list[Any] = [5, True, b"x", [], "", "not-a-uuid", UUID + "0", "nul\0", "\ud800"]
INTEGER: list[Any] = [None, True, False, 1.5, NAN, INFINITE, "7", b"7", [], 2**63, -(2**70), 2**200]
COUNT = [*INTEGER, -1]
DURATION = [*INTEGER, 0, -1, MAX_DURATION_MS + 1]
INSTANT = [*INTEGER, MAX_INSTANT_MS + 1]
PAYLOAD: list[Any] = ["text", 5, True, NAN, [1, 2], {"a": 1}, object()]
TAGS: list[Any] = [
    *(0, False, "", []),
    *(5, True, "a.b", [("a.b", "c")], {"a.b": 5}, {"a.b": None}, {5: "x"}, {None: "x"}, {b"a.b": "c"}),
    *({"Bad.Key": ""}, {"nodot": ""}, {"": ""}, {"a.b": "nul\0"}, {"a.b": "\ud800"}, {"a.b\0": ""}, {"\ud800": ""}),
    {f"a.b{number}": "" for number in range(257)},
    {"a.b": "x" * (MAX_TEXT_BYTES + 1)},
]
POLICY: list[Any] = [
    *(5, True, NAN, b"{}", [], "{not json", "[]", "7", '"text"', "nul\0", "\ud800", "[" * 5000),
    *({"x": object()}, {"retry_policy": 5}, {"retry_policy": {"max_retries": -1}}, {"dedup_window_ms": True}),
    *({"dedup_window_ms": 2**63}, {"dedup_window_ms": 1.5}, {"timeout_policy": []}, {"max_replay_count": "3"}),
    *({"routing_requirements": 7}, {"routing_requirements": {"required_capabilities": "gpu"}}),
    *({"routing_requirements": {"required_capabilities": ["a b"]}}, {"budget_ids": ["x"]}, {"quota_policy_id": 5}),
    *({"fairness_weight": 0}, {"fairness_key": "nul\0"}, {"x": "y" * (MAX_TEXT_BYTES + 1)}),
]
OFFER: list[Any] = [
    *(None, 5, "gpu", b"gpu", [5], [None], [""], ["a,b"], ["a b"], ["nul\0"], ["\ud800"]),
    [f"token-{number}" for number in range(257)],
    ["x" * 4097],
]
PRESENTED: list[Any] = [
    *(None, 5, "gpu", b"gpu", [5], [None], ["nul\0"], ["\ud800"]),
    [f"token-{number}" for number in range(257)],
    ["x" * 4097],
]
FENCE: list[Any] = [
    *(None, 5, "fence", (UUID, 1, UUID)),
    *(Fence(lease_id=bad) for bad in A_UUID if bad != ""),  # An empty part is one that was not passed.
    *(Fence(attempt_id=bad) for bad in A_UUID if bad != ""),
    *(Fence(lease_epoch=bad) for bad in (True, 1.5, NAN, "1", -1, 2**64)),  # type: ignore[arg-type]
]
CURSOR: list[Any] = [None, 5, "abc", [2], b"\x07", b"\x02", b"\x02" * 10, b"\x01" + bytes(16), b"\x00" * 9]
FILTER: list[Any] = [
    *(5, "n1", {"namespace": "n1"}, Filter(namespace=5), Filter(namespace="nul\0")),  # type: ignore[arg-type]
    *(Filter(instance_tag="ab"), Filter(instance_tag=("a",)), Filter(instance_tag=("a", 5))),  # type: ignore[arg-type]
]
PAIR: list[Any] = [5, "ab", (), ("a",), ("a", 5), (None, "a"), ("a", "b", "c")]
PLACE: list[Any] = [5, "ab", (), (1,), (1, "nonsense"), ("1", "{fp:1}:" + UUID), (True, "{fp:1}:" + UUID), (1, 2, 3)]
PARTITION = [*COUNT, 256, 65_535, 65_536, "{fp:256}", "{b:1}"]  # There are 256 partitions.


class Placeholder(Enum):
    """Placeholders in the table for values that exist only once an engine runs."""

    HELD = "the id of an execution that is held"
    WAITING = "the id of an execution that waits"
    HANDLE = "the handle of the holder"
    GRANT = "a grant for the one that waits"
    ASK = "a create of the one that waits"
    ASKS = "a list of that"
    NO_HANDLES = "what is not a handle of this store"


def handles(held: Claimed, here: BackendTag) -> list[Any]:
    """Values that are not handles of this store."""
    there = next(tag for tag in BackendTag if tag is not here)
    whole = encode_handle(held.handle.fields, here)
    no_time = msgspec.structs.replace(held.handle.fields, lease_ttl_ms=0)
    return [
        *(5, True, "handle", b"handle", whole, [], object()),
        *(Handle(here, HandleKind.FRESH, whole[:cut]) for cut in (0, 1, 3, 50, len(whole) - 1)),
        Handle(here, HandleKind.FRESH, whole + b"\0"),
        Handle(here, HandleKind.FRESH, encode_handle(held.handle.fields, there)),
        Handle(there, HandleKind.FRESH, whole),
        Handle(here, HandleKind.FRESH, b"\x07" + whole[1:]),
        Handle(here, HandleKind.FRESH, b"\xff" * len(whole)),
        Handle(there, HandleKind.FRESH, encode_handle(no_time, there)),
        *(Handle(here, HandleKind.FRESH, wrong) for wrong in (None, 5, "text", [1, 2], [*whole])),  # type: ignore[arg-type]
        *(Handle(wrong, HandleKind.FRESH, whole) for wrong in (None, 9, "Memory", b"\x04")),  # type: ignore[arg-type]
    ]


class OperationCase(msgspec.Struct, frozen=True):
    """Arguments that an operation accepts, and invalid values for each of them."""

    good: dict[str, Any]
    bad: dict[str, Any]


def _has_wrong_type(presented: Any) -> bool:
    """Return True for values that are refused by type; sizes are checked only for a reclaimable execution."""
    return not isinstance(presented, list) or (len(presented) == 1 and len(str(presented[0])) < 10)


by_id: dict[str, Any] = {"execution_id": Placeholder.HELD}
worker = {"worker_id": "wb", "worker_instance_id": "wb-1"}
bad_worker: dict[str, Any] = {"worker_id": WORKER, "worker_instance_id": WORKER}
bad_id: dict[str, Any] = {"execution_id": EXECUTION_ID}
named: dict[str, Any] = {"handle": None, "fence": Fence(), "source": "someone", **by_id}
bad_named: dict[str, Any] = {**bad_id, "handle": Placeholder.NO_HANDLES, "fence": FENCE, "source": NAME}
lease = {"lane_id": "default", "lease_id": UUID, "lease_ttl_ms": 1000}
bad_lease: dict[str, Any] = {
    "lane_id": [bad for bad in LANE if bad != ""],
    "lease_id": A_UUID,
    "lease_ttl_ms": DURATION,
}
notes: dict[str, Any] = {"capability_hash": TEXT, "route_snapshot_json": TEXT, "admission_summary": TEXT}
bad_grant: dict[str, Any] = {**bad_worker, "lane_id": LANE, "grant_ttl_ms": DURATION}
an_instant = [bad for bad in INSTANT if bad is not None]
a_length = [bad for bad in DURATION if bad is not None and (bad != 0 or bad is False)]
creation: dict[str, Any] = {
    **bad_id,
    "namespace": [*REQUIRED, *NAME],
    "lane_id": LANE,
    "execution_kind": [*REQUIRED, *NAME],
    "input_payload": [*REQUIRED, *PAYLOAD],
    "payload_encoding": NAME,
    "priority": INTEGER,
    "creator_identity": [*REQUIRED, *NAME],
    "idempotency_key": TEXT,
    "tags": TAGS,
    "policy": POLICY,
    "delay_until": an_instant,
    "execution_deadline_at": an_instant,
}
BY_ID_ONLY = (
    *("replay_execution", "promote_delayed", "mark_lease_expired_if_due", "purge_execution"),
    *("describe_execution", "read_execution_info", "read_execution_state", "read_state_vector"),
    *("get_execution_result", "read_execution_context", "read_input", "read_spending", "read_current_attempt_index"),
    *("read_total_attempt_count", "read_progress", "get_execution_namespace"),
    *("attempt_history", "lease_history"),
)
SUBSCRIPTIONS = (
    "subscribe_lease_history",
    "subscribe_completion",
    "subscribe_operator_event",
    "subscribe_signal_delivery",
)

OPERATIONS: dict[str, OperationCase] = {
    **{name: OperationCase(by_id, bad_id) for name in BY_ID_ONLY},
    **{name: OperationCase({"cursor": b""}, {"cursor": CURSOR, "chosen": FILTER}) for name in SUBSCRIPTIONS},
    "create_execution": OperationCase({"execution_id": "{fp:86}:99999999-9999-4999-8999-999999999999"}, creation),
    "create": OperationCase({"ask": Placeholder.ASK}, {"ask": [None, 5, "ask", {"execution_id": UUID}]}),
    "create_executions": OperationCase({"asks": Placeholder.ASKS}, {"asks": [None, 5, "asks", b"asks"]}),
    "renew": OperationCase(
        {**named, "attempt_index": 0, "lease_ttl_ms": 1000},
        {**bad_named, "attempt_index": [*COUNT, 2**32], "lease_ttl_ms": DURATION},
    ),
    "renew_many": OperationCase({"handles": [], "lease_ttl_ms": None}, {"handles": [None, 5, "handles", b"x"]}),
    "progress": OperationCase(
        {"handle": Placeholder.HANDLE, "pct": None, "message": None},
        {
            "handle": Placeholder.NO_HANDLES,
            "pct": [*COUNT[1:], 101],
            "message": TEXT,
            "counts": [5, "counts", {5: 1}, {"": -1}, {"": "1"}],
        },
    ),
    "set_tags": OperationCase(
        {"handle": Placeholder.HANDLE, "pairs": {"ff.show": "c"}},
        {"handle": Placeholder.NO_HANDLES, "pairs": [None, {}, *TAGS]},
    ),
    "update_progress": OperationCase({**by_id, "fence": Fence()}, {**bad_id, "fence": FENCE, "pct": [*COUNT[1:], 101]}),
    "create_within": OperationCase(
        {"connection": None, "asks": Placeholder.ASKS}, {"connection": [None, 5], "asks": [None, 5, "asks", b"asks"]}
    ),
    **{
        name: OperationCase(
            {"execution_ids": []}, {"execution_ids": [None, 5, "ids", *([bad] for bad in EXECUTION_ID)]}
        )
        for name in ("read_results", "read_kinds")
    },
    "complete_many": OperationCase(
        {"results": []}, {"results": [None, 5, "results", [5], [(1, 2, 3)], ["ab", "c"]], "encoding": NAME}
    ),
    "complete": OperationCase(named, {**bad_named, "result": PAYLOAD, "encoding": NAME}),
    "fail": OperationCase(
        {**named, "reason": "boom", "category": "transient"},
        {**bad_named, "reason": [*REQUIRED, *TEXT], "category": [*REQUIRED, *NAME], "retry_policy": TEXT},
    ),
    "delay": OperationCase({**named, "delay_until": 1}, {**bad_named, "delay_until": INSTANT}),
    "delay_for": OperationCase(
        {"handle": Placeholder.HANDLE, "length_ms": 0},
        {"handle": Placeholder.NO_HANDLES, "length_ms": [None, *a_length], "reason": [*REQUIRED, *TEXT]},
    ),
    "wait_children": OperationCase(named, bad_named),
    "cancel": OperationCase(
        {"handle": Placeholder.HANDLE, "reason": ""},
        {"handle": Placeholder.NO_HANDLES, "reason": [*REQUIRED, *TEXT]},
    ),
    "cancel_children": OperationCase(
        {"handle": Placeholder.HANDLE, "execution_ids": (), "reason": ""},
        {
            "handle": Placeholder.NO_HANDLES,
            "execution_ids": [None, 5, True, "x", b"x", *([bad] for bad in EXECUTION_ID)],
            "reason": [*REQUIRED, *TEXT],
        },
    ),
    "cancel_execution": OperationCase(
        {**by_id, "reason": "", "source": "worker", "fence": Fence()},
        {**bad_id, "reason": [*REQUIRED, *TEXT], "source": [*REQUIRED, *NAME], "fence": FENCE},
    ),
    "expire_execution": OperationCase(by_id, {**bad_id, "reason": [None, "", "boredom", *TEXT]}),
    "expire_if_due": OperationCase(
        {**by_id, "reason": "attempt_timeout"},
        {**bad_id, "reason": [None, "", "boredom", *TEXT]},
    ),
    "revoke_lease": OperationCase(
        by_id,
        {
            **bad_id,
            "expected_lease_id": [bad for bad in A_UUID if bad != ""],
            "worker_instance_id": [*REQUIRED, *TEXT],
            "reason": [*REQUIRED, *TEXT],
        },
    ),
    "change_priority": OperationCase(
        {"execution_id": Placeholder.WAITING, "new_priority": 1},
        {**bad_id, "new_priority": INTEGER, "lane_id": [*REQUIRED, *TEXT]},
    ),
    "block_execution_for_admission": OperationCase(
        {"execution_id": Placeholder.WAITING, "reason": "waiting_for_quota", "detail": ""},
        {**bad_id, "reason": [None, "", "foo", *TEXT], "detail": [*REQUIRED, *TEXT]},
    ),
    "verify_grant": OperationCase(
        {"execution_id": Placeholder.WAITING, "grant_key": "key"}, {**bad_id, "grant_key": [*REQUIRED, *TEXT]}
    ),
    "block_route": OperationCase({"execution_id": Placeholder.WAITING}, {**bad_id, "detail": [*REQUIRED, *TEXT]}),
    "unblock_execution": OperationCase(
        {"execution_id": Placeholder.WAITING}, {**bad_id, "expected_reason": ["foo", *TEXT]}
    ),
    "set_execution_tag": OperationCase(
        {"execution_id": Placeholder.WAITING, "key": "a.b", "value": "c"},
        {**bad_id, "key": [*REQUIRED, "", "Bad.Key", "nodot", "ff.show", *TEXT], "value": [*REQUIRED, *TEXT]},
    ),
    "set_execution_tags": OperationCase(
        {"execution_id": Placeholder.WAITING, "pairs": {"a.b": "c"}},
        {**bad_id, "pairs": [None, {}, {"ff.show": "c"}, *TAGS]},
    ),
    "claim": OperationCase(
        {**worker, "lane_id": "elsewhere"},
        {
            **bad_worker,
            "lane_id": LANE,
            "capabilities": OFFER,
            "lease_ttl_ms": DURATION,
            "max_wait_ms": [None, *a_length],
        },
    ),
    "claim_many": OperationCase(
        {**worker, "lane_id": "elsewhere", "limit": 1},
        {**bad_worker, "lane_id": LANE, "limit": [*COUNT, 0, 10_001], "capabilities": OFFER},
    ),
    "claim_for_worker": OperationCase({**worker, "lane_id": "elsewhere"}, {**bad_grant, "capabilities": OFFER}),
    "issue_claim_grant": OperationCase(
        {**worker, "execution_id": Placeholder.WAITING, "lane_id": "default"},
        {**bad_grant, **bad_id, **notes, "worker_capabilities": PRESENTED},
    ),
    "issue_reclaim_grant": OperationCase(
        {**worker, **by_id, "lane_id": "default"},
        {**bad_grant, **bad_id, **notes, "worker_capabilities": [bad for bad in PRESENTED if _has_wrong_type(bad)]},
    ),
    "claim_execution": OperationCase(
        {**worker, **lease, "execution_id": Placeholder.WAITING, "attempt_id": UUID},
        {
            **bad_worker,
            **bad_lease,
            **bad_id,
            "attempt_id": A_UUID,
            "attempt_timeout_ms": a_length,
            "execution_deadline_at": an_instant,
            "grant_key": TEXT,
        },
    ),
    "claim_resumed_execution": OperationCase(
        {**worker, **lease, "execution_id": Placeholder.WAITING},
        {**bad_worker, **bad_lease, **bad_id, "remaining_attempt_timeout_ms": a_length, "grant_key": TEXT},
    ),
    "claim_from_resume_grant": OperationCase(
        {**worker, "grant": Placeholder.GRANT},
        {
            **bad_worker,
            "grant": [None, 5, "grant", *(ClaimGrant(bad, "", "", 1, "default") for bad in EXECUTION_ID)],
            "lease_ttl_ms": DURATION,
        },
    ),
    "issue_grant_and_claim": OperationCase(
        {"execution_id": Placeholder.WAITING, "lane_id": "default", "lease_duration_ms": 1000},
        {**bad_id, "lane_id": [bad for bad in LANE if bad != ""], "lease_duration_ms": DURATION},
    ),
    "reclaim_execution": OperationCase(
        {**worker, **lease, **by_id, "attempt_id": UUID},
        {**bad_worker, **bad_lease, **bad_id, "attempt_id": A_UUID, "max_reclaim_count": COUNT[1:], "grant_key": TEXT},
    ),
    "scan_eligible_executions": OperationCase(
        {"lane_id": "default", "partition": 86, "limit": 10},
        {"lane_id": LANE, "partition": PARTITION, "limit": COUNT},
    ),
    "get_execution_tag": OperationCase(
        {**by_id, "key": "a.b"},
        {**bad_id, "key": [*REQUIRED, "", "Bad.Key", *TEXT]},
    ),
    "read_exec_core_fields": OperationCase(
        {"partition": 86, **by_id, "names": ["priority"]},
        {**bad_id, "partition": [*PARTITION, 85], "names": [None, 5, "priority", [5], [["priority"]]]},
    ),
    "list_executions": OperationCase(
        {"partition": 86},
        {"partition": PARTITION, "cursor": EXECUTION_ID[1:], "limit": COUNT},
    ),
    "search_executions": OperationCase(
        {"limit": 5},
        {
            "namespace": TEXT,
            "namespaces": ["n1", 5, [5], [None], ["nul\0"]],
            "kind": TEXT,
            "lane_id": LANE[1:],
            "public_state": ["", "asleep", 5, [], b"waiting", ["waiting", "asleep"], [None]],
            "flow_id": A_UUID,
            "parent_id": EXECUTION_ID[1:],
            "worker_instance_id": WORKER[1:],
            "error": [*TEXT, "x" * 1025],
            "created_from": an_instant,
            "created_before": an_instant,
            "tag": PAIR,
            "cursor": SEARCH_CURSOR,
            "limit": COUNT,
        },
    ),
    "list_children": OperationCase(by_id, {**bad_id, "cursor": SEARCH_CURSOR, "limit": COUNT}),
    "replay_life": OperationCase({**by_id, "life": None}, {**bad_id, "life": COUNT[1:]}),
    "preview_operation": OperationCase(
        {"verb": "cancel", "criteria": {"kind": "a"}}, {"verb": BULK_VERB, "criteria": CRITERIA}
    ),
    "start_operation": OperationCase(
        {"verb": "cancel", "criteria": {"kind": "a"}, "reason": "x"},
        {
            "verb": [*BULK_VERB, "priority"],
            "criteria": [*CRITERIA, {}],
            "reason": [*REQUIRED, *TEXT, "", " "],
            "ceiling": [*COUNT, 0, 10**6 + 1],
            "priority": [True, 1.5, "7", 5],
            "requested_by": [*REQUIRED, *NAME],
            "operation_id": A_UUID,
        },
    ),
    "read_operation": OperationCase({"operation_id": UUID}, {"operation_id": [*REQUIRED, *A_UUID]}),
    "cancel_operation": OperationCase({"operation_id": UUID}, {"operation_id": [*REQUIRED, *A_UUID]}),
    "list_operations": OperationCase({"limit": 5}, {"cursor": [*SEARCH_CURSOR, "5/x"], "limit": [*COUNT, 0, 1001]}),
    "read_levels": OperationCase({}, {}),
    "list_worker_executions": OperationCase(
        {"worker_instance_id": "wa-1"},
        {"worker_instance_id": WORKER, "namespaces": [5, [5], ["nul\0"]], "limit": [*COUNT, 0, 1001]},
    ),
    "list_spenders": OperationCase(
        {"budget_id": UUID},
        {
            "budget_id": [*REQUIRED, *A_UUID],
            "namespace": [*REQUIRED, *NAME],
            "cursor": EXECUTION_ID[1:],
            "limit": [*COUNT, 0],
        },
    ),
    "list_quotas": OperationCase(
        {"limit": 5}, {"namespace": [*REQUIRED, *NAME], "cursor": A_UUID, "limit": [*COUNT, 0]}
    ),
    "list_events": OperationCase(
        {"limit": 5},
        {
            "topics": [None, 5, "lease", [], ["x"], [None]],
            "namespaces": [5, [5], ["nul\0"]],
            "before": COUNT[1:],
            "limit": [*COUNT, 0, 501],
        },
    ),
    "search_flows": OperationCase(
        {"limit": 5},
        {"namespace": TEXT, "namespaces": [5, [5], ["nul\0"]], "cursor": [*SEARCH_CURSOR, "5/x"], "limit": COUNT},
    ),
    "list_approvals": OperationCase(
        {"limit": 5},
        {
            "execution_id": EXECUTION_ID[1:],
            "namespace": TEXT,
            "namespaces": [5, [5], ["nul\0"]],
            "cursor": SEARCH_CURSOR,
            "limit": COUNT,
        },
    ),
    "read_flow_graph": OperationCase(
        {"flow_id": UUID},
        {"flow_id": [*REQUIRED, *A_UUID]},
    ),
    "find_executions": OperationCase(
        {"prefix": "0"}, {"prefix": [*REQUIRED, "", "x", *NOT_TEXT], "namespaces": [5, "n", [5]], "limit": [*COUNT, 0]}
    ),
    "read_lane": OperationCase({"lane_id": "default"}, {"lane_id": LANE}),
    "set_lane_spread": OperationCase(
        {"lane_id": "default", "spread": 1}, {"lane_id": LANE, "spread": [*COUNT, 0, 257]}
    ),
    "list_lanes": OperationCase({"limit": 5}, {"cursor": LANE[1:], "limit": COUNT}),
    "list_expired_leases": OperationCase(
        {"as_of": 1},
        {"as_of": INSTANT, "after": PLACE, "limit": COUNT, "namespace": TEXT, "max_partitions_per_call": COUNT},
    ),
    "sweep_once": OperationCase(
        {"name": "lease_expiry"}, {"name": [None, "", "everything", *NOT_TEXT], "chosen": FILTER}
    ),
    "seed_waitpoint_hmac_secret": OperationCase(
        {"kid": "k1", "secret_hex": "00" * 32},
        {"kid": [*REQUIRED, "", *NAME], "secret_hex": [*REQUIRED, "", "0", "zz" * 32, *TEXT]},
    ),
    "ensure_signing_key": OperationCase({"secret_hex": "00" * 32}, {"secret_hex": [*REQUIRED, *NOT_TEXT]}),
    "rotate_waitpoint_hmac_secret_all": OperationCase(
        {"new_kid": "k1", "new_secret_hex": SECRET, "grace_ms": 0},
        {
            "new_kid": [*REQUIRED, "", "a:b", *NAME],
            "new_secret_hex": [*REQUIRED, "", "0", "zz", *TEXT],
            "grace_ms": [None, True, 1.5, NAN, INFINITE, "7", [], -1, 2**53],
        },
    ),
}
