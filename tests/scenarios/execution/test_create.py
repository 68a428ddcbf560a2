"""EX-006 to EX-015: handles of other stores, and how executions come into being."""

from __future__ import annotations

import asyncio
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
from tests.scenarios.play import DEFAULT_PARTITION, WAITING, Play, lease_bound
from tests.scenarios.watched import Watched, dump

DAY_MS = 24 * 60 * 60 * 1000


async def another_backend(clock: ManualClock, tag: BackendTag) -> Engine:
    """An engine on a store that calls itself something else."""
    store = MemoryStore(clock)
    store.tag = next(other for other in BackendTag if other is not tag)
    return Engine(Watched(store), minter=SeededMinter(2))


@pytest.mark.spec("EX-006")
@pytest.mark.parametrize("forged", [False, True], ids=["foreign", "forged"])
async def test_handle_offered_to_another_backend(play: Play, forged: bool) -> None:
    here = play.engine
    held = await play.claimed()
    there = await another_backend(play.clock, here.store.tag)
    watched = there.store
    assert isinstance(watched, Watched)
    actual, expected = here.store.tag, there.store.tag
    opaque = encode_handle(held.handle.fields, actual)
    offered = Handle(expected if forged else actual, HandleKind.FRESH, opaque)

    for name, call in lease_bound(there, offered, play.now).items():
        watched.calls.clear()
        with pytest.raises(errors.HandleFromOtherBackend) as caught:
            await call()
        assert caught.value.detail == f"expected={expected.title} actual={actual.title}", name
        assert set(watched.calls) <= {"tag"}, f"{name} touched the store"
    assert (await dump(watched.store))["ff_exec_core"] == []

    assert await here.complete(held.handle) == Completed(held.execution_id)


@pytest.mark.spec("EX-007")
async def test_plain_create(play: Play) -> None:
    e = play.engine.new_execution_id()

    answer = await play.engine.create_execution(execution_id=e, priority=5)

    assert answer == Created(e, PublicState.WAITING)
    assert await play.vector(e) == WAITING
    core = await play.core(e)
    counters = ("total_attempt_count", "retry_count", "replay_count", "lease_reclaim_count", "current_lease_epoch")
    assert [core[name] for name in counters] == [0, 0, 0, 0, 0]
    assert core["priority"] == 5
    assert core["created_at"] == core["last_transition_at"] == core["last_mutation_at"] == play.now
    unset = (
        *("started_at", "completed_at", "delay_until", "blocking_detail", "flow_id", "required_capabilities"),
        *("current_attempt_index", "current_attempt_id", "current_lease_id", "current_worker_id"),
        *("lease_expires_at", "lease_acquired_at", "execution_deadline_at", "progress_pct"),
    )
    assert not set(unset) & set(core)
    assert await play.eligible() == [e]
    assert await play.history(e) == []
    assert (await play.everything())["events"] == []


@pytest.mark.spec("EX-008")
async def test_delayed_create_and_promotion(play: Play) -> None:
    engine, e, t = play.engine, play.engine.new_execution_id(), play.now

    answer = await engine.create_execution(execution_id=e, delay_until=t + 5000)

    assert answer == Created(e, PublicState.DELAYED)
    delayed = "runnable/unowned/not_eligible_until_time/waiting_for_delay/none/pending_first_attempt/delayed"
    assert await play.vector(e) == delayed
    assert (await play.core(e))["blocking_detail"] == f"delayed until {t + 5000}"
    assert await play.eligible() == []
    async with play.refused(errors.ExecutionNotEligible):
        await play.grant(e)

    play.clock.now = t + 4999
    async with play.untouched():
        assert await engine.promote_delayed(e) is Promotion.NOT_YET_DUE
        assert (await engine.sweep_once("delayed_promoter")).processed == 0
    play.clock.now = t + 5000
    assert await engine.promote_delayed(e) is Promotion.PROMOTED

    assert await play.vector(e) == WAITING
    core = await play.core(e)
    assert "delay_until" not in core
    assert "blocking_detail" not in core
    assert core["last_transition_at"] == t + 5000
    assert await play.eligible() == [e]
    async with play.untouched():
        assert await engine.promote_delayed(e) is Promotion.NOT_DELAYED


@pytest.mark.spec("EX-008")
def test_a_promotion_is_told_in_the_words_of_the_specification() -> None:
    words = ["promoted", "not_yet_due", "not_delayed_cleaned", "not_runnable_cleaned", "not_found_cleaned"]
    assert [answer.value for answer in Promotion] == words


@pytest.mark.spec("EX-009")
@pytest.mark.parametrize("early", [1, 0], ids=["a millisecond ago", "now"])
@pytest.mark.parametrize("in_policy", [False, True], ids=["argument", "policy"])
async def test_delay_until_already_past(play: Play, early: int, in_policy: bool) -> None:
    engine, e, t = play.engine, play.engine.new_execution_id(), play.now
    until = t - early
    given: dict[str, Any] = {"policy": {"delay_until": until}} if in_policy else {"delay_until": until}

    assert await engine.create_execution(execution_id=e, **given) == Created(e, PublicState.WAITING)

    assert await play.vector(e) == WAITING
    assert "delay_until" not in await play.core(e)
    async with play.untouched():
        assert (await engine.sweep_once("delayed_promoter")).processed == 0
    await play.grant(e)
    assert (await play.claim(e)).lease_epoch == 1


