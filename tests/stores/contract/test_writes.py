"""The four kinds of writes, how instants are filled in, and which values no store keeps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Delete, Insert, Patch, Upsert, Write, absent
from flowfabric.model.event import Topic
from flowfabric.model.execution import Attempt, Execution, IdempotencyKey, Payload, QueueKey, Result
from flowfabric.model.flow import Dependency, DependencyKind
from flowfabric.model.instant import NOW, Draft, FromNow
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.states import AttemptRecordState, AttemptType, PublicState
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read
from flowfabric.stores.verdicts import Unstorable
from tests.stores.sample_rows import change, event, execution, one, payload, queued, write


def attempt(name: str, index: int, **fields: Any) -> Attempt[Draft]:
    row: Attempt[Draft] = Attempt(
        name, index, "id", AttemptType.INITIAL, AttemptRecordState.STARTED, NOW, "lease", 1, "w", "i"
    )
    return msgspec.structs.replace(row, **fields)


async def attempts_of(store: Store, name: str) -> list[Attempt]:
    return (await store.load([Read(Attempt, (name,))])).rows[0]


async def test_a_row_is_read_back_as_it_was_written(store: Store, clock: ManualClock) -> None:
    row = queued(
        "{fp:7}:é",
        rank=-(2**62),
        line=QueueKey("mail", "gpu,ram", "tenant-1", 3, True),
        tags='{"k":"π \U0001f600"}',
        public_state=PublicState.SKIPPED,
        attempt_type=AttemptType.FALLBACK,
        created_at=1,
        last_transition_at=2,
        last_mutation_at=2**63 - 1,
        required_capabilities="",
        deadline_at=-(2**63),
    )
    revision = await write(store, Insert(row))

    found = await one(store, Execution, "{fp:7}:é")
    assert found == msgspec.structs.replace(row, revision=revision)
    assert type(found.public_state) is PublicState


async def test_booleans_are_read_back(store: Store) -> None:
    await write(store, Insert(SigningKey("k1", "00", True)), Insert(SigningKey("k2", "00", False)))

    found = (await store.load([Read(SigningKey, ())])).rows[0]
    assert [key.current for key in found] == [True, False]
    assert {type(key.current) for key in found} == {bool}


@pytest.mark.parametrize("content", [None, b"", b"\0", b"a\0b\0", b"\xff\xfe\x80", bytes(range(256)) * 300])
async def test_bytes_are_read_back_exactly(store: Store, content: bytes | None) -> None:
    await write(store, Insert(payload("a", content)))

    assert (await one(store, Payload, "a")).input_payload == content


async def test_instants_are_filled_in_with_one_reading_of_the_stores_clock(store: Store, clock: ManualClock) -> None:
    committed = await store.commit(
        [
            change(Insert(execution("a", delay_until=FromNow(50), rank=FromNow(-7))), Insert(attempt("a", 0))),
            change(Upsert(attempt("b", 0, ended_at=NOW))),
        ]
    )
    assert committed == [clock.now, clock.now]
    row = await one(store, Execution, "a")
    assert (row.created_at, row.delay_until, row.rank) == (clock.now, clock.now + 50, clock.now - 7)
    assert (await one(store, Attempt, "a", 0)).started_at == clock.now
    assert (await one(store, Attempt, "b", 0)).ended_at == clock.now

    clock.advance_ms(10)
    await write(store, Patch(Execution, ("a",), {"completed_at": FromNow(-3), "last_mutation_at": NOW}))
    row = await one(store, Execution, "a")
    assert (row.completed_at, row.last_mutation_at) == (clock.now - 3, clock.now)
    assert row.created_at == clock.now - 10


async def test_a_running_clock_is_read_once_per_commit(store: Store, clock: ManualClock, monkeypatch: Any) -> None:
    def tick(self: ManualClock) -> int:
        self.now += 1
        return self.now

    monkeypatch.setattr(ManualClock, "__call__", tick)
    names = [f"n{number}" for number in range(20)]
    committed = await store.commit([change(Insert(execution(name)), events=[event(name, lease="x")]) for name in names])

    assert len(set(committed)) == 1
    rows = [(await one(store, Execution, name)) for name in names]
    assert {instant for row in rows for instant in (row.created_at, row.last_mutation_at)} == set(committed)
    assert {found.at for found in (await store.feed(Topic.LEASE, 0, 100)).events} == set(committed)


async def test_an_upsert_inserts_a_row_or_replaces_it_whole(store: Store) -> None:
    await write(store, Upsert(attempt("a", 0, lineage="{}", ended_at=5)))
    await write(store, Upsert(attempt("a", 0, suspension_id="s")))

    found = await one(store, Attempt, "a", 0)
    assert (found.lineage, found.ended_at, found.suspension_id) == (None, None, "s")


async def test_a_patch_changes_its_fields_and_no_others(store: Store) -> None:
    await write(store, Insert(queued("a", rank=5, tags="{}")))
    before = await one(store, Execution, "a")
    revision = await write(
        store, Patch(Execution, ("a",), {"line": None, "priority": 3, "public_state": PublicState.ACTIVE})
    )

    expected = {"line": None, "priority": 3, "public_state": PublicState.ACTIVE, "revision": revision}
    assert await one(store, Execution, "a") == msgspec.structs.replace(before, **expected)


async def test_a_patch_of_a_missing_row_is_ignored(store: Store, clock: ManualClock) -> None:
    assert await store.commit([change(Patch(Execution, ("a",), {"priority": 1}))]) == [clock.now]
    assert await one(store, Execution, "a") is None


async def test_a_patch_may_be_ignored_if_a_field_is_already_set(store: Store) -> None:
    first = await write(store, Insert(execution("a")))
    closing = await write(store, Patch(Execution, ("a",), {"completed_at": 1}, unless_set="completed_at"))
    assert closing != first
    await write(store, Patch(Execution, ("a",), {"completed_at": 2}, unless_set="completed_at"))

    row = await one(store, Execution, "a")
    assert (row.completed_at, row.revision) == (1, closing)


async def test_a_delete_removes_all_rows_with_a_key_prefix(store: Store) -> None:
    rows = [attempt(name, index) for name in ("a", "ab", "b") for index in range(3)]
    await write(store, *(Insert(row) for row in rows))

    await write(store, Delete(Attempt, ("a",)), Delete(Attempt, ("b", 1)), Delete(Attempt, ("none",)))
    left = [(row.execution_id, row.attempt_index) for row in (await store.load([Read(Attempt, ())])).rows[0]]
    assert left == [("ab", 0), ("ab", 1), ("ab", 2), ("b", 0), ("b", 2)]


@pytest.mark.parametrize("beside", ["before", "after"])
async def test_a_delete_removes_a_root_that_another_change_of_the_batch_patches(
    store: Store, clock: ManualClock, beside: str
) -> None:
    edge = Dependency("child", "edge", "flow", "above", DependencyKind.SUCCESS_ONLY)
    await write(store, Insert(execution("child")), Insert(edge), Insert(execution("above")))
    gone = change(Delete(Dependency, ("child",)), Delete(Execution, ("child",)))
    emitting = change(
        Patch(Execution, ("above",), {"priority": 5}), Patch(Dependency, ("child", "edge"), {"unfolded_at": NOW})
    )

    assert await store.commit([emitting, gone] if beside == "before" else [gone, emitting]) == [clock.now] * 2

    assert (await store.load([Read(Dependency, ("child",))])).rows == [[]]
    assert (await one(store, Execution, "above")).priority == 5


async def test_the_writes_of_a_change_are_applied_in_order(store: Store) -> None:
    await write(store, Insert(attempt("a", 0)), Insert(attempt("a", 1)))
    await write(
        store,
        Delete(Attempt, ("a",)),
        Insert(attempt("a", 1, lineage="new")),
        Patch(Attempt, ("a", 1), {"ended_at": 9}),
        Upsert(attempt("a", 2)),
        Delete(Attempt, ("a", 2)),
    )
    found = await attempts_of(store, "a")
    assert [(row.attempt_index, row.lineage, row.ended_at) for row in found] == [(1, "new", 9)]


async def test_changes_of_many_shapes_are_written_in_one_batch(store: Store, clock: ManualClock) -> None:
    await write(store, *(Insert(execution(f"n{number}")) for number in range(100)))
    fields: list[dict[str, Any]] = [{"priority": 1}, {"tags": "x", "rank": 2}, {"completed_at": NOW}]

    batch = [
        change(Patch(Execution, (f"n{number}",), fields[number % 3]), *extra)
        for number in range(100)
        for extra in [[Insert(Result(f"n{number}", b"r"))] if number % 2 else [Upsert(payload(f"n{number}"))]]
    ]
    assert await store.commit(batch) == [clock.now] * 100
    for number in range(100):
        row = await one(store, Execution, f"n{number}")
        assert {name: getattr(row, name) for name in fields[number % 3]} == {
            name: clock.now if value is NOW else value for name, value in fields[number % 3].items()
        }
        assert (await one(store, Result, f"n{number}") is None) == (number % 2 == 0)


POISON: list[tuple[str, Any]] = [
    ("a number of more than 64 bits", {"priority": 2**63}),
    ("a very negative number", {"priority": -(2**63) - 1}),
    ("an instant beyond all bounds", {"delay_until": FromNow(2**63 - 1)}),
    ("a text with NUL", {"tags": "a\0b"}),
    ("half a character", {"tags": "\ud800"}),
    ("nothing where something has to be", {"namespace": None}),
]


@pytest.mark.parametrize("fields", [fields for _, fields in POISON], ids=[name for name, _ in POISON])
async def test_an_unstorable_row_refuses_its_own_change_only(store: Store, fields: dict[str, Any]) -> None:
    await write(store, Insert(execution("c")))
    before, end = await one(store, Execution, "c"), await store.feed_end()
    poisons: tuple[Write, ...] = (Insert(execution("b", **fields)), Patch(Execution, ("c",), fields))
    bad = [
        change(Insert(payload(name)), poison, events=[event(name, lease="bad")])
        for name, poison in zip("bc", poisons, strict=True)
    ]
    good = [
        change(Insert(execution(name, line=QueueKey("new", name))), events=[event(name, lease="good")])
        for name in ("a1", "a2", "a3")
    ]

    verdicts = await store.commit([good[0], bad[0], good[1], bad[1], good[2]])

    assert [type(verdict) for verdict in verdicts] == [int, Unstorable, int, Unstorable, int]
    assert [row.execution_id for row in (await store.load([Read(Execution, ())])).rows[0]] == ["a1", "a2", "a3", "c"]
    assert await one(store, Execution, "c") == before
    assert (await store.load([Read(Payload, ())])).rows == [[]]
    assert [found.event.lease for found in (await store.feed(Topic.LEASE, end, 10)).events] == ["good"] * 3
    assert await store.queues() == [QueueKey("new", name) for name in ("a1", "a2", "a3")]
    assert [type(verdict) for verdict in await store.commit([bad[0]])] == [Unstorable]


@pytest.mark.parametrize("fields", [{"lease_epoch": 2**63}, {"reason": "a\0b"}, {"reason": "\udfff"}])
async def test_an_unstorable_event_refuses_its_own_change_only(store: Store, fields: dict[str, Any]) -> None:
    bad = change(Insert(payload("a")), events=[event(lease="x", **fields)])

    verdicts = await store.commit([change(Insert(execution())), bad])

    assert [type(verdict) for verdict in verdicts] == [int, Unstorable]
    assert await one(store, Execution, "a") is not None
    assert await one(store, Payload, "a") is None
    assert (await store.feed(Topic.LEASE, 0, 10)).events == []


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4])
async def test_a_row_that_exists_refuses_the_change_that_inserts_it_and_no_other(store: Store, place: int) -> None:
    await write(store, Insert(execution("there")))
    batch = [change(Insert(execution(name)), events=[event(name, lease="x")]) for name in "abcd"]
    batch.insert(place, change(Insert(payload("there")), Insert(execution("there", priority=9))))

    verdicts = await store.commit(batch)

    assert [verdict is None for verdict in verdicts] == [number == place for number in range(5)]
    assert [(await one(store, Execution, name)) is not None for name in "abcd"] == [True] * 4
    assert (await one(store, Execution, "there")).priority == 0
    assert await one(store, Payload, "there") is None
    assert [found.event.execution_id for found in (await store.feed(Topic.LEASE, 0, 10)).events] == [*"abcd"]


async def test_the_first_of_several_changes_that_insert_one_row_is_written(store: Store) -> None:
    batch = [change(Insert(execution(name)), Insert(payload("x", name.encode()))) for name in "abc"]

    verdicts = await store.commit(batch)

    assert [verdict is not None for verdict in verdicts] == [True, False, False]
    assert (await one(store, Payload, "x")).input_payload == b"a"
    assert [await one(store, Execution, name) for name in "bc"] == [None, None]


async def test_a_change_that_inserts_one_row_twice_is_refused(store: Store) -> None:
    assert await store.commit([change(Insert(execution("a")), Insert(execution("a")))]) == [None]
    assert await one(store, Execution, "a") is None


async def test_every_bad_change_of_a_large_batch_is_found(store: Store) -> None:
    await write(store, *(Insert(execution(f"old{number}")) for number in range(5)))
    batch = []
    for number in range(60):
        name, fields = f"n{number:02}", dict[str, Any]()
        if number % 12 == 5:
            name = f"old{number // 12}"
        elif number % 20 == 3:
            fields = {"tags": "a\0b"}
        batch.append(change(Insert(execution(name, **fields))))

    verdicts = await store.commit(batch)

    kinds = [
        type(None) if number % 12 == 5 else Unstorable if number % 20 == 3 else int for number in range(len(batch))
    ]
    assert [type(verdict) for verdict in verdicts] == kinds
    assert len((await store.load([Read(Execution, ())])).rows[0]) == 5 + kinds.count(int)


@pytest.mark.parametrize("first", [Upsert, Insert])
async def test_a_row_that_must_be_absent_can_be_inserted_and_replaced(
    store: Store, clock: ManualClock, first: type[Upsert | Insert]
) -> None:
    twice = (first(execution("a")), Upsert(execution("a", priority=7)))

    assert await store.commit([change(*twice, guards=[absent(Execution, "a")])]) == [clock.now]
    assert (await one(store, Execution, "a")).priority == 7


async def test_an_unstorable_change_whose_guard_fails_has_no_effect(store: Store, clock: ManualClock) -> None:
    await write(store, Insert(execution("a")))

    refused = change(Insert(execution("a")), guards=[absent(Execution, "a")])
    good = change(Insert(execution("b")))
    assert await store.commit([refused, good]) == [None, clock.now]


async def test_a_load_returns_the_rows_of_each_read_in_key_order_and_the_time(store: Store, clock: ManualClock) -> None:
    await write(store, *(Insert(attempt("a", index)) for index in (10, 2, 1)), Insert(execution("a")))
    for partition in (1, 2):
        await write(store, Insert(IdempotencyKey(partition, "x", "a", 5)))

    wants = [Read(Attempt, ("a",)), Read(Attempt, ("a", 2)), Read(Execution, ("b",)), Read(IdempotencyKey, (2,))]
    loaded = await store.load(wants)
    assert loaded.now == clock.now
    assert [[msgspec.structs.astuple(row)[:2] for row in rows] for rows in loaded.rows] == [
        [("a", 1), ("a", 2), ("a", 10)],
        [("a", 2)],
        [],
        [(2, "x")],
    ]
    assert (await store.load([])).rows == []


async def test_the_time_can_be_read(store: Store, clock: ManualClock) -> None:
    assert await store.ping() == clock.now
    clock.advance_ms(5)
    assert await store.ping() == clock.now
