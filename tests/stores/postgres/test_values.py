"""Values are sent as arrays and as scalars, and are read back unchanged whatever they contain."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfabric.model.change import Change, Delete, Guard, Insert, Patch, Upsert
from flowfabric.model.execution import Execution, Result
from flowfabric.model.flow import CancelBacklog, PendingMemberCancel
from flowfabric.model.instant import FromNow
from flowfabric.model.states import AttemptType
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.postgres.commit.fragments import DeleteFragment, InsertFragment
from flowfabric.stores.postgres.commit.parameters import IS_LIST, ParameterShapes
from flowfabric.stores.postgres.commit.plan import CommitPlan
from flowfabric.stores.postgres.sql import ParameterNumbering
from flowfabric.stores.queries import Read
from flowfabric.stores.verdicts import Unstorable
from tests.stores.sample_rows import change, event, execution, one, write

UNUSUAL = [
    "",
    "\x1f",
    "\x1e",
    "a\x1fb",
    "\x1ea",
    "-",
    " ",
    "NULL",
    "{a,b}",
    '"',
    "\\",
    "größe\u2028",
    "\U0001f600",
    None,
]


@pytest.mark.parametrize("together", [1, 2, len(UNUSUAL)])
async def test_unusual_texts_are_read_back(pg: PostgresStore, together: int) -> None:
    rows = [execution(f"id-{number}", tags=text) for number, text in enumerate(UNUSUAL)]
    for begin in range(0, len(rows), together):
        await write(pg, *(Insert(row) for row in rows[begin : begin + together]))

    assert [(await one(pg, Execution, row.execution_id)).tags for row in rows] == UNUSUAL

    patches = [Patch(Execution, (row.execution_id,), {"lineage": row.tags}) for row in rows]
    for begin in range(0, len(rows), together):
        await write(pg, *patches[begin : begin + together])

    assert [(await one(pg, Execution, row.execution_id)).lineage for row in rows] == UNUSUAL


@pytest.mark.parametrize("names", [[""], ["", "a"], ["a\x1fb", "c"], ["\x1e"], ["a", "\x1e", "b"]])
async def test_unusual_keys_are_found_again(pg: PostgresStore, names: list[str]) -> None:
    revision = await write(pg, *(Insert(execution(name)) for name in names))
    guarded = [
        change(
            Patch(Execution, (name,), {"priority": 5}),
            guards=[Guard(Execution, (name,), revision)],
            events=[event(name)],
        )
        for name in names
    ]

    assert None not in await pg.commit(guarded)
    found = (await pg.load([Read(Execution, (name,)) for name in names])).rows
    assert [(row.execution_id, row.priority) for (row,) in found] == [(name, 5) for name in names]


async def test_one_column_may_hold_offsets_values_and_null(pg: PostgresStore) -> None:
    moments = {"offset": FromNow(5), "value": 7, "nothing": None}
    for number, names in enumerate(permutations(moments)):
        rows = [execution(f"{number}-{name}", started_at=moments[name]) for name in names]
        [now] = await pg.commit([change(*map(Insert, rows))])
        assert isinstance(now, int)

        found = [(await one(pg, Execution, row.execution_id)).started_at for row in rows]
        assert found == [{"offset": now + 5, "value": 7, "nothing": None}[name] for name in names]

        await write(pg, *(Patch(Execution, (row.execution_id,), {"completed_at": row.started_at}) for row in rows))
        found = [(await one(pg, Execution, row.execution_id)).completed_at for row in rows]
        assert found == [{"offset": now + 5, "value": 7, "nothing": None}[name] for name in names]


async def test_a_column_of_equal_values_that_later_differ_is_sent_correctly(pg: PostgresStore) -> None:
    for number, priorities in enumerate([(1, 1), (2, 2), (1, 2), (3, 3), (None, 3)]):
        rows = [execution(f"{number}-{n}", attempt_index=priority) for n, priority in enumerate(priorities)]
        await write(pg, *map(Insert, rows))
        found = [(await one(pg, Execution, row.execution_id)).attempt_index for row in rows]
        assert found == list(priorities)


async def test_enum_members_are_read_back(pg: PostgresStore) -> None:
    kinds = [None, *AttemptType]
    await write(pg, *(Insert(execution(f"{number}", attempt_type=kind)) for number, kind in enumerate(kinds)))

    found = [(await one(pg, Execution, f"{number}")).attempt_type for number in range(len(kinds))]
    assert found == kinds


async def test_bytes_are_read_back(pg: PostgresStore) -> None:
    contents = [b"", b"\0\x1f\x1e", bytes(range(256)), b"x" * 100_000]
    await write(pg, *(Upsert(Result(f"{number}", content)) for number, content in enumerate(contents)))

    assert [(await one(pg, Result, f"{number}")).payload for number in range(len(contents))] == contents


@pytest.mark.parametrize("wrong", [{"tags": 5}, {"priority": "5"}, {"attempt_type": "initial"}, {"line": "mail"}])
@pytest.mark.parametrize("beside", [0, 3])
async def test_a_value_of_another_type_is_refused(pg: PostgresStore, wrong: dict[str, object], beside: int) -> None:
    rows = [execution(f"{number}", tags=f"{number}", priority=number) for number in range(beside)]

    [verdict] = await pg.commit([change(*map(Insert, rows), Insert(execution("wrong", **wrong)))])

    assert isinstance(verdict, Unstorable)


cells = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.builds(FromNow, st.integers(-100, 100)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.tuples(cells, st.one_of(st.none(), st.text())), min_size=1, max_size=4), max_size=5))
def test_statement_shapes_only_grow(batches: list[list[tuple[object, str | None]]]) -> None:
    habits, before = ParameterShapes(lambda line: 1), (0,) * len(Execution.__struct_fields__)
    for batch in batches:
        rows = [execution(f"{n}", started_at=moment, tags=text) for n, (moment, text) in enumerate(batch)]
        ((piece, _),) = CommitPlan([Change((), tuple(map(Insert, rows)), id=1)], habits).rounds[0]
        assert all(now & then == then for now, then in zip(piece.encodings, before, strict=True))
        before = piece.encodings


def test_a_change_that_is_written_alone_uses_no_arrays_whatever_others_used() -> None:
    habits = ParameterShapes(lambda line: 1)
    many = [Change((), (Insert(execution(f"{n}", tags=f"{n}", priority=n)),), id=n) for n in range(1, 4)]
    ((piece, _),) = CommitPlan(many, habits).rounds[0]
    assert any(habit & IS_LIST for habit in piece.encodings)

    ((piece, values),) = CommitPlan(many[:1], habits).rounds[0]
    assert not any(habit & IS_LIST for habit in piece.encodings)
    assert isinstance(piece, InsertFragment)
    assert piece.implicit_numbers
    assert "unnest" not in piece.sql(ParameterNumbering())
    assert "1" in values


def test_deletes_of_single_rows_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "flowfabric.stores.postgres.commit.plan._may_overlap", lambda *_: pytest.fail("each with each of very many")
    )
    names = [f"{number}" for number in range(100)]
    ack = Change(
        (), (Delete(CancelBacklog, ("f",)), *(Delete(PendingMemberCancel, ("f", name)) for name in names)), id=1
    )

    [deletes] = CommitPlan([ack], ParameterShapes(lambda line: 1)).rounds

    assert [piece.row for piece, _ in deletes if isinstance(piece, DeleteFragment)] == [
        CancelBacklog,
        PendingMemberCancel,
    ]
