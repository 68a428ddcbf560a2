"""Operations on budgets, quotas, workers and the scheduler answer invalid arguments with typed errors."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.handles import Handle, HandleKind
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Claimed
from flowfabric.stores.port import Store
from tests.engine.invalid_arguments import FILTER
from tests.engine.invalid_arguments import OPERATIONS as OTHER_OPERATIONS
from tests.engine.operations.test_invalid_schedule_arguments import OPERATIONS as SCHEDULE_OPERATIONS
from tests.scenarios.checked_store import dump

B = "0b000000-0000-4000-8000-000000000001"
Q = "0c000000-0000-4000-8000-000000000001"
R = "0d000000-0000-4000-8000-000000000001"

IDS: list[Any] = [None, 7, "", "x", B[:-1], "\x00", "\ud800"]
EXECUTIONS: list[Any] = [None, 7, "", "x", B, f"{{fp:99999999}}:{B}"]
TEXTS: list[Any] = [None, 7, "\x00", "\ud800", "x" * 2000]
NUMBERS: list[Any] = [None, "1", 1.5, True, -1, 2**63]
LENGTHS: list[Any] = [*NUMBERS, 2**62]
MAPPINGS: list[Any] = [None, 7, "ab", ["a"], {"": 1}, {7: 1}, {"a": -1}, {"a": "1"}, {"a": True}, {"a": 2**63}]
LISTS: list[Any] = [None, 7, "ab", [None], [7], [""], ["a", "a"], ["\x00"]]
FIGURES: list[Any] = [None, 7, "ab", ["1"], [-1], [1.5], [2**63], [1, 2]]
NAMES: list[Any] = [None, 7, "", "a b", "x" * 257, "\x00"]
TOKENS: list[Any] = [None, 7, "ab", [""], ["a,b"], ["a b"], [7], ["x" * 4097]]
WORKER = {"worker_id": "w", "worker_instance_id": "w-1"}

Table = dict[str, tuple[dict[str, Any], dict[str, list[Any]]]]
OPERATIONS: Table = {
    "create_budget": (
        {"budget_id": R, "dimensions": ["a"], "hard_limits": [1], "soft_limits": [1]},
        {
            "budget_id": IDS,
            "dimensions": LISTS,
            "hard_limits": FIGURES,
            "soft_limits": FIGURES,
            "scope_type": TEXTS,
            "on_hard_limit": TEXTS,
            "reset_interval_ms": LENGTHS,
        },
    ),
    "change_budget_limits": (
        {"budget_id": B, "dimensions": ["a"], "hard_limits": [1], "soft_limits": [1]},
        {"budget_id": IDS, "dimensions": LISTS, "hard_limits": FIGURES, "soft_limits": FIGURES},
    ),
    "report_usage": (
        {"handle": "HANDLE", "budget_id": B, "custom": {"a": 1}},
        {"handle": [None, 7, "h", "FOREIGN"], "budget_id": IDS, "custom": MAPPINGS, "dedup_key": [7, "\x00", "\ud800"]},
    ),
    "report_usage_admin": (
        {"budget_id": B, "dimensions": ["a"], "deltas": [1]},
        {"budget_id": IDS, "dimensions": [None, 7, "ab", [None], [""], ["a", "b"]], "deltas": FIGURES},
    ),
    "record_spend": (
        {"budget_id": B, "execution_id": "HELD", "deltas": {"a": 1}},
        {
            "budget_id": IDS,
            "execution_id": EXECUTIONS,
            "deltas": MAPPINGS,
            "idempotency_key": [7, "\x00"],
            "handle": [7, "FOREIGN"],
            "reservation_id": [7, "", "x"],
            "acknowledged": [7, "k", [7], ["\x00"], ["k"] * 1001],
        },
    ),
    "release_budget": ({"budget_id": B, "execution_id": "HELD"}, {"budget_id": IDS, "execution_id": EXECUTIONS}),
    "reserve_budget": (
        {"budget_id": B, "execution_id": "HELD", "amounts": {"a": 1}, "ttl_ms": 1000},
        {
            "budget_id": IDS,
            "execution_id": EXECUTIONS,
            "amounts": MAPPINGS,
            "ttl_ms": [*LENGTHS, 0],
            "reservation_id": [7, "", "x"],
            "drawn": MAPPINGS[1:],
            "epoch": [None, "1", -1, 1.5],
        },
    ),
    "settle_budget": (
        {"budget_id": B, "execution_id": "HELD", "reservation_id": R, "amounts": {"a": 1}},
        {"budget_id": IDS, "execution_id": EXECUTIONS, "reservation_id": IDS, "amounts": MAPPINGS},
    ),
    "reservation_owner": ({"budget_id": B, "reservation_id": R}, {"budget_id": IDS, "reservation_id": IDS}),
    "refund_budget": (
        {"budget_id": B, "reservation_id": R},
        {
            "budget_id": IDS,
            "reservation_id": IDS,
            "execution_id": ["", 5, "not-an-id", B],
            "epoch": ["1", -1, 1.5],
            "acknowledged": [None, 7, "k", [7]],
        },
    ),
    "reset_budget": ({"budget_id": B}, {"budget_id": IDS}),
    "get_budget_status": ({"budget_id": B}, {"budget_id": IDS}),
    "read_budget_usage_and_limits": ({"budget_id": B}, {"budget_id": IDS}),
    "list_budgets": ({}, {"cursor": IDS[1:], "limit": NUMBERS}),
    "reconcile_budget_counters": ({"partition": 0}, {"partition": [*NUMBERS, 32]}),
    "create_quota_policy": (
        {"quota_policy_id": R, "window_seconds": 1, "max_requests_per_window": 1, "max_concurrent": 1},
        {
            "quota_policy_id": IDS,
            "window_seconds": LENGTHS,
            "max_requests_per_window": NUMBERS,
            "max_concurrent": NUMBERS,
            "jitter_ms": LENGTHS,
        },
    ),
    "read_quota_policy_limits": ({"quota_policy_id": Q}, {"quota_policy_id": IDS}),
    "check_admission": (
        {"quota_policy_id": Q, "execution_id": "HELD", "window_seconds": 1, "rate_limit": 1, "concurrency_cap": 1},
        {
            "quota_policy_id": IDS,
            "execution_id": EXECUTIONS,
            "dimension": TEXTS,
            "window_seconds": LENGTHS,
            "rate_limit": NUMBERS,
            "concurrency_cap": NUMBERS,
            "jitter_ms": LENGTHS,
        },
    ),
    "release_admission": (
        {"quota_policy_id": Q, "execution_id": "HELD"},
        {"quota_policy_id": IDS, "execution_id": EXECUTIONS},
    ),
    "reconcile_quota_counters": ({"partition": 0}, {"partition": [*NUMBERS, 32]}),
    "register_worker": (
        {**WORKER, "lanes": ["default"], "liveness_ttl_ms": 1000},
        {
            "worker_id": NAMES,
            "worker_instance_id": NAMES,
            "namespace": TEXTS,
            "lanes": [None, 7, "ab", [], [""], [7], ["x" * 65], ["\n"]],
            "capabilities": TOKENS,
            "liveness_ttl_ms": [*LENGTHS, 0],
            "tasks": [None, 7, "ab", [7], [None]],
        },
    ),
    "heartbeat_worker": ({"worker_instance_id": "w-1"}, {"worker_instance_id": NAMES, "namespace": TEXTS}),
    "mark_worker_dead": (
        {"worker_instance_id": "w-1"},
        {"worker_instance_id": NAMES, "namespace": TEXTS, "reason": [*TEXTS, "a\nb", "x" * 257, "\x85"]},
    ),
    "list_tasks": ({}, {"namespace": TEXTS[1:], "namespaces": [5, [5], ["nul\0"]]}),
    "list_workers": ({"namespace": "default"}, {"namespace": TEXTS[1:], "after": [7, "\x00"], "limit": NUMBERS}),
    "list_worker_events": (
        {"namespace": "default", "worker_instance_id": "w-1"},
        {"namespace": TEXTS, "worker_instance_id": NAMES},
    ),
    "claim_admitted": (
        {"lane_id": "default", **WORKER},
        {
            "lane_id": [None, 7, "", "x" * 65, "\n"],
            "limit": [*NUMBERS, 0, 10_001],
            "worker_id": NAMES,
            "worker_instance_id": NAMES,
            "capabilities": TOKENS,
            "lease_ttl_ms": [*LENGTHS, 0],
            "max_wait_ms": LENGTHS,
            "namespaces": [7, "ns", [7], [None], ["\x00"]],
        },
    ),
    "claim_for_worker": (
        {"lane_id": "default", **WORKER},
        {
            "lane_id": [None, 7, "", "x" * 65, "\n"],
            "worker_id": NAMES,
            "worker_instance_id": NAMES,
            "capabilities": TOKENS,
            "grant_ttl_ms": [*LENGTHS, 0],
            "namespaces": [7, "ns", [7], [None], ["\x00"]],
        },
    ),
    "explain": ({"execution_id": "HELD"}, {"execution_id": EXECUTIONS}),
    "trim_retention": (
        {"partition": 0, "lane_id": "default"},
        {
            "partition": [*NUMBERS, 65_536],
            "lane_id": [None, 7, "", "x" * 65],
            "default_retention_ms": [value for value in LENGTHS if value is not None],
            "batch": [*NUMBERS, 10_001],
            "chosen": FILTER,
        },
    ),
    "sweep_once": ({"name": "unblock"}, {"name": [None, 7, "x"], "batch": [*NUMBERS[1:], 0], "chosen": FILTER}),
}


@pytest.fixture
async def held(store: Store) -> tuple[Engine, Claimed]:
    """An engine with one claimed execution, a budget and a quota policy."""
    engine = Engine(store, minter=SeededMinter(1))
    await engine.seed_waitpoint_hmac_secret("k1", "00112233445566778899aabbccddeeff" * 2)
    await engine.create_budget(B, dimensions=["a"], hard_limits=[10], soft_limits=[5])
    await engine.create_quota_policy(Q, window_seconds=60, max_requests_per_window=5, max_concurrent=5)
    await engine.create_execution(execution_id=engine.new_execution_id())
    [claimed] = await engine.claim_admitted("default", **WORKER)  # type: ignore[arg-type]
    return engine, claimed


def resolve(value: Any, engine: Engine, claimed: Claimed) -> Any:
    """Return the value that a placeholder stands for."""
    if not isinstance(value, str):
        return value
    foreign = next(tag for tag in type(engine.store.tag) if tag is not engine.store.tag)
    stands = {
        "HELD": claimed.execution_id,
        "HANDLE": claimed.handle,
        "FOREIGN": Handle(foreign, HandleKind.FRESH, claimed.handle.opaque),
    }
    return stands.get(value, value)


@pytest.mark.parametrize("verb", OPERATIONS)
async def test_every_invalid_limits_argument_is_refused_and_nothing_is_written(
    held: tuple[Engine, Claimed], verb: str
) -> None:
    engine, claimed = held
    good, bad = OPERATIONS[verb]
    arguments = {name: resolve(value, engine, claimed) for name, value in good.items()}
    before = await dump(engine.store)
    for name, values in bad.items():
        for value in values:
            with pytest.raises(errors.FabricError) as caught:
                await getattr(engine, verb)(**{**arguments, name: resolve(value, engine, claimed)})
            assert caught.value.family == "validation", f"{name}={value!r} gave {caught.value!r}"
            assert caught.value.detail, "say what is wrong"
    assert await dump(engine.store) == before


@pytest.mark.parametrize("verb", OPERATIONS)
async def test_the_same_limits_call_with_valid_arguments_is_not_refused_as_invalid(
    held: tuple[Engine, Claimed], verb: str
) -> None:
    engine, claimed = held
    await getattr(engine, verb)(
        **{name: resolve(value, engine, claimed) for name, value in OPERATIONS[verb][0].items()}
    )


GROUPS = ("executions", "leases", "claims", "limits", "reads", "admin")
WITHOUT_ARGUMENTS = {"list_waitpoint_hmac_kids", "list_api_tokens", "unblock_budget_waiters", "refresh_lanes"}
# Tried with wrong arguments in the tests of flows, of API tokens and of pollers.
TRIED_ELSEWHERE = {
    *("describe_flow", "list_flows", "list_flow_members", "list_outgoing_edges", "list_incoming_edges", "list_edges"),
    *("describe_edge", "resolve_execution_flow_id", "get_flow_tag", "get_flow_summary", "project_flow_summary"),
    *("make_api_token", "rotate_api_token", "revoke_api_token", "authenticate_token", "ensure_partitions"),
    *("open_session", "authenticate_session", "redeem_login_link"),
    *("pulling", "claim_from_lanes", "wake_claims", "redeemer", "await_end", "cancel_as_holder", "require_lease"),
    "purge_flow",
}


def test_every_operation_of_these_groups_is_in_a_table() -> None:
    groups = [f"flowfabric.engine.operations.{name}" for name in GROUPS]
    homes = [cls for cls in Engine.__mro__ if cls.__module__ in groups]
    found = {name for home in homes for name in vars(home) if not name.startswith("_")}

    tables = {*OPERATIONS, *OTHER_OPERATIONS, *SCHEDULE_OPERATIONS}

    assert found - WITHOUT_ARGUMENTS - TRIED_ELSEWHERE - tables == set()
