"""EX-006 to EX-015: handles of other stores, and create."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.handles import BackendTag, Handle, HandleKind, encode_handle
from flowfabric.ids import ExecutionId, SeededMinter
from flowfabric.model.answers.execution import Completed, Created, Duplicate, Promotion
from flowfabric.model.states import PublicState
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.feed import Filter
from flowfabric.stores.memory.store import MemoryStore
from tests.scenarios.checked_store import CheckedStore, dump
from tests.scenarios.env import DEFAULT_PARTITION, WAITING, Env, lease_operations

DAY_MS = 24 * 60 * 60 * 1000


async def another_backend(clock: ManualClock, tag: BackendTag) -> Engine:
    """Return an engine on a store with another backend tag."""
    store = MemoryStore(clock)
    store.tag = next(other for other in BackendTag if other is not tag)
    return Engine(CheckedStore(store), minter=SeededMinter(2))


@pytest.mark.spec("EX-006")
@pytest.mark.parametrize("forged", [False, True], ids=["foreign", "forged"])
async def test_a_handle_of_another_backend_is_refused_without_touching_the_store(env: Env, forged: bool) -> None:
    here = env.engine
    claim = await env.create_and_claim()
    there = await another_backend(env.clock, here.store.tag)
    watched = there.store
    assert isinstance(watched, CheckedStore)
    actual, expected = here.store.tag, there.store.tag
    opaque = encode_handle(claim.handle.fields, actual)
    offered = Handle(expected if forged else actual, HandleKind.FRESH, opaque)

    for name, call in lease_operations(there, offered, env.now).items():
        watched.calls.clear()
        with pytest.raises(errors.HandleFromOtherBackend) as caught:
            await call()
        assert caught.value.detail == f"expected={expected.title} actual={actual.title}", name
        assert set(watched.calls) <= {"tag"}, f"{name} touched the store"
    assert (await dump(watched.store))["ff_exec_core"] == []

    assert await here.complete(claim.handle) == Completed(claim.execution_id)


@pytest.mark.spec("EX-007")
async def test_create_makes_a_waiting_execution(env: Env) -> None:
    e = env.engine.new_execution_id()

    answer = await env.engine.create_execution(execution_id=e, priority=5)

    assert answer == Created(e, PublicState.WAITING)
    assert await env.vector(e) == WAITING
    core = await env.core(e)
    counters = ("total_attempt_count", "retry_count", "replay_count", "lease_reclaim_count", "current_lease_epoch")
    assert [core[name] for name in counters] == [0, 0, 0, 0, 0]
    assert core["priority"] == 5
    assert core["created_at"] == core["last_transition_at"] == core["last_mutation_at"] == env.now
    unset = (
        *("started_at", "completed_at", "delay_until", "blocking_detail", "flow_id", "required_capabilities"),
        *("current_attempt_index", "current_attempt_id", "current_lease_id", "current_worker_id"),
        *("lease_expires_at", "lease_acquired_at", "execution_deadline_at", "progress_pct"),
    )
    assert not set(unset) & set(core)
    assert await env.eligible() == [e]
    assert await env.lease_history(e) == []
    assert (await env.dump())["events"] == []


@pytest.mark.spec("EX-008")
async def test_a_delayed_execution_is_promoted_at_its_instant(env: Env) -> None:
    engine, e, t = env.engine, env.engine.new_execution_id(), env.now

    answer = await engine.create_execution(execution_id=e, delay_until=t + 5000)

    assert answer == Created(e, PublicState.DELAYED)
    delayed = "runnable/unowned/not_eligible_until_time/waiting_for_delay/none/pending_first_attempt/delayed"
    assert await env.vector(e) == delayed
    assert (await env.core(e))["blocking_detail"] == f"delayed until {t + 5000}"
    assert await env.eligible() == []
    async with env.refused(errors.ExecutionNotEligible):
        await env.grant(e)

    env.clock.now = t + 4999
    async with env.unchanged():
        assert await engine.promote_delayed(e) is Promotion.NOT_YET_DUE
        assert (await engine.sweep_once("delayed_promoter")).processed == 0
    env.clock.now = t + 5000
    assert await engine.promote_delayed(e) is Promotion.PROMOTED

    assert await env.vector(e) == WAITING
    core = await env.core(e)
    assert "delay_until" not in core
    assert "blocking_detail" not in core
    assert core["last_transition_at"] == t + 5000
    assert await env.eligible() == [e]
    async with env.unchanged():
        assert await engine.promote_delayed(e) is Promotion.NOT_DELAYED


@pytest.mark.spec("EX-008")
def test_promotion_results_have_the_names_of_the_specification() -> None:
    names = ["promoted", "not_yet_due", "not_delayed_cleaned", "not_runnable_cleaned", "not_found_cleaned"]
    assert [answer.value for answer in Promotion] == names


@pytest.mark.spec("EX-009")
@pytest.mark.parametrize("early", [1, 0], ids=["a millisecond ago", "now"])
@pytest.mark.parametrize("in_policy", [False, True], ids=["argument", "policy"])
async def test_a_delay_in_the_past_creates_a_waiting_execution(env: Env, early: int, in_policy: bool) -> None:
    engine, e, t = env.engine, env.engine.new_execution_id(), env.now
    until = t - early
    options: dict[str, Any] = {"policy": {"delay_until": until}} if in_policy else {"delay_until": until}

    assert await engine.create_execution(execution_id=e, **options) == Created(e, PublicState.WAITING)

    assert await env.vector(e) == WAITING
    assert "delay_until" not in await env.core(e)
    async with env.unchanged():
        assert (await engine.sweep_once("delayed_promoter")).processed == 0
    await env.grant(e)
    assert (await env.claim(e)).lease_epoch == 1


@pytest.mark.spec("EX-010")
@pytest.mark.parametrize("life", ["waiting", "active", "terminal"])
async def test_creating_an_existing_id_returns_a_duplicate_and_changes_nothing(env: Env, life: str) -> None:
    engine = env.engine
    e = await env.create(priority=5, input_payload=b"A", tags={"a.b": "1"}, policy={"max_replay_count": 3})
    if life != "waiting":
        claim = await env.grant_and_claim(e, "wa")
        if life == "terminal":
            await engine.complete(claim.handle, result=b"R")
    env.clock.advance_ms(10)

    async with env.unchanged():
        for policy in ({"max_replay_count": 9}, "{not json", "{}\0", '{"x": "\ud800"}'):
            again = await engine.create_execution(
                execution_id=e, priority=9, input_payload=b"B", policy=policy, tags={"No.key": ""}
            )
            assert again == Duplicate(e)

    assert (await env.core(e))["priority"] == 5
    assert (await engine.read_execution_context(e)).input_payload == b"A"
    assert await engine.get_execution_tag(e, "a.b") == "1"


@pytest.mark.spec("EX-011")
async def test_an_idempotency_key_returns_the_first_execution(env: Env) -> None:
    engine = env.engine
    e1 = await env.create(namespace="n1", idempotency_key="k")

    async def again(namespace: str = "n1", key: str = "k", lane: str = "default") -> tuple[ExecutionId, Any]:
        e = engine.new_execution_id(lane)
        return e, await engine.create_execution(execution_id=e, lane_id=lane, namespace=namespace, idempotency_key=key)

    e2, answer = await again()
    assert answer == Duplicate(e1)
    assert await engine.describe_execution(e2) is None
    for other in ({"namespace": "n2"}, {"lane": "main"}, {"key": ""}, {"key": ""}):
        e, answer = await again(**other)
        assert answer == Created(e, PublicState.WAITING)

    env.clock.advance_ms(DAY_MS - 1)
    assert (await again())[1] == Duplicate(e1)
    env.clock.advance_ms(1)
    e5, answer = await again()
    assert answer == Created(e5, PublicState.WAITING)
    assert (await again())[1] == Duplicate(e5)
    assert await engine.create_execution(execution_id=e1, namespace="n1", idempotency_key="k2") == Duplicate(e1)


@pytest.mark.spec("EX-011")
async def test_the_deduplication_window_of_the_policy_outlives_the_execution(env: Env) -> None:
    engine = env.engine
    policy = {"dedup_window_ms": 5000, "stream_policy": {"retention_ttl_ms": 1000}}
    e1 = await env.create(idempotency_key="k", policy=policy)
    await engine.cancel_execution(e1)
    env.clock.advance_ms(1000)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1
    assert await engine.describe_execution(e1) is None

    env.clock.advance_ms(3999)
    assert await engine.create_execution(execution_id=engine.new_execution_id(), idempotency_key="k") == Duplicate(e1)
    env.clock.advance_ms(1)
    await env.create(idempotency_key="k", policy={"dedup_window_ms": 0})
    await env.create(idempotency_key="k")


@pytest.mark.spec("EX-011")
@pytest.mark.parametrize("window", [1, 1000])
async def test_an_idempotency_key_holds_until_the_last_millisecond_of_its_window(env: Env, window: int) -> None:
    first = await env.create(idempotency_key="k", policy={"dedup_window_ms": window})

    async def again() -> Created | Duplicate:
        e = env.engine.new_execution_id()
        return await env.engine.create_execution(execution_id=e, idempotency_key="k")

    env.clock.advance_ms(window - 1)
    assert await again() == Duplicate(first)
    env.clock.advance_ms(1)
    assert isinstance(await again(), Created)


@pytest.mark.spec("EX-011")
@pytest.mark.parametrize("window", [None, 0])
@pytest.mark.parametrize("before", ["never used", "over"])
async def test_an_idempotency_key_used_by_two_processes_at_once_creates_one_execution(
    env: Env, before: str, window: int | None
) -> None:
    if before == "over":
        await env.create(idempotency_key="k", policy={"dedup_window_ms": 5})
        env.clock.advance_ms(5)
    other_engine = Engine(env.store.store, minter=SeededMinter(9))
    winner, loser = other_engine.new_execution_id(), env.engine.new_execution_id()
    policy = None if window is None else {"dedup_window_ms": window}
    lost, won = await env.race(
        env.engine.create_execution(execution_id=loser, idempotency_key="k", policy=policy),
        lambda: other_engine.create_execution(execution_id=winner, idempotency_key="k"),
    )
    assert isinstance(won, Created)
    assert lost == Duplicate(winner)
    assert loser not in await env.eligible()


@pytest.mark.spec("EX-012")
async def test_create_clamps_the_priority(env: Env) -> None:
    requested = [9000, 10_000, 0, -5]
    created = []
    for priority in requested:
        created.append(await env.create(priority=priority))
        env.clock.advance_ms(1)

    assert [(await env.core(e))["priority"] for e in created] == [9000, 9000, 0, 0]
    assert await env.eligible() == created


@pytest.mark.spec("EX-013")
async def test_a_create_with_malformed_policy_json_writes_nothing(env: Env) -> None:
    engine, e = env.engine, env.engine.new_execution_id()

    for text in ("{not json", "{", '{"priority": NaN}', "{}x", "{}\0", '{"x": "\ud800"}'):
        async with env.refused(errors.InvalidPolicyJson, "malformed"):
            await engine.create_execution(execution_id=e, idempotency_key="k", policy=text)

    assert await engine.describe_execution(e) is None
    assert await engine.read_execution_state(e) is None
    assert await engine.get_execution_namespace(e) is None
    assert (await engine.list_executions(DEFAULT_PARTITION)).executions == []
    assert await env.eligible() == []
    corrected = await engine.create_execution(execution_id=e, idempotency_key="k", policy={"max_replay_count": 1})
    assert corrected == Created(e, PublicState.WAITING)


@pytest.mark.parametrize(
    "no_json", [float("nan"), float("inf"), b"gpu", "\ud800", object()], ids=["nan", "inf", "bytes", "half", "object"]
)
@pytest.mark.parametrize("part", ["fairness_key", "max_replay_count", "a name nobody knows"])
async def test_a_policy_mapping_with_values_that_are_not_json_is_refused(env: Env, part: str, no_json: Any) -> None:
    async with env.refused(errors.InvalidPolicyJson, "malformed"):
        await env.create(policy={"retry_policy": {}, part: no_json})


@pytest.mark.spec("EX-014")
@pytest.mark.parametrize(
    ("routing", "error", "detail"),
    [
        ({"required_capabilities": "gpu"}, errors.InvalidCapabilities, "required:not_array"),
        ({"required_capabilities": ["gpu", 42]}, errors.InvalidCapabilities, "required:non_string_token"),
        ({"required_capabilities": [""]}, errors.InvalidCapabilities, "required:empty_token"),
        ({"required_capabilities": ["a,b"]}, errors.InvalidCapabilities, "required:comma_in_token"),
        ({"required_capabilities": ["has space"]}, errors.InvalidCapabilities, "required:control_or_whitespace"),
        ({"required_capabilities": ["bell\x07"]}, errors.InvalidCapabilities, "required:control_or_whitespace"),
        ({"required_capabilities": ["del\x7f"]}, errors.InvalidCapabilities, "required:control_or_whitespace"),
        (7, errors.InvalidPolicyJson, "routing_requirements:not_object"),
    ],
)
async def test_a_create_with_invalid_required_capabilities_is_refused(
    env: Env, routing: object, error: type[errors.FabricError], detail: str
) -> None:
    e = env.engine.new_execution_id()

    async with env.refused(error, detail):
        await env.engine.create_execution(execution_id=e, policy={"routing_requirements": routing})

    assert await env.engine.describe_execution(e) is None


@pytest.mark.spec("EX-014")
async def test_required_capabilities_may_be_unicode(env: Env) -> None:
    e = await env.create(policy={"routing_requirements": {"required_capabilities": ["东京-gpu", "a"]}})

    assert (await env.core(e))["required_capabilities"] == "a,东京-gpu"
    assert "required_capabilities" not in await env.core(
        await env.create(policy={"routing_requirements": {"required_capabilities": []}})
    )


@pytest.mark.spec("EX-015")
async def test_tags_given_at_create_are_stored_and_published(env: Env) -> None:
    engine = env.engine
    e = await env.create(tags={"cairn.instance_id": "i1", "app.sub.field": "v"})
    other = await env.create(tags={"cairn.instance_id": "i2"})

    assert await engine.get_execution_tag(e, "cairn.instance_id") == "i1"
    assert await engine.get_execution_tag(e, "app.sub.field") == "v"
    snapshot = await engine.describe_execution(e)
    assert snapshot is not None
    assert list(snapshot.tags.items()) == [("app.sub.field", "v"), ("cairn.instance_id", "i1")]
    event = await engine.subscribe_lease_history(chosen=Filter(instance_tag=("cairn.instance_id", "i1")))
    for one in (other, e):
        await env.grant(one)
        await engine.complete((await env.claim(one)).handle)
    assert [done.instance_tag for done in await env.completions(e)] == ["i1"]
    received = [await event.next(timeout_s=0) for _ in range(3)]
    assert [(one.execution_id, one.variant) for one in received if one] == [(e, "Acquired"), (e, "Revoked")]

    refused = engine.new_execution_id()
    for key in ("Cairn.x", "a.b\0"):
        async with env.refused(errors.InvalidTagKey, key):
            await engine.create_execution(execution_id=refused, tags={"a.b": "1", key: "2"})
        async with env.refused(errors.InvalidTagKey, key):
            await engine.set_execution_tags(e, {"a.b": "1", key: "2"})
    assert await engine.describe_execution(refused) is None


@pytest.mark.parametrize("method", ["one", "many"])
async def test_a_duplicate_create_does_not_add_its_lane_to_the_list(env: Env, method: str) -> None:
    engine = env.engine
    known = await env.create(idempotency_key="k")

    async def create(**options: Any) -> None:
        request = CreateExecution(partition=0, namespace="default", execution_kind="task", lane_id="other", **options)
        answers = (
            [await engine.create(request)] if method == "one" else await engine.create_executions([request, request])
        )
        assert set(answers) == {Duplicate(known)}

    async with env.unchanged():
        await create(execution_id=known)
        await create(execution_id=engine.new_execution_id(), idempotency_key="k")
    assert (await engine.list_lanes()).lanes == ["default"]
