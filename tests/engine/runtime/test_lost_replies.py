"""A request or a reply is lost: each operation takes effect exactly once and returns the answer it would have had."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.runtime.backoff import StoreBackoff
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Claimed, Completed, ProgressNoted, Renewed
from flowfabric.model.change import Change, Patch, seen
from flowfabric.model.execution import Execution
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read
from tests.engine.lossy_store import Loss, LossyStore
from tests.executions import claim_one, create_request, new_execution
from tests.scenarios.checked_store import dump

LEASE_MS = 30_000
WORKER: dict[str, Any] = {"worker_id": "wb", "worker_instance_id": "wb-1"}
LATER = ManualClock().now + 1000
RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}}


class Scene:
    """An engine, and helpers that bring it into the state before a loss."""

    def __init__(self, engine: Engine, clock: ManualClock) -> None:
        self.engine = engine
        self.clock = clock
        self.now = clock.now

    async def waiting(self, **given: Any) -> str:
        return await new_execution(self.engine, **given)

    async def held(self, **given: Any) -> Claimed:
        e = await self.waiting(**given)
        await self.granted(e)
        return await self.engine.claim_execution(e, **WORKER, lease_ttl_ms=LEASE_MS)

    async def granted(self, e: str) -> None:
        await self.engine.issue_claim_grant(e, lane_id="default", **WORKER)

    async def resumable(self) -> str:
        held = await self.held()
        await self.engine.wait_children(held.handle)
        return held.execution_id

    async def expired(self) -> str:
        held = await self.held()
        self.clock.advance_ms(LEASE_MS)
        await self.engine.mark_lease_expired_if_due(held.execution_id)
        return held.execution_id

    async def ended(self) -> str:
        e = await self.waiting()
        await self.engine.cancel_execution(e)
        return e


Act = Callable[[], Awaitable[Any]]
Case = Callable[[Scene], Awaitable[Act]]


def operation(prepare: Callable[[Scene], Awaitable[Any]], act: Callable[[Engine, Any], Awaitable[Any]]) -> Case:
    """Return the case of an operation and of what has to exist before it."""

    async def case(scene: Scene) -> Act:
        found = await prepare(scene)
        return lambda: act(scene.engine, found)

    return case


async def nothing(_: Scene) -> None:
    """Prepare nothing."""


async def new_id(scene: Scene) -> str:
    return scene.engine.new_execution_id()


async def create_many(scene: Scene) -> Act:
    asks = [create_request(scene.engine.new_execution_id(), idempotency_key=f"k{number}") for number in range(5)]
    return lambda: scene.engine.create_executions(asks)


async def complete_many(scene: Scene) -> Act:
    held = [await scene.held() for _ in range(3)]
    return lambda: scene.engine.complete_many([(one.handle, b"R") for one in held])


async def renew(scene: Scene) -> Act:
    held = await scene.held()
    scene.clock.advance_ms(1000)
    return lambda: scene.engine.renew(held.handle)


async def renew_many(scene: Scene) -> Act:
    held = [await scene.held() for _ in range(3)]
    scene.clock.advance_ms(1000)
    return lambda: scene.engine.renew_many([one.handle for one in held])


async def mark_expired(scene: Scene) -> Act:
    held = await scene.held()
    scene.clock.advance_ms(LEASE_MS)
    return lambda: scene.engine.mark_lease_expired_if_due(held.execution_id)


async def promote(scene: Scene) -> Act:
    e = await scene.waiting(delay_until=scene.now + 10)
    scene.clock.advance_ms(10)
    return lambda: scene.engine.promote_delayed(e)


async def unblock(scene: Scene) -> Act:
    e = await scene.waiting()
    await scene.engine.block_route(e)
    return lambda: scene.engine.unblock_execution(e)


async def claim_by_grant(scene: Scene) -> Act:
    e = await scene.waiting()
    await scene.granted(e)
    return lambda: scene.engine.claim_execution(e, **WORKER, lease_ttl_ms=LEASE_MS)


async def resume_by_grant(scene: Scene) -> Act:
    e = await scene.resumable()
    await scene.granted(e)
    return lambda: scene.engine.claim_resumed_execution(e, **WORKER, lease_ttl_ms=LEASE_MS)


async def pull_many(scene: Scene) -> Act:
    for _ in range(3):
        await scene.waiting()
    return lambda: scene.engine.claim_many("default", 3, **WORKER, lease_ttl_ms=LEASE_MS)


async def take_over_at_the_cap(scene: Scene) -> Act:
    held = await scene.held(policy={"max_reclaim_count": 0})
    await scene.engine.revoke_lease(held.execution_id)
    return lambda: scene.engine.claim("default", **WORKER, lease_ttl_ms=LEASE_MS)


async def reclaim(scene: Scene) -> Act:
    e = await scene.expired()
    await scene.engine.issue_reclaim_grant(e, lane_id="default", **WORKER)
    return lambda: scene.engine.reclaim_execution(e, **WORKER, lease_ttl_ms=LEASE_MS)


CASES: dict[str, Case] = {
    "create": operation(
        new_id, lambda engine, e: engine.create_execution(execution_id=e, input_payload=b"in", tags={"a.b": "c"})
    ),
    "create_with_a_key": operation(
        new_id, lambda engine, e: engine.create_execution(execution_id=e, idempotency_key="k")
    ),
    "create_many": create_many,
    "complete": operation(Scene.held, lambda engine, held: engine.complete(held.handle, result=b"R")),
    "complete_many": complete_many,
    "complete_as_operator": operation(
        Scene.held,
        lambda engine, held: engine.complete(execution_id=held.execution_id, source="operator_override", result=b"R"),
    ),
    "fail_for_good": operation(Scene.held, lambda engine, held: engine.fail(held.handle, reason="boom")),
    "fail_with_a_retry": operation(
        lambda scene: scene.held(policy=RETRY), lambda engine, held: engine.fail(held.handle, reason="flaky")
    ),
    "delay": operation(Scene.held, lambda engine, held: engine.delay(held.handle, delay_until=LATER)),
    "delay_timed": operation(
        lambda scene: scene.held(policy={"timeout_policy": {"attempt_timeout_ms": 9000}}),
        lambda engine, held: engine.delay(held.handle, delay_until=LATER),
    ),
    "wait_children": operation(Scene.held, lambda engine, held: engine.wait_children(held.handle)),
    "cancel": operation(Scene.held, lambda engine, held: engine.cancel(held.handle, reason="stop")),
    "cancel_as_operator": operation(Scene.waiting, lambda engine, e: engine.cancel_execution(e, reason="stop")),
    "expire": operation(Scene.held, lambda engine, held: engine.expire_execution(held.execution_id)),
    "replay": operation(Scene.ended, lambda engine, e: engine.replay_execution(e)),
    "progress": operation(Scene.held, lambda engine, held: engine.progress(held.handle, pct=40, message="half")),
    "renew": renew,
    "renew_many": renew_many,
    "revoke": operation(Scene.held, lambda engine, held: engine.revoke_lease(held.execution_id, reason="bad node")),
    "mark_expired": mark_expired,
    "promote": promote,
    "change_priority": operation(
        lambda scene: scene.waiting(priority=1), lambda engine, e: engine.change_priority(e, 50)
    ),
    "block": operation(
        Scene.waiting,
        lambda engine, e: engine.block_execution_for_admission(e, reason="waiting_for_quota", detail="full"),
    ),
    "unblock": unblock,
    "set_tag": operation(Scene.waiting, lambda engine, e: engine.set_execution_tag(e, "a.b", "c")),
    "set_tags": operation(Scene.waiting, lambda engine, e: engine.set_execution_tags(e, {"a.b": "c", "a.d": "e"})),
    "grant": operation(Scene.waiting, lambda engine, e: engine.issue_claim_grant(e, lane_id="default", **WORKER)),
    "scheduler_grant": operation(Scene.waiting, lambda engine, _: engine.claim_for_worker("default", **WORKER)),
    "scheduler_reclaim_grant": operation(Scene.expired, lambda engine, _: engine.claim_for_worker("default", **WORKER)),
    "claim_by_grant": claim_by_grant,
    "resume_by_grant": resume_by_grant,
    "claim_as_operator": operation(
        Scene.waiting, lambda engine, e: engine.issue_grant_and_claim(e, lane_id="default", lease_duration_ms=LEASE_MS)
    ),
    "pull": operation(
        lambda scene: scene.waiting(input_payload=b"in"),
        lambda engine, _: engine.claim("default", **WORKER, lease_ttl_ms=LEASE_MS),
    ),
    "pull_many": pull_many,
    "take_over": operation(Scene.expired, lambda engine, _: engine.claim("default", **WORKER, lease_ttl_ms=LEASE_MS)),
    "take_over_at_the_cap": take_over_at_the_cap,
    "reclaim_grant": operation(
        Scene.expired, lambda engine, e: engine.issue_reclaim_grant(e, lane_id="default", **WORKER)
    ),
    "reclaim": reclaim,
    "reclaim_at_the_cap": operation(
        Scene.expired, lambda engine, e: engine.reclaim_execution(e, **WORKER, max_reclaim_count=0)
    ),
    "rotate_keys": operation(
        nothing,
        lambda engine, _: engine.rotate_waitpoint_hmac_secret_all("k2", "ffeeddccbbaa99887766554433221100" * 2, 1000),
    ),
}

MINTED = frozenset({"lease_id", "attempt_id", "revision", "position", "grant", "handle", "grant_key"})


def plain(value: Any) -> Any:
    """Return a value without what differs from run to run: minted ids, revisions, feed positions."""
    if isinstance(value, msgspec.Struct):
        pairs = msgspec.structs.asdict(value).items()
        return type(value).__name__, {name: plain(part) for name, part in pairs if name not in MINTED}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def plain_rows(rows: dict[str, list[Any]]) -> dict[str, Any]:
    """Return all rows likewise; a renewal may emit two events, since it may be repeated.

    The events of each execution are in order; the order between executions is not defined after a loss.
    """
    events = [one for one in rows["events"] if one.event.lease != "renewed"]
    events.sort(key=lambda one: one.event.execution_id)
    return {name: plain(kept) for name, kept in (rows | {"events": events}).items()}


async def create_scene(store: Any, clock: ManualClock) -> Scene:
    engine = Engine(store, minter=SeededMinter(1))
    await engine.seed_waitpoint_hmac_secret("k1", "00112233445566778899aabbccddeeff" * 2)
    return Scene(engine, clock)


async def undisturbed(case: Case) -> tuple[Any, dict[str, Any]]:
    """Return the answer and the rows when nothing is lost."""
    clock = ManualClock()
    store = MemoryStore(clock)
    act = await case(await create_scene(store, clock))
    return plain(await act()), plain_rows(await dump(store))


@pytest.mark.parametrize("loss", Loss, ids=lambda loss: loss.name.lower())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_an_execution_operation_that_was_lost_once_takes_effect_once(
    store: Store, clock: ManualClock, case: Case, loss: Loss
) -> None:
    lossy = LossyStore(store)
    act = await case(await create_scene(lossy, clock))
    lossy.next_loss = loss

    answer = await act()

    expected, rows = await undisturbed(case)
    assert lossy.losses == 1, "nothing was lost: the case does not write"
    assert plain(answer) == expected
    assert plain_rows(await dump(store)) == rows


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_a_call_is_retried_when_the_store_is_unavailable_for_a_moment(
    store: Store, clock: ManualClock, case: Case
) -> None:
    lossy = LossyStore(store)
    act = await case(await create_scene(lossy, clock))
    lossy.loads_to_lose = 2

    answer = await act()

    expected, rows = await undisturbed(case)
    assert plain(answer) == expected
    assert plain_rows(await dump(store)) == rows


async def test_a_job_longer_than_its_lease_renews_and_then_writes(store: Store, clock: ManualClock) -> None:
    scene = await create_scene(store, clock)
    heartbeat = Engine(store, minter=SeededMinter(2))
    held = await scene.held()
    for _ in range(5):
        clock.advance_ms(LEASE_MS - 1)
        assert await heartbeat.renew(held.handle) == Renewed(clock.now + LEASE_MS, 1)

    await scene.engine.append_frame(held.handle, b"late, and in time")
    assert await scene.engine.progress(held.handle, pct=90) == ProgressNoted(held.execution_id)
    page = await heartbeat.read_stream(held.execution_id, 0)
    assert [frame.fields["payload"] for frame in page.frames] == ["late, and in time"]
    clock.advance_ms(LEASE_MS - 1)
    assert await scene.engine.renew(held.handle) == Renewed(clock.now + LEASE_MS, 1)
    clock.advance_ms(LEASE_MS - 1)
    assert await scene.engine.complete(held.handle, result=b"R") == Completed(held.execution_id)


async def test_a_zombie_with_a_cached_lease_changes_nothing(store: Store, clock: ManualClock) -> None:
    scene = await create_scene(store, clock)
    elsewhere = Engine(store, minter=SeededMinter(2))
    held = await scene.held()
    clock.advance_ms(LEASE_MS)
    taken = await claim_one(elsewhere, **WORKER, lease_ttl_ms=LEASE_MS)
    before = await dump(store)

    for late in (
        lambda: scene.engine.complete(held.handle, result=b"late"),
        lambda: scene.engine.fail(held.handle, reason="late"),
        lambda: scene.engine.progress(held.handle, pct=1),
        lambda: scene.engine.delay(held.handle, delay_until=clock.now + 5),
        lambda: scene.engine.renew(held.handle),
        lambda: scene.engine.cancel(held.handle),
    ):
        with pytest.raises(errors.StaleLease):
            await late()

    assert await dump(store) == before
    assert await elsewhere.complete(taken.handle) == Completed(held.execution_id)


@pytest.mark.parametrize("end", ["complete", "fail", "retry", "cancel"])
async def test_a_completion_that_was_superseded_before_the_reload_is_still_recognised(
    store: Store, clock: ManualClock, end: str
) -> None:
    lossy = LossyStore(store)
    scene = await create_scene(lossy, clock)
    elsewhere = Engine(store, minter=SeededMinter(2))
    held = await scene.held(policy=RETRY if end == "retry" else None)
    e = held.execution_id
    ends: dict[str, Act] = {
        "complete": lambda: scene.engine.complete(held.handle, result=b"R"),
        "fail": lambda: scene.engine.fail(held.handle, reason="boom"),
        "retry": lambda: scene.engine.fail(held.handle, reason="flaky"),
        "cancel": lambda: scene.engine.cancel(held.handle),
    }
    lossy.next_loss = Loss.ANSWER
    lossy.after_loss = lambda: elsewhere.set_execution_tag(e, "a.b", "overtaken")

    answer = await ends[end]()

    words = {"complete": "Completed", "fail": "TerminalFailed", "retry": "RetryScheduled", "cancel": "Cancelled"}
    assert type(answer).__name__ == words[end]
    events = [one.event.lease for one in (await dump(store))["events"]]
    assert events == ["acquired", "released"]
    assert await scene.engine.get_execution_tag(e, "a.b") == "overtaken"


@pytest.mark.parametrize("name", ["reclaim_grant", "scheduler_grant", "scheduler_reclaim_grant"])
async def test_the_key_of_a_grant_that_was_written_late_is_returned(
    store: Store, clock: ManualClock, name: str
) -> None:
    async def a_moment_passes() -> None:
        clock.advance_ms(7)

    lossy = LossyStore(store)
    scene = await create_scene(lossy, clock)
    act = await CASES[name](scene)
    lossy.next_loss = Loss.LATE
    lossy.after_loss = a_moment_passes

    granted = await act()

    row = (await store.load((Read(Execution, (granted.execution_id,)),))).rows[0][0]
    assert granted.expires_at_ms == row.granted_until
    assert await scene.engine.verify_grant(granted.execution_id, granted.grant_key) is None


Twice = Callable[[Scene, str], Awaitable[Any]]


async def cancel_in_two_lives(scene: Scene, e: str) -> Any:
    return await scene.engine.cancel_execution(e, reason="stop")


async def expire_in_two_lives(scene: Scene, e: str) -> Any:
    return await scene.engine.expire_execution(e)


async def raise_priority(scene: Scene, e: str) -> Any:
    return await scene.engine.change_priority(e, 50)


AND_BACK: dict[Twice, Twice] = {
    cancel_in_two_lives: lambda scene, e: scene.engine.replay_execution(e),
    expire_in_two_lives: lambda scene, e: scene.engine.replay_execution(e),
    raise_priority: lambda scene, e: scene.engine.change_priority(e, 1),
}


@pytest.mark.parametrize("overtaken", [False, True], ids=["alone", "overtaken"])
@pytest.mark.parametrize("loss", Loss, ids=lambda loss: loss.name.lower())
@pytest.mark.parametrize("act", AND_BACK, ids=lambda act: act.__name__)
async def test_a_repeated_operation_is_not_confused_with_its_first_execution(
    store: Store, clock: ManualClock, act: Twice, loss: Loss, overtaken: bool
) -> None:
    lossy = LossyStore(store)
    scene = await create_scene(lossy, clock)
    elsewhere = Engine(store, minter=SeededMinter(2))
    e = await scene.waiting(priority=1)
    expected = await act(scene, e)
    first = await scene.engine.read_execution_info(e)
    clock.advance_ms(1)
    await AND_BACK[act](scene, e)
    lossy.next_loss = loss
    if overtaken:
        lossy.after_loss = lambda: elsewhere.set_execution_tag(e, "a.b", "overtaken")

    assert await act(scene, e) == expected

    again = await scene.engine.read_execution_info(e)
    assert first is not None
    assert again is not None
    assert (again.public_state, again.priority) == (first.public_state, first.priority)
    events = [one.event for one in (await dump(store))["events"]]
    assert len(events) == 3, [one.outcome or one.operator for one in events]


@pytest.mark.parametrize("loss", [Loss.DOUBT, Loss.ANSWER])
@pytest.mark.parametrize("verb", ["delay", "wait_children"])
async def test_an_operator_parks_the_current_lease_not_a_cached_one(
    store: Store, clock: ManualClock, verb: str, loss: Loss
) -> None:
    lossy = LossyStore(store)
    mine, others = Engine(lossy), Engine(store)
    scene = Scene(others, clock)
    e = await scene.waiting()
    assert await mine.claim("default", **WORKER)

    async def park(engine: Engine) -> None:
        until = {"delay_until": clock.now} if verb == "delay" else {}
        await getattr(engine, verb)(execution_id=e, source="operator_override", **until)

    await park(others)  # emits the event that a second park of the same lease would emit
    await others.promote_delayed(e)
    await others.issue_grant_and_claim(e, lane_id="default", lease_duration_ms=LEASE_MS)
    lossy.next_loss = loss
    await park(mine)

    assert await others.read_execution_state(e) != "active"
    assert [one.event for one in await others.lease_history(e)] == ["acquired", "released"] * 2


@pytest.mark.parametrize("poison", ["nul\0", "half \ud800 pair"])
async def test_an_unstorable_change_in_a_batch_does_not_fail_its_neighbours(
    store: Store, clock: ManualClock, poison: str
) -> None:
    scene = await create_scene(store, clock)
    held = [await scene.held() for _ in range(9)]
    unreadable = await scene.waiting()
    row = (await store.load((Read(Execution, (unreadable,)),))).rows[0][0]
    patch = Patch(Execution, (unreadable,), {"failure_reason": poison})
    change = Change(guards=(seen(row),), writes=(patch,), id=7)

    first, middle, *rest = await asyncio.gather(
        scene.engine.complete(held[0].handle),
        scene.engine.runtime.commit_queue.add(change),
        *(scene.engine.complete(one.handle) for one in held[1:]),
        return_exceptions=True,
    )

    assert isinstance(middle, errors.InvalidInput)
    assert [first, *rest] == [Completed(one.execution_id) for one in held]
    assert (await store.load((Read(Execution, (unreadable,)),))).rows[0][0] == row


async def test_a_store_that_stays_unavailable_is_reported_to_the_caller(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.runtime.runtime.StoreBackoff", lambda: StoreBackoff(retry_for_s=0.05))
    lossy = LossyStore(store)
    scene = await create_scene(lossy, clock)
    held = await scene.held()
    before = await dump(store)
    lossy.loads_to_lose = 1_000_000

    with pytest.raises(errors.StoreUnavailable):
        await scene.engine.describe_execution(held.execution_id)

    assert await dump(store) == before
