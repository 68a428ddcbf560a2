"""An app on every store, by its URL, with a worker that runs during the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flowfabric import Fabric
from flowfabric.model.states import PublicState
from flowfabric.sdk.run import Run
from flowfabric.sdk.worker.worker import Worker
from tests.client.server_thread import run_server
from tests.client.worlds import see_through_server
from tests.conftest import STORES, emptied
from tests.sdk.worlds import use_store

PLACES = (*STORES, "http")


@pytest.fixture(params=PLACES)
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The URL of an empty store, or of a server on one."""
    async with _address(request, tmp_path) as url:
        yield url


@pytest.fixture(params=[place for place in PLACES if place != "memory"])
async def shared_app(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Fabric]:
    """An app without tasks on a store that other processes and loops can open, too."""
    async with _address(request, tmp_path) as url, Fabric(url) as app:
        yield app


@pytest.fixture(autouse=True)
def through(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """How the app of a world reaches its engine: directly, or through a server; or the store of the world."""
    for app in [value for value in vars(request.module).values() if isinstance(value, Fabric)]:
        monkeypatch.setattr(app, "tasks", dict(app.tasks))  # a test may declare more tasks, in each of its cases
    match getattr(request, "param", "engine"):
        case "engine":
            pass
        case "server":
            see_through_server(monkeypatch)
        case store:
            use_store(request, monkeypatch, store, tmp_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test with a world directly and through a server; in modules that say so, on the other stores, too."""
    if "World" in metafunc.function.__code__.co_names:
        has_store = "url" in metafunc.fixturenames  # beside the world
        stores = STORES[1:] if getattr(metafunc.module, "IS_FOR_EVERY_STORE", False) and not has_store else ()
        metafunc.parametrize("through", ("engine", "server", *stores), indirect=True)


@asynccontextmanager
async def _address(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    file = f"sqlite:///{tmp_path / 'app.db'}"
    match request.param:
        case "memory":
            yield "memory://"
        case "sqlite":
            yield file
        case "http":
            with run_server(file) as server:
                yield server.url
        case "valkey":
            yield request.getfixturevalue("valkey_url")
        case _:
            yield await emptied(request.getfixturevalue("own_database"))


@pytest.fixture
async def file_app(tmp_path: Path) -> AsyncIterator[Fabric]:
    """The same on a file, for tests of processes whose store does not matter."""
    async with Fabric(f"sqlite:///{tmp_path / 'app.db'}") as app:
        yield app


@pytest.fixture
async def app(url: str) -> AsyncIterator[Fabric]:
    """An app without tasks."""
    async with Fabric(url) as app:
        yield app


@asynccontextmanager
async def running_worker(app: Fabric, **ways: Any) -> AsyncIterator[Worker]:
    """Run a worker in the background and drain it at the end."""
    worker = Worker(app, **ways)
    task = asyncio.create_task(worker.work())
    try:
        yield worker
    finally:
        worker.stop()
        await task


async def wait_until_true(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait for a condition that is a plain function."""

    async def holds() -> bool:
        return condition()

    await wait_until(holds, seconds)


async def wait_until(condition: Callable[[], Awaitable[bool]], seconds: float = 10) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - the condition lies in a store
            await asyncio.sleep(0.005)


async def wait_until_suspended(run: Run[Any]) -> None:
    """Wait until a run waits without a worker."""

    async def is_suspended() -> bool:
        return await run.state() is PublicState.SUSPENDED

    await wait_until(is_suspended)
