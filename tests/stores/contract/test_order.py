"""Loads without waiting, and the visibility of changes in flight."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import get_type_hints

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Insert
from flowfabric.model.execution import Execution, IdempotencyKey, Payload, QueueKey
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.states import LifecyclePhase
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read
from flowfabric.stores.sqlite import SQLiteStore, connection_thread
from tests.scenarios.waits import until
from tests.stores.sample_rows import change, claim_request, execution, payload, queued, write

WANTS = (
    Read(Execution, ("a",)),
    Read(Execution, ("nobody",)),
    Read(IdempotencyKey, (1,)),
    Read(IdempotencyKey, (1, "y")),
    Read(IdempotencyKey, (2,)),
)


@pytest.fixture
async def filled(store: Store) -> Store:
    row = execution("a", line=QueueKey("mail", '["gpu"]'), has_waits=True, lifecycle_phase=LifecyclePhase.ACTIVE)
    await write(store, Insert(row), Insert(payload("a", b"\0\xff")))
    await write(store, *(Insert(IdempotencyKey(1, digest, "a", 2**62)) for digest in "zxy"))
    return store


@pytest.mark.parametrize("also", [(), (Read(Payload, ("a",)),)], ids=["texts", "bytes"])
async def test_a_load_without_waiting_returns_what_a_load_returns_or_none(
    filled: Store, also: tuple[Read, ...]
) -> None:
    loaded = await filled.load([*WANTS, *also])
    few = [WANTS[0], WANTS[1], WANTS[3], *also]
    peeked = filled.try_load_now(few)

    assert [len(found) for found in loaded.rows[:5]] == [1, 0, 3, 1, 0]
    assert [key.digest for key in loaded.rows[2]] == ["x", "y", "z"]
    assert peeked is None or peeked == await filled.load(few)
    assert await filled.load([*WANTS, *also] * 5) == type(loaded)(loaded.now, loaded.rows * 5)


async def test_many_rows_of_one_kind_are_loaded_like_few(filled: Store) -> None:
    wants = [Read(IdempotencyKey, (1,)), Read(IdempotencyKey, (2,)), *[Read(IdempotencyKey, (1, "y"))] * 70]
    one_by_one = [(await filled.load([want])).rows[0] for want in wants[:3]]

    loaded = await filled.load(wants)
    others = await filled.load([Read(IdempotencyKey, (1,)), Read(IdempotencyKey, (2,))] * 40)
    nobody = await filled.load([Read(Execution, (f"nobody {number}",)) for number in range(80)])

    assert loaded.rows == [*one_by_one, *[one_by_one[2]] * 69]
    assert others.rows == one_by_one[:2] * 40
    assert nobody.rows == [[]] * 80
    assert nobody.now == loaded.now


async def test_many_rows_of_several_kinds_are_loaded_like_few(filled: Store) -> None:
    few = [Read(IdempotencyKey, (1,)), Read(Execution, ("nobody",)), *WANTS]
    one_by_one = [(await filled.load([want])).rows[0] for want in few]
    nobody = [Read(Payload, (f"nobody {number}",)) for number in range(80)]

    loaded = await filled.load([*few * 60, *nobody])

    assert loaded.rows == [*one_by_one * 60, *[[]] * 80]
    assert loaded.now == (await filled.load(few)).now


async def test_every_kind_of_row_is_loaded_alone_and_by_the_hundred(store: Store) -> None:
    for row, table in TABLE.items():
        kinds = get_type_hints(row)
        key = tuple("nobody" if kinds[name] is str else 1 for name in table.key)
        for width in range(1, len(key) + 1):
            assert (await store.load([Read(row, key[:width])])).rows == [[]]
        assert (await store.load([Read(row, key)] * 80)).rows == [[]] * 80


@pytest.mark.parametrize(
    "bad", [{}, {"execution_id": "first"}, {"tags": "a\0b"}], ids=["alone", "collision", "bad value"]
)
async def test_a_claim_sees_the_commit_called_before_it_on_stores_that_execute_in_order(
    store: Store, bad: dict[str, str]
) -> None:
    await write(store, Insert(queued("first", 1)), Insert(payload("first")))
    steps = [change(Insert(queued("second", 2)), Insert(payload("second")))]
    steps += [change(Insert(execution("bad", **bad)))] if bad else []

    verdicts, claimed = await asyncio.gather(store.commit(steps), store.claim_rows(claim_request(2)))

    found = [row.execution_id for row, _ in claimed.rows]
    assert verdicts[0] == claimed.now or not store.executes_in_order
    assert not any(isinstance(verdict, int) for verdict in verdicts[1:])
    assert found == ["first", "second"] or (not store.executes_in_order and found == ["first"])


@pytest.fixture
async def commits(tmp_path: Path) -> tuple[SQLiteStore, list[None]]:
    store, commits = SQLiteStore(tmp_path / "ff.db"), list[None]()

    def hook() -> bool:
        commits.append(None)
        return False

    await store.open(migrate=True)
    await write(store, Insert(execution("there")))
    await store._writer.run(lambda db: db.set_commit_hook(hook))
    commits.clear()
    return store, commits


async def test_the_calls_of_one_loop_iteration_are_one_transaction(
    commits: tuple[SQLiteStore, list[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, committed = commits
    monkeypatch.setattr(connection_thread, "MAX_JOIN_AGE_S", 60)  # however slow the machine is
    steps = [change(Insert(queued(name)), Insert(payload(name))) for name in "abc"]
    brought = threading.Event()

    def wait(_: object) -> None:
        assert brought.wait(60)

    committing = asyncio.gather(store._writer.run(wait), *(store.commit([step]) for step in steps))
    taking = asyncio.ensure_future(store.claim_rows(claim_request(3)))
    await until(lambda: store._writer._queue.qsize() == len(steps) + 1)
    brought.set()
    _, claimed = await asyncio.gather(committing, taking)
    await store.close()

    assert [row.execution_id for row, _ in claimed.rows] == [*"abc"]
    assert len(committed) == 1


@pytest.mark.parametrize("at_fault", [0, 1, 2])
async def test_a_failing_part_of_a_transaction_rolls_back_only_itself(
    commits: tuple[SQLiteStore, list[None]], at_fault: int
) -> None:
    store, _ = commits
    names = [*"abc"]
    steps = [change(Insert(execution(name)), Insert(payload(name))) for name in names]
    steps[at_fault] = change(Insert(execution("new")), Insert(execution("there")))

    answers = await asyncio.gather(*(store.commit([step]) for step in steps))
    kept = (await store.load([Read(Execution, (name,)) for name in ("new", *names)])).rows
    await store.close()

    assert [answer == [None] for answer in answers] == [place == at_fault for place in range(3)]
    assert [bool(found) for found in kept] == [False, *(place != at_fault for place in range(3))]


async def test_a_job_submitted_just_before_close_is_executed(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "ff.db")
    await store.open(migrate=True)
    committing = asyncio.ensure_future(store.commit([change(Insert(execution("last")))]))
    await asyncio.sleep(0)
    await store.close()

    assert [verdict is not None for verdict in await committing] == [True]


async def test_rows_that_cannot_be_read_without_waiting_are_left_to_a_load(tmp_path: Path, clock: ManualClock) -> None:
    store = SQLiteStore(tmp_path / "ff.db", clock)
    wants = [Read(Execution, ("a",))]
    assert store.try_load_now(wants) is None, "it is not open"
    await store.open(migrate=True)
    await write(store, Insert(execution("a")))

    assert store.try_load_now(wants) == await store.load(wants)
    assert store.try_load_now(wants * 50) is None, "that would take long"
    assert store.try_load_now([Read(IdempotencyKey, (1,))]) is None, "there may be many"
    assert store.try_load_now([*wants, Read(SigningKey, (0,))]) is not None, "of these there are few"
    with store._inline_reader._lock:
        assert store.try_load_now(wants) is None, "another thread looks"
    await store.close()
    assert store.try_load_now(wants) is None, "it is closed"
