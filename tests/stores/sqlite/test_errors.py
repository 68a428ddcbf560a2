"""Errors of the file: callers receive errors of the port, no change is half-written, and the store recovers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import apsw
import pytest

from flowfabric.errors import StoreUnavailable
from flowfabric.model.change import Change, Insert, Patch
from flowfabric.model.event import Topic
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.queries import Read
from flowfabric.stores.sqlite import SQLiteStore, connection_thread
from flowfabric.stores.sqlite import store as module
from tests.postgres_install import ROOT
from tests.stores.sample_rows import change, event, execution, one, payload, queued, write
from tests.stores.unavailable import unavailable


class FragileStore(SQLiteStore):
    """A store whose connections can be made to fail."""

    hook: Callable[[apsw.Connection], object] = staticmethod(lambda db: None)

    def _connect(self) -> apsw.Connection:
        db = super()._connect()
        self.hook(db)
        return db


@pytest.fixture
async def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FragileStore]:
    monkeypatch.setattr(module, "BUSY_TIMEOUT_MS", 50)
    store = FragileStore(tmp_path / "ff.db")
    await store.open(migrate=True)
    await write(store, Insert(execution("a")))
    yield store
    await store.close()


async def fail_at(store: FragileStore, step: Change) -> StoreUnavailable:
    with pytest.raises(StoreUnavailable) as failure:
        await store.commit([step])
    assert failure.value.in_doubt is False
    assert isinstance(failure.value.__cause__, apsw.Error)
    return failure.value


async def test_a_full_disk_is_reported_and_retryable(fragile: FragileStore) -> None:
    fragile.hook = lambda db: db.pragma("max_page_count", db.pragma("page_count") + 2)
    await fragile._writer.run(lambda db: fragile.hook(db))
    large = change(
        Patch(Execution, ("a",), {"priority": 9}),
        Insert(payload("a", b"x" * 1_000_000)),
        Insert(execution("b", line=QueueKey("new"))),
        events=[event(lease="x")],
    )

    failure = await fail_at(fragile, large)
    assert isinstance(failure.__cause__, apsw.FullError)
    assert failure.retryable
    assert (await one(fragile, Execution, "a")).priority == 0
    assert (await fragile.load([Read(Execution, ("b",))])).rows == [[]]
    assert await fragile.queues() == []

    await fail_at(fragile, large)
    fragile.hook = lambda db: None
    assert await fragile.commit([large]) != [None]
    assert (await one(fragile, Execution, "b")).line == QueueKey("new")


def test_a_file_size_limit_is_reported_and_retryable(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.stores.file_size_limit", str(tmp_path / "ff.db")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)

    written = found["written"]
    assert written > 0
    assert found["causes"] == [["IOError", True, False]] * 3, "each is reported as something that passes, without doubt"
    assert found["half"] == [written, written], "neither rows nor lines of what failed are there"
    assert found["whole"] == [written + 20, written + 20]
    assert found["sound"] == "ok"


async def test_changes_of_one_transaction_fail_together(fragile: FragileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_thread, "MAX_JOIN_AGE_QUEUED_S", 60.0)  # however slow this machine is
    await fragile._writer.run(lambda db: db.pragma("max_page_count", db.pragma("page_count") + 2))
    small = [change(Insert(execution(f"n{number}", line=QueueKey(f"l{number}")))) for number in range(5)]
    large = change(Insert(payload("a", b"x" * 1_000_000)))

    answers = await asyncio.gather(*(fragile.commit([one]) for one in [*small, large]), return_exceptions=True)
    assert {type(answer) for answer in answers} == {StoreUnavailable}
    assert len((await fragile.load([Read(Execution, ())])).rows[0]) == 1

    assert await asyncio.gather(*(fragile.commit([one]) for one in small))
    assert len((await fragile.load([Read(Execution, ())])).rows[0]) == 6
    assert len(await fragile.queues()) == 5


async def test_a_file_locked_by_another_program_is_reported_and_retryable(
    fragile: FragileStore, tmp_path: Path
) -> None:
    other = apsw.Connection(str(tmp_path / "ff.db"))
    other.execute("BEGIN IMMEDIATE")
    step = change(Insert(execution("b")))

    assert isinstance((await fail_at(fragile, step)).__cause__, apsw.BusyError)
    assert (await one(fragile, Execution, "a")).execution_id == "a"
    other.execute("ROLLBACK")
    assert await fragile.commit([step]) != [None]
    other.close()


@pytest.mark.parametrize("by", ["nothing", "another store", "a copy"])
async def test_a_file_that_was_removed_or_replaced_accepts_no_writes(tmp_path: Path, by: str) -> None:
    path = tmp_path / "ff.db"
    store, aside = SQLiteStore(path), tmp_path / "aside.db"
    await store.open(migrate=True)
    await write(store, Insert(execution("a")))
    path.rename(aside)
    if by == "another store":
        other = SQLiteStore(path)
        await other.open(migrate=True)
        await other.close()
    elif by == "a copy":
        path.write_bytes(aside.read_bytes())
    there = path.exists()

    for attempt in (
        store.commit([change(Insert(execution("b")))]),
        store.load([Read(Execution, ("a",))]),
        store.queues(),
        store.ping(),
    ):
        with pytest.raises(StoreUnavailable, match=r"ff\.db was removed or replaced after it was opened"):
            await attempt
    assert store.try_load_now([Read(Execution, ("a",))]) is None
    assert path.exists() == there, "and nobody makes an empty one of it"

    if by == "nothing":
        aside.rename(path)  # Once it is back, it is usable again.
        assert await store.commit([change(Insert(execution("c")))]) != [None]
        assert await one(store, Execution, "b") is None
    await store.close()


async def test_writes_to_a_removed_file_are_not_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "ff.db"
    store = SQLiteStore(path)
    await store.open(migrate=True)

    def remove_meanwhile(db: apsw.Connection) -> None:
        db.execute("UPDATE ff_schema_version SET applied_at = applied_at")
        path.rename(tmp_path / "aside.db")

    with pytest.raises(StoreUnavailable, match="removed or replaced"):
        await store._writer.run(remove_meanwhile)
    await store.close()


async def test_a_read_only_file_is_reported_and_retryable(fragile: FragileStore) -> None:
    await fragile._writer.run(lambda db: db.pragma("query_only", True))
    step = change(Insert(execution("b")))

    assert isinstance((await fail_at(fragile, step)).__cause__, apsw.ReadOnlyError)
    assert await fragile.commit([step]) != [None]


async def test_a_corrupt_file_is_reported_and_usable_again_after_its_repair(
    fragile: FragileStore, tmp_path: Path
) -> None:
    await fragile.close()
    path = tmp_path / "ff.db"
    good = path.read_bytes()
    path.write_bytes(b"no database at all" * 1000)

    store = SQLiteStore(path)
    with pytest.raises(StoreUnavailable) as failure:
        await store.open(migrate=False)
    assert isinstance(failure.value.__cause__, apsw.NotADBError)
    with pytest.raises(StoreUnavailable):
        await store.load([Read(Execution, ("a",))])
    path.write_bytes(good)
    await store.open(migrate=False)
    assert (await one(store, Execution, "a")).execution_id == "a"
    await store.close()


async def test_a_file_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "no such folder" / "ff.db")
    with unavailable(r"ff\.db: its folder does not exist", in_doubt=False):
        await store.open(migrate=True)

    (tmp_path / "no such folder").mkdir()
    await store.open(migrate=True)
    await store.close()


async def test_a_closed_store_refuses_calls(fragile: FragileStore) -> None:
    await fragile.close()

    with pytest.raises(StoreUnavailable, match="closed"):
        await fragile.ping()
    with pytest.raises(StoreUnavailable, match="closed"):
        await fragile.commit([])


async def test_a_programming_error_is_not_reported_as_a_file_error(fragile: FragileStore) -> None:
    with pytest.raises(ValueError, match="no column"):
        await fragile.due(Execution, "nonsense", limit=1)
    with pytest.raises(KeyError):
        await fragile.commit([change(Insert(event()))])
    await write(fragile, Insert(queued("b")))


@pytest.mark.parametrize("grown", [False, True], ids=["at once", "after the feed has grown"])
async def test_a_cursor_beyond_the_end_of_a_restored_file_is_reported_and_misses_nothing(
    tmp_path: Path, grown: bool
) -> None:
    path = tmp_path / "ff.db"

    async def emit(*names: str) -> int:
        store = SQLiteStore(path)
        await store.open(migrate=True)
        for name in names:
            await write(store, events=[event(name, lease="emitted")])
        end = await store.feed_end()
        await store.close()
        return end

    kept = await emit("kept")
    backup = path.read_bytes()
    lost = await emit("lost-1", "lost-2")
    path.write_bytes(backup)
    if grown:
        await emit("new-1", "new-2", "new-3")

    store = SQLiteStore(path)
    await store.open(migrate=False)
    page = await store.feed(Topic.LEASE, lost, 10)
    assert page.diverged
    names = [found.event.execution_id for found in page.events]
    await write(store, events=[event("newest", lease="emitted")])
    names += [found.event.execution_id for found in (await store.feed(Topic.LEASE, page.position, 10)).events]
    assert names == (["new-1", "new-2", "new-3"] if grown else []) + ["newest"]
    assert not (await store.feed(Topic.LEASE, kept, 10)).diverged
    await store.close()
