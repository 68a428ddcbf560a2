"""An error in the write step of a function: what was written is undone, whichever command fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.errors import Corruption
from flowfabric.model.change import Delete, Insert, Patch, Upsert
from flowfabric.model.execution import Attempt, Execution, Payload, QueueKey, Result
from flowfabric.model.states import AttemptRecordState, AttemptType
from flowfabric.rules.execution.lease import CLAIM, RENEWAL
from flowfabric.stores.claims import ClaimRequest, LeaseIds, LeaseRef
from flowfabric.stores.queries import Read
from flowfabric.stores.valkey.store import ValkeyStore
from tests.stores.sample_rows import MAIL, change, claim_request, event, execution, insert_queued, one, payload, queued
from tests.stores.valkey.contents import contents, library_body, opened
from tests.stores.valkey.test_fast_paths import completed

HOME = "{fp:0}"
ENDING, WAITING = (
    [f"{HOME}:0190c0de-0000-7000-{part}-00000000000{digit}" for digit in range(4)] for part in (8000, 9000)
)
ALIKE_QUEUE = QueueKey("alike")
WRITES = ("HSET", "HDEL", "ZADD", "ZREM", "XADD")


def with_fault(number: int) -> str:
    """Return the library, in which the write with this number fails, with everything after it going on."""
    return f"""
local left = {number}
local function faulty(command, ...)
  for _, name in ipairs({{ '{"', '".join(WRITES)}' }}) do if command == name then left = left - 1 end end
  if left == 0 then
    left = -1
    error('injected')
  end
  return redis.call(command, ...)
end
""" + library_body().replace("redis.call(", "faulty(")


def attempt(name: str, number: int) -> Attempt:
    return Attempt(name, number, "id", AttemptType.INITIAL, AttemptRecordState.STARTED, 1, "lease", 1, "w", "i")


async def _complete(store: ValkeyStore) -> Any:
    gone = change(Delete(Attempt, ("a",)), Patch(Execution, ("a",), {"line": None, "purge_at": 9}), events=[event("a")])
    new = change(Insert(queued("b")), Insert(payload("b")), Upsert(Result("a", b"R")), events=[event("b", lease="y")])
    return await store.commit([gone, new])


async def _purge(store: ValkeyStore) -> Any:
    rows = (Delete(Execution, ("a",)), Delete(Payload, ("a",)), Delete(Attempt, ("a",)))
    return await store.commit([change(*rows), change(Upsert(queued("c", 5)), events=[event("c")])])


async def _claim(store: ValkeyStore) -> Any:
    return await store.claim_rows(claim_request(2))


async def _claim_alike(store: ValkeyStore) -> Any:
    ids = tuple(LeaseIds(f"lease-{n:030}", f"attempt-{n:030}", 1000 + n) for n in range(4))
    return await store.claim_rows(ClaimRequest((ALIKE_QUEUE,), ids, "w", "i", 1000, CLAIM))


async def _end_alike(store: ValkeyStore) -> Any:
    rows = [await one(store, Execution, name) for name in ENDING]
    return await store.commit([completed(row) for row in rows])


async def _renew(store: ValkeyStore) -> Any:
    row = await one(store, Execution, "held")
    lease = LeaseRef("held", row.attempt_index, row.attempt_id, row.lease_id, row.lease_epoch, 70)
    return await store.renew([lease], RENEWAL)


@pytest.mark.parametrize(
    ("act", "writes"),
    [(_complete, 8), (_purge, 8), (_claim, 5), (_claim_alike, 5), (_end_alike, 5), (_renew, 4)],
)
async def test_an_error_at_any_write_leaves_everything_as_it_was(
    vk: ValkeyStore, clock: ManualClock, act: Callable[[ValkeyStore], Awaitable[Any]], writes: int
) -> None:
    await insert_queued(vk, queued("held"))
    assert len((await vk.claim_rows(claim_request(1))).rows) == 1
    for names in (ENDING, WAITING):
        await insert_queued(vk, *(queued(name, line=ALIKE_QUEUE) for name in names))
        if names is ENDING:
            assert len((await _claim_alike(vk)).rows) == 4
    await insert_queued(vk, queued("a", deadline_at=77), queued("c"))
    await vk.commit([change(*(Insert(attempt("a", n)) for n in range(3)), events=[event("a", lease="x")])])
    before, failures = await contents(vk, HOME, feed_ids=True), 0
    for number in range(1, 60):
        async with opened(vk, clock, with_fault(number)) as broken:
            await broken.registry.refresh()
            try:
                await act(broken)
            except Corruption:
                failures += 1
                assert await contents(vk, HOME, feed_ids=True) == before, f"write {number}"
            else:
                break

    assert failures >= writes
    assert await contents(vk, HOME, feed_ids=True) != before


@pytest.mark.parametrize("number", [1, 2000, 10_000])
async def test_a_change_of_many_writes_is_written_whole(vk: ValkeyStore, clock: ManualClock, number: int) -> None:
    names = [f"n{ordinal:05}" for ordinal in range(number)]
    inserted = change(*(Insert(queued(name)) for name in names), events=[event(name, lease="x") for name in names])

    assert await vk.commit([inserted]) == [clock.now]

    assert len((await vk.load([Read(Execution, ())])).rows[0]) == number
    assert await vk.client.read(HOME, "ZCARD", f"{HOME}:exec_core:line") == number
    assert await vk.nonempty_queues("mail") == [MAIL]
    changed = change(*(Upsert(execution(name)) for name in names), *(Delete(Payload, (name,)) for name in names))
    assert await vk.commit([changed]) == [clock.now]
    assert await vk.client.read(HOME, "ZCARD", f"{HOME}:exec_core:line") == 0
    assert await vk.commit([change(*(Delete(Execution, (name,)) for name in names))]) == [clock.now]
    assert set(await contents(vk, HOME, feed_ids=True)) == {f"{HOME}:f".encode()}
