"""The writer is let through: threads that compute give way while a transaction is open, and only then."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from flowfabric.model.execution import Execution
from flowfabric.rules.change import Insert
from flowfabric.stores.sqlite import SQLiteStore
from flowfabric.stores.sqlite.hurry import HURRY, SWITCH_S, Hurry
from tests.stores.samples import execution, one, write

USUAL = 0.004


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL)
    yield
    sys.setswitchinterval(before)


def interval() -> float:
    return round(sys.getswitchinterval(), 6)  # it is kept in whole microseconds


async def test_the_interval_is_short_while_a_transaction_is_open(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "ff.db")
    await store.open(migrate=True)

    assert await store._writer.do(lambda _: interval()) == SWITCH_S
    assert await store._loader.do(lambda _: interval()) == USUAL
    assert interval() == USUAL
    await store.close()


async def test_a_transaction_that_fails_leaves_the_interval_as_it_was(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "ff.db")
    await store.open(migrate=True)

    def fail(db: apsw.Connection) -> None:
        raise apsw.FullError("no room")

    with pytest.raises(Exception, match="no room"):
        await store._writer.do(fail)
    assert interval() == USUAL
    await write(store, Insert(execution("a")))
    assert (await one(store, Execution, "a")).execution_id == "a"
    await store.close()


async def test_the_last_of_several_transactions_restores_the_interval(tmp_path: Path) -> None:
    stores = [SQLiteStore(tmp_path / f"{name}.db") for name in "ab"]
    for store in stores:
        await store.open(migrate=True)
    begun, let_go = threading.Event(), threading.Event()

    def wait(_: apsw.Connection) -> None:
        begun.set()
        assert let_go.wait(10)

    waiting = asyncio.create_task(stores[0]._writer.do(wait))
    await asyncio.to_thread(begun.wait, 10)
    await write(stores[1], Insert(execution("a")))
    assert interval() == SWITCH_S
    let_go.set()
    await waiting
    assert interval() == USUAL
    for store in stores:
        await store.close()


def test_an_interval_that_somebody_chose_meanwhile_stays() -> None:
    with Hurry():
        sys.setswitchinterval(0.001)
    assert interval() == 0.001


@pytest.mark.parametrize("micros", [1, 57, 100, 199, 201, 4097, 9999, 100_003])
def test_an_interval_comes_back_as_it_was_however_often(micros: int) -> None:
    sys.setswitchinterval(micros / 1e6 + 5e-7)
    before, hurry = sys.getswitchinterval(), Hurry()
    for _ in range(3):
        with hurry:
            assert interval() == min(round(before, 6), SWITCH_S)
    assert sys.getswitchinterval() == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_amid_a_transaction_has_the_usual_interval_and_transactions_of_its_own() -> None:
    read, written = os.pipe()
    with HURRY, HURRY._lock:
        child = os.fork()
        if child == 0:  # pragma: no cover
            seen = [interval()]
            with HURRY:
                seen.append(interval())
            seen.append(interval())
            os.write(written, json.dumps(seen).encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(written)
    with os.fdopen(read) as said:
        assert json.load(said) == [USUAL, SWITCH_S, USUAL]
    assert interval() == USUAL
