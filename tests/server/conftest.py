"""The server on SQLite and on Postgres, asked in-process unless a test needs a real connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.sqlite import SQLiteStore
from tests.conftest import emptied
from tests.server.asking import SECRET, Asking


@pytest.fixture(params=("sqlite", "postgres"))
async def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
    """A store of both kinds that servers run on."""
    store: Store
    if request.param == "sqlite":
        store = SQLiteStore(tmp_path / "ff.db", clock)
    else:
        store = PostgresStore(await emptied(request.getfixturevalue("own_database")), clock)
    await store.open(migrate=True)
    yield store
    await store.close()


@pytest.fixture
async def engine(store: Store) -> AsyncIterator[Engine]:
    engine = Engine(store, settings=Settings(max_concurrent_stream_ops=4))
    await engine.seed_waitpoint_hmac_secret("k1", SECRET)
    yield engine
    await engine.dispatcher.wait_idle()
    await engine.bulk_canceller.close()


@pytest.fixture
def ask(engine: Engine) -> Asking:
    """A client of an open server."""
    return Asking(engine)
