"""Several processes share one file: they take turns and wake each other, and a forked child does not share a store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import apsw
import pytest

from flowfabric.errors import ForkedProcess
from flowfabric.model.change import Insert
from flowfabric.model.execution import Execution
from flowfabric.stores.queries import Read
from flowfabric.stores.sqlite import SQLiteStore
from flowfabric.stores.sqlite.notifier import SQLiteNotifier
from tests.stores.sample_rows import execution, one, write

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def python(*arguments: str) -> Any:
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.serial
def test_four_processes_use_one_file_without_errors(tmp_path: Path) -> None:
    path = tmp_path / "ff.db"
    asyncio.run(_prepare(path))
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(python("-m", "tests.stores.load_process", str(path), f"w{number}", "2.5"))
            for number in range(4)
        ]
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        reports = [json.loads(worker.communicate("go\n", timeout=60)[0]) for worker in _started(workers)]

    claimed = [name for report in reports for name in report["claimed"]]
    assert len(claimed) == len(set(claimed)) > 0
    rounds = [report["rounds"] for report in reports]
    assert min(rounds) * 8 >= max(rounds), f"nobody may be starved: {rounds}"
    assert max(report["longest"] for report in reports) < 5
    db = apsw.Connection(str(path))
    assert db.pragma("integrity_check") == "ok"
    ((results, positions),) = db.execute(
        "SELECT (SELECT count(*) FROM ff_result), (SELECT count(DISTINCT position) FROM ff_event)"
    )
    assert results == len(claimed)
    assert positions == 3 * len(claimed)
    db.close()


def _started(workers: list[Any]) -> list[Any]:
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    return workers


async def _prepare(path: Path) -> None:
    store = SQLiteStore(path)
    await store.open(migrate=True)
    await store.close()


async def test_stores_that_migrate_concurrently_migrate_once(tmp_path: Path) -> None:
    stores = [SQLiteStore(tmp_path / "ff.db") for _ in range(4)]
    await asyncio.gather(*(store.open(migrate=True) for store in stores))

    await write(stores[0], Insert(execution("a")))
    for store in stores:
        assert (await one(store, Execution, "a")).execution_id == "a"
        await store.close()


@pytest.mark.parametrize("depth", [0, 4], ids=["a short path", "a long path"])
async def test_a_notification_reaches_every_other_store_and_not_the_sender(tmp_path: Path, depth: int) -> None:
    folder = tmp_path.joinpath(*["a-rather-long-name-of-a-folder"] * depth)
    folder.mkdir(parents=True, exist_ok=True)
    stores = [SQLiteStore(folder / "ff.db") for _ in range(3)]
    heard = [asyncio.Queue[frozenset[str]]() for _ in stores]
    for store, hints in zip(stores, heard, strict=True):
        await store.open(migrate=True)
        store.on_notify(hints.put_nowait)

    stores[0].notify(frozenset({"lane:mail", "lane:é"}))
    for hints in heard[1:]:
        assert await asyncio.wait_for(hints.get(), 5) == {"lane:mail", "lane:é"}
    assert [hints.qsize() for hints in heard] == [0, 0, 0]
    for store in stores:
        await store.close()
    assert list((folder / "ff.db-wake").iterdir()) == []


async def test_a_notification_to_a_dead_process_is_lost_and_its_socket_removed(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, sys\n"
        "from flowfabric.stores.sqlite import SQLiteStore\n"
        "async def main():\n"
        "    store = SQLiteStore(sys.argv[1])\n"
        "    await store.open(migrate=True)\n"
        "    store.on_notify(print)\n"
        "    os._exit(0)\n"
        "asyncio.run(main())\n"
    )
    path = tmp_path / "ff.db"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script, str(path)], check=True, timeout=60)
    bells = tmp_path / "ff.db-wake"
    assert len(list(bells.iterdir())) == 1

    store = SQLiteStore(path)
    await store.open(migrate=False)
    store.notify(frozenset({"x"}))
    assert list(bells.iterdir()) == []
    await store.close()


async def test_without_a_socket_the_file_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SQLiteNotifier, "_bind", lambda *_: False)
    watching, writing = SQLiteStore(tmp_path / "ff.db"), SQLiteStore(tmp_path / "ff.db")
    await watching.open(migrate=True)
    heard = asyncio.Queue[frozenset[str]]()
    watching.on_notify(heard.put_nowait)
    await asyncio.sleep(0.05)
    assert heard.empty()

    await write(writing, Insert(execution("a")))
    assert await asyncio.wait_for(heard.get(), 5) == frozenset()  # Something changed; the topic is unknown.
    await watching.close()
    await writing.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_may_not_use_its_parents_store(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "ff.db")
    await store.open(migrate=True)
    await write(store, Insert(execution("a")))
    read, written = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            call = store.load([Read(Execution, ("a",))])
            call.send(None)
        except BaseException as error:
            os.write(written, type(error).__name__.encode())
        os._exit(0)
    await asyncio.to_thread(os.waitpid, child, 0)
    os.close(written)

    with os.fdopen(read) as said:
        assert said.read() == ForkedProcess.__name__
    assert (await one(store, Execution, "a")).execution_id == "a"
    await write(store, Insert(execution("b")))
    await store.close()


async def test_a_closed_store_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = SQLiteStore(tmp_path / "ff.db")
    await store.open(migrate=True)
    await write(store, Insert(execution("a")))
    await one(store, Execution, "a")
    await store.lanes(None, 10)
    assert set(threading.enumerate()) > before

    await store.close()
    await store.close()
    assert set(threading.enumerate()) == before


def test_a_program_that_forgets_to_close_its_store_can_exit(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from flowfabric.stores.sqlite import SQLiteStore\n"
        "async def main():\n"
        "    store = SQLiteStore(sys.argv[1])\n"
        "    await store.open(migrate=True)\n"
        "    await store.ping()\n"
        "    return store\n"
        "kept = asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "ff.db")], timeout=30, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
