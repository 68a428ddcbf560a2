"""The functions: they touch only declared keys, write last, and are named by their text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic, time
from typing import Any
from uuid import uuid4

import pytest

from flowfabric.clock import ManualClock
from flowfabric.errors import Corruption
from flowfabric.model.change import Delete, Guard, Insert, Patch
from flowfabric.model.event import Topic
from flowfabric.model.execution import Attempt, Execution, Payload, Result
from flowfabric.model.flow import EdgeGroup
from flowfabric.model.states import AttemptRecordState, AttemptType
from flowfabric.model.suspension import Suspension
from flowfabric.rules.execution.lease import RENEWAL
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.queries import GroupedCount, Read, Scan, Search, Where
from flowfabric.stores.valkey import library as library_module
from flowfabric.stores.valkey.library import Library, library, make_library
from flowfabric.stores.valkey.library_use import KEEP_MS, LIBRARIES, NOTE_S, delete_unused_libraries
from flowfabric.stores.valkey.reads.reader import PAGE
from flowfabric.stores.valkey.store import ValkeyStore
from tests.stores.sample_rows import MAIL, change, claim_request, event, execution, insert_queued, payload, queued
from tests.stores.valkey.contents import NEXT_YEAR_MS, library_body, opened

LINE = re.compile(r"^\+?\d+\.\d+ \[(\d+) (\S+)\] (.*)$")
WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')
KEYLESS = {"TIME", "INFO"}
MAX_LINE = 2**26  # bytes; a line has all arguments of a command, escaped


class Monitor:
    """The commands that the server executes, with those of functions below their call."""

    def __init__(self, database: int) -> None:
        self._database = database
        self.calls: list[tuple[list[str], list[list[str]]]] = []

    def add(self, line: str) -> None:
        found = LINE.match(line)
        if found is None or int(found[1]) != self._database:
            return
        words = WORD.findall(found[3])
        if found[2] == "lua":
            self.calls[-1][1].append(words)
        else:
            self.calls.append((words, []))


@asynccontextmanager
async def monitored(store: ValkeyStore) -> AsyncIterator[Monitor]:
    # Commands of other tests, in other databases of the server, are among the lines, however long they are.
    reader, writer = await asyncio.open_connection(*store.client.address.hosts[0], limit=MAX_LINE)
    last = f"the last one of {uuid4()}"
    writer.write(b"MONITOR\r\n")
    await reader.readline()
    monitor = Monitor(store.client.address.database)
    yield monitor
    await store.client.call("{ff}", "ECHO", last)
    async with asyncio.timeout(20):
        while last not in (line := (await reader.readline()).decode(errors="replace").strip()):
            monitor.add(line)
    writer.close()


async def use_everything(store: ValkeyStore) -> None:
    """Call every function, with rows in all kinds of indexes."""
    name = "{fp:3}:a"
    attempt = Attempt(name, 0, "id", AttemptType.INITIAL, AttemptRecordState.STARTED, 1, "lease", 1, "w", "i")
    await store.commit([change(Insert(queued(name)), Insert(payload(name)), Insert(attempt), events=[event(name)])])
    ((row, _),) = (await store.claim_rows(claim_request(1))).rows
    lease = LeaseRef(name, row.attempt_index or 0, row.attempt_id or "", row.lease_id or "", row.lease_epoch, 50)
    await store.renew([lease], RENEWAL)
    guard = Guard(Execution, (name,), row.revision)
    await store.commit([change(Insert(Result(name, b"r")), Patch(Execution, (name,), {"purge_at": 5}), guards=[guard])])
    await store.load([Read(Execution, (name,)), Read(Attempt, (name,)), Read(Payload, (name,))])
    await store.due(Execution, "purge_at", limit=5)
    await store.scan(Scan(Execution, (Where("line", "=", MAIL),), ("rank", "execution_id")))
    await store.scan(Scan(Execution, (Where("purge_at", ">", 0),)))
    await store.search(Search())
    await store.count_grouped(GroupedCount(Execution, "purge_at", ("lane_id",), 10))
    await store.count_grouped(GroupedCount(Suspension, "due_at", ("lane_id",), 10))
    await store.count_grouped(GroupedCount(EdgeGroup, "waiting_since", ("lane_id",), 10, "downstream_execution_id"))
    await store.nonempty_queues("mail")
    await store.executions_in_missing_queues(10)
    await store.feed(Topic.LEASE, 0, 10)
    await store.history(name, Topic.LEASE, 10)
    await store.commit([change(Delete(Attempt, (name,)), Delete(Execution, (name,)), Delete(Payload, (name,)))])
    await store.trim_feed(2**60, 10)


async def test_functions_touch_only_the_keys_that_were_declared(vk: ValkeyStore) -> None:
    async with monitored(vk) as monitor:
        await use_everything(vk)

    called = set()
    for words, inner in monitor.calls:
        if words[0] in ("FCALL", "FCALL_RO"):
            called.add(words[1].rpartition("_")[2])
            declared = words[3 : 3 + int(words[2])]
            for command in inner:
                touched = command[2] if command[:2] == ["XINFO", "STREAM"] else command[1] if command[1:] else ""
                assert command[0] in KEYLESS or touched in declared, f"{words[1]}: {command[:2]}"
    assert called == set(library().functions) - {"heads", "rewind"}, (
        "all but those for several partitions and failovers"
    )


async def test_a_claim_from_several_partitions_touches_only_declared_keys(vk: ValkeyStore) -> None:
    for partition in (3, 4):
        name = f"{{fp:{partition}}}:a"
        await vk.commit([change(Insert(queued(name)), Insert(payload(name)))])
    async with monitored(vk) as monitor:
        await vk.claim_rows(claim_request(2))

    for words, inner in monitor.calls:
        if words[0].startswith("FCALL"):
            declared = words[3 : 3 + int(words[2])]
            assert all(command[0] in KEYLESS or command[1] in declared for command in inner)
    assert any(words[1].endswith("_heads") for words, _ in monitor.calls if words[0] == "FCALL_RO")


WRITES = ("HSET", "HDEL", "ZADD", "ZREM", "XADD", "XDEL", "XTRIM", "XSETID")


def with_fault(number: int) -> Library:
    """Return the library, in which the call with this number raises an error, unless something was written before."""
    folder = Path(library_module.__file__).with_name("lua")
    body = "\n".join(folder.joinpath(f"{name}.lua").read_text() for name in library_module._FILES)
    wrapped = f"""
