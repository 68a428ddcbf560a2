"""Many concurrent callers: no row is claimed twice, and changes are atomic and isolated."""

from __future__ import annotations

import asyncio
import random
from itertools import chain

from flowfabric.clock import ManualClock
from flowfabric.model.change import Delete, Guard, Insert, Patch, Upsert
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Execution, Payload, QueueKey, Result
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read
from flowfabric.stores.verdicts import Verdict
from tests.stores.sample_rows import (
    MAIL,
    change,
    claim_request,
    event,
    execution,
    insert_queued,
    one,
    payload,
    queued,
    write,
)


async def test_no_row_is_claimed_twice(store: Store) -> None:
    lines = [MAIL, QueueKey("mail", "gpu"), QueueKey("mail", "", "tenant")]
    rows = [queued(f"n{number:03}", number % 17, line=lines[number % 3]) for number in range(100)]
    await insert_queued(store, *rows)

    claims = await asyncio.gather(*(store.claim_rows(claim_request(7, *lines, prefix=f"{n}-")) for n in range(50)))
    claimed = [row for row, _ in chain.from_iterable(request.rows for request in claims)]
    assert sorted(row.execution_id for row in claimed) == [row.execution_id for row in rows]
    assert len({row.lease_id for row in claimed}) == 100
    assert {row.lease_epoch for row in claimed} == {1}
    events = (await store.feed(Topic.LEASE, 0, 1000)).events
    assert sorted(one.event.lease_id or "" for one in events) == sorted(row.lease_id or "" for row in claimed)


async def test_one_of_many_changes_decided_on_one_revision_is_written(store: Store) -> None:
    revision = await write(store, Insert(execution("a")))
    guard = Guard(Execution, ("a",), revision)
    rivals = [change(Patch(Execution, ("a",), {"priority": number}), guards=[guard]) for number in range(30)]

    answers = await asyncio.gather(*(store.commit([rival]) for rival in rivals))
    winners = [rival for rival, (answer,) in zip(rivals, answers, strict=True) if answer is not None]
    assert len(winners) == 1
    assert (await one(store, Execution, "a")).revision == winners[0].id


async def test_a_cancel_and_a_claim_of_one_row_do_not_both_succeed(store: Store) -> None:
    names = [f"n{number}" for number in range(40)]
    revision = await write(store, *(Insert(queued(name)) for name in names), *(Insert(payload(name)) for name in names))

    async def cancel(name: str) -> str | None:
        gone = change(
            Patch(Execution, (name,), {"line": None, "priority": -1}), guards=[Guard(Execution, (name,), revision)]
        )
        return name if await store.commit([gone]) != [None] else None

    answers = await asyncio.gather(
        *(cancel(name) for name in names), *(store.claim_rows(claim_request(3)) for _ in range(5))
    )
    cancelled = {answer for answer in answers if isinstance(answer, str)}
    claimed = {row.execution_id for answer in answers if not isinstance(answer, str | None) for row, _ in answer.rows}
    assert not cancelled & claimed
    for name in names:
        row = await one(store, Execution, name)
        assert (row.priority == -1, row.lease_id is not None) == (name in cancelled, name in claimed)


async def test_changes_of_two_rows_are_atomic(store: Store) -> None:
    """Transfers between random pairs keep the sum; each is decided on both rows as they were loaded."""
    names = [f"n{number}" for number in range(6)]
    await write(store, *(Insert(execution(name, priority=10)) for name in names))
    chance = random.Random(5)

    async def transfer() -> None:
        while True:
            first, second = chance.sample(names, 2)
            ((giver,), (taker,)) = (await store.load([Read(Execution, (first,)), Read(Execution, (second,))])).rows
            move = change(
                Patch(Execution, (first,), {"priority": giver.priority - 1}),
                Patch(Execution, (second,), {"priority": taker.priority + 1}),
                guards=[
                    Guard(Execution, (first,), giver.revision),
                    Guard(Execution, (second,), taker.revision),
                ],
            )
            if await store.commit([move]) != [None]:
                return

    await asyncio.gather(*(transfer() for _ in range(40)))
    rows = [await one(store, Execution, name) for name in names]
    assert sum(row.priority for row in rows) == 60


async def test_a_load_sees_a_whole_change_or_none_of_it(store: Store) -> None:
    await write(store, Insert(execution("a")), Upsert(Result("a", b"0")))
    ended = False

    async def write_on() -> None:
        nonlocal ended
        for number in range(1, 60):
            step = change(Patch(Execution, ("a",), {"priority": number}), Upsert(Result("a", str(number).encode())))
            await store.commit([step])
        ended = True

    async def check() -> None:
        while not ended:
            ((row,), (result,)) = (await store.load([Read(Execution, ("a",)), Read(Result, ("a",))])).rows
            assert str(row.priority).encode() == result.payload
            await asyncio.sleep(0)

    await asyncio.gather(write_on(), check(), check())


async def test_a_collision_does_not_affect_concurrent_commits(store: Store, clock: ManualClock) -> None:
    await write(store, Insert(execution("claimed")))

    def commit(number: int) -> asyncio.Future[list[Verdict]]:
        line = QueueKey(f"lane-{number // 3}")
        made = [change(Insert(execution(f"n{number}", line=line)), events=[event(lease="x")])]
        if number % 3 == 0:
            made.append(change(Insert(payload(f"n{number}")), Insert(execution("claimed"))))
        return asyncio.ensure_future(store.commit(made))

    answers = await asyncio.gather(*(commit(number) for number in range(30)))
    for number, answer in enumerate(answers):
        assert answer == ([clock.now, None] if number % 3 == 0 else [clock.now])
        assert (await one(store, Execution, f"n{number}")).line == QueueKey(f"lane-{number // 3}")
        assert await one(store, Payload, f"n{number}") is None
    events: list[FeedEvent] = []
    async with asyncio.timeout(20):  # The feed waits for transactions that began before, of any process.
        while len(events) < 30:
            events = (await store.feed(Topic.LEASE, 0, 100)).events
    assert len(events) == 30
    assert len(await store.queues()) == 10


async def test_a_reader_of_the_feed_misses_nothing_while_others_write(store: Store) -> None:
    writers = 5

    async def emit(writer: int) -> None:
        for number in range(20):
            await write(store, events=[event(str(writer), lease="x", details=str(number))])

    async def read() -> list[tuple[str, str]]:
        seen, position = list[tuple[str, str]](), 0
        while len(seen) < writers * 20:
            page = await store.feed(Topic.LEASE, position, 7)
            seen += [(found.event.execution_id, found.event.details or "") for found in page.events]
            position = page.position
            await asyncio.sleep(0)
        return seen

    events, _ = await asyncio.gather(read(), asyncio.gather(*(emit(writer) for writer in range(writers))))
    assert len(events) == len(set(events))
    for writer in range(writers):
        assert [text for name, text in events if name == str(writer)] == [str(number) for number in range(20)]


async def test_an_abandoned_call_leaves_the_store_usable(store: Store) -> None:
    call = asyncio.ensure_future(store.commit([change(Insert(execution("a")), Insert(payload("a")))]))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)

    await write(store, Delete(Execution, ("a",)), Delete(Payload, ("a",)))
    await write(store, Insert(execution("a")))
    assert (await one(store, Execution, "a")).execution_id == "a"
