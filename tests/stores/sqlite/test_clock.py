"""The file has one clock, whatever the wall clocks of its processes show."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import apsw
import pytest

from flowfabric.clock import SteadyClock, boot_ms, wall_ms
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.sqlite import SQLiteStore
from flowfabric.stores.sqlite.file_clock import MAX_SLEW_MS, STEP_THRESHOLD_MS, WINDOW_MS, FileClock, HostClock
from tests.postgres_install import ROOT
from tests.stores.sample_rows import event, write

HOUR_MS = 3_600_000
START = 1_800_000_000_000


class ManualHostClock(HostClock):
    """A machine whose clocks are set by the test."""

    __test__ = False

    def __init__(self, boot: str = "first boot", wall: int = START) -> None:
        self.boot_id = boot
        self.since_boot = 5_000
        self.offset = wall - self.since_boot
        self.kernel_confirms = False
        self.since_boot_ms = lambda: self.since_boot if self.boot_id else self.wall_ms()

    def wall_ms(self) -> int:
        return self.since_boot + self.offset

    def kernel_agrees(self, wall: int) -> bool:
        return self.kernel_confirms

    def rest(self, length: int) -> None:
        self.since_boot += length


class SecondProcess:
    """A second process of the same machine, with another wall clock."""

    def __init__(self, machine: ManualHostClock, shift: int) -> None:
        self.boot_id = machine.boot_id
        self.since_boot_ms = machine.since_boot_ms
        self.kernel_agrees: Callable[[int], bool] = lambda wall: False
        self.wall_ms: Callable[[], int] = lambda: machine.wall_ms() + shift


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[apsw.Connection]:
    """A connection to a file with our schema and without any time."""
    store = SQLiteStore(tmp_path / "ff.db", clock=lambda: START)
    await store.open(migrate=True)
    await store.close()
    db = apsw.Connection(str(tmp_path / "ff.db"))
    db.pragma("synchronous", "OFF")
    yield db
    db.close()


def renewed(machine: Any, db: apsw.Connection) -> FileClock:
    clock = FileClock(machine)
    clock.refresh_anchor(db)
    return clock


@pytest.mark.parametrize("shift", [HOUR_MS, -HOUR_MS])
def test_processes_with_different_wall_clocks_read_the_same_time(db: apsw.Connection, shift: int) -> None:
    machine = ManualHostClock()
    first, second = renewed(machine, db), renewed(SecondProcess(machine, shift), db)
    for _ in range(5):
        assert first() == second() == machine.wall_ms()
        machine.rest(WINDOW_MS - 1)
        second.refresh_anchor(db)
        first.refresh_anchor(db)


@pytest.mark.parametrize("shift", [HOUR_MS, -HOUR_MS])
def test_a_wall_clock_that_changed_for_one_process_changes_nothing(db: apsw.Connection, shift: int) -> None:
    machine = ManualHostClock()
    clock = renewed(machine, db)
    machine.offset += shift
    for passed in range(10):
        clock.refresh_anchor(db)
        assert clock() == START + passed * WINDOW_MS
        machine.rest(WINDOW_MS)


@pytest.mark.parametrize("behind", [100, MAX_SLEW_MS, STEP_THRESHOLD_MS])
def test_a_clock_that_was_set_forward_is_followed_at_a_tenth_of_the_speed(db: apsw.Connection, behind: int) -> None:
    machine = ManualHostClock()
    machine.kernel_confirms = True
    clock = renewed(machine, db)
    machine.offset += behind
    for _ in range(behind // MAX_SLEW_MS + 2):
        began = clock()
        machine.rest(WINDOW_MS)
        clock.refresh_anchor(db)
        assert WINDOW_MS <= clock() - began <= WINDOW_MS + MAX_SLEW_MS
    assert clock() == machine.wall_ms()


def test_a_file_that_is_far_behind_jumps_to_the_machines_clock(db: apsw.Connection) -> None:
    machine = ManualHostClock()
    machine.kernel_confirms = True
    clock, reader = renewed(machine, db), renewed(machine, db)
    machine.offset += STEP_THRESHOLD_MS + 1  # The machine was paused, or its clock was wrong at first.
    machine.rest(WINDOW_MS)
    clock.refresh_anchor(db)

    assert clock() == machine.wall_ms()
    assert reader() < clock()
    assert reader.read(db) == clock()


def test_a_clock_that_was_set_back_slows_the_file_down_and_never_sets_it_back(db: apsw.Connection) -> None:
    machine = ManualHostClock()
    machine.kernel_confirms = True
    clock = renewed(machine, db)
    machine.offset -= 2 * STEP_THRESHOLD_MS
    times = []
    for _ in range(2 * 11 * 2 * STEP_THRESHOLD_MS // WINDOW_MS):
        machine.rest(WINDOW_MS // 2)
        clock.refresh_anchor(db)
        times.append(clock())
    steps = [after - before for before, after in pairwise(times)]
    assert min(steps) >= WINDOW_MS * 9 // 20 - 1
    assert clock() == machine.wall_ms()


@pytest.mark.parametrize("shift", [-HOUR_MS, 0])
def test_after_a_boot_time_is_never_before_the_latest_time_of_the_file(db: apsw.Connection, shift: int) -> None:
    machine = ManualHostClock()
    clock = renewed(machine, db)
    machine.rest(WINDOW_MS - 1)
    newest = clock()

    again = ManualHostClock("second boot", wall=newest + 60_000 + shift)
    clock = renewed(again, db)

    assert clock() == (again.wall_ms() if shift == 0 else newest + 1)
    assert db.execute("SELECT boot FROM ff_clock").fetchall() == [("second boot",)]


async def test_a_file_without_a_clock_starts_after_its_last_event(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "ff.db", clock=lambda: START + HOUR_MS)
    await store.open(migrate=True)
    await write(store, events=[event(lease="x")])
    await store.close()
    db = apsw.Connection(str(tmp_path / "ff.db"))

    assert renewed(ManualHostClock(), db)() == START + HOUR_MS
    db.close()


def test_without_a_known_boot_time_continues_after_the_wall_clock_was_set_back(db: apsw.Connection) -> None:
    machine = ManualHostClock(boot="")
    clock = renewed(machine, db)
    machine.rest(1_000)
    before = clock()
    machine.offset -= HOUR_MS
    clock.refresh_anchor(db)

    assert before <= clock() <= before + WINDOW_MS
    began = clock()
    machine.rest(5_000)
    assert clock() == began + 5_000


def test_an_anchor_that_was_not_committed_is_not_used(db: apsw.Connection) -> None:
    machine = ManualHostClock()
    clock = FileClock(machine)
    db.exec_trace = lambda cursor, statement, bindings: statement != "COMMIT"
    with pytest.raises(apsw.ExecTraceAbort):
        clock.refresh_anchor(db)
    assert not db.in_transaction
    db.exec_trace = None
    other = renewed(SecondProcess(machine, HOUR_MS), db)
    clock.refresh_anchor(db)

    assert clock() == other() == START + HOUR_MS


def test_a_known_anchor_is_neither_read_nor_written_again(db: apsw.Connection) -> None:
    machine = ManualHostClock()
    clock = renewed(machine, db)
    statements: list[str] = []

    def trace(cursor: apsw.Cursor, statement: str, bindings: Any) -> bool:
        statements.append(statement)
        return True

    db.exec_trace = trace
    for _ in range(9):
        machine.rest(WINDOW_MS // 10)
        clock.refresh_anchor(db)
        clock.read(db)
    assert statements == []
    machine.rest(WINDOW_MS)
    for _ in range(9):
        clock.read(db)
    assert len(statements) == 1, "a reader looks for a new one once a second"


def test_the_kernel_confirms_only_its_own_wall_clock(tmp_path: Path) -> None:
    assert HostClock().boot_id
    assert HostClock().kernel_agrees(wall_ms())
    assert not HostClock().kernel_agrees(wall_ms() + HOUR_MS)
    assert not HostClock(tmp_path).kernel_agrees(wall_ms())
    assert HostClock(tmp_path).boot_id == ""
    assert abs(HostClock(tmp_path).since_boot_ms() - wall_ms()) < 5_000


async def test_the_clock_of_a_memory_store_does_not_follow_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    before, passed = await store.ping(), boot_ms()
    monkeypatch.setattr("time.time_ns", lambda: 0)

    assert 0 <= await store.ping() - before <= boot_ms() - passed + 1
    assert SteadyClock()() < HOUR_MS


# --- processes whose wall clocks are wrong


@asynccontextmanager
async def process(path: Path, shift: int, role: str) -> AsyncIterator[Callable[..., Any]]:
    """Start a process with a shifted wall clock; return a function that sends a command and waits for the answer."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.stores.shifted_clock_process", str(path), str(shift), role),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    sends, answers = child.stdin, child.stdout

    async def call(*words: object) -> Any:
        sends.write(json.dumps(words).encode() + b"\n")
        answer = await asyncio.wait_for(answers.readline(), 60)
        return json.loads(answer)

    try:
        yield call
    finally:
        child.kill()
        await child.communicate()


