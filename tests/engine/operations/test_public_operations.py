"""The public operations of an engine: complete, defined once, and typed errors for invalid arguments."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine, operations
from flowfabric.ids import SeededMinter
from flowfabric.stores.port import Store

UUID = "11111111-1111-4111-8111-111111111111"
EXECUTION = "{fp:86}:" + UUID
INVALID_VALUES: list[Any] = [
    None,
    5,
    True,
    float("nan"),
    b"x",
    "",
    [],
    object(),
    "nul\0",
    "\ud800",
    2**70,
    -1,
    [None],
    {5: 5},
]

SPECIFIED_OPERATIONS = {
    *("create_execution", "create_executions", "claim", "claim_for_worker", "issue_claim_grant", "claim_execution"),
    *("issue_grant_and_claim", "claim_resumed_execution", "claim_from_resume_grant", "renew", "progress"),
    *("update_progress", "complete", "fail", "delay", "wait_children", "cancel", "cancel_execution"),
    *("revoke_lease", "change_priority", "replay_execution", "expire_execution", "promote_delayed"),
    *("mark_lease_expired_if_due", "list_expired_leases", "issue_reclaim_grant", "reclaim_execution"),
    *("block_execution_for_admission", "block_route", "unblock_execution", "set_execution_tag"),
    *("set_execution_tags", "get_execution_tag", "get_execution_namespace", "describe_execution"),
    *("read_execution_info", "read_execution_state", "read_execution_context", "read_current_attempt_index"),
    *("read_total_attempt_count", "read_exec_core_fields", "get_execution_result", "list_executions", "list_lanes"),
    *("list_suspended", "attempt_history", "lease_history", "scan_eligible_executions", "ping", "capabilities"),
    *("suspend", "suspend_strict", "suspend_by_triple", "fresh_waitpoint", "create_waitpoint", "close_waitpoint"),
    *("deliver_signal", "deliver_approval_signal", "verify_and_deliver", "observe_signals", "resume_execution"),
    *("expire_suspension", "list_pending_waitpoints", "read_waitpoint_token", "seed_waitpoint_hmac_secret"),
    *("rotate_waitpoint_hmac_secret_all", "list_waitpoint_hmac_kids", "append_frame", "read_stream", "tail_stream"),
    *("read_summary", "subscribe_lease_history", "subscribe_completion", "subscribe_signal_delivery"),
    *("subscribe_operator_event", "subscribe_instance_tags", "subscribe_completions"),
    "subscribe_completions_filtered",
}


def valid_value(name: str) -> Any:
    """Return a valid value for an argument of this name."""
    if name in ("flow_id", "budget_id", "quota_policy_id", "waitpoint_id", "edge_id"):
        return UUID
    if name.endswith("execution_id"):
        return EXECUTION
    if any(word in name for word in ("_ms", "limit", "count", "partition", "priority", "pct")):
        return 1
    return "default"


def arguments(name: str) -> list[inspect.Parameter]:
    """Return the public arguments of an operation."""
    parameters = inspect.signature(getattr(Engine, name)).parameters.values()
    return [argument for argument in parameters if argument.name != "self" and not argument.name.startswith("_")]


WITH_ARGUMENTS = [name for name in operations() if arguments(name)]


def test_every_operation_of_the_specification_is_there() -> None:
    assert SPECIFIED_OPERATIONS - set(operations()) == set()


def test_each_operation_is_defined_once_in_one_of_ten_groups() -> None:
    groups = Engine.__bases__
    names = [name for owner in (Engine, *groups) for name in vars(owner) if not name.startswith("__")]

    assert len(groups) <= 10
    assert Engine.__mro__ == (Engine, *groups, object)
    assert sorted(names) == sorted(set(names))


async def test_the_capabilities_of_an_engine_list_its_operations(store: Store) -> None:
    engine = Engine(store, minter=SeededMinter(1))

    capabilities = engine.capabilities()

    assert capabilities.backend == store.tag.title
    assert capabilities.operations == operations()


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
async def test_invalid_arguments_are_refused_with_a_typed_error(
    store: Store, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = Engine(store, minter=SeededMinter(1))
    await engine.seed_waitpoint_hmac_secret("k1", "00" * 32)
    needed = {
        argument.name: valid_value(argument.name) for argument in arguments(name) if argument.default is argument.empty
    }
    kinds: dict[str, str] = {}
    for wrong in arguments(name):
        for value in INVALID_VALUES:
            try:
                answer = getattr(engine, name)(**(needed | {wrong.name: value}))
                if inspect.isawaitable(answer):
                    async with asyncio.timeout(5):
                        await answer
            except errors.FabricError as refused:
                kinds[f"{wrong.name}={value!r}"] = refused.family
    assert {call: family for call, family in kinds.items() if family in ("bug", "transport")} == {}