@pytest.mark.spec("EX-010")
@pytest.mark.parametrize("life", ["waiting", "active", "terminal"])
async def test_duplicate_execution_id(play: Play, life: str) -> None:
    engine = play.engine
    e = await play.create(priority=5, input_payload=b"A", tags={"a.b": "1"}, policy={"max_replay_count": 3})
    if life != "waiting":
        await play.grant(e)
        held = await play.claim(e)
        if life == "terminal":
            await engine.complete(held.handle, result=b"R")
    play.clock.advance_ms(10)

    async with play.untouched():
        for policy in ({"max_replay_count": 9}, "{not json", "{}\0", '{"x": "\ud800"}'):
            again = await engine.create_execution(
                execution_id=e, priority=9, input_payload=b"B", policy=policy, tags={"No.key": ""}
            )
            assert again == Duplicate(e)

    assert (await play.core(e))["priority"] == 5
    assert (await engine.read_execution_context(e)).input_payload == b"A"
    assert await engine.get_execution_tag(e, "a.b") == "1"


@pytest.mark.spec("EX-011")
async def test_idempotency_key_returns_the_first_execution(play: Play) -> None:
    engine = play.engine
    e1 = await play.create(namespace="n1", idempotency_key="k")

    async def again(namespace: str = "n1", key: str = "k", lane: str = "default") -> tuple[ExecutionId, Any]:
        e = engine.new_execution_id(lane)
        return e, await engine.create_execution(execution_id=e, lane_id=lane, namespace=namespace, idempotency_key=key)

    e2, answer = await again()
    assert answer == Duplicate(e1)
    assert await engine.describe_execution(e2) is None
    for other in ({"namespace": "n2"}, {"lane": "main"}, {"key": ""}, {"key": ""}):
        e, answer = await again(**other)
        assert answer == Created(e, PublicState.WAITING)

    play.clock.advance_ms(DAY_MS - 1)
    assert (await again())[1] == Duplicate(e1)
    play.clock.advance_ms(1)
    e5, answer = await again()
    assert answer == Created(e5, PublicState.WAITING)
    assert (await again())[1] == Duplicate(e5)
    assert await engine.create_execution(execution_id=e1, namespace="n1", idempotency_key="k2") == Duplicate(e1)


@pytest.mark.spec("EX-011")
async def test_the_window_is_the_policy_s_and_outlives_the_execution(play: Play) -> None:
    engine = play.engine
    policy = {"dedup_window_ms": 5000, "stream_policy": {"retention_ttl_ms": 1000}}
    e1 = await play.create(idempotency_key="k", policy=policy)
    await engine.cancel_execution(e1)
    play.clock.advance_ms(1000)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1
    assert await engine.describe_execution(e1) is None

    play.clock.advance_ms(3999)
    assert await engine.create_execution(execution_id=engine.new_execution_id(), idempotency_key="k") == Duplicate(e1)
    play.clock.advance_ms(1)
    await play.create(idempotency_key="k", policy={"dedup_window_ms": 0})
    await play.create(idempotency_key="k")


@pytest.mark.spec("EX-011")
@pytest.mark.parametrize("window", [1, 1000])
async def test_a_key_is_remembered_to_the_last_millisecond_of_its_window(play: Play, window: int) -> None:
    first = await play.create(idempotency_key="k", policy={"dedup_window_ms": window})

    async def again() -> Created | Duplicate:
        e = play.engine.new_execution_id()
        return await play.engine.create_execution(execution_id=e, idempotency_key="k")

    play.clock.advance_ms(window - 1)
    assert await again() == Duplicate(first)
    play.clock.advance_ms(1)
    assert isinstance(await again(), Created)


@pytest.mark.spec("EX-011")
@pytest.mark.parametrize("window", [None, 0])
@pytest.mark.parametrize("before", ["never used", "over"])
async def test_a_key_that_another_process_uses_meanwhile_is_used_once(
    play: Play, before: str, window: int | None
) -> None:
    if before == "over":
        await play.create(idempotency_key="k", policy={"dedup_window_ms": 5})
        play.clock.advance_ms(5)
    elsewhere = Engine(play.store.store, minter=SeededMinter(9))
    winner, loser = elsewhere.new_execution_id(), play.engine.new_execution_id()
    policy = None if window is None else {"dedup_window_ms": window}
    gate = play.slowed("commit")
    asked = asyncio.ensure_future(play.engine.create_execution(execution_id=loser, idempotency_key="k", policy=policy))
    async with asyncio.timeout(20):
        await gate.reached()
        assert isinstance(await elsewhere.create_execution(execution_id=winner, idempotency_key="k"), Created)
        gate.release()
        assert await asked == Duplicate(winner)
    assert loser not in await play.eligible()