local left, wrote = {number}, false
local function faulty(command, ...)
  for _, name in ipairs({{ '{"', '".join(WRITES)}' }}) do if command == name then wrote = true end end
  left = left - 1
  if left == 0 and not wrote then error('injected') end
  return redis.call(command, ...)
end
"""
    return make_library(wrapped + body.replace("redis.call(", "faulty("))


async def dump(store: ValkeyStore) -> dict[bytes, Any]:
    """Return everything that the partition holds."""
    keys = await store.client.read("{fp:0}", "KEYS", "{fp:0}*")
    return {key: await store.client.read("{fp:0}", "DUMP", key) for key in sorted(keys)}


async def _complete(store: ValkeyStore) -> Any:
    gone = change(Delete(Attempt, ("a",)), Patch(Execution, ("a",), {"line": None}), events=[event("a", lease="x")])
    new = change(Insert(queued("b")), Insert(payload("b")), events=[event("b", lease="y")])
    return await store.commit([gone, new])


async def _claim(store: ValkeyStore) -> Any:
    return await store.claim_rows(claim_request(2))


@pytest.mark.parametrize("act", [_complete, _claim])
async def test_an_error_before_the_first_write_leaves_everything_as_it_was(
    vk: ValkeyStore, clock: ManualClock, act: Callable[[ValkeyStore], Awaitable[Any]]
) -> None:
    attempts = [
        Attempt("a", n, "id", AttemptType.INITIAL, AttemptRecordState.STARTED, 1, "lease", 1, "w", "i")
        for n in range(3)
    ]
    await insert_queued(vk, queued("a"))
    await vk.commit([change(*map(Insert, attempts))])
    before, failures = await dump(vk), 0
    for number in range(1, 30):
        broken = ValkeyStore(vk.client.address, clock)
        broken._library = with_fault(number)
        broken.client.library = broken._library.text
        for part in (broken, broken._claimer):
            part._functions = broken._library.functions.__getitem__
        await broken.open(migrate=False)
        try:
            await act(broken)
        except Corruption:
            failures += 1
            assert await dump(vk) == before
        else:
            break
        finally:
            await delete_unused_libraries(broken.client, library(), NEXT_YEAR_MS)
            await broken.close()

    assert failures >= 3, "rows, keys by prefix, indexes or payloads were read before"
    assert await dump(vk) != before


def test_a_library_is_named_by_its_text() -> None:
    one, same, other = make_library("-- a"), make_library("-- a"), make_library("-- b")

    assert one == same
    assert re.fullmatch(r"ff_[0-9a-f]{12}", one.name)
    assert one.name != other.name
    assert not set(one.functions.values()) & set(other.functions.values())


async def test_two_releases_run_side_by_side(vk: ValkeyStore, clock: ManualClock) -> None:
    folder = Path(library_module.__file__).with_name("lua")
    body = "\n".join(folder.joinpath(f"{name}.lua").read_text() for name in library_module._FILES)
    other = ValkeyStore(vk.client.address, clock)
    other._library = make_library(body + "\n-- another release")
    other.client.library = other._library.text
    other._functions = other._library.functions.__getitem__
    await other.open(migrate=False)

    for store, name in ((vk, "a"), (other, "b"), (vk, "c")):
        assert await store.commit([change(Insert(execution(name)))]) == [clock.now]
    assert len((await other.load([Read(Execution, ())])).rows[0]) == 3
    assert other._library.name in await delete_unused_libraries(other.client, library(), NEXT_YEAR_MS)
    assert await vk.commit([change(Insert(execution("d")))]) == [clock.now]
    await other.close()


async def functions_on(store: ValkeyStore) -> set[str]:
    described = await store.client.read("{ff}", "FUNCTION", "LIST", "LIBRARYNAME", "ff_*")
    return {one[one.index(b"library_name") + 1].decode() for one in described}


async def test_a_migration_deletes_the_functions_of_a_release_that_was_unused_for_a_day(
    vk: ValkeyStore, clock: ManualClock
) -> None:
    old, recent, unknown = (make_library(f"-- {name}\n{library_body()}") for name in ("old", "recent", "unknown"))
    now = int(time() * 1000)
    for one, used_at in ((old, now - KEEP_MS - 60_000), (recent, now - KEEP_MS + 60_000), (unknown, None)):
        await vk.client.call("{ff}", "FUNCTION", "LOAD", "REPLACE", one.text)
        if used_at is not None:
            await vk.client.call("{ff}", "HSET", LIBRARIES, one.name, used_at)

    migrated = ValkeyStore(vk.client.address, clock)
    await migrated.open(migrate=True)
    left = await functions_on(vk)
    assert old.name not in left
    assert {recent.name, unknown.name, library().name} <= left
    deleted = await delete_unused_libraries(migrated.client, library(), now + KEEP_MS + 120_000)
    await migrated.close()

    assert {recent.name, unknown.name} <= set(deleted), "a day after it was met first"
    left = await functions_on(vk)
    assert library().name in left
    assert not left & {recent.name, unknown.name}
    noted = {name.decode() for name in await vk.client.read("{ff}", "HKEYS", LIBRARIES)}
    assert noted & {old.name, recent.name, unknown.name, library().name} == {library().name}


async def test_a_release_whose_functions_were_deleted_continues(vk: ValkeyStore, clock: ManualClock) -> None:
    async with opened(vk, clock, library_body() + "\n-- another release") as other:
        assert await other.commit([change(Insert(execution("a")))]) == [clock.now]
        await delete_unused_libraries(vk.client, library(), NEXT_YEAR_MS)
        assert other._library.name not in await functions_on(vk)

        assert await other.commit([change(Insert(execution("b")))]) == [clock.now]
        assert other._library.name in await functions_on(vk)


async def test_a_process_notes_the_use_of_its_functions_from_time_to_time(vk: ValkeyStore, clock: ManualClock) -> None:
    await vk.client.call("{ff}", "HDEL", LIBRARIES, library().name)
    await vk.commit([change(Insert(execution("a")))])
    assert not await vk.client.read("{ff}", "HEXISTS", LIBRARIES, library().name), "noted when the store was opened"

    vk._library_use._noted_at = monotonic() - NOTE_S - 1
    await vk.commit([change(Insert(execution("b")))])

    assert await vk.client.read("{ff}", "HEXISTS", LIBRARIES, library().name)


async def test_a_server_that_lost_its_functions_gets_them_again(vk: ValkeyStore, clock: ManualClock) -> None:
    await vk.client.call("{ff}", "FUNCTION", "DELETE", library().name)

    assert await vk.commit([change(Insert(execution("a")))]) == [clock.now]
    assert (await vk.load([Read(Execution, ("a",))])).rows[0] != []


async def test_lists_are_read_in_short_calls(vk: ValkeyStore) -> None:
    for start in range(0, 3000, 200):
        await vk.commit([change(Insert(execution(f"n{number:06}"))) for number in range(start, start + 200)])
    async with monitored(vk) as monitor:
        assert (await vk.search(Search((Where("tags", "=", "x"),), budget=2500))).after is not None
        await vk.scan(Scan(Execution, (Where("tags", "=", "x"),)))
        await vk.due(Execution, "delay_until", limit=5000)

    rows = [len(command) - 2 for _, inner in monitor.calls for command in inner if command[0] == "HMGET"]
    assert 3000 <= sum(rows) < 9000
    assert max(rows) == PAGE


async def test_a_long_commit_is_sent_in_several_calls(vk: ValkeyStore) -> None:
    async with monitored(vk) as monitor:
        verdicts = await vk.commit([change(Insert(execution(f"n{number}"))) for number in range(450)])

    assert None not in verdicts
    assert sum(words[1].endswith("_commit") for words, _ in monitor.calls if words[0] == "FCALL") == 3
