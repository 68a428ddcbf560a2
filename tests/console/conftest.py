"""A filled sample on each store, a server with the console on it, and people with and without a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from flowfabric.server import App, ServerSettings, create_app
from flowfabric.settings import Secret
from tests.conftest import STORES, emptied, emptied_valkey
from tests.console.browser import Visit, Watched, open_browser
from tests.console.sample import TOKEN, Sample, sample_world
from tests.console.visitor import Visitor
from tests.server.api_client import run_server


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=STORES)
async def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sample]:
    """Runs in every state, on each store."""
    folder: Path = tmp_path_factory.mktemp("console")
    match request.param:
        case "memory":
            url = "memory://"
        case "sqlite":
            url = f"sqlite:///{folder / 'app.db'}"
        case "valkey":
            url = emptied_valkey()
        case _:
            url = await emptied(request.getfixturevalue("own_database"))
    async with sample_world(url) as sample:
        yield sample


@pytest.fixture
def app(sample: Sample) -> App:
    """A server that needs a token."""
    return create_app(sample.engine, ServerSettings(api_token=Secret(TOKEN)))


@pytest_asyncio.fixture(loop_scope="module")
async def visitor(app: App) -> Visitor:
    """A person who has logged in with the token of the settings."""
    visitor = Visitor(app)
    await visitor.log_in(TOKEN, "Alice")
    return visitor


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base(sample: Sample) -> AsyncIterator[str]:
    """The URL of a real server that needs a token."""
    async with run_server(create_app(sample.engine, ServerSettings(api_token=Secret(TOKEN)))) as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with open_browser() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def visit(browser: Browser, base: str) -> AsyncIterator[Visit]:
    """Open a browser context, logged in unless `token` is empty; what must not happen is checked at the end."""
    opened: list[Watched] = []

    async def visit(token: str = TOKEN, name: str = "Alice", **options: Any) -> Watched:
        watched = Watched(await browser.new_context(**options), base)
        watched.context.set_default_timeout(20_000)
        opened.append(watched)
        if token:
            await (await watched.log_in(token, name)).close()
        return watched

    yield visit
    for watched in opened:
        await watched.close()