@pytest.mark.spec("EX-012")
async def test_priority_clamp_at_create(play: Play) -> None:
    asked = [9000, 10_000, 0, -5]
    created = []
    for priority in asked:
        created.append(await play.create(priority=priority))
        play.clock.advance_ms(1)

    assert [(await play.core(e))["priority"] for e in created] == [9000, 9000, 0, 0]
    assert await play.eligible() == created


@pytest.mark.spec("EX-013")
async def test_rejected_policy_leaves_nothing_behind(play: Play) -> None:
    engine, e = play.engine, play.engine.new_execution_id()

    for text in ("{not json", "{", '{"priority": NaN}', "{}x", "{}\0", '{"x": "\ud800"}'):
        async with play.refused(errors.InvalidPolicyJson, "malformed"):
            await engine.create_execution(execution_id=e, idempotency_key="k", policy=text)

    assert await engine.describe_execution(e) is None
    assert await engine.read_execution_state(e) is None
    assert await engine.get_execution_namespace(e) is None
    assert (await engine.list_executions(DEFAULT_PARTITION)).executions == []
    assert await play.eligible() == []
    corrected = await engine.create_execution(execution_id=e, idempotency_key="k", policy={"max_replay_count": 1})
    assert corrected == Created(e, PublicState.WAITING)


@pytest.mark.parametrize(
    "no_json", [float("nan"), float("inf"), b"gpu", "\ud800", object()], ids=["nan", "inf", "bytes", "half", "object"]
)
@pytest.mark.parametrize("part", ["fairness_key", "max_replay_count", "a name nobody knows"])
async def test_a_policy_that_is_no_json_is_refused_as_a_mapping_too(play: Play, part: str, no_json: Any) -> None:
    async with play.refused(errors.InvalidPolicyJson, "malformed"):
        await play.create(policy={"retry_policy": {}, part: no_json})


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
async def test_a_create_with_a_wrong_requirement_is_refused(
    play: Play, routing: object, error: type[errors.FabricError], detail: str
) -> None:
    e = play.engine.new_execution_id()

    async with play.refused(error, detail):
        await play.engine.create_execution(execution_id=e, policy={"routing_requirements": routing})

    assert await play.engine.describe_execution(e) is None


@pytest.mark.spec("EX-014")
async def test_a_requirement_in_any_alphabet_is_stored(play: Play) -> None:
    e = await play.create(policy={"routing_requirements": {"required_capabilities": ["东京-gpu", "a"]}})

    assert (await play.core(e))["required_capabilities"] == "a,东京-gpu"
    assert "required_capabilities" not in await play.core(
        await play.create(policy={"routing_requirements": {"required_capabilities": []}})
    )


@pytest.mark.spec("EX-015")
async def test_create_time_tags(play: Play) -> None:
    engine = play.engine
    e = await play.create(tags={"cairn.instance_id": "i1", "app.sub.field": "v"})
    other = await play.create(tags={"cairn.instance_id": "i2"})

    assert await engine.get_execution_tag(e, "cairn.instance_id") == "i1"
    assert await engine.get_execution_tag(e, "app.sub.field") == "v"
    snapshot = await engine.describe_execution(e)
    assert snapshot is not None
    assert list(snapshot.tags.items()) == [("app.sub.field", "v"), ("cairn.instance_id", "i1")]
    news = await engine.subscribe_lease_history(chosen=Filter(instance_tag=("cairn.instance_id", "i1")))
    for one in (other, e):
        await play.grant(one)
        await engine.complete((await play.claim(one)).handle)
    assert [done.instance_tag for done in await play.completions(e)] == ["i1"]
    heard = [await news.next(timeout_s=0) for _ in range(3)]
    assert [(one.execution_id, one.variant) for one in heard if one] == [(e, "Acquired"), (e, "Revoked")]

    refused = engine.new_execution_id()
    for key in ("Cairn.x", "a.b\0"):
        async with play.refused(errors.InvalidTagKey, key):
            await engine.create_execution(execution_id=refused, tags={"a.b": "1", key: "2"})
        async with play.refused(errors.InvalidTagKey, key):
            await engine.set_execution_tags(e, {"a.b": "1", key: "2"})
    assert await engine.describe_execution(refused) is None


@pytest.mark.parametrize("road", ["one", "many"])
async def test_a_lane_is_listed_when_an_execution_was_created_on_it_and_not_before(play: Play, road: str) -> None:
    engine = play.engine
    known = await play.create(idempotency_key="k")

    async def create(**given: Any) -> None:
        ask = CreateExecution(partition=0, namespace="default", execution_kind="task", lane_id="other", **given)
        answers = [await engine.create(ask)] if road == "one" else await engine.create_executions([ask, ask])
        assert set(answers) == {Duplicate(known)}

    async with play.untouched():
        await create(execution_id=known)
        await create(execution_id=engine.new_execution_id(), idempotency_key="k")
    assert (await engine.list_lanes()).lanes == ["default"]
