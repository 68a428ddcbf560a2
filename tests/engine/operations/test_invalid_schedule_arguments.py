"""Operations on schedules and keys answer invalid arguments with typed errors, and write nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.execution import KeyUntil
from flowfabric.model.scheduling.schedule import ScheduleSpec
from flowfabric.rules.durable.keys import KeyMode, KeyPolicy
from flowfabric.stores.port import Store
from tests.executions import create_request
from tests.scenarios.checked_store import dump

RUN = create_request("{fp:1}:11111111-1111-4111-8111-111111111111", partition=1, execution_kind="report")
KEYED = msgspec.structs.replace(RUN, idempotency_key="report|a")
HOURLY = ScheduleSpec(every_ms=3_600_000)
HOUR_MS = 3_600_000

NAMES: list[Any] = [None, 7, b"a", "", " ", "a/b", ".", "..", "x" * 257, "\x00", "\ud800"]
NAMESPACES: list[Any] = [None, 7, b"a", "x" * 1025, "\x00", "\ud800"]
NOTES: list[Any] = [None, 7, b"a", "x" * 4097, "\x00", "\ud800"]
INSTANTS: list[Any] = [None, "1", 1.5, True, 2**63]
LANES: list[Any] = [None, 7, "", "x" * 65, "a\tb", "\x00"]
SPECS: list[Any] = [
    *(None, 7, {"every_ms": 1000}, ScheduleSpec(), ScheduleSpec(every_ms=0), ScheduleSpec(every_ms=-1)),
    *(ScheduleSpec(cron="x"), ScheduleSpec(cron="61 * * * *"), ScheduleSpec(cron="* * * * *", every_ms=1000)),
    *(ScheduleSpec(cron="* * * * *", tz="Nowhere/Land"), msgspec.structs.replace(HOURLY, jitter_ms=-1)),
    msgspec.structs.replace(HOURLY, catch_up_ms=-1),
]
RUNS: list[Any] = [None, 7, KEYED, *(msgspec.structs.replace(RUN, **{name: 1}) for name in ("delay_until", "lane_id"))]
POLICIES: list[Any] = [
    *(None, 7, {"mode": "return"}, KeyPolicy(ttl_ms=-1), KeyPolicy(latest_ms=-1), KeyPolicy(wait_ms=-1)),
    *(KeyPolicy(until=KeyUntil.STARTED), KeyPolicy(mode=KeyMode.BATCH), KeyPolicy(most=-1)),
    *(KeyPolicy(mode="x"), KeyPolicy(until="x"), KeyPolicy(mode=7)),  # type: ignore[arg-type]
]

Table = dict[str, tuple[dict[str, Any], dict[str, list[Any]]]]
OPERATIONS: Table = {
    "put_schedule": (
        {"name": "new", "spec": HOURLY, "run": RUN},
        {"name": NAMES, "spec": SPECS, "run": RUNS, "owner": [7, "x" * 1025, "\x00"]},
    ),
    "list_schedules": (
        {},
        {
            "namespace": NAMESPACES[1:],
            "namespaces": [5, [5], ["nul\0"]],
            "cursor": [7, "", "x", "[]", "[1]", '["a"]', '["a", 1]'],
            "limit": [*INSTANTS, -1, 0, 1001],
        },
    ),
    "describe_schedule": ({"name": "daily"}, {"name": NAMES, "namespace": NAMESPACES}),
    "pause_schedule": ({"name": "daily"}, {"name": NAMES, "namespace": NAMESPACES, "note": NOTES}),
    "resume_schedule": ({"name": "daily"}, {"name": NAMES, "namespace": NAMESPACES}),
    "trigger_schedule": (
        {"name": "daily"},
        {"name": NAMES, "namespace": NAMESPACES, "trigger_id": [7, "", "x", "\x00", "\ud800"]},
    ),
    "backfill_schedule": (
        {"name": "daily", "start": 0, "end": HOUR_MS},
        {
            "name": NAMES,
            "namespace": NAMESPACES,
            "start": INSTANTS,
            "end": INSTANTS,
            "overlap": [None, 7, "", "x", [], {}],
        },
    ),
    "delete_schedule": ({"name": "daily"}, {"name": NAMES, "namespace": NAMESPACES}),
    "retire_schedules": (
        {"owner": "app", "keep": ["daily"]},
        {
            "owner": [None, 7, "x" * 1025],
            "keep": [None, 7, [7], [None], ["a/b"]],
            "note": NOTES,
            "namespace": NAMESPACES,
        },
    ),
    "start_by_key": (
        {"ask": KEYED, "policy": KeyPolicy()},
        {"ask": [None, 7, RUN, msgspec.structs.replace(KEYED, idempotency_key="")], "policy": POLICIES, "message": [7]},
    ),
    "find_by_key": (
        {"idempotency_key": "report|a"},
        {"idempotency_key": [None, 7, "\x00", "\ud800"], "namespace": NAMESPACES, "lane_id": LANES},
    ),
}


@pytest.fixture
async def engine(store: Store) -> Engine:
    """An engine with one schedule."""
    engine = Engine(store, minter=SeededMinter(1))
    await engine.put_schedule("daily", HOURLY, RUN, owner="app")
    return engine


@pytest.mark.parametrize("verb", OPERATIONS)
async def test_every_invalid_schedule_argument_is_refused_and_nothing_is_written(engine: Engine, verb: str) -> None:
    good, bad = OPERATIONS[verb]
    before = await dump(engine.store)
    for name, values in bad.items():
        for value in values:
            with pytest.raises(errors.FabricError) as caught:
                await getattr(engine, verb)(**{**good, name: value})
            assert caught.value.family == "validation", f"{name}={value!r} gave {caught.value!r}"
            assert caught.value.detail, "say what is wrong"
    assert await dump(engine.store) == before


@pytest.mark.parametrize("verb", OPERATIONS)
async def test_the_same_schedule_call_with_valid_arguments_is_not_refused_as_invalid(engine: Engine, verb: str) -> None:
    arguments = dict(OPERATIONS[verb][0])
    if verb == "start_by_key":
        fitting = engine.new_execution_id("default", KEYED.idempotency_key)
        arguments["ask"] = msgspec.structs.replace(KEYED, execution_id=fitting)
    await getattr(engine, verb)(**arguments)
