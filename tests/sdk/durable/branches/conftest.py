"""Loops of the tests keep the task factory of asyncio, and each test begins without effects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.sdk.durable.branches.steps import effects


@pytest.fixture(autouse=True)
async def _clean() -> AsyncIterator[None]:
    effects.clear()
    yield
    asyncio.get_running_loop().set_task_factory(None)