@pytest.mark.parametrize("shift", [HOUR_MS, -HOUR_MS])
async def test_a_process_with_a_wrong_clock_claims_nothing_from_a_live_worker(tmp_path: Path, shift: int) -> None:
    path = tmp_path / "ff.db"
    async with process(path, 0, "right") as right, process(path, shift, "wrong") as wrong:
        created = await right("create")
        assert await right("claim", 30_000) == created
        assert await wrong("claim", 30_000) is None, "the lease holds by the file's clock"
        assert abs(await right("now") - await wrong("now")) < 5_000
        assert await right("complete") == "completed"


@pytest.mark.parametrize("shift", [HOUR_MS, -HOUR_MS])
async def test_a_takeover_takes_no_longer_if_the_clock_was_changed_meanwhile(tmp_path: Path, shift: int) -> None:
    path = tmp_path / "ff.db"
    async with process(path, 0, "right") as right, process(path, 0, "changed") as changed:
        created = await right("create")
        assert await right("claim", 1_000) == created
        await changed("shift", shift)
        began = boot_ms()
        while await changed("claim", 30_000) is None:
            assert boot_ms() - began < 15_000, "an hour would be too long"
        assert await right("complete") == "stale_lease"
        assert await changed("complete") == "completed"


@pytest.mark.parametrize("shift", [HOUR_MS, -HOUR_MS])
async def test_a_delay_set_by_one_process_ends_on_time_for_another(tmp_path: Path, shift: int) -> None:
    path = tmp_path / "ff.db"
    async with process(path, shift, "wrong") as wrong, process(path, 0, "right") as right:
        created = await wrong("create")
        assert await wrong("claim", 30_000) == created
        began = boot_ms()
        await wrong("delay", 2_000)
        while await right("claim", 30_000) is None:
            assert boot_ms() - began < 20_000
        assert boot_ms() - began >= 1_800
