"""The pytest fixture `world`, available in every project that has FlowFabric installed.

    from shop import app, deploy

    async def test_silence_is_a_no(world):
        run = await deploy.submit("v2")
        await world.advance("3d")
        assert await run.result() == "rejected"

The app is the `Fabric` in the test module, or the one of the tasks in it. If there are several,
`@pytest.mark.world(app, seed=7)` selects one; other arguments go to `World`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.testing.world import World

try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:  # another plugin, such as anyio's, takes care of async fixtures
    async_fixture = pytest.fixture  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "world(app, **options): the app of the `world` fixture, and its options")


@async_fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A `World` with the app of this test."""
    from flowfabric.testing.world import World

    mark = request.node.get_closest_marker("world")
    options: dict[str, Any] = dict(mark.kwargs) if mark else {}
    app = mark.args[0] if mark and mark.args else _find_app(vars(request.module))
    async with World(app, **options) as entered:
        yield entered


def _find_app(names: dict[str, Any]) -> Fabric:
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.task import Task

    apps = {id(value): value for value in names.values() if isinstance(value, Fabric)}
    apps = apps or {id(value.app): value.app for value in names.values() if isinstance(value, Task)}
    if len(apps) != 1:
        found = "none" if not apps else f"{len(apps)} of them"
        raise pytest.UsageError(f"world: it needs the module's app and found {found}; use @pytest.mark.world(app)")
    return next(iter(apps.values()))
