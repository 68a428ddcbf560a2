"""Bulk inserts: many new rows that differ in a few columns equal the same rows inserted one by one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import BulkInsert, Delete, Insert, Patch, absent
from flowfabric.model.execution import Attempt, Execution, Payload, QueueKey
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import AttemptRecordState, AttemptType, PublicState
from flowfabric.stores.port import Store
from flowfabric.stores.verdicts import Unstorable
from tests.stores.sample_rows import change, claim_request, execution, one, payload, queued, write

NAMES = [f"{{fp:7}}:{number}" for number in range(300)]


def rows_of(names: list[str], **fields: Any) -> BulkInsert:
    return BulkInsert(queued("model", **fields), {"execution_id": names})


def payloads_of(names: list[str], contents: list[bytes | None]) -> BulkInsert:
    return BulkInsert(payload("model"), {"execution_id": names, "input_payload": contents})


async def test_bulk_inserted_rows_equal_rows_inserted_one_by_one(store: Store, clock: ManualClock) -> None:
    model = queued(
        "model",
        line=QueueKey("mail", "gpu", "tenant-1", 3),
        rank=FromNow(-7),
        deadline_at=FromNow(50),
        tags='{"k":"π"}',
        public_state=PublicState.SKIPPED,
    )
    contents = [b"", b"\0", None, *(f"{number}".encode() for number in range(297))]
    copies = (BulkInsert(model, {"execution_id": NAMES}), payloads_of(NAMES, contents))

    revision = await write(store, *copies)

    clock.advance_ms(5)
    for name, content in list(zip(NAMES, contents, strict=True))[::50]:
        found = await one(store, Execution, name)
        other = change(Insert(msgspec.structs.replace(model, execution_id="other")))
        assert await store.commit([other]) != [None]
        twin = await one(store, Execution, "other")
        instants = {"created_at", "last_transition_at", "last_mutation_at", "rank", "deadline_at"}
        earlier = {field: getattr(twin, field) - 5 for field in instants}
        assert found == msgspec.structs.replace(twin, execution_id=name, revision=revision, **earlier)
        assert await one(store, Payload, name) == payload(name, content)
        await write(store, Delete(Execution, ("other",)))


async def test_bulk_inserted_rows_are_claimed_in_order(store: Store) -> None:
    names = sorted(NAMES[:20])
    await write(store, rows_of(names), payloads_of(names, [name.encode() for name in names]))

    claimed = await store.claim_rows(claim_request(30))

    assert [row.execution_id for row, _ in claimed.rows] == names
    assert [given.input_payload for _, given in claimed.rows] == [name.encode() for name in names]


@pytest.mark.parametrize("known", [NAMES[0], NAMES[150], NAMES[299]])
async def test_one_existing_row_refuses_the_whole_bulk_insert(store: Store, known: str) -> None:
    await write(store, Insert(execution(known)))

    assert await store.commit([change(rows_of(NAMES), payloads_of(NAMES, [b""] * 300))]) == [None]

    others = [name for name in NAMES if name != known]
    assert [await one(store, Execution, name) for name in others[::60]] == [None] * 5
    assert await one(store, Payload, known) is None


async def test_two_rows_with_one_key_are_refused(store: Store) -> None:
    assert await store.commit([change(rows_of(["a", "b", "a"]))]) == [None]

    assert await one(store, Execution, "b") is None


async def test_a_change_whose_guard_fails_inserts_none_of_its_rows(store: Store, clock: ManualClock) -> None:
    await write(store, Insert(execution("there")))

    verdicts = await store.commit(
        [
            change(rows_of(["a", "b"]), guards=[absent(Execution, "there")]),
            change(rows_of(["c", "d"]), guards=[absent(Execution, "c")]),
            change(rows_of(["e"]), not_after=clock.now - 1),
            change(rows_of(["f"])),
        ]
    )

    assert [verdict is not None for verdict in verdicts] == [False, True, False, True]
    found = [name for name in "abcdef" if await one(store, Execution, name) is not None]
    assert found == ["c", "d", "f"]


async def test_a_bulk_insert_may_be_combined_with_other_writes(store: Store) -> None:
    await write(store, Insert(execution("there")), Insert(attempt("there")))

    await write(
        store,
        Delete(Attempt, ("there",)),
        Patch(Execution, ("there",), {"priority": 4}),
        rows_of(["a", "b"]),
        BulkInsert(attempt("there"), {"attempt_index": [5, 6]}),
        Insert(execution("c")),
    )

    assert (await one(store, Execution, "there")).priority == 4
    assert [(await one(store, Execution, name)).execution_id for name in "abc"] == ["a", "b", "c"]
    assert await one(store, Attempt, "there", 0) is None
    assert (await one(store, Attempt, "there", 5)).attempt_index == 5


async def test_a_column_may_hold_an_instant_in_one_bulk_insert_and_an_offset_in_the_next(
    store: Store, clock: ManualClock
) -> None:
    await write(store, rows_of(["a", "b"], delay_until=FromNow(9)))
    await write(store, rows_of(["c", "d"], delay_until=5))
    await write(store, rows_of(["e", "f"], delay_until=None))
    await write(store, BulkInsert(execution("model"), {"execution_id": ["g", "h"], "delay_until": [FromNow(1), 2]}))

    found = [(await one(store, Execution, name)).delay_until for name in "abcdefgh"]
    assert found == [clock.now + 9] * 2 + [5] * 2 + [None] * 2 + [clock.now + 1, 2]


@pytest.mark.parametrize(
    "own",
    [
        {"execution_id": ["a", "nul\0"]},
        {"execution_id": ["a", None]},
        {"execution_id": ["a", "b"], "colour": ["red", "blue"]},
        {"execution_id": ["a", "b"], "priority": [1, "two"]},
    ],
)
async def test_a_value_that_no_store_can_keep_refuses_the_whole_bulk_insert(store: Store, own: dict[str, Any]) -> None:
    verdicts = await store.commit([change(BulkInsert(execution("model"), own)), change(rows_of(["good"]))])

    assert [type(verdict) for verdict in verdicts] == [Unstorable, int]
    assert await one(store, Execution, "a") is None


@pytest.mark.parametrize("own", [{}, {"execution_id": ["a", "b"], "priority": [1]}])
def test_columns_of_unequal_length_are_a_programming_error(own: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a bulk insert needs equally many values"):
        BulkInsert(execution("model"), own)


def attempt(name: str) -> Attempt[FromNow]:
    return Attempt(name, 0, "id", AttemptType.INITIAL, AttemptRecordState.STARTED, NOW, "lease", 1, "w", "i")
