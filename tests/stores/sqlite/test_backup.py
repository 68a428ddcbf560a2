"""A copy of a file under load is complete and consistent, and opens like any store."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import apsw
import pytest

from flowfabric.connector import backup, open_engine
from flowfabric.errors import InvalidInput, StoreUnavailable
from flowfabric.model.change import Insert
from flowfabric.model.execution import Execution
from flowfabric.stores.queries import Read
from flowfabric.stores.sqlite import SQLiteStore
from tests.executions import claim_one, new_execution
from tests.stores.sample_rows import change, event, execution, payload, write


def names_in(folder: Path, part: str) -> list[str]:
    return [path.name for path in folder.iterdir() if part in path.name]


def pair(number: int) -> list[Insert]:
    """Return two rows that are always written together."""
    return [Insert(execution(f"n{number}")), Insert(payload(f"n{number}", b"x" * 3000))]


async def test_copies_made_under_load_are_complete_and_consistent(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "ff.db", synchronous="NORMAL")
    await store.open(migrate=True)
    written, at_least, may_stop = 0, 0, False

    async def keep_writing() -> None:
        nonlocal written
        while not may_stop:
            await store.commit([change(*pair(written + more), events=[event(lease="x")]) for more in range(10)])
            written += 10

    load = asyncio.create_task(keep_writing())
    before = os.umask(0)
    for number in range(6):
        at_least, copy = written, tmp_path / f"copy{number}.db"
        while written < at_least + 50:  # noqa: ASYNC110 - so that each copy is made while the file grows
            await asyncio.sleep(0.005)
        at_least = written
        assert await backup(f"sqlite:///{tmp_path}/ff.db", copy) == copy.stat().st_size

        db = apsw.Connection(str(copy))
        assert db.pragma("integrity_check") == "ok"
        ((rows, payloads, events),) = db.execute(
            "SELECT (SELECT count(*) FROM ff_exec_core), (SELECT count(*) FROM ff_payload),"
            " (SELECT count(*) FROM ff_event)"
        )
        db.close()
        assert rows == payloads == events >= at_least
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    os.umask(before)
    may_stop = True
    await load
    assert written > at_least, "writing went on meanwhile"
    await store.close()
    assert not names_in(tmp_path, "partial")


async def test_a_copy_opens_and_continues(tmp_path: Path) -> None:
    async with await open_engine(f"sqlite:///{tmp_path}/ff.db") as engine:
        first = await new_execution(engine, "jobs", execution_kind="job", input_payload=b"", policy={})
        await backup(f"sqlite:///{tmp_path}/ff.db", tmp_path / "copy.db")

    async with await open_engine(f"sqlite:///{tmp_path}/copy.db") as engine:
        claimed = await claim_one(engine, "jobs")
        assert claimed.execution_id == first
        await engine.complete(claimed.handle, result=b"1")


async def test_an_existing_target_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "ff.db")
    await store.open(migrate=True)
    (tmp_path / "copy.db").write_text("precious")

    for target in ("copy.db", "ff.db"):
        with pytest.raises(InvalidInput, match="exists already; name a new file"):
            await backup(f"sqlite:///{tmp_path}/ff.db", tmp_path / target)
    with pytest.raises(InvalidInput, match="there is no folder"):
        await backup(f"sqlite:///{tmp_path}/ff.db", tmp_path / "nowhere" / "copy.db")
    with pytest.raises(InvalidInput, match="there is no file"):
        await backup(f"sqlite:///{tmp_path}/none.db", tmp_path / "new.db")

    assert (tmp_path / "copy.db").read_text() == "precious"
    assert not (tmp_path / "none.db").exists()
    await store.close()


async def test_a_corrupt_file_is_reported_and_leaves_no_copy(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "ff.db")
    await store.open(migrate=True)
    for number in range(50):
        await write(store, *pair(number))
    assert len((await store.load([Read(Execution, ())])).rows[0]) == 50
    await store.close()
    with (tmp_path / "ff.db").open("r+b") as file:
        file.seek(4096 * 20)
        file.write(b"\xff" * 4096 * 10)

    with pytest.raises(StoreUnavailable):
        await backup(f"sqlite:///{tmp_path}/ff.db", tmp_path / "copy.db")
    assert not names_in(tmp_path, "copy")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://localhost/x", "pg_dump"),
        ("http://localhost:9090", "where it runs"),
        ("memory://", "only a sqlite:///path"),
    ],
)
async def test_other_stores_are_refused_with_a_hint_to_their_own_tools(tmp_path: Path, url: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        await backup(url, tmp_path / "copy.db")
