"""The file and its side files are accessible to those who may write the file, and to no other user."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.model.change import Insert
from flowfabric.model.execution import Execution
from flowfabric.stores.queries import Read
from flowfabric.stores.sqlite import SQLiteStore, connection_thread
from flowfabric.stores.sqlite.file_lock import _lock_holder
from tests.stores.sample_rows import change, execution, one, write

NOBODY = pwd.getpwnam("nobody")
IS_ROOT = os.geteuid() == 0

# What another user tries; prints what worked.
STRANGER = """
import fcntl, os, socket, sys
worked = []
def attempt(name, act):
    try:
        act()
    except OSError:
        return
    worked.append(name)
path = sys.argv[1]
os.stat(os.path.dirname(path))
for name in ("", "-wal", "-shm", "-lock"):
    attempt(f"read {name}", lambda: os.open(path + name, os.O_RDONLY))
    attempt(f"write {name}", lambda: os.open(path + name, os.O_RDWR))
attempt("lock", lambda: fcntl.flock(os.open(path + "-lock", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB))
attempt("list sockets", lambda: os.listdir(path + "-wake"))
attempt("bind", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).bind(path + "-wake/mine"))
print(*worked, sep=", ")
"""

# Holds the lock until its input ends.
HOLDER = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may read, unlike those of pytest."""
    made = Path(tempfile.mkdtemp(prefix="ff-private-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Return the mode of each file by its name; sockets have random names."""
    found = {path.name: path.lstat() for path in folder.rglob("*")}
    return {
        "socket" if stat.S_ISSOCK(there.st_mode) else name: stat.S_IMODE(there.st_mode) for name, there in found.items()
    }


async def open_store(path: Path) -> SQLiteStore:
    store = SQLiteStore(path)
    await store.open(migrate=True)
    store.on_notify(lambda _: None)
    await write(store, Insert(execution("a")))
    return store


@pytest.mark.usefixtures("umask")
async def test_every_created_file_is_accessible_to_its_user_only(folder: Path) -> None:
    store = await open_store(folder / "ff.db")

    assert modes(folder) == {
        "ff.db": 0o600,
        "ff.db-wal": 0o600,
        "ff.db-shm": 0o600,
        "ff.db-lock": 0o600,
        "ff.db-wake": 0o700,
        "socket": 0o600,
    }
    await store.close()


async def test_a_file_behind_a_symlink_is_private_too(folder: Path) -> None:
    (folder / "link.db").symlink_to(folder / "real.db")
    before = os.umask(0)
    store = await open_store(folder / "link.db")
    os.umask(before)

    assert modes(folder)["real.db"] == 0o600
    await store.close()


async def test_another_user_can_neither_read_nor_lock_nor_listen(folder: Path) -> None:
    store = await open_store(folder / "ff.db")
    stranger = {"user": NOBODY.pw_uid, "group": NOBODY.pw_gid, "extra_groups": []} if IS_ROOT else {}
    command = ["/usr/bin/env", "python3", "-c", STRANGER, str(folder / "ff.db")]
    tried = await asyncio.to_thread(
        lambda: subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd="/",
            env={"PATH": os.defpath},
            **stranger,  # type: ignore[call-overload]
        )
    )

    assert tried.returncode == 0, tried.stderr
    if IS_ROOT:
        assert tried.stdout == "\n"
    else:  # Only root can switch users; the same user may do all of it, which proves that the attempts work.
        assert "lock" in tried.stdout
    await store.close()


async def test_a_lock_file_of_an_earlier_release_is_closed_to_others(folder: Path) -> None:
    (folder / "ff.db-lock").touch(mode=0o666)
    (folder / "ff.db-lock").chmod(0o644)
    (folder / "ff.db-wake").mkdir()
    (folder / "ff.db-wake").chmod(0o755)
    store = await open_store(folder / "ff.db")

    assert (modes(folder)["ff.db-lock"], modes(folder)["ff.db-wake"]) == (0o600, 0o700)
    await store.close()


@pytest.mark.parametrize(
    ("shared", "beside", "wake"),
    [(0o660, 0o660, 0o770), (0o666, 0o666, 0o777), (0o644, 0o600, 0o700), (0o640, 0o600, 0o700)],
    ids=oct,
)
async def test_side_files_are_accessible_to_those_who_may_write_the_file(
    folder: Path, shared: int, beside: int, wake: int
) -> None:
    path = folder / "ff.db"
    await (await open_store(path)).close()
    path.chmod(shared)
    store = await opened_again(path)

    found = modes(folder)
    assert (found["ff.db"], found["ff.db-lock"], found["ff.db-wake"], found["socket"]) == (shared, beside, wake, beside)
    await store.close()


async def opened_again(path: Path) -> SQLiteStore:
    store = SQLiteStore(path)
    await store.open(migrate=True)
    store.on_notify(lambda _: None)
    return store


async def test_a_lock_file_of_a_foreign_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "ff.db"
    await (await open_store(path)).close()
    chown_to_stranger(path.with_name("ff.db-lock"), monkeypatch)

    store = SQLiteStore(path)
    with pytest.raises(StoreUnavailable, match=r"ff\.db-lock belongs to user \d+, .*: remove it") as refused:
        await store.open(migrate=True)
    assert refused.value.source is StoreFault.AUTH
    path.with_name("ff.db-lock").unlink()
    await store.open(migrate=True)
    assert await one(store, Execution, "a")
    await store.close()


async def test_a_socket_folder_of_a_foreign_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "ff.db"
    await (await open_store(path)).close()
    wake = path.with_name("ff.db-wake")
    chown_to_stranger(wake, monkeypatch)
    (wake / "ear").touch()

    watching, writing = SQLiteStore(path), SQLiteStore(path)
    await watching.open(migrate=True)
    heard = asyncio.Queue[frozenset[str]]()
    watching.on_notify(heard.put_nowait)
    await writing.open(migrate=True)
    writing.notify(frozenset({"secret"}))
    await write(writing, Insert(execution("b")))

    assert await asyncio.wait_for(heard.get(), 5) == frozenset(), "the file itself is watched instead"
    assert [entry.name for entry in wake.iterdir()] == ["ear"]
    assert writing._notifier._others() == []
    await watching.close()
    await writing.close()


def chown_to_stranger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file belong to a user who may not write the database; without root, change the caller instead."""
    if IS_ROOT:
        os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)
        path.chmod(0o777)
        return
    real = Path.stat
    stranger = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: stranger + 1)
    database = path.with_name("ff.db").stat()
    fields = [*database]
    fields[4] = stranger + 1
    monkeypatch.setattr(
        Path, "stat", lambda at, **ways: os.stat_result(fields) if at.name == "ff.db" else real(at, **ways)
    )


async def test_root_leaves_no_file_behind_that_the_owner_cannot_use(folder: Path) -> None:
    path = folder / "ff.db"
    await (await open_store(path)).close()
    shutil.rmtree(folder / "ff.db-wake")
    (folder / "ff.db-lock").unlink()
    owner = NOBODY.pw_uid if IS_ROOT else os.geteuid()
    os.chown(path, owner, -1)
    store = await opened_again(path)

    owners = {name: (folder / name).stat().st_uid for name in ("ff.db-lock", "ff.db-wake", "ff.db-wal")}
    assert set(owners.values()) == {owner}
    await store.close()


async def test_waiting_for_the_write_lock_is_bounded_and_an_abandoned_change_is_never_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_thread, "WRITE_TIMEOUT_S", 0.2)
    store = await open_store(folder / "ff.db")
    holder = subprocess.Popen(  # noqa: ASYNC220 - it only starts
        [sys.executable, "-c", HOLDER, str(folder / "ff.db-lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert await asyncio.to_thread(holder.stdout.readline) == "held\n"

    writes = [store.commit([change(Insert(execution(name)))]) for name in ("b", "c", "d")]
    answers = await asyncio.gather(*writes, return_exceptions=True)

    for refused in answers:
        assert isinstance(refused, StoreUnavailable)
        assert (refused.in_doubt, refused.source) == (False, StoreFault.TIMEOUT)
        assert f"ff.db-lock was not free for 0.2 s: process {holder.pid} holds it; nothing was written" in str(refused)
    assert (await one(store, Execution, "a")).execution_id == "a", "reading goes on"

    await asyncio.to_thread(holder.communicate)
    assert await store.commit([change(Insert(execution("e")))]) != [None]
    kept = (await store.load([Read(Execution, ())])).rows[0]
    assert sorted(row.execution_id for row in kept) == ["a", "e"]
    await store.close()


async def test_a_job_that_has_started_is_not_abandoned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_thread, "WRITE_TIMEOUT_S", 0.05)
    store = await open_store(folder / "ff.db")
    looks = 0
    real = connection_thread.ConnectionJob.fail_if_unstarted
    looked = threading.Event()

    def give_up(job: connection_thread.ConnectionJob) -> None:
        nonlocal looks
        looks += 1
        real(job)
        if looks == 3:
            looked.set()

    monkeypatch.setattr(connection_thread.ConnectionJob, "fail_if_unstarted", give_up)
    assert await store._writer.run(lambda db: looked.wait(20)), "three times it was too late to give it up"
    await store.close()


def test_the_holder_of_a_lock_is_found_where_the_system_reports_it(tmp_path: Path) -> None:
    lock, locks = tmp_path / "ff.db-lock", tmp_path / "locks"
    lock.touch()
    inode = lock.stat().st_ino
    locks.write_text(
        f"1: POSIX  ADVISORY  WRITE 11 00:2f:{inode} 0 EOF\n"
        f"2: FLOCK  ADVISORY  WRITE 12 00:2f:{inode + 1} 0 EOF\n"
        f"2: -> FLOCK  ADVISORY  WRITE 13 00:2f:{inode} 0 EOF\n"
        f"3: FLOCK  ADVISORY  WRITE 4242 00:2f:{inode} 0 EOF\n"
    )
    assert _lock_holder(lock, locks) == "process 4242"
    assert _lock_holder(lock, tmp_path / "none") == ""
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert _lock_holder(lock) in ("this process", "")
